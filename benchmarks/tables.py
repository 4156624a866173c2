"""Write the tables of README.md, benchmarks/README.md and docs/, and their figures: ``python benchmarks/tables.py``.

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``. So a number in the page is always one that a script has
measured, and the page says at which commit. A figure is drawn anew if its numbers have changed (extra `train`).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import atari_divergence
import atari_exact
import experiments
import fast_sac
import robustness
import time_to_475
from common import published
from common.learning import last_five
from common.reporting import Drawing, Panels, Row, machine, table
from common.tasks import TASKS

from rlstruct.algos import ALGORITHMS, TrainingConfig
from rlstruct.options import described

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
PAGES = [
    DOCS / "workers.md", DOCS / "kernels.md", HERE / "README.md", HERE.parent / "README.md",
    *sorted((DOCS / "algorithms").glob("*.md")), DOCS / "sharing_a_gpu.md", DOCS / "profiling.md", DOCS / "scaling.md",
    DOCS / "atari.md", DOCS / "coming_from_cule.md", DOCS / "coming_from_gmi_drl.md", DOCS / "robustness.md",
]  # fmt: skip
Rows = list[Row]
Table = Callable[[Rows], list[str]]
CONFIGS: dict[str, type[TrainingConfig]] = {name: one.learner.settings for name, one in ALGORITHMS.items()}
NOT_MEASURED = "Not measured since the code changed."
_BLOCK = re.compile(r"(<!-- (\w+) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)


def load(name: str) -> tuple[Rows, str]:
    """Read the results of a benchmark on the CPU."""
    files = sorted((HERE / "results").glob(f"{name}-cpu-*.json"))
    if len(files) > 1:
        raise SystemExit(f"{name}: got results of {len(files)} commits, expected one: remove the older ones.")
    if not files:
        return [], ""
    found = json.loads(files[0].read_text())
    return found["rows"], found["machine"]["commit"]


def columns(head: str, cells: str | Callable[[Row], str], left: int = 1, part: str = "") -> Table:
    """Return what makes a table with one line for each row, of a part of the benchmark where it has parts.

    ``cells`` is a line with the keys of the row in braces, or what returns a line; both without the outermost bars.
    """

    def make(rows: Rows) -> list[str]:
        kept = [row for row in rows if not part or row["part"] == part]
        lines = []
        for row in kept:
            if "not_run" in row:
                line = f"{row['work']} | not run: {row['not_run']}" + " | " * (head.count("|") - 1)
            else:
                line = cells.format(**row) if isinstance(cells, str) else cells(row)
            lines.append(line.split(" | "))
        return table(head, lines, left) if kept else [NOT_MEASURED]

    return make


def throughput(rows: Rows) -> list[str]:
    """Thousand steps per second, and ours over theirs: eager, compiled, compiled and queued."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if "rate" not in row:
            continue
        ratios = [row["ratio"], row["compiled_ratio"], row["compiled_queued_ratio"]]
        words = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        cells.setdefault(row["name"], []).extend([f"{(row['rate'] or 0.0) / 1000:.1f}", *words])
    sizes = dict.fromkeys(row["n_envs"] for row in rows)
    head = " | ".join(["", *(f"{n} environments | ours / it | compiled | queued too" for n in sizes)])
    return table(head.strip(), [[name, *words] for name, words in cells.items()])


def learnt(algorithm: str, _: Rows) -> list[str]:
    """Every task of an algorithm that has results."""
    lines = []
    for name, task in TASKS.items():
        rows, commit = load(name)
        if not rows or not name.startswith(algorithm):
            continue
        returns = ", ".join(f"{row['seed']}: {row['final_return']:.0f} ({last_five(row):.0f})" for row in rows)
        mean = statistics.fmean(row["final_return"] for row in rows)
        asked = task.target is not None
        reached = [row["steps_to_target"] for row in rows if asked]
        known = sorted(steps for steps in reached if steps is not None)
        words = f"{known[0] / 1000:.0f}k to {known[-1] / 1000:.0f}k" if known else ""
        never = f"{reached.count(None)} never" if None in reached else ""
        steps = " and ".join(filter(None, [words, never]))
        counts = sorted(row["env_steps"] for row in rows)  # more than one where a target ends a training
        taken = f"{counts[-1]:,}" if counts[0] > 0.9 * counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
        tuned = ", ".join(map(str, task.tuned_on)) or "none"
        lines.append([task.about, task.asked(), f"{mean:.0f}", returns, steps, taken, tuned, f"`{commit}`"])
    head = (
        "task | required | mean | seed: final return (mean of the last five evaluations) | steps to it | steps in all"
    )
    return table(f"{head} | settings chosen with seeds | commit", lines, 8)


