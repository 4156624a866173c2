"""Trajectories: a batch with one row of info and up to T steps per environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from rlstruct.core.dict_tensor import DictTensor, TemporalDictTensor
from rlstruct.core.layout import expect
from rlstruct.core.named_tensors import Batched
from rlstruct.device import DeviceLike
from rlstruct.errors import BadTypeError, BadValueError
from rlstruct.options import writable

_FORMAT_KEY, _FORMAT = "rlstruct.Trajectories", 1


class Trajectories(Batched):
    """B trajectories of up to T steps. Batches of a batcher are read-only, because keys may share memory.

    Keys of ``steps``: ``observation/<k>``, the agent's observation at t; ``action/<k>``, everything the agent
    returned; ``_observation/<k>``, the environment's observation at t + 1, before any reset. Keys of ``info``:
    ``agent_info/<k>``, ``env_info/<k>``, ``agent_state/<k>`` at the first step, ``policy_version``, ``environment``,
    ``env_seed``, ``step``. In a batch ``observation/<k>`` and ``_observation/<k>`` are views of one tensor unless an
    environment restarted, so a write to one changes both: create new tensors, or write to a `clone`.
    `rlstruct.testing.forbid_batch_writes` finds code that writes.

    Args:
        info: values that hold for a whole trajectory.  [B], or empty
        trajectories: the steps.  [B, T]

    Attributes:
        info: the argument.  [B]
        trajectories: the argument, also as ``steps``.  [B, T]

    Raises:
        TypeError: an argument is of another class.
        ShapeMismatchError: the two have different B.
        DeviceMismatchError: the two are on different devices.
    """

    info: DictTensor
    trajectories: TemporalDictTensor

    def __init__(self, info: DictTensor, trajectories: TemporalDictTensor) -> None:
        if not isinstance(info, DictTensor) or not isinstance(trajectories, TemporalDictTensor):
            raise BadTypeError(
                f"Trajectories: got ({type(info).__name__}, {type(trajectories).__name__}), "
                "expected (DictTensor, TemporalDictTensor)."
            )
        fix = "Give one info row for each trajectory, on one device, or an empty DictTensor."
        expect("Trajectories: info", info, device=trajectories.device, rows=trajectories.n_elems(), fix=fix)
        self.info = info
        self.trajectories = trajectories

    def __iter__(self) -> NoReturn:
        """Raise TypeError: learners of version 0.3 unpacked a pair here."""
        raise BadTypeError(
            "Trajectories: got an attempt to iterate over or unpack them, expected the use of info and steps. "
            "PPOLearner.terms gets the minibatch alone since version 0.4; index(rows) selects rows."
        )

    def __getitem__(self, key: object) -> NoReturn:
        """Raise TypeError: the tensors are in `steps` and in `info`."""
        got = f"an index, {type(key).__name__}"
        use = "index(rows), slice(start, stop) or sample(n), which select rows"
        if isinstance(key, str):
            got, use = f"[{key!r}]", f"{'info' if key in self.info else 'steps'}[{key!r}]"
        raise BadTypeError(f"Trajectories: got {got}, expected {use}. steps has tensors [B, T, ...], info [B, ...].")

    def __setitem__(self, key: object, value: object) -> NoReturn:
        """Raise TypeError: `TemporalDictTensor.set` of `steps` or `DictTensor.set` of `info` adds a tensor."""
        raise BadTypeError(
            f"Trajectories: got an assignment to [{key!r}], expected a call. Write steps.set({key!r}, tensor) for a "
            f"tensor [B, T, ...], info.set({key!r}, tensor) for one [B, ...]."
        )

    @classmethod
    def unchecked(cls, info: DictTensor, trajectories: TemporalDictTensor) -> Trajectories:
        """Combine the two parts without checking that they match; see `DictTensor.unchecked`."""
        made = cls.__new__(cls)
        made.info = info
        made.trajectories = trajectories
        return made

    @property
    def steps(self) -> TemporalDictTensor:
        """The steps, ``trajectories`` in rlstructures.  [B, T]."""
        return self.trajectories

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
        """Return a mask that is True at real steps and False at padding.  [B, T] bool."""
        return self.trajectories.mask()

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Trajectories:
        return self.unchecked(self.info._each(fn), self.trajectories._each(fn))

    @classmethod
    def cat(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """Join trajectories along the batch axis, padding shorter ones; see `DictTensor.cat`."""
        info = DictTensor.cat([part.info for part in parts])
        return cls.unchecked(info, TemporalDictTensor.cat([part.trajectories for part in parts]))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Trajectories:
        """Sample rows without replacement.

        Args:
            n: number of rows, at most B.
            generator: source of randomness; None for torch's global generator of the structure's device. A generator
                on the CPU samples the same rows on every device.

        Returns:
            The rows in sampled order, in new memory.  [n, T]

        Raises:
            ValueError: n is negative or larger than B.
        """
        if not 0 <= n <= self.n_elems():
            raise BadValueError(f"Trajectories.sample: got n = {n}, expected 0 to {self.n_elems()} = B rows.")
        return self.index(self._shuffled(generator)[:n])

    def transitions(self) -> DictTensor:
        """Return all real steps in one flat batch, row by row, each with the info of its trajectory.

        The shape depends on the lengths, so this waits for the device once; `minibatches` does not.

        Returns:
            The keys of the trajectories and, repeated for each step, those of info, in new memory.
            [N, ...], N the sum of the lengths

        Raises:
            KeyError: both parts have the same key.
        """
        rows, steps = self.mask().nonzero(as_tuple=True)  # sync: N is a shape, once per call
        flat = DictTensor.unchecked({key: v[rows, steps] for key, v in self.trajectories.items()})
        return flat + self.info.index(rows)

    def minibatches(self, n: int, generator: torch.Generator | None = None) -> Iterator[DictTensor]:
        """Shuffle all steps and split them, for one epoch of updates; see `DictTensor.minibatches`.

        Shapes depend only on B, T and n, so nothing waits for the device. The minibatches contain padding, and ``mask``
        is True at real steps. If much is padding, ``transitions().minibatches(n)`` leaves it out. First add whatever
        else the loss needs, such as advantages [B, T], with ``trajectories.steps.set``.

        Args:
            n: number of minibatches; their sizes differ by at most one step.
            generator: as in `DictTensor.minibatches`.

        Returns:
            An iterator over n structures: the keys of the trajectories, those of info repeated for each step, and
            ``mask`` bool.  each [B * T / n, ...]

        Raises:
            ValueError: n is less than 1 or more than B * T.
            KeyError: both parts have the same key, or a key is named ``mask``.
        """
        T = self.trajectories.n_steps()
        flat = DictTensor.unchecked({key: v.flatten(0, 1) for key, v in self.trajectories.items()})
        rows = torch.arange(self.n_elems(), device=self.lengths.device).repeat_interleave(T)
        return (flat + self.info.index(rows) + DictTensor({"mask": self.mask().flatten()})).minibatches(n, generator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save keys, dtypes, values and lengths to a file for `load`, without the autograd graph.

        The file appears only once it is complete, and replaces an existing one. Missing folders are created.

        Raises:
            ValueError: nothing can be written there, for example because it is a folder.
        """
        path = writable("Trajectories.save", os.fspath(path), replaces=True)

        def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {key: _on_its_own(value) for key, value in tensors.items()}

        saved = {
            _FORMAT_KEY: _FORMAT,
            "info": stored(dict(self.info.items())),
            "trajectories": stored(dict(self.trajectories.items())),
            "lengths": _on_its_own(self.lengths),
        }
        unfinished = f"{os.fspath(path)}.unfinished"
        torch.save(saved, unfinished)
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: DeviceLike = "cpu", *, mmap: bool = False) -> Trajectories:
        """Load a file written by `save` onto ``device``.  [B, T].

        No code in the file is run (``torch.load`` with ``weights_only``). With ``mmap`` the tensors are read from the
        file where they are used, so a data set may be larger than memory; replace no file that is in use.

        Raises:
            ValueError: the file was not written by `save`, is damaged, or has an unknown format; or the device does
                not exist.
            FileNotFoundError: there is no such file.
        """
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except OSError:
            raise
        except Exception as error:  # torch.load fails in many ways on a damaged file
            raise BadValueError(
                f"Trajectories.load: {os.fspath(path)!r} cannot be read: it is damaged, or not a file of "
                "Trajectories.save. Save it again."
            ) from error
        version = saved.get(_FORMAT_KEY) if isinstance(saved, dict) else None
        if version != _FORMAT:
            raise BadValueError(
                f"Trajectories.load: {os.fspath(path)!r} has format {version}, expected {_FORMAT}. Save the "
                "trajectories with Trajectories.save of this version."
            )
        steps = TemporalDictTensor(saved["trajectories"], saved["lengths"])
        return cls(DictTensor(saved["info"]), steps).to(device)

    def __repr__(self) -> str:
        """Show both parts, one key per line; never a value."""
        return f"Trajectories:\ninfo: {self.info!r}\ntrajectories: {self.trajectories!r}"


def _on_its_own(tensor: Tensor) -> Tensor:
    """Copy to the CPU; of a view, copy only its own elements, since torch would save all memory behind it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
