"""Batches collected in one launch: simulator, perceptron and random draws together; see `rlstruct.engine.fused`."""

from __future__ import annotations

import functools
import logging
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct.core.named_tensors import part_of
from rlstruct.engine.fused import FusedRollout, Layers, Perceptron
from rlstruct.errors import BadValueError, ShapeMismatchError
from rlstruct.sims.kernels import GameKernel, quietly, start
from rlstruct.sims.kernels.advance import Memory, make_advance
from rlstruct.sims.kernels.perceptron import ACTIVATIONS, make_perceptron
from rlstruct.sims.state import Tensors

_logger = logging.getLogger(__name__)

BLOCK = 64
"""Threads per block: few enough for 4,096 environments to occupy half of the multiprocessors of a large GPU."""

MOST_HIDDEN = 128
"""Largest hidden layer of a fused rollout on CUDA, where the driver reserves stacks for all threads that fit."""
_HIDDEN_ON_STACK = 3  # hidden layers that a thread keeps on its stack, says ptxas


def fused_rollout(env: Any, perceptron: Perceptron, n_timesteps: int) -> FusedRollout | None:
    """Return a launch for `TensorEnv.fused_rollout`, or None unless all hidden layers have one width.

    On CUDA, also return None if they are wider than `MOST_HIDDEN`.
    """
    n_inputs, width = env.observation_space.shape[0], perceptron.actor[0][0].shape[0]
    if env.device.type == "cuda" and width > MOST_HIDDEN:
        gpu: Any = torch.cuda.get_device_properties(env.device)
        reserved = 4 * _HIDDEN_ON_STACK * width * gpu.multi_processor_count * gpu.max_threads_per_multi_processor
        _logger.info(
            "hidden layers of width %d are not fused with the simulator: %s would reserve %.2f GB for the stacks of "
            "its threads. The widest fused ones have %d.",
            width,
            env.device,
            1e-9 * reserved,
            MOST_HIDDEN,
        )
        return None
    depth = len(perceptron.actor)
    shapes = [[tuple(weight.shape) for weight, _ in layers] for layers in (perceptron.actor, perceptron.critic)]
    expected = []
    for n_outputs in (int(env.action_space.n), 1):
        widths = [n_inputs, *[width] * (depth - 1), n_outputs]
        expected.append([(after, before) for before, after in pairwise(widths)])
    tensors = [tensor for layers in (perceptron.actor, perceptron.critic) for layer in layers for tensor in layer]
    supported = all(tensor.dtype is torch.float32 and tensor.device == env.device for tensor in tensors)
    if depth < 2 or shapes != expected or not supported or perceptron.activation not in ACTIVATIONS:
        return None
    return FusedLaunch(env, perceptron, n_timesteps)


