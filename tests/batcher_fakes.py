"""Agents and environments that only these tests need; worker processes import them from here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import psutil
import torch
from fake_envs import LENGTHS, CountingEnv, SlowEnv
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from rlstruct import BatcherStateError, DictTensor, RL_Agent, TemporalDictTensor, Trajectories, VecEnv, WorkerError
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.workers.system import is_portable
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv

# Seconds; takes a tenth to a third of one. A worker that is waited for in vain takes a minute or for ever.
PROMPT = 20.0
# Seconds in which a worker starts, and a test can wait; a portable worker imports torch first.
SHORT = 30.0 if is_portable() else 5.0


def shared_memory_names() -> set[str]:
    """Names in /dev/shm, semaphores excepted: the batchers use none, other programs of this machine may."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.")}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Names that are new in /dev/shm and stay there; those of tests that run at the same time go."""
    deadline = time.monotonic() + 5.0
    while (left := shared_memory_names() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def worker_processes() -> list[psutil.Process]:
    """Processes that this one has started, but for those that stay: the workers' server, Python's and torch's own."""
    stay = ("resource_tracker", "fork_server")
    me = psutil.Process()
    children = [child for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    words = {child: " ".join(child.cmdline()) for child in children}
    staying = [child for child in children if child.parent() == me and any(map(words[child].count, stay))]
    return [child for child in children if child not in staying and "compile_worker" not in words[child]]


def forked(batcher: RL_Batcher, n: int = 1) -> tuple[int, ...]:
    """Return the process ids of n workers, as soon as their server has forked them."""
    end = time.monotonic() + 60.0
    while len(pids := batcher.stats().pids) < n:
        assert time.monotonic() < end
        time.sleep(0.01)
    return pids


Step = tuple[tuple[int, int, int], tuple[int, int, int], bool]


def steps_of(number: int, n: int, lengths: Sequence[int] = LENGTHS) -> list[Step]:
    """The first n steps of environment ``number`` of an auto-resetting CountingEnv: frame, next frame, done."""
    steps: list[Step] = []
    episode = 0
    while len(steps) < n:
        length = lengths[(number + episode) % len(lengths)]
        for k in range(length):
            steps.append(((number, episode, k), (number, episode, k + 1), k + 1 == length))
        episode += 1
    return steps[:n]


class VersionAgent(RL_Agent):
    """Holds weights that must all be equal; its action shows their value."""

    def __init__(self) -> None:
        self.weights = torch.zeros(1)
        self.updates = 0

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None
    ) -> tuple[DictTensor, DictTensor]:
        done = observation["done"]
        shown = {
            "lowest": self.weights.min(),
            "highest": self.weights.max(),
            "size": torch.tensor(self.weights.numel()),
        }
        action = {key: value.expand(done.shape).clone() for key, value in shown.items()}
        return DictTensor({"action": torch.zeros_like(observation["last_action"]), **action}), DictTensor()

    def update(self, info: Mapping[str, Tensor]) -> None:
        if float(info["w"].min()) != float(info["w"].max()):
            raise ValueError("torn weights")
        self.weights = info["w"].clone()


class InfoAgent(RL_Agent):
    """Shows its agent_info in its output."""

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None
    ) -> tuple[DictTensor, DictTensor]:
        action = torch.zeros_like(observation["last_action"])
        given = {f"seen_{key}": value for key, value in agent_info.items()}
        return DictTensor({"action": action, **given}), DictTensor()


class GlobalRandomAgent(RL_Agent):
    """Draws from torch's global generator, as agents of rlstructures do."""

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None
    ) -> tuple[DictTensor, DictTensor]:
        return DictTensor({"action": torch.randint_like(observation["last_action"], 2)}), DictTensor()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


class SumOfHistoryAgent(RL_Agent):
    """Shows sums over its history that a test can recompute from the batch."""

    def require_history(self) -> bool:
        return True

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        assert history is not None
        action = torch.zeros_like(observation["last_action"])
        shown = {
            "steps": history.lengths,
            "before": history["observation/frame"].sum((1, 2)),
            "after": history["_observation/frame"].sum((1, 2)),
            "acted": history["action/action"].sum(1),
        }
        return DictTensor({"action": action, **shown}), DictTensor()


def next_batch(batcher: RL_Batcher, agent_info: DictTensor | None = None) -> Trajectories:
    batcher.execute(agent_info)
    return batcher.get()[0]


def first_batch(batcher: RL_Batcher) -> Trajectories:
    batcher.reset()
    return next_batch(batcher)


def assert_equal(mine: Trajectories, theirs: Trajectories) -> None:
    for ours, expected in ((mine.info, theirs.info), (mine.steps, theirs.steps)):
        assert set(ours.keys()) == set(expected.keys())
        for key in expected.keys():
            assert torch.equal(ours[key], expected[key]), key


def refused(match: str, create_agent: Any, create_env: Any, **settings: Any) -> WorkerError:
    """Return the error with which the first batch of 8 steps must fail."""
    import pytest  # not in every worker, which imports this module

    with RL_Batcher(8, create_agent, create_env, **{"seed": 0, **settings}) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(WorkerError, match=match) as error:
            batcher.get()
    return error.value


def close_leaves_nothing(batcher: RL_Batcher) -> None:
    import pytest

    start, pids = time.monotonic(), batcher.stats().pids
    batcher.close()
    assert time.monotonic() - start < PROMPT
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(BatcherStateError, match="closed"):
        batcher.reset()


def create_version_agent() -> VersionAgent:
    return VersionAgent()


def create_cartpole(n_envs: int, seed: int, auto_reset: bool = True, longest: int | None = None) -> VecEnv:
    kind = GymEnvInf if auto_reset else GymEnv
    return kind([gymnasium.make("CartPole-v1", max_episode_steps=longest) for _ in range(n_envs)], seed)


def create_policy(recurrent: bool) -> RL_Agent:
    torch.manual_seed(0)
    if recurrent:
        return RecurrentAgent(RecurrentActorCritic(4, 2))
    return ActorCriticAgent(ActorCritic(4, 2))


class NextStepCounting(VectorEnv[Any, Any, Any]):
    """A vector environment that spends a step of the row on its restart; row b's episodes take b + 1 steps.

    A frame is (row, episode, count).
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as gymnasium declares it

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 1e6, (3,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.frames = np.zeros((num_envs, 3), np.float32)
        self.ended = np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.frames = np.zeros((self.num_envs, 3), np.float32)
        self.frames[:, 0] = np.arange(self.num_envs)
        self.ended[:] = False
        return self.frames.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        restart = self.ended.copy()
        self.frames[~restart, 2] += 1
        self.frames[restart, 1] += 1
        self.frames[restart, 2] = 0
        self.ended = ~restart & (self.frames[:, 2] == self.frames[:, 0] + 1)
        reward = np.where(restart, 0.0, self.frames[:, 2])
        return self.frames.copy(), reward, self.ended.copy(), np.zeros(self.num_envs, np.bool_), {}


def create_next_step(n_envs: int, seed: int = 0) -> GymVectorEnv:
    return GymVectorEnv(NextStepCounting(n_envs), seed)


def create_uneven(n_envs: int, seed: int, seconds: float, **settings: Any) -> VecEnv:
    """Counting environments; those of the first worker (seed 0) take their time in every step."""
    return SlowEnv(CountingEnv(n_envs, seed, **settings), seconds if seed == 0 else 0.0)
