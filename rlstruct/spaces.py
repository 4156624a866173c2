"""Gymnasium spaces as named tensors. Only this module walks through nested spaces.

`import rlstruct` does not import this module, because it imports gymnasium.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.errors import BadTypeError, BadValueError, ShapeMismatchError, kind_of

Space: TypeAlias = spaces.Space[Any]
Element: TypeAlias = Any
"""An element of a space, or a batch of them; only the space knows its type."""

Bounds: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Smallest and largest value of keys that hold integers: a number for all entries, or nested lists like the shape."""

ROUNDING = 1e-5
"""Relative excess over a bound that may come from rounding: frames and actions are often float32, bounds float64."""
NO_KERNELS = (torch.uint16, torch.uint32, torch.uint64)  # torch can neither clamp nor compare these
_PLAIN = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One plain space inside a nested one, which becomes one tensor.

    Attributes:
        key: name of its tensor, such as ``frame/inventory/count``.
        path: keys and indices that lead to it in an element of the nested space; empty if the space is plain.
        space: Box, Discrete, MultiDiscrete or MultiBinary.
        shape: shape of one element, without the batch axis.
        dtype: numpy dtype of the space.
        torch_dtype: the equivalent torch dtype.
    """

    key: str
    path: tuple[Any, ...]
    space: Space
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    torch_dtype: torch.dtype

    def get(self, element: Element) -> Element:
        """Return this leaf's entry of an element (or batch of elements) of the nested space."""
        value = element
        try:
            for name in self.path:
                value = value[name]
        except (KeyError, IndexError, TypeError) as error:
            raise ShapeMismatchError(
                f"{self.key}: the environment gave {kind_of(value)} without the entry {name!r} that its "
                f"space declares. Return every entry, or leave it out of the space."
            ) from error
        return value

    def bounds(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the smallest and the largest value, inclusive: each of ``shape``, or one number for all entries."""
        space = self.space
        if isinstance(space, spaces.Box):
            return space.low, space.high
        if isinstance(space, spaces.Discrete):
            return np.asarray(space.start), np.asarray(space.start + (space.n - 1))
        if isinstance(space, spaces.MultiDiscrete):
            return space.start, space.start + (space.nvec - 1)
        return np.zeros((), np.int8), np.ones((), np.int8)


def leaves(space: Space, key: str, *, where: str = "spaces") -> dict[str, Leaf]:
    """Flatten a space into the keys of a DictTensor.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them, nested as deep as you like.
        key: name of the tensor of a plain space, and first part of the names of a nested one: ``frame``,
            ``frame/<key>``, ``frame/<key>/<key>``, and ``frame/0`` in tuples.
        where: start of error messages.

    Returns:
        Leaves by key, in the space's own order.

    Raises:
        TypeError: not a space, or some part of it has no fixed shape (Text, Graph, Sequence, …), is empty, or has
            a dtype that torch lacks; the message names its key.
        ValueError: two parts get the same key.

    >>> list(leaves(spaces.Tuple([spaces.Discrete(2), spaces.Dict(x=spaces.Discrete(3))]), "frame"))
    ['frame/0', 'frame/1/x']
    """
    by_key: dict[str, Leaf] = {}
    for leaf in _walk(space, key, (), where):
        if leaf.key in by_key:
            raise BadValueError(
                f"{where}: two parts of the space are both called {leaf.key!r}. Rename one: '/' separates the levels."
            )
        by_key[leaf.key] = leaf
    return by_key


def integer_bounds(space: Space, key: str) -> Bounds:
    """Return the smallest and the largest value of each key of a space that holds integers, see `leaves`.

    >>> integer_bounds(spaces.Dict(x=spaces.Discrete(3), y=spaces.MultiDiscrete([2, 4])), "frame")
    {'frame/x': (0, 2), 'frame/y': (0, [1, 3])}
    """
    bounds = {name: leaf.bounds() for name, leaf in leaves(space, key).items() if leaf.dtype.kind in "iu"}
    return {name: (_plain_bound(low), _plain_bound(high)) for name, (low, high) in bounds.items()}


def _plain_bound(bound: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401 - a number, or nested lists
    """Return one number if all entries are equal, which keeps the bounds of images short."""
    equal = bound.size and (bound == bound.flat[0]).all()
    return (bound.flat[0] if equal else bound).tolist()  # sync: none, it is numpy's


def nest(space: Space, values: Mapping[str, Element], key: str) -> Element:
    """Build an element (or batch of elements) of a space from the values of its leaves.

    Returns:
        The same values in dicts and tuples, nested like the space.
    """
    if isinstance(space, spaces.Dict):
        return {name: nest(child, values, f"{key}/{name}") for name, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(nest(child, values, f"{key}/{name}") for name, child in enumerate(space.spaces))
    return values[key]


def as_tensor(values: Element) -> Tensor:
    """Return a tensor, or a copy of an array, list or number as one on the CPU.

    torch itself takes no array with negative strides, and warns about read-only ones.
    """
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


@dataclass(frozen=True, slots=True)
class ActionIndices:
    """Conversion between elements of a space of integers and the indices of choices, which always begin with 0.

    A network with n outputs chooses among the indices 0 to n - 1. An element of a Discrete space stands for one such
    choice, [B]; an element of a MultiDiscrete or MultiBinary space with K entries stands for K of them, [B, K].

    Attributes:
        sizes: number of options of each choice; one number for a Discrete space.
        start: the element's number for index 0, for each choice.
        shape: shape of an element.
        dtype: torch dtype of an element.
        single: True for a Discrete space.
    """

    sizes: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    single: bool

    @classmethod
    def of(cls, space: Space) -> ActionIndices | None:
        """Return the indices of a Discrete, MultiDiscrete or MultiBinary space; None for every other space."""
        if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            return None
        leaf = leaves(space, "action")["action"]
        low, high = (np.broadcast_to(bound, leaf.shape).flat for bound in leaf.bounds())
        start = tuple(map(int, low))
        sizes = tuple(int(b) - a + 1 for a, b in zip(start, high, strict=True))
        return cls(sizes, start, leaf.shape, leaf.torch_dtype, isinstance(space, spaces.Discrete))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ActionIndices:
        """Return the indices that `plain` described."""
        sizes, start, shape = (tuple(map(int, plain[name])) for name in ("sizes", "start", "shape"))
        dtype = torch.from_numpy(np.empty(0, np.dtype(plain["dtype"]))).dtype
        return cls(sizes, start, shape, dtype, bool(plain["single"]))

    def plain(self) -> dict[str, Any]:
        """Return the same as plain values, for a checkpoint."""
        lists = {name: list(getattr(self, name)) for name in ("sizes", "start", "shape")}
        return {**lists, "dtype": str(self.dtype).removeprefix("torch."), "single": self.single}

    @property
    def equal(self) -> bool:
        """True if elements are their own indices."""
        flat = self.single or len(self.shape) == 1
        return flat and self.dtype == torch.int64 and not any(self.start)

    def space(self) -> Space:
        """Return the space of the indices."""
        return spaces.Discrete(self.sizes[0]) if self.single else spaces.MultiDiscrete(list(self.sizes))

    def starts(self, device: torch.device) -> Tensor:
        """Return ``start`` modulo 2^64, which `elements` and `indices` need.  [1] or [K] int64 on the device."""
        wrapped = [(number + 2**63) % 2**64 - 2**63 for number in self.start]
        return torch.tensor(wrapped, dtype=torch.int64, device=device)

    def elements(self, index: Tensor, starts: Tensor) -> Tensor:
        """Turn indices [B] or [B, K] int64 into elements, [B, *shape] in the space's dtype, in new memory."""
        return (index + starts).reshape(-1, *self.shape).to(self.dtype)

    def indices(self, element: Tensor, starts: Tensor) -> Tensor:
        """Turn elements [B, *shape] into indices, [B] or [B, K] int64."""
        size = element.shape[:1] if self.single else (len(element), len(self.start))
        return element.to(torch.int64).reshape(size) - starts


def advice_on(space: Space) -> str:
    """Return how to correct an agent whose action is outside a space."""
    if isinstance(space, spaces.Box):
        return "Look for NaN in the agent's weights, for example from too large a learning rate."
    start = np.unique(space.start) if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else np.zeros(1)
    begins = ""
    if start.any():
        first = start[0] if len(start) == 1 else "its start"
        begins = (
            f"Its actions begin with {first}: batchers add that to the indices of the bundled agents; an agent of your "
            "own adds it to the index of its network's output, or sets action_form = 'index' in its class. "
        )
    return (
        f"{begins}Give the agent's network one output per action. One beyond the last action may come from logits that "
        "are NaN or all -inf, as where a mask leaves no action: rlstruct.functional.random.categorical then returns it."
    )


class Limits:
    """Bounds of the discrete parts of a space, for actions that are used as indices, or of its Boxes.

    On CUDA an index out of range makes every later call of the process fail, without a useful message. Environments
    that compute with tensors therefore clamp their actions. Batchers store the original action and report it.

    Args:
        space: see `leaves`, also for ``key``.
        device: device of the actions.
        boxes: clamp the Boxes, and nothing else.
    """

    def __init__(self, space: Space, key: str, device: torch.device, *, boxes: bool = False) -> None:
        self._limits: dict[str, tuple[float, float] | tuple[Tensor, Tensor]] = {}
        for name, leaf in leaves(space, key).items():
            if isinstance(leaf.space, spaces.Box) != boxes or leaf.torch_dtype in NO_KERNELS:
                continue
            low, high = leaf.bounds()
            if leaf.torch_dtype == torch.bool or ((low == -np.inf).all() and (high == np.inf).all()):
                continue  # nothing to clamp
            if low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all():
                self._limits[name] = low.flat[0].item(), high.flat[0].item()  # sync: none, it is numpy's
            else:
                tensors = [torch.as_tensor(bound, dtype=leaf.torch_dtype, device=device) for bound in (low, high)]
                self._limits[name] = tensors[0], tensors[1]

    def clamp(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values [B, ...] by name; those with bounds are clamped, in new memory."""
        limits = self._limits
        return {name: value.clamp(*limits[name]) if name in limits else value for name, value in values.items()}


def zeros(space: Space, key: str, n: int, device: torch.device) -> dict[str, Tensor]:
    """Return n rows of zeros for every key of a space; see `leaves`.  each [n, ...]."""
    return {
        name: torch.zeros((n, *leaf.shape), dtype=leaf.torch_dtype, device=device)
        for name, leaf in leaves(space, key).items()
    }


def sample(space: Space, key: str, n: int, device: torch.device) -> dict[str, Tensor]:
    """Sample n elements for every key of a space with the space's own generators: seed the space, not torch.

    The tensors have the space's dtypes.  each [n, ...]
    """
    return {
        name: torch.from_numpy(np.stack([np.asarray(leaf.space.sample(), leaf.dtype) for _ in range(n)])).to(device)
        for name, leaf in leaves(space, key).items()
    }


def _walk(space: Space, key: str, path: tuple[Any, ...], where: str) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if not space.spaces:
            raise BadTypeError(f"{where}: space {key!r} is {space}, which holds nothing. Leave it out.")
        for name, child in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            yield from _walk(child, f"{key}/{name}", (*path, name), where)
        return
    if not isinstance(space, spaces.Space):
        raise BadTypeError(f"{where}: space {key!r} is {kind_of(space)}, expected a space of gymnasium.spaces.")
    if not isinstance(space, _PLAIN):
        raise BadTypeError(
            f"{where}: space {key!r} is {space}, which has no fixed shape. Only Box, Discrete, MultiDiscrete, "
            f"MultiBinary, and Dict and Tuple of them become tensors: convert or leave out this part, for example with "
            f"gymnasium.wrappers.Transform{'Action' if key.startswith('action') else 'Observation'}."
        )
    dtype = np.dtype(space.dtype)
    try:
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise BadTypeError(
            f"{where}: space {key!r} has dtype {dtype}, which torch lacks. Declare the space with another dtype."
        ) from error
    yield Leaf(key, path, space, tuple(space.shape or ()), dtype, torch_dtype)
