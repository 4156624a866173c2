"""Callbacks and factories that the learners of test_callbacks.py import."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import Callback, TrainingContext, TrainingResult, a2c
from rlstruct.sims import make

SETTINGS: dict[str, Any] = {
    "n_envs": 8, "n_processes": 0, "n_timesteps": 16, "n_env_steps": 2048, "log_interval": 2,
    "evaluation_episodes": 4, "evaluation_processes": 0, "evaluation_interval": 512, "evaluation_timesteps": 50,
}  # fmt: skip


def create_env(n_envs: int, seed: int = 0, device: str = "cpu") -> Any:
    return make("CartPole-v1", n_envs, seed, device=device)


def train(callbacks: list[Callback], run: Any = None, **settings: Any) -> TrainingResult:
    config = a2c.A2CConfig(**{**SETTINGS, **settings})
    create_model = partial(ActorCritic, 4, 2, hidden=(16,))
    return a2c.train(config, create_model, ActorCriticAgent, create_env, run=run, callbacks=callbacks)


class Journal(Callback):
    """Notes what it is called for."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_start(self, context: TrainingContext) -> None:
        self.lines.append("start")

    def on_update(self, context: TrainingContext) -> None:
        self.lines.append(f"update {context.updates} at {context.env_steps}")

    def on_evaluation(self, context: TrainingContext) -> None:
        self.lines.append(f"evaluation at {context.evaluations[-1].env_steps}")

    def on_end(self, context: TrainingContext) -> None:
        self.lines.append("end")


class Ranks(Callback):
    """Writes from every learner how many updates it has seen; the second one stops."""

    every_rank = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_update(self, context: TrainingContext) -> None:
        if context.learner.group.rank == 1 and context.updates == 3:
            context.stop("seen enough")

    def on_end(self, context: TrainingContext) -> None:
        group = context.learner.group
        weights = torch.cat([weight.detach().flatten() for weight in context.learner.model.parameters()])
        text = f"{context.updates} {context.reason} {context.run is None} {float(weights.sum())!r}"
        (self.folder / f"{group.rank} of {group.size}").write_text(text)


class OnlyFirst(Callback):
    """Cannot travel to another process."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.unpicklable = lambda: None

    def on_update(self, context: TrainingContext) -> None:
        self.pids.append(os.getpid())
