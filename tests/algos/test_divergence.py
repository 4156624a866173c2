"""Trainings that go wrong say where, keep what led there, and stop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_agents import RngAgent
from fake_envs import CountingEnv
from resume_tasks import config_of, create_network, create_sim, train
from torch import Tensor

from rlstruct import DictTensor
from rlstruct.agents import ActorCriticAgent
from rlstruct.algos import a2c
from rlstruct.algos.training.evaluation import Evaluator
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import TrainingDiverged
from rlstruct.vec_env import Observed

for package in ("tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")


class BadReward:
    """Makes CartPole whose environment 1 is rewarded with infinity in the step with the given number."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, n_envs: int, seed: int) -> Any:
        env = create_sim(n_envs, seed)
        real, calls = env.step, [0]

        def step(action: DictTensor) -> tuple[Observed, Observed]:
            (reached, ran), (current, running) = real(action)
            calls[0] += 1
            if calls[0] == self.step and seed < 500_000:  # not in evaluation
                bad = reached["reward"].index_fill(0, torch.tensor([1]), math.inf)
                reached, current = reached + DictTensor(), current + DictTensor()
                reached.set("reward", bad)
                current.set("reward", bad)
            return (reached, ran), (current, running)

        env.step = step
        return env


class WeightlessAgent(RngAgent):
    def update(self, info: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstruct.algos.training.run_folder.draw_learning_curve", lambda *args, **settings: None)


def new_folder(root: Path, name: str, **changes: Any) -> RunFolder:
    config = dataclasses.replace(config_of(name), **changes)
    return RunFolder("test", config, n_env_steps=800, root=root, progress=False)


def test_a_loss_that_is_no_number_stops_and_leaves_the_weights(tmp_path: Path) -> None:
    # Step 31 is the first of the fourth batch, steps 31 to 40; the log is looked at after the sixth. A later step could
    # follow the end of an episode in its batch, and 0 * inf is nan.
    with (
        new_folder(tmp_path, "a2c", final_learning_rate_fraction=1.0) as run,
        pytest.raises(TrainingDiverged, match=r"value_loss is inf.* in update 4 at environment step 160.*smaller") as e,
    ):
        train("a2c", run, BadReward(31), final_learning_rate_fraction=1.0)
    assert (e.value.policy_version, e.value.env_steps) == (4, 160)
    assert "loss" in e.value.terms
    assert f"{run.path / 'diverged.pt'} has the weights that produced them" in str(e.value)
    evidence = torch.load(run.path / "diverged.pt", weights_only=True)
    # The weights are those that the third update left: an equal training without the bad reward passes through them.
    good = train("a2c", None, n_env_steps=120, final_learning_rate_fraction=1.0).model.state_dict()
    assert evidence["learner"]["model"].keys() == good.keys()
    for name, weight in evidence["learner"]["model"].items():
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, good[name]), name


def test_an_error_that_is_no_number_does_not_disturb_prioritised_replay_before_it_is_reported(tmp_path: Path) -> None:
    with (
        new_folder(tmp_path, "dqn, prioritised") as run,
        pytest.raises(TrainingDiverged, match=r"loss is (inf|nan), error is (inf|nan), in update 2 "),
    ):
        train("dqn, prioritised", run, BadReward(31))
    evidence = torch.load(run.path / "diverged.pt", weights_only=True)
    assert all(torch.isfinite(weight).all() for weight in evidence["learner"]["online_model"].values())


def test_without_a_run_folder_the_message_says_how_to_keep_them() -> None:
    with pytest.raises(TrainingDiverged, match=r"Train with a run folder"):
        train("a2c", None, BadReward(34))


def test_an_evaluation_that_never_ends_is_cut_with_a_warning() -> None:
    with RL_Batcher(10, WeightlessAgent, CountingEnv, env_args={"n_envs": 2, "lengths": (5, 1000)}, seed=0) as batcher:
        evaluator = Evaluator(batcher, step_limit=25)
        evaluator.start({}, env_steps=0, policy_version=0)
        with pytest.warns(
            UserWarning, match=r"1 of 2 episodes had not ended after 30 steps .step limit 25.\. .*TensorEnv"
        ):
            result = evaluator.wait()
        # The first environment plays 5 steps, worth 1 + … + 5 = 15; the second is cut after 30, worth 30 * 31 / 2.
        assert (result.lengths, result.returns, result.n_cut) == ((5, 30), (15.0, 465.0), 1)
        evaluator.start({}, env_steps=0, policy_version=0)  # 1000 and 5 steps: it can be used again
        with pytest.warns(UserWarning, match=r"1 of 2 episodes"):
            assert evaluator.wait().lengths == (30, 5)


def test_episodes_longer_than_a_batch_of_reinforce_are_named_once() -> None:
    said = r"none of 4 episodes ended within n_timesteps = 5 steps.*max_episode.*of a TensorEnv"
    with pytest.warns(UserWarning, match=said) as seen:
        train("reinforce", None, n_timesteps=5, evaluation_timesteps=60, n_env_steps=100)
    assert len(seen) == 1


class Stepping(a2c.A2CLearner):
    """Takes gradient steps on whatever loss of the network's outputs it is given."""

    def step(self, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        self.loss = loss
        return self.descend(*self.gradient({"frame": torch.ones(8, 4)}))

    def terms(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.loss(*self.model(batch["frame"]))}


def test_the_optimiser_goes_on_as_before_while_all_is_finite() -> None:
    torch.manual_seed(0)
    model = create_network()
    agent = ActorCriticAgent(model, device="cpu", stochastic=True, copy_model=False)
    learner = Stepping(model, agent, a2c.A2CConfig(max_gradient_norm=0.5))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    learner.step(lambda policy, value: policy.square().mean() + value.square().mean())
    moved = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert not any(torch.equal(weight, before[name]) for name, weight in moved.items())
    # A finite loss with a gradient of 0 * inf: the norm of the gradients tells.
    terms = learner.step(lambda policy, value: (value * 0.0).abs().sqrt().mean())
    assert terms["loss"].isfinite()
    assert terms["gradient_norm"].isnan()
    for _ in range(2):  # and later good losses change nothing any more
        learner.step(lambda policy, value: value.mean())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, moved[name]), name
