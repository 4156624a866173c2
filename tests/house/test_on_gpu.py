"""The command for a GPU loses one test, not the rest of its file, to a hang, a crash, or a CUDA that broke down."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import time

import pytest

from checkers import ROOT

TESTS = """
import ctypes, os, pytest
pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_hangs_in_c(): ctypes.CDLL(None).sleep(60)
def test_fails(): assert 1 == 2, "arithmetic"
def test_crashes(): os.abort()
def test_breaks_cuda(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
@pytest.mark.exhaustive
def test_takes_minutes(): raise AssertionError("left out")
def test_comes_last(): pass
"""
SETTINGS = """
[tool.pytest.ini_options]
timeout = 120
markers = ["gpu: needs one", "exhaustive: takes minutes"]
"""


@pytest.mark.slow
def test_every_test_is_accounted_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / ".ci" / "on_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    on_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_gpu)
    root = tmp_path / "repository"
    for folder in ("rlstruct", "agents", "batchers", "algos", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "tests" / "test_it.py").write_text(TESTS)
    (root / "tests" / "test_other.py").write_text("def test_on_the_cpu(): raise AssertionError")
    (root / "pyproject.toml").write_text(SETTINGS)
    (root / ".ci").symlink_to(ROOT / ".ci")
    monkeypatch.setattr(on_gpu, "ROOT", root)
    options = argparse.Namespace(
        out=tmp_path, minutes=1.0, site=None, commit="abc", tests=[], test_seconds=2, file_seconds=20, jobs=2
    )
    session = on_gpu.Session(options, tmp_path / "scratch")
    counts = session.tests(time.monotonic() + 60, has_timeout=True)
    assert counts == {"passed": 2, "lost": 2, "failed": 2}
    found = {row["test"].partition("::")[2]: row for row in json.loads((tmp_path / "tests.json").read_text())}
    assert {name for name, row in found.items() if row["outcome"] == "passed"} == {"test_passes", "test_comes_last"}
    assert "Timeout" in found["test_hangs_in_c"]["said"]
    assert "the process ended here, with -6" in found["test_crashes"]["said"]
    assert "arithmetic" in found["test_fails"]["said"]
    assert "illegal memory access" in found["test_breaks_cuda"]["said"]
