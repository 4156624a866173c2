"""Shared code of the benchmarks: the machine in words, timing, results as JSON, tables and figures.

Run a benchmark as ``python benchmarks/<name>.py``: then Python finds this folder next to it.
"""

from __future__ import annotations

import hashlib
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


class Drawing(dict[str, dict[str, dict[Any, float]]]):
    """A figure: its panels by title, and what a panel shows by label.

    Args:
        x_label: label of the horizontal axes.
        y_label: label of the vertical axes.

    Attributes:
        papers: numbers that other systems report, by panel and by the label of their line.
        bands: lowest and highest number that another system reports, in the same order; drawn in `Panels`.
    """

    def __init__(self, x_label: str = "", y_label: str = "") -> None:
        super().__init__()
        self.labels = x_label, y_label
        self.papers: dict[str, dict[str, float]] = {}
        self.bands: dict[str, dict[str, tuple[float, float]]] = {}

    def add(self, title: str, label: str, x: object, y: float) -> None:
        """Add a number."""
        self.setdefault(title, {}).setdefault(label, {})[x] = y

    def add_paper(self, title: str, label: str, value: float) -> None:
        """Add the number of another system, a line across a panel."""
        self.papers.setdefault(title, {})[label] = value

    def add_band(self, title: str, label: str, lowest: float, highest: float) -> None:
        """Add the range of another system's numbers, a band across a panel."""
        self.bands.setdefault(title, {})[label] = lowest, highest

    def digest(self) -> str:
        """Return a hash of all that is drawn; `draw` writes it into the picture."""
        drawn = [type(self).__name__, self, self.papers, self.labels, *([self.bands] if self.bands else [])]
        return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()

    def is_in(self, path: Path) -> bool:
        """Return True if a picture was drawn from these numbers."""
        return path.exists() and self.digest().encode() in path.read_bytes()

    def draw(self, path: Path) -> None:
        """Draw into a file; a label has the same colour in all panels."""
        raise NotImplementedError

    def _save(self, figure: Any, path: Path) -> None:  # noqa: ANN401 - of matplotlib
        figure.savefig(path, dpi=120, metadata={"Description": self.digest()})


class Panels(Drawing):
    """Lines over x, in panels side by side.

    Args:
        x_label: label of the horizontal axes.
        y_label: label of the vertical axes.
        log: both axes are logarithmic, and the panels share the vertical one.

    Attributes:
        reported: labels of lines that another system reports; they are dashed.
    """

    def __init__(self, x_label: str, y_label: str, *, log: bool = True) -> None:
        super().__init__(x_label, y_label)
        self._log = log
        self.reported: set[str] = set()

    def draw(self, path: Path) -> None:
        """Draw the panels with one legend; the lines of papers are dashed, their bands shaded."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.0 + 3.0 * len(self), 4.0), layout="constrained")
        everything = figure.subplots(1, len(self), sharey=self._log, squeeze=False)[0]
        known: dict[str, Any] = {}
        bands: dict[str, Any] = {}
        for axes, (title, lines) in zip(everything, self.items(), strict=True):
            for label, points in lines.items():
                colour = known[label].get_color() if label in known else f"C{len(known)}"
                look = "o--" if label in self.reported else "o-"
                (line,) = axes.plot(*zip(*sorted(points.items()), strict=True), look, color=colour, markersize=3)
                known.setdefault(label, line)
            for label, value in self.papers.get(title, {}).items():
                known[label] = axes.axhline(value, color=f"C{len(known)}", linestyle="--")
            for label, ends in self.bands.get(title, {}).items():
                bands[label] = axes.axhspan(*ends, color="lightgray")
            if self._log:
                axes.loglog()
                axes.xaxis.set_major_formatter("{x:,g}")
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(self.labels[0])
        everything[0].set_ylabel(self.labels[1])
        known |= bands  # last in the legend
        figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize=8)
        self._save(figure, path)


class Bars(Drawing):
    """Horizontal bars by label, each divided into parts, in panels one below the other.

    The only part of a bar is named "", and its number stands next to the label.
    """

    def draw(self, path: Path) -> None:
        """Draw the panels, each with a legend."""
        from matplotlib.figure import Figure

        heights = [1.1 + 0.25 * len(bars) for bars in self.values()]
        figure = Figure(figsize=(8.5, sum(heights)), layout="constrained")
        everything = figure.subplots(len(self), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, bars) in zip(everything, self.items(), strict=True):
            parts = list(dict.fromkeys(part for values in bars.values() for part in values))
            names = [f"{label}: {values['']:.2f}" if "" in values else label for label, values in bars.items()]
            start = [0.0] * len(bars)
            for part in parts:
                lengths = [values.get(part, 0.0) for values in bars.values()]
                axes.barh(names, lengths, left=start, height=0.6, label=part or None)
                start = [before + length for before, length in zip(start, lengths, strict=True)]
            reported = self.papers.get(title, {})
            axes.set_xlim(0, max(start) if "" not in parts else 1.05 * max(*start, *reported.values(), 0.0))
            axes.set_ylim(len(bars) - 0.4, -0.6)
            for label, value in reported.items():
                axes.axvline(value, color="black", linestyle="--", label=label)
            axes.tick_params(labelsize=8)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel(self.labels[0])
            if axes.get_legend_handles_labels()[1]:
                axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
        self._save(figure, path)
