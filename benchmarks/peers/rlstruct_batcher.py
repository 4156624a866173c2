"""Ours: RL_Batcher with worker processes, an agent that samples with the batcher's random keys and keeps its logits.

With the argument ``queued`` each batch is ordered while the one before is collected, with ``compiled`` the agent is
compiled, with ``cluster`` Ray starts the workers.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from serve import Task, make_env, make_policy, serve
from torch import nn

from rlstruct import DictTensor, RL_Agent, TemporalDictTensor, VecEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.functional.random import categorical


class Agent(RL_Agent):
    pure = True

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:  # fmt: skip
        logits = self.policy(observation["frame"])
        return DictTensor({"action": categorical(logits, observation["rng"]), "logits": logits}), state

    def update(self, info: Any) -> None:  # noqa: ANN401
        self.policy.load_state_dict(info)


def create_env(n_envs: int, environment: str, seed: int) -> VecEnv:
    return GymEnvInf([make_env(environment) for _ in range(n_envs)], seed=seed)


class Ours:
    def __init__(self, task: Task) -> None:
        self.batcher = RL_Batcher(
            task.n_timesteps, Agent, create_env, agent_args={"policy": make_policy()},
            env_args={"n_envs": task.share, "environment": task.environment}, n_processes=task.n_processes, seed=0,
            compile_agent="compiled" in sys.argv,
            cluster={"address": "local", "num_cpus": 0.5} if "cluster" in sys.argv else None,
        )  # fmt: skip
        self.batcher.reset()
        self.depth = 2 if "queued" in sys.argv else 1
        self.to_order = self.n_ordered = 0
        self.before: dict[str, float] = {}

    def begin(self, batches: int) -> None:
        """Take note of how many batches this turn has: none is collected in the turns of others."""
        self.to_order = batches

    def __next__(self) -> int:
        while self.to_order and self.n_ordered < self.depth:
            self.batcher.execute()
            self.to_order -= 1
            self.n_ordered += 1
        self.n_ordered -= 1
        trajectories, _ = self.batcher.get()
        return int(trajectories.lengths.sum())

    def report(self) -> dict[str, Any]:
        """The seconds of each phase since the last report, a mean over the workers, and the batcher's own words."""
        stats = self.batcher.stats()
        now = {phase: statistics.mean(worker[phase] for worker in stats.workers) for phase in stats.workers[0]}
        now["hand_over"] = stats.hand_over  # the alias of assembly: compare_commits.py also runs older ones
        phases = {phase: seconds - self.before.get(phase, 0.0) for phase, seconds in now.items()}
        self.before = now
        return {"phases": phases, "text": str(stats)}

    def close(self) -> None:
        self.batcher.close()


if __name__ == "__main__":
    serve(Ours)
