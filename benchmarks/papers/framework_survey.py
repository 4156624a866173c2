"""RL-Scope's comparison of frameworks (Gleeson et al., MLSys 2021), here: the same training in five libraries.

``peers/frameworks.py`` trains. All libraries are warmed up and then take turns, in CPU time. Then each training is
profiled, as `rlstruct profile` does with any script. The other libraries are in separate environments:
``PEERS_PYTHON`` has stable-baselines3 and TorchRL (by default that of ``make peers``), ``SBX_PYTHON`` has sbx
(``python -m venv .venv-sbx && .venv-sbx/bin/pip install torch sbx-rl``), and ``CLEANRL`` is a checkout of CleanRL.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.contenders import ONE_THREAD, PEERS, PEERS_PYTHON, Entry, compete
from common.reporting import Bars, Row, table
from papers.time_survey import PARTS, by_kind

from rlstruct.profiling import read
from rlstruct.profiling.operations import VARIABLE
from rlstruct.profiling.settings import settings

if TYPE_CHECKING:
    from common.resumable_run import Ladder

ROOT = PEERS.parents[1]
PEERS_OF = os.environ.get("PEERS_PYTHON", PEERS_PYTHON)
SBX = os.environ.get("SBX_PYTHON", str(ROOT / ".venv-sbx/bin/python"))
CLEANRL = os.environ.get("CLEANRL", "")
PYTHONS = {
    "stable-baselines3": PEERS_OF, "CleanRL": PEERS_OF, "TorchRL": PEERS_OF, "sbx": SBX, "rlstruct": sys.executable,
    "rlstruct, compiled": sys.executable,
}  # fmt: skip
COMPILED = ("sbx", "rlstruct, compiled")
ALGORITHMS = ("ppo", "sac")
SLOWEST, RATIO, ERROR = 2.3, 3.5, 16.8
"""RL-Scope: run time of the slowest over the fastest framework; share of simulation of on-policy over off-policy
algorithms; and the largest error of its corrected profiles, in percent."""
_LONGEST = 600.0  # seconds of a profiled training


def entry(library: str, algorithm: str) -> Entry:
    """Return the contender of a library."""
    return Entry(
        library, "frameworks.py", {"algorithm": algorithm}, (library, algorithm, *([CLEANRL] if CLEANRL else ())),
        PYTHONS[library], {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def profiled(one: Entry) -> Row:
    """Profile a turn of a training: the shares of its parts, of Python, and the calls of torch in a step."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **ONE_THREAD, **one.variables, VARIABLE: settings(folder, window=3600.0)}
        command = [one.python, "-m", "rlstruct.profiling.script", str(PEERS / one.script), json.dumps(one.task)]
        done = subprocess.run(
            [*command, *one.arguments], input='{"batches": 1}\n', capture_output=True, text=True, env=variables,
            timeout=_LONGEST, check=True,
        )  # fmt: skip
        rows = [row for process in read(folder).processes for row in process.rows if row.phase == "turn 0"]
    steps = json.loads(done.stdout.splitlines()[-1])["steps"]
    regions = sum(row.corrected.reshape(2, 4).sum(0) for row in rows)
    calls = float(sum(row.transitions[0, 1] for row in rows))
    return {**by_kind(rows), "python": float(regions[0] / regions.sum()), "to_torch": calls / steps}


def measure_frameworks(run: Ladder, sizes: Mapping[str, Sequence[int]]) -> None:
    """Time every library in interleaved rounds, and profile it once."""
    (n_rounds,) = sizes["rounds"]
    libraries = [library for library in PYTHONS if not run.quick or library not in COMPILED]  # which takes a minute
    for where in run.todo("frameworks", 60.0, ({"algorithm": name} for name in ALGORITHMS)):
        entries = [entry(library, where["algorithm"]) for library in libraries]
        for one, result in zip(entries, compete(entries, n_rounds, seconds=1.0), strict=True):
            about = {"part": "frameworks", **where, "library": one.name}
            if result.why:
                run.add(**about, left_out=result.why)
                continue
            with run.caught(**about):
                run.add(
                    **about, load=round(os.getloadavg()[0], 1), versions=result.versions,
                    seconds=[1e3 / rate for rate in result.rates], cpu_seconds=[1e3 * cpu for cpu in result.cpus],
                    **profiled(one),
                )  # fmt: skip


def measured(rows: Sequence[Row], algorithm: str) -> dict[str, Row]:
    """Return the rows of an algorithm by library."""
    return {row["library"]: row for row in rows if row.get("algorithm") == algorithm and "cpu_seconds" in row}


