"""A fake of MPS for the tests of sharing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_mps import FakeMps


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    """A fake MPS, in a folder with a short name: those of sockets are at most 107 characters long."""
    with tempfile.TemporaryDirectory(prefix="fake-mps-", dir="/tmp") as folder:
        yield FakeMps(Path(folder), monkeypatch)
        monkeypatch.undo()
