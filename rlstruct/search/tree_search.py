"""B tree searches at once; each simulation calls the model once with B states.

A search is a pure function of states, random keys and the model's weights. Its shapes and its memory are known before
it begins. On CUDA, all of a simulation but the game and the network is two kernels of NVIDIA Warp; on the CPU,
simulations can run as compiled code that writes into the trees.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.batchers.reports import kilobytes
from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.compiled import Compiled, warn_uncompiled
from rlstruct.engine.executors import EXECUTORS
from rlstruct.engine.runner import Runner
from rlstruct.errors import BadValueError
from rlstruct.functional import random
from rlstruct.options import Options, option
from rlstruct.profiling import operation
from rlstruct.search import selection
from rlstruct.search.tree import Model, Scores, Tensors, Tree, evaluate_masked

if TYPE_CHECKING:
    from rlstruct.search.kernel_search import KernelSearch

_LEAST_LEVELS = 4

Method = Literal["puct", "gumbel", "uct"]


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Options):
    """Settings of a search.

    Attributes:
        method: ``"puct"``, as AlphaZero; ``"gumbel"``, sequential halving at the root, which learns from few
            simulations (Danihelka et al., 2022); ``"uct"``, without a prior.
        n_simulations: simulations per move. The model evaluates the root once, and one state per simulation.
        max_depth: number of moves that a search looks ahead; None for no limit. On a GPU, every simulation takes the
            time of this many levels.
        c_init: weight of the prior (PUCT), or width of the confidence bounds (UCT).
        c_base: number of visits around which the weight of the prior starts to grow (PUCT).
        dirichlet_fraction: share of noise in the root's prior (PUCT).
        dirichlet_alpha: concentration of that noise; the smaller, the fewer actions it prefers.
        n_considered: number of actions that sequential halving starts with (Gumbel).
        gumbel_scale: scale of the noise that selects them; 0 for the strongest play.
        value_scale: weight of values compared with logits (Gumbel).
        visit_offset: visits added to those of the most visited action in that weight (Gumbel).
        temperature: of sampling by visits (PUCT and UCT); 0 takes the most visited action.
        exploring_moves: number of moves of an episode over which `SearchAgent` lowers ``temperature``, or
            ``gumbel_scale``, linearly to 0; None keeps it constant.
        backend: ``"torch"``; ``"warp"``, which does in two kernels what takes torch a hundred or more operations, and
            needs ``pip install warp-lang``; None for ``"warp"`` on CUDA if it is installed, else ``"torch"``. Results
            differ by rounding.
        reuse_tree: keep the subtree of the current state from the search of an earlier move (PUCT and UCT), up to
            n_simulations nodes. Trees are twice as large, and a copy of them is kept between moves.
        compiled: compile the simulations with TorchInductor. The first search then takes a minute longer. Only for
            searches on the CPU: on CUDA a whole search is a graph.
    """

    method: Method = option("gumbel")
    n_simulations: int = option(64, at_least=1)
    max_depth: int | None = option(None, at_least=1)
    c_init: float = option(1.25, at_least=0)
    c_base: float = 19652.0
    dirichlet_fraction: float = option(0.25, at_least=0, at_most=1)
    dirichlet_alpha: float = option(0.3, above=0)
    n_considered: int = option(16, at_least=1)
    gumbel_scale: float = option(1.0, at_least=0)
    value_scale: float = option(0.1, at_least=0)
    visit_offset: float = option(50.0, at_least=0)
    temperature: float = option(1.0, at_least=0)
    exploring_moves: int | None = option(None, at_least=1)
    compiled: bool = False
    backend: Literal["torch", "warp"] | None = option(None)
    reuse_tree: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.method != "gumbel" or not self.reuse_tree
        self.require("reuse_tree", fits, "False with Gumbel, whose sequential halving plans the visits of fresh roots")
        self.require("backend", not self.compiled or self.backend != "warp", "'torch' or None with compiled=True")


@dataclass(frozen=True)
class SearchResult:
    """Results of B searches.

    Attributes:
        action: the chosen action.  [B] int64
        policy: the target of a policy: shares of the visits (PUCT, UCT), or the improved policy (Gumbel).
            [B, A] float, sums to 1
        value: mean return of the player to move, over all simulations.  [B] float
        expected: mean return if the policy acts, which visits of bad actions do not lower.  [B] float
        visits: number of visits of each action.  [B, A] float
        q: mean return of each action, 0 where it was not taken.  [B, A] float
        tree: the trees.
    """

    action: Tensor
    policy: Tensor
    value: Tensor
    expected: Tensor
    visits: Tensor
    q: Tensor
    tree: Tree


@renamed.members
class TreeSearch:
    """Tree searches from B states at once.

    Args:
        model: the game, or a learned model of one.
        config: the settings.
        device: where states are.
    """

    def __init__(self, model: Model, config: SearchConfig, *, device: DeviceLike = "cpu") -> None:
        self.model, self.config = model, config
        self.device = resolve_device(device)
        n = config.n_simulations
        plans = [selection.considered_visits(max(1, k), n) for k in range(config.n_considered + 1)]
        self._plans = torch.tensor(plans, dtype=torch.int64, device=self.device)  # [n_considered + 1, n]
        scale, offset = config.value_scale, config.visit_offset
        self._values = partial(selection.completed_values, value_scale=scale, visit_offset=offset)
        self._compiled = self._compiled_simulation() if config.compiled and self.device.type == "cpu" else None
        self.n_kept = n if config.reuse_tree else 1  # maximum nodes from an earlier tree, including the root
        self._n_bytes = 0  # size of the largest trees known to fit

    def __call__(
        self, state: Mapping[str, Tensor], key: Tensor, explore: Tensor | None = None, earlier: DictTensor | None = None
    ) -> SearchResult:
        """Search from B states.

        Args:
            state: states of the roots.  [B, ...] on the device
            key: for the noise and the action, see `rlstruct.functional.random`.  [B] int64
            explore: factor of ``temperature``, or of ``gumbel_scale``; None for 1.  [B] float
            earlier: `Tree.rows` of an earlier search, for ``reuse_tree``; None for none.
        """
        config, state = self.config, dict(state)
        logits, value = evaluate_masked(self.model, state)
        noise_key, draw_key = random.split(key, 2).unbind(1)
        if config.method == "gumbel":
            noise = config.gumbel_scale * random.gumbel(noise_key, (logits.shape[1],)).to(logits.dtype)
            noise = noise if explore is None else explore.unsqueeze(1) * noise
        else:
            noise = random.dirichlet(noise_key, config.dirichlet_alpha, selection.is_legal(logits)).to(logits.dtype)
        return self.run(state, logits, value, noise, draw_key, explore, earlier)

    @operation("search")
    def run(
        self,
        state: Tensors,
        logits: Tensor,
        value: Tensor,
        noise: Tensor,
        key: Tensor,
        explore: Tensor | None = None,
        earlier: DictTensor | None = None,
    ) -> SearchResult:
        """Search from evaluated states, with given noise; other arguments as `__call__`.

        Args:
            state: [B, ...]
            logits: from `rlstruct.search.selection.mask_logits`.  [B, A] float
            value: [B] float
            noise: Gumbel or Dirichlet noise.  [B, A] float
            key: for the action (PUCT and UCT).  [B] int64
            explore: see `__call__`.
            earlier: see `__call__`.

        Raises:
            BadValueError: the settings ask for compiled simulations, and the search is not on the CPU.
            MemoryError: the trees do not fit into the device's free memory; nothing was allocated.
        """
        config = self.config
        if config.compiled and self._compiled is None:
            raise BadValueError(
                f"TreeSearch: got SearchConfig(compiled=True) for a search on {self.device}, expected False: only "
                "searches on the CPU are compiled, and on CUDA a whole search is one graph. Leave compiled out (in a "
                "training compile_agent)."
            )
        self._refuse_too_large(state, logits)
        if config.method == "puct" and config.dirichlet_fraction:
            mixed = (1.0 - config.dirichlet_fraction) * logits.softmax(-1) + config.dirichlet_fraction * noise
            lowest = torch.finfo(logits.dtype)
            logits = mixed.clamp(min=lowest.tiny).log().masked_fill(~selection.is_legal(logits), lowest.min)
        n = config.n_simulations
        tree = self.new_trees(state, logits, value)
        if earlier is not None:
            tree.copy_subtrees(earlier, self.n_kept)
        n_legal = selection.is_legal(logits).sum(-1).clamp(max=config.n_considered)
        considered = self._plans.index_select(0, n_legal).t().to(logits.dtype)  # [n, B]: visits of the due actions
        roots = tree.roots()
        tree.select_actions(roots.unsqueeze(0), *self._scores(noise, considered[0]))
        if self._compiled is not None:
            self._compiled.weights_changed()
        tensors, longest = tree.tensors(), config.max_depth or n + self.n_kept
        kernels = self._kernels(tree, noise, longest)
        for i in range(n):
            n_levels, turn = min(i + self.n_kept, longest), considered[min(i + 1, n - 1)]
            if kernels is not None:
                kernels.simulate(self.model, n_levels, self.n_kept + i, turn)
                continue
            path = tree.descend(n_levels)
            inputs = roots + (self.n_kept + i), noise, turn
            if self._compiled is None:
                self._simulate(tree, path, *inputs)
            else:  # spare slots fill the path up to a power of two levels
                levels = max(_LEAST_LEVELS, 1 << (len(path) - 1).bit_length())
                filled = torch.cat([path, (roots + tree.n_nodes).expand(levels - len(path), -1)])
                self._compiled(tree.n_nodes, tensors, filled, *inputs)
        return self._result(tree, noise, key, explore)

    def memory_needed(self, state: Mapping[str, Tensor], n_actions: int, *, float_bytes: int = 4) -> int:
        """Return the bytes of the trees of searches from states [B, ...], from shapes alone."""
        rows = next(iter(state.values())).shape[0]
        state_bytes = sum(part.numel() * part.element_size() for part in state.values()) // rows
        slot = (3 * n_actions + 3) * float_bytes + (n_actions + 2) * 8 + state_bytes
        trees = 3 if self.config.reuse_tree else 1  # with the earlier one, and the one for the next move
        return trees * rows * (self.config.n_simulations + self.n_kept + 1) * slot

    def new_trees(self, state: Mapping[str, Tensor], logits: Tensor, value: Tensor) -> Tree:
        """Make trees with a root only and room for a search; see `Tree.from_roots`."""
        return Tree.from_roots(state, logits, value, self.n_kept + self.config.n_simulations)

    def _kernels(self, tree: Tree, noise: Tensor, n_levels: int) -> KernelSearch | None:
        backend = self.config.backend
        if backend is None and noise.is_cuda and noise.dtype in (torch.float32, torch.float64):
            has_warp = torch.version.hip is None and importlib.util.find_spec("warp") is not None
            backend = "warp" if has_warp else "torch"
        if backend != "warp":
            return None
        from rlstruct.search.kernel_search import KernelSearch  # needs an extra

        return KernelSearch(tree, self.config, noise, n_levels)

    def _simulate(self, tree: Tree, path: Tensor, new_slots: Tensor, noise: Tensor, considered: Tensor) -> None:
        """Simulate once, in place, along the slots ``path`` [D, B]."""
        tree.simulate(path, self.model, new_slots, *self._scores(noise, considered))

    def _compiled_simulation(self) -> Runner[Tensor]:
        """Return a runner of compiled `_simulate`, compiled once for paths of up to 4, 8, 16, … levels each."""

        def simulate(n_nodes: int, slots: DictTensor, path: Tensor, new_slots: Tensor, *inputs: Tensor) -> Tensor:
            self._simulate(Tree.from_tensors(n_nodes, slots), path, new_slots, *inputs)
            return new_slots + 0  # compiled code must return a tensor

        make = None if EXECUTORS["compiled"](self.device) is None else partial(Compiled, writes=True)
        warn = partial(warn_uncompiled, "TreeSearch: a simulation", switch="SearchConfig(compiled=True)")
        return Runner(simulate, getattr(self.model, "__dict__", {}), self.device, make, failed=warn)

    def _refuse_too_large(self, state: Tensors, logits: Tensor) -> None:
        needed = self.memory_needed(state, logits.shape[1], float_bytes=logits.element_size())
        if needed <= self._n_bytes:
            return
        free = free_memory(self.device)
        if free is not None and needed > free:
            raise MemoryError(
                f"TreeSearch: trees of {self.config.n_simulations} simulations in {len(logits)} environments take "
                f"{needed / 2**30:.2f} GiB, and {self.device} has {free / 2**30:.2f} GiB free. Search in fewer "
                "environments at once, or with fewer simulations."
            )
        self._n_bytes = needed

    def _scores(self, gumbel: Tensor, considered: Tensor) -> tuple[Scores, Scores]:
        """Return the functions that choose the next action of the roots and of all other nodes."""
        config = self.config

        def scores(logits: Tensor, visits: Tensor, q: Tensor, raw: Tensor) -> Tensor:
            if config.method == "puct":
                return selection.puct_scores(logits, visits, q, raw, c_init=config.c_init, c_base=config.c_base)
            if config.method == "uct":
                return selection.uct_scores(logits, visits, q, c_init=config.c_init)
            return selection.gumbel_scores(logits, visits, self._values(logits, visits, q, raw))

        def halving_scores(logits: Tensor, visits: Tensor, q: Tensor, raw: Tensor) -> Tensor:
            values = self._values(logits, visits, q, raw)
            return selection.considered_scores(logits, visits, values, gumbel, considered)

        return halving_scores if config.method == "gumbel" else scores, scores

    def _result(self, tree: Tree, noise: Tensor, key: Tensor, explore: Tensor | None) -> SearchResult:
        logits, visits, q, raw = tree.root_edges()
        value = selection.node_value(visits, q, raw)
        if self.config.method == "gumbel":
            values = self._values(logits, visits, q, raw)
            best = selection.considered_scores(logits, visits, values, noise, visits.amax(-1))
            action, policy = best.argmax(-1), (logits + values).softmax(-1)
        else:
            policy = visits / visits.sum(-1, keepdim=True)
            action = visits.argmax(-1)
            if self.config.temperature > 0.0:
                heat = self.config.temperature if explore is None else self.config.temperature * explore.unsqueeze(1)
                drawn = random.categorical(policy.log() / heat, key)
                action = drawn if explore is None else torch.where(explore > 0.0, drawn, action)
        expected = (policy * torch.where(visits > 0, q, value.unsqueeze(-1))).sum(-1)
        return SearchResult(action, policy, value, expected, visits, q, tree)


def free_memory(device: torch.device) -> int | None:
    """Return the number of bytes that can be allocated on a device now, files' caches included; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        return kilobytes("meminfo")["MemAvailable"] * 1024 if device.type == "cpu" else None
    except (OSError, KeyError):  # only Linux has it
        return None
