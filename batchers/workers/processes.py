"""How worker processes start and end."""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import get_start_method, process, set_start_method
from pathlib import Path

GUARD = 'Put the code that creates the batcher under `if __name__ == "__main__":`.'
WORKER_NAME = "rlstruct-worker"
NO_MAIN_GUARD = 86
"""Exit code of a worker whose main script starts workers while it is being imported."""


def mortal_parent() -> int | None:
    """Return this process's id if a child may ask Linux to be killed together with it.

    Linux watches the thread that starts the child; only the main thread lives as long as its process.
    """
    in_main = threading.current_thread() is threading.main_thread()
    return os.getpid() if in_main and sys.platform == "linux" else None


def die_with(parent: int) -> None:
    """Let Linux kill this process when its parent dies, even if it is stopped or busy in C code."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def leave() -> None:
    """End this worker, whose environments and agent are closed: run what ``atexit`` knows, flush, and be gone.

    Python would go on to take torch apart, module by module, which is most of a second in which the user waits in
    `RL_Batcher.close`. What is cut off: threads that are no daemons, and ``__del__`` of what only modules still hold.
    """
    atexit._run_exitfuncs()  # those of multiprocessing, logging and weakref.finalize are among them
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(0)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Let children start with one thread each, deaf to Ctrl-C; leave this process as it was.

    Raises:
        RuntimeError: the main script makes a batcher without a guard; every worker imports it and would do so again.
    """
    _refuse_while_imported()
    _refuse_unguarded()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    chosen = bool(get_start_method(allow_none=True))
    os.environ.update(dict.fromkeys(names, "1"))
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        with _standard_streams():
            yield
    finally:
        if not chosen:  # Python has fixed it while it spawned: give the user's choice back
            set_start_method(None, force=True)
        if in_main and handler is not None:
            signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Open what is closed of standard input, output and error, for children to inherit.

    Otherwise the next file that is opened gets descriptor 0, 1 or 2, and what a child prints is written into it.
    """
    opened = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
            opened.append(fd)
        os.close(fd)
        yield
    finally:
        for fd in opened:
            os.close(fd)


def _refuse_while_imported() -> None:
    current = process.current_process()
    if not getattr(current, "_inheriting", False):
        return
    if current.name.startswith(WORKER_NAME):
        # One of our own workers. Its parent waits for it and gives the explanation, once, instead of one traceback
        # of the import machinery from each of them.
        os._exit(NO_MAIN_GUARD)
    raise RuntimeError(f"RL_Batcher: this script starts workers while a process that was spawned imports it. {GUARD}")


def _refuse_unguarded() -> None:
    """Refuse to start workers that are going to find no guard; to hear it from them takes until they have started.

    Certain only where no `if` of the main script surrounds the line that has led here; any may be a guard.
    """
    main = sys.modules.get("__main__")
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None or not hasattr(main, "__file__"):  # a notebook or a prompt: workers import nothing
        return
    try:
        source = Path(frame.f_code.co_filename).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):  # a frozen program, for example
        return
    line = frame.f_lineno
    if not any(
        isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line) for node in ast.walk(tree)
    ):
        raise RuntimeError(
            f"RL_Batcher: line {line} of {frame.f_code.co_filename} starts workers, and each of them imports this "
            f"script and would do so again. {GUARD}"
        )
