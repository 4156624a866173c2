"""One simulation of a search as compiled code that writes into the trees: a few kernels beside those of the network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlstruct.engine import private
from rlstruct.engine.compiled import Compiled, Tensors, told, warn_uncompiled
from rlstruct.engine.graph import layout_of
from rlstruct.engine.promise import check_equal
from rlstruct.search.tree import Tree

Grow = Callable[[Tree, Tensors], None]
"""``grow(tree, given)``: one simulation in place; ``given["path"]`` [D, B] are the slots on the way down."""

_LEAST_LEVELS = 4


class CompiledGrowth:
    """Calls ``grow`` as compiled code. Ways are filled up to 4, 8, 16, … levels: there is one piece of code for each.

    The first call of each piece compares it with ``grow`` as it is, whose results it keeps.

    Args:
        grow: a function of tensors and the weights that the model holds, whose places do not change.
    """

    def __init__(self, grow: Grow) -> None:
        """Compile nothing yet: the first calls tell the shapes."""
        self._grow = grow
        self._codes: dict[object, Compiled] = {}
        self._compiles = not private.missing("compiled")

    def __call__(self, tree: Tree, given: Tensors) -> None:
        """Simulate once.

        Raises:
            PurityError: compiled code does something else.
        """
        if not self._compiles:
            self._grow(tree, given)
            return
        given = {**given, "path": _filled(given["path"], tree)}
        tensors = tree.tensors()
        key = str(layout_of(tensors | given))
        if (code := self._codes.get(key)) is not None:
            code(tensors, given)
            return
        self._compile(key, tree, given)

    def forget(self) -> None:
        """Compile anew: other tensors stand where the model's weights were."""
        self._codes.clear()

    def _compile(self, key: object, tree: Tree, given: Tensors) -> None:
        code = Compiled(lambda tensors, given: (self._step(tree.n_nodes, tensors, given),), writes=True)
        copies = {name: tensor.clone() for name, tensor in tree.tensors().items()}
        try:
            code(copies, given)
        except Exception as error:  # whatever tracing and a compiler may say
            self._compiles = False
            warn_uncompiled("Search: a simulation", told(error), "SearchConfig(compiled=True)")
            self._grow(tree, given)
            return
        self._grow(tree, given)
        check_equal(tree.tensors(), copies)
        self._codes[key] = code

    def _step(self, n_nodes: int, tensors: Tensors, given: Tensors) -> Tensors:
        self._grow(Tree.of(n_nodes, tensors), given)
        return {"fresh": given["fresh"] + 0}  # code must return something


def _filled(path: Tensor, tree: Tree) -> Tensor:
    """Add spare slots to ways, up to a power of two."""
    levels = max(_LEAST_LEVELS, 1 << (len(path) - 1).bit_length())
    spare = tree.roots() + tree.n_nodes
    return torch.cat([path, spare.expand(levels - len(path), -1)])