def spreads(rows: Sequence[Row]) -> dict[str, float]:
    """Return the CPU time of the slowest library over that of the fastest, by algorithm: of all, and of some."""
    found = {}
    for algorithm in ALGORITHMS:
        medians = {library: statistics.median(row["cpu_seconds"]) for library, row in measured(rows, algorithm).items()}
        eager = [seconds for library, seconds in medians.items() if library not in COMPILED]
        for words, some in (("", [*medians.values()]), (", PyTorch without a compiler", eager)):
            if some:
                found[algorithm.upper() + words] = max(some) / min(some)
    return found


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return the share of simulation of PPO over that of SAC, by library."""
    on, off = (measured(rows, algorithm) for algorithm in ALGORITHMS)
    return {library: on[library]["simulation"] / off[library]["simulation"] for library in on if library in off}


def errors() -> tuple[float, float]:
    """Return the largest errors of profiles that ``profiler.py`` found, in percent: as measured, and corrected."""
    (file,) = (PEERS.parent / "results").glob("profiler-cpu-*.json")
    rows = json.loads(file.read_text())["rows"]
    as_measured, corrected = (max(abs(row[name]) for row in rows) for name in ("uncorrected_bias_wall", "bias_wall"))
    return 100 * as_measured, 100 * corrected


def frameworks_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate the time and the shares of each library, and RL-Scope's numbers next to ours."""
    cells, sentences = [], []
    for algorithm in ALGORITHMS:
        found = measured(rows, algorithm)
        if not found:
            continue
        fastest = min(statistics.median(row["cpu_seconds"]) for row in found.values())
        for library, row in found.items():
            seconds = row["cpu_seconds"]
            middle = statistics.median(seconds)
            shares = [f"{100 * row[name]:.0f} %" for name in (*PARTS, "python")]
            spent = f"{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
            calls = "JAX" if library == "sbx" else f"{row['to_torch']:,.0f}"
            cells.append([algorithm.upper(), library, spent, f"{middle / fastest:.1f}", *shares, calls])
    sentences += [
        f"Slowest over fastest library, {name}: {ratio:.1f} (RL-Scope: {SLOWEST})."
        for name, ratio in spreads(rows).items()
    ]
    head = (
        "algorithm | library | CPU seconds of 1,000 steps: median (range) | times the fastest | simulation | "
        "inference | learning | other | in Python | calls of torch a step"
    )
    if shares_of_ppo := ratios(rows):
        each = ", ".join(f"{library.replace(',', '')} {ratio:.1f}" for library, ratio in shares_of_ppo.items())
        sentences.append(f"Share of simulation, PPO over SAC: {each} (RL-Scope: at least {RATIO}).")
    if cells:
        as_measured, corrected = errors()
        sentences.append(
            f"Largest error of a profile: {corrected:.1f} % corrected and {as_measured:.1f} % as measured (RL-Scope: "
            f"{ERROR} % corrected; as measured, its runs take 1.4 to 2 times as long)."
        )
        load = max(row["load"] for row in rows if "load" in row)
        sentences.append(f"Load of the machine during the run: {load:.0f}, on two cores.")
    missing = [
        f"{row['algorithm'].upper()}, {row['library']}: {row['left_out']}."
        for row in rows
        if "library" in row and "left_out" in row
    ]
    return [*table(head, cells, 2), "", *(f"- {sentence}" for sentence in (*sentences, *missing))]


def frameworks_bars(rows: Sequence[Row]) -> Bars:
    """Return where each library spends its time, and our ratios with RL-Scope's as lines."""
    bars = Bars()
    slowest, ratio = "CPU time, slowest library over fastest", "share of simulation, PPO over SAC"
    for algorithm in ALGORITHMS:
        for library, row in measured(rows, algorithm).items():
            for part in PARTS:
                seconds = row[part] * statistics.median(row["cpu_seconds"])
                bars.add(f"{algorithm.upper()}: CPU seconds of 1,000 environment steps", library, part, seconds)
    for name, value in spreads(rows).items():
        bars.add(slowest, name, "", value)
        bars.add_paper(slowest, f"RL-Scope: {SLOWEST}", SLOWEST)
    for library, value in ratios(rows).items():
        bars.add(ratio, library, "", value)
        bars.add_paper(ratio, f"RL-Scope: at least {RATIO}", RATIO)
    if bars:
        error = "largest error of a profile, in percent"
        for label, value in zip(("as measured", "corrected"), errors(), strict=True):
            bars.add(error, label, "", value)
        bars.add_paper(error, f"RL-Scope, corrected: {ERROR}", ERROR)
    return bars
