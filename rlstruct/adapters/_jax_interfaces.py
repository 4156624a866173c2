"""Interfaces of functional JAX environments, reduced to two functions and two spaces; and the devices of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlstruct.errors import BadTypeError, BadValueError
from rlstruct.spaces import Space

Tree = Any
"""A pytree of JAX arrays."""


def interface_of(env: Any, params: Tree) -> Tree:  # noqa: ANN401 - JAX is no dependency
    """Return ``begin(key) -> (state, frame)``, ``move(key, state, action)`` and the spaces of frames and actions.

    ``move`` returns ``(state, frame, reward, terminated, truncated)``. All are of one environment.

    Raises:
        TypeError: the environment has neither gymnax's interface nor Brax's.
    """
    if hasattr(env, "step_env"):
        return _gymnax(env, env.default_params if params is None else params)
    if params is None and hasattr(env, "observation_size") and hasattr(env, "action_size"):
        return _brax(env)
    raise BadTypeError(
        f"JaxEnv: {type(env).__name__} with params={params!r} is neither a gymnax environment (it has no step_env) nor "
        "one with Brax's interface (reset, step, observation_size, action_size; no params). Pass the environment "
        "without its library's wrappers."
    )


def _gymnax(env: Any, params: Tree) -> Tree:  # noqa: ANN401
    def begin(key: Tree) -> Tree:
        frame, state = env.reset_env(key, params)
        return state, frame

    def move(key: Tree, state: Tree, action: Tree) -> Tree:
        frame, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return state, frame, reward, terminated, env.is_truncated(state, params)

    return begin, move, _space(env.observation_space(params)), _space(env.action_space(params))


def _brax(env: Any) -> Tree:  # noqa: ANN401
    def begin(key: Tree) -> Tree:
        state = env.reset(key)
        return state, state.obs

    def move(_: Tree, state: Tree, action: Tree) -> Tree:  # the state holds the key
        state = env.step(state, action)
        done = state.done > 0
        return state, state.obs, state.reward, done, done & False

    size = env.observation_size
    seen = spaces.Dict({key: _box(shape) for key, shape in size.items()}) if isinstance(size, Mapping) else _box(size)
    return begin, move, seen, _box(env.action_size, 1.0)


def _box(shape: int | tuple[int, ...], bound: float = np.inf) -> spaces.Box:
    return spaces.Box(-bound, bound, (shape,) if isinstance(shape, int) else tuple(shape), np.float32)


def _space(space: Any) -> Space:  # noqa: ANN401 - gymnax's, or gymnasium's own
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "Box":
        low, high = (np.broadcast_to(np.asarray(end, space.dtype), space.shape) for end in (space.low, space.high))
        return spaces.Box(low, high, space.shape, np.dtype(space.dtype).type)
    if kind == "Dict":
        return spaces.Dict({name: _space(child) for name, child in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([_space(child) for child in space.spaces])
    raise BadTypeError(f"JaxEnv: got a {kind} space, expected Discrete, Box, Dict or Tuple.")


def device_of(jax: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Return JAX's device for one of torch's."""
    try:
        return jax.devices({"cuda": "gpu"}.get(device.type, device.type))[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise BadValueError(
            f"JaxEnv: JAX has no {device}, only {jax.devices()}. Install JAX with CUDA, or keep the simulation on the "
            "CPU and move it with DeviceEnv."
        ) from error
