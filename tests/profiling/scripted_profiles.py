"""Profiles whose truth is known: files as the library reads them, written by a script of what happens."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

from rlstruct.profiling.events import SWITCHING, WATCHED

Marks = list[Any]


def in_one_line(report: object) -> str:
    """A report without the breaks that let it fit a terminal."""
    return " ".join(str(report).split())


@dataclass
class Script:
    """A process whose every nanosecond is given; measuring can cost something, before each event that is noted.

    It is watched, until `slice` says otherwise.
    """

    name: str = "main"
    pid: int = 1
    parent: int = 0
    operation_cost: int = 0
    operator_cost: int = 0
    phase: str = "training"
    start: int = 10**9
    now: int = 10**9
    times: list[int] = field(default_factory=list)
    marks: Marks = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    slices: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.start
        self.slices = [(self.start, WATCHED)]
        self.times, self.marks = [self.start], [[self.phase]]

    def python(self, ns: int) -> Script:
        self.now += ns
        return self

    def enter(self, name: str) -> Script:
        self.now += self.operation_cost
        self.times.append(self.now)
        self.marks.append(name)
        return self

    def leave(self) -> Script:
        self.times.append(self.now)
        self.marks.append(None)
        return self

    def slice(self, kind: int, switching: int = 0) -> Script:
        self.slices.append((self.now, SWITCHING))
        self.now += switching
        self.slices.append((self.now, kind))
        return self

    def operator(self, ns: int, name: str = "aten::mm") -> Script:
        if self.slices[-1][1] == WATCHED:
            self.now += self.operator_cost
            self._event("cpu_op", name, self.now, ns, {})
        self.now += ns
        return self

    def call(self, ns: int, name: str, correlation: int) -> Script:
        self._event("cuda_runtime", name, self.now, ns, {"correlation": correlation})
        self.now += ns
        return self

    def on_gpu(
        self, start: int, ns: int, correlation: int, name: str = "kernel", blocks: int = 132, device: int = 0
    ) -> Script:
        """Something on the GPU, ``start`` ns after the beginning."""
        args = {"device": device, "stream": 7, "correlation": correlation}
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        if category == "kernel":
            args |= {"grid": [blocks, 1, 1], "block": [128, 1, 1]}
        self._event(category, name, self.start + start, ns, args)
        return self

    def _event(self, category: str, name: str, start: int, ns: int, args: dict[str, Any]) -> None:
        # As Kineto writes them: microseconds after a base, with three digits behind the point.
        kind = {"ph": "X", "cat": category, "name": name, "pid": self.pid, "tid": self.pid}
        self.events.append({**kind, "ts": round((start - 10**8) / 1000, 3), "dur": round(ns / 1000, 3), "args": args})

    def write(self, folder: pathlib.Path, window: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        found = {"process": self.name, "pid": self.pid, "parent": self.parent, "window": window}
        found |= {"begun": self.start, "ended": self.now, "origin": self.start, "unix": 5}
        found |= {"times": self.times, "marks": self.marks, "slices": self.slices, "cost": self.operation_cost}
        trace = {
            "baseTimeNanoseconds": 10**8 + 5,
            "deviceProperties": [{"id": 0, "name": "GPU", "numSms": 132}],
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": self.pid, "args": {}}, *self.events],
        }
        (folder / f"{self.pid}-{window}.operations.json").write_text(json.dumps(found))
        (folder / f"{self.pid}-{window}.kineto.json").write_text(json.dumps(trace))
