"""A run of a benchmark on a GPU: it is resumed where it was cut, and goes on without what hung or broke CUDA."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, ClassVar

import _report
import torch

BROKEN = 70  # exit code: CUDA broke, or something hung
NO_TIME = "the time budget is used up"


class Run(_report.Run):
    """One run of a benchmark in parts; a row has the key ``part``.

    Attributes:
        longest: seconds that what is `limited` may take, its compilation included.
    """

    longest: ClassVar[float] = 100.0
    _now: tuple[float, _report.Row] | None = None  # when what is going on hangs, and the row that says so

    def watch(self) -> None:
        """Begin to end the program as soon as something hangs; rows say what."""

        def look() -> None:
            while (now := self._now) is None or time.perf_counter() < now[0]:
                time.sleep(0.5)
            self.add(**now[1], left_out=f"it took more than {self.longest:.0f} s", broke=True)
            os._exit(BROKEN)

        threading.Thread(target=look, daemon=True).start()

    @contextlib.contextmanager
    def limited(self, **row: object) -> Iterator[None]:
        """Let the program end if what is inside hangs."""
        self._now = (time.perf_counter() + self.longest, row)
        try:
            yield
        finally:
            self._now = None

    def measured(self, part: str, **where: object) -> bool:
        """Return True if a part has rows with these values; rungs that broke CUDA do not count."""
        return any(
            row["part"] == part
            and not ("rung" in row and row.get("broke"))
            and all(row.get(key) == value for key, value in where.items())
            for row in self.rows
        )

    def left(self, seconds: float, what: str) -> bool:
        """Return True if there is time left for a part; otherwise report that there is not."""
        if time.perf_counter() + seconds < self.deadline:
            return True
        self.add(part=what, left_out=NO_TIME)
        return False

    def resume(self) -> None:
        """Keep the rows of the same device and commit that were measured before."""
        path = _report.result_path(self.name)
        found = json.loads(path.read_text())["rows"] if path.exists() else []
        self.rows = [row for row in found if row["part"] != "summary" and row.get("left_out") != NO_TIME]

    @contextlib.contextmanager
    def caught(self, **row: object) -> Iterator[None]:
        """Turn an exception inside into a row that says what was left out."""
        try:
            yield
        except Exception as error:  # whatever it is, what follows is measured all the same
            self.failed(error, **row)

    def failed(self, error: Exception, **row: Any) -> None:  # noqa: ANN401 - plain values
        """Write down what could not be measured; end the program if CUDA answers to nothing from here on.

        Raises:
            SystemExit: it does not.
        """
        traceback.print_exception(error)
        said = str(error).strip().splitlines() or [""]
        row = self.add(**row, left_out=f"{type(error).__name__}: {said[0]}")
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                row["broke"] = True
                _report.write(self.name, self.rows)
                raise SystemExit(BROKEN) from error
