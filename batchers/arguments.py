"""Checks of the arguments of RL_Batcher, and of the order in which its methods are called."""

from __future__ import annotations

import functools
import inspect
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Real
from typing import Any, Literal, ParamSpec

import torch
from torch import nn

from rlstruct import renamed
from rlstruct.batchers.collector_factory import CollectorFactory
from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import (
    BadTypeError,
    BadValueError,
    BatcherStateError,
    ShapeMismatchError,
    check_call,
    expect_type,
    kind_of,
    warn_user,
)
from rlstruct.options import Range, check_seed, nearest
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv, expect_on_cpu

Arguments = ParamSpec("Arguments")
State = Literal["new", "ready", "ended", "executing", "alone", "full", "failed", "closed"]

LONGEST_WAIT = 1e6
"""Seconds; poll() counts milliseconds in 32 bits, and sockets refuse infinity."""
_CALLS = ("n_envs", "reset", "execute", "get", "update", "state_dict", "load_state_dict", "memory_report", "__enter__")
_NO_BATCH = {"get": "no batch is being collected. Call execute() first."}
_BUSY = dict.fromkeys(("reset", "state_dict", "load_state_dict"), "a batch is being collected. Call get() first.")
_GET = "get() has not been called. Call get() first: "
_ALONE = "a second batch can be queued only with worker processes and auto-resetting environments."

REFUSED: dict[State, dict[str, str]] = {
    "new": _NO_BATCH | {"execute": "reset() has not been called. Call reset() first."},
    "ready": _NO_BATCH,
    "ended": _NO_BATCH | {"execute": "every episode has ended. Call reset() to start new ones."},
    "executing": _BUSY,
    "alone": _BUSY | {"execute": _GET + _ALONE},
    "full": _BUSY | {"execute": _GET + "one batch is being collected, and another one is queued."},
    "failed": dict.fromkeys(_CALLS, "collection has failed. close() this batcher and create a new one."),
    "closed": dict.fromkeys(_CALLS, "the batcher is closed. Create a new one."),
}
"""Reasons why a state refuses a call. Other calls are allowed."""


