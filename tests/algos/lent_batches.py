"""A training on one device that can record: updates read the batch in the memory that its collection wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlstruct import Trajectories
from rlstruct.algos import Callback, TrainingContext
from rlstruct.algos.evaluation import TrainingResult
from rlstruct.batchers import RL_Batcher
from rlstruct.engine import graph
from rlstruct.sims import make

N_BATCHES = 6


def create_env(n_envs: int, seed: int, device: str) -> Any:
    return make("CartPole-v1", n_envs, seed, device=device, time_limit=60)


class Unchanged(Callback):
    """Compares each batch, after the update, with a copy that was made when the batcher returned it."""

    def __init__(self, copies: list[Trajectories]) -> None:
        self.copies = copies

    def on_update(self, context: TrainingContext) -> None:
        batch, copy = context.batch, self.copies[-1]
        assert batch is not None
        for found, expected in ((batch.info, copy.info), (batch.trajectories, copy.trajectories)):
            assert all(torch.equal(value, expected[key]) for key, value in found.items())


def check_batches_read_in_place(
    train: Callable[..., TrainingResult], config: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train with lent batches and with copied ones: the same weights, and graphs copy next to nothing of the first."""
    places = {"learner_device": device, "batcher_device": device, "evaluation_device": device, "n_processes": 0}
    settings = {"evaluation_processes": 0, "evaluation_timesteps": 5, "evaluation_episodes": 1}
    n_env_steps = N_BATCHES * config.n_envs * config.n_timesteps
    config = dataclasses.replace(config, n_env_steps=n_env_steps, **settings, **places)
    copy_grouped, get = graph.copy_grouped, RL_Batcher.get

    def run(lends: bool) -> tuple[TrainingResult, list[int], int]:
        copied, copies = list[int](), list[Trajectories]()

        def get_and_note(batcher: RL_Batcher, blocking: bool = True, copy: bool | None = None) -> Any:
            if copy is None:  # an evaluation
                return get(batcher, blocking)
            found = get(batcher, copy=copy or not lends)
            copies.append(found[0].clone())
            copied.append(0)
            return found

        def count(to: list[Tensor], values: list[Tensor]) -> None:
            copied[-1:] = [copied[-1] + sum(value.nbytes for value in values)] if copied else []
            copy_grouped(to, values)

        monkeypatch.setattr(RL_Batcher, "get", get_and_note)
        monkeypatch.setattr(graph, "copy_grouped", count)
        result = train(config, create_env=create_env, callbacks=[Unchanged(copies)])
        return result, copied, sum(value.nbytes for value in copies[-1].trajectories.values())

    (lent, n_lent, size), (expected, n_copied, _) = run(lends=True), run(lends=False)
    assert lent.losses == expected.losses
    assert len(lent.losses["loss"]) >= N_BATCHES - 2
    for name, weight in expected.model.state_dict().items():
        assert torch.equal(weight, lent.model.state_dict()[name]), name
    if getattr(config, "overlap", False) or getattr(config, "window", None):  # the learner reads a copy
        assert n_lent == n_copied
    else:  # what stays are infos, a few numbers per environment
        assert max(n_lent[1:]) < size / 4 < size <= min(n_copied[1:]), (n_lent, n_copied, size)
