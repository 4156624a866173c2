"""PPO: a whole update equals one written in plain torch, the ratio begins at 1, and the settings do what they say."""

from __future__ import annotations

import copy
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct import DictTensor, TemporalDictTensor, Trajectories, replay_agent
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalActorCritic,
    GaussianActorCritic,
    GaussianAgent,
    Normalised,
    RecurrentActorCritic,
    RecurrentAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
)
from rlstruct.algos import ppo
from rlstruct.algos.ppo import PPOConfig, PPOLearner, train
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.functional import random
from rlstruct.functional.policy_gradient import clipped_surrogate_loss, clipped_value_loss
from rlstruct.sims import make
from rlstruct.testing import allow_host_sync, forbid_host_sync

SMALL = PPOConfig(
    n_env_steps=480,
    n_timesteps=10,
    n_envs=6,
    evaluation_episodes=2,
    evaluation_processes=0,
    evaluation_interval=10**6,
    evaluation_timesteps=25,
    log_interval=3,
    value_clip=0.2,
)


class Toy(gymnasium.Env[Any, Any]):
    """Shows random frames and pays random rewards; ends after 3 to 9 steps, in one way or the other."""

    def __init__(self, frame: spaces.Box, action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = frame, action

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 10))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        ended, terminates = self.left == 0, bool(self.np_random.integers(2))
        return self.observe(), float(self.np_random.normal()), ended and terminates, ended and not terminates, {}

    def observe(self) -> Any:
        drawn = self.np_random.normal(size=self.observation_space.shape) * 50 + 100
        return drawn.clip(0, 255).astype(self.observation_space.dtype)


VECTOR, IMAGE = spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Box(0, 255, (1, 10, 10), np.uint8)
ONE, SEVERAL, CONTINUOUS = spaces.Discrete(3), spaces.MultiDiscrete([3, 2]), spaces.Box(-1.0, 1.0, (2,))
Kind = tuple[Callable[[], nn.Module], Any, spaces.Box, spaces.Space[Any]]
KINDS: dict[str, Kind] = {
    "discrete": (partial(ActorCritic, 4, 3, hidden=(8,)), ActorCriticAgent, VECTOR, ONE),
    "several choices": (partial(ActorCritic, 4, (3, 2), hidden=(8,)), ActorCriticAgent, VECTOR, SEVERAL),
    "continuous": (partial(GaussianActorCritic, 4, 2, hidden=(8,)), GaussianAgent, VECTOR, CONTINUOUS),
    "images": (partial(ConvolutionalActorCritic, (1, 10, 10), 3, n_features=8), ActorCriticAgent, IMAGE, ONE),
    "recurrent": (partial(RecurrentActorCritic, 4, 3, n_hidden=8), RecurrentAgent, VECTOR, ONE),
    "recurrent, continuous": (
        partial(RecurrentGaussianActorCritic, 4, 2, n_hidden=8),
        RecurrentGaussianAgent,
        VECTOR,
        CONTINUOUS,
    ),
}


def create_toys(n_envs: int, seed: int, frame: spaces.Box, action: spaces.Space[Any]) -> GymEnvInf:
    envs: list[gymnasium.Env[Any, Any]] = [Toy(frame, action) for _ in range(n_envs)]
    if isinstance(action, spaces.Box):
        envs = [gymnasium.wrappers.ClipAction(env) for env in envs]
    return GymEnvInf(envs, seed=seed)


def create_learner(kind: str, config: PPOConfig = SMALL, dtype: torch.dtype = torch.float32) -> PPOLearner:
    create_model, create_agent, _, _ = KINDS[kind]
    torch.manual_seed(1)
    return PPOLearner.create(create_model().to(dtype), create_agent, config)


def collect(kind: str, learner: PPOLearner, n_batches: int = 2) -> Trajectories:
    """The last of some batches with the learner's weights, so that rows begin in the middle of episodes."""
    _, create_agent, frame, action = KINDS[kind]
    args: dict[str, Any] = {"model": learner.model, "copy_model": True}
    env_args: dict[str, Any] = {"n_envs": SMALL.n_envs, "frame": frame, "action": action}
    with RL_Batcher(
        SMALL.n_timesteps, create_agent, create_toys, agent_args=args, env_args=env_args, seed=5
    ) as batcher:
        batcher.reset()
        for _ in range(n_batches):
            batcher.execute()
            trajectories, _ = batcher.get()
    return trajectories


