"""Operators that work queues on a device, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Queued(TorchDispatchMode):
    """Counts operators that compute: no views, and no memory that is only asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.numbers = 0  # that they have computed or copied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            self.names[str(func)] += 1
            self.numbers += sum(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        return found
