"""Named tensors with a batch axis, with a batch and a time axis, and whole trajectories."""

from rlstruct import renamed as _renamed
from rlstruct.core.dict_tensor import DictTensor, TemporalDictTensor
from rlstruct.core.layout import Layout, TensorSpec, expect
from rlstruct.core.pytree import register as _register
from rlstruct.core.trajectories import Trajectories

_register()
__getattr__ = _renamed.attributes(__name__)

__all__ = ["DictTensor", "Layout", "TemporalDictTensor", "TensorSpec", "Trajectories", "expect"]
