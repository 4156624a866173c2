"""Start of a profile, and the settings that it passes to processes through the environment."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlstruct.errors import BadValueError, FolderTakenError, UsageError
from rlstruct.profiling.operations import VARIABLE, is_on, start_if_requested, stop

RECORDED_FRACTION = 0.25


@contextlib.contextmanager
def profile(
    path: str | os.PathLike[str], *, window: float = 1.0, operators: float = RECORDED_FRACTION
) -> Iterator[None]:
    """Profile this process, and all processes started within the block that import `rlstruct`.

    Afterwards, `rlstruct.profiling.read` analyses the folder. A process writes its records at the end of each window
    and when it ends; a killed process loses only its last window.

    Args:
        path: folder to write to, created if missing; it must not hold a profile.
        window: seconds to record at a time; see `rlstruct.profiling.recorder`.
        operators: share of the time in which torch's operators are recorded. With 0, all of Python and torch counts as
            Python; with 1, the cost of recording them is unknown and stays in the numbers.

    Raises:
        RuntimeError: this process is being profiled.
        FileExistsError: the folder holds a profile.
    """
    if is_on():
        raise UsageError(
            f"profile: this process is being profiled already. End that profile first, or unset {VARIABLE}."
        )
    os.environ[VARIABLE] = settings(path, window=window, operators=operators)
    start_if_requested()
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        stop()


def settings(path: str | os.PathLike[str], *, window: float = 1.0, operators: float = RECORDED_FRACTION) -> str:
    """Create the folder, and return the value of `VARIABLE` that makes a process record into it."""
    folder = Path(path).resolve()
    if not 1e-3 <= window < math.inf:
        raise BadValueError(f"profile: window is {window}, expected a finite number of seconds, at least 0.001.")
    if not 0.0 <= operators <= 1.0:
        raise BadValueError(f"profile: operators is {operators}, expected a share of the time, from 0 to 1.")
    if list(folder.glob("*.operations.json")):
        raise FolderTakenError(f"profile: {folder} holds a profile. Give another folder, or remove this one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # it may exist, but be read-only
    except OSError as error:
        raise BadValueError(f"profile: {folder} cannot be written: {error.strerror}. Pass another path.") from None
    chosen = {
        "folder": str(folder),
        "origin": time.perf_counter_ns(),
        "window": int(1e9 * window),
        "operators": operators,
    }
    return json.dumps({**chosen, "phase": "start"})
