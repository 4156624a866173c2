"""Shared code of the contenders of benchmarks/cpu_collect.py: the policy, and the conversation with the driver.

A contender is a long-lived process. It builds itself, answers ``{"ready": versions}``, and then answers each line
``{"batches": k}`` with the seconds that k batches took and the environment steps that they held. Nothing else reaches
its standard output: what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

ENVIRONMENT = "CartPole-v1"


@dataclass(frozen=True)
class Task:
    """Task of collection: B environments over P processes, T steps of each per batch."""

    n_envs: int
    n_processes: int
    n_timesteps: int
    environment: str = ENVIRONMENT


class Contender(Protocol):
    """May also have ``begin(batches)``, called before so many of `collect`, and ``report()``, called after them."""

    def collect(self) -> int:
        """Collect one batch; return how many environment steps it holds, steps that only reset not counted."""

    def close(self) -> None:
        """End what was started."""


def make_env(environment: str) -> Any:  # noqa: ANN401 - a gymnasium.Env, of whatever types
    """Make one gymnasium environment; ``slow`` is the one of `_slow_env`."""
    import gymnasium

    if environment == "slow":
        from _slow_env import SlowEnv

        return SlowEnv()
    return gymnasium.make(environment)


def make_policy() -> Any:  # noqa: ANN401 - torch is imported late
    """Make the 4-64-64-2 network, the same weights for everybody; None with the argument ``random``: any action."""
    if "random" in sys.argv:
        return None
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def act(policy: Any, observation: Any) -> Any:  # noqa: ANN401
    """Draw actions [B] int64 for observations [B, 4] float32, a numpy array; the fastest way that torch has."""
    import torch

    if policy is None:
        return torch.randint(2, (len(observation),))
    return torch.multinomial(policy(torch.from_numpy(observation)).softmax(-1), 1).squeeze(-1)


def serve(create: Callable[[Task], Contender], packages: list[str]) -> None:
    """Run a contender until the driver closes the pipe."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    contender = create(Task(**json.loads(sys.argv[1])))
    print(json.dumps({"ready": {name: version(name) for name in packages}}), file=channel)
    for line in sys.stdin:
        batches = json.loads(line)["batches"]
        start, steps = time.perf_counter(), 0
        if begin := getattr(contender, "begin", None):
            begin(batches)
        with torch.no_grad():
            for _ in range(batches):
                steps += contender.collect()
        answer: dict[str, Any] = {"seconds": time.perf_counter() - start, "steps": steps}
        if report := getattr(contender, "report", None):
            answer["report"] = report()
        print(json.dumps(answer), file=channel)
    contender.close()
