"""TemporalDictTensor: names to tensors [B, T, ...] on one device, with the real length of each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlstruct.core._checks import as_dict, validate
from rlstruct.core._join import join
from rlstruct.core._named import NamedTensors
from rlstruct.core.dict_tensor import DictTensor
from rlstruct.errors import BadIndexError, BadTypeError, DeviceMismatchError, ShapeMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self


class TemporalDictTensor(NamedTensors):
    """Names to tensors that share the batch axis B, the time axis T and one device; row b is real up to lengths[b].

    Copied and checked as a DictTensor. The values of the lengths, 0 to T, are checked on the CPU only: elsewhere that
    would wait for the device, and is the caller's promise. A structure without keys still has the rows of its lengths,
    and no step.

    Args:
        tensors: names to tensors.  each [B, T, ...], any dtype, one device; None for none
        lengths: number of real steps of each row, the rest is padding.  [B] int64, same device; None for all T

    Raises:
        TypeError: a key is not a string, or a value not a tensor.
        ShapeMismatchError: a tensor lacks an axis, has another B or T than the first one, or lengths do not fit.
        DeviceMismatchError: a tensor or the lengths are on another device than the first tensor.

    >>> TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1])).mask()
    tensor([[ True,  True,  True],
            [ True, False, False]])
    """

    _leading = 2
    _axes = "[B, T, ...]"
    lengths: Tensor

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, lengths: Tensor | None = None) -> None:
        """Copy and validate the mapping and the lengths."""
        self._tensors = as_dict(type(self), tensors)
        validate(type(self), self._tensors)
        self.lengths = self._full_lengths() if lengths is None else self._fitting(lengths)

    @classmethod
    def unchecked(cls, tensors: dict[str, Tensor], lengths: Tensor) -> Self:
        """Wrap a dict and lengths without copying or checking them; see `DictTensor.unchecked`.

        Args:
            tensors: names to tensors with the same B and T on one device.  each [B, T, ...]
            lengths: number of real steps of each row.  [B] int64, same device

        Returns:
            A structure around the dict.
        """
        made = cls.__new__(cls)
        made._tensors = tensors
        made.lengths = lengths
        return made

    _trusted = unchecked  # until the engine and the algorithms use the public name

    @classmethod
    def _with_lengths(cls, tensors: dict[str, Tensor], lengths: Tensor | None) -> Self:
        """Wrap valid tensors and check the lengths only."""
        made = cls.__new__(cls)
        made._tensors = tensors
        made.lengths = made._full_lengths() if lengths is None else made._fitting(lengths)
        return made

    def _like(self, tensors: dict[str, Tensor]) -> Self:
        return type(self).unchecked(tensors, self.lengths)

    def _checked_like(self, tensors: dict[str, Tensor]) -> Self:
        return type(self)(tensors, self.lengths if self._tensors or self.lengths.shape[0] else None)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return type(self).unchecked({key: fn(v) for key, v in self._tensors.items()}, fn(self.lengths))

    def _all(self) -> list[Tensor]:
        return [*self._tensors.values(), self.lengths]

    def _home(self) -> torch.device:
        return self.lengths.device

    def _full_lengths(self) -> Tensor:
        for tensor in self._tensors.values():
            shape = tensor.shape
            return torch.full((shape[0],), shape[1], dtype=torch.int64, device=tensor.device)
        return torch.zeros(0, dtype=torch.int64, device="cpu")

    def _fitting(self, lengths: Tensor) -> Tensor:
        where = type(self).__name__
        if not isinstance(lengths, Tensor):
            raise BadTypeError(f"{where}: lengths is a {type(lengths).__name__}, expected a tensor [B] of torch.int64.")
        if lengths.dtype is not torch.int64 or lengths.dim() != 1:
            raise ShapeMismatchError(
                f"{where}: lengths is {lengths.dtype} {list(lengths.shape)}, expected torch.int64 [B]."
            )
        for key, tensor in self._tensors.items():
            if lengths.shape[0] != tensor.shape[0]:
                raise ShapeMismatchError(
                    f"{where}: lengths has shape {list(lengths.shape)}, expected [{tensor.shape[0]}] "
                    f"(B of {key!r}). Give one length for each row."
                )
            if lengths.device != tensor.device:
                raise DeviceMismatchError(
                    f"{where}: lengths is on {lengths.device}, expected {tensor.device} (the device of {key!r}). "
                    f"Move it with .to({str(tensor.device)!r})."
                )
            # Where looking costs microseconds and no wait: not on a device, not while torch traces.
            if type(lengths) is Tensor and lengths.is_cpu and not torch.compiler.is_compiling():
                self._check_range(lengths, key, tensor.shape[1])
            break
        return lengths

    def _check_range(self, lengths: Tensor, key: str, T: int) -> None:
        values = lengths.numpy()  # sync: a view of CPU memory
        wrong = (values < 0) | (values > T)
        if wrong.any():
            row = int(wrong.argmax())
            raise ShapeMismatchError(
                f"{type(self).__name__}: lengths[{row}] is {values[row]}, expected 0 to {T} (T of {key!r}). "
                "Lengths count the real steps of each row; what follows is padding."
            )

    def n_elems(self) -> int:
        """Return B, the number of rows."""
        return self.lengths.shape[0]

    def n_steps(self) -> int:
        """Return T, the number of steps with padding; 0 if there is no key."""
        for tensor in self._tensors.values():
            return tensor.shape[1]
        return 0

    def mask(self) -> Tensor:
        """Return which steps are real.  [B, T] bool, on the device of the structure."""
        steps = torch.arange(self.n_steps(), device=self.lengths.device)
        return steps < self.lengths.unsqueeze(1)  # [B, T]

    def full(self) -> bool:
        """Return whether every row has T real steps, so that there is no padding."""
        return bool((self.lengths == self.n_steps()).all())  # sync: the answer is a Python bool, once per call

    def shorten(self) -> Self:
        """Cut the padding that no row needs: T becomes the longest length. The memory is shared."""
        if self.n_elems() == 0:
            return self._until(0)
        return self._until(int(self.lengths.max()))  # sync: the new T is a shape, once per call

    def temporal_slice(self, start: int, stop: int) -> Self:
        """Take neighbouring steps of every row. The memory is shared.

        Args:
            start: first step; negative counts from the end.
            stop: one after the last step, cut to T as in Python.

        Returns:
            Steps start to stop - 1, with the lengths counted inside of them.  [B, stop - start, ...]
        """
        n = self.n_steps()
        start, stop = [max(0, t + n) if t < 0 else min(t, n) for t in (start, stop)]
        stop = max(start, stop)
        lengths = (self.lengths - start).clamp(0, stop - start)
        return type(self).unchecked({key: v[:, start:stop] for key, v in self._tensors.items()}, lengths)

    def temporal_index(self, t: int) -> DictTensor:
        """Take one step of every row, padding or not. The memory is shared.

        Args:
            t: the step; negative counts from the end.

        Returns:
            ``result[key][b]`` is ``self[key][b, t]``.  [B, ...]

        Raises:
            IndexError: there is no such step.
        """
        n = self.n_steps()
        if self._tensors and not -n <= t < n:
            raise BadIndexError(
                f"{type(self).__name__}.temporal_index: got step {t}, expected {-n} to {n - 1}, T = {n}."
            )
        return DictTensor.unchecked({key: v.select(1, t) for key, v in self._tensors.items()})

    def temporal_multi_index(self, t: Tensor) -> DictTensor:
        """Take one step of each row, into new memory.

        Args:
            t: a step from 0 to T - 1 for each row.  [B] int64, same device

        Returns:
            ``result[key][b]`` is ``self[key][b, t[b]]``.  [B, ...]

        Raises:
            ShapeMismatchError: t is not [B] int64.
            DeviceMismatchError: t is on another device.
            IndexError: a step is out of range (on CUDA: a device-side failure, as everywhere in torch).
        """
        where = f"{type(self).__name__}.temporal_multi_index"
        if t.dtype is not torch.int64 or t.shape != self.lengths.shape:
            raise ShapeMismatchError(
                f"{where}: t is {t.dtype} {list(t.shape)}, expected torch.int64 [{self.n_elems()}]: one step per row."
            )
        if t.device != self.lengths.device:
            raise DeviceMismatchError(
                f"{where}: t is on {t.device}, expected {self.lengths.device} (the device of the structure). "
                f"Move it with .to({str(self.lengths.device)!r})."
            )
        rows = torch.arange(t.shape[0], device=t.device)
        return DictTensor.unchecked({key: v[rows, t] for key, v in self._tensors.items()})

    def masked_temporal_index(self, t: int) -> tuple[DictTensor, Tensor]:
        """Take step t of the rows where it is real.

        Args:
            t: the step, from 0 to T - 1.

        Returns:
            ``(step, rows)``: the step of the K rows with lengths > t, and their row numbers.  [K, ...], [K] int64

        Raises:
            IndexError: there is no such step.
        """
        step = self.temporal_index(t)
        rows = (self.lengths > t).nonzero().squeeze(1)  # sync: K is a shape, once per call
        return step.index(rows), rows

    @classmethod
    def _joined(cls, parts: Sequence[Self]) -> Self:
        if not parts:
            return cls()
        n_steps = max(part.n_steps() for part in parts)

        def cat_padded(column: tuple[Tensor, ...], axis: int) -> Tensor:
            return torch.cat([_pad(v, n_steps) for v in column], axis)

        tensors = join("TemporalDictTensor.cat", parts, cat_padded, 0, first_axis=2)
        return cls.unchecked(tensors, torch.cat([part.lengths for part in parts]))

    def _until(self, n_steps: int) -> Self:
        return self._like({key: v[:, :n_steps] for key, v in self._tensors.items()})


def _pad(tensor: Tensor, n_steps: int) -> Tensor:
    missing = n_steps - tensor.shape[1]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)


DictTensor._temporal = TemporalDictTensor
