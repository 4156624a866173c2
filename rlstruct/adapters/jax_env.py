"""JaxEnv: environments written in JAX with gymnax's interface, their arrays shared with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rlstruct.adapters._adapter import Adapter, Tensors, optional
from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.profiling import operation
from rlstruct.spaces import Space
from rlstruct.vec_env import Observed, Stepped


class JaxEnv(Adapter):
    """B copies of a gymnax environment (1.0 or later), stepped by one jitted, vmapped function.

    Observations pass from JAX to torch and actions back through DLPack: the same memory, on CPU and GPU, seen by both.
    Ended rows restart within the step, from a key of their own, and their true final observation is kept. Environment j
    draws from ``seed + j``, in a batch of any size. JAX never writes to an array, so neither may you. Its state is not
    saved: `state_dict` is None.

    >>> # env, parameters = gymnax.make("Breakout-MinAtar"); JaxEnv(env, 4096, seed, parameters, device="cuda:0")

    Args:
        env: the environment: ``reset_env, step_env, is_truncated, action_space, observation_space, default_params``.
        n_envs: B.
        seed: environment j draws from ``seed + j``.
        parameters: its parameters; by default ``env.default_params``.
        device: where it runs: a device that JAX has too.

    Raises:
        ImportError: JAX is missing.
        ValueError: the device does not exist, for torch or for JAX.
        TypeError: a space is of a kind that gymnasium does not know.
    """

    def __init__(
        self,
        env: Any,  # noqa: ANN401 - JAX is no dependency
        n_envs: int,
        seed: int = 0,
        parameters: Any | None = None,  # noqa: ANN401
        *,
        device: DeviceLike = "cpu",
    ) -> None:
        """Compile nothing yet: the first reset and the first step do."""
        self._jax = jax = optional("jax", "jax", "JaxEnv")
        where = resolve_device(device)
        parameters = env.default_params if parameters is None else parameters
        self._on = _jax_device(jax, where)
        super().__init__(
            n_envs,
            where,
            _space_of(env.observation_space(parameters), "observation"),
            _space_of(env.action_space(parameters), "action"),
        )
        self._functions = _compile(jax, env, parameters)
        keys = jax.vmap(jax.random.key)(np.arange(seed, seed + n_envs, dtype=np.uint32))
        self._keys = jax.device_put(keys, self._on)
        self._state: Any = None

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Start a new episode in every environment; see `VecEnv.reset`.

        Raises:
            ValueError: ``env_info`` is not empty: such environments take none.
        """
        self._refuse_info(env_info)
        self._keys, self._state, frames = self._functions[0](self._keys)
        return self._begin(self._shared(frames))

    @operation("simulator")
    def step(self, action: DictTensor) -> Stepped:
        """Take one step in every environment; see `VecEnv.step`.

        Raises:
            RuntimeError: `reset` was not called.
        """
        if self._state is None:
            raise RuntimeError("JaxEnv.step: there is nothing to step. Call reset() first.")
        sent, acted = self._sent(action)
        given = self._jax.tree.map(self._to_jax, sent)
        self._keys, self._state, answer = self._functions[1](self._keys, self._state, given)
        reached, current, reward, terminated, truncated = answer
        ends = (from_dlpack(terminated), from_dlpack(truncated))
        frames = self._shared(reached), self._shared(current)
        return self._answer(acted, from_dlpack(reward), ends, *frames)

    def _to_jax(self, tensor: Tensor) -> Any:  # noqa: ANN401
        # JAX without 64 bits refuses int64, and its own spaces are int32.
        narrow = tensor.to(torch.int32) if tensor.dtype is torch.int64 else tensor
        return self._jax.numpy.from_dlpack(narrow.detach().contiguous())

    def _shared(self, observation: Any) -> Tensors:  # noqa: ANN401
        return {key: from_dlpack(value) for key, value in self._flat(observation).items()}


def _compile(jax: Any, env: Any, parameters: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Make the two functions: begin all episodes; take one step and restart what ended."""

    def begin(key: Any) -> Any:  # noqa: ANN401
        key, own = jax.random.split(key)
        observation, state = env.reset_env(own, parameters)
        return key, state, observation

    def move(key: Any, state: Any, action: Any) -> Any:  # noqa: ANN401
        key, for_step, for_start = jax.random.split(key, 3)
        reached, state, reward, terminated, _ = env.step_env(for_step, state, action, parameters)
        truncated = env.is_truncated(state, parameters) & ~terminated
        first, start = env.reset_env(for_start, parameters)
        done = terminated | truncated

        def restart(new: Any, old: Any) -> Any:  # noqa: ANN401
            return jax.tree.map(lambda a, b: jax.numpy.where(done, a, b), new, old)

        current = restart(first, reached)
        reward = jax.numpy.asarray(reward, jax.numpy.float32)
        return key, restart(start, state), (reached, current, reward, terminated, truncated)

    return jax.jit(jax.vmap(begin)), jax.jit(jax.vmap(move))


def _jax_device(jax: Any, device: torch.device) -> Any:  # noqa: ANN401
    kind = {"cuda": "gpu"}.get(device.type, device.type)
    try:
        return jax.devices(kind)[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"JaxEnv: JAX has no {device}, only {jax.devices()}. Install JAX for it, or use the CPU and DeviceEnv."
        ) from error


def _space_of(space: Any, what: str) -> Space:  # noqa: ANN401 - gymnax's, or gymnasium's own
    """Turn a gymnax space into gymnasium's."""
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))  # int64, as agents draw them
    if kind == "Box":
        dtype: Any = np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(end, dtype), space.shape) for end in (space.low, space.high))
        return spaces.Box(low, high, space.shape, dtype)
    if kind in ("Dict", "Tuple"):
        inner = space.spaces
        if kind == "Dict":
            return spaces.Dict({name: _space_of(child, what) for name, child in inner.items()})
        return spaces.Tuple([_space_of(child, what) for child in inner])
    raise TypeError(f"JaxEnv: the {what} space is a {kind}, expected Discrete, Box, Dict or Tuple.")
