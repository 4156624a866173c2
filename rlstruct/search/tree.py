"""Trees of B searches as tensors of fixed shape: nothing waits for the device, and no shape depends on data.

Node n of environment b is in slot ``b * (N + 1) + n``; the root is node 0. The last slot of each environment is spare:
it absorbs writes that must have no effect. Each node stores the action that the next simulation will take from it and
the slot this leads to, so a descent costs one look-up per level; only nodes on the path back up change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.core import DictTensor
from rlstruct.engine.host_syncs import intended
from rlstruct.functional.masks import rows_of
from rlstruct.search.selection import mask_logits

Tensors = dict[str, Tensor]
RANDOM_KEY = "/key"
"""Name of the random key in a search's state, next to the simulator's fields. It is no part of the position."""
_FIELDS = ("edges", "children", "nodes", "action", "onward")

Scores = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``scores(logits, visits, q, raw_value)``, see `rlstruct.search.selection`."""


class Model(Protocol):
    """Interface between a search and a game, or a learned model of one."""

    def advance(self, state: Tensors, action: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """Take an action in B states.

        Args:
            state: name to tensor.  [B, ...]
            action: illegal only where no action is legal.  [B] int64

        Returns:
            ``(next state, reward, discount)``: the reward [B] float of the player to move, and the factor [B] float
            that turns values of the next state into values of this one: -1 where the other player moves next, 0 at the
            end of a game.
        """

    def evaluate(self, state: Tensors) -> tuple[Tensor, Tensor]:
        """Evaluate B states.

        Args:
            state: [B, ...]

        Returns:
            ``(logits, value)``: of the policy of the player to move, [B, A] float, -inf for illegal actions; and
            that player's expected return, [B] float.
        """


@renamed.members
@dataclass
class Tree:
    """B trees of up to N nodes each, in ``S = B * (N + 1)`` slots."""

    n_nodes: int  # N
    edges: Tensor  # logits, visits and mean return of each action.  [S, 3, A] float
    children: Tensor  # slot that each action leads to; the spare slot where it was not taken.  [S, A] int64
    nodes: Tensor  # the model's value of each node, and reward and discount on the way to it.  [S, 3] float
    action: Tensor  # the action of the next simulation.  [S] int64
    onward: Tensor  # slot where the next simulation continues; the spare slot if it stops here.  [S] int64
    state: Tensors  # of each node.  [S, ...]

    @classmethod
    def from_roots(cls, state: Mapping[str, Tensor], logits: Tensor, value: Tensor, n_nodes: int) -> Tree:
        """Make trees with a root only, from states [B, ...], masked logits [B, A] and values [B]."""
        B, A = logits.shape
        n_slots = B * (n_nodes + 1)
        spare = torch.arange(n_nodes, n_slots, n_nodes + 1, device=value.device)
        each = spare.repeat_interleave(n_nodes + 1)
        tree = cls(
            n_nodes,
            edges=value.new_zeros(n_slots, 3, A),
            children=each.unsqueeze(1).repeat(1, A),
            nodes=value.new_zeros(n_slots, 3),
            action=torch.zeros_like(each),
            onward=each,
            state={name: part.new_zeros(n_slots, *part.shape[1:]) for name, part in state.items()},
        )
        # Paths that have ended continue in the spare slot: reward 0 and discount 1 leave returns unchanged.
        nothing, one = torch.zeros_like(value), torch.ones_like(value)
        tree.nodes.index_copy_(0, spare, torch.stack([nothing, nothing, one], -1))
        tree.write_states(tree.roots(), state)
        tree.write_nodes(tree.roots(), logits, value, nothing, one)
        return tree

    def tensors(self) -> DictTensor:
        """Return all tensors by name, for `from_tensors`.  [S, ...]."""
        state = {f"state/{name}": part for name, part in self.state.items()}
        return DictTensor({name: getattr(self, name) for name in _FIELDS} | state)

    @classmethod
    def from_tensors(cls, n_nodes: int, tensors: DictTensor) -> Tree:
        """Return a tree that shares the tensors of `tensors`."""
        edges, children, nodes, action, onward = tensors.get(_FIELDS).values()
        return cls(n_nodes, edges, children, nodes, action, onward, dict(tensors.truncate_key("state/").items()))

    def rows(self) -> DictTensor:
        """Return all tensors by name, with slots counted from each environment's root.  [B, N + 1, ...]."""
        rows, first = self.tensors().map(lambda part: part.view(-1, self.n_nodes + 1, *part.shape[1:])), self.roots()
        rows.set("children", rows["children"] - first.view(-1, 1, 1))
        rows.set("onward", rows["onward"] - first.view(-1, 1))
        return rows

    def copy_subtrees(self, rows: DictTensor, n_kept: int) -> None:
        """Copy the subtrees of the current roots from an earlier search, where it visited the roots' states.

        If several nodes have a root's state, the oldest one counts. The oldest nodes are kept, in the first slots;
        visits of actions that led to dropped nodes are kept too.

        Args:
            rows: `rows` of the earlier tree, which is as large as this one.
            n_kept: maximum number of nodes to keep, including the root.
        """
        children, N = rows["children"], self.n_nodes
        B = len(children)
        node = torch.arange(N + 1, device=children.device)
        parent = torch.full_like(rows["onward"], N).scatter(
            1, children.flatten(1), node.repeat_interleave(children.shape[2]).expand(B, -1)
        )
        parent[:, N] = N
        roots = self.roots()
        same = (parent < N) | (node == 0)
        for name, part in self.state.items():
            if name == RANDOM_KEY:  # drawn anew for each search; the subtree keeps its own
                continue
            now = part.index_select(0, roots).unsqueeze(1)
            same &= (rows[f"state/{name}"] == now).flatten(2).all(2) if now.dim() > 2 else rows[f"state/{name}"] == now
        same[:, N] = False
        inside = same & (same.cumsum(1) == 1)  # the new root
        for _ in range(N.bit_length()):  # each round doubles the number of generations
            inside = inside | inside.gather(1, parent)
            parent = parent.gather(1, parent)
        number = inside.cumsum(1) - 1
        place = torch.where(inside & (number < n_kept), number, N)  # [B, N + 1]
        kept = {name: part.flatten(0, 1) for name, part in rows.items()}
        first = roots.unsqueeze(1)
        kept["children"] = (place.gather(1, children.flatten(1)) + first).view(-1, children.shape[2])
        kept["onward"] = (place.gather(1, rows["onward"]) + first).view(-1)
        # The roots keep their new evaluation; nodes that are dropped write to a spare slot what it already holds.
        place, slots = place.view(-1), (place + first).view(-1)
        is_root = (place == 0).unsqueeze(1)
        before = self.tensors().index(slots)
        logits = torch.where(is_root, before["edges"][:, 0], kept["edges"][:, 0])
        kept["edges"] = torch.cat([logits.unsqueeze(1), kept["edges"][:, 1:]], 1)
        kept["nodes"] = torch.where(is_root, before["nodes"], kept["nodes"])
        for name, part in self.tensors().items():
            part.index_copy_(0, slots, torch.where(rows_of(place == N, part), before[name], kept[name]))

    def roots(self) -> Tensor:
        """Return the slots of the roots.  [B] int64."""
        return torch.arange(0, self.onward.shape[0], self.n_nodes + 1, device=self.onward.device)

    def write_states(self, slot: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write the states [B, ...] of nodes."""
        for name, part in state.items():
            self.state[name].index_copy_(0, slot, part)

    def write_nodes(self, slot: Tensor, logits: Tensor, value: Tensor, reward: Tensor, discount: Tensor) -> None:
        """Write nodes without children.  [B, ...] each."""
        nothing = torch.zeros_like(logits)
        self.edges.index_copy_(0, slot, torch.stack([logits, nothing, nothing], 1))
        self.nodes.index_copy_(0, slot, torch.stack([value, reward, discount], -1))

    def expand(self, last: Tensor, action: Tensor, leaf: Tensor, model: Model) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take actions in nodes, and evaluate and write the next states.

        Args:
            last: slots of the nodes.  [B] int64
            action: [B] int64
            leaf: slots of the next states.  [B] int64
            model: the game.

        Returns:
            ``(logits, value, reward, discount)``, for `write_nodes`.
        """
        before = {name: part.index_select(0, last) for name, part in self.state.items()}
        state, reward, discount = model.advance(before, action)
        logits, value = evaluate_masked(model, state)
        self.write_states(leaf, state)
        return logits, value, reward.to(value.dtype), discount.to(value.dtype)

    def simulate(self, path: Tensor, model: Model, new_slots: Tensor, root_scores: Scores, scores: Scores) -> None:
        """Simulate once: take the chosen action at the end of a path, evaluate the next state, and back up the return.

        A path that stops at the end of a game, or at the maximum depth, evaluates its last state again.

        Args:
            path: slots from `descend`, then spare ones.  [D, B] int64
            model: the game.
            new_slots: slots for the new nodes.  [B] int64
            root_scores: choose the next action of the roots.
            scores: choose the next action of all other nodes.
        """
        A = self.children.shape[1]
        spare = self.roots() + self.n_nodes
        depth = (path != spare).sum(0) - 1  # of the last node
        last = path.gather(0, depth.unsqueeze(0)).squeeze(0)
        action = self.action.index_select(0, last)
        edge = last * A + action
        child = self.children.view(-1).index_select(0, edge)
        leaf = torch.where(child == spare, new_slots, child)
        logits, value, reward, discount = self.expand(last, action, leaf, model)
        self.write_nodes(leaf, logits, value, reward, discount)
        self.children.view(-1).index_copy_(0, edge, leaf)

        behind = torch.cat([path[1:], spare.unsqueeze(0)]).scatter(0, depth.unsqueeze(0), leaf.unsqueeze(0))
        returns = self._returns(behind, value)  # [D, B]
        self._back_up(path, returns)
        self.select_actions(torch.cat([path, leaf.unsqueeze(0)]), root_scores, scores)

    def select_actions(self, path: Tensor, root_scores: Scores, scores: Scores) -> None:
        """Select the next simulation's actions in nodes ``path`` [D, B] int64, the roots first; see `simulate`."""
        D, B = path.shape
        slots = path.view(-1)
        A = self.children.shape[1]
        logits, visits, q = self.edges.index_select(0, slots).view(D, B, 3, A).unbind(2)
        raw = self.nodes.index_select(0, slots)[:, 0].view(D, B)
        first = root_scores(logits[:1], visits[:1], q[:1], raw[:1])
        others = scores(logits[1:], visits[1:], q[1:], raw[1:])
        action = torch.cat([first, others]).argmax(-1).view(-1)
        child = self.children.view(-1).index_select(0, slots * A + action)
        over = self.nodes.index_select(0, child)[:, 2] == 0.0
        spare = slots - slots % (self.n_nodes + 1) + self.n_nodes
        self.action.index_copy_(0, slots, action)
        self.onward.index_copy_(0, slots, torch.where(over, spare, child))

    def root_edges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits, visits and mean returns of the roots, [B, A] each, and the model's values, [B]."""
        roots = self.roots()
        logits, visits, q = self.edges.index_select(0, roots).unbind(1)
        return logits, visits, q, self.nodes.index_select(0, roots)[:, 0]

    def descend(self, n_levels: int) -> Tensor:
        """Follow the chosen actions from the roots, at most n levels: slots, then spare ones.  [D <= n, B] int64."""
        slot = self.roots()
        spare = slot + self.n_nodes
        path = [slot]
        for _ in range(n_levels - 1):
            slot = self.onward.index_select(0, slot)
            if slot.is_cpu:
                with intended():  # sync: none on the CPU; most paths are short
                    if torch.equal(slot, spare):
                        break
            path.append(slot)
        return torch.stack(path)

    def _returns(self, behind: Tensor, value: Tensor) -> Tensor:
        """Return the return that followed each node of a path, from the view of its player.  [D, B].

        ``behind`` [D, B] are the nodes after each, then spare ones; ``value`` [B] is that of the last.
        """
        _, reward, discount = self.nodes.index_select(0, behind.view(-1)).view(*behind.shape, 3).unbind(-1)
        returns = []
        for r, d in zip(reward.flip(0).unbind(0), discount.flip(0).unbind(0), strict=True):
            value = torch.addcmul(r, d, value)
            returns.append(value)
        return torch.stack(returns[::-1])

    def _back_up(self, path: Tensor, returns: Tensor) -> None:
        """Update visits and mean return of the action taken in each node of a path.  [D, B] each."""
        slots, A = path.view(-1), self.children.shape[1]
        edges = self.edges.index_select(0, slots)  # [D * B, 3, A]
        logits, visits, q = edges.unbind(1)
        taken = torch.arange(A, device=slots.device) == self.action.index_select(0, slots).unsqueeze(1)
        visits = visits + taken.to(visits.dtype)
        q = q + torch.where(taken, (returns.view(-1, 1) - q) / visits.clamp(min=1.0), 0.0)
        self.edges.index_copy_(0, slots, torch.stack([logits, visits, q], 1))


def evaluate_masked(model: Model, state: Tensors) -> tuple[Tensor, Tensor]:
    """Return the model's masked logits and its values."""
    logits, value = model.evaluate(state)
    return mask_logits(logits), value
