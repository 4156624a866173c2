"""Messages to the user: results, and mistakes in one line with the fix."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import re
import shutil
import sys
import textwrap
import traceback
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

from rlstruct.errors import Explained, how_to_install
from rlstruct.options import nearest as nearest  # for the commands
from rlstruct.options import writable

resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None  # not on Windows


_NOT_OF_USERS = {"rlstruct", "torch", "numpy", "gymnasium", "ale_py", "PIL", "importlib", "contextlib", "inspect"}


class UserError(Exception):
    """A mistake of the user: shown as one line; the exit status is 2.

    Attributes:
        remote_traceback: shown after the line: formatted traceback of the user's own code; "" for none.
    """

    remote_traceback = ""


def blame(what: str, error: Exception) -> Exception:
    """Return a UserError for an exception of the user's code or of gymnasium, with the lines of the user's code.

    Errors that this library raises are returned unchanged.
    """
    frames = error.__traceback__
    places: list[tuple[TracebackType, str]] = []
    while frames is not None:
        places.append((frames, frames.tb_frame.f_globals.get("__name__", "").partition(".")[0]))
        frames = frames.tb_next
    if isinstance(error, UserError | Explained) or places[-1][1] in ("rlstruct", "torch"):
        return error
    shown = UserError(f"{what} {type(error).__name__}: {' '.join(str(error).split())}")
    if (begin := next((place for place, package in places if package not in _NOT_OF_USERS), None)) is not None:
        shown.remote_traceback = "".join(traceback.format_exception(type(error), error, begin))
    return shown


def require(extra: str, *modules: str, what: str) -> None:
    """Raise UserError unless an extra of this package is installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{what} needs {', '.join(missing)}, which {verb} not installed. {how_to_install(extra)}")


def check_device(option: str, device: str) -> None:
    """Raise UserError if this machine lacks the device."""
    from rlstruct.device import resolve_device  # imported here: it brings torch, and mistakes are reported without

    try:
        resolve_device(device)
    except ValueError as error:
        raise UserError(f"{option} {device}: {str(error).partition(': ')[2]}") from None


def check_output(option: str, path: Path, *, folder: bool = False) -> Path:
    """Return a path that a command writes at its end; raise UserError if that will be impossible."""
    try:
        return writable(option, path, folder=folder)
    except ValueError as error:
        raise UserError(str(error)) from None


def out_of_memory(error: Exception) -> str:
    """Return one sentence about memory that could not be allocated; "" for every other error.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."))
    'out of memory: you tried to allocate 9 bytes. Make the network, the batches or the environments smaller.'
    """
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return said or "out of memory."
    asked = re.search(r"you tried to allocate \d+ bytes|Tried to allocate [\d.]+ \w+", said)
    if asked is None or not ("can't allocate memory" in said or "out of memory" in said):
        return ""
    return f"out of memory: {asked[0]}. Make the network, the batches or the environments smaller."


def refused(error: OSError) -> str:
    """Describe in one sentence that the operating system refuses a resource; "" for other errors.

    >>> refused(OSError(errno.ENOSPC, "No space left on device", "a.gif"))
    'a.gif: No space left on device.'
    >>> refused(OSError(errno.ENOSPC, "No space left on device", b"a.gif"))
    'a.gif: No space left on device.'
    >>> refused(OSError(errno.EACCES, "Permission denied", "runs/a/config.json"))
    'runs/a/config.json: Permission denied.'
    """
    denied, full = (errno.EACCES, errno.EPERM, errno.EROFS), (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hints = dict.fromkeys((*denied, *full, errno.ENFILE, errno.EMFILE), "")
    if resource is not None:
        files, size = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE))
        hints[errno.EFBIG] = f"`ulimit -f` limits a file to {size} bytes: raise it"
        hints[errno.EMFILE] = f"`ulimit -n` limits a process to {files} open files: raise it, or use fewer processes"
    no_folder = error.errno == errno.ENOENT and "temporary directory" in str(error)
    if error.errno not in hints and not no_folder:
        return ""
    place = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    hint = hints.get(error.errno or 0, "")
    return f"{place}{error.strerror or error}." + (f" {hint}." if hint else "")


def plural(n: int, word: str) -> str:
    """Return a number with its noun: ``1 core``, ``2 cores``."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


LOG: ContextVar[Path | None] = ContextVar("log", default=None)
"""File to which `say` and `complain` also write: ``log.txt`` of the run that a command trains; None for none."""


def wrapped(text: str) -> str:
    """Break a text at spaces, into lines that fit the terminal; 80 columns without one."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, max(20, columns), subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def complain(text: str) -> None:
    """Write a message to the standard error stream; on a terminal, long lines are broken at spaces."""
    if (log := LOG.get()) is not None:
        with contextlib.suppress(OSError):  # the message may be that the disk is full
            _keep(log, text)
    if sys.stderr.isatty():
        text = "\n".join(line if line.startswith(" ") else wrapped(line) for line in text.split("\n"))
    sys.stderr.write(text)


def _keep(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


def say(text: str = "") -> None:
    """Print a line; end the command if its reader, such as ``| head``, has closed the pipe."""
    if (log := LOG.get()) is not None:
        _keep(log, f"{text}\n")
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        raise SystemExit(1) from None
