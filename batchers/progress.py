"""Progress counters of a collector, shared between processes, and serialisation of its exceptions."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import cloudpickle
import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import PAGE, Explained, ShapeMismatchError, WorkerError
from rlstruct.profiling import Clock

_NOT_STARTED = -1  # in place of a phase while Python starts and imports the user's main script
_CLOSING = -2  # in place of a phase while agent or environments are closed
_WORDS = (
    *("waiting", "create_env / create_agent", "environment.reset", "agent", "environment.step", "writing the batch"),
    *("saving a checkpoint", "loading a checkpoint", "agent.update", "a batch as one graph"),
)


class Phase(IntEnum):
    """Activity of a collector, and index of the corresponding operation of `Progress.clock`."""

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
        """Description of the phase for error messages."""
        return _WORDS[self]


class Interrupted(BaseException):
    """Raised in a collector that is busy when the batcher is closed."""


class Progress:
    """Phase and step of a collector, and a request to stop.

    Args:
        words: counters, in shared memory if other processes read them.  [3] int64, or longer
        waits: whether this process is idle during the phase WAIT, and a profile shows it as waiting.
    """

    def __init__(self, words: Tensor | None = None, waits: bool = True) -> None:
        words = torch.zeros(3, dtype=torch.int64, device="cpu") if words is None else words
        # Writing to a memoryview is twenty times faster than writing to a tensor.
        self._words = memoryview(words.numpy())  # type: ignore[arg-type]  # sync: a view, once
        names: dict[str, str | None] = {phase.name.lower(): phase.name.lower() for phase in Phase}
        self.clock = Clock(names | {"wait": "wait" if waits else None, "update": "weights"})

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
        self.at(phase, self._words[1])

    def at(self, phase: int, t: int) -> None:
        """Enter a phase in step t of a batch. Raise `Interrupted` if the collector should stop."""
        words = self._words
        words[0], words[1] = phase, t
        self.clock.enter(phase)
        if words[2]:
            raise Interrupted

    @property
    def phase(self) -> Phase:
        """The collector's current phase."""
        return Phase(max(int(self._words[0]), 0)) if self.started else Phase.START

    @property
    def started(self) -> bool:
        """Return True once the worker runs this library's code."""
        return bool(self._words[0] != _NOT_STARTED)

    @property
    def step(self) -> int:
        """The collector's current step in the batch."""
        return int(self._words[1])

    def clear(self) -> None:
        """Reset the counters before a worker starts."""
        self._words[0], self._words[1], self._words[2] = _NOT_STARTED, 0, 0

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Record that the process closes its agent or environments in this block."""
        before, self._words[0] = self._words[0], _CLOSING
        try:
            yield
        finally:
            self._words[0] = before

    @property
    def is_closing(self) -> bool:
        """Return True while the process is in a block of `closing`."""
        return bool(self._words[0] == _CLOSING)

    def stop(self) -> None:
        """Ask the collector to stop at its next phase."""
        self._words[2] = 1


@dataclass(frozen=True)
class Failure:
    """A collector's exception, in a form that can be pickled; ``inputs`` describes the inputs of the agent."""

    error: bytes | None
    summary: str
    traceback: str
    phase: Phase
    step: int | None
    environment: int | None
    inputs: str = ""


def describe_failure(error: BaseException, progress: Progress, inputs: str = "") -> Failure:
    """Convert an exception to a `Failure`, with the inputs ``inputs`` by the agent if the agent raised it."""
    within_a_step = progress.phase in (Phase.AGENT, Phase.ENVIRONMENT, Phase.COPY)
    phase, lines, step = progress.phase, traceback.format_exception_only(error), getattr(error, "batch_step", None)
    return Failure(
        error=_pickled(error),
        summary="".join(line for line in lines if not line.startswith(PAGE)).strip(),  # the traceback has that line
        traceback=_traceback(error),
        phase=phase,
        step=(progress.step if step is None else step) if within_a_step else None,
        environment=getattr(error, "environment_index", None),
        inputs=inputs if phase is Phase.AGENT and not isinstance(error, ShapeMismatchError) else "",
    )


def _traceback(error: BaseException) -> str:
    """Format a traceback from the call of the user's code on; all of it if the exception was raised without user code.

    Errors of this library that were raised without user code have none: their message says everything.
    """
    start = last = frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in ("rlstruct", "torch", "contextlib"):
            return "".join(traceback.format_exception(type(error), error, last))
        last, frames = frames, frames.tb_next
    return "" if isinstance(error, Explained) else "".join(traceback.format_exception(type(error), error, start))


def worker_error(
    failure: Failure, cause: BaseException | None, worker: int, pid: int | None, seed: int, environments: range
) -> WorkerError:
    """Create the WorkerError for an exception ``cause`` of a collector in a worker or in this process."""
    index, here = failure.environment, pid == os.getpid()
    environment = None if index is None else environments.start + index
    where = describe_environments(environments) if environment is None else f"environment {environment}"
    seed = seed if index is None else seed + index
    step = "" if failure.step is None else f", step {failure.step}"
    who = "this process" if here else f"worker {worker} (pid {pid})"
    # The message has the index within the VecEnv; users see the index within the batch.
    summary = re.sub(rf"\benvironment {index}\b", where, failure.summary)
    text = f"{who} raised in {failure.phase.words}, {where}, seed {seed}{step}: {summary}"
    if failure.inputs:
        text += f"\nThe agent was called with {failure.inputs}."
    if not here and failure.traceback:
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


def describe_environments(environments: range) -> str:
    """Describe a range of environments."""
    if len(environments) < 2:
        return f"environment {environments.start}" if environments else "no environment yet"
    return f"environments {environments.start} to {environments.stop - 1}"


def describe_arguments(observation: DictTensor, state: DictTensor, agent_info: DictTensor) -> str:
    """Describe the inputs of an agent: frames, state and agent_info, with shapes, dtypes and devices."""
    frames = {key: frame for key, frame in observation.items() if key.split("/")[0] == "frame"}
    groups = {"observation": frames, "state": dict(state.items()), "agent_info": dict(agent_info.items())}
    return ", ".join(
        f"{name} {key!r} {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensors in groups.items()
        for key, tensor in tensors.items()
    )


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception, if necessary without those parts that cannot be unpickled; None if that is impossible."""
    if (complete := _survives(error)) is not None:
        return complete
    args = tuple(value if _survives(value) else repr(value) for value in error.args)
    state = {name: value for name, value in getattr(error, "__dict__", {}).items() if _survives(value)}
    pickled = _survives((type(error), args, state))
    return None if unpickle_error(pickled) is None else pickled


def _survives(value: object) -> bytes | None:
    """Pickle a value; return None if it cannot be pickled and unpickled."""
    try:
        pickled: bytes = cloudpickle.dumps(value)
        cloudpickle.loads(pickled)
    except Exception:  # user code runs here: __reduce__, __setstate__, constructors
        return None
    return pickled


def unpickle_error(pickled: bytes | None) -> BaseException | None:
    """Unpickle an exception from `describe_failure`; None if its class does not exist in this process."""
    try:
        loaded = None if pickled is None else cloudpickle.loads(pickled)
        if isinstance(loaded, tuple):  # parts of an exception, whose constructor may need other arguments
            error_class, args, state = loaded
            loaded = error_class.__new__(error_class)
            loaded.args = args
            for name, value in state.items():
                setattr(loaded, name, value)
    except Exception:  # the traceback of the failure still names it
        return None
    error: BaseException | None = loaded
    return error
