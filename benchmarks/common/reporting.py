"""Shared code of the benchmarks: the machine in words, timing, results as JSON, tables and figures.

Run a benchmark as ``python benchmarks/<name>.py``: then Python finds this folder next to it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlstruct.device import processor, usable_cores

RESULTS = Path(__file__).parents[1] / "results"
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
        "changed": _git("diff", "--name-only", "HEAD", "rlstruct", "agents", "batchers", "algos").split(),
    }  # fmt: skip


def write(name: str, rows: Sequence[Row]) -> Path:
    """Write one dict of plain values for each measurement into the file of `result_path`, and return it."""
    path = result_path(name)
    RESULTS.mkdir(exist_ok=True)
    new = path.with_suffix(".new")  # a run may be cut at any time, and resumed
    new.write_text(json.dumps({"benchmark": name, "machine": machine(), "rows": rows}, indent=1) + "\n")
    return new.replace(path)


def written(name: str) -> list[Row]:
    """Return the rows that this commit has written on this device; none if there is no file."""
    path = result_path(name)
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def result_path(name: str) -> Path:
    """Return ``benchmarks/results/<name>-<device>-<commit>.json``."""
    here = machine()
    device = str(here["device"]).lower().replace(" ", "-")
    return RESULTS / f"{name}-{device}-{here['commit']}.json"


def calls_in(call: Callable[[], object], seconds: float) -> int:
    """Return the number of calls that fill the time, and warm up. The first call, which may compile, is not counted."""
    call()
    count = 1
    while (taken := count * seconds_of(call, count)) < seconds / 4:
        count *= 2
    return max(1, round(count * seconds / taken))


def seconds_of(call: Callable[[], object], count: int) -> float:
    """Return the seconds of a call, a mean over so many."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval that holds the median of the distribution with 95 %, from ranks alone; all of few values.

    >>> interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
    (2, 8)
    """
    n, outside, rank = len(values), 0.0, 0
    while outside + math.comb(n, rank) / 2**n <= 0.025:
        outside += math.comb(n, rank) / 2**n
        rank += 1
    rank = max(0, rank - 1)
    ordered = sorted(values)
    return ordered[rank], ordered[n - 1 - rank]


def _git(*arguments: str) -> str:
    """Return git's answer, "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parents[2]), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def table(head: str, rows: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """Format a table whose first columns are words and whose others are numbers."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", f"|{'---|' * left}{'---:|' * (columns - left)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def pivot(title: str, rows: Sequence[Row], unit: str, cell: Callable[[Row], str]) -> list[str]:
    """Format a table with a line for each rung and a column for each N; rows without a rate are left out."""
    found = {(row["rung"], row["N"]): cell(row) for row in rows if "steps_per_second" in row}
    sizes = sorted({n for _, n in found})
    body = [[name, *(found.get((name, n), "") for n in sizes)] for name in dict.fromkeys(name for name, _ in found)]
    return table(" | ".join([title, *(f"{n:,} {unit}" for n in sizes)]), body)


class Panels(dict[str, dict[str, dict[float, float]]]):
    """Panels of a figure by title, lines of a panel by label, and y by x of a line."""

    def add(self, title: str, label: str, x: float, y: float) -> None:
        """Add a point."""
        self.setdefault(title, {}).setdefault(label, {})[x] = y

    def draw(self, x_label: str, y_label: str, path: Path) -> None:
        """Draw the panels side by side with logarithmic axes; a label has the same colour in all of them."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.0 + 3.0 * len(self), 4.0), layout="constrained")
        everything = figure.subplots(1, len(self), sharey=True, squeeze=False)[0]
        known: dict[str, Any] = {}
        for axes, (title, lines) in zip(everything, self.items(), strict=True):
            for label, points in lines.items():
                colour = known[label].get_color() if label in known else f"C{len(known)}"
                (line,) = axes.loglog(*zip(*sorted(points.items()), strict=True), "o-", color=colour, markersize=3)
                known.setdefault(label, line)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(x_label)
        everything[0].set_ylabel(y_label)
        figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize=8)
        figure.savefig(path, dpi=120)
