"""Simulations whose descent, backup and choice of actions are two launches of Warp kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlstruct.errors import BadValueError
from rlstruct.search.kernels import FLOATS, make_kernels
from rlstruct.search.tree import Model, Tree
from rlstruct.sims.kernels import launch, start, wp

if TYPE_CHECKING:
    from rlstruct.search.tree_search import SearchConfig

_BLOCK = 32  # threads per block, so that few games occupy many multiprocessors


class KernelSearch:
    """Simulations of one search, equal to those of `Tree.descend` and `Tree.simulate` up to rounding.

    Args:
        tree: the trees, whose roots have chosen their first actions.
        config: the settings.
        noise: Gumbel noise of the roots' actions.  [B, A] float
        n_levels: largest number of nodes of a path.

    Raises:
        BadValueError: there is no kernel for the type of the noise.
    """

    def __init__(self, tree: Tree, config: SearchConfig, noise: Tensor, n_levels: int) -> None:
        start()
        if noise.dtype not in FLOATS:
            raise BadValueError(
                f"TreeSearch: got SearchConfig(backend='warp') and logits of {noise.dtype}, expected logits of "
                f"{' or '.join(map(str, FLOATS))}. Convert them, or use backend='torch'."
            )
        trees_type, rules_type, self._descend, self._back_up = make_kernels(noise.dtype, config.method)
        B = len(noise)
        self._tree, self._device = tree, noise.device
        self._path, length = tree.action.new_empty(n_levels + 1, B), tree.action.new_empty(B)
        self._trees, self._rules = trees_type(), rules_type()
        self._trees.n_nodes = tree.n_nodes
        for name in ("edges", "children", "nodes", "action", "onward"):
            setattr(self._trees, name, wp.from_torch(getattr(tree, name)))
        self._trees.path, self._trees.length = wp.from_torch(self._path), wp.from_torch(length)
        self._rules.noise = wp.from_torch(noise.contiguous())
        for name in ("c_init", "c_base", "value_scale", "visit_offset"):
            setattr(self._rules, name, getattr(config, name))

    def simulate(self, model: Model, n_levels: int, new_node: int, considered: Tensor) -> None:
        """Simulate once, in place.

        Args:
            model: the game.
            n_levels: largest number of nodes that a path may have.
            new_node: number of the new nodes.
            considered: see `rlstruct.search.selection.considered_scores`, for the next simulation.  [B] float
        """
        B = len(considered)
        last, action, leaf = self._path.new_empty(3, B)
        launch(self._device, self._descend, B, self._trees, n_levels, new_node, last, action, leaf, block=_BLOCK)
        answer = [part.contiguous() for part in self._tree.expand(last, action, leaf, model)]
        given = self._trees, self._rules, considered, *answer
        launch(self._device, self._back_up, (n_levels + 1, B), *given, block=_BLOCK)
