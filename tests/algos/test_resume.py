"""A training that goes on from its checkpoint equals one that was never interrupted, bit by bit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_tasks import TASKS, config_of, train

from rlstruct.algos.run_folder import RunFolder
from rlstruct.algos.training import Training, TrainingResult

for package in ("tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

CLOCKS = ("seconds", "steps_per_second", "evaluation/seconds")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstruct.algos.run_folder.draw_learning_curve", lambda *args, **settings: None)


class Killed(Exception):
    pass


def new_folder(root: Path, name: str) -> RunFolder:
    config = config_of(name)
    return RunFolder("test", config, n_env_steps=config.n_env_steps, root=root, progress=False)


def metrics(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open() as file:
        return [{key: value for key, value in row.items() if key not in CLOCKS} for row in csv.DictReader(file)]


def without_clocks(result: TrainingResult) -> tuple[Any, ...]:
    evaluations = [(e.env_steps, e.policy_version, e.returns, e.lengths) for e in result.evaluations]
    weights = {name: weight.tolist() for name, weight in result.model.state_dict().items()}
    return evaluations, result.losses, result.env_steps, weights


def train_until(monkeypatch: pytest.MonkeyPatch, env_steps: int, name: str, run: RunFolder, **changes: Any) -> None:
    """Train, and die in the middle of the loop once so many steps were collected."""
    iterate = Training._iterate

    def die(self: Training) -> None:
        if self.env_steps >= env_steps:
            raise Killed
        iterate(self)

    with monkeypatch.context() as patch, run:
        patch.setattr(Training, "_iterate", die)
        with pytest.raises(Killed):
            train(name, run, **changes)


@pytest.mark.parametrize("name", TASKS)
def test_a_resumed_training_equals_one_without_a_break(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_folder(tmp_path, name) as whole:
        expected = train(name, whole)
    run = new_folder(tmp_path, name)
    for env_steps in (280, 530):
        train_until(monkeypatch, env_steps, name, run)
        run = RunFolder.resume(run.path, progress=False)
        torch.manual_seed(env_steps)  # as another process would find its generator
    with run:
        result = train(name, run)
    assert without_clocks(result) == without_clocks(expected)
    assert metrics(run.path) == metrics(whole.path)
    with RunFolder.resume(run.path, progress=False) as run:
        again = train(name, run)  # nothing is left to do
    assert without_clocks(again) == without_clocks(expected)
    assert metrics(run.path) == metrics(whole.path)