def published_table(name: str, _: Rows = ()) -> list[str]:
    """Return what of a table of `published.TABLES` has results, next to what others have published."""
    lines = []
    for entry in published.TABLES[name]:
        rows, commit = load(entry.name)
        if not rows:
            continue
        cells = [_mean_and_seeds([row[key] for row in rows]) for key in ("final_return", "last_100")]
        others = [f"{who} {_rounded(value)}" for who, value in entry.others.items()]
        if entry.half_way is not None:
            others.insert(0, f"half of the way {_rounded(entry.half_way)}")
        for ending, library in published.LIBRARIES.items():
            if peer := load(f"{entry.name}_{ending}")[0]:
                others.append(f"{library} {_mean_and_seeds([row['final_return'] for row in peer])}")
        seconds = f"{min(row['learning_seconds'] for row in rows):.0f}"  # other programs ran on the same machine
        task = TASKS[entry.task].about
        lines.append([task, f"{entry.n_env_steps:,}", *cells, ", ".join(others), seconds, f"`{commit}`"])
    seeds, episodes = f"(seeds {published.SEEDS[0]}, …)", published.TABLES[name][0].episodes
    head = f"task | environment steps | {episodes} episodes at the end: mean {seeds} | last 100 training episodes"
    return table(f"{head} | others | seconds of learning | commit", lines, 7) if lines else [NOT_MEASURED]


def overview(_: Rows) -> list[str]:
    """Return what each algorithm reached on each task, in how many environment steps and seconds of learning."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)  # of a task, by algorithm
    for name, entries in published.TABLES.items():  # presets first; defaults fill in where there is none
        for entry in entries:
            if rows := load(entry.name)[0]:
                mean = _rounded(statistics.fmean(row["final_return"] for row in rows))
                seconds = min(row["learning_seconds"] for row in rows)
                reached = f"{mean}{'*' * (name == 'defaults')}: {entry.n_env_steps // 1000:,}k, {seconds:,.0f} s"
                cells[TASKS[entry.task].env].setdefault(entry.task.partition("_")[0], reached)
    algorithms = [name for name in CONFIGS if any(name in row for row in cells.values())]
    lines = [[task, *(row.get(name, "") for name in algorithms)] for task, row in cells.items()]
    return table(" | ".join(["task", *map(str.upper, algorithms)]), lines, 1 + len(algorithms))


def precisions(rows: Rows) -> list[str]:
    """Return the returns of trainings in float32 and bfloat16, by task, and the median seconds of both."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        found = {
            precision: [row for row in rows if (row["task"], row["precision"]) == (task, precision)]
            for precision in ("float32", "bfloat16")
        }
        cells = [_mean_and_seeds([row["return"] for row in some]) for some in found.values()]
        seconds = [statistics.median(row["seconds"] for row in some) for some in found.values()]
        lines.append([task, *cells, *(f"{one:.0f}" for one in seconds), f"{seconds[0] / seconds[1]:.2f}"])
    seeds = ", ".join(map(str, dict.fromkeys(row["seed"] for row in rows)))
    head = f"task | float32: mean return (seeds {seeds}) | bfloat16 | float32, seconds | bfloat16 | times as fast"
    return table(head, lines, 3)


def compared(algorithm: str, others: dict[str, str], _: Rows) -> list[str]:
    """Return the final returns of an algorithm next to those of other libraries with equal steps and seeds."""
    libraries, lines = {"rlstruct": "", **others}, []
    for name in TASKS:
        found = [load(name + ending) for ending in libraries.values()]
        if name.startswith(algorithm) and all(rows for rows, _ in found):
            returns = [[row["final_return"] for row in rows] for rows, _ in found]
            cells = [_mean_and_seeds(some) for some in returns]
            lines.append([TASKS[name].about, f"{found[0][0][0]['env_steps']:,}", *cells, f"`{found[0][1]}`"])
    return table(
        " | ".join(["task | steps", *(f"{one}: mean (seeds)" for one in libraries), "commit"]),
        lines,
        3 + len(libraries),
    )


