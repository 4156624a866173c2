"""A JSON file of answers, each under a hash of the hardware, the versions and the task."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct.batchers.collector_factory import versions
from rlstruct.device import processor, usable_cores
from rlstruct.errors import BadValueError


def key(device: torch.device, *task: object) -> str:
    """Return a hash of hardware, versions and the task: its factories, with their source files, and its arguments."""
    gpu = str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else ""
    here = [platform.node(), processor(), usable_cores(), gpu, *versions().values()]
    return hashlib.sha256(json.dumps([*here, describe_value(list(task))]).encode()).hexdigest()


def describe_value(value: object) -> Any:  # noqa: ANN401 - strings, lists and dicts
    """Describe a factory or an argument in the same words in every process.

    A network is described by its structure, a tensor by dtype and shape.
    """
    if isinstance(value, Mapping):
        return {str(name): describe_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [describe_value(entry) for entry in value]
    if isinstance(value, functools.partial):
        return ["partial", describe_value(value.func), describe_value(value.args), describe_value(value.keywords)]
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, nn.Module) or not callable(value):
        return repr(value)
    described: Any = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        source = Path(inspect.getfile(described)).read_bytes()
    except (TypeError, OSError):  # written in C, or in an interactive session
        source = repr(value).encode()
    closure = inspect.getclosurevars(described).nonlocals if hasattr(described, "__closure__") else {}
    # Functions in the closure, which may contain this one, are described by name only.
    captured = {
        name: getattr(entry, "__qualname__", "") if callable(entry) else describe_value(entry)
        for name, entry in closure.items()
    }
    named = [described.__module__, described.__qualname__, "" if described is value else repr(value)]
    return [*named, captured, hashlib.sha256(source).hexdigest()]


def read(file: Path) -> dict[str, Any]:
    """Read all answers, none if the file does not exist.

    Raises:
        ValueError: the file is damaged.
    """
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise BadValueError(f"tune: the cache {file} is damaged: {error}. Delete it.") from None


def write(file: Path, name: str, answer: Mapping[str, Any]) -> None:
    """Add an answer. The file is replaced as a whole, so no process reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{os.getpid()}")
    half.write_text(json.dumps({**read(file), name: answer}, indent=1) + "\n")
    half.replace(file)
