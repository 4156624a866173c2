"""The command for a GPU loses one test, not the rest of its file, to a hang, a crash, or a CUDA that broke down."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from checkers import ROOT

TESTS = """
import ctypes, os, pytest
pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_hangs_in_c(): ctypes.CDLL(None).sleep(60)
def test_hangs_in_c_no_more(): pass
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
    monkeypatch.setitem(sys.modules, "on_gpu", on_gpu)  # its dataclass looks itself up
    spec.loader.exec_module(on_gpu)
    root = tmp_path / "repository"
    for folder in ("rlstruct", "agents", "batchers", "algos", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "tests" / "test_it.py").write_text(TESTS)
    (root / "tests" / "test_broken.py").write_text("import not_there, pytest\npytestmark = pytest.mark.gpu\n")
    (root / "tests" / "test_other.py").write_text("def test_on_the_cpu(): raise AssertionError")
    (root / "pyproject.toml").write_text(SETTINGS)
    for folder in (".ci", "benchmarks"):
        (root / folder).symlink_to(ROOT / folder)
    monkeypatch.setattr(on_gpu, "ROOT", root)
    options = argparse.Namespace(
        out=tmp_path,
        cache=tmp_path / "cache",
        minutes=1.0,
        site=None,
        commit="abc",
        tests=[],
        test_seconds=2,
        file_seconds=20,
        jobs=2,
        quick=False,
        steps=[],
        resume=False,
    )
    session = on_gpu.Session(options, tmp_path / "scratch")
    assert session.tests(on_gpu.Step("first", 0.5, tests=("broken",)), 1.0) == {"tests": {"error": 1}}
    rest = on_gpu.Step("other", 0.5, tests=("",))
    assert session.tests(rest, 1.0) == {"tests": {"passed": 3, "lost": 2, "failed": 2}}
    rows = json.loads(session.path("gpu_tests").read_text())["rows"]
    found = {row["test"].partition("::")[2]: row for row in rows if row["file"] == "tests/test_it.py"}
    assert {name for name, row in found.items() if row["outcome"] == "passed"} == {
        "test_passes",
        "test_hangs_in_c_no_more",
        "test_comes_last",
    }
    assert "Timeout" in found["test_hangs_in_c"]["said"]
    assert "the process ended here, with -6" in found["test_crashes"]["said"]
    assert "arithmetic" in found["test_fails"]["said"]
    assert "illegal memory access" in found["test_breaks_cuda"]["said"]
    # A file that fails before its first test is started once: it would fail six times.
    assert [row["outcome"] for row in rows if row["file"] == "tests/test_broken.py"] == ["error"]
    assert session.path("gpu_run", "log").read_text().count("== tests/test_broken.py") == 1
    # The next command of the same half hour repeats no test that has ended.
    options.resume, options.steps = True, [1, 4]
    again = on_gpu.Session(options, tmp_path / "scratch again")
    assert [step.name for step in again.chosen] == ["first tests", "other tests"]
    assert again.tests(rest, 1.0) == {"tests": {"passed": 3, "lost": 2, "failed": 2, "error": 1}}
    assert json.loads(session.path("gpu_tests").read_text())["rows"][-1]["outcome"] == "error"
    assert len(again.rows) == len(rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_look_takes_every_step_in_order_and_writes_what_came_of_it(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    command = [sys.executable, str(ROOT / ".ci" / "on_gpu.py"), "--quick", "--minutes", "10"]
    command += ["--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--commit", "abc", "--tests", "random"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    steps = json.loads(next(tmp_path.glob("gpu_run-*.json")).read_text())["rows"]
    assert [step["step"] for step in steps] == [
        "first tests",
        "targets",
        "trained steps",
        "other tests",
        "ladder",
        "sharing",
    ]
    tests = json.loads(next(tmp_path.glob("gpu_tests-*.json")).read_text())["rows"]
    assert {row["file"] for row in tests} == {"tests/functional/test_random.py"}
    assert {row["outcome"] for row in tests} <= {"passed", "skipped"}
    rows = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())["rows"]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    assert parts[0] == "first_launch"
    assert parts[-2:] == ["compiled", "summary"]
    rows = json.loads(next(tmp_path.glob("sharing-*.json")).read_text())["rows"]
    assert {row["part"] for row in rows} == {"table", "simulations", "summary"}
    measured = [row for row in rows if "samples_per_second" in row]
    assert {(row["processes"], row["sharing"]) for row in measured if row["part"] == "table"} >= {
        (1, "none"),
        (2, "none"),
        (1, "batched"),
    }
    assert {row["inferences_per_sample"] for row in measured if row["part"] == "table"} == {20}
    assert len({path.stem.partition("-")[2] for path in tmp_path.glob("gpu*.*")}) == 1  # one device, one commit
