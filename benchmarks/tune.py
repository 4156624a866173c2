"""Quality of `rlstruct.sharing.tune`: its answer against the best of an exhaustive grid, on five tasks.

Run on an idle machine: ``python benchmarks/tune.py``, about six minutes on two cores; ``--task`` takes some of them.
Each task has its own process, as a user's search has. First tune searches; then every candidate of the same grid
is probed, each alone and briefly; then the three fastest of these collect in turns, as the fastest of many brief probes
is one that was lucky; and then tune's answer and the winner collect in turns. Wanted: 95 % of the best, with at most
40 % of the probes, in at most 60 s, and memory projected within 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import gymnasium
import numpy as np
import tables
import torch
from common import reporting
from gymnasium import spaces
from peers.serve import SlowEnv

from rlstruct import RL_Agent, VecEnv, sims
from rlstruct.agents import ActorCritic, ActorCriticAgent, RandomAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.sharing import Tuning, tune
from rlstruct.sharing.tuning import measuring
from rlstruct.sharing.tuning.measuring import Prober, Session
from rlstruct.sharing.tuning.search import Candidate

SECONDS = 0.2  # of a turn
ROUNDS = 5, 15  # to choose the best of the grid, and to compare the answer with it
BRIEF_SECONDS = 0.3  # after three rounds at least, of a probe of the grid


class Frames(SlowEnv):
    """Frames as Atari games have them, at once."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    shown = np.zeros((84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        self._steps += 1
        return self.shown, 1.0, self._steps == 200, False, {}


def create_env(kind: Callable[[], gymnasium.Env[Any, Any]], n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([kind() for _ in range(n_envs)], seed)


def acting(*hidden: int) -> dict[str, Any]:
    """Arguments of an ActorCriticAgent."""
    return {"model": ActorCritic(4, 2, hidden=hidden), "device": "cpu", "stochastic": True}


CART_POLES = partial(create_env, partial(gymnasium.make, "CartPole-v1"))
SIMULATORS = partial(sims.make, "CartPole-v1")
SLOW, FRAMES = partial(create_env, SlowEnv), partial(create_env, Frames)


@dataclass(frozen=True)
class Task:
    """A grid, and what collects."""

    create_agent: Callable[..., RL_Agent]
    create_env: Callable[..., VecEnv]
    agent_args: dict[str, Any] = field(default_factory=dict)
    n_processes: Sequence[int] = (0, 2)
    n_envs: Sequence[int] = (4, 16, 64, 256)
    n_timesteps: Sequence[int] = (8, 32, 128)

    def grid(self) -> list[Candidate]:
        return [Candidate(*values) for values in product(self.n_processes, self.n_envs, self.n_timesteps)]

    def create(self, candidate: Candidate) -> RL_Batcher:
        return RL_Batcher(
            candidate.n_timesteps, self.create_agent, self.create_env, agent_args=self.agent_args,
            env_args={"n_envs": candidate.n_envs}, n_processes=candidate.n_processes, seed=0,
        )  # fmt: skip

    def tune(self) -> Tuning:
        values = {"n_processes": self.n_processes, "n_envs": self.n_envs, "n_timesteps": self.n_timesteps}
        return tune(self.create_agent, self.create_env, agent_args=self.agent_args, **values)


TASKS = {
    "CartPole, small network": Task(ActorCriticAgent, CART_POLES, acting(64)),
    "CartPole, large network": Task(ActorCriticAgent, CART_POLES, acting(512, 512)),
    "slow environments": Task(ActorCriticAgent, SLOW, acting(64), (0, 2, 4), (2, 4, 8), (8, 16, 32)),
    "frames": Task(RandomAgent, FRAMES, {"action_space": spaces.Discrete(2)}, n_envs=(2, 8, 32, 128)),
    "simulator": Task(ActorCriticAgent, SIMULATORS, acting(64), n_envs=(16, 64, 256, 1024)),
}


def exhaustive(task: Task) -> list[Candidate]:
    """Probe the whole grid; the fastest first."""
    measuring.ROUND_SECONDS = BRIEF_SECONDS
    with contextlib.closing(Prober(task.create, None, torch.device("cpu"))) as prober:
        rates = {candidate: prober(candidate, None, 0.0).rate for candidate in task.grid()}
    return sorted(rates, key=lambda candidate: -rates[candidate])


def side_by_side(task: Task, candidates: Sequence[Candidate], rounds: int) -> dict[Candidate, list[float]]:
    """Let candidates collect in turns; steps per second of each in each round."""
    rates: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    with contextlib.ExitStack() as stack:
        sessions = {
            candidate: stack.enter_context(contextlib.closing(Session(task.create(candidate), None)))
            for candidate in rates
        }
        for _ in range(rounds):
            for candidate, session in sessions.items():
                rates[candidate].append(session.rate(SECONDS))
    return rates


def row(name: str) -> dict[str, Any]:
    """Tune a task, and judge the answer."""
    torch.set_num_threads(1)
    task = TASKS[name]
    answer = task.tune()
    print(answer, flush=True)
    start = time.perf_counter()
    scores = exhaustive(task)
    found = side_by_side(task, scores[:3], ROUNDS[0])
    best = max(found, key=lambda candidate: statistics.median(found[candidate]))
    rates = found if best == answer.best else side_by_side(task, [answer.best, best], ROUNDS[1])
    print(f"the grid took {time.perf_counter() - start:.0f} s", flush=True)
    errors = [abs(one.projected / one.measured.memory - 1.0) for one in answer.probes if one.measured]
    ratios = [ours / theirs for ours, theirs in zip(rates[answer.best], rates[best], strict=True)]
    return {
        **{"name": name, "answer": str(answer.best), "best": str(best), "share": statistics.median(ratios)},
        **{"probes": len(errors), "grid": len(scores), "seconds": answer.seconds, "ratios": ratios},
        "projection": max(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="*", choices=list(TASKS), default=list(TASKS))
    options = parser.parse_args()
    rows = []
    for name in options.task:
        print(f"\n## {name}\n", flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            one = process.submit(row, name).result()
        rows.append(one)
        print(tables.text("tune", [one]), flush=True)
        if options.task == list(TASKS):  # after every task: one that is cut short leaves what it has
            reporting.write("tune", rows)


if __name__ == "__main__":
    main()
