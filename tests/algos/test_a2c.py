from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor, TemporalDictTensor, Trajectories, WorkerError
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    GaussianActorCritic,
    GaussianAgent,
    Normalised,
    RecurrentActorCritic,
    RecurrentAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
)
from rlstruct.algos import a2c
from rlstruct.algos.a2c import A2CConfig, A2CLearner, train
from rlstruct.algos.training.build import threads_for
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.testing import allow_host_sync, forbid_host_sync

SMALL = A2CConfig(
    n_env_steps=600,
    n_timesteps=10,
    n_envs=6,
    max_gradient_norm=0.5,
    reward_scale=1.0,
    evaluation_episodes=4,
    evaluation_processes=0,
    evaluation_interval=300,
    log_interval=3,
)


def create_env(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=25) for _ in range(n_envs)], seed=seed)


def create_pendulum(n_envs: int, seed: int) -> GymEnvInf:
    envs = [gymnasium.make("Pendulum-v1", max_episode_steps=25) for _ in range(n_envs)]
    return GymEnvInf([gymnasium.wrappers.ClipAction(env) for env in envs], seed=seed)


def create_model() -> ActorCritic:
    return ActorCritic(4, 2, hidden=(16,))


def create_recurrent_model() -> RecurrentActorCritic:
    return RecurrentActorCritic(4, 2, n_hidden=8)


def create_gaussian_model() -> GaussianActorCritic:
    return GaussianActorCritic(3, 1, hidden=(16,))


def create_recurrent_gaussian_model() -> RecurrentGaussianActorCritic:
    return RecurrentGaussianActorCritic(3, 1, n_hidden=8)


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "feed-forward": (create_model, ActorCriticAgent, create_env),
    "recurrent": (create_recurrent_model, RecurrentAgent, create_env),
    "gaussian": (create_gaussian_model, GaussianAgent, create_pendulum),
    "recurrent gaussian": (create_recurrent_gaussian_model, RecurrentGaussianAgent, create_pendulum),
}


def train_small(kind: str = "feed-forward", **changes: Any) -> TrainingResult:
    return train(dataclasses.replace(SMALL, **changes), *KINDS[kind])


def two_steps(**changes: Any) -> Trajectories:
    """One row of two real steps, of which the second ended its episode by truncation, and one of padding."""
    frames = torch.randn(1, 4, 4)
    steps = {
        "observation/frame": frames[:, :3],
        "observation/rng": torch.zeros(1, 3, dtype=torch.int64),
        "action/action": torch.tensor([[0, 1, 0]]),
        "action/log_probability": torch.tensor([[0.5, 0.5, 1.0]]).log(),
        "_observation/frame": frames[:, 1:],
        "_observation/rng": torch.zeros(1, 3, dtype=torch.int64),
        "_observation/reward": torch.tensor([[1.0, 2.0, math.nan]]),
        "_observation/terminated": torch.tensor([[False, False, False]]),
        "_observation/done": torch.tensor([[False, True, False]]),
        **changes,
    }
    info = DictTensor({"policy_version": torch.zeros(1, dtype=torch.int64)})
    return Trajectories(info, TemporalDictTensor(steps, torch.tensor([2])))


def by_hand(value: list[float], **changes: Any) -> tuple[TemporalDictTensor, A2CConfig]:
    config = dataclasses.replace(
        SMALL, discount=0.5, trace_decay=0.5, value_coefficient=10.0, entropy_coefficient=100.0,
        whiten_advantages=False, **changes,
    )  # fmt: skip
    return TemporalDictTensor(
        {"action_logits": torch.zeros(1, 3, 2, requires_grad=True), "value": torch.tensor([value], requires_grad=True)}
    ), config


def test_the_loss_by_hand() -> None:
    replayed, config = by_hand([1.0, 4.0, math.nan])
    terms = a2c.losses(replayed, two_steps(), torch.tensor([[4.0, 8.0, math.nan]]), config)
    # Errors: 1 + 4/2 - 1 = 2; 2 + 8/2 - 4 = 2 (truncated: its value counts). GAE: 2; 2 + 2/4 = 2.5.
    assert terms["policy_loss"].item() == pytest.approx((2.5 + 2.0) / 2 * math.log(2))
    assert terms["value_loss"].item() == pytest.approx((2.5**2 + 2.0**2) / 2 / 2)
    assert terms["entropy_loss"].item() == pytest.approx(-math.log(2))
    expected = 2.25 * math.log(2) + 10 * 2.5625 - 100 * math.log(2)
    assert terms["loss"].item() == pytest.approx(expected)


