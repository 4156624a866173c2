"""Callbacks see a training, stop it, and live through a resumption; and the four that are ready to use."""

from __future__ import annotations

import csv
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch
from callback_tasks import SETTINGS, Journal, OnlyFirst, Ranks, train

import rlstruct
from rlstruct import Policy
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import (
    BestCheckpoint,
    Callback,
    EarlyStopping,
    OptunaPruning,
    PeriodicVideo,
    RunFolder,
    TrainingContext,
    a2c,
)
from rlstruct.algos.training.callbacks import Callbacks
from rlstruct.algos.training.history import TrainingHistory
from rlstruct.envs import GymEnvInf


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstruct.algos.training.run_folder.draw_learning_curve", lambda *args, **settings: None)


def new_folder(root: Path, **settings: Any) -> RunFolder:
    config = a2c.A2CConfig(**{**SETTINGS, **settings})
    return RunFolder("run", config, n_env_steps=config.n_env_steps, root=root, progress=False, loggers=())


def test_the_hooks_are_called_in_order() -> None:
    journal = Journal()
    result = train([journal], n_env_steps=1024)
    updates = [f"update {n} at {128 * n}" for n in range(1, 9)]
    middle = [*updates[:4], "evaluation at 512", *updates[4:]]
    assert journal.lines == ["start", "evaluation at 0", *middle, *["evaluation at 1024"] * 2, "end"]
    assert result.stopped is None


