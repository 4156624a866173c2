"""Where the time of a training really goes: operations, torch's operators, simulators, CUDA, all processes together."""

import os

from rlstruct.profiling.recording import VARIABLE, Clock, OperationError, is_on, join, operation, phase, profile

__all__ = ["Clock", "OperationError", "is_on", "operation", "phase", "profile"]

if VARIABLE in os.environ:
    join()
