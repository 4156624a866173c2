"""Supervisor of an MPS daemon: a script that ends the daemon when its parent ends, and cleans up.

    python -I -S supervisor.py PROGRAM FOLDER PARENT

It is a separate process, so that it works even if the parent is killed. PROGRAM is started in the foreground. When
standard input becomes readable, PARENT is gone, or the daemon has ended by itself, this script ends the daemon and its
servers, deletes FOLDER, and writes the last lines of their logs to standard output. Its exit code is 1 if the daemon
had ended by itself.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

QUIT_SECONDS = 3.0
"""Time that clients get to end."""
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.5
_SET_CHILD_SUBREAPER = 36  # PR_… of linux/prctl.h: orphans of the daemon become children of this process
_TAIL = 1500  # characters of each log


def supervise(program: str, folder: Path, parent: int) -> int:
    """Start the daemon, wait, end it, and return the exit code. ``folder`` contains ``pipe`` and ``log``."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # only the parent decides when to end
        signal.signal(number, lambda *_: None)
    with open(folder / "log" / "output", "wb") as output:
        daemon = subprocess.Popen([program, "-f"], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        while daemon.poll() is None and os.getppid() == parent:
            if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:  # readable, or closed
                break
        by_itself = daemon.poll() is not None
        if not by_itself:
            order = f"quit -t {QUIT_SECONDS:.0f}\n".encode()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                subprocess.run(
                    [program], input=order, stdout=output, stderr=output, timeout=QUIT_SECONDS + 1, check=False
                )
                daemon.wait(QUIT_SECONDS + 1)
    _kill_children()
    logs = [folder / "log" / name for name in ("output", "control.log", "server.log")]
    tails = [log.read_text(errors="replace")[-_TAIL:].strip() for log in logs if log.is_file()]
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        sys.stdout.write("\n".join(tails).strip())
        sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    return int(by_itself)


def _kill_children() -> None:
    """Kill all remaining children, including orphans that become children in the process."""
    deadline = time.monotonic() + _KILL_SECONDS
    with contextlib.suppress(ChildProcessError):  # there are none
        while time.monotonic() < deadline:
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):  # the process has just ended
                    parent = int(stat.read_text().rpartition(")")[2].split()[1])
                    if parent == os.getpid():
                        os.kill(int(stat.parent.name), signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