class Looks(Callback):
    """Compares what an update returned with what the result keeps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_update(self, context: TrainingContext) -> None:
        batch = context.batch
        assert batch is not None
        assert batch.steps["observation/frame"].shape == (8, 16, 4)
        assert context.learner.policy_version == context.updates
        metrics = context.metrics
        self.losses.append(metrics["loss"])
        assert metrics.keys() - context.terms.keys() <= {"return"}
        assert context.run is None
        assert context.config.n_env_steps == 1024


def test_a_callback_sees_the_batch_and_the_metrics() -> None:
    looks = Looks()
    result = train([looks], n_env_steps=1024)
    assert looks.losses == result.losses["loss"]


def test_callbacks_change_nothing() -> None:
    with_one, without = train([Looks(), Journal()], n_env_steps=1024), train([], n_env_steps=1024)
    assert with_one.losses == without.losses
    for one, other in zip(with_one.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Reads(Callback):
    def on_update(self, context: TrainingContext) -> None:
        assert context.metrics == context.metrics


def test_reading_metrics_leaves_the_returns_in_the_log(tmp_path: Path) -> None:
    logs = []
    for name, callbacks in (("read", [Reads()]), ("unread", [])):
        with new_folder(tmp_path / name) as run:
            train(callbacks, run)
        with (run.path / "metrics.csv").open(newline="") as file:
            logs.append([row["train/return"] for row in csv.DictReader(file)])
    assert len(set(logs[0])) > 2
    assert logs[0] == logs[1]


class Stops(Callback):
    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_update(self, context: TrainingContext) -> None:
        if context.updates == self.updates:
            context.stop("it was asked to")


def test_a_callback_that_stops_after_the_last_update_has_stopped_nothing() -> None:
    result = train([Stops(5)], n_env_steps=5 * 128)
    assert (result.stopped, result.env_steps) == (None, 5 * 128)


def test_a_callback_stops_the_training(tmp_path: Path) -> None:
    journal = Journal()
    with new_folder(tmp_path) as run:
        result = train([Stops(5), journal], run)
    assert result.stopped == "it was asked to"
    assert result.env_steps == 5 * 128
    assert result.after.env_steps == 5 * 128
    assert journal.lines[-2:] == ["evaluation at 640", "end"]
    checkpoint = torch.load(run.path / "checkpoint.pt", weights_only=True)
    assert (checkpoint["env_steps"], checkpoint["training"]["finished"]) == (640, True)


class Raises(Callback):
    def on_evaluation(self, context: TrainingContext) -> None:
        raise ArithmeticError("no")


def test_an_exception_names_its_callback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ArithmeticError, match="no") as raised:
        train([Journal(), Raises()])
    said = "run_training: raised by the callback Raises.on_evaluation"
    assert said in (raised.value.__notes__ if sys.version_info >= (3, 11) else caplog.messages)


def test_what_is_no_callback_is_refused() -> None:
    for wrong in (Journal, print):
        with pytest.raises(TypeError, match=r"callbacks has .*, expected an instance of a subclass of rlstruct"):
            train([wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="callbacks is a Journal, expected a list of callbacks"):
        train(Journal())  # type: ignore[arg-type]


class Counts(Callback):
    """Has a state."""

    def __init__(self) -> None:
        self.n, self.begun_with = 0, -1

    def on_start(self, context: TrainingContext) -> None:
        self.begun_with = self.n

    def on_update(self, context: TrainingContext) -> None:
        self.n += 1

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_a_misspelt_hook_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Misspelt: 'on_updates' is not a hook.* Did you mean 'on_update'\?"):
        type("Misspelt", (Callback,), {"on_updates": lambda self, context: None})
    fine: Any = type("Fine", (Callback,), {"on_update": lambda self, context: None, "helper": 1})
    assert isinstance(fine(), Callback)


def test_a_resumed_training_restores_the_states(tmp_path: Path) -> None:
    first, second = Counts(), Counts()
    second.n = 100
    with new_folder(tmp_path) as run:
        train([first, Journal(), second, Stops(6)], run)
    new, other, journal = Counts(), Counts(), Journal()
    with RunFolder.resume(run.path, progress=False, loggers=()) as again:
        result = train([journal, new, other], again)
    assert result.env_steps == 2048
    assert (new.begun_with, other.begun_with) == (6, 106)
    assert (new.n, other.n) == (16, 116)
    assert journal.lines[:2] == ["start", "update 1 at 896"]


class Keeps(Callback):
    """Has one value to keep, and begins with a tensor."""

    kept: tuple[str, ...] = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def test_numbers_of_numpy_are_kept_as_plain_ones(tmp_path: Path) -> None:
    with new_folder(tmp_path) as run:
        train([Keeps([np.float64(0.5), np.int64(3)]), Stops(2)], run)
    again = Keeps(None)
    with RunFolder.resume(run.path, progress=False, loggers=()) as run:
        train([again, Stops(1)], run)
    assert again.value == [0.5, 3]
    assert [type(number) for number in again.value] == [float, int]  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [np.zeros(3), lambda: 0, Path(".")])
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_it_is_written(value: object, tmp_path: Path) -> None:
    with (
        new_folder(tmp_path) as run,
        pytest.raises(TypeError, match=r"Keeps\.state_dict: a checkpoint cannot hold \{'value': .* expected tensors"),
    ):
        train([Keeps(value)], run)
    assert not (run.path / "checkpoint.pt").exists()


def test_a_name_without_its_comma_is_reported() -> None:
    class Forgets(Keeps):
        kept = "value"  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Forgets: kept is 'value', expected a tuple, \('value',\)"):
        Forgets(0).state_dict()


def test_states_of_callbacks_that_are_gone_or_new_are_left_alone() -> None:
    counts, loop = Counts(), Mock()
    counts.n, loop.learner.group.rank = 3, 0
    saved = Callbacks([counts, Journal()], loop, Mock()).state_dict()
    assert saved == [{"class": "Counts", "state": {"n": 3}}, {"class": "Journal", "state": {}}]
    Callbacks([Journal()], loop, Mock()).load_state_dict([{"class": "Journal", "state": None}])  # of rlstruct 0.3.0
    one, other = Counts(), Counts()
    Callbacks([Stops(1), one, other], loop, Mock()).load_state_dict(saved)
    assert (one.n, other.n) == (3, 0)


@pytest.mark.slow
def test_two_learners_stop_together(tmp_path: Path) -> None:
    only = OnlyFirst()
    result = train([Ranks(tmp_path), only], n_learners=2)
    assert result.stopped == "a callback of another learner"
    assert set(only.pids) == {os.getpid()}
    one, other = [(tmp_path / f"{rank} of 2").read_text().split() for rank in range(2)]
    assert len(only.pids) == 3
    assert one[0] == other[0] == "3"
    assert one[-1] == other[-1]  # the same weights
    assert " ".join(other[1:-2]) == "seen enough"


def worsening(monkeypatch: pytest.MonkeyPatch, returns: list[float]) -> None:
    """Let the evaluations of a training find these returns."""
    given = iter(returns)
    monkeypatch.setattr(
        "rlstruct.algos.training.evaluation.Evaluation.mean_return", property(lambda self: found[id(self)])
    )
    found: dict[int, float] = {}
    kept = []
    add = TrainingHistory.add_evaluation

    def add_evaluation(self: Any, result: Any) -> None:
        kept.append(result)  # its id is not used again
        found[id(result)] = next(given)
        add(self, result)

    monkeypatch.setattr(TrainingHistory, "add_evaluation", add_evaluation)


def test_early_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    worsening(monkeypatch, [1.0, 5.0, 5.5, 5.9, 0.0])
    result = train([EarlyStopping(2, min_improvement=1.0)])
    assert result.stopped == "EarlyStopping: 2 evaluations without improvement, the best was 5"
    assert result.env_steps == 3 * 512
    with pytest.raises(ValueError, match="patience is 0, expected at least 1"):
        EarlyStopping(0)
    one, other = EarlyStopping(2), EarlyStopping(2)
    one.best, one.n_worse = 4.0, 1
    other.load_state_dict(one.state_dict())
    assert (other.best, other.n_worse) == (4.0, 1)


class Remembers(Callback):
    """Keeps the weights that each evaluation judged, while the learner waits for it."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_evaluation(self, context: TrainingContext) -> None:
        model = context.learner.model
        self.weights[context.env_steps] = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_best_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worsening(monkeypatch, [99.0, 5.0, 7.0, 6.0, 6.5, 6.6])
    remembers = Remembers()
    with new_folder(tmp_path) as run:
        train([remembers, BestCheckpoint()], run)
    policy = rlstruct.load(run.path / "best.pt")
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, remembers.weights[1024][name])
    assert policy.stochastic
    assert policy.act(np.zeros((3, 4), np.float32)).shape == (3,)
    with pytest.raises(ValueError, match=r"BestCheckpoint: there is no run folder"):
        train([BestCheckpoint()])


