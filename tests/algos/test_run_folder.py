from __future__ import annotations

import csv
import dataclasses
import errno
import functools
import importlib
import io
import json
import resource
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from fake_envs import create_counting_env

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import a2c
from rlstruct.algos.training import checkpoint, run_folder
from rlstruct.algos.training.evaluation import Evaluation
from rlstruct.algos.training.loggers import LogLines, create_bar
from rlstruct.algos.training.run_folder import RunFolder

for package in ("tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.5
    device: str = "cpu"


def make_folder(root: Path) -> RunFolder:
    return RunFolder("test", Config(), n_env_steps=100, root=root, progress=False)


COUNTERS = {"format": checkpoint.FORMAT, "policy_version": 2, "env_steps": 60}


def read(folder: RunFolder) -> list[dict[str, str]]:
    with (folder.path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def show_bar(monkeypatch: pytest.MonkeyPatch, bar: Any) -> Any:
    """Let the next folders show this bar."""
    monkeypatch.setattr(run_folder, "create_bar", lambda *settings: bar)
    return bar


def test_the_bar_moves_forward_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = show_bar(monkeypatch, importlib.import_module("tqdm").tqdm(total=100, file=io.StringIO()))
    with make_folder(tmp_path) as folder:
        folder.advance(60)
        folder.log(20, 1, {"loss": 0.5}, at=time.perf_counter())  # lines come some updates later
        assert bar.n == 60
        folder.advance(200)
        assert bar.n == 100


def test_the_bar_shows_how_far_the_first_evaluation_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    show_bar(monkeypatch, importlib.import_module("tqdm").tqdm(total=100, file=shown, mininterval=0))
    with make_folder(tmp_path) as folder:
        config = a2c.A2CConfig(
            n_env_steps=10,
            n_envs=2,
            n_timesteps=5,
            n_processes=0,
            evaluation_episodes=2,
            evaluation_processes=0,
            evaluation_timesteps=5,
        )
        create = functools.partial(create_counting_env, auto_reset=True, lengths=[12])
        a2c.train(config, lambda: ActorCritic(3, 2), ActorCriticAgent, create, run=folder)
    first = shown.getvalue().partition("evaluation=")[0]
    assert [f"evaluating={n} of 2 episodes, step {t}" in first for n, t in ((0, 0), (0, 5), (0, 10))] == [True] * 3


def test_a_run_leaves_its_five_files(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        folder.log_evaluation(Evaluation(0, 0, (1.0, 3.0), (1, 2), 0.1))
        folder.log(50, 1, {"return": 2.0, "loss": 0.25}, at=time.perf_counter())
        folder.log_evaluation(Evaluation(50, 1, (5.0, 7.0), (5, 6), 0.1))
        folder.save_checkpoint({"model": torch.nn.Linear(2, 1).state_dict(), "env_steps": 50})
    assert folder.path.parent == tmp_path
    assert folder.path.name.startswith("test-")
    names = {file.name.partition(".tfevents")[0] for file in folder.path.iterdir()}
    assert names == {"config.json", "metrics.csv", "events.out", "checkpoint.pt", "learning_curve.png"}
    assert json.loads((folder.path / "config.json").read_text()) == {"rate": 0.5, "device": "cpu"}
    assert (folder.path / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    first, second, third = read(folder)
    assert (first["env_steps"], first["evaluation/mean_return"], first["train/loss"]) == ("0", "2.0", "")
    assert (second["env_steps"], second["policy_version"], second["train/loss"]) == ("50", "1", "0.25")
    assert (third["evaluation/mean_return"], third["evaluation/std_return"]) == ("6.0", "1.0")


def test_settings_are_replaced_where_they_are(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        file = folder.path / "config.json"
        node = file.stat().st_ino  # the lock is held on it
        for rate in (0.123456789, 2.0):
            folder.save_config(Config(rate))
            assert json.loads(file.read_text()) == {"rate": rate, "device": "cpu"}
        assert file.stat().st_ino == node
        with pytest.raises(TypeError, match=r"RunFolder.save_config: config is a dict, expected an instance"):
            folder.save_config({})


def test_metrics_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        folder.log(10, 1, {"loss": 1.0}, at=time.perf_counter())
        assert [row["train/loss"] for row in read(folder)] == ["1.0"]
        folder.log(20, 2, {"loss": 2.0, "late": 3.0}, at=time.perf_counter())
        assert [row["train/late"] for row in read(folder)] == ["", "3.0"]


def test_the_rate_counts_the_steps_between_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # a test of notebooks may have imported it
    bars: list[tuple[tuple[Any, ...], Any]] = []
    monkeypatch.setattr(
        run_folder, "create_bar", lambda *settings: bars.append((settings, create_bar(*settings))) or bars[-1][1]
    )
    with make_folder(tmp_path) as folder:
        now = time.perf_counter()
        folder.log_evaluation(Evaluation(0, 0, (1.0,), (1,), 0.1))
        folder.log(10, 1, {}, at=now + 1.0)
        folder.log(40, 2, {}, at=now + 3.0)
        folder.save_checkpoint({key: {} for key in ("model", "optimizer", "config", "training")} | COUNTERS)
    with RunFolder.resume(folder.path) as folder:
        now = time.perf_counter()
        folder.log(50, 3, {}, at=now - 5.0)  # an update that was not read when the checkpoint was written
        folder.log(70, 4, {}, at=now + 5.0)
        (_, _, first), bar = bars[-1]
        assert (bar.n, first) == (70, 40)  # its rate counts 30 steps
    assert [row["steps_per_second"] for row in read(folder)] == ["", "", "15.0", "", "2.0"]
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder.path)).Reload().Scalars("steps_per_second")
    assert [(event.step, event.value) for event in events] == [(40, 15.0), (70, 2.0)]


def test_tensorboard_reads_the_log(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        folder.log(50, 1, {"loss": 0.25}, at=time.perf_counter())
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder.path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(50, 0.25)]


def test_checkpoints_leave_the_log_alone_and_closing_sorts_it(tmp_path: Path) -> None:
    def log(env_steps: int) -> None:
        folder.log(env_steps, env_steps, {"loss": 0.5}, at=time.perf_counter())

    with make_folder(tmp_path) as folder:
        log(10)
        node = (folder.path / "metrics.csv").stat().st_ino
        for env_steps in (20, 40):
            log(env_steps)
            folder.log_evaluation(Evaluation(env_steps - 5, 1, (1.0,), (1,), 0.1))  # late
            folder.save_checkpoint({key: {} for key in ("model", "optimizer", "config", "training")} | COUNTERS)
        log(50)
        assert (folder.path / "metrics.csv").stat().st_ino == node  # a long log is not written again
        assert [row["env_steps"] for row in read(folder)] == ["10", "20", "15", "40", "35", "50"]
    assert [row["env_steps"] for row in read(folder)] == ["10", "15", "20", "35", "40", "50"]
    with RunFolder.resume(folder.path, progress=False) as folder:
        assert [row["env_steps"] for row in read(folder)] == ["10", "15", "20", "35", "40"]


def test_closing_moves_no_line_behind_the_checkpoint_that_counts_it(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        folder.log(20, 1, {"loss": 0.5}, at=time.perf_counter())
        folder.log(10, 1, {"loss": 0.5}, at=time.perf_counter())
        folder.save_checkpoint({"model": {}})  # a loop of the user's own, while an evaluation runs
        folder.log(30, 1, {"loss": 0.5}, at=time.perf_counter())
        folder.log_evaluation(Evaluation(15, 1, (1.0,), (1,), 0.1))
    assert [row["env_steps"] for row in read(folder)] == ["10", "20", "15", "30"]
    with RunFolder.resume(folder.path, progress=False) as folder:
        assert [row["env_steps"] for row in read(folder)] == ["10", "20"]


def test_a_root_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(FileExistsError, match="runs"):
        make_folder(tmp_path / "runs")


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_folder(tmp_path) as folder:
        folder.save_checkpoint({"env_steps": 1})

        def fail(state: Any, file: BinaryIO) -> None:
            file.write(b"half a file")
            raise OSError("the disk is full")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="full"):
            folder.save_checkpoint({"env_steps": 2})
        assert torch.load(folder.path / "checkpoint.pt", weights_only=True)["env_steps"] == 1


def test_a_checkpoint_of_any_device_is_read_on_the_cpu(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    with make_folder(tmp_path) as folder:
        folder.save_checkpoint({"model": model.to("sim:0").state_dict(), "counters": [1, 2.5]})
    loaded = torch.load(folder.path / "checkpoint.pt", weights_only=True)
    assert loaded["counters"] == [1, 2.5]
    for name, weight in expected.items():
        torch.testing.assert_close(loaded["model"][name], weight, rtol=0, atol=0)


def test_what_a_checkpoint_cannot_hold_is_named_and_leaves_the_old_one(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        folder.save_checkpoint({"model": {}, "best": np.mean([1.0, 2.0]), "counts": Counter("ab"), "pair": (1, b"x")})
        before = (folder.path / "checkpoint.pt").read_bytes()
        refused: dict[str, Any] = {
            r"checkpoint: \['best'\]\[1\] is a ndarray": {"best": [1.0, np.ones(2)]},
            r"checkpoint: \['file'\] is a PosixPath, which a checkpoint cannot hold": {"file": tmp_path},
            r"checkpoint: \['model'\] is a Linear.*store a module's state_dict": {"model": torch.nn.Linear(1, 1)},
            r"checkpoint: \['last'\] is a deque": {"last": deque([1])},
            r"checkpoint: \['rate'\] is a function": {"rate": lambda: 0.5},
            r"checkpoint: \['a'\], key .*\[1\] is a PosixPath": {"a": {(1, tmp_path): 1}},
        }
        for text, state in refused.items():
            with pytest.raises(TypeError, match=text):
                folder.save_checkpoint(state)
        assert (folder.path / "checkpoint.pt").read_bytes() == before
        assert not list(folder.path.glob("*.unfinished"))
    with RunFolder.resume(folder.path, progress=False) as again:
        assert again.checkpoint is not None
        assert (again.checkpoint["best"], type(again.checkpoint["best"])) == (1.5, float)


@pytest.mark.parametrize(
    ("values", "counts", "text"),
    [
        (
            {"loss": torch.tensor(1.0)},
            (1, 1),
            r"loss is tensor\(1\.\), a Tensor; expected a number\. Pass tensor\.item",
        ),
        ({"note": "high"}, (1, 1), r"note is 'high', a str; expected a number"),
        ({}, (torch.tensor(1), 1), r"env_steps is tensor\(1\), a Tensor; expected a whole number"),
        ({}, (1, 0.5), r"policy_version is 0\.5, a float; expected a whole number"),
    ],
)
def test_lines_that_could_not_be_read_again_are_refused(tmp_path: Path, values: Any, counts: Any, text: str) -> None:
    with make_folder(tmp_path) as folder:
        folder.log(1, 1, {"loss": np.float32(0.5)}, at=time.perf_counter())
        with pytest.raises(TypeError, match=f"RunFolder.log: {text}"):
            folder.log(*counts, values, at=time.perf_counter())
        assert len(read(folder)) == 1


def test_a_closed_folder_is_not_written_to(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        pass
    with pytest.raises(RuntimeError, match=r"RunFolder.log: .* is closed.*RunFolder\.resume"):
        folder.log(1, 1, {}, at=0.0)
    with pytest.raises(RuntimeError, match=r"RunFolder.save_checkpoint: .* is closed"):
        folder.save_checkpoint({})


def test_other_ranks_of_torchrun_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with make_folder(tmp_path) as folder:
        folder.log(1, 1, {"loss": 1.0}, at=time.perf_counter())
        folder.advance(1)
        folder.log_evaluation(Evaluation(1, 1, (1.0,), (2,), 0.1))
        folder.save_config(Config())
        folder.save_checkpoint({"model": {}})
    assert not list(tmp_path.iterdir())


def test_a_line_with_too_many_cells_is_damage(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        folder.log(1, 1, {}, at=time.perf_counter())
        folder.save_checkpoint(COUNTERS)
    file = folder.path / "metrics.csv"
    file.write_text(file.read_text().rstrip() + ",1,2,3,4,5,6,7\n")
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged"):
        RunFolder.resume(folder.path)


def test_a_disk_that_is_full_from_the_start_leaves_no_folder(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            make_folder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_does_not_fit_raises_what_the_system_says(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.write_checkpoint(tmp_path / "checkpoint.pt", {"weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path) for _ in range(3)]
    for folder in folders:
        folder.close()
        folder.close()  # closing again does nothing
    assert len({folder.path for folder in folders}) == 3


def test_a_run_that_fails_still_leaves_its_curve(tmp_path: Path) -> None:
    def fail(folder: RunFolder) -> None:
        with folder:
            folder.log(10, 1, {"return": 1.0}, at=time.perf_counter())
            raise KeyError("the user's own")

    folder = make_folder(tmp_path)
    with pytest.raises(KeyError, match="the user's own"):
        fail(folder)
    assert (folder.path / "learning_curve.png").exists()


def test_ctrl_c_waits_for_no_curve_and_keeps_what_was_written(tmp_path: Path) -> None:
    def stop(folder: RunFolder) -> None:
        with folder:
            folder.log(10, 1, {"return": 1.0}, at=time.perf_counter())
            folder.save_checkpoint(COUNTERS)
            raise KeyboardInterrupt

    folder = make_folder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        stop(folder)
    assert not (folder.path / "learning_curve.png").exists()
    assert (folder.path / "checkpoint.pt").exists()
    assert [row["train/return"] for row in read(folder)] == ["1.0"]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_tqdm(name: str) -> Any:
        if name == "tqdm":
            raise ImportError("No module named 'tqdm'")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without_tqdm)
    with pytest.raises(ImportError, match=r"RunFolder needs tqdm.*pip install 'tyro>="):
        make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_must_be_a_dataclass(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="RunFolder: config is a dict"):
        RunFolder("test", {"rate": 0.5}, n_env_steps=1, root=tmp_path)


def test_a_folder_in_use_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    with make_folder(tmp_path) as folder:
        file = folder.path / "config.json"
        written = file.read_bytes()
        with pytest.raises(RuntimeError, match=r"RunFolder\.resume: .* is in use: .* Let it end, or stop it \('fuser"):
            RunFolder.resume(folder.path)
    hold = f"lock_file(pathlib.Path({str(file)!r}), 'a test'); print('held', flush=True); time.sleep(60)"
    code = (
        f"import pathlib, runpy, time; lock_file = runpy.run_path({checkpoint.__file__!r})['lock_file']; kept = {hold}"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(RuntimeError, match="in use"):
                RunFolder.resume(folder.path)
        finally:
            process.kill()
    RunFolder.resume(folder.path, progress=False).close()
    (folder.path / "checkpoint.pt").write_bytes(b"damaged")
    for _ in range(2):  # who cannot resume holds nothing
        with pytest.raises(ValueError, match="damaged"):
            RunFolder.resume(folder.path)
    assert file.read_bytes() == written


def test_where_files_cannot_be_locked_a_warning_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(checkpoint.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"cannot lock files .*No locks available"):
        make_folder(tmp_path).close()


def test_log_files_get_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # a test of notebooks may have imported it
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bar = create_bar(40_000, True, 10_000)  # the standard error stream of a test is no terminal
    assert isinstance(bar, LogLines)
    for _ in range(25):
        now[0] += 1.0
        bar.update(1_000)
        bar.set_postfix({"return": "12.5"})
    assert capsys.readouterr().err.splitlines() == [
        "20,000 of 40,000 steps, 1,000 per second, return 12.5",
        "30,000 of 40,000 steps, 1,000 per second, return 12.5",
    ]


def test_notebooks_and_terminals_get_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    bar = create_bar(100_000, True)
    bar.update(42_000)
    bar.set_postfix({"return": "123.4", "evaluation": "500.0"})
    bar.close()
    last = capsys.readouterr().err.replace("\n", "").split("\r")[-1].rstrip()  # tqdm clears a longer line before
    assert last.startswith("42.0k/100k |")
    assert last.endswith("return=123.4, evaluation=500.0")
    assert len(last) <= 80