# The reference: plain torch, loops over time, torch.distributions, torch.optim.Adam.


def policy_of(model: Any, policy: Tensor) -> Any:
    """The distribution that a network's output [..., n] stands for."""
    if isinstance(model, GaussianActorCritic | RecurrentGaussianActorCritic):
        mean, log_std = policy.chunk(2, dim=-1)
        return torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    return torch.distributions.Categorical(logits=policy)


def outputs(model: Any, steps: Any, hidden: Tensor | None) -> tuple[Any, Tensor, Tensor | None]:
    """Policies and values along rows [B, T], with the state set to zero where an episode begins; the states after."""
    frames = steps["observation/frame"]
    if hidden is None:
        policy, value = model(frames.flatten(0, 1))
        shape = frames.shape[:2]
        return policy.view(*shape, *policy.shape[1:]), value.view(shape), None
    policies, values, states = [], [], []
    for t in range(frames.shape[1]):
        hidden = torch.where(steps["observation/initial_state"][:, t].unsqueeze(1), 0.0, hidden)
        policy, value, hidden = model(frames[:, t], hidden)
        policies.append(policy)
        values.append(value)
        states.append(hidden)
    return torch.stack(policies, 1), torch.stack(values, 1), torch.stack(states, 1)


def value_of(model: Any, frames: Tensor, states: Tensor | None) -> Tensor:
    flat = frames.flatten(0, 1)
    value = model(flat)[1] if states is None else model(flat, states.flatten(0, 1))[1]
    return value.view(frames.shape[:2])


def advantages(steps: Any, value: Tensor, next_value: Tensor, config: PPOConfig) -> Tensor:
    B, T = value.shape
    out = torch.zeros_like(value)
    for b in range(B):
        following = 0.0
        for t in reversed(range(T)):
            goes_on = 0.0 if steps["_observation/terminated"][b, t] else 1.0
            delta = (
                steps["_observation/reward"][b, t].to(value.dtype) * config.reward_scale
                + config.discount * goes_on * next_value[b, t]
                - value[b, t]
            )
            if steps["_observation/done"][b, t]:
                following = 0.0
            following = delta + config.discount * config.trace_decay * following
            out[b, t] = following
    return out


