"""The weights that workers share: one copy for all of them, which the parent writes and workers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.core import Layout

# Two batches can be outstanding, each with its own weights, while the next weights arrive.
N_SLOTS = 3


@dataclass(frozen=True, eq=False)
class Weights:
    """Reference to the weights that an order uses: slot, policy version and layout."""

    slot: int
    version: int
    layout: Layout


class SharedWeights:
    """Slots in shared memory. One that an unanswered order may still read is never written."""

    def __init__(self) -> None:
        """Begin without weights; a slot takes memory once it is written."""
        self.slots = tuple(SharedBlock() for _ in range(N_SLOTS))
        self._tensors: list[dict[str, Tensor]] = [{} for _ in range(N_SLOTS)]
        self.newest: Weights | None = None

    def write(self, weights: Mapping[str, Tensor], version: int, slot: int) -> None:
        """Write new weights, from any device, to a slot that no worker reads."""
        layout = Layout.of(weights)
        if layout != Layout.of(self._tensors[slot]):
            self._tensors[slot] = self.slots[slot].map(layout)
        for key, tensor in weights.items():
            self._tensors[slot][key].copy_(tensor.detach())
        self.newest = Weights(slot, version, layout)

    def n_bytes(self) -> int:
        """Return the size of all slots that were written."""
        return sum(Layout.of(tensors).nbytes() for tensors in self._tensors)
