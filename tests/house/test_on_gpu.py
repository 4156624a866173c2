"""The command for a GPU loses one test, not the rest of its file, to a hang, a crash, or a CUDA that broke down."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from types import ModuleType
from typing import Any

import pytest
import torch

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


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command as a module."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("on_gpu")


def repository(root: pathlib.Path, files: dict[str, str]) -> None:
    """Make what the command needs of a checkout, with these test files."""
    for folder in ("rlstruct", "agents", "batchers", "algos", "tests"):
        (root / folder).mkdir(parents=True)
    for name, text in files.items():
        (root / "tests" / name).write_text(text)
    (root / "pyproject.toml").write_text(SETTINGS)
    for folder in (".ci", "benchmarks"):
        (root / folder).symlink_to(ROOT / folder)


@pytest.mark.slow
def test_every_test_is_accounted_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, on_gpu: Any) -> None:
    root = tmp_path / "repository"
    files = {"test_it.py": TESTS, "test_other.py": "def test_on_the_cpu(): raise AssertionError"}
    repository(root, files | {"test_fused_broken.py": "import not_there, pytest\npytestmark = pytest.mark.gpu\n"})
    monkeypatch.setattr(on_gpu, "ROOT", root)
    words = ["--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--minutes", "2", "--commit", "abc"]
    options = on_gpu.parse([*words, "--test-seconds", "2", "--file-seconds", "20", "--jobs", "2"])
    session = on_gpu.Session(options, tmp_path / "scratch")
    first, rest = (next(step for step in on_gpu.STEPS if step.name == f"{name} tests") for name in ("first", "other"))
    assert session.tests(first, 1.0) == {"tests": {"error": 1}}
    assert session.tests(rest, 1.0) == {"tests": {"passed": 3, "lost": 2, "failed": 2}}
    assert session.unfinished == []
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
    assert [row["outcome"] for row in rows if row["file"] == "tests/test_fused_broken.py"] == ["error"]
    assert session.path("gpu_run", "log").read_text().count("== tests/test_fused_broken.py") == 1
    # The next command of the same half hour repeats no test that has ended; a file that broke is tried again.
    again = on_gpu.Session(on_gpu.parse([*words, "--resume"]), tmp_path / "scratch again")
    assert again.tests(rest, 1.0) == {"tests": {"passed": 3, "lost": 2, "failed": 2}}
    assert again.tests(first, 1.0) == {"tests": {"error": 1}}
    assert len(again.rows) == len(rows)


LONG = """
import pathlib, pytest, time
pytestmark = pytest.mark.gpu

def test_short(): pass
def test_takes_its_time():
    time.sleep({seconds})
def test_comes_last(): pass
"""
LACKING = """
import importlib.util, pytest
pytestmark = pytest.mark.gpu

def test_needs_a_package():
    pytest.importorskip("arrives_later")
