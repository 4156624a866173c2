"""Checks of what users hand to RL_Batcher. Part of rlstruct.batchers."""

from __future__ import annotations

import inspect
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rlstruct.batchers.making import Factories
from rlstruct.core import DictTensor
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv


def check_numbers(n_timesteps: int, n_processes: int, on_worker_error: str, max_restarts: int) -> None:
    """Raise ValueError for numbers out of range."""
    if n_timesteps < 1 or n_processes < 0:
        raise ValueError(
            f"RL_Batcher: n_timesteps is {n_timesteps} and n_processes {n_processes}; "
            "expected at least 1 step, and 0 processes (collect in this one) or more."
        )
    if on_worker_error not in ("raise", "restart") or max_restarts < 0:
        raise ValueError(
            f"RL_Batcher: on_worker_error is {on_worker_error!r} and max_restarts {max_restarts}; "
            "expected 'raise' or 'restart', and 0 or more restarts."
        )
    if on_worker_error == "restart" and n_processes == 0:
        raise ValueError(
            "RL_Batcher: on_worker_error='restart' with n_processes=0; there is no worker to start again. "
            "Pass n_processes=1, or on_worker_error='raise'."
        )


def check_factories(factories: Factories, seed: int | None) -> None:
    """Raise TypeError for an agent or environment where what makes one belongs, or for arguments that do not fit."""
    given: tuple[tuple[str, object, type], ...] = (
        ("create_agent", factories.create_agent, RL_Agent),
        ("create_env", factories.create_env, VecEnv),
    )
    for name, factory, made in given:
        if isinstance(factory, made) or not callable(factory):
            raise TypeError(
                f"RL_Batcher: {name} is a {type(factory).__name__}, expected a function or a class. "
                f"Every process makes its own {made.__name__}: pass what makes one, with its arguments in "
                f"{name.removeprefix('create_')}_args."
            )
    _check_call("create_agent", factories.create_agent, factories.agent_args)
    _check_call("create_env", factories.create_env, {**factories.env_args, "seed": seed})


def _check_call(name: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Raise TypeError unless a factory can be called with its arguments; every process would fail otherwise."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables written in C have none: calling them will tell
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        call = ", ".join(f"{key}=…" for key in arguments)
        raise TypeError(
            f"RL_Batcher: {name} is called as {name}({call}), but {error}. "
            f"Its parameters are {signature}; arguments beside seed come from {name.removeprefix('create_')}_args."
        ) from None


def choose_seeds(seed: int | None, seeds: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """One seed per process, or that of process 0 alone when the others follow from the number of environments."""
    if seed is not None and seeds is not None:
        raise ValueError("RL_Batcher: seed and seeds are both given. Pass one of them.")
    check_count("seeds", seeds, n)
    if seeds is not None:
        return tuple(seeds)
    return (secrets.randbits(31) if seed is None else seed,)


def check_count(name: str, values: Sequence[int] | None, n: int) -> None:
    """Raise ValueError unless there is one value for each of n processes."""
    if values is not None and len(values) != n:
        raise ValueError(f"RL_Batcher: {name} has {len(values)} entries, expected {n}, one per process.")


def overlap_of_seeds(seeds: Sequence[int], n_envs: Sequence[int]) -> str | None:
    """Say which mistake is in ``seeds`` that let two processes draw the same environments, if there is one."""
    spans = sorted(zip(seeds, n_envs, strict=True))
    if not any(low + n > high for (low, n), (high, _) in pairwise(spans)):
        return None
    return (
        f"RL_Batcher: seeds={list(seeds)} with {n_envs[0]} environments per process overlap: environment j "
        f"of a process seeds with its seed + j, so some environments are copies of others. "
        f"Pass seed={seeds[0]} instead, or space the seeds by {n_envs[0]}."
    )


def check_weights(weights: Mapping[str, Tensor]) -> None:
    """Raise TypeError unless every weight is a tensor."""
    for key, value in weights.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"RL_Batcher.update: weight {key!r} is a {type(value).__name__}, expected a tensor. "
                "Pass model.state_dict(), without extra state."
            )


def spread(name: str, info: DictTensor, B: int) -> DictTensor:
    """Check an info at the boundary, and repeat a single row for all B environments; the result is a copy."""
    if info.empty():
        return info
    if info.device != torch.device("cpu"):
        key = next(iter(info.keys()))
        raise DeviceMismatchError(
            f"RL_Batcher: {name} {key!r} is on {info.device}, expected cpu. Settings stay on the CPU: create it there."
        )
    if info.n_elems() not in (1, B):
        raise ShapeMismatchError(
            f"RL_Batcher: {name} has {info.n_elems()} rows, expected {B}, one per environment, or 1 for all alike."
        )
    return info.map(lambda value: value.repeat(B, *[1] * (value.dim() - 1))) if info.n_elems() < B else info.clone()


def split(info: DictTensor, n_envs: Sequence[int]) -> list[DictTensor]:
    """Cut an info into the parts of the collectors; each gets the empty one if it is empty."""
    parts: list[DictTensor] = []
    first = 0
    for n in n_envs:
        parts.append(info if info.empty() else info.slice(first, first + n).clone())
        first += n
    return parts


def check_n_workers(n_workers: int | None, n_collectors: int) -> None:
    """Raise ValueError unless `RL_Batcher.get` can wait for so many."""
    if n_workers is not None and not 1 <= n_workers <= n_collectors:
        raise ValueError(f"RL_Batcher.get: n_workers is {n_workers}, expected 1 to {n_collectors}, or None for all.")


def warn_of_contexts(device: torch.device, n_processes: int) -> None:
    """Warn of processes that share a GPU; the warning shows the line that makes the batcher."""
    if device.type == "cuda" and n_processes > 1:
        warnings.warn(
            f"RL_Batcher: {n_processes} processes on {device} open {n_processes} CUDA contexts, 300 to 700 MB of GPU "
            "memory each, and share the GPU in turns. One process with more environments is usually faster.",
            stacklevel=3,
        )


def warn_of_uncompiled(reasons: Sequence[str]) -> bool:
    """Warn, at the line that calls `get`, if an agent acts as it is though it should be compiled; whether it does."""
    why_not = next(filter(None, reasons), "")
    if why_not:
        warnings.warn(
            "RL_Batcher(compile_agent=True): the agent cannot be compiled and acts as it is, slower and with equal "
            f"results: {why_not}. Without compile_agent there is no such warning.",
            stacklevel=3,
        )
    return bool(why_not)
