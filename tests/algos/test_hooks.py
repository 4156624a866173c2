"""Promises of the base classes of learners, which hold for the smallest learner of one's own, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from replaying_learners import SMALL, collect_batches
from resume_tasks import create_network, create_q_network, create_sim
from torch import Tensor, nn

from rlstruct.agents import ActorCriticAgent, Normalised, QAgent
from rlstruct.algos import DQNConfig, GradientLearner, PPOConfig, ReplayConfig, ReplayLearner, TrainingConfig, dqn
from rlstruct.algos.ppo import PPOLearner
from rlstruct.algos.training.loop import run_training
from rlstruct.core import DictTensor, Trajectories
from rlstruct.errors import UsageError
from rlstruct.functional import random
from rlstruct.rl_agent import frame_of


class Values(ReplayLearner):
    """Learns the rewards of the sampled steps, and remembers what it sampled."""

    def __init__(self, model: nn.Module, agent: Any, config: ReplayConfig) -> None:
        self.target = create_q_network().to(config.learner_device)
        super().__init__(model, agent, config, networks={"target": self.target})
        self.sampled: list[DictTensor] = []

    def after_step(self, minibatch: DictTensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        self.sampled.append(minibatch)
        return terms

    def terms(self, batch: DictTensor) -> dict[str, Tensor]:
        frame = frame_of(batch.truncate_key("observation/"))
        value, wanted = self.model(frame)[:, 0], self.target(frame)[:, 0] + batch["reward"]
        return {"loss": (value - wanted.detach()).square().mean()}


def create_values(device: str = "cpu", **changes: Any) -> Values:
    torch.manual_seed(0)
    model = Normalised(create_q_network(), (4,), discount=0.9).to(device)
    return Values.create(model, QAgent, ReplayConfig(**{**SMALL, "learner_device": device, **changes}))


@pytest.fixture(scope="module")
def batches() -> list[Trajectories]:
    return collect_batches(ActorCriticAgent, create_network(), create_sim, 5)


def test_a_replay_learner_keeps_the_statistics_of_its_network(batches: list[Trajectories]) -> None:
    learner = create_values()
    model: Any = learner.model
    for i, batch in enumerate(batches):
        learner.update(batch, i / 10)
    frames = torch.cat([batch.steps["observation/frame"].flatten(0, 1) for batch in batches]).double()
    torch.testing.assert_close(model.frames.mean, frames.mean(0), rtol=1e-4, atol=1e-6)
    assert model.returns.count.item() == pytest.approx(len(frames), abs=1e-3)
    # CartPole rewards each step with 1, of which every sample saw the scaled value of its time.
    scaled = model.scale_rewards(torch.ones(()))
    assert 0.1 < scaled < 0.9
    assert learner.sampled[-1]["reward"].unique().tolist() == [scaled.item()]


def test_another_network_that_a_replay_learner_names_is_seen_when_it_is_replaced(batches: list[Trajectories]) -> None:
    learners = [create_values("sim:0", graph=graph) for graph in (False, True)]
    for learner in learners:
        for i, batch in enumerate(batches[:3]):
            learner.update(batch, i / 10)
        for weight in learner.target.parameters():
            weight.data = weight.data + 1.0
        for i, batch in enumerate(batches[3:]):
            learner.update(batch, (3 + i) / 10)
    for one, other in zip(*(learner.model.parameters() for learner in learners), strict=True):
        assert torch.equal(one, other)


def test_learning_starts_with_the_batch_that_reaches_the_number(batches: list[Trajectories]) -> None:
    # Batches of 24 steps: the third holds the 72nd, the fourth the 73rd.
    for starts, first in ((0, 0), (24, 0), (25, 1), (72, 2), (73, 3)):
        learner = create_values(learning_starts=starts, n_env_steps=1_000)
        learnt = [bool(learner.update(batch, 24 * i / 1_000)) for i, batch in enumerate(batches)]
        assert learnt.index(True) == first, starts


def test_the_start_of_learning_is_counted_in_whole_steps() -> None:
    learner = create_values()
    for n_env_steps in range(700, 1_400, 7):
        for n_batches in (1, 3, 7, 11, 29):
            collected = 24 * n_batches
            learner.config = ReplayConfig(**{**SMALL, "n_env_steps": n_env_steps, "learning_starts": collected})
            assert learner.fills((collected - 24) / n_env_steps, n_more=23)
            assert not learner.fills(collected / n_env_steps)
            assert not learner.fills((collected - 24) / n_env_steps, n_more=24)


class Steps(GradientLearner):
    """Steps an optimiser itself, without the methods of the base class."""

    def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        loss: Tensor = sum(weight.square().sum() for weight in self.model.parameters())  # type: ignore[assignment]
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return {"loss": loss.detach()}

    def terms(self, batch: Any) -> dict[str, Tensor]:
        raise NotImplementedError


def test_weights_of_an_update_that_steps_itself_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Trajectories] = []
    update = Steps.update
    monkeypatch.setattr(Steps, "update", lambda self, batch, done: seen.append(batch) or update(self, batch, done))
    config = TrainingConfig(
        n_env_steps=72, n_timesteps=6, n_envs=4, n_processes=0, evaluation_processes=0, evaluation_episodes=2
    )
    run_training(Steps, config, create_network, ActorCriticAgent, create_sim)
    assert [int(batch.info["policy_version"].unique()) for batch in seen] == [1, 2, 3]


def test_a_term_of_some_updates_is_listed_for_those() -> None:
    class Rare(Steps):
        def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
            terms = super().update(trajectories, fraction_done)
            return {"rare": torch.tensor(float(self.policy_version)), **terms} if self.policy_version % 2 else terms

    config = TrainingConfig(
        n_env_steps=120, n_timesteps=6, n_envs=4, n_processes=0, evaluation_processes=0, evaluation_episodes=2
    )
    losses = run_training(Rare, config, create_network, ActorCriticAgent, create_sim).losses
    assert losses["rare"] == [1.0, 3.0]
    assert len(losses["loss"]) == 5
    assert losses["loss"] == sorted(losses["loss"], reverse=True)


def test_the_streams_of_a_training_with_one_seed_have_no_number_in_common(
    batches: list[Trajectories], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed rows, the policy's noise, shuffles, and the environments' own keys."""
    learner = create_values()
    streams = [learner.seed_for(purpose) for purpose in ("minibatches", "policy noise")] + [torch.arange(16)]
    step_keys = random.step_keys
    monkeypatch.setattr(random, "step_keys", lambda seed, *rest: streams.append(seed) or step_keys(seed, *rest))
    learner.buffer.extend(batches[0])
    learner.buffer.sample(1)
    assert len(torch.cat(streams).unique()) == 19


