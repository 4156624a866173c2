"""Saved state of batchers and collectors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import BadKeyError, BadValueError, ShapeMismatchError
from rlstruct.vec_env import VecEnv


class CollectorState(TypedDict):
    """Everything that determines the next batch of a collector but weights and infos; tensors are on the CPU."""

    environment: dict[str, Tensor] | None  # see `VecEnv.state_dict`; None if it cannot be saved
    observation: dict[str, Tensor]  # what the agent acts on next
    running: Tensor  # which environments go on. [B] bool
    agent_state: dict[str, Tensor]  # the agent's
    seed: int  # of the first environment
    episode: int  # resets until now, less one
    step: int  # steps since the last one
    generator: Tensor | None  # state of torch's generator in a worker process; None in the caller's own


class BatcherState(TypedDict):
    """Result of `RL_Batcher.state_dict`: plain values, and tensors on the CPU.

    Attributes:
        collectors: one for each process.
        infos: ``agent_info/…`` and ``env_info/…`` of all environments.  [B]
        begun: whether there was a reset.
        n_running: how many environments go on.
        policy_version: calls of `RL_Batcher.update`.
    """

    collectors: list[CollectorState]
    infos: dict[str, Tensor]
    begun: bool
    n_running: int
    policy_version: int


def on_cpu(tensors: Mapping[str, Tensor] | DictTensor) -> dict[str, Tensor]:
    """Copy tensors to CPU memory that no later step writes to."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def check_state(state: Mapping[str, Any], n_collectors: int) -> None:
    """Raise unless ``state`` comes from a batcher with this many collecting processes."""
    _require(state, BatcherState.__required_keys__, "the state")
    if len(state["collectors"]) != n_collectors:
        raise BadValueError(
            f"RL_Batcher.load_state_dict: the state is that of {len(state['collectors'])} collecting processes, "
            f"expected {n_collectors}. Make the batcher with the same n_processes."
        )


def check_rows(state: CollectorState, n_envs: int) -> None:
    """Raise unless a collector's state comes from this many environments."""
    _require(state, CollectorState.__required_keys__, "a collector's state")
    rows = len(state["running"])
    if state["episode"] >= 0 and rows != n_envs:
        raise ShapeMismatchError(
            f"RL_Batcher.load_state_dict: the state is that of {rows} environments in each process, expected {n_envs}. "
            "Make as many as were saved."
        )


def _require(state: Mapping[str, Any], keys: frozenset[str], name: str) -> None:
    if missing := sorted(keys - state.keys()):
        raise BadKeyError(
            f"RL_Batcher.load_state_dict: {name} has no {missing}, only {sorted(state)}. "
            "Pass what RL_Batcher.state_dict returned."
        )


def load_environment(env: VecEnv, state: Mapping[str, Tensor]) -> None:
    """Let environments go on from their saved state."""
    try:
        env.load_state_dict(state)
    except KeyError as error:
        why = error.args[0] if error.args else error
        raise BadValueError(
            f"RL_Batcher.load_state_dict: {type(env).__name__} cannot go on from the saved environments. Make the "
            f"batcher with the create_env and env_args of the one that was saved. {why}"
        ) from error
