"""Bundled agents number actions from 0; environments number them as their space says, in both directions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rlstruct
from rlstruct import DictTensor, RL_Agent, replay_agent
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    GaussianActorCritic,
    GaussianAgent,
    QAgent,
    QNetwork,
    RecurrentActorCritic,
    RecurrentAgent,
    StackingAgent,
)
from rlstruct.algos import dqn, ppo
from rlstruct.algos.training.callbacks import Callback, TrainingContext
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.cli.agents import count_actions
from rlstruct.core import Trajectories
from rlstruct.envs import GymEnvInf
from rlstruct.errors import WorkerError
from rlstruct.indexed_actions import IndexedEnv, env_for, indices_of
from rlstruct.rl_agent import RL_Agent_CheckDevice
from rlstruct.sims import CartPole
from rlstruct.spaces import ActionIndices
from rlstruct.testing import check_agent

SPACES = [
    spaces.Discrete(3, start=5),
    spaces.Discrete(3, dtype=np.int32),
    spaces.Discrete(3, start=-4, dtype=np.int8),
    spaces.Discrete(3, start=2**64 - 3, dtype=np.uint64),
    spaces.MultiDiscrete([2, 3], start=[1, -3]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype=np.uint16),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 2)),
]


class Strict(gymnasium.Env[Any, Any]):
    """Shows its last action, as a number per entry, and asserts that it is in the space."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.action_space = space
        self.observation_space = spaces.Box(-np.inf, np.inf, (int(np.prod(space.shape or ())),), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(self.observation_space.shape), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.t += 1
        return np.asarray(action, np.float64).reshape(-1), 0.0, False, self.t == 5, {}


def create_env(n_envs: int, seed: int, space: spaces.Space[Any]) -> GymEnvInf:
    return GymEnvInf([Strict(space) for _ in range(n_envs)], seed)


def n_inputs(space: spaces.Space[Any]) -> int:
    return int(np.prod(space.shape or ()))


def collect(create_agent: Any, space: spaces.Space[Any], n_processes: int = 0) -> tuple[Trajectories, Any]:
    made = {"env_args": {"n_envs": 3, "space": space}, "n_processes": n_processes, "seed": 0}
    with RL_Batcher(12, create_agent, create_env, **made) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
        assert trajectories is not None
        return trajectories, batcher.actions


def shown(trajectories: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the actions [N, K], and what the environment showed of them and called its last action."""
    steps = trajectories.steps
    action = steps["action/action"].flatten(0, 1)
    last = steps["_observation/last_action"].flatten(0, 1)
    return (
        action.reshape(len(action), -1),
        steps["_observation/frame"].flatten(0, 1),
        last.reshape(len(action), -1),
    )


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("recurrent", [False, True])
def test_the_environment_gets_elements_and_the_batch_holds_indices(space: spaces.Space[Any], recurrent: bool) -> None:
    sizes = count_actions(space)
    network, kind = (RecurrentActorCritic, RecurrentAgent) if recurrent else (ActorCritic, ActorCriticAgent)
    torch.manual_seed(0)
    agent = kind(network(n_inputs(space), sizes))
    trajectories, actions = collect(lambda: agent, space)
    index, element, last = shown(trajectories)
    assert index.dtype == torch.int64
    start = np.broadcast_to(np.asarray(getattr(space, "start", 0)), space.shape or ()).reshape(-1).astype(np.float64)
    np.testing.assert_array_equal(element.numpy(), index.numpy() + start)
    assert torch.equal(last, index)
    assert index.min() == 0
    assert (index.amax(0) + 1).tolist() == ([sizes] if isinstance(sizes, int) else list(sizes))
    first = trajectories.steps["observation/initial_state"]
    assert not trajectories.steps["observation/last_action"][first].any()
    assert actions == ActionIndices.of(space)
    replayed = replay_agent(agent, trajectories)
    for key in ("action", "log_probability"):
        torch.testing.assert_close(replayed[key], trajectories.steps[f"action/{key}"])


def test_workers_map_them_too() -> None:
    space = spaces.Discrete(3, start=5)
    index, element, last = shown(collect(partial(QAgent, QNetwork(1, 3)), space, 1)[0])
    assert torch.equal(element, index.double() + 5)
    assert torch.equal(last, index)


def test_spaces_that_begin_with_0_are_not_wrapped() -> None:
    env = CartPole(2)
    assert env_for(ActorCriticAgent(ActorCritic(4, 2)), env) is env
    assert indices_of(env) is None
    assert ActionIndices.of(spaces.MultiDiscrete([2, 3])) is not None
    assert ActionIndices.of(spaces.MultiDiscrete([2, 3])).equal  # type: ignore[union-attr]


class FiveToSeven(ActorCriticAgent):
    """An agent of one's own, which adds the start itself."""

    def __call__(self, *arguments: Any, **named: Any) -> tuple[DictTensor, DictTensor]:
        answer, state = super().__call__(*arguments, **named)
        return answer + DictTensor({"index": answer["action"]}), state


class Constant(RL_Agent):
    """An agent of one's own that always returns the same elements."""

    def __init__(self, element: Any) -> None:
        self.element = torch.as_tensor(element)

    def __call__(self, state: DictTensor, observation: DictTensor, *others: Any) -> tuple[DictTensor, DictTensor]:
        return DictTensor({"action": self.element.repeat(len(observation["frame"]), 1).squeeze(-1)}), state


def test_actions_of_an_agent_of_ones_own_pass_through() -> None:
    space = spaces.Discrete(3, start=5)
    trajectories, actions = collect(partial(Constant, [6]), space)
    assert (trajectories.steps["action/action"] == 6).all()
    assert (trajectories.steps["_observation/frame"] == 6).all()
    assert actions is None
    assert FiveToSeven(ActorCritic(1, 3)).action_form == "element"  # it overrides __call__, so it says what it returns
    with pytest.raises(rlstruct.WorkerError, match=r"Its actions begin with 5: .*or sets action_form = 'index'"):
        collect(partial(FiveToSeven, ActorCritic(1, 3)), space)
    FiveToSeven.action_form = "index"
    try:
        index, element, _ = shown(collect(partial(FiveToSeven, ActorCritic(1, 3)), space)[0])
    finally:
        FiveToSeven.action_form = "element"
    assert torch.equal(element, index.double() + 5)


def test_wrappers_say_what_their_agent_returns() -> None:
    agent = ActorCriticAgent(ActorCritic(2, 2))
    assert StackingAgent(agent, (2, 1), device="cpu").action_form == "index"
    assert RL_Agent_CheckDevice(agent, "cpu").action_form == "index"
    assert RL_Agent_CheckDevice(GaussianAgent(GaussianActorCritic(2, 2)), "cpu").action_form == "vector"


@pytest.mark.parametrize("space", SPACES[:1] + SPACES[-1:], ids=str)
def test_the_kit_maps_them(space: spaces.Space[Any]) -> None:
    agent = ActorCriticAgent(ActorCritic(n_inputs(space), count_actions(space) or 0))
    check_agent(agent, create_env(2, 0, space), executors=False)


@pytest.mark.parametrize(
    ("create_agent", "space", "why"),
    [
        (partial(ActorCriticAgent, ActorCritic(2, 3)), spaces.Box(0, 5, (2,), np.int64), "needs a Discrete"),
        (partial(ActorCriticAgent, ActorCritic(2, 3)), spaces.Box(0, 5, (2,)), "GaussianAgent for PPO"),
        (partial(GaussianAgent, GaussianActorCritic(1, 3)), spaces.Discrete(3), "needs a Box of floats"),
        (partial(GaussianAgent, GaussianActorCritic(2, 2)), spaces.Box(0, 5, (2,), np.int64), "needs a Box of floats"),
        (partial(QAgent, QNetwork(2, 3)), spaces.MultiBinary(2), r"expected int64 \[3, 2\].*makes 2 choices"),
    ],
)
def test_what_cannot_be_mapped_is_refused_before_the_first_step(create_agent: Any, space: Any, why: str) -> None:
    with pytest.raises(rlstruct.WorkerError, match=why):
        collect(create_agent, space)


def test_a_simulator_stays_capturable() -> None:
    env = CartPole(2)
    env.action_space = spaces.Discrete(2, start=5)
    wrapped = env_for(ActorCriticAgent(ActorCritic(4, 2)), env)
    assert isinstance(wrapped, IndexedEnv)
    assert isinstance(wrapped, rlstruct.vec_env.Capturable)
    wrapped.reset()
    assert wrapped.state_tensors().keys() == env.state_tensors().keys()
    wrapped.set_state_tensors(wrapped.state_tensors())


class Kept(Callback):
    """The policy of the last evaluation."""

    def on_end(self, context: TrainingContext) -> None:
        self.policy = context.policy()


@pytest.mark.parametrize(
    ("algorithm", "network", "agent", "space"),
    [
        (dqn, QNetwork, QAgent, spaces.Discrete(3, start=5)),
        (ppo, ActorCritic, ActorCriticAgent, spaces.MultiBinary((2, 2))),
    ],
)
def test_a_trained_policy_returns_elements(
    algorithm: Any, network: Any, agent: Any, space: Any, tmp_path: Path
) -> None:
    sizes, least = count_actions(space), {"n_env_steps": 64, "n_envs": 4, "n_timesteps": 8, "n_processes": 0}
    settings = least | {"evaluation_processes": 0, "evaluation_episodes": 2}
    settings |= {"learning_starts": 32, "batch_size": 8} if algorithm is dqn else {}
    config = (dqn.DQNConfig if algorithm is dqn else ppo.PPOConfig)(**settings)
    run, kept = RunFolder(tmp_path, config, n_env_steps=64), Kept()
    makers = partial(network, n_inputs(space), sizes), agent, create_env
    with run:
        algorithm.train(config, *makers, env_args={"space": space}, run=run, callbacks=[kept])
    loaded = rlstruct.load(run.path)
    seen = np.random.default_rng(0).normal(size=(5, n_inputs(space)))
    for policy in (loaded, loaded.copy("cpu"), kept.policy):
        for stochastic in (False, algorithm is ppo):  # one of action values has no epsilon, and takes the best
            actions = policy.act(seen, stochastic=stochastic)
            assert all(space.contains(action) for action in actions)
        assert space.contains(policy.act(seen[0]))
    rlstruct.export(loaded, tmp_path / "policy.pt2")
    written = torch.export.load(tmp_path / "policy.pt2").module()({"frame": torch.from_numpy(seen)})
    np.testing.assert_array_equal(written["action"].numpy(), loaded.act(seen, stochastic=False))


def test_an_agent_of_one_choice_is_refused_where_there_are_several() -> None:
    space = spaces.MultiDiscrete([2, 3])
    words = (
        r"action is torch.int64 \[3\], expected int64 \[3, 2\].* MultiDiscrete\(\[2 3\]\)\. Take an agent that makes 2"
    )
    with pytest.raises(WorkerError, match=words):
        collect(lambda: QAgent(QNetwork(2, 6)), space)
