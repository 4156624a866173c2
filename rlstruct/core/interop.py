"""Structures to and from tensordict, an optional package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlstruct.errors import ShapeMismatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlstruct.core.dict_tensor import DictTensor
    from rlstruct.core.temporal import TemporalDictTensor


def to_tensordict(structure: DictTensor) -> TensorDict:
    """See `DictTensor.to_tensordict`."""
    made: TensorDict = _package().TensorDict(
        dict(structure.items()), batch_size=[structure.n_elems()], device=structure.device
    )
    return made


def from_tensordict(tensordict: TensorDict) -> dict[str, Tensor]:
    """See `DictTensor.from_tensordict`."""
    _package()
    if tensordict.batch_dims < 1:
        raise ShapeMismatchError(
            f"DictTensor.from_tensordict: the batch size is {list(tensordict.batch_size)}, expected [B] or longer. "
            "Set tensordict.batch_size = [B] first."
        )
    tensors: dict[str, Tensor] = {}
    leaves: Any = tensordict.items(include_nested=True, leaves_only=True)
    for nested, tensor in leaves:
        key = nested if isinstance(nested, str) else "/".join(nested)
        if key in tensors:
            raise KeyError(f"DictTensor.from_tensordict: two entries become the key {key!r}. Rename one of them.")
        tensors[key] = tensor
    return tensors


def temporal_to_tensordict(structure: TemporalDictTensor) -> TensorDict:
    """See `TemporalDictTensor.to_tensordict`."""
    if "mask" in structure:
        raise KeyError("TemporalDictTensor.to_tensordict: the key 'mask' is taken, and the lengths travel in it.")
    made: TensorDict = _package().TensorDict(
        {**dict(structure.items()), "mask": structure.mask()},
        batch_size=[structure.n_elems(), structure.n_steps()],
        device=structure.device,
    )
    return made


def lengths_of(mask: Tensor | None) -> Tensor | None:
    """Return the lengths that a mask [B, T] stands for, None for no mask. Raise if a row has a gap."""
    if mask is None:
        return None
    lengths = mask.sum(1)
    steps = torch.arange(mask.shape[1], device=mask.device, dtype=torch.int64)
    if not torch.equal(mask.bool(), steps.unsqueeze(0) < lengths.unsqueeze(1)):  # sync: once per conversion
        raise ValueError(
            "TemporalDictTensor.from_tensordict: the 'mask' has gaps, expected the first steps of each row. "
            "Cut the rows at their gaps first."
        )
    return lengths


def _package() -> Any:  # noqa: ANN401 - the module may be missing
    try:
        import tensordict
    except ImportError as error:
        raise ImportError(
            "DictTensor: the optional package tensordict is not installed. "
            'Install it with pip install "rlstruct[tensordict]".'
        ) from error
    return tensordict