def test_a_path_of_a_callback_is_created_or_refused_before_the_training(tmp_path: Path) -> None:
    class Trained(Callback):
        def on_update(self, context: TrainingContext) -> None:
            raise AssertionError("the training has begun")

    notes = tmp_path / "notes"
    notes.write_text("not a folder")

    def film() -> gymnasium.Env[Any, Any]:
        return gymnasium.make("CartPole-v1", render_mode="rgb_array")

    for callback, said in (
        (BestCheckpoint(notes / "best.pt"), "BestCheckpoint: .*best.pt cannot be written: (Not a dir|File exists)"),
        (BestCheckpoint(tmp_path), "BestCheckpoint: .* is a folder, expected the name of a file"),
        (PeriodicVideo(film, folder=notes), "PeriodicVideo: .*notes cannot be written: File exists"),
    ):
        with pytest.raises(ValueError, match=said):
            train([callback, Trained()])
    best = BestCheckpoint(tmp_path / "new" / "folder" / "best.pt")
    train([best, Saves(tmp_path / "another" / "saved.pt")])
    assert (tmp_path / "new/folder/best.pt").exists()
    assert (tmp_path / "another/saved.pt").exists()


def test_best_checkpoint_of_evaluations_beside_the_training(tmp_path: Path) -> None:
    """The learner goes on while worker processes evaluate: what is kept is what they judged."""
    best = BestCheckpoint(tmp_path / "best.pt")
    result = train([best], evaluation_processes=1, evaluation_interval=256)
    kept = torch.load(tmp_path / "best.pt", weights_only=True)
    judged = [one for one in result.evaluations if one.env_steps == kept["env_steps"]]
    assert kept["evaluation"]["returns"] in [one.returns for one in judged]
    assert best.best == max(one.mean_return for one in result.evaluations if one.env_steps)


