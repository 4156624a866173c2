"""Profiler of trainings: time by operations, torch's operators, simulators, CUDA, all processes together."""

from typing import TYPE_CHECKING

from rlstruct.addons import attributes
from rlstruct.profiling.operations import (
    Clock,
    OperationError,
    is_on,
    operation,
    phase,
    recorded,
    start_if_requested,
)

if TYPE_CHECKING:
    from rlstruct_profiler.report import Report, differences, read, save
    from rlstruct_profiler.settings import profile
else:
    _REPORT, _SETTINGS = "rlstruct_profiler.report", "rlstruct_profiler.settings"
    __getattr__ = attributes(
        __name__,
        {"Report": _REPORT, "differences": _REPORT, "profile": _SETTINGS, "read": _REPORT, "save": _REPORT},
    )

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