def test_dqn_scales_its_rewards_once(batches: list[Trajectories]) -> None:
    torch.manual_seed(0)
    model = Normalised(create_q_network(), (4,), discount=0.9)
    learner = dqn.DQNLearner.create(model, QAgent, DQNConfig(**SMALL, n_step=1))
    learner.update(batches[0], 0.0)
    assert learner.sample()["reward"].unique().tolist() == [model.scale_rewards(torch.ones(())).item()]


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (GradientLearner, "gradient_steps", "Override `minibatches`"),
        (GradientLearner, "learn_from", "Override `prepare`"),
        (ReplayLearner, "learn", "and `after_step` for what follows"),
        (dqn.DQNLearner, "run", "Override `gradient_step`"),
    ],
)
def test_a_method_that_no_update_calls_any_more_is_refused_with_the_new_one(base: type, old: str, new: str) -> None:
    with pytest.raises(UsageError, match=f"Mine: it overrides {old}, which no update calls since version 0.4. .*{new}"):
        type("Mine", (base,), {old: lambda self, *given: {}})
    mixin = type("Mixin", (), {old: lambda self, *given: {}})
    with pytest.raises(UsageError, match=f"Mine: it overrides {old}"):
        type("Mine", (mixin, base), {})


class Pairs(PPOLearner):
    """Unpacks the argument of `terms`, which was a pair in version 0.3."""

    def terms(self, pair: Any) -> dict[str, Tensor]:
        minibatch, _ = pair
        return super().terms(minibatch)


