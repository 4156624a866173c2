"""Prioritised replay: steps with a large error are drawn more often. Layer 4.

Schaul, Quan, Antonoglou and Silver, "Prioritized experience replay" (ICLR 2016), the proportional variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.core import TemporalDictTensor
from rlstruct.functional import random

_WIDTH = 64  # children of a node: three levels hold 262,144 leaves
_BELOW_ONE = 1.0 - 2.0**-52


class SumTree:
    """Non-negative numbers in blocks, the sums of the blocks in blocks, and so on up to one block.

    Wide blocks make few levels: a device does one step of work for a level, whatever it holds.

    Args:
        n_leaves: how many numbers, all 0 at first.
        device: where they are.

    Attributes:
        levels: [blocks, children] float64 each, the leaves last.
    """

    def __init__(self, n_leaves: int, device: torch.device) -> None:
        """Allocate all levels."""
        self.levels: list[Tensor] = []
        n_blocks = n_leaves
        while n_blocks > 1 or not self.levels:
            n_blocks = -(-n_blocks // _WIDTH)
            self.levels.insert(0, torch.zeros(n_blocks, _WIDTH, dtype=torch.float64, device=device))

    def leaves(self, index: Tensor) -> Tensor:
        """Return the numbers at index [K] int64.  [K] float64."""
        return self.levels[-1].view(-1).index_select(0, index)

    def total(self) -> Tensor:
        """Return the sum of all numbers.  [] float64."""
        return self.levels[0].sum()

    def set(self, index: Tensor, value: Tensor) -> None:
        """Replace numbers.

        Args:
            index: which; where one occurs more often, any of its values is taken.  [K] int64
            value: what to put there, 0 or more.                                    [K] float
        """
        self.levels[-1].view(-1)[index] = value.to(torch.float64)
        for parents, children in reversed(list(pairwise(self.levels))):
            index = index // _WIDTH
            # Summed anew, not adjusted by a difference: rounding does not add up, and repeated indices do no harm.
            parents.view(-1)[index] = children.index_select(0, index).sum(dim=1)

    def find(self, mass: Tensor) -> Tensor:
        """Find the leaves where the cumulative sum passes given values.

        Args:
            mass: in [0, total).  [K] float64

        Returns:
            The first leaf i with leaf 0 + … + leaf i > mass; never a leaf that is 0.  [K] int64
        """
        block = torch.zeros_like(mass, dtype=torch.int64)
        for level in self.levels:
            cumulative = level.index_select(0, block).cumsum(dim=1)  # [K, children]
            # A sum may have been rounded up on its way to the parent: stay below what the children have.
            mass = torch.minimum(mass, cumulative[:, -1] * _BELOW_ONE)
            child = (cumulative <= mass.unsqueeze(1)).sum(dim=1).clamp(max=_WIDTH - 1)
            before = cumulative.gather(1, (child - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
            mass = torch.where(child > 0, mass - before, mass)
            block = block * _WIDTH + child
        return block


class PrioritisedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws step i with probability p_i^exponent / sum_j p_j^exponent, p = abs(error) + epsilon.

    A new step gets the largest priority seen so far, so that it is drawn soon. The batch's ``weight`` is
    (N * probability)^-correction, scaled so that the largest in the batch is 1.

    Args:
        capacity: see `ReplayBuffer`, as are ``settings``.
        exponent: 0 draws uniformly, 1 in proportion to the error.
        correction: 1 undoes the bias of the draws in full, 0 leaves it; may be changed at any time.
        epsilon: keeps steps without error alive.
        settings: of `ReplayBuffer`.

    Raises:
        ValueError: a number is out of range.

    Attributes:
        correction: as above.
        tree: priorities to the power of ``exponent``, of all slots.
    """

    def __init__(
        self,
        capacity: int,
        *,
        exponent: float = 0.6,
        correction: float = 0.4,
        epsilon: float = 1e-6,
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        """Remember the settings; memory follows at the first `extend`."""
        super().__init__(capacity, **settings)
        if exponent < 0.0 or epsilon <= 0.0:
            raise ValueError(
                f"PrioritisedReplayBuffer: exponent is {exponent} and epsilon {epsilon}, expected at least 0 and "
                "more than 0."
            )
        self.exponent, self.correction, self.epsilon = exponent, correction, epsilon
        self.tree = SumTree(0, self.device)
        self._largest = torch.ones((), dtype=torch.float64, device=self.device)

    def update_priorities(self, index: Tensor, error: Tensor) -> None:
        """Say how wrong the values of sampled steps were. Call it before the next `extend`.

        After that another step may stand where a sampled one did, and would get its priority until it is drawn itself;
        where none stands any more, nothing is written.

        Args:
            index: as it came with the batch.         [K] int64 on the buffer's device
            error: temporal-difference errors of it.  [K] float, same device
        """
        priority = (error.detach().abs().to(torch.float64) + self.epsilon) ** self.exponent
        self._largest = torch.maximum(self._largest, priority.max())
        # A slot of weight 0 holds no step that can be drawn, whatever it held when the batch was.
        self.tree.set(index, torch.where(self.tree.leaves(index) > 0, priority, 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; the tensors are the buffer's own."""
        return {**super().state_dict(), "tree": list(self.tree.levels), "largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; see `ReplayBuffer.load_state_dict`."""
        super().load_state_dict(state)
        self.tree.levels = [level.to(self.device, copy=True) for level in state["tree"]]
        self._largest = state["largest"].to(self.device, copy=True)

    def _draw(self, key: Tensor) -> tuple[Tensor, Tensor]:
        total, n_drawn = self.tree.total(), len(key)
        # One draw from each of K equal ranges, as in the paper's algorithm: as likely, and more even.
        lanes = torch.arange(n_drawn, device=self.device, dtype=torch.float64)
        index = self.tree.find((lanes + random.uniform(key)) / n_drawn * total)
        probability = self.tree.leaves(index) / total
        weight = (self._state["ends"][-1] * probability) ** -self.correction
        return index, (weight / weight.max()).to(torch.float32)

    def _allocate(self, steps: TemporalDictTensor) -> None:
        super()._allocate(steps)
        self.tree = SumTree(len(self.columns["ready"]), self.device)

    def _stored(self, slot: Tensor, following: Tensor, ready: Tensor) -> None:
        # Next to be overwritten: the slot at the head, and those behind it, whose stacks have just been cut.
        places = self._state["head"].unsqueeze(1) + torch.arange(self.n_stack, device=self.device)
        oldest = self._slot(places, torch.ones_like(places, dtype=torch.bool))
        idle = torch.cat([following.flatten(), oldest.flatten()])
        self.tree.set(idle, torch.zeros_like(idle, dtype=torch.float64))
        self.tree.set(slot.flatten(), torch.where(ready, self._largest, 0.0).flatten())
