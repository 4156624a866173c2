"""A dict of tensors that a step may write its results over."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils import _pytree as pytree

from rlstruct.core.pytree import Form


class Donated(dict[str, Tensor]):
    """A dict whose tensors a step may write results over. Its entries must stay the same tensors."""

    @cached_property
    def uses(self) -> WeakKeyDictionary[object, Any]:
        """Views that each compiled step keeps for its next call, as long as that step exists."""
        return WeakKeyDictionary()

    @cached_property
    def form(self) -> Form:
        """Keys, shapes and dtypes."""
        return Form(dict(self))


def is_donated(args: tuple[Any, ...]) -> bool:
    """Return True if the last argument of a step is such a dict."""
    return bool(args) and isinstance(args[-1], Donated)


def _rebuild(tensors: Iterable[Any], keys: list[str]) -> Donated:
    return Donated(zip(keys, tensors, strict=True))


# Copies of pytrees copy its tensors, too.
pytree.register_pytree_node(Donated, lambda memory: ([*memory.values()], [*memory]), _rebuild)
