"""Files of a run folder: written atomically, by one process at a time, and read without running code."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import BadTypeError, BadValueError, MissingFileError, UsageError, kind_of, warn_user
from rlstruct.policies.loading import read_plain

FORMAT = 2
_NEEDED = ("format", "model", "optimizer", "config", "policy_version", "env_steps", "training", "run")

_PLAIN = {str, int, float, complex, bool, bytes, bytearray, type(None), torch.Size, torch.dtype, torch.device}

fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # Windows has none
_CANNOT_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}  # errors of file systems without locks


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically: even after a crash, a reader finds the old file or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())  # the content must reach the disk before the name
    os.replace(unfinished, path)
    if os.name == "posix":  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def stored(batch: Trajectories) -> dict[str, Tensor]:
    """Return a batch as a dict for a checkpoint, sharing its memory.  [B, ...] each."""
    info, steps = batch.info.prepend_key("info/"), batch.steps.prepend_key("steps/")
    return {**dict(info.items()), **dict(steps.items()), "lengths": batch.lengths}


def restored(tensors: Mapping[str, Tensor]) -> Trajectories:
    """Return the batch from the result of `stored`."""
    parts = DictTensor({key: tensor for key, tensor in tensors.items() if key != "lengths"})
    steps = TemporalDictTensor(dict(parts.truncate_key("steps/").items()), tensors["lengths"])
    return Trajectories(parts.truncate_key("info/"), steps)


def write_checkpoint(path: Path, state: Mapping[str, object]) -> None:
    """Replace a checkpoint of tensors and plain values, nested in dicts and lists.

    Tensors are moved to the CPU, so that the file can be read on any machine, and numbers of numpy become Python's.

    Raises:
        TypeError: a value is something else, which `read_checkpoint` would refuse; the old checkpoint stays.
    """
    moved = on_cpu(plain(dict(state)))
    replace_file(path, lambda file: _save(moved, file))


def plain(state: object) -> object:
    """Return a state with numbers of numpy as Python's; raise TypeError if a checkpoint cannot hold something in it."""
    converted: object = tree_map_only(np.generic, lambda number: number.item(), state)  # sync: none, numpy's
    safe: list[Any] = torch.serialization.get_safe_globals()
    _check_plain(converted, "", {one if callable(one) else one[0] for one in safe})
    return converted


def _check_plain(value: Any, place: str, allowed: Set[object]) -> None:  # noqa: ANN401
    """Raise TypeError for what ``torch.load(…, weights_only=True)`` does not read; ``allowed`` are further classes."""
    if isinstance(value, Tensor) or type(value) in _PLAIN or type(value) in allowed:
        return
    if type(value) in (dict, OrderedDict, Counter):
        entries = [(f"[{key!r}]", one) for key, one in value.items() if type(one) not in _PLAIN]
        entries += [(f", key {key!r}", key) for key in value if type(key) not in _PLAIN]
    elif type(value) in (list, tuple, set):
        entries = [(f"[{i}]", one) for i, one in enumerate(value) if type(one) not in _PLAIN]
    else:
        raise BadTypeError(
            f"checkpoint: {place or 'the state'} is {kind_of(value)}, which a checkpoint cannot hold; expected "
            "tensors and plain values: numbers, strings, lists and dicts. Convert arrays with torch.from_numpy, and "
            "store a module's state_dict()."
        )
    for name, one in entries:
        _check_plain(one, f"{place}{name}", allowed)


def on_cpu(state: object) -> object:
    """Move tensors, nested in dicts and lists, to the CPU."""
    moved: object = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu"), state)  # sync: once per checkpoint
    return moved


def _save(state: object, file: BinaryIO) -> None:
    """Write with torch, but raise the OSError of a full disk instead of torch's error about an incomplete zip file."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def read_checkpoint(path: Path, *, own: bool = False) -> dict[str, Any]:
    """Read a checkpoint of a training, with its tensors on the CPU; with ``own`` also one of the user's own loop."""
    if not path.exists():
        raise MissingFileError(f"{path} does not exist. The first checkpoint is written after the first evaluation.")
    state = read_plain(path, ("run",), "Pass the folder of a training, restore a copy, or train again.")
    if own and "training" not in state:
        return state
    check_written_by_training(state, str(path))
    if state["format"] != FORMAT:
        raise BadValueError(
            f"{path} has format {state['format']}, expected {FORMAT}. Resume it with the version of rlstruct that "
            "wrote it."
        )
    return state


def check_written_by_training(state: Mapping[str, Any], name: str = "the checkpoint of this run folder") -> None:
    """Raise ValueError for a checkpoint of the user's own loop, of which no training of rlstruct knows the content."""
    if missing := [one for one in _NEEDED if one not in state]:
        raise BadValueError(
            f"{name} was written by a loop of your own, not by a training of rlstruct: it has {sorted(state)}, without "
            f"{', '.join(missing)}. Continue it in that loop, from RunFolder.resume(…).checkpoint. rlstruct.load(…, "
            "create_model=…, create_agent=…, observation_space=…) reads its policy, if it holds the network's weights "
            "as 'model'."
        )


def lock_file(path: Path, holder: str) -> BinaryIO:
    """Lock a file of a run folder until it is closed or this process ends, so that only one process writes there.

    The kernel releases the lock however the process ends. A forked process inherits it; a spawned worker does not. The
    file must never be replaced or deleted, but others may read it. Without ``fcntl`` (Windows), or if the file system
    cannot lock (with a warning), every process gets the lock.
    """
    file = path.open("ab")
    if fcntl is None:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(
            f"{holder}: {path.parent} is in use: a training writes into it, in another process or in this one. Let "
            f"it end, or stop it ('fuser -v {path}' shows its process); a RunFolder of this process is released by "
            "close()."
        ) from None
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            file.close()
            raise
        warn_user(
            f"{holder}: the file system of {path.parent} cannot lock files ({error}): nothing keeps two processes from "
            "training in this folder."
        )
    return file


def generator_states() -> dict[str, Any]:
    """Return the states of torch's generators in this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore the states of torch's generators from `generator_states`."""
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
