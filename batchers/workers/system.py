"""Services of the operating system that workers need, for Linux and, in portable form, for macOS.

| service                   | Linux                            | portable                                        |
|---------------------------|----------------------------------|-------------------------------------------------|
| memory without a name     | memfd                            | temporary file, unlinked at once                |
| an end with the parent    | parent-death signal              | thread that watches the parent                  |
| start of a worker         | fork of a server that has torch  | multiprocessing's spawn, which imports it again |
| processes that it started | /proc                            | ps                                              |
| state of a process        | /proc                            | ps                                              |

The portable form keeps one promise less: a worker that is stopped, or holds Python's lock in C code, ends after its
parent only once it continues. ``RLSTRUCT_PORTABLE=1`` selects it on Linux, where the tests run with both. Windows has
neither, see `check_platform`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlstruct.errors import UsageError

_WATCH_SECONDS = 0.2


def is_portable() -> bool:
    """Return True unless this is Linux, or if the variable ``RLSTRUCT_PORTABLE`` is ``1``."""
    return sys.platform != "linux" or os.environ.get("RLSTRUCT_PORTABLE") == "1"


def check_platform(where: str) -> None:
    """Raise UsageError on Windows, which cannot start worker processes."""
    if sys.platform == "win32":
        raise UsageError(
            f"{where}: worker processes need Linux or macOS, got Windows. Collect in this process (n_processes=0, "
            "evaluation_processes=0 and n_learners=1), or run the program in WSL, the Linux of Windows."
        )


def open_memory() -> int:
    """Return the descriptor of an empty file without a name, which vanishes with the last process that holds it."""
    if not is_portable():
        return os.memfd_create("rlstruct", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="rlstruct-") as file:
        return os.dup(file.fileno())


def mortal_parent() -> int | None:
    """Return this process's id if a child can be made to end with it, else None.

    Linux watches the thread that starts the child, and only the main thread lives as long as its process.
    """
    watched = is_portable() or threading.current_thread() is threading.main_thread()
    return os.getpid() if watched else None


def die_with(parent: int) -> None:
    """Let this process be killed when its parent ends; on Linux even if this process is stopped or busy in C code."""
    if is_portable():
        threading.Thread(target=_watch, args=(parent,), name="rlstruct-watch-parent", daemon=True).start()
    else:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def start_process(target: Callable[..., object], arguments: tuple[Any, ...], name: str, seconds: float) -> BaseProcess:
    """Start a process that calls ``target`` and is killed when this process ends. Call this within `quiet_start`.

    Raises:
        OSError: the process cannot be started, or the server has not read requests for this many seconds.
    """
    process: BaseProcess
    if is_portable() or getattr(sys, "frozen", False):  # a frozen executable cannot run the server's code
        process = get_context("spawn").Process(target=_call, args=(mortal_parent(), target, arguments), name=name)
    else:
        from rlstruct.batchers.workers.fork_server import ForkedProcess  # imported here: only Linux can

        process = ForkedProcess(target=target, args=arguments, name=name)
        process.seconds = seconds
    process.start()
    return process


def _call(parent: int | None, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if parent is not None:
        die_with(parent)
    target(*arguments)


def process_state(pid: int) -> str:
    """Return the first letter of a process's state, as ``ps`` shows it, or "" if there is no such process.

    ``T`` is a process that a signal has stopped, ``Z`` one that has ended. On Windows the result is always ``?``.
    """
    if sys.platform == "win32":
        return "?"
    if is_portable():
        words = ["ps", "-o", "state=", "-p", str(pid)]
        return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()[:1]
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes that a process has started, and those that these have started."""
    children_of = _children_by_ps() if is_portable() else _children
    found = [pid]
    for one in found:  # which grows meanwhile
        found.extend(children_of(one))
    return found[1:]


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            children.extend(map(int, (task / "children").read_text().split()))
    return children


def _children_by_ps() -> Callable[[int], list[int]]:
    words = ["ps", "-A", "-o", "pid=", "-o", "ppid="]
    children: dict[int, list[int]] = {}
    for line in subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    return lambda pid: children.get(pid, [])
