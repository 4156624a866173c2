"""Shared code of the contenders of benchmarks/cpu_collect.py: environments, policy, and talking with the driver.

A contender is a long-lived process. It answers ``{"ready": versions}``, and then answers each line ``{"batches": k}``
with the seconds that k batches took and the environment steps that they held. Nothing else reaches its standard
output: what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Task:
    """Task of collection: B environments over P processes, T steps of each per batch."""

    n_envs: int
    n_processes: int
    n_timesteps: int
    environment: str = "CartPole-v1"

    @property
    def share(self) -> int:
        """Environments of each process."""
        return self.n_envs // max(1, self.n_processes)


Batches = Generator[int, None, None]
"""Yields after each batch how many environment steps it holds."""


class Contender(Protocol):
    """One of `Batches`, or what is used as one: its first batch also builds it, and ``close`` ends what it started.

    It may also have ``begin(batches)``, called before each turn of so many batches, and ``report()``, called after it.
    """

    def __next__(self) -> int:
        """Collect one batch; return how many environment steps it holds, steps that only reset not counted."""

    def close(self) -> None:
        """End what was started."""


class SlowEnv(gymnasium.Env[Any, Any]):
    """Sleeps 1 ms in a step, 10 ms in one of ten, as a simulator does; an episode has 200 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._steps = 0
        self._frame = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._frame, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        time.sleep(0.010 if self.np_random.random() < 0.1 else 0.001)
        self._steps += 1
        return self._frame, 1.0, self._steps == 200, False, {}


def make_env(environment: str) -> Any:  # noqa: ANN401 - a gymnasium.Env, of whatever types
    """Make one gymnasium environment; ``slow`` is a `SlowEnv`."""
    return SlowEnv() if environment == "slow" else gymnasium.make(environment)


def make_policy() -> nn.Module:
    """Make the 4-64-64-2 network, the same weights for everybody."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def act(policy: nn.Module, observation: Any) -> torch.Tensor:  # noqa: ANN401
    """Sample actions [B] int64 for observations [B, 4] float32, a numpy array; the fastest way that torch has."""
    return torch.multinomial(policy(torch.from_numpy(observation)).softmax(-1), 1).squeeze(-1)


def serve(create: Callable[[Task], Contender], *packages: str) -> None:
    """Run a contender until the driver closes the pipe."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    contender = create(Task(**json.loads(sys.argv[1])))
    print(json.dumps({"ready": {name: version(name) for name in (*packages, "gymnasium", "torch")}}), file=channel)
    for line in sys.stdin:
        batches = json.loads(line)["batches"]
        start, steps = time.perf_counter(), 0
        if begin := getattr(contender, "begin", None):
            begin(batches)
        with torch.no_grad():
            for _ in range(batches):
                steps += next(contender)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - start, "steps": steps}
        if report := getattr(contender, "report", None):
            answer["report"] = report()
        print(json.dumps(answer), file=channel)
    contender.close()
