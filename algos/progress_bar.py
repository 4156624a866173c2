"""Progress of a training: a bar on terminals and in notebooks, a line every ten seconds in log files."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rlstruct.errors import import_extra

_SECONDS = 10.0  # between two lines of a log file
_FORMAT = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"


def create_bar(total: int | None, progress: bool) -> Any:  # noqa: ANN401 - tqdm has no types
    """Make what shows the progress on the standard error stream; nothing is shown without ``progress``."""
    tqdm = import_extra("tqdm", "train", "RunFolder").tqdm
    if progress and not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        return LogLines(total)
    return tqdm(total=total, unit="", unit_scale=True, disable=not progress, dynamic_ncols=True, bar_format=_FORMAT)


class LogLines:
    """The methods of a tqdm bar that a RunFolder calls; writes a line every ten seconds, the first after ten.

    Args:
        total: environment steps of the training; None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self.total, self.n = total, 0
        self._shown: Mapping[str, str] = {}
        self._start = self._written = time.monotonic()
        self._from = 0

    def update(self, n: int) -> None:
        """Count ``n`` more steps."""
        self.n += n
        self._write()

    def set_postfix(self, shown: Mapping[str, str]) -> None:
        """Show these numbers in later lines."""
        self._shown = shown
        self._write()

    def reset(self) -> None:
        """Begin the rate anew."""
        self._start, self._from = time.monotonic(), self.n

    def close(self) -> None:
        """Write nothing more."""

    def _write(self) -> None:
        now = time.monotonic()
        if now < self._written + _SECONDS:
            return
        self._written = now
        rate = (self.n - self._from) / max(now - self._start, 1e-9)
        of = "" if self.total is None else f" of {self.total:,}"
        numbers = "".join(f", {name} {value}" for name, value in self._shown.items())
        sys.stderr.write(f"{self.n:,}{of} steps, {rate:,.0f} per second{numbers}\n")
        sys.stderr.flush()