"""


@pytest.mark.slow
def test_what_is_not_finished_goes_on_in_the_next_step_of_tests_in_another_command_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, on_gpu: Any
) -> None:
    root, site = tmp_path / "repository", tmp_path / "site"
    repository(root, {"test_fused.py": LONG.format(seconds=60), "test_random.py": LACKING})
    monkeypatch.setattr(on_gpu, "ROOT", root)
    words = ["--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--site", str(site), "--commit", "abc"]
    first = on_gpu.Session(on_gpu.parse([*words, "--minutes", "0.4", "--jobs", "2"]), tmp_path / "scratch")
    step, _, _, _, later, *_ = on_gpu.STEPS
    assert first.tests(step, 1.0) == {"tests": {"passed": 1, "skipped": 1, "not run": 1}}
    assert first.unfinished == ["tests/test_fused.py"]
    # The second command is given other steps. In between the package has come, packed.
    (root / "tests" / "test_fused.py").write_text(LONG.format(seconds=0))
    (tmp_path / "arrives_later.py").write_text("")
    with tarfile.open(tmp_path / "1-packages.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "arrives_later.py", "arrives_later.py")
    words += ["--archives", str(tmp_path), "--command", "2"]
    second = on_gpu.Session(on_gpu.parse([*words, "--minutes", "2"]), tmp_path / "another scratch")
    assert second.tests(later, 1.0) == {"tests": {"passed": 4}}
    assert second.unfinished == []
    rows = json.loads(second.path("gpu_tests").read_text())["rows"]
    assert sorted(row["test"].partition("::")[2] for row in rows) == sorted(
        ["test_short", "test_takes_its_time", "test_comes_last", "test_needs_a_package"]
    )
    assert {row["outcome"] for row in rows} == {"passed"}


def test_the_plan_is_told_with_minutes_and_without_a_gpu(on_gpu: Any, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-S", str(ROOT / ".ci" / "on_gpu.py"), "--dry-run", "--out", str(tmp_path / "out")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert not (tmp_path / "out").exists()
    steps = re.findall(r"^ +(\d+) (.+?) +(\d+\.\d)  (\d+), (\d+\.\d)$", said, re.MULTILINE)
    assert [name for _, name, *_ in steps] == [step.name for step in on_gpu.STEPS]
    commands = [command for *_, command, _ in steps]
    assert commands == sorted(commands, key=int)
    assert set(commands) == {str(number) for number in range(1, 15)}
    assert sum(float(minutes) for *_, minutes, _, _ in steps) == pytest.approx(126.0, abs=0.3)
    for number in set(commands):
        assert sum(float(minutes) for *_, command, minutes in steps if command == number) == pytest.approx(9.0)
    # Kernels, simulators, capture and collection come before everything that is timed.
    for file in (
        "test_fused",
        "test_all_simulators",
        "test_cuda_capture",
        "test_replays",
        "test_collection_on_devices",
        "test_streams",
        "test_wrong_actions",
    ):
        assert 0 < said.index(f"{file}.py") < said.index("benchmarks/")
    alone = [f"{file}  (alone)" for file in ("test_cuda_streams.py", "test_profiler_on_a_gpu.py")]
    assert all(name in said for name in ("gpu.py profiling", "experiments.py atari_starts", *alone))
    # Sharing has a separate command: its processes start slowly. Every benchmark goes on where it was cut.
    assert [step.command for step in on_gpu.STEPS if step.name == "sharing"] == [14]
    assert [step.name for step in on_gpu.STEPS if step.command == 14] == ["sharing"]
    assert {"Algorithm 1", "Atari's layout", "serving", "training"} <= {step.name for step in on_gpu.STEPS}
    assert all(step.parts for step in on_gpu.STEPS if step.benchmark)
    early = {part for step in on_gpu.STEPS if step.command <= 3 for part in step.parts}
    assert early >= {"atari_layout", "serving", "training"}
    # The first command shows a bit of everything.
    assert [step.parts for step in on_gpu.STEPS if step.command == 1 and step.benchmark] == [
        ("first_launch", "targets"), ("learning",), ("atari_layout",), ("serving",),
    ]  # fmt: skip
    # Every test file with tests for a GPU stands in it, once.
    files = re.findall(r"\S*tests/\S+", said)
    every = ROOT.glob("tests/**/test_*.py")
    marked = {str(file.relative_to(ROOT)) for file in every if "mark.gpu" in file.read_text()}
    marked.remove("tests/house/test_benchmarks_run.py")
    assert len(files) == len(set(files))
    assert set(files) >= marked


def test_without_a_package_that_every_step_needs_it_stops_with_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['gymnasium'] = None")
    command = [
        sys.executable,
        str(ROOT / ".ci" / "on_gpu.py"),
        "--steps",
        "1",
        "--minutes",
        "0.2",
        "--tests",
        "no_file",
    ]
    command += ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--commit", "abc"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert run.returncode == 1
    assert re.fullmatch(r"on_gpu\.py: gymnasium not found: install it for .*\n", run.stderr)
    assert run.stdout == ""


def test_a_file_is_in_the_plan_if_a_test_takes_the_device_of_the_fixture(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    (tmp_path / "tests").mkdir()
    for name, text in {
        "test_fixture.py": "def test_sum(device: torch.device) -> None: pass",
        "test_marked.py": "pytestmark = pytest.mark.gpu",
        "test_lambda.py": 'device_of = lambda device: torch.device("cuda:0")',
    }.items():
        (tmp_path / "tests" / name).write_text(text)
    found = importlib.import_module("gpu_plan").test_files(tmp_path)
    assert sorted(name for names in found.values() for name in names) == [
        "tests/test_fixture.py",
        "tests/test_marked.py",
    ]


def test_results_are_copied_out_while_they_are_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, on_gpu: Any
) -> None:
    folders = importlib.import_module("gpu_folders")
    monkeypatch.setattr(folders, "PERIOD", 0.01)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "gpu-other-abc.json").write_text("of another device")
    (source / "gpu-h200-abc.png").write_text("a picture")
    with folders.Copies(source, target, "-h200-abc"):
        for text in ("1", "22"):
            (source / "gpu-h200-abc.json").write_text(text)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                if (target / "gpu-h200-abc.json").exists() and (target / "gpu-h200-abc.json").read_text() == text:
                    break
                time.sleep(0.01)
            else:
                pytest.fail(f"{text!r} was not copied in 30 s")
        (source / "gpu_run-h200-abc.log").write_bytes(b"a" + b"b" * folders.LARGEST)
    assert {file.name for file in target.iterdir()} == {"gpu-h200-abc.json", "gpu_run-h200-abc.log"}
    assert (target / "gpu_run-h200-abc.log").read_bytes() == b"b" * folders.LARGEST
    monkeypatch.setenv("OUT", str(target))
    assert on_gpu.parse([]).copy == target
    assert on_gpu.parse(["--command", "2"]).minutes == on_gpu.parse(["--steps", "1", "2"]).minutes == 9
    assert on_gpu.parse(["--steps", "1", "8"]).minutes == 18


def test_a_benchmark_starts_again_after_a_signal_or_a_broken_gpu_and_no_other_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, on_gpu: Any
) -> None:
    session = object.__new__(on_gpu.Session)
    session.options = on_gpu.parse(["--out", str(tmp_path), "--minutes", "9"])
    session.started, session.here = time.monotonic(), {"device": "cpu", "commit": "abc"}
    note = session.path("gpu", "now")
    note.write_text("of a command that was cut")
    for codes in ([-6, on_gpu.BROKEN, -11, 0], [1], [None]):
        left = iter(codes)
        monkeypatch.setattr(session, "call", lambda *_, left=left: (next(left), ""))
        assert session.benchmark(on_gpu.STEPS[1], 1.0)["exit_code"] == codes[-1]
        assert list(left) == []
    assert not note.exists()


STARTED = "serving"  # shows that the command starts experiments.py, whose other parts have their own tests


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_look_takes_its_steps_in_order_and_writes_what_came_of_it(tmp_path: pathlib.Path, on_gpu: Any) -> None:
    warp = pytest.importorskip("warp", reason="needs the extra warp")
    pytest.importorskip("ale_py", reason="needs the extra atari")
    warp.init()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "warp").symlink_to(warp.config.kernel_cache_dir)  # other tests compile the same kernels
    command = [sys.executable, str(ROOT / ".ci" / "on_gpu.py"), "--quick", "--minutes", "60"]
    command += ["--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--commit", "abc", "--tests", "random"]
    chosen = {
        k: step.name
        for k, step in enumerate(on_gpu.STEPS, 1)
        if step.benchmark != "experiments" or step.name == STARTED
    }
    command += ["--copy", str(tmp_path / "copy"), "--steps", *map(str, chosen)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    steps = json.loads(next(tmp_path.glob("gpu_run-*.json")).read_text())["rows"]
    assert [step["step"] for step in steps] == [*chosen.values()]
    copied = {file.name: file.read_text() for file in (tmp_path / "copy").iterdir()}
    assert copied == {file.name: file.read_text() for file in tmp_path.glob("*.[jl]*")}
    assert len(copied) <= 8  # as many as come back from a borrowed machine
    tests = json.loads(next(tmp_path.glob("gpu_tests-*.json")).read_text())["rows"]
    assert {row["file"] for row in tests} == {"tests/functional/test_random.py"}
    assert {row["outcome"] for row in tests} <= {"passed", "skipped"}
    rows = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())["rows"]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    assert parts[0] == "first_launch"
    assert parts[-2:] == ["launches", "summary"]
    assert set(parts) == {
        *("first_launch", "policy", "simulation", "learning", "training", "trained", "launches", "profiling", "summary")
    }
    measured = [(row["part"], row["rung"], row["N"]) for row in rows if "steps_per_second" in row]
    assert len(measured) == len(set(measured))  # the steps go on where the one before has ended
    assert {("simulation", name, 1) for name in ("SyncVectorEnv", "numpy-vectorised", "torch eager")} <= set(measured)
    assert ("policy", "Warp fused policy", 64) in measured
    assert {("learning", "PPO", 64), ("learning", "PQN", 64)} <= set(measured)
    if not torch.cuda.is_available():
        left_out = {row["left_out"] for row in rows if "left_out" in row}
        assert left_out == {"there is no CUDA device", "it takes minutes: --quick leaves it out"}
    rows = json.loads(next(tmp_path.glob("experiments-*.json")).read_text())["rows"]
    served = {(row["m"], row["sharing"]): row for row in rows if row["part"] == "serving"}
    assert set(served) == {(1, "none"), (2, "none"), (2, "mps"), (2, "mig")}
    assert served[1, "none"]["steps_per_second"] > 0
    assert served[2, "none"]["ratio"] > 0
    rows = json.loads(next(tmp_path.glob("sharing-*.json")).read_text())["rows"]
    assert {row["part"] for row in rows} == {"table", "simulations", "tune", "summary"}
    assert [row["learners"] for row in rows if row["part"] == "tune" and "steps_per_second" in row] == [1]
    measured = [row for row in rows if "samples_per_second" in row]
    assert {(row["processes"], row["sharing"]) for row in measured if row["part"] == "table"} >= {
        (1, "none"),
        (2, "none"),
        (1, "batched"),
    }
    assert {row["inferences_per_sample"] for row in measured if row["part"] == "table"} == {20}
    assert len({path.stem.partition("-")[2] for path in tmp_path.glob("gpu*.*")}) == 1  # one device, one commit


UNPLUGGED = """
import os, socket, sys

