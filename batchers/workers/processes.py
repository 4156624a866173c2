"""Start and end of worker processes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import get_start_method, process, set_start_method
from multiprocessing.process import BaseProcess

from rlstruct.errors import UsageError
from rlstruct.sharing.inheriting import inheriting as inheriting  # for learners, too

GUARD = 'Put the code that creates the batcher under `if __name__ == "__main__":`.'
WORKER_NAME = "rlstruct-worker"
NO_MAIN_GUARD = 86
"""Exit code of a worker whose main script starts workers while it is being imported."""


def mortal_parent() -> int | None:
    """Return this process's id if a child may ask Linux to be killed together with it, else None.

    Linux watches the thread that starts the child; only the main thread lives as long as its process.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else None


def die_with(parent: int) -> None:
    """Let Linux kill this process when its parent dies, even if it is stopped or busy in C code."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def has_ended(child: BaseProcess) -> bool:
    """Return True if a child process has ended, also if its exit code is lost because this process ignores SIGCHLD."""
    if child.exitcode is not None:
        return True
    try:
        os.kill(child.pid or 0, 0)
    except ProcessLookupError:  # only then: a child whose exit code is still to be read keeps its id
        return True
    return False


def leave() -> None:
    """End this worker, whose environments and agent are closed: run what ``atexit`` knows, flush, and exit.

    Python itself would tear torch down module by module, and the user would wait for that in `RL_Batcher.close` for
    most of a second. Cut off are non-daemon threads, and ``__del__`` of objects that only modules still hold.
    """
    atexit._run_exitfuncs()  # those of multiprocessing, logging and weakref.finalize are among them
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(0)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Let children start with one thread each, deaf to Ctrl-C; restore this process afterwards. Other threads wait.

    Raises:
        RuntimeError: the main script makes a batcher without a guard; every worker imports it and would do so again.
    """
    current = process.current_process()
    if getattr(current, "_inheriting", False):
        if current.name.startswith(WORKER_NAME):  # its parent waits for it and explains once, instead of every worker
            os._exit(NO_MAIN_GUARD)
        raise UsageError(f"RL_Batcher: this script starts workers while a process that was spawned imports it. {GUARD}")
    open_standard_streams()
    # Children would fail to import a main script that is no file, such as <stdin>. Its functions and classes travel by
    # value, as those of ``python -c`` and of a notebook do.
    script = vars(sys.modules["__main__"])
    path = script.get("__file__")
    hidden = path is not None and not os.path.exists(path)
    in_main = threading.current_thread() is threading.main_thread()  # only there Python can ignore Ctrl-C
    with inheriting(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")):
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        chosen = bool(get_start_method(allow_none=True))
        if hidden:
            del script["__file__"]
        try:
            yield
        finally:
            if hidden:
                script["__file__"] = path
            if not chosen:  # Python has fixed it while it spawned: give the user's choice back
                set_start_method(None, force=True)
            if handler is not None:
                signal.signal(signal.SIGINT, handler)


def open_standard_streams() -> None:
    """Open what is closed of standard input, output and error, for good.

    Otherwise the next file that is opened gets descriptor 0, 1 or 2, and what is printed is written into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
