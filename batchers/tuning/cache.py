"""Answers that are kept: a JSON file, by hardware, versions, and what was tuned."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct.device import processor, usable_cores
from rlstruct.errors import BadValueError


def key(device: torch.device, *task: object) -> str:
    """Hash hardware, versions and a task: factories, known by their name and the text of their file, and arguments."""
    gpu = str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else ""
    here = [platform.node(), processor(), usable_cores(), gpu, platform.python_version(), torch.__version__, _commit()]
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
    named = inspect.isroutine(value) or inspect.isclass(value)
    kind: Any = value if named else type(value)
    try:
        source = Path(inspect.getfile(kind)).read_bytes()
    except (TypeError, OSError):  # written in C, or in a shell
        source = repr(value).encode()
    name = [kind.__module__, kind.__qualname__]
    if not named:
        name.append(repr(value))
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            inside = cell.cell_contents  # a function in there may be this one: its name must do
            name.append(getattr(inside, "__qualname__", "") if callable(inside) else described(inside))
    return [*name, hashlib.sha256(source).hexdigest()]


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


def _commit() -> str:
    """Version of this library, and its commit where it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10.0).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return f"{metadata.version('rlstruct')} {commit}"