def refuse(*address, **named):
    with open(os.environ["TRIED"], "a") as file:
        print(address, file=file)
    raise OSError("the network is unplugged")

socket.getaddrinfo = socket.create_connection = refuse
sys.modules["warp"] = None
"""
FAILING = """

def _fail() -> None:
    raise RuntimeError("CUDA error: unspecified launch failure")


def our_rungs(n_envs: int, device: torch.device) -> list[MakeRung]:
    return [partial(Rung, "torch eager", _fail, 1)]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_command_keeps_what_it_has_measured_whatever_goes_wrong(tmp_path: pathlib.Path, on_gpu: Any) -> None:
    """A rehearsal, scaled down: no network, a missing package, kernels that fail, and a kill half way."""
    root, out, copy, site = (tmp_path / name for name in ("repository", "out", "copy", "site"))
    for folder in ("rlstruct", "agents", "batchers", "algos"):
        root.mkdir(exist_ok=True)
        (root / folder).symlink_to(ROOT / folder)
    for folder in (".ci", "benchmarks"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    with (root / "benchmarks" / "common" / "ladder_rungs.py").open("a") as file:
        file.write(FAILING)
    for folder in (site, root / "tests"):
        folder.mkdir()
    (root / "tests" / "test_fused.py").write_text(TESTS)
    (root / "pyproject.toml").write_text(SETTINGS)
    (site / "sitecustomize.py").write_text(UNPLUGGED)
    command = [sys.executable, str(root / ".ci" / "on_gpu.py"), "--command", "1", "--quick", "--test-seconds", "2"]
    command += ["--out", str(out), "--copy", str(copy), "--cache", str(tmp_path / "cache"), "--commit", "abc"]
    environment = os.environ | {"PYTHONPATH": str(site), "TRIED": str(tmp_path / "tried")}

    def rows(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
        file = next(folder.glob(f"{name}-*.json"), None)
        return [] if file is None else json.loads(file.read_text())["rows"]

    def measured(folder: pathlib.Path) -> list[dict[str, Any]]:
        return [row for row in rows(folder, "gpu") if "steps_per_second" in row and "unfinished" not in row]

    killed = subprocess.Popen(
        [*command, "--minutes", "9"], env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not measured(copy):
        assert killed.poll() is None
        assert time.monotonic() < deadline, "nothing was measured in 200 s"
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    came_back = measured(copy)
    tests = rows(copy, "gpu_tests")
    assert {row["test"].partition("::")[2]: row["outcome"] for row in tests} == {
        "test_passes": "passed", "test_hangs_in_c": "lost", "test_hangs_in_c_no_more": "passed", "test_fails": "failed",
        "test_crashes": "lost", "test_breaks_cuda": "failed", "test_comes_last": "passed",
    }  # fmt: skip

    again = subprocess.run(
        [*command, "--minutes", "8"], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert again.returncode == 1, again.stderr  # some tests have failed
    assert [row for row in measured(copy) if row in came_back] == came_back  # and were not measured again
    assert rows(copy, "gpu_tests") == tests
    assert {row["part"] for row in measured(copy)} >= {"policy", "simulation", "learning"}
    steps = {row["step"]: row for row in rows(copy, "gpu_run")}
    assert list(steps) == [step.name for step in on_gpu.gpu_plan.steps_of(1, [])]
    assert "error" not in {key for row in steps.values() for key in row}
    left_out = {row["rung"]: row["left_out"] for row in steps["targets"]["left_out"]}
    assert left_out["torch eager"] == "RuntimeError: CUDA error: unspecified launch failure"
    assert "warp" in left_out["Warp fused policy"]
    assert not (tmp_path / "tried").exists(), (tmp_path / "tried").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_pytest_and_ale_py_the_first_command_says_so_and_measures_the_rest(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pytest'] = sys.modules['ale_py'] = None")
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / ".ci" / "on_gpu.py"), "--quick", "--minutes", "9", "--tests", "test_fused"]
    command += ["--out", str(out), "--cache", str(tmp_path / "cache"), "--commit", "abc", "--steps", "1", "4", "9"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=290, env=environment, check=False)
    assert run.returncode == 1, run.stderr  # a test has not run
    for said in ("pytest not found, so no test runs", "ale_py not found, so what needs it is left out"):
        assert re.search(rf"^on_gpu\.py: {said}: install it for .*, or put the archives of ", run.stderr, re.MULTILINE)
    steps = {row["step"]: row for row in json.loads(next(out.glob("gpu_run-*.json")).read_text())["rows"]}
    assert steps["first tests"]["tests"] == {"not run": 1}
    tests = json.loads(next(out.glob("gpu_tests-*.json")).read_text())
    assert [row["said"] for row in tests["rows"]] == ["pytest not found"]
    assert tests["unfinished"] == [row["file"] for row in tests["rows"]]  # for a later command that has pytest
    reasons = [row["left_out"] for row in steps["Atari's layout"]["left_out"]]
    assert len(reasons) == 2
    assert all("ale_py" in reason for reason in reasons), reasons
    rows = json.loads(next(out.glob("gpu-*.json")).read_text())["rows"]
    assert {row["part"] for row in rows if "steps_per_second" in row} == {"trained"}
