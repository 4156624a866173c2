"""Helpers to start and end worker processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import get_start_method, process, resource_tracker, set_start_method
from multiprocessing.process import BaseProcess
from pathlib import Path

from rlstruct.batchers.workers.system import descendants
from rlstruct.errors import UsageError

GUARD = 'Put the code that trains or creates a batcher under `if __name__ == "__main__":`.'
WORKER_NAME = "rlstruct-worker"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment variables of a worker, which computes in one thread."""
NO_MAIN_GUARD = 86
"""Exit code of a worker whose main script starts workers while it is being imported."""
_SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT_LOCK = threading.RLock()
"""Held while environment variables are set for new processes."""


def has_ended(child: BaseProcess) -> bool:
    """Return True if a child process has ended, even if its exit code is lost because this process ignores SIGCHLD."""
    if child.exitcode is not None:
        return True
    try:
        os.kill(child.pid or 0, 0)
    except ProcessLookupError:  # a child keeps its id until its exit code has been read
        return True
    return False


class Leftovers:
    """Child processes and names of multiprocessing in /dev/shm that a killed process leaves behind.

    Args:
        pid: process id, before it is killed.
        since: time.time() at its start; names that are older belong to someone else.
    """

    def __init__(self, pid: int, since: float) -> None:
        self._children = descendants(pid)
        mapped = set[int]().union(*map(_mapped_files, (pid, *self._children))) - _mapped_files(os.getpid())
        self._names = [
            file.name
            for file in _SHARED_MEMORY.glob("*")
            if file.name.startswith(("sem.mp-", "psm_")) and _is_one_of(file, mapped, since)
        ]

    def remove(self) -> None:
        """Kill the children, and remove the names."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child, signal.SIGKILL)
        for name in self._names:
            with contextlib.suppress(FileNotFoundError):
                (_SHARED_MEMORY / name).unlink()
            tracked_name, resource_type = (
                f"/{name.removeprefix('sem.')}",
                "semaphore" if name.startswith("sem.") else "shared_memory",
            )
            for call in (resource_tracker.register, resource_tracker.unregister):  # it may not know the name
                call(tracked_name, resource_type)


def _mapped_files(pid: int) -> set[int]:
    """Return the inodes of files in /dev/shm that a process has mapped; semaphores are renamed after that."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return set()
    return set(map(int, re.findall(rf"^(?:\S+ +){{4}}(\d+) +{_SHARED_MEMORY}/", maps, re.MULTILINE)))


def _is_one_of(file: Path, inodes: set[int], since: float) -> bool:
    try:
        status = file.stat()
    except FileNotFoundError:
        return False
    return status.st_ino in inodes and status.st_ctime > since - 0.1  # the clock of file systems is a little late


def exit_worker() -> None:
    """Exit this worker after running the ``atexit`` functions and flushing the standard streams.

    Agent and environments must be closed. A normal exit would tear torch down module by module, and `RL_Batcher.close`
    would wait for that for most of a second. This skips non-daemon threads, and ``__del__`` of objects that only
    modules hold.
    """
    atexit._run_exitfuncs()  # include those of multiprocessing, logging and weakref.finalize
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or missing
            stream.flush()
    os._exit(0)


@contextlib.contextmanager
def inheriting(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start in this block, and restore them afterwards.

    Blocks of one thread may be nested. Other threads wait to enter theirs, so that no process inherits another thread's
    variables.
    """
    with ENVIRONMENT_LOCK:
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


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Let children start with one thread each and ignore Ctrl-C. Other threads wait to enter.

    Raises:
        RuntimeError: the main script creates a batcher without a guard, so every worker that imports it would, too.
    """
    current = process.current_process()
    if getattr(current, "_inheriting", False):
        if current.name.startswith(WORKER_NAME):  # the parent explains it once, instead of every worker
            os._exit(NO_MAIN_GUARD)
        raise UsageError(f"RL_Batcher: this script starts workers while a process that was spawned imports it. {GUARD}")
    open_standard_streams()
    # Children cannot import a main script that is not a file, such as <stdin>. Hidden, its functions and classes are
    # pickled by value, like those of ``python -c`` and of a notebook.
    script = vars(sys.modules["__main__"])
    path = script.get("__file__")
    hidden = path is not None and not os.path.exists(path)
    in_main = threading.current_thread() is threading.main_thread()  # only this thread may set signal handlers
    with inheriting(ONE_THREAD):
        handler = signal.getsignal(signal.SIGINT) if in_main else None  # None: a program that embeds Python has one
        if handler is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        chosen = bool(get_start_method(allow_none=True))
        if hidden:
            del script["__file__"]
        try:
            yield
        finally:
            if hidden:
                script["__file__"] = path
            if not chosen:  # spawning has fixed the start method, but the user may still choose one
                set_start_method(None, force=True)
            if handler is not None:
                signal.signal(signal.SIGINT, handler)


def open_standard_streams() -> None:
    """Open standard input, output and error on the null device if they are closed.

    Otherwise the next file to be opened would get descriptor 0, 1 or 2, and printed text would end up in it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
