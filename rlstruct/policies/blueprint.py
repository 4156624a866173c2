"""Descriptions of networks and agent factories as plain values, which rebuild them without running unknown code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rlstruct import renamed
from rlstruct.errors import BadTypeError, BadValueError, MissingPackageError
from rlstruct.rl_agent import RL_Agent

if TYPE_CHECKING:
    from typing_extensions import Self

TRUSTED = ("rlstruct.", "torch.nn.")


class KeepsArguments:
    """Base of networks that remember their constructor arguments, so that a checkpoint can describe them.

    >>> class Scale(KeepsArguments):
    ...     def __init__(self, factor: float) -> None:
    ...         self.factor = factor
    >>> vars(Scale(factor=2.0))["_arguments"]
    ((), {'factor': 2.0})
    """

    def __new__(cls, *args: Any, **named: Any) -> Self:  # noqa: ANN401 - those of __init__
        """Store the arguments."""
        made = super().__new__(cls)
        vars(made)["_arguments"] = args, named  # a module refuses attributes before its __init__
        return made


def describe(value: Any) -> Any:  # noqa: ANN401 - a value of any kind
    """Return plain values from which `build` creates an equal object without its weights; TypeError if impossible.

    Supported are plain values and numpy's arrays of numbers; classes and factories of rlstruct and torch.nn, and a
    `functools.partial` of one; and instances of dataclasses, of networks derived from `KeepsArguments`, and of layers
    of torch.nn. An array becomes nested tuples.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.bool_) and value.dtype.kind in "biuf":
        return value.tolist()  # sync: none, it is numpy's
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, list | tuple):
        return [describe(one) for one in value]
    if isinstance(value, Mapping):
        return {"dict": {str(key): describe(one) for key, one in value.items()}}
    if isinstance(value, partial):
        place = _place(value.func)
        try:
            return {"partial": place, "args": describe(value.args), "named": describe(value.keywords)}
        except BadTypeError as error:
            raise BadTypeError(f"{place.replace(':', '.')} made with {error}") from None
    if isinstance(value, type | MethodType | FunctionType):
        return {"name": _place(value)}
    args, named = _arguments(value)
    return {"call": _place(type(value)), "args": describe(args), "named": describe(named)}


def build(plain: Any) -> Any:  # noqa: ANN401 - what was described
    """Rebuild an object from the result of `describe`. Only classes of rlstruct and torch.nn are called."""
    if isinstance(plain, list | tuple):
        return tuple(build(one) for one in plain)
    if not isinstance(plain, Mapping):
        return plain
    form, value = next(iter(plain.items()))
    if form == "dtype":
        if not isinstance(dtype := getattr(torch, str(value).removeprefix("torch."), None), torch.dtype):
            raise BadValueError(f"rlstruct.load: {value!r} is not a dtype of torch.")
        return dtype
    if form == "dict":
        return {key: build(one) for key, one in value.items()}
    if form not in ("name", "call", "partial"):
        raise BadValueError(f"rlstruct.load: the description has {form!r}, which this version does not know.")
    target = _look_up(value, called=form == "call")
    if form == "name":
        return target
    args, named = build(plain["args"]), build(plain["named"])
    return partial(target, *args, **named) if form == "partial" else target(*args, **named)


def _arguments(value: object) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the constructor arguments of an instance."""
    cls = type(value)
    if isinstance(value, KeepsArguments):
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = vars(value)["_arguments"]
        return arguments
    if isinstance(value, nn.Sequential | nn.ModuleList) and cls in (nn.Sequential, nn.ModuleList):
        children = tuple(value)
        return (children, {}) if cls is nn.Sequential else ((children,), {})
    if dataclasses.is_dataclass(value):
        return (), {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, nn.Module) and cls.__module__.startswith("torch.nn."):
        return (), _settings(value)
    raise BadTypeError(_name(cls))


def _settings(layer: nn.Module) -> dict[str, Any]:
    """Read the constructor arguments of a torch.nn layer from its attributes of the same names.

    Arguments that it does not keep get their default; a comparison with the layer shows if that is wrong.
    """
    settings: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        if name in ("device", "dtype"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # nn.Tanh and others accept arguments that they ignore
        if not hasattr(layer, name):
            if parameter.default is not parameter.empty:
                continue
            raise BadTypeError(f"{_name(type(layer))}, whose argument {name!r} it does not keep")
        kept = getattr(layer, name)
        settings[name] = kept is not None if name == "bias" and not isinstance(kept, bool) else kept
    return settings


def _place(value: Callable[..., Any]) -> str:
    """Return module and name of a class, or of a factory of an agent's class."""
    owner = getattr(value, "__self__", None)
    module, name = value.__module__, value.__qualname__
    is_class_or_factory = isinstance(value, type) or isinstance(owner, type)
    if not (is_class_or_factory and module.startswith(TRUSTED)):
        raise BadTypeError(_name(value))
    value_there: Any = sys.modules.get(module)
    for part in name.split("."):
        value_there = getattr(value_there, part, None)
    if value_there != value:  # made while the program runs, like the classes of torch.nn.utils.parametrizations
        raise BadTypeError(_name(value))
    return f"{module}:{name}"


def _name(value: Callable[..., Any]) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _look_up(place: str, *, called: bool) -> Any:  # noqa: ANN401 - a class, or a factory of one
    """Import a network, an agent's settings or a factory of agents; refuse anything else, since it will be called."""
    module, _, name = str(place).partition(":")
    module = module.replace("rlstruct_search.", "rlstruct.search.")  # a name that was never released
    module = renamed.module_of(module) or module
    value: Any = None
    if module.startswith(TRUSTED):
        try:
            value = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
        except MissingPackageError:
            raise
        except (ImportError, AttributeError):
            raise BadValueError(
                f"rlstruct.load: {place} is not in this version of rlstruct or torch. Pass create_model and "
                "create_agent, or load it with the version that trained it."
            ) from None
    owner = getattr(value, "__self__", None)
    made = owner if isinstance(owner, type) else value
    if isinstance(made, type) and made.__module__ == module:
        others = dataclasses.is_dataclass(made) if called else module.startswith("rlstruct.sims.")
        if others or issubclass(made, nn.Module | RL_Agent):
            return value
    raise BadValueError(
        f"rlstruct.load: the checkpoint names {place}, expected a network or an agent of rlstruct or torch.nn: it may "
        "be made to do harm. If you trust it, pass create_model and create_agent."
    )


__getattr__ = renamed.attributes(__name__)
