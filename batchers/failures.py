"""How a failure travels from where it happened to the user. Part of rlstruct.batchers."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass

import cloudpickle

from rlstruct.batchers.collector import Phase, Progress
from rlstruct.errors import WorkerError


@dataclass(frozen=True)
class Failure:
    """Answer of a worker that raised."""

    error: bytes | None
    summary: str
    traceback: str
    phase: Phase
    step: int
    environment: int | None


def describe(error: BaseException, progress: Progress) -> Failure:
    """Turn an exception into something that can be sent, whatever it holds."""
    try:
        pickled = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:  # an exception that cannot travel is still described by its traceback
        pickled = None
    return Failure(
        error=pickled,
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(error)),
        phase=progress.phase,
        step=progress.step,
        environment=getattr(error, "environment_index", None),
    )


def worker_error(
    failure: Failure, cause: BaseException | None, worker: int, pid: int | None, seed: int, environments: range
) -> WorkerError:
    """Build the WorkerError for a worker that raised."""
    index = failure.environment
    environment = None if index is None else environments.start + index
    where = spell(environments) if environment is None else f"environment {environment}"
    seed = seed if index is None else seed + index
    text = (
        f"worker {worker} (pid {pid}) raised in {failure.phase.words}, {where}, seed {seed}, step {failure.step}: "
        f"{failure.summary}"
    )
    if pid != os.getpid():
        text += f"\n\nTraceback of the worker:\n{failure.traceback}"
    return WorkerError(
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


def spell(environments: range) -> str:
    """Name a range of environments."""
    return f"environments {environments.start} to {environments.stop - 1}" if environments else "no environment yet"
