"""A run of a benchmark on a GPU: it is resumed where it was cut, and goes on without what hung or broke CUDA."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import re
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from common import reporting
from common.ladder_rungs import MakeRung, Rung

from rlstruct.device import resolve_device
from rlstruct.errors import SharingError
from rlstruct.profiling import read
from rlstruct.sharing import mig_instances, mps

BROKEN = 70  # exit code: CUDA broke, or something hung
NO_TIME = "the time budget is used up"
UNFINISHED = "unfinished"  # key of a row that is not complete; its value names the keys that say what the row is about
_MAY_BE_MEASURED_NOW = re.compile(rf"{NO_TIME}$|ModuleNotFoundError: |ImportError: |.* is not installed")


@dataclass
class Run:
    """One run of a benchmark in parts with a time budget; a row has the key ``part``."""

    name: ClassVar[str]  # of its results
    longest: ClassVar[float] = 100.0  # seconds that what is `limited` may take, its compilation included
    device: torch.device  # under test
    quick: bool  # only look whether everything runs
    deadline: float  # when to stop, of time.perf_counter
    rows: list[reporting.Row] = field(default_factory=list)  # found so far, written after each
    path: Path = field(init=False)  # of the JSON file
    silent: bool = False  # write rows without showing them
    _now: tuple[float, reporting.Row] | None = None  # when what is going on hangs, and the row that says so

    def __post_init__(self) -> None:
        self.path = reporting.result_path(self.name)

    def add(self, **row: Any) -> reporting.Row:  # noqa: ANN401 - plain values
        """Write a row, in place of an unfinished one about the same thing, and show it if it is complete."""
        self.rows = [old for old in self.rows if not _replaces(row, old)]
        self.rows.append(row)
        self.path = reporting.write(self.name, self.rows)
        if UNFINISHED in row:
            return row
        shown = [(key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in row.items()]
        if not self.silent:
            print("  ".join(f"{key} {value}" for key, value in shown if key != "rounds"), flush=True)
        return row

    def add_unfinished(self, about: reporting.Row, found: reporting.Row) -> None:
        """Write what has been found so far: a run that is cut keeps it, and one that is resumed measures it again."""
        self.add(**about, **found, **{UNFINISHED: list(about)})

    def watch(self) -> None:
        """Begin to end the program as soon as something hangs; rows say what."""

        def look() -> None:
            while (now := self._now) is None or time.perf_counter() < now[0]:
                time.sleep(0.5)
            self._end(self.add(**now[1], left_out=f"it took more than {self.longest:.0f} s"))

        threading.Thread(target=look, daemon=True).start()

    @contextlib.contextmanager
    def limited(self, **row: object) -> Iterator[None]:
        """Let the program end if what is inside hangs, or a signal ends it; rows say what."""
        self._now = (time.perf_counter() + self.longest, row)
        try:
            with self.noted(**row):
                yield
        finally:
            self._now = None

    @contextlib.contextmanager
    def noted(self, **row: object) -> Iterator[None]:
        """Keep a note of what is going on, which becomes a row in the resumed run if a signal ends the program."""
        self._note.parent.mkdir(exist_ok=True)
        self._note.write_text(json.dumps(row))
        try:
            yield
        finally:
            self._note.unlink(missing_ok=True)

    @property
    def _note(self) -> Path:
        return self.path.with_suffix(".now")

    def _end(self, row: reporting.Row) -> None:
        """End the program at once, as destructors fail after an error of CUDA; a row says what broke it."""
        row["broke"] = True
        reporting.write(self.name, self.rows)
        self._note.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(BROKEN)

    def measured(self, part: str, **where: object) -> bool:
        """Return True if a part has complete rows with these values only; rungs that broke CUDA do not count."""
        found = [row for row in self.rows if row["part"] == part]
        found = [row for row in found if all(row.get(key) == value for key, value in where.items())]
        complete = [row for row in found if not ("rung" in row and row.get("broke"))]
        return bool(complete) and all(UNFINISHED not in row for row in found)

    def left(self, seconds: float, what: str) -> bool:
        """Return True if there is time left for a part; otherwise report that there is not."""
        if time.perf_counter() + seconds < self.deadline:
            return True
        self.add(part=what, left_out=NO_TIME)
        return False

    def todo(self, part: str, seconds: float, places: Iterable[reporting.Row]) -> Iterator[reporting.Row]:
        """Yield the places of a part that have not been measured, while there is time for each."""
        for where in places:
            if not self.measured(part, **where):
                if not self.left(seconds, part):
                    return
                yield where

    def resume(self) -> None:
        """Keep the rows of the same device and commit that were measured before.

        What was left out for want of time, or of a package that may be there by now, is measured again; what the
        program died of is not.
        """
        found = reporting.written(self.name)
        self.rows = [row for row in found if not _MAY_BE_MEASURED_NOW.match(row.get("left_out", ""))]
        if self._note.exists():
            self.add(**json.loads(self._note.read_text()), left_out="the program died", broke=True)
            self._note.unlink()

    @contextlib.contextmanager
    def caught(self, **row: object) -> Iterator[None]:
        """Turn an exception inside into a row that says what was left out."""
        try:
            yield
        except Exception as error:  # whatever it is, what follows is measured all the same
            self.failed(error, **row)

    def failed(self, error: Exception, **row: Any) -> None:  # noqa: ANN401 - plain values
        """Write down what could not be measured; end the program if CUDA answers to nothing from here on."""
        said = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, SharingError):  # it says what this device cannot do
            self.add(**row, left_out=said)
            return
        traceback.print_exception(error)
        row = self.add(**row, left_out=f"{type(error).__name__}: {said}")
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                self._end(row)

    def best(self, part: str, unit: str = "steps_per_second", **where: object) -> float | None:
        """Return the highest rate in rows with these values, None if none was measured."""
        own = [row for row in self.rows if row["part"] == part and unit in row]
        return max((row[unit] for row in own if all(row.get(k) == v for k, v in where.items())), default=None)

    def summarise(self, ratios: Iterable[tuple[str, float | None, float | None]]) -> None:
        """Write rows of a summary anew: names, values, and targets where there are some."""
        self.rows = [row for row in self.rows if row["part"] != "summary"]
        for name, value, target in ratios:
            if value is not None or target is not None:
                met = "not measured" if value is None else None if target is None else value >= target
                self.add(part="summary", ratio=name, value=value, target=target, met=met)


def use_in(folder: str | Path) -> reporting.Row:
    """Return NVML's utilisation of a GPU, and the share in which any process is busy there, from a profile."""
    report = read(folder)
    # Of several processes their union; of one that shares with nothing else, its own.
    found = max((*report.shared, *report.gpus), key=lambda use: use.busy, default=None)
    return {} if found is None else {"nvml": found.nvml, "busy": found.busy}


