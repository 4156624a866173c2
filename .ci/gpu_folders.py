"""Folders of `.ci/on_gpu.py`: unpacks archives of packages, and copies results out as they arrive."""

from __future__ import annotations

import shutil
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

LARGEST = 15 << 20  # bytes; of a longer log, only the end is copied
PERIOD = 2.0  # seconds between checks


def unpack(archives: Path, site: Path) -> None:
    """Unpack the archives of `.ci/pack_site.py` in a folder that have not been unpacked yet."""

    def one(archive: Path) -> None:
        done = site / f".{archive.name}"
        if not done.exists():
            with tarfile.open(archive) as whole:
                whole.extractall(site, filter="data")
            done.touch()

    found = sorted(archives.glob("*.tar.xz"))
    if found:
        site.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:
            list(pool.map(one, found))


class Copies:
    """Thread that copies results to another folder while they are written, so that a killed command loses nothing.

    Args:
        source: folder with the results.
        target: folder to copy to; None copies nothing.
        ending: end of the file names to copy, without .json or .log.
    """

    def __init__(self, source: Path, target: Path | None, ending: str) -> None:
        """Create the thread without starting it."""
        self._source, self._ending = source, ending
        self._target = None if target is None or target.resolve() == source.resolve() else target
        self._seen: dict[Path, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Copies:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Copy the last changes, and stop."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(PERIOD):
            self.copy()
        self.copy()

    def copy(self) -> None:
        """Copy the files that have changed."""
        if self._target is None:
            return
        self._target.mkdir(parents=True, exist_ok=True)
        for file in sorted(self._source.glob(f"*{self._ending}.*")):
            if file.suffix not in (".json", ".log"):
                continue
            state = file.stat()
            now = state.st_mtime_ns, state.st_size
            if self._seen.get(file) != now:
                part = self._target / f"{file.name}.part"  # so that readers of the folder see complete files only
                with file.open("rb") as read, part.open("wb") as write:
                    read.seek(max(0, state.st_size - LARGEST))
                    shutil.copyfileobj(read, write)
                part.replace(self._target / file.name)
                self._seen[file] = now
