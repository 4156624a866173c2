"""Loggers: every one gets the same numbers; what is not asked for is not imported; the real packages where they are."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlstruct.algos.training.evaluation import Evaluation
from rlstruct.algos.training.loggers import flat_settings
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.cli.main import main

for package in ("tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra train")


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.5
    sizes: tuple[int, ...] = (64, 64)
    inner: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"seed": 3, "device": None})


FLAT = {"rate": 0.5, "sizes": "[64, 64]", "inner/seed": 3, "inner/device": "None"}
COUNTERS = {"policy_version", "steps_per_second"}


def train(folder: RunFolder, start: int = 0) -> None:
    """Log two updates and an evaluation, which comes late."""
    with folder:
        for step in (start + 10, start + 20):
            folder.log(step, step, {"loss": step / 100}, at=time.perf_counter())
        folder.log_evaluation(Evaluation(start + 15, 1, (1.0, 3.0), (1, 2), 0.1))


def make(root: Path, *loggers: Any) -> RunFolder:
    return RunFolder("test", Config(), n_env_steps=100, root=root, progress=False, loggers=loggers)


class Mine:
    """A logger of one's own."""

    def __init__(self, path: Path, settings: Mapping[str, Any], again_from: int | None) -> None:
        self.path, self.settings, self.again_from = path, settings, again_from
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        self.lines.append((env_steps, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_a_logger_of_ones_own_gets_settings_and_numbers_and_is_closed_once(tmp_path: Path) -> None:
    made: list[Mine] = []

    def create(*arguments: Any) -> Mine:
        made.append(Mine(*arguments))
        return made[-1]

    folder = make(tmp_path, create)
    train(folder)
    folder.close()
    (mine,) = made
    assert (mine.path, mine.settings, mine.again_from, mine.closed) == (folder.path, FLAT, None, 1)
    assert [step for step, _ in mine.lines] == [10, 20, 15]
    assert [values.get("train/loss") for _, values in mine.lines] == [0.1, 0.2, None]
    assert mine.lines[2][1]["evaluation/mean_return"] == 2.0
    assert not list(folder.path.glob("events*"))  # TensorBoard was not chosen

    resumed = RunFolder.resume(folder.path, progress=False, loggers=[create])
    resumed.close()
    assert made[1].again_from == 0  # there was no checkpoint: all of it is logged again


def test_nothing_is_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    train(make(tmp_path))
    for name, hint in (("wandb", "'wandb>="), ("mlflow", "'mlflow-skinny>="), ("tensorboard", "'tensorboard>=")):
        with pytest.raises(ImportError, match=rf"RunFolder needs .*{name}.*pip install .*{hint}"):
            make(tmp_path, name)
    with pytest.raises(ValueError, match=r"loggers has 'wandbb', expected some of tensorboard, wandb, mlflow"):
        make(tmp_path / "none", "wandbb")
    assert not (tmp_path / "none").exists()


def test_tensorboard_has_the_settings_as_hparams(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = make(tmp_path, "tensorboard")
    train(folder)
    (file,) = folder.path.glob("events.out.tfevents.*")  # one file: one run
    events = accumulator.EventAccumulator(str(file)).Reload()
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("train/loss")] == [(10, 0.1), (20, 0.2)]
    assert [event.value for event in events.Scalars("evaluation/mean_return")] == [2.0]
    data = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    written = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = data.FromString(written).session_start_info.hparams
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()} == FLAT
    assert "_hparams_/session_end_info" in events.summary_metadata


def test_wandb_gets_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    lines: list[dict[str, float]] = []
    finished: list[bool] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: begun[-1].update({name: step_metric}),
        log=lines.append,
        finish=lambda: finished.append(True),
    )
    fake: Any = ModuleType("wandb")
    fake.Error = Exception
    fake.init = lambda **words: begun.append(words) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = make(tmp_path, "wandb")
    train(folder)
    assert begun[0]["id"] == begun[0]["name"] == folder.path.name
    assert (begun[0]["config"], begun[0]["resume"], begun[0]["*"]) == (FLAT, "allow", "env_steps")
    assert [line["env_steps"] for line in lines] == [10, 20, 15]
    assert lines[2]["evaluation/mean_return"] == 2.0
    assert finished == [True]


def test_wandb_without_a_key_says_how_to_log_in_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake: Any = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.Error = type("UsageError", (Exception,), {})

    def init(**_: Any) -> None:
        raise fake.Error("No API key configured.")

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said = "wandb cannot start a run: No API key configured. Run `wandb login` once, or set WANDB_MODE=offline, "
    said += "which keeps"
    with pytest.raises(RuntimeError, match=said):
        make(tmp_path, "wandb")
    assert list(tmp_path.iterdir()) == []
    pytest.importorskip("tyro")
    assert main(["train", "a2c", "--env", "CartPole-v1", "--loggers", "wandb", "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"rlstruct train: --loggers wandb: {said}")
    assert list(tmp_path.iterdir()) == []


def test_mlflow_gets_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    lines: list[tuple[int, str, dict[str, float]]] = []
    params: list[dict[str, Any]] = []
    run = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    fake: Any = ModuleType("mlflow")
    fake.start_run = lambda **words: begun.append(words) or run
    fake.log_params = params.append
    fake.log_metrics = lambda values, step, run_id: lines.append((step, run_id, values))
    fake.end_run = lambda: begun[-1].update(ended=True)
    fake.search_runs = lambda filter_string, max_results, output_format: [run]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    folder = make(tmp_path, "mlflow")
    train(folder)
    assert begun == [{"run_name": folder.path.name, "nested": True, "ended": True}]
    assert params == [FLAT]
    assert [line[:2] for line in lines] == [(10, "abc"), (20, "abc"), (15, "abc")]
    train(RunFolder.resume(folder.path, progress=False, loggers=["mlflow"]), start=20)
    assert begun[1] == {"run_id": "abc", "nested": True, "ended": True}
    assert params == [FLAT]  # not again


@pytest.mark.filterwarnings("ignore")  # what other packages say of themselves
def test_the_real_mlflow_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    folder = make(tmp_path, "mlflow")
    train(folder)
    train(RunFolder.resume(folder.path, progress=False, loggers=["mlflow"]), start=20)
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.params["inner/seed"] == "3"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == [(10, 0.1), (20, 0.2), (30, 0.3), (40, 0.4)]
    assert run.info.status == "FINISHED"


@pytest.mark.filterwarnings("ignore")
def test_the_real_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb", reason="needs the extra wandb")
    folder = make(tmp_path, "wandb")
    train(folder)
    (log,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    assert b"evaluation/mean_return" in log.read_bytes()


def test_settings_are_written_out_flat() -> None:
    assert flat_settings({"a": {"b": {"c": 1}}, "d": True, "e": None}) == {"a/b/c": 1, "d": True, "e": "None"}
