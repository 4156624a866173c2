"""DictTensor, named tensors [B, ...], and TemporalDictTensor, named tensors [B, T, ...] with a length per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlstruct.core.layout import Layout, as_dict, check_indices, expect, validate
from rlstruct.core.named_tensors import NamedTensors, join
from rlstruct.errors import BadIndexError, BadTypeError, BadValueError, ShapeMismatchError, kind_of

if TYPE_CHECKING:
    from typing_extensions import Self

_LENGTHS, _STEP = Layout({"lengths": ((), torch.int64)}), Layout({"t": ((), torch.int64)})


class DictTensor(NamedTensors):
    """Mapping of names to tensors that share the batch axis B and one device.

    The constructor copies and checks the dict, but does not copy the tensors. Afterwards only `set` changes a
    structure; every other method returns a new one. A ``/`` in a key stands for nesting, see `truncate_key`.

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

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        cls = type(self)
        self._tensors = tensors.copy() if type(tensors) is dict else as_dict(cls, tensors)  # a dict, nearly always
        validate(cls, 1, self._tensors)

    @classmethod
    def unchecked(cls, tensors: dict[str, Tensor]) -> Self:
        """Wrap a dict without copying or checking it, for code that creates many structures from checked tensors."""
        made = cls.__new__(cls)
        made._tensors = tensors
        return made

    def _like(self, tensors: dict[str, Tensor], checked: bool = False) -> Self:
        if checked:
            validate(type(self), 1, tensors)
        return type(self).unchecked(tensors)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return type(self).unchecked({key: fn(v) for key, v in self._tensors.items()})

    def minibatches(self, n: int, generator: torch.Generator | None = None) -> Iterator[Self]:
        """Shuffle the rows and split them, for one epoch of updates.

        Args:
            n: number of minibatches; their sizes differ by at most one row.
            generator: source of randomness; None for torch's global generator of the structure's device. A generator
                on the CPU shuffles the same way on every device, but makes a device wait for the copy.

        Returns:
            An iterator over n structures in new memory; each row is in exactly one of them.  each [B / n, ...]

        Raises:
            ValueError: n is less than 1 or more than B.
        """
        if not 1 <= n <= self.n_elems():
            raise BadValueError(
                f"{type(self).__name__}.minibatches: got n = {n}, expected 1 to {self.n_elems()} = B rows."
            )
        return (self.index(rows) for rows in self._shuffled(generator).tensor_split(n))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join structures along the batch axis, into new memory.

        Args:
            parts: at least one, with the same keys, dtypes and trailing shapes.  [B_i, ...]

        Returns:
            All rows in order, and keys in the order of the first part.  [sum of B_i, ...]

        Raises:
            KeyError: the keys differ.
            ShapeMismatchError: dtypes or trailing shapes differ; nothing is converted silently.
            DeviceMismatchError: the devices differ.
        """
        return cls.unchecked(join("DictTensor.cat", parts, torch.cat, 0, drop=1) if parts else {})

    @staticmethod
    def stack(parts: Sequence[DictTensor], lengths: Tensor | None = None) -> TemporalDictTensor:
        """Join the steps of one batch along a new time axis, into new memory.

        Args:
            parts: T structures with the same keys, dtypes and shapes.  [B, ...]
            lengths: number of real steps of each row.  [B] int64; None for all T

        Returns:
            ``result[key][b, t]`` is ``parts[t][key][b]``.  [B, T, ...]

        Raises:
            KeyError: the keys differ.
            ShapeMismatchError: dtypes or shapes differ, or lengths do not fit.
            DeviceMismatchError: the devices differ.
        """
        tensors = join("DictTensor.stack", parts, torch.stack, 1, drop=0) if parts else {}  # [B, T, ...]
        return TemporalDictTensor(tensors, lengths)


class TemporalDictTensor(NamedTensors):
    """Mapping of names to tensors that share batch axis B, time axis T and one device; row b has lengths[b] real steps.

    The dict is copied and checked as in DictTensor. The range of lengths, 0 to T, is checked only on the CPU, because
    on other devices the host would have to wait. A structure without keys still has the rows of its lengths, and T = 0.

    Args:
        tensors: names to tensors.  each [B, T, ...], any dtype, one device; None for none
        lengths: number of real steps of each row; the rest is padding.  [B] int64, same device; None for all T

    Raises:
        TypeError: a key is not a string, or a value not a tensor.
        ShapeMismatchError: a tensor lacks an axis, has another B or T than the first one, or lengths do not fit.
        DeviceMismatchError: a tensor or the lengths are on another device than the first tensor.

    >>> TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1])).mask()
    tensor([[ True,  True,  True],
            [ True, False, False]])
    """

    _leading = 2
    lengths: Tensor

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, lengths: Tensor | None = None) -> None:
        self._tensors = as_dict(type(self), tensors)
        validate(type(self), 2, self._tensors)
        if lengths is None:
            first = self._first(torch.empty(0, 0, device="cpu"))
            lengths = torch.full(first.shape[:1], first.shape[1], dtype=torch.int64, device=first.device)
        else:
            self._check_lengths(lengths)
        self.lengths = lengths

    @classmethod
    def unchecked(cls, tensors: dict[str, Tensor], lengths: Tensor) -> Self:
        """Wrap a dict of [B, T, ...] and lengths [B] without copying or checking them; see `DictTensor.unchecked`."""
        made = cls.__new__(cls)
        made._tensors = tensors
        made.lengths = lengths
        return made

    def _like(self, tensors: dict[str, Tensor], checked: bool = False) -> Self:
        if not checked:
            return type(self).unchecked(tensors, self.lengths)
        return type(self)(tensors, self.lengths if self._tensors or self.lengths.shape[0] else None)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return type(self).unchecked({key: fn(v) for key, v in self._tensors.items()}, fn(self.lengths))

    def _first(self, default: Tensor) -> Tensor:
        for tensor in self._tensors.values():  # torch 2.7 cannot compile next(…, default)
            return tensor
        return default

    def _check_lengths(self, lengths: Tensor) -> None:
        where = f"{type(self).__name__}:"
        if not isinstance(lengths, Tensor):
            raise BadTypeError(f"{where} lengths is {kind_of(lengths)}, expected a tensor [B] of torch.int64.")
        first = self._first(lengths)
        B = first.shape[0] if first.dim() else 0
        fix = "Give one length for each row, on the device of the tensors."
        expect(where, {"lengths": lengths}, _LENGTHS, device=first.device, rows=B, fix=fix)
        # Check values only where reading them is cheap: not on a device, not while torch traces.
        if not self._tensors or type(lengths) is not Tensor or not lengths.is_cpu or torch.compiler.is_compiling():
            return
        values, T = lengths.numpy(), self.n_steps()  # sync: a view of CPU memory
        wrong = (values < 0) | (values > T)
        if wrong.any():
            row = int(wrong.argmax())
            raise ShapeMismatchError(
                f"{where} lengths[{row}] is {values[row]}, expected 0 to {T} = T. "
                "Lengths count the real steps of each row; what follows is padding."
            )

    def n_elems(self) -> int:
        """Return B, the number of rows."""
        return self.lengths.shape[0]

    def n_steps(self) -> int:
        """Return T, the number of steps including padding; 0 if there is no key."""
        for tensor in self._tensors.values():
            return tensor.shape[1]
        return 0

    def mask(self) -> Tensor:
        """Return a mask that is True at real steps.  [B, T] bool, on the device of the structure."""
        steps = torch.arange(self.n_steps(), device=self.lengths.device)
        return steps < self.lengths.unsqueeze(1)  # [B, T]

    def full(self) -> bool:
        """Return True if there is no padding: every row has T real steps."""
        return bool((self.lengths == self.n_steps()).all())  # sync: the answer is a Python bool, once per call

    def shorten(self) -> Self:
        """Remove padding that no row needs, so that T becomes the longest length. The memory is shared."""
        n_steps = int(self.lengths.max()) if self.n_elems() else 0  # sync: the new T is a shape, once per call
        return self._like({key: v[:, :n_steps] for key, v in self._tensors.items()})

    def temporal_slice(self, start: int, stop: int) -> Self:
        """Return steps start to stop - 1 of every row, clipped to T as in Python; lengths count steps in this range.

        The memory is shared.  [B, stop - start, ...]
        """
        n = self.n_steps()
        start, stop = [max(0, t + n) if t < 0 else min(t, n) for t in (start, stop)]
        stop = max(start, stop)
        lengths = (self.lengths - start).clamp(0, stop - start)
        return type(self).unchecked({key: v[:, start:stop] for key, v in self._tensors.items()}, lengths)

    def temporal_index(self, t: int) -> DictTensor:
        """Return step t of every row, even padding; negative t counts from the end. The memory is shared.  [B, ...].

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
        """Gather one step of each row into new memory.

        Args:
            t: a step from 0 to T - 1 for each row.  [B] int64, same device

        Returns:
            ``result[key][b]`` is ``self[key][b, t[b]]``.  [B, ...]

        Raises:
            ShapeMismatchError: t is not [B] int64.
            DeviceMismatchError: t is on another device.
            IndexError: a step is out of range (on CUDA: a device-side failure, as everywhere in torch).
        """
        where, device = f"{type(self).__name__}.temporal_multi_index:", self.lengths.device
        expect(where, {"t": t}, _STEP, device=device, rows=self.n_elems(), fix="Give one step for each row.")
        check_indices(f"{where} t", t, self.n_steps(), f"{[*self._tensors, 't'][0]!r} has T")
        rows = torch.arange(t.shape[0], device=t.device)
        return DictTensor.unchecked({key: v[rows, t] for key, v in self._tensors.items()})

    def masked_temporal_index(self, t: int) -> tuple[DictTensor, Tensor]:
        """Return step t, from 0 to T - 1, of the rows where it is real.

        Returns:
            ``(step, rows)``: the step of the K rows with lengths > t, and their row numbers.  [K, ...], [K] int64

        Raises:
            IndexError: there is no such step.
        """
        if t < 0:
            raise BadIndexError(
                f"{type(self).__name__}.masked_temporal_index: got step {t}, expected 0 to {self.n_steps() - 1}. "
                "Rows have different last steps: temporal_multi_index(lengths - 1) returns them."
            )
        step = self.temporal_index(t)
        rows = (self.lengths > t).nonzero().squeeze(1)  # sync: K is a shape, once per call
        return step.index(rows), rows

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join structures along the batch axis, padding shorter ones with zeros along time; see `DictTensor.cat`."""
        if not parts:
            return cls()
        n_steps = max(part.n_steps() for part in parts)

        def pad(v: Tensor) -> Tensor:
            missing = n_steps - v.shape[1]
            return torch.cat([v, v.new_zeros(v.shape[0], missing, *v.shape[2:])], dim=1) if missing else v

        def cat_padded(column: tuple[Tensor, ...], axis: int) -> Tensor:
            return torch.cat([*map(pad, column)], axis)

        for i, part in enumerate(parts if parts[0].empty() else ()):  # join checks no device then
            lengths = {"lengths": part.lengths}
            expect(f"TemporalDictTensor.cat: part {i}: tensor", lengths, device=parts[0].lengths.device)
        tensors = join("TemporalDictTensor.cat", parts, cat_padded, 0, drop=2)
        return cls.unchecked(tensors, torch.cat([part.lengths for part in parts]))
