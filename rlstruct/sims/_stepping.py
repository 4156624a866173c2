"""The seam between a TensorEnv and what moves it: eager torch, compiled torch, or a kernel. Part of rlstruct.sims.

`TensorEnv` checks what comes in, wraps what goes out and keeps the carry; a stepper turns a carry and actions into the
next carry and complete observations. All steppers understand each other's carries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rlstruct.engine.compiled import Compiled
from rlstruct.engine.private import below_autograd
from rlstruct.sims._motion import Motion
from rlstruct.sims._state import Tensors


class Stepper(Protocol):
    """Moves the B environments of one TensorEnv."""

    def step(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Take one step.

        Args:
            carry: where the simulation is; see `rlstruct.sims._motion`. Never written to.
            action: checked.  [B, ...]

        Returns:
            The next carry; all keys of `reached` and of `current`, the same object if episodic.  [B, ...]
        """

    def rollout(
        self, carry: Tensors, action: Tensors | None, n_steps: int
    ) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """Take K steps.

        Args:
            carry: as in `step`.
            action: checked, of any strides, [K, B, ...]; None draws them, see `Motion.explore`.
            n_steps: K.

        Returns:
            As `step`, the observations [B, K, ...]; then the masks ``ran`` and ``running``, [B, K], if episodic.
        """

    def forget(self) -> None:
        """Expect a carry that the last step did not return."""


class TensorStepper:
    """Calls the simulator's own functions of tensors, as they are or compiled.

    Args:
        motion: the simulator's step.
        auto_reset: whether ended environments restart.
        between_draws: start states are drawn once in so many steps.
        compiled: whether a step becomes one kernel.
        no: False everywhere.  [B] bool
    """

    def __init__(self, motion: Motion, *, auto_reset: bool, between_draws: int, compiled: bool, no: Tensor) -> None:
        """Compile nothing yet."""
        self._motion = motion
        self._auto_reset = auto_reset
        self._between_draws = between_draws
        self._age = between_draws  # steps since start states were drawn
        self._compile = compiled
        self._compiled: dict[str, Compiled] = {}
        self._no = no
        self._never = no.unsqueeze(1)  # [B, K]

    def forget(self) -> None:
        """See Stepper."""
        self._age = self._between_draws

    def step(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """See Stepper."""
        if not self._auto_reset:
            changed, reached, _ = self._call("episodic", self._motion.advance_episodic, carry, action)
            seen = {**reached, "initial_state": self._no}
            return {**carry, **changed}, seen, seen
        if self._age >= self._between_draws:
            carry = {**carry, **self._call("starts", self._motion.starts, carry)[0]}
            self._age = 0
        self._age += 1
        changed, reached, current = self._call("step", self._motion.step, carry, action)
        return {**carry, **changed}, *_quiet(reached, current, self._no)

    def rollout(
        self, carry: Tensors, action: Tensors | None, n_steps: int
    ) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """See Stepper."""
        many = partial(
            self._motion.many,
            n_steps=n_steps,
            auto_reset=self._auto_reset,
            between_draws=self._between_draws,
            for_compiler=self._compile,
        )
        plan = {} if action is None else {key: value.contiguous() for key, value in action.items()}  # [K, B, ...]
        name = f"rollout of {n_steps}" if plan else f"exploration of {n_steps}"
        changed, *results, drawn = self._call(name, many, carry, plan)
        self._age = (n_steps - 1) % self._between_draws + 1
        reached, current, masks = results
        if self._never.shape[1] != n_steps:
            self._never = self._no.unsqueeze(1).expand(-1, n_steps)
        no = self._never
        if self._auto_reset:
            acted = drawn or {key: value.transpose(0, 1) for key, value in plan.items()}
            reached, current = _quiet(*self._motion.complete(reached, current, acted), no)
            return {**carry, **changed}, reached, current, masks
        seen = {**reached, "initial_state": no}
        return {**carry, **changed}, seen, seen, masks

    def _call(self, name: str, fn: Callable[..., Any], *args: Tensors) -> Any:  # noqa: ANN401 - dicts of tensors
        if not self._compile:
            # Nobody differentiates a simulation: without autograd's part of each call, a step takes a tenth less.
            with below_autograd():
                return fn(*args)
        if name not in self._compiled:
            self._compiled[name] = Compiled(fn)
        return self._compiled[name](*args)


def _quiet(reached: Tensors, current: Tensors, no: Tensor) -> tuple[Tensors, Tensors]:
    """Add the masks that are False everywhere: nothing that was reached is initial, nothing to act on is over."""
    return {**reached, "initial_state": no}, {**current, "terminated": no, "truncated": no, "done": no}
