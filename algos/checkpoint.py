"""Files of a checkpoint: written as a whole or not at all, read with nothing but tensors and plain values. Layer 4."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_map_only

FORMAT = 1
_NEEDED = ("format", "model", "optimizer", "config", "policy_version", "env_steps", "training", "run")


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file; whoever reads it, whenever this process or machine dies, finds the old one or the new one.

    Args:
        path: of the file.
        write: writes the new content.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())  # the content must be on the disk before the name is
    os.replace(unfinished, path)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_checkpoint(path: Path, state: Mapping[str, object]) -> None:
    """Replace a checkpoint.

    Args:
        path: of the file.
        state: tensors and plain values, nested in dicts and lists. Tensors are written as on the CPU, so that the file
            can be read on any machine.
    """
    on_cpu = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu"), dict(state))
    replace_file(path, lambda file: torch.save(on_cpu, file))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read the checkpoint of a training, with its tensors on the CPU.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is damaged, or something else than the checkpoint of a training.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist. The first checkpoint is written after the first evaluation."
        ) from None
    except Exception as error:  # of a damaged file the reader makes what it can, and fails in any way
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as a checkpoint: {reason} It is damaged, or was not written by a RunFolder. Take a "
            "copy of it from elsewhere, or train anew."
        ) from error
    found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
    if not isinstance(state, dict) or (missing := [name for name in _NEEDED if name not in state]):
        lack = f", without {missing}" if isinstance(state, dict) else ""
        raise ValueError(
            f"{path} is no checkpoint of a training: it has {found}{lack}. Resume from the folder of a training."
        )
    if state["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {state['format']}, expected {FORMAT}. Resume it with the version of rlstruct that "
            "wrote it."
        )
    return state
