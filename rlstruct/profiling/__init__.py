"""Profiler of trainings: time by operations, torch's operators, simulators, CUDA, all processes together."""

from rlstruct.profiling.operations import (
    Clock,
    is_on,
    join,
    operation,
    phase,
    profile,
    recorded,
)
from rlstruct.profiling.recorder import OperationError
from rlstruct.profiling.report import Report, differences, read, save

__all__ = [
    "Clock",
    "OperationError",
    "Report",
    "differences",
    "is_on",
    "operation",
    "phase",
    "profile",
    "read",
    "recorded",
    "save",
]

join()
