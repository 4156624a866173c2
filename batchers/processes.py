"""How worker processes are born and end. Part of rlstruct.batchers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess


def kill(processes: Sequence[SpawnProcess], connections: Sequence[Connection]) -> None:
    """End every worker at once, also one that is stopped or in C code, and leave no zombie."""
    for child in processes:
        if child.is_alive():
            child.kill()
    for child in processes:
        child.join()
    for connection in connections:
        connection.close()


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Let children be born with one thread each, deaf to Ctrl-C; give this process back as it was."""
    if getattr(process.current_process(), "_inheriting", False):
        raise RuntimeError(
            "RL_Batcher: this script starts workers while it is being imported by one. Every worker imports the main "
            'script, so put the code that creates the batcher under `if __name__ == "__main__":`.'
        )
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        yield
    finally:
        if in_main and handler is not None:
            signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
