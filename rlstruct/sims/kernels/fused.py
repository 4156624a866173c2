"""Whole batches in one launch: simulator, perceptron and draws together; see `rlstruct.engine.fused`."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct.engine.fused import FusedRollout, Layers, Perceptron
from rlstruct.sims._state import Tensors
from rlstruct.sims.kernels.advance import make_advance
from rlstruct.sims.kernels.game import Choice, GameKernel, make_access
from rlstruct.sims.kernels.perceptron import ACTIVATIONS, make_perceptron
from rlstruct.sims.kernels.stepper import WarpStepper, point


class FusedLaunch:
    """The kernel of a game with an agent in it, see `fused_rollout`.

    Args:
        stepper: of the environments.
        perceptron: the agent, for the sizes of its layers.
        n_timesteps: T.
    """

    def __init__(self, stepper: WarpStepper, perceptron: Perceptron, n_timesteps: int) -> None:
        """Compile the kernel, or find it in the cache, and record its launch."""
        self._stepper, self._T = stepper, n_timesteps
        self._n_actions = perceptron.actor[-1][0].shape[0]
        width = perceptron.actor[0][0].shape[0]
        kind = (self._n_actions, -(-width // 4) * 4, len(perceptron.actor) - 1, perceptron.activation)
        memory, struct, kernel = _make(stepper.game, *kind)
        by, B, device = struct(), stepper.n_envs, stepper.device
        by.rng = wp.from_torch(torch.zeros((1, B), dtype=torch.int64, device=device))
        by.weights = wp.from_torch(torch.zeros((1, 4), dtype=torch.float32, device=device), dtype=wp.vec4f)
        by.logits = wp.from_torch(torch.zeros((1, self._n_actions, B), dtype=torch.float32, device=device))
        for name in ("log_probability", "value"):
            setattr(by, name, wp.from_torch(torch.zeros((1, B), dtype=torch.float32, device=device)))
        self.launch = stepper.record(kernel, memory(), by)

    @torch.no_grad()
    def __call__(
        self, carry: Tensors, observation: Tensors, rng: Tensor, perceptron: Perceptron
    ) -> tuple[Tensors, Tensors]:
        """Take T steps.

        Args:
            carry: where the simulation is.
            observation: see `rlstruct.engine.fused.FusedRollout`, as are the next two.
            rng: likewise.
            perceptron: likewise.

        Returns:
            What changes in the carry, and the record of `rlstruct.engine.fused.FusedRollout`.
        """
        stepper, T = self._stepper, self._T
        B, device = stepper.n_envs, stepper.device
        actor, critic = (_pack(layers) for layers in (perceptron.actor, perceptron.critic))
        stream = {
            "current_frame": _behind(observation["frame"].t(), T),  # [T + 1, D, B]
            "current_reward": _behind(observation["reward"], T),
            "current_last": _behind(observation["last_action"], T),
        }
        seen = stepper.allocate((T,), ("reached",)) | {key: value[1:] for key, value in stream.items()}
        said = {
            "logits": torch.empty((T, self._n_actions, B), dtype=torch.float32, device=device),
            "log_probability": torch.empty((T, B), dtype=torch.float32, device=device),
            "value": torch.empty((T, B), dtype=torch.float32, device=device),
        }
        rng, weights = rng.contiguous(), torch.cat([actor, critic])  # [N, 4]
        by = self.launch.params[2]
        by.critic, by.stochastic = actor.shape[0], perceptron.stochastic
        point(by, {"rng": rng, "weights": weights, **said})
        changed = stepper.launch(self.launch, carry, T, seen)
        terminated, truncated, done = seen["flags"].unbind(1)  # [T, B]
        ends = {"terminated": terminated, "truncated": truncated, "done": done}
        # Masks that are False everywhere were not written.
        current = dict(zip(ends, done.new_zeros((3, T + 1, B)), strict=True))
        current |= {"initial_state": torch.cat([observation["initial_state"].unsqueeze(0), done]), "rng": rng}
        parts = {
            "stream": stepper.observation(stream, "current") | current,
            "reached": stepper.observation(seen, "reached") | ends | {"initial_state": torch.zeros_like(done)},
            "action": {
                "action": seen["reached_last"].clone(),
                "action_logits": said.pop("logits").transpose(1, 2),
                **said,
            },
        }
        return changed, {f"{part}/{key}": value for part, tensors in parts.items() for key, value in tensors.items()}


def fused_rollout(env: Any, stepper: Any, perceptron: Perceptron, n_timesteps: int) -> FusedRollout | None:
    """See `TensorEnv.fused_rollout`.

    Args:
        env: its actions must be Discrete, its frames vectors of float32.
        stepper: its WarpStepper.
        perceptron: the agent; all hidden layers of both networks must be of one width.
        n_timesteps: T.
    """
    action_space, observation_space = env.action_space, env.observation_space
    if not isinstance(action_space, spaces.Discrete) or not isinstance(observation_space, spaces.Box):
        return None
    if len(observation_space.shape) != 1 or observation_space.dtype != np.float32:
        return None
    n_inputs, width, depth = observation_space.shape[0], perceptron.actor[0][0].shape[0], len(perceptron.actor)
    found = [[tuple(weight.shape) for weight, _ in layers] for layers in (perceptron.actor, perceptron.critic)]
    expected = []
    for n_outputs in (int(action_space.n), 1):
        widths = [n_inputs, *[width] * (depth - 1), n_outputs]
        expected.append([(after, before) for before, after in pairwise(widths)])
    tensors = [tensor for layers in (perceptron.actor, perceptron.critic) for layer in layers for tensor in layer]
    known = all(tensor.dtype is torch.float32 and tensor.device == stepper.device for tensor in tensors)
    if depth < 2 or found != expected or not known or perceptron.activation not in ACTIVATIONS:
        return None
    launch = FusedLaunch(stepper, perceptron, n_timesteps)

    def rollout(observation: Tensors, rng: Tensor, perceptron: Perceptron) -> Tensors:
        changed, record = launch(env.carry(), observation, rng, perceptron)
        shown = {key: record[f"stream/{key}"][-1].clone() for key in observation}  # the rest is the user's
        env.set_carry({**env.carry(), **changed}, shown)
        return record

    return rollout


@functools.cache
def _make(game: GameKernel, n_actions: int, width: int, n_hidden: int, activation: str) -> tuple[Any, Any, Any]:
    access = make_access(game, Choice)
    perceptron, choose = make_perceptron(game, n_actions, width, n_hidden, activation)
    return access.Memory, perceptron, make_advance(game, Choice, access, perceptron, choose)


def _pack(layers: Layers) -> Tensor:
    """Put weights into the order in which `make_perceptron` reads them, [n, 4] float32."""
    packed, width = [], layers[0][0].shape[0]
    for number, (weight, bias) in enumerate(layers):
        rows = torch.cat([bias.unsqueeze(1), weight], dim=1)  # [outputs, 1 + inputs]
        missing_inputs = -width % 4 if number else 0  # hidden layers, and so the inputs of the next, come in fours too
        rows = nn.functional.pad(rows, (0, missing_inputs, 0, -rows.shape[0] % 4))
        packed.append(rows.view(-1, 4, rows.shape[1]).transpose(1, 2).reshape(-1, 4))
    return torch.cat(packed)


def _behind(first: Tensor, n_steps: int) -> Tensor:
    """Memory for a first value and K more, [K + 1, ...]."""
    memory = first.new_empty((n_steps + 1, *first.shape))
    memory[0].copy_(first)
    return memory
