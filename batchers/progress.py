"""Shared progress counters of a collector, and serialisation of its exceptions."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

import cloudpickle
import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import PAGE, ShapeMismatchError, WorkerError
from rlstruct.profiling import Clock

_UNBORN = -1  # in place of a phase, while Python starts and imports the user's main script
_WORDS = (
    *("waiting", "create_env / create_agent", "environment.reset", "agent", "environment.step", "writing the batch"),
    *("saving a checkpoint", "loading a checkpoint", "agent.update", "a batch as one graph"),
)


class Phase(IntEnum):
    """Activity of a collector; the index of an operation of `Progress.clock`."""

    WAIT = 0
    START = 1
    RESET = 2
    AGENT = 3
    ENVIRONMENT = 4
    COPY = 5
    SAVE = 6
    LOAD = 7
    UPDATE = 8
    GRAPH = 9

    @property
    def words(self) -> str:
        """The phase as an error message says it."""
        return _WORDS[self]


class Interrupted(BaseException):
    """The batcher was closed while this collector was at work."""


class Progress:
    """Phase and step of a collector, and a request to stop.

    Args:
        words: [3] int64 or more, in shared memory if another process is to see them.
        waits: whether this process does nothing else in the phase WAIT, so that a profile calls it waiting.
    """

    def __init__(self, words: Tensor | None = None, waits: bool = True) -> None:
        words = torch.zeros(3, dtype=torch.int64, device="cpu") if words is None else words
        # A memoryview is written in a twentieth of the time that a tensor takes.
        self._words = memoryview(words.numpy())  # type: ignore[arg-type]  # sync: a view, once
        names: dict[str, str | None] = {phase.name.lower(): phase.name.lower() for phase in Phase}
        self.clock = Clock(names | {"wait": "wait" if waits else None, "update": "weights"})

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.at(phase, self._words[1])

    def at(self, phase: int, t: int) -> None:
        """Begin a phase of step t of a batch."""
        words = self._words
        words[0], words[1] = phase, t
        self.clock.enter(phase)
        if words[2]:
            raise Interrupted

    @property
    def phase(self) -> Phase:
        """The collector's current activity."""
        return Phase(int(self._words[0])) if self.born else Phase.START

    @property
    def born(self) -> bool:
        """Return True once the worker runs the code of this library."""
        return bool(self._words[0] != _UNBORN)

    @property
    def step(self) -> int:
        """The step of the batch that it is at."""
        return int(self._words[1])

    @step.setter
    def step(self, t: int) -> None:
        self._words[1] = t

    def clear(self) -> None:
        """Forget everything, for a worker that is about to be started."""
        self._words[0], self._words[1], self._words[2] = _UNBORN, 0, 0

    def stop(self) -> None:
        """Ask the collector to give up at its next phase."""
        self._words[2] = 1


@dataclass(frozen=True)
class Failure:
    """An exception that a collector raised, in a form that can be sent; ``seen`` is what the agent was called with."""

    error: bytes | None
    summary: str
    traceback: str
    phase: Phase
    step: int | None
    environment: int | None
    seen: str = ""


def describe(error: BaseException, progress: Progress, seen: str = "") -> Failure:
    """Turn an exception into something that can be sent, with what the agent has ``seen`` if it was the agent."""
    within_a_step = progress.phase in (Phase.AGENT, Phase.ENVIRONMENT, Phase.COPY)
    phase, said, step = progress.phase, traceback.format_exception_only(error), getattr(error, "batch_step", None)
    return Failure(
        error=_pickled(error),
        summary="".join(line for line in said if not line.startswith(PAGE)).strip(),  # the traceback has it
        traceback="".join(traceback.format_exception(type(error), error, _outside(error.__traceback__))),
        phase=phase,
        step=(progress.step if step is None else step) if within_a_step else None,
        environment=getattr(error, "environment_index", None),
        seen=seen if phase is Phase.AGENT and not isinstance(error, ShapeMismatchError) else "",
    )


def _outside(frames: TracebackType | None) -> TracebackType | None:
    """Leave out our own first calls but the last: a traceback begins where the user's code was called, if it was."""
    start = last = frames
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in ("rlstruct", "torch", "contextlib"):
            return last
        last, frames = frames, frames.tb_next
    return start


def worker_error(
    failure: Failure, cause: BaseException | None, worker: int, pid: int | None, seed: int, environments: range
) -> WorkerError:
    """Build the WorkerError for a collector that raised ``cause``, in a worker or in this process."""
    index, here = failure.environment, pid == os.getpid()
    environment = None if index is None else environments.start + index
    where = spell(environments) if environment is None else f"environment {environment}"
    seed = seed if index is None else seed + index
    step = "" if failure.step is None else f", step {failure.step}"
    who = "this process" if here else f"worker {worker} (pid {pid})"
    # A VecEnv numbers its own environments; users see one number only, that of the batch.
    summary = re.sub(rf"\benvironment {index}\b", where, failure.summary)
    text = f"{who} raised in {failure.phase.words}, {where}, seed {seed}{step}: {summary}"
    if failure.seen:
        text += f"\nThe agent was called with {failure.seen}."
    if not here:
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


def spell_input(observation: DictTensor, state: DictTensor, agent_info: DictTensor) -> str:
    """Name what an agent is called with: frames, state and agent_info, with shapes, dtypes and devices."""
    frames = {key: frame for key, frame in observation.items() if key.split("/")[0] == "frame"}
    groups = {"observation": frames, "state": dict(state.items()), "agent_info": dict(agent_info.items())}
    return ", ".join(
        f"{name} {key!r} {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensors in groups.items()
        for key, tensor in tensors.items()
    )


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception, if need be without parts that cannot be read again; None if it cannot travel at all."""
    if (whole := _survives(error)) is not None:
        return whole
    args = tuple(value if _survives(value) else repr(value) for value in error.args)
    state = {name: value for name, value in getattr(error, "__dict__", {}).items() if _survives(value)}
    pickled = _survives((type(error), args, state))
    return None if unpickled(pickled) is None else pickled


def _survives(value: object) -> bytes | None:
    """Pickle a value that can be read again."""
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
        if isinstance(found, tuple):  # its constructor is not called, whose arguments are no longer known
            kind, args, state = found
            found = kind.__new__(kind)
            found.args = args
            for name, value in state.items():
                setattr(found, name, value)
    except Exception:  # its traceback says the same
        return None
    error: BaseException | None = found
    return error
