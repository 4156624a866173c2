"""Checks of users' algorithms: the terms of a loss, and the results of an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from rlstruct.errors import BadKeyError, BadTypeError, ShapeMismatchError


def check_terms(where: str, terms: object) -> None:
    """Refuse terms that cannot be learned from.

    Args:
        where: named in the message.
        terms: what a learner's ``terms`` returned.
    """
    if not isinstance(terms, Mapping) or "loss" not in terms:
        got = f"the terms {sorted(terms)}" if isinstance(terms, Mapping) else f"a {type(terms).__name__}"
        raise BadKeyError(f"{where}: it returns {got}, expected a dict with 'loss', which is minimised.")
    _check_tensors(where, terms)
    if (loss := cast("Tensor", terms["loss"])).dim():
        raise ShapeMismatchError(
            f"{where}: 'loss' has shape {list(loss.shape)}, expected a single number, []. Average it, over real steps "
            "only: rlstruct.functional.statistics.masked_mean(loss, batch.mask())."
        )


def check_results(where: str, results: Mapping[str, object]) -> None:
    """Refuse results of an update that cannot be logged: numbers of Python, and tensors of several."""
    tensors = _check_tensors(where, results)
    if wrong := {name: list(tensor.shape) for name, tensor in tensors.items() if tensor.dim()}:
        raise ShapeMismatchError(f"{where}: {wrong} are the shapes, expected single numbers, []. Average them.")


def _check_tensors(where: str, terms: Mapping[str, object]) -> Mapping[str, Tensor]:
    for name, term in terms.items():
        if not isinstance(term, Tensor):
            raise BadTypeError(
                f"{where}: {name!r} is {term!r}, a {type(term).__name__}, expected a tensor on the learner's device. "
                f"Leave out item(), or make one of a number: loss.new_tensor({name})."
            )
    return cast("Mapping[str, Tensor]", terms)
