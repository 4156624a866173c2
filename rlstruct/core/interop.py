"""DictTensor to and from tensordict, an optional package. Layer 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlstruct.errors import ShapeMismatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlstruct.core.dict_tensor import DictTensor


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


def _package() -> Any:  # noqa: ANN401 - the module may be missing
    try:
        import tensordict
    except ImportError as error:
        raise ImportError(
            "DictTensor: the optional package tensordict is not installed. "
            'Install it with pip install "rlstruct[tensordict]".'
        ) from error
    return tensordict
