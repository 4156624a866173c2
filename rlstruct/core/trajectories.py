"""Trajectories: what a batcher hands over, one info row and T steps for each environment. Layer 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlstruct.core._named import Index
from rlstruct.core._staging import mover
from rlstruct.core.dict_tensor import DictTensor
from rlstruct.core.temporal import TemporalDictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError


class Trajectories:
    """B trajectories of up to T steps.

    Keys of ``trajectories``: ``observation/<k>`` what the agent saw at t, ``action/<k>`` everything it returned,
    ``_observation/<k>`` what the environment answered at t + 1, before any reset. Keys of ``info``:
    ``agent_info/<k>``, ``env_info/<k>``, ``agent_state/<k>`` at the first step, ``policy_version``, ``environment``,
    ``env_seed``, ``step``.

    Args:
        info: what holds for a whole trajectory.  [B], or empty
        trajectories: the steps.  [B, T]

    Attributes:
        info: as given.  [B]
        trajectories: as given.  [B, T]

    Raises:
        TypeError: an argument is of another class.
        ShapeMismatchError: the two have different B.
        DeviceMismatchError: the two are on different devices.
    """

    __slots__ = ("__weakref__", "info", "trajectories")
    info: DictTensor
    trajectories: TemporalDictTensor

    def __init__(self, info: DictTensor, trajectories: TemporalDictTensor) -> None:
        """Check that both parts have the same rows and device."""
        if not isinstance(info, DictTensor) or not isinstance(trajectories, TemporalDictTensor):
            raise TypeError(
                f"Trajectories: got ({type(info).__name__}, {type(trajectories).__name__}), "
                "expected (DictTensor, TemporalDictTensor)."
            )
        if not info.empty() and info.n_elems() != trajectories.n_elems():
            raise ShapeMismatchError(
                f"Trajectories: info has {info.n_elems()} rows, expected {trajectories.n_elems()} "
                "(B of the trajectories). Give one info row for each trajectory, or an empty DictTensor."
            )
        if None not in (info.device, trajectories.device) and info.device != trajectories.device:
            raise DeviceMismatchError(
                f"Trajectories: info is on {info.device}, expected {trajectories.device} (the device of the "
                f"trajectories). Move it with .to({str(trajectories.device)!r})."
            )
        self.info = info
        self.trajectories = trajectories

    @classmethod
    def _trusted(cls, info: DictTensor, trajectories: TemporalDictTensor) -> Trajectories:
        made = cls.__new__(cls)
        made.info = info
        made.trajectories = trajectories
        return made

    @property
    def device(self) -> torch.device | None:
        """The device of both parts; None if there is no key."""
        return self.trajectories.device or self.info.device

    @property
    def lengths(self) -> Tensor:
        """Number of real steps of each row.  [B] int64."""
        return self.trajectories.lengths

    def n_elems(self) -> int:
        """Return B, the number of trajectories."""
        return self.trajectories.n_elems()

    def mask(self) -> Tensor:
        """Return which steps are real.  [B, T] bool."""
        return self.trajectories.mask()

    def to(self, device: DeviceLike, non_blocking: bool = False) -> Trajectories:
        """Move both parts; see `DictTensor.to`. From ordinary CPU memory to CUDA they travel in one copy.

        Args:
            device: the destination, a word or a torch.device.
            non_blocking: do not wait for copies between pinned CPU memory and a device.

        Returns:
            New trajectories on that device.  [B, T]

        Raises:
            ValueError: the device does not exist on this machine.
        """
        if device == self.device:
            return self._trusted(self.info.to(device), self.trajectories.to(device))
        move = mover([*self.info._all(), *self.trajectories._all()], resolve_device(device), non_blocking)
        return self._trusted(self.info._each(move), self.trajectories._each(move))

    def detach(self) -> Trajectories:
        """Return the same values, cut off from the autograd graph. The memory is shared."""
        return self._trusted(self.info.detach(), self.trajectories.detach())

    def clone(self) -> Trajectories:
        """Copy every tensor into memory of its own."""
        return self._trusted(self.info.clone(), self.trajectories.clone())

    def index(self, index: Index) -> Trajectories:
        """Gather trajectories into new memory; see `DictTensor.index`.

        Args:
            index: row numbers from 0 to B - 1.  [K] int64 on the same device, or a list of ints

        Returns:
            The chosen rows.  [K, T]

        Raises:
            ShapeMismatchError: the index is not one-dimensional or not int64.
            DeviceMismatchError: the index is on another device.
            IndexError: a row number is out of range.
        """
        return self._trusted(self.info.index(index), self.trajectories.index(index))

    def slice(self, start: int, stop: int | None = None) -> Trajectories:
        """Take neighbouring trajectories, sharing the memory; see `DictTensor.slice`.

        Args:
            start: first row; negative counts from the end.
            stop: one after the last row. None takes the one row ``start``.

        Returns:
            The rows; the batch axis always stays.  [stop - start, T] or [1, T]

        Raises:
            IndexError: ``stop`` is None and there is no row ``start``.
        """
        return self._trusted(self.info.slice(start, stop), self.trajectories.slice(start, stop))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Trajectories:
        """Draw rows without replacement.

        Args:
            n: how many, at most B.
            generator: where the randomness comes from; None for torch's global one of the structure's device. One on
                the CPU draws the same rows on every device.

        Returns:
            The rows in the order drawn, in new memory.  [n, T]

        Raises:
            ValueError: n is negative or larger than B.
        """
        if not 0 <= n <= self.n_elems():
            raise ValueError(f"Trajectories.sample: got n = {n}, expected 0 to {self.n_elems()} = B rows.")
        here = self.lengths.device
        source = here if generator is None else generator.device
        rows = torch.randperm(self.n_elems(), generator=generator, device=source)[:n]
        return self.index(rows.to(here))

    @classmethod
    def cat(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """Join trajectories along the batch axis, into new memory; shorter ones are padded with zeros.

        Args:
            parts: with the same keys, dtypes and trailing shapes.  [B_i, T_i]

        Returns:
            All rows in order.  [sum of B_i, max of T_i]

        Raises:
            KeyError: the keys differ.
            ShapeMismatchError: dtypes or trailing shapes differ.
            DeviceMismatchError: the devices differ.
        """
        info = DictTensor.cat([part.info for part in parts])
        return cls._trusted(info, TemporalDictTensor.cat([part.trajectories for part in parts]))

    def transitions(self) -> DictTensor:
        """Return all real steps in one flat batch, row by row, each with the info of its trajectory.

        Returns:
            The keys of the trajectories and, repeated for each step, those of info, in new memory.
            [N, ...], N the sum of the lengths

        Raises:
            KeyError: a key is in both parts.
        """
        rows, steps = self.mask().nonzero(as_tuple=True)  # sync: N is a shape, once per call
        flat = DictTensor._trusted({key: v[rows, steps] for key, v in self.trajectories.items()})
        return flat + self.info.index(rows)

    def __repr__(self) -> str:
        """Show both parts; never a value."""
        return f"Trajectories(info={self.info!r}, trajectories={self.trajectories!r})"
