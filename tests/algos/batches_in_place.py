"""A training on one device that can capture graphs: updates read the batch in the memory that its collection wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlstruct import Trajectories
from rlstruct.algos import Callback, GradientLearner
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.batchers import RL_Batcher
from rlstruct.engine import graph
from rlstruct.sims import make

N_BATCHES = 6


def create_env(n_envs: int, seed: int, device: str) -> Any:
    return make("CartPole-v1", n_envs, seed, device=device, time_limit=12)


def check_batches_read_in_place(
    train: Callable[..., TrainingResult], config: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train with batches in place and with copies: equal weights, and graphs copy next to nothing of the first."""
    places = {"learner_device": device, "batcher_device": device, "evaluation_device": device, "n_processes": 0}
    settings = {"evaluation_processes": 0, "evaluation_timesteps": 5, "evaluation_episodes": 1}
    n_env_steps = N_BATCHES * config.n_envs * config.n_timesteps
    config = dataclasses.replace(config, n_env_steps=n_env_steps, **settings, **places)
    copy_grouped, get, update = graph.copy_grouped, RL_Batcher.get, GradientLearner.update

    def run(in_place: bool, callbacks: tuple[Callback, ...] = ()) -> tuple[TrainingResult, list[int], int]:
        copied, copies = list[int](), list[Trajectories]()

        def get_and_note(batcher: RL_Batcher, blocking: bool = True, reuse: bool | None = None) -> Any:
            if reuse is None:  # an evaluation
                return get(batcher, blocking)
            found = get(batcher, reuse=reuse and in_place)
            copies.append(found[0].clone())
            copied.append(0)
            return found

        def count(to: list[Tensor], values: list[Tensor]) -> None:
            copied[-1:] = [copied[-1] + sum(value.nbytes for value in values)] if copied else []
            copy_grouped(to, values)

        def compare(learner: GradientLearner, batch: Trajectories, fraction_done: float) -> dict[str, Tensor]:
            terms = update(learner, batch, fraction_done)
            if batch.lengths.shape == copies[-1].lengths.shape and not getattr(config, "window", None):
                for found, expected in ((batch.info, copies[-1].info), (batch.steps, copies[-1].steps)):
                    for key, value in found.items():  # after the update
                        assert torch.equal(value, expected[key]), key
            return terms

        monkeypatch.setattr(GradientLearner, "update", compare)
        monkeypatch.setattr(RL_Batcher, "get", get_and_note)
        monkeypatch.setattr(graph, "copy_grouped", count)
        result = train(config, create_env=create_env, callbacks=callbacks)
        return result, copied, sum(value.nbytes for value in copies[-1].steps.values())

    (found_in_place, n_in_place, size), (expected, n_copied, _) = run(in_place=True), run(in_place=False)
    assert found_in_place.losses == expected.losses
    assert len(found_in_place.losses["loss"]) >= N_BATCHES - 2
    for name, weight in expected.model.state_dict().items():
        assert torch.equal(weight, found_in_place.model.state_dict()[name]), name
    _, n_with_callback, _ = run(in_place=True, callbacks=(Callback(),))  # which may keep a batch
    assert n_with_callback == n_copied
    if getattr(config, "overlap", False) or getattr(config, "window", None):  # the learner reads a copy
        assert n_in_place == n_copied
    else:  # what stays are infos, a few numbers per environment
        assert max(n_in_place[1:]) < size / 4 < size <= min(n_copied[1:]), (n_in_place, n_copied, size)