def reference_update(model: Any, trajectories: Trajectories, config: PPOConfig, rate: float) -> None:
    steps = trajectories.steps
    recurrent = "agent_state/hidden" in trajectories.info.keys()
    hidden = trajectories.info["agent_state/hidden"] if recurrent else None
    with torch.no_grad():
        policy, value, states = outputs(model, steps, hidden)
        next_value = value_of(model, steps["_observation/frame"], states)
        advantage = advantages(steps, value, next_value, config)
        target = advantage + value
        before = steps["action/log_probability"]
    B, T = value.shape
    rows = B if recurrent else B * T
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, eps=config.adam_epsilon)
    for epoch in range(config.n_epochs):
        seed = random.purpose_seed(torch.tensor([config.seed]), "minibatches")
        keys = random.step_keys(seed, epoch * config.n_minibatches, torch.arange(rows)).squeeze(1)
        order = keys.argsort()
        for k in range(config.n_minibatches):
            chosen = order[rows * k // config.n_minibatches : rows * (k + 1) // config.n_minibatches]
            b, t = (chosen, slice(None)) if recurrent else (chosen // T, chosen % T)
            seen = {
                name: steps[name][b, t].reshape(len(chosen), -1, *steps[name].shape[2:])
                for name in ("observation/frame", "observation/initial_state")
            }
            policy, new_value, _ = outputs(model, seen, None if hidden is None else hidden[chosen])
            actions = steps["action/action"][b, t].reshape(*new_value.shape, *steps["action/action"].shape[2:])
            distribution = policy_of(model, policy)
            log_probability, entropy = distribution.log_prob(actions), distribution.entropy()
            if log_probability.dim() == 3:  # several choices
                log_probability, entropy = log_probability.sum(-1), entropy.sum(-1)

            def pick(tensor: Tensor, b: Any = b, t: Any = t, like: Tensor = new_value) -> Tensor:
                return tensor[b, t].reshape(like.shape)

            ratio = (log_probability - pick(before)).exp()
            chosen_advantage = pick(advantage)
            if config.whiten_advantages:
                deviation = chosen_advantage.std(correction=0)
                chosen_advantage = (chosen_advantage - chosen_advantage.mean()) / (deviation + 1e-8)
            gains = torch.min(
                ratio * chosen_advantage, ratio.clamp(1 - config.clip, 1 + config.clip) * chosen_advantage
            )
            error = (new_value - pick(target)) ** 2
            if config.value_clip is not None:
                near = pick(value) + (new_value - pick(value)).clamp(-config.value_clip, config.value_clip)
                error = torch.max(error, (near - pick(target)) ** 2)
            loss = -gains.mean() + config.value_coefficient * 0.5 * error.mean()
            loss = loss - config.entropy_coefficient * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            if config.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
            optimizer.step()


CONFIGS = {
    "as by default": SMALL,
    "without bounds": dataclasses.replace(
        SMALL, value_clip=None, whiten_advantages=False, max_gradient_norm=None, clip=0.05, n_minibatches=2
    ),
    "large steps": dataclasses.replace(SMALL, learning_rate=0.01, n_epochs=6, n_minibatches=3),
}


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_update_equals_a_plain_one_in_every_parameter(kind: str, settings: str) -> None:
    config = CONFIGS[settings]
    # In single precision large steps make rounding errors large.
    learner = create_learner(kind, config, torch.float32 if config is SMALL else torch.float64)
    trajectories = collect(kind, learner)
    assert trajectories.steps.full()
    reference, before = copy.deepcopy(learner.model), copy.deepcopy(learner.model)
    terms = learner.update(trajectories, fraction_done=0.0)
    reference_update(reference, trajectories, config, config.learning_rate)
    for (name, weight), other, old in zip(
        learner.model.named_parameters(), reference.parameters(), before.parameters(), strict=True
    ):
        assert (weight - old).abs().max() > 1e-4, name
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-6, msg=name)
    assert terms["ratio_error"].item() < 1e-6
    assert learner.policy_version == config.n_epochs * config.n_minibatches


@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_is_one_before_the_first_step_and_not_where_the_replay_is_wrong(kind: str) -> None:
    learner = create_learner(kind)
    trajectories = collect(kind, learner)
    assert learner.update(trajectories, 0.0)["ratio_error"].item() < 1e-6
    with torch.no_grad():
        next(learner.model.parameters()).add_(0.1)
    assert learner.update(trajectories, 0.0)["ratio_error"].item() > 1e-4
    prepared, numbers = learner.prepare(trajectories)
    assert 0.0 < numbers["explained_variance"].abs().item() < 100.0
    assert prepared.rows.n_elems() == (6 if "recurrent" in kind else 60)
    assert trajectories.steps["_observation/done"].any()


@pytest.mark.parametrize("missing", [("value",), ("log_probability",), ("value", "log_probability")], ids=" and ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_batch_holds_is_that_of_a_replay(kind: str, missing: tuple[str, ...]) -> None:
    learner = create_learner(kind, SMALL, torch.float64)
    trajectories = collect(kind, learner)
    without = {key: value for key, value in trajectories.steps.items() if key.removeprefix("action/") not in missing}
    replayed = Trajectories(trajectories.info, TemporalDictTensor(without, trajectories.lengths))
    (one, _), (other, _) = learner.prepare(trajectories), learner.prepare(replayed)
    mask = one.rows.mask()
    for key in ("learner/value", "learner/target", "learner/advantage", "action/log_probability"):
        torch.testing.assert_close(one.rows.steps[key][mask], other.rows.steps[key][mask], rtol=0, atol=1e-12)
    assert learner.update(replayed, 0.0)["ratio_error"].item() < 1e-6


@pytest.mark.parametrize("kind", ["feed-forward", "recurrent"])
def test_values_in_a_batch_are_those_of_a_replay_while_statistics_change(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrent, prepare = kind == "recurrent", PPOLearner.prepare
    network = RecurrentActorCritic(4, 2, n_hidden=8) if recurrent else ActorCritic(4, 2, hidden=(16,))
    differences: list[float] = []

    def compared(self: PPOLearner, batch: Trajectories) -> Any:
        replayed = replay_agent(self.agent, batch)
        differences.extend(
            (replayed[key] - batch.steps[f"action/{key}"]).abs().max().item() for key in ("value", "log_probability")
        )
        return prepare(self, batch)

    monkeypatch.setattr(PPOLearner, "prepare", compared)
    config = dataclasses.replace(SMALL, n_processes=0, n_minibatches=2)
    train(config, lambda: Normalised(network, (4,), discount=0.99), RecurrentAgent if recurrent else ActorCriticAgent,
          partial(make, "CartPole-v1"))  # fmt: skip
    assert len(differences) == 2 * 8  # of eight updates
    assert max(differences) < 1e-6


def test_the_losses_by_hand() -> None:
    ratio = torch.tensor([[2.0, 2.0, 0.5, 0.5, math.nan]])
    advantage, mask = torch.tensor([[1.0, -1.0, 1.0, -1.0, math.nan]]), torch.tensor([[1, 1, 1, 1, 0]])
    # min: 1.2, -2, 0.5, -0.8.
    with torch.no_grad():
        policy = clipped_surrogate_loss(ratio, advantage, mask, 0.2)
    assert policy.item() == pytest.approx(-(1.2 - 2 + 0.5 - 0.8) / 4)
    value, target = torch.tensor([[1.0, 3.0, math.nan]]), torch.tensor([[2.0, 3.5, math.nan]])
    found = clipped_value_loss(
        value, target, torch.tensor([[1, 1, 0]]), before=torch.tensor([[0.0, 3.0, 0.0]]), clip=0.5
    )
    # Clamped: 0.5 and 3. Errors: max(1, 2.25) and max(0.25, 0.25).
    assert found.item() == pytest.approx((2.25 + 0.25) / 2 / 2)


def test_what_a_training_watches_by_hand() -> None:
    ratio = torch.tensor([[2.0, 0.5, 1.1, 0.9, 9.0]])  # the last is padding
    steps = {
        "action/action": torch.zeros(1, 5, dtype=torch.int64),
        "action/log_probability": math.log(0.5) - ratio.log(),
        **{f"learner/{name}": torch.zeros(1, 5) for name in ("advantage", "target", "value")},
    }
    replayed = TemporalDictTensor({"action_logits": torch.zeros(1, 5, 2), "value": torch.zeros(1, 5)})
    info = DictTensor({"policy_version": torch.zeros(1, dtype=torch.int64)})
    minibatch = Trajectories(info, TemporalDictTensor(steps, torch.tensor([4])))
    with torch.no_grad():
        terms = ppo.losses(replayed, minibatch, PPOConfig(clip=0.2))
    assert terms["clip_fraction"].item() == 2 / 4  # up and down
    assert terms["ratio_error"].item() == pytest.approx(1.0)
    far = (1.0 - math.log(2.0)) + (-0.5 - math.log(0.5)) + (0.1 - math.log(1.1)) + (-0.1 - math.log(0.9))
    assert terms["approximate_kl"].item() == pytest.approx(far / 4, rel=1e-5)


def test_padding_changes_nothing() -> None:
    learner, other = create_learner("recurrent"), create_learner("recurrent")
    trajectories = collect("recurrent", learner)
    steps = trajectories.steps

    def pad(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:, -1:]], dim=1)

    padded = TemporalDictTensor({key: pad(tensor) for key, tensor in steps.items()}, steps.lengths)
    learner.update(trajectories, 0.0)
    other.update(Trajectories(trajectories.info, padded), 0.0)
    torch.testing.assert_close(dict(learner.model.state_dict()), dict(other.model.state_dict()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["discrete", "recurrent"])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(kind: str) -> None:
    learner = create_learner(kind)
    batch = learner.prepare(collect(kind, learner))[0].rows
    rows = batch.n_elems()
    orders = [
        torch.cat([batch.index(one).steps["observation/rng"][:, 0] for one in learner.shuffled(rows, epoch)])
        for epoch in range(2)
    ]
    learner.version_now += SMALL.n_minibatches
    assert torch.equal(torch.cat(learner.shuffled(rows, 0)), torch.cat(create_learner(kind).shuffled(rows, 1)))
    every = batch.steps["observation/rng"][:, 0].tolist()
    drawn = [order.tolist() for order in orders]
    assert sorted(drawn[0]) == sorted(drawn[1]) == sorted(every)
    assert len({tuple(drawn[0]), tuple(drawn[1]), tuple(every)}) == 3


def test_a_policy_that_moved_too_far_takes_no_more_steps_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(SMALL, learning_rate=0.01, n_minibatches=3)
    bounded, free = (create_learner("continuous", dataclasses.replace(config, target_kl=kl)) for kl in (0.01, None))
    trajectories = collect("continuous", bounded)
    weights: list[list[Tensor]] = []
    divergences: list[float] = []
    for learner in (bounded, free):
        monkeypatch.setattr(learner.optimizer, "step", allow_host_sync()(learner.optimizer.step))
    descend = free.descend

    def watched(*given: Any, unless: Tensor | None = None) -> dict[str, Tensor]:
        weights.append([weight.detach().clone() for weight in free.model.parameters()])
        return descend(*given, unless=unless)

    losses = ppo.losses

    def watched_losses(*args: Any) -> dict[str, Tensor]:
        terms = losses(*args)
        divergences.append(terms["approximate_kl"].item())
        return terms

    monkeypatch.setattr(free, "descend", watched)
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "losses", watched_losses)
        free.update(trajectories, 0.0)
    with forbid_host_sync():
        terms = bounded.update(trajectories, 0.0)
    stop = next(k for k, divergence in enumerate(divergences) if divergence > 0.01)
    assert 0 < stop < 11
    assert terms["skipped"].item() == pytest.approx((12 - stop) / 12)
    for mine, theirs in zip(bounded.model.parameters(), weights[stop], strict=True):
        assert torch.equal(mine, theirs)
    # The next update begins afresh.
    trajectories = collect("continuous", bounded)
    before = [weight.detach().clone() for weight in bounded.model.parameters()]
    assert bounded.update(trajectories, 0.0)["skipped"].item() < 1.0
    assert not torch.equal(before[0], next(bounded.model.parameters()))


def test_a_policy_that_moved_too_far_takes_no_more_steps_without_a_fused_optimiser() -> None:
    trajectories = collect("continuous", create_learner("continuous"))
    found = []
    for device in ("cpu", "sim:0"):
        config = dataclasses.replace(SMALL, learning_rate=0.01, n_minibatches=3, target_kl=0.01, learner_device=device)
        learner = PPOLearner.create(create_learner("continuous").model.to(device), KINDS["continuous"][1], config)
        terms = learner.update(trajectories, 0.0)
        found.append((terms["skipped"].item(), [weight.detach().to("cpu") for weight in learner.model.parameters()]))
    (expected, weights), (skipped, others) = found
    assert 0.0 < expected == skipped
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other)


