"""Report of a profile as a sentence, table, JSON, trace and picture; and a comparison of two reports."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlstruct.profiling.breakdown import N_BLOCKS, REGIONS, Process, Row, break_down
from rlstruct.profiling.drawing import draw
from rlstruct.profiling.events import load_recordings
from rlstruct.profiling.gpu import GpuUse, SharedUse, shared_use, use_of_gpus
from rlstruct.profiling.nvml import read_samples
from rlstruct.profiling.perfetto import write_trace
from rlstruct.profiling.summary import main_process, sentence_of

Key = tuple[str, str, tuple[str, ...]]  # kind of process, phase and path of an operation
_WIDTH = 80  # of a terminal
_HEADS = ("count", "seconds", "share", "Python", "torch", "sim", "CUDA", "GPU", "→torch", "→CUDA")
_FLOOR = 0.05  # smaller differences are not reported: two runs of the same program differ this much
_SURE = 3.5  # standard errors
_FEW = 3  # with fewer numbers, their scatter is unknown


@dataclass(frozen=True)
class Report:
    """Report of a profile."""

    processes: list[Process]  # the learning process first
    gpus: list[GpuUse]  # how each process uses each GPU; empty without GPUs
    shared: list[SharedUse] = field(default_factory=list)  # total use of each GPU that several processes share

    @property
    def sentence(self) -> str:
        """Bottleneck, and a remedy to try."""
        return sentence_of(self.processes, self.gpus)

    def __str__(self) -> str:
        gpus = map(str, (*self.gpus, *self.shared))
        texts = [self.sentence, *(_table(process) for process in self.processes), *gpus, "\n".join(self.notes())]
        return "\n\n".join("\n".join(_lines(text)) for text in texts)

    def notes(self) -> list[str]:
        """List the recorded time, the cost of measuring, and the uncertainties."""
        main = main_process(self.processes)
        prices, taken = main.prices, main.seconds - main.corrected
        noting = f"{1e6 * prices.operation:.2f} us an operation"
        if prices.event is not None:
            noting += f", {1e6 * max(0.0, prices.event):.2f} us an operator of torch"
        windows = "1 window" if main.n_windows == 1 else f"{main.n_windows} windows"
        lines = [
            f"Recorded {main.seconds:.2f} s of {main.lifetime:.2f} s in {windows}. What lies between "
            "windows was not recorded: a long run is sampled where an operation first begins, and at 0, 3, 9, 27, … "
            "times the length of a window (--window).",
            f"Torch's operators were recorded in {main.watched:.2f} s of that, in slices; the rest is split "
            "in the same proportions.",
            f"Measuring took {taken:.2f} s ({noting}), subtracted from all numbers above.",
        ]
        if prices.event is None:
            lines[-1] += (
                " The cost of recording torch's operators is not: too few slices without them were recorded to "
                "compare with."
            )
        elif prices.event < 0.0:
            lines.append(
                "The cost of an operator came out negative and counts as 0: record for longer (window) to get more "
                "repetitions."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values: ``seconds`` as measured, ``corrected`` without the cost of measuring."""
        return {
            "sentence": self.sentence,
            "regions": [*REGIONS, *(f"{name} with a busy GPU" for name in REGIONS)],
            "processes": [
                {name: getattr(one, name) for name in ("name", "pid", "seconds", "corrected", "lifetime", "watched")}
                | {"windows": one.n_windows, "rows": [_plain(row) for row in one.rows]}
                | {"operation_cost": one.prices.operation, "operator_cost": one.prices.event}
                for one in self.processes
            ],
            "gpus": [asdict(use) for use in self.gpus],
            "shared": [asdict(use) for use in self.shared],
            "notes": self.notes(),
        }


def read(folder: str | Path) -> Report:
    """Analyse the profile that `rlstruct.profiling.profile` wrote into a folder.

    Raises:
        FileNotFoundError: the folder holds no profile.
    """
    folder = Path(folder)
    recordings = load_recordings(folder)
    processes = break_down([one for one in recordings if one.window >= 0])
    return Report(processes, use_of_gpus(recordings, folder), shared_use(recordings, folder))


def save(report: Report, folder: str | Path) -> list[Path]:
    """Write the report of a profile into its folder.

    Returns:
        ``profile.json``, ``trace.json.gz`` for https://ui.perfetto.dev, and ``profile.png`` with matplotlib.
    """
    folder = Path(folder)
    files = [folder / "profile.json", folder / "trace.json.gz"]
    files[0].write_text(json.dumps(report.to_json(), indent=1) + "\n")
    write_trace(load_recordings(folder), files[1], read_samples(folder))
    try:
        draw(report.processes, folder / "profile.png", title=report.sentence)
    except ModuleNotFoundError as error:  # the extra "train" is not installed
        if error.name != "matplotlib":
            raise
        return files
    return [*files, folder / "profile.png"]


