"""Gradient steps compiled as one function: loss, gradient, clipping and the step of Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from rlstruct.algos.optimising import PureAdam, Terms, loss_plus_norm
from rlstruct.core.pytree import TreeSpec
from rlstruct.engine.donated import Donated
from rlstruct.engine.host_syncs import intended
from rlstruct.engine.runner import Runner

if TYPE_CHECKING:
    from rlstruct.algos.learner import GradientLearner

_NEXT = "next minibatch"


class CompiledSteps:
    """Gradient steps of a learner on the CPU, each compiled with the step of its Adam or AdamW.

    On other devices the step of a fused optimiser is one kernel of the captured graph already. A learner has one of
    these and calls it; both are one unit, in two files.

    Args:
        learner: whose network these steps train.
    """

    def __init__(self, learner: GradientLearner) -> None:
        self._learner = learner
        self._adam: PureAdam | None = None  # in an update whose steps are compiled
        self._single: Runner[tuple[Terms, Terms]] = learner._part("gradient step", self.compute)
        self._next = learner._part("gradient step", self._take_next)

    def begin(self) -> None:
        """Keep the optimiser as a pure function until `end`, if the steps of this update are compiled."""
        self._adam = self._pure_adam()

    def end(self) -> None:
        """Pass what the steps since `begin` have changed to the optimiser."""
        if self._adam is not None:
            self._learner._finite &= self._adam.count()
        self._adam = None

    def take(self, minibatch: Any) -> Terms | None:  # noqa: ANN401 - as of `GradientLearner.terms`
        """Take one gradient step and return its terms, detached; None if it is not compiled: nothing has happened."""
        if (adam := self._adam or self._pure_adam()) is None:
            return None
        terms, new = self._single(minibatch, adam.state())
        adam.write(new)
        if self._adam is None:
            self._learner._finite &= adam.count()
        self._learner.policy_version += 1
        return terms

    def take_stacks(self, stacks: Iterable[Any], more: Callable[[], Terms]) -> list[Terms] | None:
        """Take the gradient steps on stacks of minibatches, each stack in one call, without Python between steps.

        Args:
            stacks: all of the same form.  [n, ...]
            more: returns what else `GradientLearner._pure_step` changes, each tensor by name.

        Returns:
            The terms of each step; None if the steps are not compiled: then nothing has happened.
        """
        if self._adam is None or self._next.make is None:
            return None
        number = torch.zeros((), dtype=torch.int64, device=self._learner.device)
        state, steps = Donated({**self._adam.state(), **more(), _NEXT: number}), []
        for stack in stacks:
            number.zero_()
            steps += [terms for (terms,) in self._next.times(len(TreeSpec(stack).flatten(stack)[0]), stack, state)]
        self._learner.policy_version += len(steps)
        return steps

    def compute(self, minibatch: Any, state: Terms) -> tuple[Terms, Terms]:  # noqa: ANN401 - as of `take`
        """Return the terms of a gradient step and the result of `PureAdam.compute`: a pure function."""
        learner = self._learner
        terms, gradient = learner._differentiate(minibatch)
        adam = PureAdam(learner.optimizer, learner._weights)
        return terms, adam.compute(gradient, state, loss_plus_norm(terms, gradient))

    def _take_next(self, stack: Any, state: Terms) -> tuple[Terms, Terms]:  # noqa: ANN401 - as of `take`
        """Take the gradient step on the next minibatch of a stack: a pure function."""
        tree, number = TreeSpec(stack), state[_NEXT].unsqueeze(0)
        minibatch = tree.unflatten(one.index_select(0, number).squeeze(0) for one in tree.flatten(stack))
        terms, new = self._learner._pure_step(minibatch, state)
        return terms, {**new, _NEXT: state[_NEXT] + 1}

    def _pure_adam(self) -> PureAdam | None:
        """Return the optimiser as a pure function, if gradient and step can be compiled as one."""
        learner = self._learner
        compiled = self._single.make is not None and learner._may_compile_steps()
        if not (compiled and PureAdam.supports(learner.optimizer, learner._weights)):
            return None
        with intended():
            finite = bool(learner._finite)  # sync: of CPU memory
        return PureAdam(learner.optimizer, learner._weights, finite=finite)
