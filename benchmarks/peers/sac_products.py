"""Matrix products of a gradient step of SAC, for arrays of torch and of jax alike; imports neither library.

They are those of a step whose networks have neither biases nor activations, so that each product reads what another has
just written, as it does in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Array = Any
Networks = Sequence[Sequence[Array]]
"""Weights of the layers of the policy, of the critics, and of their targets."""
BATCH, HIDDEN = 256, 256
ACTOR = (3, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2)
CRITICS = (4, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)
"""Inputs and outputs of each layer on Pendulum-v1, with two numbers for the policy's action."""


def forward(x: Array, weights: Sequence[Array]) -> list[Array]:
    """Return the inputs of all layers, and the output of the last one."""
    layers = [x]
    for weight in weights:
        layers.append(layers[-1] @ weight)
    return layers


def backward(layers: Sequence[Array], weights: Sequence[Array], gradient: Array) -> list[Array]:
    """Return the gradients of the weights; ``gradient`` is that of the network's output."""
    gradients = []
    for i in reversed(range(len(weights))):
        gradients.append(layers[i].mT @ gradient)
        gradient = gradient @ weights[i].mT if i > 0 else None  # nothing needs the gradient of the observations
    return gradients[::-1]


def products(
    networks: Networks, inputs: Sequence[Array], gradients: Sequence[Array]
) -> tuple[Networks, tuple[Array, ...]]:
    """Return the gradients of the networks' weights, the targets unchanged, and what else a step computes.

    Args:
        networks: see `arguments`.
        inputs: states, and those reached; and with the actions taken, with the next ones, and with those of the policy.
        gradients: of the outputs of the policy, of the critics, and of the critics of the policy's actions.
    """
    actor, critics, targets = networks
    observed, reached, taken, taken_next, proposed = inputs
    of_actor, of_critics, gradient = gradients
    next_action, target = forward(reached, actor)[-1], forward(taken_next, targets)[-1]
    new_critics = backward(forward(taken, critics), critics, of_critics)
    layers, value = forward(observed, actor), forward(proposed, critics)[-1]
    for weight in reversed(critics):  # to the policy's action; the critics' weights are constants of its loss
        gradient = gradient @ weight.mT
    return (backward(layers, actor, of_actor), new_critics, targets), (next_action, target, value, gradient)


def arguments(ones: Callable[..., Array], weight: Callable[..., Array]) -> tuple[Any, Any, Any]:
    """Return networks, their inputs, and gradients of their outputs; shapes have a first axis for the two critics.

    Args:
        ones: makes an array of a shape.
        weight: the same, for the weights of a layer.
    """
    actor = [weight(*layer) for layer in ACTOR]
    critics, targets = ([weight(2, *layer) for layer in CRITICS] for _ in range(2))
    inputs = *(ones(BATCH, 3) for _ in range(2)), *(ones(2, BATCH, 4) for _ in range(3))
    return (actor, critics, targets), inputs, (ones(BATCH, 2), ones(2, BATCH, 1), ones(2, BATCH, 1))
