"""How a failure travels from where it happened to the user. Part of rlstruct.batchers."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from rlstruct.batchers.progress import Phase, Progress
from rlstruct.core import DictTensor
from rlstruct.errors import ShapeMismatchError, WorkerError


@dataclass(frozen=True)
class Failure:
    """Answer of a worker that raised."""

    error: bytes | None
    summary: str
    traceback: str
    phase: Phase
    step: int
    environment: int | None
    given: str = ""


def describe(error: BaseException, progress: Progress, given: str = "") -> Failure:
    """Turn an exception into something that can be sent, whatever it holds.

    Args:
        error: the exception.
        progress: where it happened.
        given: what the agent was called with, in words; told if it was the agent that raised.
    """
    return Failure(
        error=_pickled(error),
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(error)),
        phase=progress.phase,
        step=progress.step,
        environment=getattr(error, "environment_index", None),
        given=given if progress.phase is Phase.AGENT and not isinstance(error, ShapeMismatchError) else "",
    )


def worker_error(
    failure: Failure, cause: BaseException | None, worker: int, pid: int | None, seed: int, environments: range
) -> WorkerError:
    """Build the WorkerError for a worker that raised ``cause``."""
    index = failure.environment
    environment = None if index is None else environments.start + index
    where = spell(environments) if environment is None else f"environment {environment}"
    seed = seed if index is None else seed + index
    text = (
        f"worker {worker} (pid {pid}) raised in {failure.phase.words}, {where}, seed {seed}, step {failure.step}: "
        f"{failure.summary}"
    )
    if failure.given:
        text += f"\nThe agent was given {failure.given}."
    if pid != os.getpid():
        text += f"\n\nTraceback of the worker:\n{failure.traceback}"
    error = WorkerError(
        text,
        worker=worker,
        pid=pid,
        phase=failure.phase.words,
        environment=environment,
        environments=(environments.start, environments.stop),
        seed=seed,
        step=failure.step,
        remote_traceback=failure.traceback,
    )
    error.__cause__ = cause
    return error


def spell(environments: range) -> str:
    """Name a range of environments."""
    return f"environments {environments.start} to {environments.stop - 1}" if environments else "no environment yet"


def spell_given(observation: DictTensor, state: DictTensor, agent_info: DictTensor) -> str:
    """Name what an agent is called with: frames, state and settings, with shapes, dtypes and devices."""
    frames = {key: frame for key, frame in observation.items() if key.split("/")[0] == "frame"}
    parts = {"observation": frames, "state": dict(state.items()), "agent_info": dict(agent_info.items())}
    return ", ".join(
        f"{part} {key!r} {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for part, tensors in parts.items()
        for key, tensor in tensors.items()
    )


def rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Make an exception without calling its constructor, whose arguments nobody knows any more."""
    error = kind.__new__(kind)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes that surely can be read again; without whatever of it does not survive that."""
    whole = _survives(error)
    if whole is not None:
        return whole
    args = tuple(value if _survives(value) else repr(value) for value in error.args)
    state = {name: value for name, value in getattr(error, "__dict__", {}).items() if _survives(value)}
    try:
        pickled: bytes = cloudpickle.dumps((type(error), args, state))
        rebuild(*cloudpickle.loads(pickled))
    except Exception:  # an exception that cannot travel at all is still described by its traceback
        return None
    return pickled


def _survives(value: object) -> bytes | None:
    try:
        pickled: bytes = cloudpickle.dumps(value)
        cloudpickle.loads(pickled)
    except Exception:  # user code runs here: __reduce__, __setstate__, constructors
        return None
    return pickled


def unpickled(pickled: bytes | None) -> BaseException | None:
    """Read what `describe` wrote; None if the class of the exception does not exist in this process."""
    try:
        found = None if pickled is None else cloudpickle.loads(pickled)
        return rebuild(*found) if isinstance(found, tuple) else found
    except Exception:  # its traceback still tells the story
        return None