def test_what_cannot_be_is_refused() -> None:
    learner = create_learner("recurrent")
    with pytest.raises(ValueError, match="n_minibatches is 4, expected at most 3, one for each environment: an agent"):
        learner.shuffled(3, 0)


def train_small(kind: str, **changes: Any) -> TrainingResult:
    create_model, create_agent, frame, action = KINDS[kind]
    config = dataclasses.replace(SMALL, **changes)
    return train(config, create_model, create_agent, create_toys, env_args={"frame": frame, "action": action})


def test_every_batch_is_learnt_from_also_where_the_learning_rate_falls_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    descend = PPOLearner.descend

    def watched(self: PPOLearner, *given: Any, **options: Any) -> Any:
        rates.append(self.optimizer.param_groups[0]["lr"])
        return descend(self, *given, **options)

    monkeypatch.setattr(PPOLearner, "descend", watched)
    train_small("discrete", n_epochs=1, n_minibatches=1)
    assert rates == pytest.approx([1e-3 * left / 8 for left in range(8, 0, -1)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_logs_what_shows_whether_it_is_right(kind: str) -> None:
    result = train_small(kind)
    names = {"loss", "policy_loss", "value_loss", "entropy_loss", "approximate_kl", "clip_fraction", "gradient_norm"}
    assert set(result.losses) == {*names, "ratio_error", "explained_variance", "policy_lag"}
    assert len(result.losses["loss"]) == 8
    assert max(result.losses["ratio_error"]) < 1e-5
    assert train_small(kind).losses == result.losses
    if kind == "discrete":
        assert train_small(kind, seed=1).losses != result.losses


def test_each_of_the_37_details_names_its_test_its_option_or_the_reason_against_it() -> None:
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "algorithms" / "ppo.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 38))
    code = {str(file.relative_to(root / "tests")): file.read_text() for file in (root / "tests").rglob("test_*.py")}
    for number, _, said in rows:
        names = re.findall(r"`(?:([\w/]+\.py)(?:::)?)?(test_\w+)?`", said)
        names = [(file, test) for file, test in names if file or test]
        for file, test in names:
            assert file in code or not file, (number, file)
            assert not test or any(f"def {test}(" in text for name, text in code.items() if file in ("", name)), test
        options = set(re.findall(r"`(\w+)`", said)) & {field.name for field in dataclasses.fields(PPOConfig)}
        assert names or options or re.search("Reference|see 13|`gymnasium|`Atari|refused: |not done: ", said), number