def test_a_termination_is_worth_nothing_beyond() -> None:
    replayed, config = by_hand([1.0, 4.0, math.nan])
    ended = two_steps(**{"_observation/terminated": torch.tensor([[False, True, False]])})
    terms = a2c.losses(replayed, ended, torch.tensor([[4.0, 8.0, math.nan]]), config)
    # Errors: 2; 2 - 4 = -2. GAE: -2; 2 - 2/4 = 1.5.
    assert terms["value_loss"].item() == pytest.approx((1.5**2 + 2.0**2) / 2 / 2)


def test_vtrace_by_hand_weighs_what_older_weights_chose() -> None:
    replayed, config = by_hand([1.0, 4.0, math.nan], vtrace=True)
    older = torch.tensor([[0.25, 1.0, 1.0]]).log()  # now both are 1/2: ratios 2 (clipped to 1) and 1/2
    collected = two_steps(**{"action/log_probability": older})
    terms = a2c.losses(replayed, collected, torch.tensor([[4.0, 8.0, math.nan]]), config)
    # Errors 2 and 2, as above. v - V: 2/2 = 1; 2 + 1/2 * 1/2 * 1 = 2.25. Advantages: 2/2 = 1; 2 + 1/4 * 1 = 2.25.
    assert terms["value_loss"].item() == pytest.approx((1.0 + 2.25**2) / 2 / 2)
    assert terms["policy_loss"].item() == pytest.approx((2.25 + 1.0) / 2 * math.log(2))


def test_the_learner_sees_scaled_rewards() -> None:
    replayed, config = by_hand([1.0, 4.0, math.nan], reward_scale=2.0)
    terms = a2c.losses(replayed, two_steps(), torch.tensor([[4.0, 8.0, math.nan]]), config)
    # Errors: 2 + 4/2 - 1 = 3; 4 + 8/2 - 4 = 4. GAE: 4; 3 + 4/4 = 4.
    assert terms["value_loss"].item() == pytest.approx(4.0**2 / 2)


def test_the_gaussian_loss_judges_the_stored_action() -> None:
    replayed, config = by_hand([0.0, 0.0, 0.0])
    mean, log_std = (torch.zeros(1, 3, 1, requires_grad=True) for _ in range(2))
    replayed = TemporalDictTensor({"action_mean": mean, "action_log_std": log_std, "value": replayed["value"]})
    collected = two_steps(**{"action/action": torch.tensor([[[2.0], [0.0], [math.nan]]])})
    terms = a2c.losses(replayed, collected, torch.zeros(1, 3), config)
    # GAE: 2; 1 + 2/4 = 1.5. Log densities: -2 and 0, less log(2 pi) / 2. Entropy: (1 + log(2 pi)) / 2.
    constant = math.log(2 * math.pi) / 2
    assert terms["policy_loss"].item() == pytest.approx((1.5 * (2 + constant) + 2 * constant) / 2)
    assert terms["entropy_loss"].item() == pytest.approx(-(0.5 + constant))


def test_an_agent_without_a_policy_is_named() -> None:
    _, config = by_hand([0.0, 0.0, 0.0])
    with pytest.raises(KeyError, match=r"evaluate_actions: the agent returns \['value'\], expected 'action_logits'"):
        a2c.losses(TemporalDictTensor({"value": torch.zeros(1, 3)}), two_steps(), torch.zeros(1, 3), config)