def _mean_and_seeds(values: Sequence[float]) -> str:
    """Return the mean of a number for each seed, and all of them in brackets."""
    return f"{_rounded(statistics.fmean(values))} ({', '.join(map(_rounded, values))})"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.1f}"


BEFORE = {
    "iteration": "519 to 546", "collect": "131", "simulator": "92", "agent": "56", "advantages": "67 to 91",
    "minibatches": "33, with the optimiser", "products": "205 to 240", "everything else": "90 to 125, in both passes",
}  # fmt: skip
"""Milliseconds of the parts of an iteration of PPO on Breakout at f5e35a4, as they were noted then."""


def parts_of_an_iteration(row: Row) -> str:
    """Return the cells of a part, before the learner was rewritten and after."""
    before = BEFORE[row["part"]] if row["task"] == "ppo Breakout-MinAtar" else "no PQN yet"
    return f"{row['task']} | {row['part']} | {before} | {row['ours']} | {row['theirs'] or 'in its one call'}"


def sharing(_: Rows) -> list[str]:
    """Samples per second of processes that share a device, and of one that searches in many games; every device."""
    lines: list[str] = []
    for path in sorted((HERE / "results").glob("sharing-*.json")):
        found = json.loads(path.read_text())
        measured_on = found["machine"]
        cells: list[list[object]] = []
        measured = [row for row in found["rows"] if row["part"] == "table"]
        for row in sorted(measured, key=lambda row: ("against" in row, row.get("against", row["processes"]))):
            cell = [row["processes"], row["sharing"], row.get("games", "")]
            if "left_out" in row:
                cell += ["", row["left_out"], "", "", ""]
            else:
                cell += [row.get("against", ""), f"{row['samples_per_second']:.2f}", f"{row['load']:.0f}"]
                cell += ["" if row.get(name) is None else f"{100 * row[name]:.0f} %" for name in ("nvml", "busy")]
            cells += [cell] if cell not in cells else []
        head = "processes | sharing | games | in turns with rows of … processes | samples per second | load"
        head += " | NVML | GPU busy"
        ratios = [
            f"- {row['ratio']}: {row['value']:,.2f}" + (f", target {row['target']:,g}" if row["target"] else "")
            for row in found["rows"]
            if row["part"] == "summary" and row["value"] is not None
        ]
        where = "{device}, {cores} cores of {cpu}, commit `{commit}`".format(**measured_on)
        lines += ["", f"{where}:", "", *table(head, cells, 2), "", *ratios]
    return lines[1:] or [NOT_MEASURED]


def settings(kind: type[TrainingConfig], _: Rows) -> list[str]:
    """Return an algorithm's settings: every field of its class, with its docstring."""
    bases = [base for base in reversed(kind.__mro__) if issubclass(base, TrainingConfig)]
    known = {name: words for base in bases[1:] for name, words in _described(base).items()}
    own = [field for field in fields(kind) if field.name in known]
    return table(
        "setting | default | what it does", [[f"`{one.name}`", _default(one), known[one.name]] for one in own], 3
    )


def common_settings(_: Rows) -> list[str]:
    """The settings that every algorithm has, with each one's default."""
    lines = []
    for name, words in _described(TrainingConfig).items():
        defaults = [_default(kind.__dataclass_fields__[name]) for kind in CONFIGS.values()]
        lines.append([f"`{name}`", *defaults, words])
    return table(f"setting | {' | '.join(map(str.upper, CONFIGS))} | what it does", lines, 2 + len(CONFIGS))


def _described(kind: type[TrainingConfig]) -> dict[str, str]:
    """Return what the settings of a class do, with their ranges, as cells of a table."""
    return {name: text.replace("``", "`").replace("|", r"\|") for name, text in described(kind).items()}


def _default(field: Any) -> str:  # noqa: ANN401 - Field of any type
    return f"`{field.default!r}`".replace('"', "").replace("'", "")


