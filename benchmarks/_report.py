"""Shared code of the benchmarks: the machine in words, interleaved timing, results as JSON.

Run a benchmark as ``python benchmarks/<name>.py``: then Python finds this module in the same folder.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlstruct.device import processor, usable_cores

Clock = Callable[[], float]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Describe this machine.

    Returns:
        Words and numbers: device, cpu, cores, threads, python, torch, commit, and the library files that differ from
        that commit (none in a run that counts). A copy without its git history takes the commit from RLSTRUCT_COMMIT.
    """
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "device": gpu or "cpu", "cpu": processor(), "cores": usable_cores(), "threads": torch.get_num_threads(),
        "python": platform.python_version(), "torch": torch.__version__,
        "commit": _git("rev-parse", "--short", "HEAD") or os.environ.get("RLSTRUCT_COMMIT", "unknown"),
        "changed": _git("diff", "--name-only", "HEAD", "--", "rlstruct", "agents", "batchers", "algos").split(),
    }  # fmt: skip


def interleaved(
    calls: Mapping[str, Callable[[], object]], repeats: int = 7, seconds: float = 0.05, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Return the median over the rounds of `interleaved_rounds`, which takes the same arguments."""
    rounds = interleaved_rounds(calls, repeats, seconds, clock)
    return {name: statistics.median(values) for name, values in rounds.items()}


def interleaved_rounds(
    calls: Mapping[str, Callable[[], object]], repeats: int = 7, seconds: float = 0.05, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Time several callables in turn, so that a slow moment of the machine hits all of them.

    Args:
        calls: name to callable. On a GPU the callable must synchronise itself.
        repeats: how many rounds, at least 5.
        seconds: how long one callable runs in one round.
        clock: ``time.process_time`` leaves out what other processes take, for work of one thread on the CPU.

    Returns:
        Name to the seconds per call in each round; numbers at the same place were taken side by side.

    Raises:
        ValueError: fewer than 5 rounds.
    """
    if repeats < 5:
        raise ValueError(
            f"interleaved: got repeats = {repeats}, expected at least 5, so that the median says something."
        )
    counts = {name: _calls_in(call, seconds, clock) for name, call in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            rounds[name].append(_time(call, counts[name], clock) / counts[name])
    return rounds


def write(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write one dict of plain values for each measurement into the file of `result_path`, and return it."""
    path = result_path(name)
    RESULTS.mkdir(exist_ok=True)
    new = path.with_suffix(".new")  # a run may be cut at any time, and resumed
    new.write_text(json.dumps({"benchmark": name, "machine": machine(), "rows": rows}, indent=1) + "\n")
    return new.replace(path)


def result_path(name: str) -> Path:
    """Return ``benchmarks/results/<name>-<device>-<commit>.json``."""
    here = machine()
    device = str(here["device"]).lower().replace(" ", "-")
    return RESULTS / f"{name}-{device}-{here['commit']}.json"


def _calls_in(call: Callable[[], object], seconds: float, clock: Clock) -> int:
    """Return the number of calls that fill the time, and warm up. The first call, which may compile, is not counted."""
    call()
    count = 1
    while (taken := _time(call, count, clock)) < seconds / 4:
        count *= 2
    return max(1, round(count * seconds / taken))


def _time(call: Callable[[], object], count: int, clock: Clock) -> float:
    start = clock()
    for _ in range(count):
        call()
    return clock() - start


def _git(*arguments: str) -> str:
    """Return git's answer, "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def pyplot() -> Any:  # noqa: ANN401 - a module without types
    """Return what draws into files; None, and a line about it, where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed (extra train)")
        return None
    mpl.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def table(head: str, rows: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """Format a table whose first columns are words and whose others are numbers."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", f"|{'---|' * left}{'---:|' * (columns - left)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]
