"""Warp kernels of a simulation, for CPU and CUDA: `make_kernels`.

They do what `Tree.descend` and `Tree.simulate` do in torch, with the formulas of `rlstruct.search.selection`:
`tests/search/test_search_kernels.py` compares them. `rlstruct.search.kernel_search` launches them.
"""

import functools
from typing import Any

import torch

from rlstruct.sims.kernels import wp

FLOATS = {torch.float32: wp.float32, torch.float64: wp.float64}
"""Types of logits and values for which there are kernels."""


@functools.cache
def make_kernels(dtype: torch.dtype, method: str) -> tuple[Any, Any, Any, Any]:
    """Make the structs ``(Trees, Rules)`` and the kernels ``(descend, back_up)`` for floats of a type and a method."""
    F, smallest, lowest, epsilon = FLOATS[dtype], torch.finfo(dtype).tiny, torch.finfo(dtype).min, 1e-8

    @wp.struct
    class Trees:
        n_nodes: int  # N
        # see `Tree`
        edges: wp.array3d(dtype=F)  # [S, 3, A]
        children: wp.array2d(dtype=wp.int64)  # [S, A]
        nodes: wp.array2d(dtype=F)  # [S, 3]
        action: wp.array(dtype=wp.int64)  # [S]
        onward: wp.array(dtype=wp.int64)  # [S]
        # the path of the simulation: slots from the root to the new node, or to the last one if it is evaluated again
        path: wp.array2d(dtype=wp.int64)  # [at most N + 1, B]
        length: wp.array(dtype=wp.int64)  # number of slots of each path.  [B]

    @wp.struct
    class Rules:
        # settings of `SearchConfig`
        c_init: F
        c_base: F
        value_scale: F
        visit_offset: F
        noise: wp.array2d(dtype=F)  # Gumbel noise of the root's actions.  [B, A]

    @wp.kernel(module="unique", enable_backward=False, module_options={"fuse_fp": False})
    def descend(
        trees: Trees,
        n_levels: int,
        new_node: int,
        last: wp.array(dtype=wp.int64),
        action: wp.array(dtype=wp.int64),
        leaf: wp.array(dtype=wp.int64),
    ):
        b = wp.tid()
        root = wp.int64(b) * wp.int64(trees.n_nodes + 1)
        spare = root + wp.int64(trees.n_nodes)
        slot = root
        level = int(0)
        trees.path[0, b] = slot
        while level + 1 < n_levels and trees.onward[slot] != spare:
            slot = trees.onward[slot]
            level += 1
            trees.path[level, b] = slot
        chosen = trees.action[slot]
        reached = trees.children[slot, chosen]
        if reached == spare:
            reached = root + wp.int64(new_node)
        trees.path[level + 1, b] = reached
        trees.length[b] = wp.int64(level + 2)
        last[b] = slot
        action[b] = chosen
        leaf[b] = reached

    @wp.func
    def select_puct(trees: Trees, rules: Rules, slot: wp.int64, root: bool, b: int, considered: F) -> int:
        n_actions = trees.edges.shape[2]
        total = F(0.0)
        returns = F(0.0)
        mass = F(0.0)
        highest = trees.edges[slot, 0, 0]
        for a in range(n_actions):
            highest = wp.max(highest, trees.edges[slot, 0, a])
            total += trees.edges[slot, 1, a]
            returns += trees.edges[slot, 1, a] * trees.edges[slot, 2, a]
        value = (trees.nodes[slot, 0] + returns) / (F(1.0) + total)
        low = F(value)
        high = F(value)
        for a in range(n_actions):
            mass += wp.exp(trees.edges[slot, 0, a] - highest)
            if trees.edges[slot, 1, a] > F(0.0):
                low = wp.min(low, trees.edges[slot, 2, a])
                high = wp.max(high, trees.edges[slot, 2, a])
        weight = rules.c_init + wp.log((total + rules.c_base + F(2.0)) / rules.c_base)
        weight *= wp.sqrt(total + F(1.0))
        best = F(-wp.inf)
        action = int(0)
        for a in range(n_actions):
            prior = wp.exp(trees.edges[slot, 0, a] - highest) / mass
            score = weight * prior / (trees.edges[slot, 1, a] + F(1.0))
            if trees.edges[slot, 1, a] > F(0.0):
                score += (trees.edges[slot, 2, a] - low) / wp.max(high - low, F(epsilon))
            if prior > F(0.0) and score > best:
                best = score
                action = a
        return action

    @wp.func
    def select_uct(trees: Trees, rules: Rules, slot: wp.int64, root: bool, b: int, considered: F) -> int:
        n_actions = trees.edges.shape[2]
        total = F(0.0)
        for a in range(n_actions):
            total += trees.edges[slot, 1, a]
        best = F(-wp.inf)
        action = int(0)
        for a in range(n_actions):
            visits = trees.edges[slot, 1, a]
            score = F(-lowest)
            if visits > F(0.0):
                score = trees.edges[slot, 2, a] + rules.c_init * wp.sqrt(wp.log(wp.max(total, F(1.0))) / visits)
            if trees.edges[slot, 0, a] > F(lowest) and score > best:
                best = score
                action = a
        return action

    @wp.func
    def select_gumbel(trees: Trees, rules: Rules, slot: wp.int64, root: bool, b: int, considered: F) -> int:
        n_actions = trees.edges.shape[2]
        total = F(0.0)
        most = F(0.0)
        mass = F(0.0)
        seen = F(0.0)
        weighted = F(0.0)
        highest = trees.edges[slot, 0, 0]
        for a in range(n_actions):
            highest = wp.max(highest, trees.edges[slot, 0, a])
            total += trees.edges[slot, 1, a]
            most = wp.max(most, trees.edges[slot, 1, a])
        for a in range(n_actions):
            mass += wp.exp(trees.edges[slot, 0, a] - highest)
        for a in range(n_actions):
            if trees.edges[slot, 1, a] > F(0.0):
                seen += wp.max(wp.exp(trees.edges[slot, 0, a] - highest) / mass, F(smallest))
        for a in range(n_actions):
            if trees.edges[slot, 1, a] > F(0.0):
                prior = wp.max(wp.exp(trees.edges[slot, 0, a] - highest) / mass, F(smallest))
                weighted += prior * trees.edges[slot, 2, a] / seen
        mixed = (trees.nodes[slot, 0] + total * weighted) / (total + F(1.0))
        low = F(wp.inf)
        high = F(-wp.inf)
        for a in range(n_actions):
            q = completed(trees, slot, a, mixed)
            low = wp.min(low, q)
            high = wp.max(high, q)
        scale = (rules.visit_offset + most) * rules.value_scale
        span = wp.max(high - low, F(epsilon))
        best = F(-wp.inf)
        action = int(0)
        if root:
            for a in range(n_actions):
                logit = trees.edges[slot, 0, a]
                value = scale * (completed(trees, slot, a, mixed) - low) / span
                score = wp.max(rules.noise[b, a] + (logit - highest) + value, F(-1.0e9))
                if trees.edges[slot, 1, a] == considered and logit > F(lowest) and score > best:
                    best = score
                    action = a
            return action
        top = F(-wp.inf)
        improved = F(0.0)
        for a in range(n_actions):
            value = scale * (completed(trees, slot, a, mixed) - low) / span
            top = wp.max(top, trees.edges[slot, 0, a] + value)
        for a in range(n_actions):
            value = scale * (completed(trees, slot, a, mixed) - low) / span
            improved += wp.exp(trees.edges[slot, 0, a] + value - top)
        for a in range(n_actions):
            value = scale * (completed(trees, slot, a, mixed) - low) / span
            score = wp.exp(trees.edges[slot, 0, a] + value - top) / improved
            score -= trees.edges[slot, 1, a] / (F(1.0) + total)
            if score > best:
                best = score
                action = a
        return action

    @wp.func
    def completed(trees: Trees, slot: wp.int64, a: int, mixed: F) -> F:
        if trees.edges[slot, 1, a] > F(0.0):
            return trees.edges[slot, 2, a]
        return mixed

    select = {"puct": select_puct, "uct": select_uct, "gumbel": select_gumbel}[method]

    @wp.kernel(module="unique", enable_backward=False, module_options={"fuse_fp": False})
    def back_up(
        trees: Trees,
        rules: Rules,
        considered: wp.array(dtype=F),
        logits: wp.array2d(dtype=F),
        value: wp.array(dtype=F),
        reward: wp.array(dtype=F),
        discount: wp.array(dtype=F),
    ):
        level, b = wp.tid()
        length = int(trees.length[b])
        if level >= length:
            return
        slot = trees.path[level, b]
        leaf = trees.path[length - 1, b]
        if slot == leaf:
            trees.nodes[leaf, 0] = value[b]
            trees.nodes[leaf, 1] = reward[b]
            trees.nodes[leaf, 2] = discount[b]
            for a in range(trees.edges.shape[2]):
                trees.edges[leaf, 0, a] = logits[b, a]
                trees.edges[leaf, 1, a] = F(0.0)
                trees.edges[leaf, 2, a] = F(0.0)
        else:
            if level == length - 2:
                trees.children[slot, trees.action[slot]] = leaf
            later = reward[b] + discount[b] * value[b]
            for k in range(length - 2 - level):
                behind = trees.path[length - 2 - k, b]
                later = trees.nodes[behind, 1] + trees.nodes[behind, 2] * later
            taken = trees.action[slot]
            visits = trees.edges[slot, 1, taken] + F(1.0)
            mean = trees.edges[slot, 2, taken]
            trees.edges[slot, 1, taken] = visits
            trees.edges[slot, 2, taken] = mean + (later - mean) / visits
        chosen = select(trees, rules, slot, level == 0, b, considered[b])
        child = trees.children[slot, chosen]
        # Another thread is writing the new node.
        factor = discount[b]
        if child != leaf:
            factor = trees.nodes[child, 2]
        onward = child
        if factor == F(0.0):
            onward = wp.int64(b + 1) * wp.int64(trees.n_nodes + 1) - wp.int64(1)
        trees.action[slot] = wp.int64(chosen)
        trees.onward[slot] = onward

    return Trees, Rules, descend, back_up