def check_mps(device: torch.device) -> None:
    """Raise SharingError if no MPS daemon starts here. It is tried once, as a failure takes up to a minute."""
    if why_not := why_no_mps(device):
        raise SharingError(why_not)


@cache
def why_no_mps(device: torch.device) -> str:
    try:
        with contextlib.nullcontext() if mig_instances() else mps(device):  # with instances, GpuSharing says why not
            return ""
    except SharingError as error:
        return str(error)


class Ladder(Run):
    """A run that times rungs side by side."""

    def rate(
        self, part: str, makers: Sequence[MakeRung], look: Callable[[Rung], reporting.Row] | None = None,
        **where: Any,  # noqa: ANN401 - plain values
    ) -> None:  # fmt: skip
        """Measure rungs side by side, one row each; one that raises gets a row too, and the others go on.

        Args:
            part: of the benchmark.
            makers: of the rungs.
            look: returns what else a row says of its rung.
            where: what all rows say, with the number of environments as N.
        """

        def found(rung: Rung, seconds: list[float]) -> reporting.Row:
            rate = where["N"] * rung.steps / statistics.median(seconds)
            return {"steps": rung.steps, "steps_per_second": rate, "rounds": seconds}

        def first_look(rung: Rung) -> None:
            self.add_unfinished(
                {"part": part, "rung": rung.name, **where}, found(rung, [reporting.seconds_of(rung.run, 1)])
            )

        rungs, n_envs = self.made(part, makers, first_look, **where), where["N"]
        rounds: dict[str, list[float]] = {rung.name: [] for rung in rungs}
        counts: dict[str, int] = {}
        for _, rung in itertools.product(range(6), list(rungs)):
            if rung in rungs:
                try:
                    with self.limited(part=part, rung=rung.name, **where):
                        if rung.name in counts:
                            rounds[rung.name].append(reporting.seconds_of(rung.run, counts[rung.name]))
                        else:
                            counts[rung.name] = reporting.calls_in(rung.run, 0.002 if self.quick else 0.08)
                except Exception as error:  # whatever it is, the others are measured all the same
                    rungs.remove(rung)
                    self.failed(error, part=part, rung=rung.name, **where)
        for rung in rungs:
            carry = {} if rung.env is None else rung.env.state_tensors()
            also: reporting.Row = {}
            if look is not None:
                row = {"part": part, "rung": rung.name, "look": True, **where}
                with self.caught(**row), self.limited(**row):
                    also = look(rung)
            self.add(
                part=part, rung=rung.name, **where, **found(rung, rounds[rung.name]),
                bytes_per_environment=sum(value.nbytes for value in carry.values()) / n_envs or None, **also,
            )  # fmt: skip

    def made(
        self, part: str, makers: Sequence[MakeRung], look: Callable[[Rung], None] | None = None, **where: object
    ) -> list[Rung]:
        """Make the rungs that have no row yet, warm each up, and call ``look``; one that raises gets a row too."""
        if self.device.type == "cuda":
            gc.collect()  # the rungs before hold each other, and many gigabytes
            torch.cuda.empty_cache()
        rungs = []
        for maker in makers:
            row = {"part": part, "rung": _name(maker), **where}
            broke = [old for old in self.rows if old.get("broke") and old.get("rung") == row["rung"]]
            # It may be too large here only; what breaks twice is left out everywhere.
            if len(broke) < 2 and not any(row.items() <= old.items() for old in broke) and not self.measured(**row):
                with self.caught(**row), self.limited(**row):
                    rung = maker()
                    rung.run()
                    rung.run()
                    if look is not None:
                        look(rung)
                    rungs.append(rung)
        return rungs