@pytest.mark.parametrize("corrected", [False, True])
def test_one_update_moves_the_learners_model_and_never_syncs(corrected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, piece = create_model(), two_steps()
    config = dataclasses.replace(SMALL, vtrace=corrected)
    learner = A2CLearner(model, ActorCriticAgent(model, copy_model=False), config)
    # Adam counts its steps in a tensor on the CPU, wherever the weights are: reading that waits for no device.
    monkeypatch.setattr(learner.optimizer, "step", allow_host_sync()(learner.optimizer.step))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with forbid_host_sync():
        terms = learner.update(piece, fraction_done=0.0)
    assert all(weight.grad is not None for weight in model.parameters())
    assert all(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items() if "weight" in name)
    assert all(not term.requires_grad and term.dim() == 0 for term in terms.values())
    assert set(terms) == {"loss", "policy_loss", "value_loss", "entropy_loss", "gradient_norm"}
    assert learner.policy_version == 1


def test_several_updates_on_a_piece_are_as_many_gradient_steps_on_it() -> None:
    twice, by_one, piece = create_model(), create_model(), two_steps()
    by_one.load_state_dict(twice.state_dict())
    config = dataclasses.replace(SMALL, vtrace=True)
    one = A2CLearner(by_one, ActorCriticAgent(by_one, copy_model=False), config)
    first, second = one.update(piece, fraction_done=0.5), one.update(piece, fraction_done=0.5)
    both = A2CLearner(twice, ActorCriticAgent(twice, copy_model=False), dataclasses.replace(config, n_updates=2))
    terms = both.update(piece, fraction_done=0.5)
    assert both.policy_version == one.policy_version == 2
    assert terms["loss"].item() == pytest.approx((first["loss"].item() + second["loss"].item()) / 2)
    torch.testing.assert_close(dict(twice.state_dict()), dict(by_one.state_dict()), rtol=0, atol=0)


def test_minibatches_are_gradient_steps_on_neighbouring_environments() -> None:
    at_once, by_one = create_model(), create_model()
    by_one.load_state_dict(at_once.state_dict())
    rows = [two_steps(**{"_observation/reward": torch.tensor([[reward, 1.0, 0.0]])}) for reward in (0.0, 5.0, -5.0)]
    config = dataclasses.replace(SMALL, vtrace=True)
    one = A2CLearner(by_one, ActorCriticAgent(by_one, copy_model=False), config)
    parts = [rows[0], Trajectories.cat(rows[1:])] * 2  # 3 environments in 2 parts, twice
    losses = [one.update(part, fraction_done=0.5)["loss"].item() for part in parts]
    config = dataclasses.replace(config, n_minibatches=2, n_updates=2)
    all_rows = A2CLearner(at_once, ActorCriticAgent(at_once, copy_model=False), config)
    terms = all_rows.update(Trajectories.cat(rows), fraction_done=0.5)
    assert all_rows.policy_version == one.policy_version == 4
    assert len(set(losses)) == 4
    assert terms["loss"].item() == pytest.approx(sum(losses) / 4)
    torch.testing.assert_close(dict(at_once.state_dict()), dict(by_one.state_dict()))


def one_step_batches(n_batches: int, n_envs: int) -> list[Trajectories]:
    """Batches of one step, with restarts, and terminations and truncations before them; rewards tell steps apart.

    Before the sixth all environments begin new episodes, as they do where a training is resumed.
    """
    random = torch.Generator().manual_seed(3)
    seen, done = torch.randn(n_envs, 4, generator=random), torch.ones(n_envs, dtype=torch.bool)
    batches = []
    for k in range(n_batches):
        begins = done | (k == 5)
        reached = torch.randn(n_envs, 4, generator=random)
        done = torch.rand(n_envs, generator=random) < 0.2
        steps = {
            "observation/frame": seen,
            "observation/initial_state": begins,
            "action/action": torch.randint(2, (n_envs,), generator=random),
            "action/log_probability": torch.rand(n_envs, generator=random).log(),
            "_observation/frame": reached,
            "_observation/reward": k + torch.arange(n_envs) / n_envs,
            "_observation/terminated": done & (torch.rand(n_envs, generator=random) < 0.5),
            "_observation/done": done,
        }
        keys = {f"{which}/rng": torch.zeros(n_envs, dtype=torch.int64) for which in ("observation", "_observation")}
        tensors = {key: value.unsqueeze(1) for key, value in (steps | keys).items()}
        info = DictTensor({"policy_version": torch.zeros(n_envs, dtype=torch.int64)})
        batches.append(Trajectories(info, TemporalDictTensor(tensors)))
        seen = torch.where(done.unsqueeze(1), torch.randn(n_envs, 4, generator=random), reached)
    return batches


def plain_windows(model: ActorCritic, batches: list[Trajectories], config: A2CConfig) -> list[float]:
    """The same in plain torch, environment by environment and step by step; returns the losses."""
    assert config.window is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, eps=config.adam_epsilon)
    found, n = [], config.n_envs // config.n_minibatches
    for k in range(config.window - 1, len(batches)):
        turn = len(found) % config.n_minibatches
        policy_loss = value_loss = entropy = torch.zeros(())
        for env in range(turn * n, (turn + 1) * n):
            window = [batch.steps for batch in batches[k - config.window + 1 : k + 1]]
            correction, begins = 0.0, False  # v - V of the step after, and whether that begins an episode
            for steps in reversed(window):
                reward, terminated, done = (
                    float(steps[f"_observation/{x}"][env, 0]) for x in ("reward", "terminated", "done")
                )
                logits, value = model(steps["observation/frame"][env])
                with torch.no_grad():
                    following = float(model(steps["_observation/frame"][env])[1]) * (1.0 - terminated)
                log_probability = logits.log_softmax(1)[0, steps["action/action"][env, 0]]
                ratio = math.exp(log_probability.item() - steps["action/log_probability"][env, 0].item())
                if done or begins:
                    correction = 0.0
                begins = bool(steps["observation/initial_state"][env, 0])
                rho, c = min(config.rho_clip, ratio), config.trace_decay * min(config.c_clip, ratio)
                delta = reward + config.discount * following - value.item()
                advantage = rho * (delta + config.discount * config.trace_decay * correction)
                correction = rho * delta + config.discount * c * correction
                policy_loss = policy_loss - log_probability * advantage
                value_loss = value_loss + (value.squeeze() - value.item() - correction).square() / 2
                entropy = entropy - (logits.softmax(1) * logits.log_softmax(1)).sum()
        terms = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        loss = terms / (n * config.window)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm or math.inf)
        optimizer.step()
        found.append(loss.item())
    return found


