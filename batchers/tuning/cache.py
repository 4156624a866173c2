"""Answers that are kept: a JSON file, by hardware, versions, and what was tuned."""

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

from rlstruct.batchers.recipe import versions
from rlstruct.device import processor, usable_cores
from rlstruct.errors import BadValueError


def key(device: torch.device, *task: object) -> str:
    """Hash hardware, versions and a task: factories, known by their name and the text of their file, and arguments."""
    gpu = str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else ""
    here = [platform.node(), processor(), usable_cores(), gpu, *versions().values()]
    return hashlib.sha256(json.dumps([*here, described(list(task))]).encode()).hexdigest()


def described(value: object) -> Any:  # noqa: ANN401 - strings, lists and dicts
    """Describe a factory or an argument alike in every process; a network by its structure, a tensor by its shape."""
    if isinstance(value, Mapping):
        return {str(name): described(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [described(one) for one in value]
    if isinstance(value, functools.partial):
        return ["partial", described(value.func), described(value.args), described(value.keywords)]
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, nn.Module) or not callable(value):
        return repr(value)
    kind: Any = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        source = Path(inspect.getfile(kind)).read_bytes()
    except (TypeError, OSError):  # written in C, or in a shell
        source = repr(value).encode()
    closure = inspect.getclosurevars(kind).nonlocals if hasattr(kind, "__closure__") else {}
    # A function in there may be this one: its name must do.
    inside = {
        name: getattr(one, "__qualname__", "") if callable(one) else described(one) for name, one in closure.items()
    }
    named = [kind.__module__, kind.__qualname__, "" if kind is value else repr(value)]
    return [*named, inside, hashlib.sha256(source).hexdigest()]


def read(file: Path) -> dict[str, Any]:
    """Read all answers; none if there is no such file, and ValueError if it is damaged."""
    if not file.exists():
        return {}
    try:
        stored = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise BadValueError(f"tune: the cache {file} is damaged: {error}. Delete it.") from None
    if not isinstance(stored, dict):
        raise BadValueError(f"tune: the cache {file} holds a {type(stored).__name__}, expected answers. Delete it.")
    return stored


def keep(file: Path, name: str, answer: Mapping[str, Any]) -> None:
    """Add an answer; a reader never sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{os.getpid()}")
    half.write_text(json.dumps({**read(file), name: answer}, indent=1) + "\n")
    half.replace(file)