def strength(rows: Rows) -> list[str]:
    """Tabulate AlphaZero's strength at Connect Four: games, and mistakes in solved positions."""
    whole, *others = rows
    games = [[row["opponent"], row["won"], row["drawn"], row["lost"]] for row in others if "opponent" in row]
    sets = [row for row in others if "stones" in row]
    names = ("before", "before, searching", "after", "after, searching")
    cells = [[f"{row['stones']} stones", *(f"{row[name]:.0%}" for name in names)] for row in sets]
    about = (
        f"After {whole['moves_of_self_play']:,} moves of self-play, with {whole['simulations']:,} simulations of each "
        "move (gumbel):"
    )
    head = f"mistakes in {sets[0]['positions']} positions | " + " | ".join(names)
    return [about, "", *table("opponent | won | drawn | lost", games), "", *table(head, cells)]


def reasons(_: Rows) -> list[str]:
    """The README's table of reasons: collection, learning, slow environments and faults, with what others do."""
    (speeds, at), (races, at_race), (shares, at_slow), (faults, at_faults) = map(
        load, ("cpu_collect_throughput", "time_to_475", "cpu_collect_slow", "robustness")
    )
    rate = defaultdict(
        str, {row["name"]: f"{row['rate'] / 1000:.0f}" for row in speeds if row.get("rate") and row["n_envs"] == 64}
    )
    seconds: dict[str, list[float]] = {}
    for row in races:
        seconds.setdefault(row["name"], []).append(row["seconds"])
    race = defaultdict(str, {name: f"{statistics.fmean(values):.1f}" for name, values in seconds.items()})
    if missed := sum(not row["reached"] for row in races if row["name"] == "CleanRL PPO"):
        race["CleanRL PPO"] += f" ({missed} of {len(seconds['CleanRL PPO'])} seeds did not reach it)"
    ours = [row["share"] for row in shares if row["name"].startswith("rlstruct, 8 workers x 1 environments")]
    theirs = next(row["share"] for row in shares if row["name"].startswith("gymnasium"))
    told = {
        (row["fault"], row["library"]): row["short"].replace("names left", "names left in `/dev/shm`") for row in faults
    }
    queued, dummy, several = (rate[name] for name in (
        "rlstruct RL_Batcher, compile_agent=True, queued", "SB3 collect_rollouts, DummyVecEnv",
        "SB3 collect_rollouts, SubprocVecEnv"))  # fmt: skip
    rows = [
        ["[CartPole with a small policy, 64 environments, 2 processes: "
         "thousand steps per second](benchmarks/README.md)",
         f"{rate['rlstruct RL_Batcher']}; {queued} compiled and queued",
         f"{dummy} (Dummy, 1 process), {several} (Subproc)",
         rate["TorchRL MultiSyncCollector"], "", f"{rate['gymnasium SyncVectorEnv']} (Sync, 1 process)"],
        ["[PPO on CartPole-v1 until a mean return of 475, tuned (CleanRL: default): seconds](benchmarks/README.md)",
         race["rlstruct PPO"], race["stable-baselines3 PPO"], "", race["CleanRL PPO"], ""],
        ["[8 workers with an environment each, one step in ten takes ten times as long: "
         "share of the ideal](benchmarks/README.md)",
         f"{min(ours):.0%} to {max(ours):.0%}", "", "", "", f"{theirs:.0%} (Async)"],
    ]  # fmt: skip
    for fault, words in (("kill", "a worker is killed"), ("stop", "a simulator hangs, with a time limit of 10 s")):
        cells = [told[fault, name] for name in ("rlstruct", "sb3", "torchrl_collector")]
        rows.append([f"[{words}](docs/robustness.md)", *cells, "", told[fault, "gymnasium"]])
    head = " | rlstruct | stable-baselines3 | TorchRL | CleanRL | gymnasium.vector"
    pool = rate["EnvPool (C++ environments)"]
    commits = list(dict.fromkeys((at, at_race, at_slow, at_faults)))
    several = " (row by row; `make compare` measures all of it at one)" if len(commits) > 1 else ""
    about = (
        f"Measured at commit {', '.join(f'`{one}`' for one in commits)}{several}; an empty cell was not measured. "
        f"EnvPool, with its own environments in C++, has {pool} in the first row."
    )
    return [*table(head.strip(), rows, 6), "", about]


