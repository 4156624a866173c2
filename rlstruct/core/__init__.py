"""Named tensors with a batch axis, with a batch and a time axis, and whole trajectories."""

from rlstruct.core.dict_tensor import DictTensor, TemporalDictTensor
from rlstruct.core.layout import Layout, Specs, TensorSpec, expect
from rlstruct.core.pytree import register as _register
from rlstruct.core.trajectories import Trajectories

_register()

__all__ = ["DictTensor", "Layout", "Specs", "TemporalDictTensor", "TensorSpec", "Trajectories", "expect"]