def _replaces(row: reporting.Row, old: reporting.Row) -> bool:
    return UNFINISHED in old and all(row.get(key) == old[key] for key in old[UNFINISHED])


def _name(maker: MakeRung) -> str:
    """Return the name of a rung that may not exist: the first text of its maker, or of the maker in that."""
    for value in maker.args if isinstance(maker, partial) else ():
        if isinstance(value, str | partial):
            return value if isinstance(value, str) else _name(value)
    return getattr(maker, "func", maker).__name__


R = TypeVar("R", bound=Run)


def parser(doc: str | None, parts: Mapping[str, Callable[..., None]]) -> argparse.ArgumentParser:
    """Return a command line with what all of these benchmarks have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    made.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    made.add_argument("--minutes", type=float, help="time budget of the whole; 8 for each part by default")
    made.add_argument("--quick", action="store_true", help="few sizes, short repeats: does it run?")
    made.add_argument("--out", type=Path, default=reporting.RESULTS, help="folder of JSON and picture")
    made.add_argument("--resume", action="store_true", help="keep the rows of the same device and commit in --out")
    return made


def begin(kind: type[R], options: argparse.Namespace) -> R:
    """Return a run with these options, which watches what hangs."""
    reporting.RESULTS = options.out
    minutes = 8.0 * len(options.parts) if options.minutes is None else options.minutes
    run = kind(resolve_device(options.device), options.quick, time.perf_counter() + 60 * minutes)
    if options.resume:
        run.resume()
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    print(reporting.machine())
    run.watch()
    return run


def measure(run: R, parts: Mapping[str, Callable[[R], None]], summary: Callable[[R], None] = lambda run: None) -> None:
    """Take parts in order; the run may be cut, so the file has a summary after each of them."""
    for number, (name, part) in enumerate(parts.items(), 1):
        with run.caught(part=name):
            part(run)
        run.silent = number < len(parts)
        with run.caught(part="summary"):
            summary(run)
        run.silent = False
    print(run.path)
