"""The kernel executor: T steps of simulator, small network and draws in one launch, where both sides can say how.

An agent says that it is a perceptron, by a method ``perceptron()`` of its class that returns a `Perceptron` or None; it
must promise to be pure. An environment brings the kernel, by a method ``fused_rollout(perceptron, n_timesteps)`` of its
class that returns a `FusedRollout` or None. Wherever one of them says None, steps are taken one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weight [outputs, inputs] and bias [outputs] of each linear layer, from the inputs on."""


@dataclass(frozen=True)
class Perceptron:
    """An agent that draws Discrete actions from the logits of one perceptron, and has a baseline from another.

    It takes ``frame`` [B, D] and returns ``action``, ``action_logits``, ``log_probability`` and ``value``, as
    `rlstruct.agents.ActorCriticAgent` does; it draws from ``rng`` with `rlstruct.functional.random.categorical`.
    """

    actor: Layers  # D inputs, one output for each action
    critic: Layers  # D inputs, one output
    activation: str  # between two layers, ``"Tanh"`` or ``"ReLU"``
    stochastic: bool  # whether it draws; else it takes the most probable action

    def kind(self) -> object:
        """Return everything but the values of the weights."""
        networks = (self.actor, self.critic)
        layouts = [[(w.shape, w.dtype, w.device) for layer in network for w in layer] for network in networks]
        return layouts, self.activation


FusedRollout = Callable[[dict[str, Tensor], Tensor, Perceptron], dict[str, Tensor]]
"""Takes T steps of all environments in one launch; they go on from there.

It is called with the observation that the agent acts on first [B, ...], the random keys of all slots [T + 1, B] int64,
and the agent with its present weights. It returns ``stream/<key>``, what the agent saw, ``rng`` included,
[T + 1, B, ...]; ``action/<key>``, what it returned, and ``reached/<key>``, the true next observations, [T, B, ...].
"""
