"""Headline experiments of the systems that this library follows, one command for all of them.

    python benchmarks/experiments.py                           all, each in 8 minutes at the size of this device
    python benchmarks/experiments.py --parts fusion --resume   some; goes on where a run with the same commit was cut
    python benchmarks/experiments.py --quick --out DIR         a look whether they run

Each prints its table, draws the figure of its page, if it has one, and writes rows as they come into
``results/experiments-DEVICE-COMMIT.json``. A complete run replaces older results of the same experiment; ``python
benchmarks/tables.py`` then writes it into its page. Timings are medians of interleaved repeats after a warm-up,
compilation left out.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from common import reporting, resumable_run
from papers import atari, atari_score, framework_survey, fusion, gpu_shares, gradient_sums, time_survey

RESULTS, DOCS = reporting.RESULTS, reporting.RESULTS.parents[1] / "docs"
Sizes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Experiment:
    """One entry of the list."""

    system: str  # whose experiment it is
    page: str  # where its table stands, and what the system's own numbers are
    sizes: Mapping[str, Sizes]  # for ``cpu``, ``cuda`` and ``quick``, by the name of what is varied
    measure: Callable[[resumable_run.Ladder, Sizes], None]  # adds rows whose part is the experiment's name
    table: Callable[[Sequence[reporting.Row]], list[str]]  # of its rows, as lines of markdown
    figure: Callable[[Sequence[reporting.Row]], reporting.Drawing] | None = None  # of its page, if it has one


_STEPS = (1, 4, 16, 64, 256, 1024)
# On a GPU time may run out: the extremes, and what the papers show, come first.
_FEW, _MANY = (64, 1024, 8192), (64, 1 << 20, 1 << 14, 1 << 17, 1024)
_GLEESON = partial(Experiment, "vectorisation and kernel fusion (Gleeson et al., 2022)", "docs/kernels.md")
_CULE = partial(Experiment, "CuLE (Dalton et al., 2020)", "docs/coming_from_cule.md")
_GMI = partial(Experiment, "GPU multiplexing (GMI-DRL, 2025)")


def _score_sizes(*games: str, **sizes: int | None) -> dict[str, tuple[Any, ...]]:
    return {"game": games or ("Pong", "Breakout"), **{name: (size,) for name, size in sizes.items()}}


EXPERIMENTS = {
    "fusion": _GLEESON(
        {
            "cpu": {"K": _STEPS, "N": _FEW, "W": (0, 60, 124, 508)},
            "cuda": {"K": _STEPS, "N": _MANY, "W": (0, 124, 508, 60)},
            "quick": {"K": (1, 4), "N": (8, 16), "W": (0, 12)},
        },
        fusion.measure_fusion, fusion.fusion_table, fusion.fusion_lines,
    ),
    "compilers": _GLEESON(
        {"cpu": {"K": (1, 64), "N": _FEW}, "cuda": {"K": (1, 64), "N": _MANY}, "quick": {"K": (1, 4), "N": (8,)}},
        fusion.measure_compilers, fusion.compilers_table, fusion.compilers_lines,
    ),
    "atari": _CULE(
        {
            "cpu": {"game": ("Pong", "Breakout"), "N": (1, 8, 32, 128), "CPU engines": (1, 8, 32, 128)},
            "cuda": {
                "game": ("Breakout",), "N": (4096, 32768, 1, 1024, 128, 512, 16384, 8192, 32),
                "CPU engines": (1, 128, 1024, 4096),
            },
            "quick": {"game": ("Pong",), "N": (1, 2), "CPU engines": (2,)},
        },
        atari.measure_atari, atari.atari_table, atari.atari_lines,
    ),
    "atari_score": _CULE(
        {
            "cpu": _score_sizes(steps=6000, n_envs=40, on_cpu=8, limit=300, evaluations=4, episodes=8, seconds=60),
            "cuda": _score_sizes(
                steps=8_000_000, n_envs=1200, on_cpu=120, limit=None, evaluations=4, episodes=32, seconds=230
            ),
            "quick": _score_sizes(
                "Pong", steps=480, n_envs=20, on_cpu=2, limit=8, evaluations=1, episodes=2, seconds=60
            ),
        },
        atari_score.measure_score, atari_score.score_table, atari_score.score_lines,
    ),
    "atari_starts": _CULE(
        {
            "cpu": {"N": (64,), "later": (100,)}, "cuda": {"N": (512, 4096, 32768), "later": (250,)},
            "quick": {"N": (2,), "later": (2,)},
        },
        atari.measure_starts, atari.starts_table, atari.starts_bars,
    ),
    "atari_layout": Experiment(
        "Atari consoles of ours: the numbers in rlstruct/atari/machine.py", "docs/coming_from_cule.md",
        {
            "cpu": {"N": (8,), "threads": (32,), "apart": (1,)},
            "cuda": {"N": (4096, 32768), "threads": (64, 32, 128, 256), "apart": (1, 32, 16, 8, 2)},
            "quick": {"N": (2,), "threads": (32,), "apart": (1,)},
        },
        atari.measure_layout, atari.atari_table, atari.layout_bars,
    ),
    "survey": Experiment(
        "RL-Scope (Gleeson et al., MLSys 2021)", "docs/profiling.md",
        {
            "cpu": {"ms": (4_000,), "workers": (0, 2)}, "cuda": {"ms": (1_000,), "workers": (16, 0, 4)},
            "quick": {"ms": (50,), "workers": (0,)},
        },
        time_survey.measure_survey, time_survey.survey_table, time_survey.survey_bars,
    ),
    "frameworks": Experiment(
        "RL-Scope (Gleeson et al., MLSys 2021)", "docs/profiling.md",
        {
            "cpu": {"rounds": (5,)}, "cuda": {"rounds": (5,)}, "quick": {"rounds": (1,)},
        },
        framework_survey.measure_frameworks, framework_survey.frameworks_table, framework_survey.frameworks_bars,
    ),
    "sums": _GMI(
        "docs/coming_from_gmi_drl.md",
        {
            "cpu": {"GPUs": (2,), "m": (3, 2), "calls": (20,)},
            "cuda": {"GPUs": (8, 4, 2, 1), "m": (3, 2, 4), "calls": (50,)},
            "quick": {"GPUs": (1,), "m": (2,), "calls": (2,)},
        },
        gradient_sums.measure_sums, gradient_sums.sums_table, gradient_sums.sums_bars,
    ),
    **{
        kind: _GMI(
            "docs/sharing_a_gpu.md",
            {
                "cpu": {"m": (2,), "CartPole-v1": poles, "ALE/Pong-v5": pongs},
                "cuda": {
                    "m": (4, 10, 2, 7), "CartPole-v1": (1 << 14, 1 << 16, 4096), "ALE/Pong-v5": (2048, 512),
                },
                "quick": {"m": (2,), "CartPole-v1": (8,)},
            },
            partial(gpu_shares.measure, kind), partial(gpu_shares.tabulate, kind), partial(gpu_shares.bars, kind),
        )
        # An update takes longer than a batch.
        for kind, poles, pongs in (("serving", (64, 512, 4096), (8, 32)), ("training", (16, 64), (2, 4)))
    },
}  # fmt: skip


class Run(resumable_run.Ladder):
    """A run of some experiments."""

    name = "experiments"


def measure(name: str, run: Run) -> None:
    """Take one experiment: rows, table, and figure if its page has one."""
    one = EXPERIMENTS[name]
    print(f"\n## {name}: {one.system}, {one.page}\n", flush=True)
    one.measure(run, one.sizes["quick" if run.quick else run.device.type])
    own = rows_in(run.rows, name)
    if not any("left_out" not in row for row in own):
        return
    print("\n".join(one.table(own)), flush=True)
    figure = one.figure(own) if one.figure is not None else None
    if figure and importlib.util.find_spec("matplotlib") is not None:
        shown = run.device.type == "cpu" and run.path.parent == RESULTS
        path = DOCS / f"{name}.png" if shown else run.path.with_name(f"{run.path.stem}-{name}.png")
        figure.draw(path)
        print(f"Drawn: {path}")


def rows_in(rows: Sequence[reporting.Row], name: str) -> list[reporting.Row]:
    """Return the rows of an experiment, but those that say of the whole of it that it was cut or failed."""
    return [row for row in rows if row["part"] == name and row.keys() != {"part", "left_out"}]


def forget_older(run: Run, names: Sequence[str]) -> None:
    """Remove older results of experiments that this run has completed on the same device."""
    cut = {row["part"] for row in run.rows if row.get("left_out") == resumable_run.NO_TIME}
    ending = run.path.stem.rpartition("-")[2]
    for name, path in product(set(names) - cut, run.path.parent.glob(run.path.name.replace(ending, "*"))):
        if path != run.path:
            found = json.loads(path.read_text())
            found["rows"] = [row for row in found["rows"] if row["part"] != name]
            path.write_text(json.dumps(found, indent=1) + "\n")
            if not found["rows"]:
                path.unlink()


def rows_of(name: str, device: str = "cpu") -> tuple[list[reporting.Row], str]:
    """Return the newest rows of an experiment, and their commit; none where it has not been measured."""
    for path in sorted(reporting.RESULTS.glob(f"experiments-{device}-*.json")):
        found = json.loads(path.read_text())
        if rows := rows_in(found["rows"], name):
            return rows, found["machine"]["commit"]
    return [], ""


def main() -> None:
    parts = {name: partial(measure, name) for name in EXPERIMENTS}
    options = resumable_run.parser(__doc__, parts).parse_args()
    run = resumable_run.begin(Run, options)
    resumable_run.measure(run, {name: parts[name] for name in options.parts})
    if not options.quick:
        forget_older(run, options.parts)


if __name__ == "__main__":
    main()
