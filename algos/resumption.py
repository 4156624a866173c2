"""What a training loop remembers beside its learner, as plain values and tensors, and back. Layer 4."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlstruct.algos.divergence import plain_trajectories
from rlstruct.algos.evaluation import Evaluation
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.device import resolve_device

if TYPE_CHECKING:
    from rlstruct.algos.training import Training


class Update(NamedTuple):
    """One update, with numbers that are still on the learner's device."""

    env_steps: int
    policy_version: int
    policy_lag: int
    at: float
    terms: dict[str, Tensor]


class Fetched(NamedTuple):
    """A batch, how many of its environments go on, and the version of the weights that collected it."""

    trajectories: Trajectories
    n_running: int
    version: int


def saved(training: Training) -> dict[str, Any]:
    """Return what a training remembers, beside its learner and its environment steps, between two updates."""
    now = time.perf_counter()
    fetched = training._fetched
    return {
        "resumptions": training.resumptions,
        "finished": training.finished,
        "seconds": now - training._start if training._start else 0.0,
        "published": training._published,
        "fetched": None if fetched is None else {**fetched._asdict(), "trajectories": plain_trajectories(fetched[0])},
        "unread": [{**update._asdict(), "at": now - update.at} for update in training._unread],
        "returns": training.returns.state_dict(),
        "losses": {name: _column(numbers) for name, numbers in training.losses.items()},
        "evaluations": [asdict(evaluation) for evaluation in training.evaluations],
        "batcher": training.batcher.state_dict(),
        "evaluator": training.evaluator.state_dict(),
        "generators": _generators(),
    }


def restore(training: Training, state: Mapping[str, Any]) -> None:
    """Give back to a training what `saved` returned; its learner has been loaded."""
    config, now = training.config, time.perf_counter()
    here, learner_device = resolve_device(config.batcher_device), resolve_device(config.learner_device)
    training.finished = state["finished"]
    training._start = -state["seconds"]
    training._published = state["published"]
    training.evaluations = [
        Evaluation(**{**numbers, "returns": tuple(numbers["returns"]), "lengths": tuple(numbers["lengths"])})
        for numbers in state["evaluations"]
    ]
    training.losses = {name: column.tolist() for name, column in state["losses"].items()}  # sync: on the CPU, once
    training.returns.load_state_dict(state["returns"], here)
    for update in state["unread"]:
        terms = {name: term.to(learner_device) for name, term in update["terms"].items()}
        training._unread.append(Update(**{**update, "at": now - update["at"], "terms": terms}))
    if (fetched := state["fetched"]) is not None:
        training._fetched = Fetched(**{**fetched, "trajectories": _trajectories(fetched["trajectories"], here)})
    training.batcher.load_state_dict(state["batcher"], training.learner.model.state_dict())
    training.evaluator.load_state_dict(state["evaluator"])
    _set_generators(state["generators"])


def _column(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _trajectories(plain: Mapping[str, Any], device: torch.device) -> Trajectories:
    steps = TemporalDictTensor(plain["trajectories"], plain["lengths"])
    return Trajectories(DictTensor(plain["info"]), steps).to(device)


def _generators() -> dict[str, Any]:
    """States of torch's generators in this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