def explain_unknown(constructor: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate RL_Batcher's constructor: name an unknown argument, and say where it belongs, before Python reports it.

    Raises:
        TypeError: there is no such argument.
    """
    parameters = inspect.signature(constructor).parameters

    @functools.wraps(constructor)
    def checked(*values: Arguments.args, **named: Arguments.kwargs) -> None:
        for name in named.keys() - parameters:
            raise BadTypeError(
                f"{type(values[0]).__name__}: there is no argument {name!r}.{nearest(name, parameters)} Those of "
                f"create_env go into env_args={{{name!r}: …}}, those of create_agent into agent_args."
            )
        constructor(*values, **named)

    return checked


def check_call_order(call: str, state: State) -> None:
    """Raise BatcherStateError if the call is not allowed in this state."""
    if call in REFUSED[state]:
        raise BatcherStateError(f"RL_Batcher.{call}: {REFUSED[state][call]}")


def as_integer(name: str, value: object, at_least: int | None = None) -> int:
    """Return a whole number as an int."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # also numpy's integers
    except TypeError:
        raise BadTypeError(
            f"RL_Batcher: {name} is {value!r}, {kind_of(value)}; expected a whole number. Pass an int."
        ) from None
    Range(at_least=at_least).check("RL_Batcher", name, number)
    return number


def as_arguments(name: str, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a factory as a dict. Raise TypeError if they have no names, ValueError for a seed."""
    expect_type(f"RL_Batcher: {name} is", arguments, Mapping | None, "a dict", "Name each argument: {'model': …}.")
    named = dict(arguments or {})
    if name == "env_args" and "seed" in named:
        raise BadValueError(
            f"RL_Batcher: env_args has seed={named['seed']!r}, but create_env gets the batcher's seed in each process. "
            "Leave it out: the batcher's seed, or config.seed of a training, determines those of all environments."
        )
    return named


def as_seconds(name: str, value: object) -> float:
    """Return a number of seconds as a float. Raise TypeError unless it is a number, ValueError if it is negative."""
    expect_type(f"RL_Batcher: {name} is", value, Real, "seconds", "Pass a number.")
    Range(at_least=0).check("RL_Batcher", name, value)
    return min(float(value), LONGEST_WAIT)  # type: ignore[arg-type]  # sockets refuse numpy's float32


def check_choices(on_worker_error: str, n_processes: int, cluster: object, sharing: str, device: DeviceLike) -> None:
    """Raise ValueError for choices that are unknown or contradict each other.

    Warn about workers that take turns on an accelerator: that is slow.
    """
    Range(choices=("raise", "restart")).check("RL_Batcher", "on_worker_error", on_worker_error)
    if on_worker_error == "restart" and n_processes == 0:
        raise BadValueError(
            "RL_Batcher: on_worker_error='restart' with n_processes=0: there is no worker to restart. "
            "Pass n_processes=1, or on_worker_error='raise'."
        )
    if cluster is not None and (n_processes == 0 or sharing != "none"):
        raise BadValueError(
            f"RL_Batcher: cluster={cluster!r} with n_processes={n_processes} and sharing={sharing!r}, expected at "
            "least one worker, and sharing='none'. Ray shares GPUs: cluster={'num_gpus': 0.5}."
        )
    place = resolve_device(device)
    if place.type == "meta":
        raise BadValueError("RL_Batcher: device is 'meta', whose tensors have no values. Pass device='cpu'.")
    if n_processes and cluster is None and sharing == "none" and place.type != "cpu":
        warn_of_copies(place)


@functools.cache  # once in a process
def warn_of_copies(device: torch.device) -> None:
    """Warn that worker processes are a slow way to use an accelerator."""
    warn_user(
        f"RL_Batcher: worker processes on {device} act without CUDA graph or kernel, and open a context each; every "
        "batch travels through the CPU, in one copy each way. Use one process for all environments, n_processes=0, or, "
        "if the environments compute on the CPU, device='cpu'; both are faster. This warning appears once."
    )


def check_factories(factories: CollectorFactory, seed: int | None) -> None:
    """Raise TypeError if a factory is not callable, or its arguments do not fit."""
    for name, factory, arguments in (
        ("create_agent", factories.create_agent, factories.agent_args),
        ("create_env", factories.create_env, {**factories.env_args, "seed": seed}),
    ):
        arguments_name = f"{name.removeprefix('create_')}_args"
        check_factory("RL_Batcher", name, factory, f"with its arguments in {arguments_name}")
        seeded = "it must take seed; its other" if name == "create_env" else "its"
        check_call("RL_Batcher", name, factory, arguments, f"{seeded} arguments come from {arguments_name}")


def check_factory(where: str, name: str, factory: object, how: str) -> None:
    """Raise TypeError if an agent, an environment or a network is passed where a factory belongs."""
    if isinstance(factory, VecEnv | RL_Agent | nn.Module) or not callable(factory):
        made = "RL_Agent" if name == "create_agent" else "VecEnv"
        raise BadTypeError(
            f"{where}: {name} is {kind_of(factory)}, expected a function or a class. "
            f"Every process creates its own {made}: pass the function that creates it, {how}."
        )


def choose_seeds(seed: int | None, seeds: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """Return one seed per process, or only the first if the others depend on the number of environments."""
    if seed is not None and seeds is not None:
        raise BadValueError("RL_Batcher: both seed and seeds are passed. Pass only one.")
    if seeds is not None:
        return one_each("seeds", seeds, n)
    return (secrets.randbits(31) if seed is None else check_seed("RL_Batcher", "seed", seed),)


def one_each(name: str, values: Sequence[int], n: int) -> tuple[int, ...]:
    """Return seeds, one for each of n processes. Raise ValueError if there are more or fewer."""
    expect_type(f"RL_Batcher: {name} is", values, Sized, "a list", f"Pass one seed per process, here {n}.")
    if len(values) != n:
        raise BadValueError(f"RL_Batcher: {name} has {len(values)} entries, expected {n}, one per process.")
    return tuple(check_seed("RL_Batcher", f"{name}[{index}]", value) for index, value in enumerate(values))


def check_info(name: str, info: DictTensor | None) -> DictTensor:
    """Return an agent_info or env_info, empty for None. Raise TypeError unless it is a DictTensor."""
    fix = "Pass DictTensor({...}) with tensors of one row per environment, or of 1 row for all of them."
    expect_type(f"RL_Batcher: {name} is", info, DictTensor | None, "a DictTensor", fix)
    return DictTensor() if info is None else info


def expand(name: str, info: DictTensor, B: int) -> DictTensor:
    """Check an agent_info or env_info, and copy it; a single row is repeated for all B environments."""
    if check_info(name, info).empty():
        return info
    expect_on_cpu(f"RL_Batcher: {name}", info)
    if info.n_elems() not in (1, B):
        raise ShapeMismatchError(
            f"RL_Batcher: {name} has {info.n_elems()} rows, expected {B}, one per environment, or 1 for all of them."
        )
    return info.map(lambda value: value.expand(B, *value.shape[1:]).clone())


def split(info: DictTensor, n_envs: Sequence[int]) -> list[DictTensor]:
    """Split an agent_info or env_info [B] by collector. If it is empty, all parts are empty."""
    stops = [sum(n_envs[: i + 1]) for i in range(len(n_envs))]
    return [info if info.empty() else info.slice(stop - n, stop).clone() for n, stop in zip(n_envs, stops, strict=True)]


__getattr__ = renamed.attributes(__name__)