def differences(before: Report, after: Report) -> list[str]:
    """Return a line for each operation that became slower or faster beyond noise, the largest change first.

    Both reports should come from the same program on the same machine. An operation is reported if the median time of
    an entry (including nested operations) changed by at least 5 % and 3.5 standard errors, and differs by as much from
    the median change of the other operations. If the machine was busier during one run, most operations changed by the
    same factor; the last line then says so.
    """
    old, new = _entries(before.processes), _entries(after.processes)
    changes = {key: _change(old[key], new[key]) for key in old.keys() & new.keys()}
    weighted_lines = []
    for key, (change, error) in changes.items():
        others, spread = _middle([value for other, (value, _) in changes.items() if other != key], (0.0, _FLOOR))
        noise = math.hypot(error, spread)
        if min(abs(change), math.copysign(1.0, change) * (change - others)) > max(_SURE * noise, _FLOOR):
            was, now = statistics.median(old[key]), statistics.median(new[key])
            how = f"{now / was:.1f} times as long" if now > 2.0 * was else _slower(change)
            text = f"{_spelt(key)}: {_short(was)} -> {_short(now)} an entry, {how} (noise {100 * noise:.1f} %)"
            weighted_lines.append((-abs(change), text))
    for one, other, word in ((old, new, "gone"), (new, old, "new")):
        weighted_lines += [
            (0.0, f"{_spelt(key)}: {word}") for key in one.keys() - other.keys() if len(one[key]) >= N_BLOCKS
        ]
    lines = [text for _, text in sorted(weighted_lines)]
    if not changes:
        return [*lines, "The profiles share no operation, so there is nothing to compare."]
    lines = lines or ["No operation became slower or faster beyond noise."]
    low, _, high = statistics.quantiles([0.0, *(change for change, _ in changes.values())], n=4)
    if max(low, -high) > _FLOOR:
        how = _slower(low if low > 0.0 else high)
        lines.append(f"Three quarters of all operations are {how} or more: probably the machine, not the program.")
    return lines


def _entries(processes: Sequence[Process]) -> Mapping[Key, list[float]]:
    """Collect the mean times of entries from all stretches of a run; workers of a batcher are pooled."""
    entries: dict[Key, list[float]] = {}
    for process in processes:
        for row in process.rows:
            if row.path and row.per_entry and all(row.per_entry):
                entries.setdefault((process.kind, row.phase, row.path), []).extend(row.per_entry)
    return entries


def _change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the logarithm of the ratio of the median times of an entry, and its standard error."""
    medians, errors = [], []
    for values in (before, after):
        middle, spread = _middle(values, (statistics.median(values), math.inf))
        medians.append(middle)
        errors.append(1.2533 * spread / math.sqrt(len(values)) / middle)  # of the median of a normal distribution
    return math.log(medians[1] / medians[0]), math.hypot(*errors)


def _middle(values: Sequence[float], if_few: tuple[float, float]) -> tuple[float, float]:
    """Return the median, and the scatter around it as a standard deviation."""
    if len(values) < _FEW:
        return if_few
    middle = statistics.median(values)
    return middle, 1.4826 * statistics.median(abs(value - middle) for value in values)  # of a normal distribution


def _slower(change: float) -> str:
    """Put a change, the logarithm of a ratio, into words."""
    return f"{100 * abs(math.expm1(change)):.0f} % {'slower' if change > 0.0 else 'faster'}"


def _spelt(key: Key) -> str:
    process, phase, path = key
    return f"{process}, {phase}, {'/'.join(path)}"


def _short(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"


def _plain(row: Row) -> dict[str, Any]:
    names = [f"{start} to {end}" for start in REGIONS for end in REGIONS]
    return {
        "phase": row.phase,
        "operation": "/".join(row.path),
        "count": row.count,
        **{name: [*map(float, getattr(row, name))] for name in ("seconds", "overhead", "corrected")},
        "transitions": {name: int(n) for name, n in zip(names, row.transitions.flat, strict=True) if n},
        "per_entry": row.per_entry,
    }


def _lines(text: str) -> Iterator[str]:
    """Wrap lines at 80 columns."""
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield from textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _table(process: Process) -> str:
    """Format the operations of a process as a tree; empty columns are left out.

    Regions, and the time in which the GPU is busy, are percentages of the operation's own time.
    """
    iterations = max(1, sum(row.count for row in process.rows if row.path[-1:] == ("iteration",)))
    total = max(process.corrected, 1e-12)
    rows = [row for row in process.rows if row.count or row.corrected.sum() >= 1e-3 * total]
    table: list[tuple[str, Sequence[str]]] = []
    for phase in dict.fromkeys(row.phase for row in rows):
        table.append((phase, _HEADS))
        for row in sorted((row for row in rows if row.phase == phase), key=lambda row: row.path):
            name = " " * max(1, len(row.path)) + (row.path[-1] if row.path else "(no operation)")
            table.append((name, _cells(row, total, iterations)))
    of = f"each of {iterations} iterations" if iterations > 1 else "all of it"
    lines = [f"{process.name} (pid {process.pid}), {process.corrected:.2f} s; transitions to torch and CUDA in {of}"]
    widths = {}
    for i, column in enumerate(zip(*(cells for _, cells in table), strict=True)):
        if i < 3 or any(cell.strip("0.%") for cell in column if cell != _HEADS[i]):
            widths[i] = 1 + max(map(len, column))
    for name, cells in table:
        numbers = "".join(cells[i].rjust(width) for i, width in widths.items())
        room = _WIDTH - len(numbers)
        lines.append((name if len(name) <= room else f"{name[: room - 1]}…").ljust(room) + numbers)
    return "\n".join(lines)


def _cells(row: Row, total: float, iterations: int) -> list[str]:
    sums = row.corrected.reshape(2, len(REGIONS))
    own = float(sums.sum())
    shares = [float(seconds) / (own or 1.0) for seconds in (*sums.sum(0), sums[1].sum())]
    moves = row.transitions[0, 1] / iterations, row.transitions[:, 3].sum() / iterations
    percents = [f"{100 * share:.0f}%" for share in (own / total, *shares)]
    return [f"{row.count}", f"{own:.3f}", *percents, *(f"{move:.{1 if move < 100 else 0}f}" for move in moves)]
