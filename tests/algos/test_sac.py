"""SAC: losses and gradients of a plain implementation, targets by hand, and true values at an episode's end."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from replaying_learners import learn_once
from resume_tasks import SAC, create_pendulum, create_soft_network
from torch import Tensor, nn
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from rlstruct import DictTensor, Policy
from rlstruct.agents import MLP, SoftActorCritic, SquashedGaussianAgent
from rlstruct.algos.sac import SACConfig, SACLearner, losses, train
from rlstruct.batchers import RL_Batcher
from rlstruct.core import TensorSpec
from rlstruct.envs import GymEnvInf
from rlstruct.functional import gaussian
from rlstruct.functional.random import step_keys
from rlstruct.testing import allow_host_sync, forbid_host_sync

K = 6


def create_learner(**changes: Any) -> SACLearner:
    torch.manual_seed(2)
    config = dataclasses.replace(SAC, **changes)
    model = SoftActorCritic(3, (-2.0, 0.0), (2.0, 1.0), hidden=(8, 8)).to(config.learner_device)
    return SACLearner.create(model, SquashedGaussianAgent, config)


def batch_of(K: int = K) -> DictTensor:
    keys = step_keys(torch.arange(2 * K), 5, torch.arange(1))[0]
    return DictTensor(
        {
            "observation/frame": torch.randn(K, 3),
            "_observation/frame": torch.randn(K, 3),
            "observation/rng": keys[:K],
            "_observation/rng": keys[K:],
            "action/action": torch.rand(K, 2) * torch.tensor([4.0, 1.0]) - torch.tensor([2.0, 0.0]),
            "reward": torch.randn(K),
            "discount": torch.full((K,), 0.9),
            "terminated": torch.arange(K) < 2,  # the others go on, or are truncated
        }
    )


def value(critics: Any, n: int, frame: Tensor, action: Tensor) -> Tensor:
    """The value of one of the critics, with plain layers."""
    x = torch.cat([frame, action], -1)
    for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
        x = nn.functional.linear(x, weight[n], bias[n, 0])
        x = x if i == len(critics.weights) - 1 else x.relu()
    return x.squeeze(-1)


def drawn(model: Any, frame: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """An action in each frame and its log-probability, with torch's own distributions."""
    mean, log_std = model(frame).chunk(2, -1)
    noise = gaussian.sample(torch.zeros(len(frame), 2), torch.zeros(2), key)
    affine = AffineTransform(torch.tensor([0.0, 0.5]), torch.tensor([2.0, 0.5]), event_dim=1)
    transforms = [TanhTransform(cache_size=1), affine.with_cache()]
    policy = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), transforms)
    action = mean + log_std.exp() * noise
    for transform in transforms:
        action = transform(action)
    return action, policy.log_prob(action)


