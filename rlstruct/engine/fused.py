"""The kernel executor: T steps of simulator, small network and random draws in one launch.

An agent declares that it is a perceptron by a method ``perceptron()`` of its class, which returns a `Perceptron` or
None; it must promise to be pure. An environment provides the kernel by a method ``fused_rollout(perceptron,
n_timesteps)`` of its class, which returns a `FusedRollout` or None. If either returns None, another executor runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weight [outputs, inputs] and bias [outputs] of each linear layer, the first layer first."""


@dataclass(frozen=True)
class Perceptron:
    """An agent that samples Discrete actions from the logits of one perceptron, with another as its baseline.

    It takes ``frame`` [B, D] and returns ``action``, ``action_logits``, ``log_probability`` and ``value``, as
    `rlstruct.agents.ActorCriticAgent` does; it draws from ``rng`` with `rlstruct.functional.random.categorical`.
    """

    actor: Layers  # D inputs, one output for each action
    critic: Layers  # D inputs, one output
    activation: str  # between two layers, ``"Tanh"`` or ``"ReLU"``
    stochastic: bool  # whether it samples; otherwise it takes the most probable action

    def kind(self) -> object:
        """Return the activation and the layouts of all weights: everything but their values."""
        networks = (self.actor, self.critic)
        layouts = [[(w.shape, w.dtype, w.device) for layer in network for w in layer] for network in networks]
        return layouts, self.activation


FusedRollout = Callable[[dict[str, Tensor], Tensor, Perceptron], dict[str, Tensor]]
"""Takes T steps of all environments in one launch; the next call continues from there.

Its arguments are the first observation that the agent acts on [B, ...], the random keys of all slots [T + 1, B] int64,
and the agent with its current weights. It returns what the agent saw as ``stream/<key>``, with ``rng``,
[T + 1, B, ...]; the agent's output as ``action/<key>``, and the true next observations as ``reached/<key>``,
[T, B, ...].
"""