@pytest.mark.slow
def test_optuna_prunes(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="needs the extra: pip install 'rlstruct[optuna]'")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        rate = (1e-2, 1e-2, 0.0, 0.0)[trial.number]
        result = train([OptunaPruning(trial)], learning_rate=rate, n_env_steps=8192, evaluation_interval=2048)
        return result.after.mean_return

    storage = f"sqlite:///{tmp_path / 'study.db'}"
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2048)
    study = optuna.create_study(direction="maximize", pruner=pruner, storage=storage, study_name="a2c")
    study.optimize(objective, n_trials=4)
    states = [trial.state.name for trial in optuna.load_study(study_name="a2c", storage=storage).trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]
    assert list(study.trials[0].intermediate_values) == [2048, 4096, 6144, 8192]
    assert study.best_trial.number in (0, 1)


@pytest.mark.parametrize(("direction", "sign"), [("minimize", -1.0), ("maximize", 1.0)])
def test_optuna_hears_of_higher_returns_as_of_better_ones(direction: str, sign: float) -> None:
    optuna = pytest.importorskip("optuna", reason="needs the extra: pip install 'rlstruct[optuna]'")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction=direction, pruner=optuna.pruners.MedianPruner(1, 0))
    # The first trial returns more than the second, which its pruner therefore ends.
    for returns in ([10.0, 20.0, 30.0], [5.0, 6.0, 7.0]):
        trial = study.ask()
        context: Any = Mock(env_steps=0, config=Mock(n_env_steps=9))
        callback, pruned = OptunaPruning(trial), []
        for i, mean_return in enumerate(returns):
            context.evaluations = [Mock(env_steps=i + 1, mean_return=mean_return)]
            try:
                callback.on_evaluation(context)
            except optuna.TrialPruned:
                pruned.append(i)
                break
        assert pruned == ([] if returns[0] == 10.0 else [0])
        study.tell(trial, sign * returns[-1])
    assert study.trials[0].intermediate_values == {1: sign * 10.0, 2: sign * 20.0, 3: sign * 30.0}
    assert study.best_trial.number == 0


def test_optuna_does_not_prune_for_several_objectives() -> None:
    optuna = pytest.importorskip("optuna", reason="needs the extra: pip install 'rlstruct[optuna]'")
    trial = optuna.create_study(directions=["maximize", "minimize"]).ask()
    with pytest.raises(ValueError, match="OptunaPruning: the study has 2 objectives, expected 1"):
        OptunaPruning(trial)
    callback = OptunaPruning(optuna.trial.FixedTrial({}))  # has no study, and never prunes
    callback.on_evaluation(
        Mock(evaluations=[Mock(env_steps=1, mean_return=2.0)], env_steps=0, config=Mock(n_env_steps=9))
    )


def test_optuna_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"OptunaPruning needs optuna, which is not installed. Install the extra"):
        OptunaPruning(None)


