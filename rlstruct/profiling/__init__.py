"""Profiler of trainings: time by operations, torch's operators, simulators, CUDA, all processes together."""

from rlstruct.profiling.operations import Clock, is_on, operation, phase, profile, recorded, start_if_requested
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

start_if_requested()