def test_windows_of_one_minibatch_after_the_other_are_those_of_plain_torch() -> None:
    config = dataclasses.replace(
        SMALL, n_timesteps=1, n_envs=6, n_minibatches=3, window=4, vtrace=True, rho_clip=1.5, trace_decay=0.9,
        entropy_coefficient=0.1, learning_rate=0.05,
    )  # fmt: skip
    ours, plain = create_model(), create_model()
    plain.load_state_dict(ours.state_dict())
    batches = one_step_batches(11, config.n_envs)
    learner = A2CLearner(ours, ActorCriticAgent(ours, copy_model=False), config)
    terms = [learner.update(batch, fraction_done=0.0) for batch in batches]
    assert terms[:3] == [{}, {}, {}]  # until there are four steps
    expected = plain_windows(plain, batches, config)
    assert [float(one["loss"]) for one in terms[3:]] == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_updates", [1, 3])
def test_a_window_of_as_many_batches_as_minibatches_shows_each_step_once(
    n_updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(
        SMALL, n_timesteps=1, n_envs=6, n_minibatches=3, n_updates=n_updates, window=3, vtrace=True
    )
    model, seen = create_model(), []
    learner = A2CLearner(model, ActorCriticAgent(model, copy_model=False), config)
    prepare = learner.prepare
    monkeypatch.setattr(
        learner, "prepare", lambda batch: seen.append(batch.steps["_observation/reward"]) or prepare(batch)
    )
    for batch in one_step_batches(11, 6):
        learner.update(batch, fraction_done=0.0)
    assert [list(rewards.shape) for rewards in seen] == [[2, 3]] * 9
    numbers = torch.cat([rewards.flatten() for rewards in seen]).tolist()
    assert len(set(numbers)) == len(numbers)


def test_a_window_leaves_out_the_steps_that_restarts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(SMALL, n_timesteps=1, n_envs=2, n_minibatches=1, window=2, vtrace=True)
    model, seen = create_model(), []
    learner = A2CLearner(model, ActorCriticAgent(model, copy_model=False), config)
    prepare = learner.prepare
    monkeypatch.setattr(learner, "prepare", lambda batch: seen.append(batch) or prepare(batch))
    batch = one_step_batches(1, 2)[0]
    spent = Trajectories(batch.info, TemporalDictTensor(dict(batch.steps.items()), torch.tensor([1, 0])))
    for one in (spent, batch):
        learner.update(one, fraction_done=0.0)
    (joined,) = seen
    assert joined.lengths.tolist() == [2, 1]
    reward = batch.steps["_observation/reward"]
    assert (joined.steps["_observation/reward"][:, :1] == reward).all()


def test_a_window_refuses_a_network_whose_statistics_need_whole_batches() -> None:
    model = Normalised(create_model(), (4,), discount=0.99)
    with pytest.raises(ValueError, match="got window=2 and Normalised, whose statistics need whole batches"):
        A2CLearner(model, ActorCriticAgent(model, copy_model=False), dataclasses.replace(SMALL, vtrace=True, window=2))


@pytest.mark.parametrize("bound", [0.01, 1e6])
def test_gradients_are_scaled_down_to_their_bound_and_never_up(bound: float) -> None:
    batch, norms = two_steps(), []
    for limit in (bound, None):
        torch.manual_seed(1)
        model = create_model()
        config = dataclasses.replace(SMALL, max_gradient_norm=limit)
        A2CLearner(model, ActorCriticAgent(model, copy_model=False), config).update(batch, fraction_done=0.0)
        norms.append(torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None]).norm().item())
    scaled, whole = norms
    assert whole > 0.01
    assert scaled == pytest.approx(min(bound, whole), rel=1e-3)


