"""Keeper of an MPS daemon: a script that ends the daemon with the process it is for, and leaves nothing behind.

    python -I -S keeper.py PROGRAM FOLDER PARENT

It is a separate process, so that a parent that is killed takes its daemon with it. PROGRAM is started in the
foreground. Once something arrives on standard input, or PARENT is gone, or the daemon has ended by itself, this script
ends daemon and servers, deletes FOLDER, and writes the last lines of their logs to standard output. It exits with 1 if
the daemon had ended by itself.
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
"""Grace period of the clients after the request to end."""
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.5
_SET_CHILD_SUBREAPER = 36  # PR_… of linux/prctl.h: processes that the daemon leaves become children of this one
_TAIL = 1500  # characters of each log


def keep(program: str, folder: Path, parent: int) -> int:
    """Start the daemon for a parent, wait, end it, and return the exit code; ``folder`` has ``pipe`` and ``log``."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides, and it may be the last to go
        signal.signal(number, lambda *_: None)
    with open(folder / "log" / "output", "wb") as output:
        daemon = subprocess.Popen([program, "-f"], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        while daemon.poll() is None and os.getppid() == parent:
            if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:  # or it is closed
                break
        by_itself = daemon.poll() is not None
        if not by_itself:
            _quit(program, daemon, output.fileno())
    _kill_children()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        sys.stdout.write(said(folder))
        sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    return int(by_itself)


def said(folder: Path) -> str:
    """Return the last lines of the logs of daemon and server."""
    logs = [folder / "log" / name for name in ("output", "control.log", "server.log")]
    return "\n".join(log.read_text(errors="replace")[-_TAIL:].strip() for log in logs if log.is_file()).strip()


def _quit(program: str, daemon: "subprocess.Popen[bytes]", output: int) -> None:
    """Ask the daemon to end, and wait a few seconds."""
    order = f"quit -t {QUIT_SECONDS:.0f}\n".encode()
    with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
        subprocess.run([program], input=order, stdout=output, stderr=output, timeout=QUIT_SECONDS + 1, check=False)
        daemon.wait(QUIT_SECONDS + 1)


def _kill_children() -> None:
    """Kill all remaining children; processes that they leave become children in turn."""
    deadline = time.monotonic() + _KILL_SECONDS
    with contextlib.suppress(ChildProcessError):  # there are none
        while time.monotonic() < deadline:
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    parent = int(stat.read_text().rpartition(")")[2].split()[1])
                    if parent == os.getpid():
                        os.kill(int(stat.parent.name), signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
