"""One process at a time writes into a run folder. Layer 4."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # Windows has none

# What file systems answer that cannot lock, some of those that a cluster shares.
_CANNOT = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


class Lease:
    """Held on a file until it is closed, or its process ends, in whichever way: the kernel takes it back.

    Worker processes, which are spawned, do not hold it; one that is forked does. The file's content is left alone, and
    others may read it. Where there is no ``fcntl`` (Windows) every process gets
    the lease; where the file system cannot lock, too, with a warning.

    Args:
        path: of a file that nobody replaces or deletes.
        holder: stands before the message of the error.

    Raises:
        RuntimeError: it is held already.
    """

    def __init__(self, path: Path, holder: str) -> None:
        """Take it."""
        self._file = path.open("ab")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RuntimeError(
                f"{holder}: {path.parent} is in use: a training writes into it, in another process or in this one. Let "
                f"it end, or stop it ('fuser -v {path}' shows its process); a RunFolder in this process is given up by "
                "close()."
            ) from None
        except OSError as error:
            if error.errno not in _CANNOT:
                self._file.close()
                raise
            warnings.warn(
                f"{holder}: the file system of {path.parent} cannot lock files ({error}): nothing keeps two processes "
                "from training in this folder.",
                stacklevel=3,
            )

    def close(self) -> None:
        """Give it up. Calling it again does nothing."""
        self._file.close()