def test_overlap_lags_by_one_version_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    update = A2CLearner.update

    def watched(self: A2CLearner, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        seen.append(trajectories.info["policy_version"].unique().tolist())
        return update(self, trajectories, fraction_done)

    monkeypatch.setattr(A2CLearner, "update", watched)
    in_turn = train_small(n_env_steps=300)
    assert in_turn.losses["policy_lag"] == [0.0] * 5
    assert seen == [[1], [2], [3], [4], [5]]  # the batcher counts its weights from 1, the untrained ones
    seen.clear()
    overlapped = train_small(n_env_steps=300, overlap=True)
    assert overlapped.losses["policy_lag"] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert seen == [[1], [1], [2], [3], [4]]


def test_without_lag_vtrace_is_gae() -> None:
    plain, corrected = train_small(n_env_steps=300), train_small(n_env_steps=300, vtrace=True)
    for name, numbers in plain.losses.items():
        assert corrected.losses[name] == pytest.approx(numbers, rel=1e-4, abs=1e-5), name


def test_environments_that_do_not_restart_are_refused() -> None:
    class NeverStepped(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise OSError("the first evaluation has begun")

    def create_episodic(n_envs: int, seed: int) -> GymEnv:
        return GymEnv([NeverStepped(gymnasium.make("CartPole-v1")) for _ in range(n_envs)], seed=seed)

    with pytest.raises(ValueError, match=r"environments that stop at the end .*, but A2CConfig .*GymEnvInf"):
        train(SMALL, create_model, ActorCriticAgent, create_episodic)


def create_without_n_envs(seed: int) -> Any:
    return create_env(1, seed)


def create_raw_gymnasium(n_envs: int, seed: int) -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    ("factory", "error", "said"),
    [
        (lambda: create_env(2, 0), TypeError, "create_env is a GymEnvInf, expected a function or a class"),
        (lambda: gymnasium.make("CartPole-v1"), TypeError, "create_env is a TimeLimit, expected a function or a class"),
        (lambda: None, TypeError, "create_env is a NoneType, expected a function or a class"),
        (
            lambda: create_without_n_envs,
            TypeError,
            r"run_training: create_env is called as create_env\(n_envs=…, seed=…\), but got .* parameters are \(seed",
        ),
        (lambda: create_raw_gymnasium, WorkerError, "create_env returned a TimeLimit, expected a VecEnv"),
    ],
)
def test_what_is_no_factory_of_environments_is_refused(factory: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?i){said}"):
        train(SMALL, create_model, ActorCriticAgent, factory())


def test_the_number_of_environments_belongs_into_the_settings() -> None:
    with pytest.raises(ValueError, match=r"run_training: env_args has n_envs=3, but .* Leave it out, and set config\."):
        train(SMALL, create_model, ActorCriticAgent, create_env, env_args={"n_envs": 3})


def test_an_agent_where_its_factory_belongs_is_refused() -> None:
    agent = ActorCriticAgent(create_model())
    with pytest.raises(TypeError, match="create_agent is an ActorCriticAgent, expected a function or a class"):
        train(SMALL, create_model, agent, create_env)  # type: ignore[arg-type]


class Clock(gymnasium.Env[Any, Any]):
    """Rewards 1 for every step and shows the time modulo 20, one-hot; ends after 20 steps, in one way or the other."""

    observation_space = spaces.Box(0.0, 1.0, (20,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminates: bool) -> None:
        self.terminates = terminates
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        ended = self.time == 20
        return self.observe(), 1.0, ended and self.terminates, ended and not self.terminates, {}

    def observe(self) -> np.ndarray[Any, Any]:
        return np.eye(20, dtype=np.float32)[self.time % 20]


def create_clocks(n_envs: int, seed: int, terminates: bool) -> GymEnvInf:
    return GymEnvInf([Clock(terminates) for _ in range(n_envs)], seed=seed)


@pytest.mark.parametrize("terminates", [False, True])
def test_the_critic_finds_the_value_of_the_clock(terminates: bool) -> None:
    config = A2CConfig(
        n_env_steps=33 * 150, n_timesteps=33, n_envs=1, trace_decay=0.95, learning_rate=2.0,
        final_learning_rate_fraction=0.0, reward_scale=1.0, evaluation_episodes=1, evaluation_processes=0,
        evaluation_interval=10**6, log_interval=50,
    )  # fmt: skip

    def create_table() -> ActorCritic:
        return ActorCritic(20, 2, hidden=())  # a linear critic of one-hot frames is a table

    result = train(config, create_table, ActorCriticAgent, create_clocks, env_args={"terminates": terminates})
    with torch.no_grad():
        _, values = result.model(torch.eye(20))
    # Truncated, the clock goes on for ever: 1 / (1 - 0.99). Terminated, 20 - t rewards are left at time t.
    left = torch.arange(20, 0, -1)
    expected = (1.0 - 0.99**left) / 0.01 if terminates else torch.full((20,), 100.0)
    assert (values - expected).abs().max().item() < 1.0


def test_the_run_folder_gets_the_losses_the_lag_and_the_returns_of_episodes(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    with RunFolder("a2c", SMALL, n_env_steps=SMALL.n_env_steps, root=tmp_path, progress=False) as run:
        result = train(SMALL, *KINDS["feed-forward"], run=run)
    rows = list(csv.DictReader((run.path / "metrics.csv").read_text().splitlines()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert losses == pytest.approx(result.losses["loss"])
    assert {row["train/policy_lag"] for row in rows if row["train/loss"]} == {"0.0"}
    returns = [float(row["train/return"]) for row in rows if row["train/return"]]
    assert len(returns) == len(losses) // SMALL.log_interval + (len(losses) % SMALL.log_interval > 0)
    assert all(8.0 <= number <= 25.0 for number in returns)  # CartPole lasts 8 steps at least, these 25 at most
    checkpoint = torch.load(run.path / "checkpoint.pt", weights_only=True)
    assert checkpoint["policy_version"] == len(losses)
    decisions = dict.fromkeys(("compile_agent", "compile_update", "compile_simulator"), False)  # "auto" of the settings
    assert checkpoint["config"] == dataclasses.asdict(SMALL) | decisions


def test_a_result_is_summarised_in_five_lines() -> None:
    result = train_small(n_env_steps=200)
    what, before, after, learning, losses = repr(result).splitlines()
    assert re.fullmatch(r"TrainingResult: ActorCritic with [\d,]+ parameters on cpu, 1 thread", what)
    assert before == f"  before: {result.before}"
    assert after == f"  after: {result.after}"
    assert f"{result.env_steps:,} steps" in learning
    number = r"-?[\d.e-]+"
    assert re.fullmatch(rf"  final loss {number} \(policy {number}, value {number}, entropy {number}\)", losses)
    assert losses.startswith(f"  final loss {result.losses['loss'][-1]:.3g} ")
    stopped = dataclasses.replace(result, losses={}, stopped="enough")
    assert repr(stopped).splitlines()[3:] == [f"{learning}; stopped: enough", "  final loss: none"]


def test_the_summary_of_a_long_training_fits_80_columns() -> None:
    losses = {name: [-5.4321e-05] for name in ("loss", "policy_loss", "value_loss", "entropy_loss")}
    long = dataclasses.replace(train_small(n_env_steps=200), env_steps=50_000_000, seconds=3600.0, losses=losses)
    assert max(map(len, repr(long).splitlines())) <= 80


def test_a_training_chooses_its_threads_reports_them_and_leaves_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    update = A2CLearner.update

    def noting(self: A2CLearner, *arguments: Any) -> dict[str, torch.Tensor]:
        seen.append(torch.get_num_threads())
        return update(self, *arguments)

    monkeypatch.setattr(A2CLearner, "update", noting)
    torch.set_num_threads(2)
    try:
        assert train_small(n_env_steps=1).threads == 1
        assert torch.get_num_threads() == 2
        chosen = train_small(n_env_steps=1, threads=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert (chosen.threads, set(seen)) == (3, {1, 3})
    assert repr(chosen).splitlines()[0].endswith("parameters on cpu, 3 threads")


def test_only_a_large_network_gets_all_threads() -> None:
    torch.set_num_threads(2)
    try:
        found = [threads_for(torch.nn.Linear(1000, n)) for n in (499, 500)]
        assert (found, threads_for(torch.nn.Linear(1, 1), 2)) == ([1, 2], 2)
    finally:
        torch.set_num_threads(1)
