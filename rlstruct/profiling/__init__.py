"""Profiler of trainings: time by operations, torch's operators, simulators, CUDA, all processes together."""

from rlstruct.profiling.operations import (
    Clock,
    OperationError,
    is_on,
    operation,
    phase,
    recorded,
    start_if_requested,
)
from rlstruct.profiling.report import Report, differences, read, save
from rlstruct.profiling.settings import profile

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

start_if_requested()
