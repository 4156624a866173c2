"""Environment variables for child processes, set by one thread at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_starting = threading.RLock()


@contextlib.contextmanager
def inheriting(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start in this block, and restore them afterwards.

    Blocks of one thread may be nested. Other threads wait to enter theirs, so that no process inherits another thread's
    variables.
    """
    with _starting:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