@pytest.mark.parametrize("target_entropy", [None, 0.7])
def test_losses_and_gradients_are_those_of_three_separate_losses(target_entropy: float | None) -> None:
    learner = create_learner(reward_scale=2.0, target_entropy=target_entropy)
    model: Any = learner.model
    with torch.no_grad():
        model.log_temperature.fill_(-0.5)
        for weight in learner.target_critics.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    batch = batch_of()
    frame, reached = batch["observation/frame"], batch["_observation/frame"]
    alpha = model.log_temperature.exp()
    with torch.no_grad():
        action, log_probability = drawn(model, reached, batch["_observation/rng"])
        judged = torch.minimum(*(value(learner.target_critics, n, reached, action) for n in range(2)))
        follows = 0.9 * (judged - alpha * log_probability)
        target = 2.0 * batch["reward"] + torch.where(batch["terminated"], 0.0, follows)
    q = [value(model.critics, n, frame, batch["action/action"]) for n in range(2)]
    critic_loss = 0.5 * ((q[0] - target) ** 2).mean() + 0.5 * ((q[1] - target) ** 2).mean()
    action, log_probability = drawn(model, frame, batch["observation/rng"])
    best = torch.minimum(*(value(model.critics, n, frame, action) for n in range(2)))
    policy_loss = (alpha.detach() * log_probability - best).mean()
    # In units of -1..1 the density is as many times larger as the action space is: 2 * 0.5 = 1, so log 1 = 0 here.
    wanted = -2.0 if target_entropy is None else target_entropy
    temperature_loss = -(alpha * (log_probability.detach() + wanted)).mean()
    expected = {"critic_loss": critic_loss, "policy_loss": policy_loss, "temperature_loss": temperature_loss}
    parts: dict[str, list[nn.Parameter]] = {
        "critic_loss": list(model.critics.parameters()),
        "policy_loss": list(model.actor.parameters()),
        "temperature_loss": [model.log_temperature],
    }
    terms, gradient = learner.gradient(batch)
    number = {id(weight): str(i) for i, weight in enumerate(model.parameters())}
    for name, loss in expected.items():
        torch.testing.assert_close(terms[name], loss.detach())
        for weight, theirs in zip(parts[name], torch.autograd.grad(loss, parts[name], retain_graph=True), strict=True):
            assert theirs.abs().max() > 0
            torch.testing.assert_close(gradient[number[id(weight)]], theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(terms["loss"], sum(expected.values()).detach())  # type: ignore[union-attr]
    torch.testing.assert_close(terms["entropy"], -log_probability.detach().mean())
    assert sum(map(len, parts.values())) == len(number) == len(gradient)
    assert all(weight.grad is None and not weight.requires_grad for weight in learner.target_critics.parameters())


def test_the_mean_of_the_critics_replaces_their_minimum() -> None:
    learner = create_learner(critic_reduction="mean")
    model: Any = learner.model
    batch = batch_of()
    frame, reached = batch["observation/frame"], batch["_observation/frame"]
    with torch.no_grad():
        action, log_probability = drawn(model, reached, batch["_observation/rng"])
        judged = (value(model.critics, 0, reached, action) + value(model.critics, 1, reached, action)) / 2
        follows = 0.9 * (judged - log_probability)  # the temperature is 1 at first
        target = batch["reward"] + torch.where(batch["terminated"], 0.0, follows)
        q = [value(model.critics, n, frame, batch["action/action"]) for n in range(2)]
        action, log_probability = drawn(model, frame, batch["observation/rng"])
        best = (value(model.critics, 0, frame, action) + value(model.critics, 1, frame, action)) / 2
    terms = learner.terms(batch)
    expected = 0.5 * ((q[0] - target) ** 2).mean() + 0.5 * ((q[1] - target) ** 2).mean()
    torch.testing.assert_close(terms["critic_loss"], expected)
    torch.testing.assert_close(terms["policy_loss"], (log_probability - best).mean())


@pytest.mark.parametrize("critic_reduction", ["min", "mean"])
def test_distributional_critics_learn_the_cross_entropy_of_projected_returns(critic_reduction: str) -> None:
    torch.manual_seed(2)
    model = SoftActorCritic(3, (-2.0, 0.0), (2.0, 1.0), hidden=(8, 8), n_atoms=7, value_range=(-3.0, 3.0))
    config = dataclasses.replace(SAC, critic_reduction=critic_reduction, reward_scale=2.0)
    learner = SACLearner.create(model, SquashedGaussianAgent, config)
    with torch.no_grad():
        model.log_temperature.fill_(-0.5)
        for weight in (*model.critics.parameters(), *learner.target_critics.parameters()):
            weight.add_(0.3 * torch.randn_like(weight))
    batch, networks = batch_of(), (model.critics, learner.target_critics)
    frame, reached = batch["observation/frame"], batch["_observation/frame"]
    with torch.no_grad():
        action, log_probability = drawn(model, reached, batch["_observation/rng"])
        now, then = (
            net.outputs(*pair).softmax(-1)  # type: ignore[operator]
            for net, pair in zip(networks, ((frame, batch["action/action"]), (reached, action)), strict=True)
        )
    atoms, total, chosen = torch.linspace(-3.0, 3.0, 7), 0.0, set()
    for k in range(K):
        means = [(then[n, k] * atoms).sum() for n in range(2)]
        chosen.add(int(means[1] < means[0]))
        believed = then[int(means[1] < means[0]), k] if critic_reduction == "min" else (then[0, k] + then[1, k]) / 2
        goal = torch.zeros(7)
        for atom, probability in zip(atoms, believed, strict=True):
            gone_on = 0.0 if batch["terminated"][k] else 0.9 * (atom - math.exp(-0.5) * log_probability[k])
            place = float((2.0 * batch["reward"][k] + gone_on).clamp(-3.0, 3.0)) + 3.0  # atoms lie 1 apart
            below = min(int(place), 5)
            goal[below] += probability * (below + 1 - place)
            goal[below + 1] += probability * (place - below)
        total -= sum((goal * now[n, k].log()).sum().item() for n in range(2)) / K
    terms, gradient = learner.gradient(batch)
    assert chosen == {0, 1}
    assert terms["critic_loss"].item() == pytest.approx(total, rel=1e-5)
    torch.testing.assert_close(terms["value"], (now * atoms).sum(-1).mean())
    assert all(one.abs().max() > 0 for one in gradient.values())


def test_target_entropy_does_not_depend_on_the_unit_of_the_actions() -> None:
    entropies = []
    for scale in (1.0, 8.0):
        torch.manual_seed(2)
        model = SoftActorCritic(3, (-scale, -scale), (scale, scale), hidden=(8,))
        agent = SquashedGaussianAgent(model, copy_model=False)
        entropies.append(losses(agent, model, model.critics, batch_of(50), SAC)["entropy"])
    torch.testing.assert_close(*entropies)


@pytest.fixture
def filled() -> Any:
    """A function that makes a learner whose buffer holds some steps."""

    def make(**changes: Any) -> SACLearner:
        config = dataclasses.replace(SAC, **changes)
        torch.manual_seed(2)
        learner = SACLearner.create(create_soft_network().to(config.learner_device), SquashedGaussianAgent, config)
        factories: Any = SquashedGaussianAgent, create_pendulum
        args: Any = {"agent_args": {"model": create_soft_network()}, "env_args": {"n_envs": 4}}
        with RL_Batcher(20, *factories, **args, seed=0) as batcher:
            batcher.reset()
            batcher.execute()
            learner.buffer.extend(batcher.get()[0].to(learner.buffer.device))
        return learner

    return make


@pytest.mark.parametrize("learner_device", ["cpu", "sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_one_step_moves_all_networks_by_their_rates_and_never_syncs(
    filled: Any, learner_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = filled(learner_device=learner_device, learning_rate=0.001, critic_learning_rate=0.01)
    # Adam counts its steps in a tensor on the CPU, wherever the weights are: reading that waits for no device.
    monkeypatch.setattr(learner.optimizer, "step", allow_host_sync()(learner.optimizer.step))
    learner.anneal(0.0)
    before = {name: weight.detach().to("cpu", copy=True) for name, weight in learner.model.named_parameters()}
    with forbid_host_sync():
        terms = learn_once(learner)
    assert all(not term.requires_grad and term.dim() == 0 for term in terms.values())
    for name, weight in learner.model.named_parameters():
        moved = (weight.detach().to("cpu") - before[name]).abs().max().item()  # Adam's first step is its rate
        assert moved == pytest.approx(0.001 if name.startswith("actor") else 0.01, rel=1e-3), name


def test_all_rates_fall_with_the_training(filled: Any) -> None:
    learner = filled(learning_rate=0.001, critic_learning_rate=0.01, final_learning_rate_fraction=0.5)
    for done, share in ((0.0, 1.0), (0.5, 0.75), (1.0, 0.5)):
        learner.anneal(done)
        rates = [group["lr"] for group in learner.optimizer.param_groups]
        assert rates == pytest.approx([0.001 * share, 0.01 * share])


def test_the_target_follows_the_critics_alone(filled: Any) -> None:
    learner = filled(target_update_rate=0.25)
    expected = [weight.clone() for weight in learner.target_critics.parameters()]
    for _ in range(3):
        learn_once(learner)
        learnt = learner.model.critics.parameters()
        expected = [0.75 * old + 0.25 * new.detach() for old, new in zip(expected, learnt, strict=True)]
    torch.testing.assert_close(list(learner.target_critics.parameters()), expected)


def test_weight_decay_shrinks_each_weight_in_proportion_to_its_learning_rate(filled: Any) -> None:
    plain, decaying = (filled(learning_rate=0.001, critic_learning_rate=0.01, weight_decay=d) for d in (0.0, 0.5))
    before = [weight.detach().clone() for weight in plain.model.parameters()]
    for learner in (plain, decaying):
        learner.anneal(0.0)
        learn_once(learner)
    for (name, one), other, first in zip(
        plain.model.named_parameters(), decaying.model.parameters(), before, strict=True
    ):
        rate = 0.001 if name.startswith("actor") else 0.01
        torch.testing.assert_close(one - other, rate * 0.5 * first, rtol=1e-3, atol=1e-7)


def test_samples_have_returns_of_n_steps(filled: Any) -> None:
    batch = filled(n_step=3).sample()
    assert batch["discount"].min() == pytest.approx(0.99**3)


def test_draws_differ_from_step_to_step_and_from_state_to_state(filled: Any) -> None:
    learner = filled()
    first = learner.sample()
    learn_once(learner)
    samples = [first, learner.sample()]
    keys = [sample[f"{part}observation/rng"] for sample in samples for part in ("", "_")]
    assert len(torch.cat(keys).unique()) == 4 * learner.config.batch_size


def test_actions_are_uniform_until_learning_starts() -> None:
    learner = create_learner(n_env_steps=800, learning_starts=200)
    for done, epsilon in ((0.0, 1.0), (199 / 800, 1.0), (0.25, 0.0), (1.0, 0.0)):
        assert learner.agent_info(done, 3)["epsilon"].tolist() == [epsilon] * 3


def test_held_noise_lasts_for_a_batch_and_no_longer() -> None:
    learner = create_learner(n_env_steps=800, hold_noise=True)
    first, again, later = (learner.agent_info(done, 3)["noise"] for done in (0.0, 0.0, 16 / 800))
    assert torch.equal(first, again)
    assert len(torch.cat([first, later]).unique()) == 6
    assert "noise" not in create_learner().agent_info(0.0, 3)


def test_policies_after_a_training_draw_new_noise_at_every_step() -> None:
    learner = create_learner(n_env_steps=800, hold_noise=True)
    settings = {key: value[0] for key, value in learner.agent_info(1.0, 1).items()}  # as checkpoints hold them
    specs = {"frame": TensorSpec((3,), torch.float32)}
    policy = Policy(learner.model, SquashedGaussianAgent, specs, stochastic=True, agent_info=settings)
    actions = torch.cat([policy.act(torch.zeros(2, 3)) for _ in range(3)])
    assert len(actions.unique(dim=0)) == 6


def test_equal_keys_of_held_noise_give_equal_noise() -> None:
    model = SoftActorCritic(3, (-2.0, 0.0), (2.0, 1.0), hidden=(8, 8))
    agent = SquashedGaussianAgent(model)
    frame, keys = torch.randn(1, 3).expand(4, 3), step_keys(torch.arange(4), 0, torch.arange(2))
    info = DictTensor({"noise": torch.tensor([5, 5, 6, 6])})
    for epsilon in (0.0, 1.0):
        told = info + DictTensor({"epsilon": torch.full((4,), epsilon)})
        steps = [agent(DictTensor(), DictTensor({"frame": frame, "rng": key}), told)[0]["action"] for key in keys]
        assert torch.equal(*steps)
        assert torch.equal(steps[0][::2], steps[0][1::2])
        assert not torch.equal(steps[0][0], steps[0][2])
    new = agent(DictTensor(), DictTensor({"frame": frame, "rng": keys[0]}), DictTensor())[0]["action"]
    assert len(new.unique(dim=0)) == 4


@pytest.mark.parametrize("n_processes", [0, 2])
def test_environments_keep_their_noise_during_a_batch(n_processes: int) -> None:
    learner = create_learner(n_env_steps=800, hold_noise=True, learning_starts=800)  # acts uniformly
    factories: Any = SquashedGaussianAgent, create_pendulum
    args: Any = {"agent_args": {"model": create_soft_network()}, "env_args": {"n_envs": 2}}
    rows = []
    with RL_Batcher(8, *factories, **args, seed=0, n_processes=n_processes) as batcher:
        batcher.reset()
        for done in (0.0, 0.1):
            batcher.execute(learner.agent_info(done, batcher.n_envs()))
            rows.append(batcher.get()[0].steps["action/action"])
    actions = torch.cat(rows)  # [B, T, 1]
    assert torch.equal(actions, actions[:, :1].expand_as(actions))
    assert len(actions[:, 0].unique()) == len(actions) == 4 * max(1, n_processes)


class Paid(gymnasium.Env[Any, Any]):
    """Rewards each step with 1; after three steps an episode is cut off, or after one it terminates."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, terminates: bool) -> None:
        self.terminates, self.taken = terminates, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        cut = not self.terminates and self.taken == 3
        return np.zeros(1, np.float32), 1.0, self.terminates, cut, {}


@pytest.mark.parametrize(("terminates", "expected"), [(True, 1.0), (False, 5.0)])
@pytest.mark.parametrize(("n_step", "network"), [(1, {}), (3, {}), (3, {"n_atoms": 15, "value_range": (-1, 6)})])
def test_truncated_episodes_go_on_and_terminated_ones_do_not(
    terminates: bool, expected: float, n_step: int, network: dict[str, Any]
) -> None:
    def create_model() -> SoftActorCritic:
        model = SoftActorCritic(1, (-1.0,), (1.0,), hidden=(), **network)
        nn.init.constant_(model.log_temperature, -30.0)  # entropy is worth nothing
        return model

    def create_env(n_envs: int, seed: int) -> GymEnvInf:
        return GymEnvInf([Paid(terminates) for _ in range(n_envs)], seed=seed)

    config = SACConfig(
        n_env_steps=320, n_envs=4, n_timesteps=8, n_updates=60, discount=0.8, batch_size=32, learning_starts=32,
        critic_learning_rate=0.05, final_learning_rate_fraction=0.01, target_update_rate=0.3, replay_capacity=1000,
        n_step=n_step, evaluation_episodes=1, evaluation_processes=0, evaluation_timesteps=3, evaluation_interval=10**6,
    )  # fmt: skip
    model: Any = train(config, create_model, SquashedGaussianAgent, create_env).model
    values = model.critics(torch.zeros(3, 1), torch.tensor([[-0.9], [0.0], [0.9]]))
    # Cut off: 1 + 0.8 + 0.8^2 + … = 1 / 0.2. Terminated: the one reward.
    # A little probability stays far from the mean for long.
    torch.testing.assert_close(values, torch.full((2, 3), expected), rtol=0, atol=0.3 if network else 0.05)


class Parted(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Pendulum, with the angle and the speed in a Dict."""

    observation_space = spaces.Dict(speed=spaces.Box(-8, 8, (1,)), angle=spaces.Box(-1, 1, (1, 2)))

    def observation(self, observation: Any) -> Any:
        return {"speed": observation[2:], "angle": observation[None, :2]}


def test_dict_observations_train_the_same_weights_as_flat_ones() -> None:
    def parted(n_envs: int, seed: int) -> GymEnvInf:
        return GymEnvInf([Parted(gymnasium.make("Pendulum-v1")) for _ in range(n_envs)], seed=seed)

    def flat(n_envs: int, seed: int) -> GymEnvInf:
        return GymEnvInf([gymnasium.make("Pendulum-v1") for _ in range(n_envs)], seed=seed)

    config = SACConfig(
        n_env_steps=96, n_envs=2, n_timesteps=8, n_updates=2, batch_size=16, learning_starts=32, replay_capacity=1000,
        evaluation_episodes=1, evaluation_processes=0, evaluation_timesteps=200, evaluation_interval=10**6,
    )  # fmt: skip
    create_model = partial(SoftActorCritic, 3, (-2.0,), (2.0,), hidden=(8,))
    one, other = (train(config, create_model, SquashedGaussianAgent, create) for create in (parted, flat))
    assert one.losses["critic_loss"]
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    assert one.after.mean_return == other.after.mean_return


def test_another_network_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(TypeError, match="the network, MLP, has no critics and no log_temperature and no scale"):
        SACLearner.create(MLP(3, 2), SquashedGaussianAgent, SAC)
