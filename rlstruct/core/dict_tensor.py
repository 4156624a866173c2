"""DictTensor: names to tensors [B, ...] on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlstruct.core._checks import as_dict, validate
from rlstruct.core._join import join
from rlstruct.core._named import NamedTensors
from rlstruct.errors import BadValueError

if TYPE_CHECKING:
    from typing_extensions import Self

    from rlstruct.core.temporal import TemporalDictTensor


class DictTensor(NamedTensors):
    """Names to tensors that share the first dimension B and one device.

    The caller's dict is copied (the tensors are not), and checked once, here. Afterwards only `set` changes a
    structure; every other method returns a new one. Keys joined by ``/`` stand for nesting, see `truncate_key`.

    Args:
        tensors: names to tensors.  each [B, ...], any dtype, one device; None for the empty structure

    Raises:
        TypeError: a key is not a string, or a value not a tensor.
        ShapeMismatchError: a tensor has no batch axis, or another B than the first one.
        DeviceMismatchError: a tensor is on another device than the first one.

    >>> DictTensor({"frame": torch.zeros(2, 4), "done": torch.zeros(2, dtype=torch.bool)})
    DictTensor on cpu:
      frame  float32 [2, 4]
      done   bool [2]
    """

    _leading = 1
    _axes = "[B, ...]"
    _temporal: ClassVar[type[TemporalDictTensor]]  # set by rlstruct.core.temporal, which builds on this module

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Copy and validate the mapping."""
        cls = type(self)
        self._tensors = tensors.copy() if type(tensors) is dict else as_dict(cls, tensors)  # a dict, nearly always
        validate(cls, self._tensors)

    @classmethod
    def unchecked(cls, tensors: dict[str, Tensor]) -> Self:
        """Wrap a dict without copying or checking it, for code that makes many structures from checked tensors.

        Args:
            tensors: names to tensors with the same B on one device; the structure keeps this very dict.  each [B, ...]

        Returns:
            A structure around the dict.
        """
        made = cls.__new__(cls)
        made._tensors = tensors
        return made

    _trusted = unchecked  # until the engine and the algorithms use the public name

    def _like(self, tensors: dict[str, Tensor]) -> Self:
        return type(self).unchecked(tensors)

    def _checked_like(self, tensors: dict[str, Tensor]) -> Self:
        validate(type(self), tensors)
        return type(self).unchecked(tensors)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return type(self).unchecked({key: fn(v) for key, v in self._tensors.items()})

    def minibatches(self, n: int, generator: torch.Generator | None = None) -> Iterator[Self]:
        """Shuffle the rows and split them, for one epoch of updates.

        Args:
            n: how many minibatches; their sizes differ by at most one row.
            generator: where the randomness comes from; None for torch's global one of the structure's device. One on
                the CPU draws the same rows on every device, but makes a device wait for the copy.

        Returns:
            An iterator over n structures in new memory, every row in exactly one of them.  each [B / n, ...]

        Raises:
            ValueError: n is less than 1 or more than B.
        """
        if not 1 <= n <= self.n_elems():
            raise BadValueError(
                f"{type(self).__name__}.minibatches: got n = {n}, expected 1 to {self.n_elems()} = B rows."
            )
        return (self.index(rows) for rows in self._shuffled(generator).tensor_split(n))

    @classmethod
    def _joined(cls, parts: Sequence[Self]) -> Self:
        return cls.unchecked(join("DictTensor.cat", parts, torch.cat, 0, first_axis=1) if parts else {})

    @staticmethod
    def stack(parts: Sequence[DictTensor], lengths: Tensor | None = None) -> TemporalDictTensor:
        """Join the steps of one batch along a new time axis, into new memory.

        Args:
            parts: T structures with the same keys, dtypes and shapes.  [B, ...]
            lengths: how many steps of each row are real.  [B] int64; None for all T

        Returns:
            ``result[key][b, t]`` is ``parts[t][key][b]``.  [B, T, ...]

        Raises:
            KeyError: the keys differ.
            ShapeMismatchError: dtypes or shapes differ, or lengths do not fit.
            DeviceMismatchError: the devices differ.
        """
        tensors = join("DictTensor.stack", parts, torch.stack, 1, first_axis=0) if parts else {}  # [B, T, ...]
        return DictTensor._temporal._with_lengths(tensors, lengths)