def accuracy(row: Row) -> str:
    """Return the cells of a profiled training next to unprofiled ones."""
    processes = "1 process" if row["processes"] == 1 else f"{row['processes']} processes"
    cells = [f"{row['algorithm'].upper()}, {processes}", str(row["cycles"])]
    for name in ("uncorrected_bias_wall", "bias_wall", "noise_wall"):
        low, high = row[f"{name}_interval"]
        cells.append(f"{100 * row[name]:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})")
    return " | ".join(cells)


def experiment(name: str, _: Rows) -> list[str]:
    """Return the table of an experiment on the CPU, with its commit."""
    rows, commit = experiments.rows_of(name)
    return [f"At commit `{commit}`:", "", *experiments.EXPERIMENTS[name].table(rows)] if rows else [NOT_MEASURED]


TABLES: dict[str, tuple[str, Table]] = {
    "throughput": ("cpu_collect_throughput", throughput),
    "slow": ("cpu_collect_slow", columns("| share of the ideal", "{name} | {share:.0%}")),
    "startup": ("cpu_collect_startup", columns(
        "workers | first batch, s | first of a second batcher with 4 workers, s | private memory of a worker, MiB",
        lambda row: "{workers} | {first:.2f} | {second:.2f} | {mib:.0f}".format(**row, mib=row["private"] / 2**20), 0,
    )),
    "tune": ("tune", columns(
        "task | answer | best of the grid | speed, of the best | probes, of the grid | seconds | memory, off by",
        "{name} | {answer} | {best} | {share:.1%} | {probes} of {grid} | {seconds:.0f} | {projection:.1%}", 3,
    )),
    "learning_speed": ("learning_speed", columns(
        "task | cores | ms | rejax 0.1.3, ms | rejax's / ours, in turn",
        "{task} | {cores} | {ours} | {theirs} | {ratio}",
    )),
    "simulators": ("simulators", columns(
        "CPU µs per environment and step | environments | eager | compiled | gymnax",
        "{game} | {n_envs} | {eager} | {compiled} | {gymnax}",
    )),
    "sac_updates": ("sac_updates", columns(
        "| gradient steps per second | ms of CPU time | products alone, ms | share of a step | times as fast as sbx",
        "{name} | {rate} | {ms} | {products} | {share} | {ratio}",
    )),
    "precision": ("precision", precisions),
    "learning_parts": ("learning_parts", columns(
        "task | part | before, ms | ms | rejax 0.1.3, ms", parts_of_an_iteration, 2,
    )),
    "threads": ("threads", columns(
        "task | machine | 1 thread, ms | 2 threads, ms | another library | on 1 core, ms | on 2 cores, ms",
        "{task} | {machine} | {one} | {two} | {peer} | {peer_one} | {peer_two}", 7,
    )),
    "scale_collection": ("scale", columns(
        "who | environment steps per second | two workers of Ray, times as fast",
        "{work} | {steps_per_s:,.0f} | {ratio:.2f}", part="collection",
    )),
    "scale_plan": ("scale", columns(
        "batches, from workers that do nothing | ms per batch | MiB per second",
        lambda row: f"{row['work']} | {1e3 * row['seconds_per_batch']:.2f} | {row['bytes_per_s'] / 2**20:,.0f}",
        part="plan",
    )),
    "seconds_to_475": ("time_to_475", lambda rows: time_to_475.table(rows).splitlines()),
    "robustness": ("robustness", robustness.report),
    "profile_accuracy": ("profiler", columns(
        "| cycles | as measured | corrected | plain over plain", accuracy, part="accuracy",
    )),
    **{name: ("", partial(experiment, name)) for name in experiments.EXPERIMENTS},
    "reasons": ("", reasons),
    "settings": ("", common_settings),
    "overview": ("", overview),
    **{f"published_{name}": ("", partial(published_table, name)) for name in published.TABLES},
    "sharing": ("", sharing),
    "atari_divergence": ("atari_divergence", atari_divergence.page_table),
    "atari_exact": ("", lambda _: [atari_exact.render()]),
    "strength": ("connect_four_strength", strength),
    "sac_peers": ("", partial(compared, "sac", {"stable-baselines3": "_sb3", "CleanRL": "_cleanrl"})),
    "pqn_peers": ("", partial(compared, "pqn", {"rejax 0.1.3": "_rejax"})),
    "fast_sac": ("fast_sac", fast_sac.table),
    **{f"learnt_{name}": ("", partial(learnt, name)) for name in CONFIGS if name != "alphazero"},
    **{f"settings_{name}": ("", partial(settings, kind)) for name, kind in CONFIGS.items()},
}  # fmt: skip


