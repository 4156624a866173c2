"""All-reduce across learner processes, so that statistics cover the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

_sums: list[Callable[[Tensor], Tensor]] = []  # empty while this process learns alone


def sum_over_learners(x: Tensor) -> Tensor:
    """Add up a tensor over all learners of this training, which must all make the same calls in the same order.

    Args:
        x: the same shape in all learners; without gradients if there are several.

    Returns:
        The sum, in new memory; ``x`` itself where this process learns alone.
    """
    return _sums[-1](x) if _sums else x


@contextlib.contextmanager
def summing_by(add_up: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make `sum_over_learners` call ``add_up``, as `rlstruct.algos.distributed.process_group` does."""
    _sums.append(add_up)
    try:
        yield
    finally:
        _sums.pop()
