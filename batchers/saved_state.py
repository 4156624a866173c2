"""Saved state of batchers and collectors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import BadKeyError, BadValueError, ShapeMismatchError
from rlstruct.vec_env import VecEnv


class CollectorState(TypedDict):
    """Everything that determines a collector's next batch, except weights and infos. Tensors are on the CPU."""

    environment: dict[str, Tensor] | None  # see `VecEnv.state_dict`; None if it cannot be saved
    observation: dict[str, Tensor]  # next observation of the agent
    running: Tensor  # True in environments with a running episode.  [B] bool
    agent_state: dict[str, Tensor]
    seed: int  # of the first environment
    episode: int  # number of resets until now, minus one
    step: int  # number of steps since the last reset
    generator: Tensor | None  # state of torch's generator in a worker process; None in the caller's process


class BatcherState(TypedDict):
    """Result of `RL_Batcher.state_dict`: plain values, and tensors on the CPU.

    Attributes:
        collectors: one state per process.
        infos: ``agent_info/…`` and ``env_info/…`` of all environments.  [B]
        begun: whether `RL_Batcher.reset` has been called.
        n_running: number of environments with a running episode.
        policy_version: number of calls of `RL_Batcher.update`.
    """

    collectors: list[CollectorState]
    infos: dict[str, Tensor]
    begun: bool
    n_running: int
    policy_version: int


def on_cpu(tensors: Mapping[str, Tensor] | DictTensor) -> dict[str, Tensor]:
    """Copy tensors to new CPU memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def check_state(state: Mapping[str, Any], n_collectors: int) -> None:
    """Raise an error unless ``state`` comes from a batcher with this many collecting processes."""
    _require(state, BatcherState.__required_keys__, "the state")
    if len(state["collectors"]) != n_collectors:
        raise BadValueError(
            f"RL_Batcher.load_state_dict: the state comes from {len(state['collectors'])} collecting processes, "
            f"expected {n_collectors}. Create the batcher with the same n_processes."
        )


def check_rows(state: CollectorState, n_envs: int) -> None:
    """Raise an error unless a collector's state comes from this many environments."""
    _require(state, CollectorState.__required_keys__, "a collector's state")
    rows = len(state["running"])
    if state["episode"] >= 0 and rows != n_envs:
        raise ShapeMismatchError(
            f"RL_Batcher.load_state_dict: the state comes from {rows} environments per process, expected {n_envs}. "
            "Create as many environments as were saved."
        )


def _require(state: Mapping[str, Any], keys: frozenset[str], name: str) -> None:
    if missing := sorted(keys - state.keys()):
        raise BadKeyError(
            f"RL_Batcher.load_state_dict: {name} has no {missing}, only {sorted(state)}. "
            "Pass what RL_Batcher.state_dict returned."
        )


def load_environment(env: VecEnv, state: Mapping[str, Tensor]) -> None:
    """Restore the saved state of environments."""
    try:
        env.load_state_dict(state)
    except KeyError as error:
        why = error.args[0] if error.args else error
        raise BadValueError(
            f"RL_Batcher.load_state_dict: {type(env).__name__} cannot continue from the saved environments. Create "
            f"the batcher with the same create_env and env_args as the saved one. {why}"
        ) from error