def experiment_figure(name: str) -> Drawing | None:
    """Return the figure of an experiment on the CPU; None if it has none. It is empty if not measured."""
    rows, _ = experiments.rows_of(name)
    make = experiments.EXPERIMENTS[name].figure
    return make(rows) if make is not None else None


def sharing_figure() -> Panels:
    """Return samples per second over the number of processes: SURF's lines, and those of every device here."""
    panels = Panels("processes", "samples per second")
    for mode, rates in SURF.items():
        for processes, rate in zip((2, 7, 16), rates, strict=True):
            panels.add("", f"SURF: {mode}", processes, rate)
            panels.reported.add(f"SURF: {mode}")
    for path in sorted((HERE / "results").glob("sharing-*.json")):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            if row["part"] == "table" and "samples_per_second" in row:
                words = {"none": "in turns", "batched": f"one process, {row['games']} games"}
                label = f"here, {found['machine']['device']}: {words.get(row['sharing'], row['sharing'].upper())}"
                panels.add("", label, row["processes"], row["samples_per_second"])
    return panels


SURF = {"in turns": (0.50, 1.20, 1.07), "MIG, two instances": (0.38, 1.39, 1.19), "MPS": (0.74, 2.22, 5.10)}
"""SURF's samples per second with 2, 7 and 16 processes; docs/sharing_a_gpu.md has them as a table."""
FIGURES: dict[str, Callable[[], Drawing | None]] = {
    **{name: partial(experiment_figure, name) for name in experiments.EXPERIMENTS},
    "sharing": sharing_figure,
}
"""Figures of the pages, docs/NAME.png."""


def outdated_figures() -> dict[Path, Drawing]:
    """Return the pictures that do not show what the results say, with what they should show."""
    figures = {DOCS / f"{name}.png": make() for name, make in FIGURES.items()}
    return {path: figure for path, figure in figures.items() if figure and not figure.is_in(path)}


def text(name: str, rows: Rows) -> str:
    """Return a table of rows that have just been measured."""
    return "\n".join(TABLES[name][1](rows))


def render(name: str) -> str:
    """Return one table, with the file that it comes from above it."""
    benchmark, make = TABLES[name]
    if not benchmark:
        return "\n".join(make([]))
    rows, commit = load(benchmark)
    if not rows:
        return NOT_MEASURED
    return "\n".join([f"At commit `{commit}`:", "", *make(rows)])


def rendered(page: str) -> str:
    """Return the page with its tables written anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{render(found[2])}\n{found[3]}", page)


def forget_older(commit: str) -> None:
    """Remove results of other commits, on the CPU, of each benchmark that has been measured at this one."""
    for path in (HERE / "results").glob(f"*-cpu-{commit}.json"):
        name = path.name.removesuffix(f"{commit}.json")
        for older in path.parent.glob(f"{name}*"):
            if not older.stem.endswith(commit) and not name.startswith("experiments-"):  # which forget for themselves
                older.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    parser.add_argument("--newest", action="store_true", help="first remove older results of what HEAD has measured")
    options = parser.parse_args()
    if options.newest:
        forget_older(machine()["commit"])
    for page in PAGES:
        before = page.read_text()
        after = rendered(before)
        if options.check and after != before:
            raise SystemExit(f"{page} is not what results/ say: run python benchmarks/tables.py")
        page.write_text(after)
    for path, figure in outdated_figures().items():
        if options.check:
            raise SystemExit(f"{path} is not what results/ say: run python benchmarks/tables.py")
        figure.draw(path)


if __name__ == "__main__":
    main()