def test_terms_that_expect_the_pair_of_an_older_version_are_told_what_they_get(batches: list[Trajectories]) -> None:
    learner = Pairs.create(create_network(), ActorCriticAgent, PPOConfig(n_minibatches=2))
    with pytest.raises(TypeError, match=r"PPOLearner\.terms gets the minibatch alone since version 0\.4"):
        learner.update(batches[0], 0.0)


def counted(method: Any) -> Any:
    """Count the calls of a method of the library, as a decorator of a user's own."""

    @functools.wraps(method)
    def count(self: Any, *arguments: Any) -> Any:
        self.n_calls = getattr(self, "n_calls", 0) + 1
        return method(self, *arguments)

    return count


@pytest.mark.slow
def test_a_decorated_method_is_called_for_each_compiled_step(batches: list[Trajectories]) -> None:
    """`functools.wraps` gives it the name and the module of the method of the library."""
    for decorated in ("after_step", "gradient_step"):
        mine: Any = type("Mine", (PPOLearner,), {decorated: counted(getattr(PPOLearner, decorated))})
        config = PPOConfig(n_minibatches=2, n_epochs=2, compile_update=True)
        learner = mine.create(create_network(), ActorCriticAgent, config)
        for batch in batches[:3]:
            learner.update(batch, 0.0)
        assert learner.n_calls == 3 * 4


class Twice(Values):
    """Takes two steps with every gradient."""

    def descend(self, terms: Any, gradient: Any, unless: Any = None) -> Any:
        super().descend(terms, gradient, unless)
        return super().descend(terms, gradient, unless)


def test_all_steps_of_an_optimiser_are_counted(batches: list[Trajectories]) -> None:
    torch.manual_seed(0)
    learner = Twice.create(create_q_network(), QAgent, ReplayConfig(**SMALL))
    learner.update(batches[0], 0.0)
    assert len(learner.sampled) == learner.config.n_updates
    assert learner.policy_version == 2 * learner.config.n_updates


class Squares(GradientLearner):
    """Takes two gradient steps on halves of a batch, and notes in which order its methods are called."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.called: list[str] = []

    def prepare(self, trajectories: Trajectories) -> tuple[Any, dict[str, Tensor]]:
        self.called.append("prepare")
        return trajectories, {"rows": trajectories.lengths.sum()}

    def minibatches(self, prepared: Trajectories) -> Any:
        for start in (0, 2):
            self.called.append("minibatch")
            yield prepared.slice(start, start + 2)

    def terms(self, minibatch: Trajectories) -> dict[str, Tensor]:
        self.called.append("terms")
        return {"loss": self.model(frame_of(minibatch.steps.temporal_index(0).truncate_key("observation/")))[1].mean()}

    def after_step(self, minibatch: Trajectories, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        self.called.append("after")
        return {**terms, "n": terms["loss"].new_tensor(float(minibatch.n_elems()))}


def test_an_update_prepares_once_and_steps_on_each_minibatch(batches: list[Trajectories]) -> None:
    learner = Squares.create(create_network(), ActorCriticAgent, TrainingConfig())
    terms = learner.update(batches[0], 0.0)
    assert learner.called == ["prepare", *["minibatch", "terms", "after"] * 2]
    assert terms["n"].item() == 2.0
    assert terms["rows"].item() == batches[0].lengths.sum().item()
    assert learner.policy_version == 2