class Drawn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws the number of the step, without a package for it: equal pictures would be one in the file."""

    n = 0

    def render(self) -> Any:
        self.n += 1
        picture = np.zeros((8, 32, 3), np.uint8)
        picture[:, self.n % 32] = 255
        return picture


def test_periodic_video(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")

    def film() -> gymnasium.Env[Any, Any]:
        return Drawn(gymnasium.make("CartPole-v1"))

    with new_folder(tmp_path) as run:
        train([PeriodicVideo(film, every=2, longest=6)], run)
    films = sorted(one.name for one in (run.path / "videos").iterdir())
    assert films == ["0000000512.gif", "0000001536.gif", "0000002048.gif"]
    for name in films:
        with image.open(run.path / "videos" / name) as opened:
            assert opened.n_frames == 6
            assert opened.info["duration"] == 20  # milliseconds: 50 frames per second, as CartPole-v1 declares
    with pytest.raises(ValueError, match="PeriodicVideo: there is no run folder"):
        train([PeriodicVideo(film)])
    with pytest.raises(ValueError, match="PeriodicVideo: every is 0, expected at least 1"):
        PeriodicVideo(film, every=0)
    blind = Mock(wraps=film(), render=lambda: None)
    journal = Journal()
    with pytest.raises(TypeError, match="render returned NoneType, expected an array of bytes"):
        train([journal, PeriodicVideo(lambda: blind, folder=tmp_path)])
    assert journal.lines == ["start"]


def test_a_resumed_training_goes_on_counting_for_its_videos(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")

    def film() -> gymnasium.Env[Any, Any]:
        return Drawn(gymnasium.make("CartPole-v1"))

    with new_folder(tmp_path) as run:
        train([PeriodicVideo(film, every=4, longest=2), Stops(6)], run)  # evaluations at 0, 512 and 768
    with RunFolder.resume(run.path, progress=False, loggers=()) as run:
        train([PeriodicVideo(film, every=4, longest=2)], run)
    films = sorted(one.name for one in (run.path / "videos").iterdir())
    assert films == ["0000001280.gif"]


def test_a_policy_needs_an_evaluation_and_a_batch() -> None:
    class Asks(Callback):
        def on_start(self, context: TrainingContext) -> None:
            context.policy()

    with pytest.raises(
        RuntimeError, match=r"TrainingContext\.policy: no evaluation has ended since the training began"
    ):
        train([Asks()])


class KeepsPolicy(Callback):
    policy: Policy

    def on_end(self, context: TrainingContext) -> None:
        self.policy = context.policy()


def test_a_policy_knows_the_bounds_of_integers() -> None:
    def create_lake(n_envs: int, seed: int) -> GymEnvInf:
        return GymEnvInf([gymnasium.make("FrozenLake-v1") for _ in range(n_envs)], seed)

    keeps, create_model = KeepsPolicy(), partial(ActorCritic, 1, 4, hidden=(8,))
    config = a2c.A2CConfig(**{**SETTINGS, "n_env_steps": 128})
    a2c.train(config, create_model, ActorCriticAgent, create_lake, callbacks=[keeps])
    assert keeps.policy.bounds == {"frame": (0, 15)}  # as a loaded one, which `rlstruct.export` needs


class Saves(Callback):
    """Keeps what `save_policy` writes after each update: the evaluation that it names, and weights or an error."""

    def __init__(self, file: Path, seconds: float = 0.0) -> None:
        self.file, self.seconds = file, seconds
        self.found: list[tuple[int, Any]] = []

    def on_update(self, context: TrainingContext) -> None:
        time.sleep(self.seconds)
        try:
            context.save_policy(self.file)
        except RuntimeError as error:
            self.found.append((0, str(error)))
            return
        saved = torch.load(self.file, weights_only=True)
        self.found.append((saved["env_steps"], saved["model"]))


@pytest.mark.slow
def test_a_policy_is_saved_with_the_weights_of_the_evaluation_that_it_names(tmp_path: Path) -> None:
    """Also while worker processes judge newer weights, and not before an evaluation of a resumed training."""
    saves, remembers = Saves(tmp_path / "saved.pt", seconds=0.1), Remembers()
    after_every_update = {"evaluation_interval": 128, "evaluation_episodes": 1}
    train([remembers, Saves(tmp_path / "other.pt")], n_env_steps=4096, **after_every_update)
    train([saves], n_env_steps=4096, evaluation_processes=1)
    named = [env_steps for env_steps, _ in saves.found]
    assert named[0] == 0
    assert len(set(named)) >= 2  # three seconds of updates are long enough for an evaluation
    for env_steps, weights in saves.found:
        for name, tensor in remembers.weights[env_steps].items():
            assert torch.equal(tensor, weights[name])
    with new_folder(tmp_path) as run:
        train([Stops(6)], run)
    again = Saves(tmp_path / "again.pt")
    with RunFolder.resume(run.path, progress=False, loggers=()) as run:
        train([again], run, n_env_steps=1536)
    assert "save_policy: no evaluation has ended since" in again.found[0][1]
    assert again.found[-1][0] == 1280