class FusedLaunch:
    """Recorded launch of a simulator's kernel with an agent in it: a `rlstruct.engine.fused.FusedRollout`.

    Each batch allocates its results, points the recorded launch at them, and launches.
    """

    def __init__(self, env: Any, perceptron: Perceptron, n_timesteps: int) -> None:
        self._env, self._T, self._n_actions = env, n_timesteps, perceptron.actor[-1][0].shape[0]
        width = perceptron.actor[0][0].shape[0]
        variant = (self._n_actions, -(-width // 4) * 4, len(perceptron.actor) - 1, perceptron.activation)
        struct, kernel = _make(game := env.kernel(), *variant)
        self._n_fields, self._n_numbers = game.state._length_, game.frame._length_
        env_results, agent_results = self._allocate()
        keys = env_results["next_clock"]
        env_results |= {"env_key": keys[0], "state": env_results["next_state"], "clock": keys}
        io, policy = Memory(), struct()
        for target, tensors in ((io, env_results), (policy, {**agent_results, "rng": keys})):
            for name, value in tensors.items():
                setattr(target, name, wp.from_torch(value))
        policy.weights = wp.from_torch(torch.zeros((1, 4), device=env.device), dtype=wp.vec4f)
        device, began = wp.device_from_torch(env.device), time.perf_counter()
        inputs = [io, policy, n_timesteps, env.time_limit or 0]
        with quietly():
            self.launch = wp.launch(kernel, env.n_envs(), inputs, device=device, record_cmd=True, block_dim=BLOCK)
        _logger.info("kernel %s on %s: ready after %.1f s", kernel.key, device, time.perf_counter() - began)

    @torch.no_grad()
    def __call__(self, observation: Tensors, rng: Tensor, perceptron: Perceptron) -> Tensors:
        """Take T steps; see `rlstruct.engine.fused.FusedRollout`."""
        state, (env_results, agent_results) = self._state(), self._allocate()
        env_results["current_frame"][0].copy_(observation["frame"].t())
        env_results["current_reward"][0].copy_(observation["reward"])
        env_results["current_last"][0].copy_(observation["last_action"])
        actor, critic = (_pack(layers) for layers in (perceptron.actor, perceptron.critic))
        rng, weights = rng.contiguous(), torch.cat([actor, critic])  # [N, 4]
        _, io, policy, *_ = self.launch.params
        policy.critic, policy.stochastic = actor.shape[0], perceptron.stochastic
        _point(io, {**state, **env_results})
        _point(policy, {**agent_results, "rng": rng, "weights": weights})
        cuda = self._env.device.type == "cuda"
        self.launch.launch(wp.stream_from_torch(torch.cuda.current_stream(self._env.device)) if cuda else None)
        results = _results(observation["initial_state"], rng, env_results, agent_results)
        carry = self._env.state_tensors()
        carry["elapsed"], carry["episode"], state_key = env_results["next_clock"].unbind(0)
        if self._env.stochastic:
            carry["state_key"] = state_key
        names = [name for name in carry if name.startswith("state/")]
        carry |= zip(names, env_results["next_state"].unbind(0), strict=True)
        self._env.set_state_tensors(carry, {key: results[f"stream/{key}"][-1].clone() for key in observation})
        return results

    def _allocate(self) -> tuple[Tensors, Tensors]:
        """Allocate the results of a launch: those of the simulator, and those of the agent."""
        T, B, device = self._T, self._env.n_envs(), self._env.device

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((*shape, B), dtype=dtype, device=device)

        env_results = {"next_state": numbers(self._n_fields), "next_clock": numbers(3, dtype=torch.int64)}
        env_results["flags"] = numbers(T, 3, dtype=torch.bool)
        for end, n in (("reached", T), ("current", T + 1)):
            env_results[f"{end}_frame"], env_results[f"{end}_reward"] = numbers(n, self._n_numbers), numbers(n)
            env_results[f"{end}_last"] = numbers(n, dtype=torch.int64)
        return env_results, {"logits": numbers(T, self._n_actions), "log_probability": numbers(T), "value": numbers(T)}

    def _state(self) -> Tensors:
        """Stack the current state of the simulation."""
        carry, B = self._env.state_tensors(), self._env.n_envs()
        fields = part_of(carry, "state/")
        layout = {name: (tuple(value.shape), value.dtype) for name, value in fields.items()}
        if list(layout.values()) != [((B,), torch.float32)] * self._n_fields:
            raise ShapeMismatchError(
                f"backend='warp': the state is {layout}, expected {self._n_fields} fields of torch.float32 for {B} "
                "environments, as the kernel says. Correct one of them, or use backend='torch'."
            )
        return {
            "env_key": carry["env_key"].contiguous(),
            "state": torch.stack(list(fields.values())),
            "clock": torch.stack([carry["elapsed"], carry["episode"]]),
        }


def _results(initial_state: Tensor, rng: Tensor, env_results: Tensors, agent_results: Tensors) -> Tensors:
    """Return the results of a launch under the names of `rlstruct.engine.fused.FusedRollout`."""
    ends = dict(zip(("terminated", "truncated", "done"), env_results["flags"].unbind(1), strict=True))  # of [T, B]
    stream = dict(zip(ends, ends["done"].new_zeros((3, *rng.shape)), strict=True)) | {"rng": rng}
    stream["initial_state"] = torch.cat([initial_state.unsqueeze(0), ends["done"]])
    reached = ends | {"initial_state": torch.zeros_like(ends["done"])}
    for end, frames in (("current", stream), ("reached", reached)):
        frames["frame"] = env_results[f"{end}_frame"].transpose(1, 2)
        frames["reward"], frames["last_action"] = env_results[f"{end}_reward"], env_results[f"{end}_last"]
    action = {"action_logits": agent_results["logits"].transpose(1, 2), "action": env_results["reached_last"].clone()}
    action |= {name: agent_results[name] for name in ("log_probability", "value")}
    parts = {"stream": stream, "reached": reached, "action": action}
    return {f"{part}/{key}": value for part, tensors in parts.items() for key, value in tensors.items()}


def check_kernel(env: Any) -> None:
    """Initialise Warp; raise unless the kernel belongs to the simulator's own class, and supports its spaces."""
    start()
    env_class, game = type(env), env.kernel()
    age = next(i for i, cls in enumerate(env_class.__mro__) if {"kernel", "kernel_module"} & vars(cls).keys())
    changed = [m for cls in env_class.__mro__[:age] for m in ("initial", "transition", "observe") if m in vars(cls)]
    if changed:
        name, owner = env_class.__name__, env_class.__mro__[age].__name__
        raise BadValueError(
            f"{name}: backend='warp' would run the kernel of {owner}, which ignores {name}.{changed[0]}. "
            f"Override {name}.kernel too, or use backend='torch' or 'compile'."
        )
    if not isinstance(env.action_space, spaces.Discrete) or env.action_space.start != 0:
        raise BadValueError(
            f"backend='warp': got the action space {env.action_space}, expected Discrete from 0. Use backend='torch'."
        )
    shape, dtype = env.observation_space.shape, env.observation_space.dtype
    if shape != (game.frame._length_,) or dtype != np.float32:
        raise ShapeMismatchError(
            f"backend='warp': the kernel shows {game.frame._length_} numbers of float32, expected those of the "
            f"observation space: {shape} of {dtype}. Use dtype=torch.float32, or backend='torch'."
        )


def _point(struct: Any, tensors: Tensors) -> None:
    """Point arrays of a recorded launch at other tensors of the same shapes and strides.

    A launch has two dozen arrays, and new ones from ``wp.from_torch`` would take ten times as long.
    """
    for name, value in tensors.items():
        getattr(struct, name).data = value.data_ptr()


@functools.cache
def _make(game: GameKernel, n_actions: int, width: int, n_hidden: int, activation: str) -> tuple[Any, Any]:
    """Make the struct of an agent and the kernel of the game with it."""
    policy, act = make_perceptron(game, n_actions, width, n_hidden, activation)
    return policy, make_advance(game, policy, act)


def _pack(layers: Layers) -> Tensor:
    """Arrange weights in the order in which `make_perceptron` reads them, [n, 4] float32."""
    packed, width = [], layers[0][0].shape[0]
    for number, (weight, bias) in enumerate(layers):
        rows = torch.cat([bias.unsqueeze(1), weight], dim=1)  # [outputs, 1 + inputs]
        # A hidden layer is padded to a multiple of 4, and so are the next one's inputs.
        missing_inputs = -width % 4 if number else 0
        rows = nn.functional.pad(rows, (0, missing_inputs, 0, -rows.shape[0] % 4))
        packed.append(rows.view(-1, 4, rows.shape[1]).transpose(1, 2).reshape(-1, 4))
    return torch.cat(packed)
