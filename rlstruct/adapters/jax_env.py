"""JaxEnv: environments that are pure functions in JAX, such as those of gymnax, Brax and MuJoCo Playground."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rlstruct.adapters.torch_vector_env import TensorsEnv
from rlstruct.core import Layout, expect
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadTypeError, BadValueError, import_extra
from rlstruct.options import check_seed

Jax = Any  # a pytree of JAX arrays, or an object of a library that is not a dependency


class JaxEnv(TensorsEnv):
    """B copies of a functional JAX environment, stepped by one jitted and vmapped function.

    The environment has the interface of gymnax 1.0 or newer (``reset_env, step_env, is_truncated``) or that of Brax and
    MuJoCo Playground (``reset(key)`` and ``step(state, action)``, with states that have ``obs, reward, done``). Do not
    wrap it in its library's wrappers for episodes, vmap and restarts: they lose the true final observation.

    torch and JAX share the memory of observations and actions through DLPack, and on CUDA each waits for the other's
    stream. JAX arrays never change, so do not write to the observations.

    Args:
        env: the environment.
        n_envs: B.
        seed: row j draws from ``seed + j``, modulo 2^32, for any B.
        params: parameters of a gymnax environment; by default ``env.default_params``.
        time_limit: number of steps after which an episode is truncated, in addition to the environment's own limit.
        device: where JAX and torch both compute.

    Raises:
        ImportError: JAX is missing.
        ValueError: ``n_envs`` or ``time_limit`` is below 1, or torch or JAX has no such device.
        TypeError: the environment has neither of these interfaces.
    """

    def __init__(
        self, env: Jax, n_envs: int, seed: int = 0, *, params: Jax = None, time_limit: int | None = None,
        device: DeviceLike = "cpu",
    ) -> None:  # fmt: skip
        if min(n_envs, 1 if time_limit is None else time_limit) < 1:
            raise BadValueError(f"JaxEnv: got {n_envs=} and {time_limit=}, expected at least 1.")
        seed = check_seed("JaxEnv", "seed", seed, n_envs)
        self._jax, place = import_extra("jax", "jax", "JaxEnv"), resolve_device(device)
        env = env if hasattr(env, "step_env") else _as_gymnax(env, params)
        if not hasattr(env, "is_truncated"):
            raise BadTypeError(
                f"JaxEnv: {type(env).__name__} has step_env and no is_truncated, expected the interface of gymnax 1.0 "
                "or newer. Upgrade it: pip install 'gymnax>=1.0'."
            )
        params = env.default_params if params is None else params
        try:
            self._place = self._jax.devices({"cuda": "gpu"}.get(place.type, place.type))[place.index or 0]
        except (RuntimeError, IndexError) as error:
            fix = "Install JAX with CUDA, or keep the simulation on the CPU and move it with DeviceEnv."
            raise BadValueError(f"JaxEnv: JAX has no {place}, only {self._jax.devices()}. {fix}") from error
        self._start, self._move = _functions(self._jax, env, params, time_limit or np.inf, place.type == "cpu")
        seeds = np.arange(n_envs, dtype=np.uint32) + np.uint32(seed % 2**32)  # wraps around
        self._keys: Jax = self._jax.vmap(self._jax.random.PRNGKey)(self._jax.device_put(seeds, self._place))
        self._carry: Jax = None
        observation_space, taken = env.observation_space(params), env.action_space(params)
        if not isinstance(observation_space, spaces.Space):
            convert = import_extra("gymnax.environments.spaces", "jax", "JaxEnv").gymnax_space_to_gym_space
            observation_space, taken = convert(observation_space), convert(taken)
        super().__init__(n_envs, observation_space, taken, place)

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the leaves of JAX's state, including the rows' random keys; None before the first reset."""
        return self._leaves(self._carry) or None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of these or identically created environments, bit for bit.

        Raises:
            KeyError, ShapeMismatchError: the state comes from other environments.
        """
        carry = self._carry or self._start(self._keys)[0]
        expect("JaxEnv.load_state_dict:", state, Layout.of(self._leaves(carry)), fix="Make the same environment.")
        arrays = [state[f"leaf/{i}"].cpu().numpy().copy() for i in range(len(state))]  # sync: once per load
        self._carry = self._jax.device_put(self._jax.tree.structure(carry).unflatten(arrays), self._place)
        self._begun = True

    def _begin(self) -> Jax:
        self._carry, frame = self._start(self._keys if self._carry is None else self._carry[0])  # the keys so far
        return self._to_torch(frame)

    def _advance(self, action: Jax) -> Jax:
        self._carry, answer = self._move(self._carry, self._jax.tree.map(self._to_jax, action))
        return self._to_torch(answer)

    def _leaves(self, carry: Jax) -> dict[str, Tensor]:
        return {f"leaf/{i}": from_dlpack(leaf).clone() for i, leaf in enumerate(self._jax.tree.leaves(carry))}

    def _to_torch(self, tree: Jax) -> Jax:
        on_host = self._place.platform == "cpu"  # on CUDA, DLPack orders the streams
        return self._jax.tree.map(from_dlpack, self._jax.block_until_ready(tree) if on_host else tree)

    def _to_jax(self, tensor: Tensor) -> Jax:
        narrow = tensor.to(torch.int32) if tensor.dtype is torch.int64 else tensor  # JAX's default integers
        return self._jax.numpy.from_dlpack(narrow.detach().contiguous())


def _functions(jax: Jax, env: Jax, params: Jax, limit: float, on_host: bool) -> tuple[Jax, Jax]:
    """Return two jitted functions: one starts all rows, and one steps all rows and restarts those that ended."""
    of_one = env.reset_env, env.step_env, env.is_truncated
    begin, move, cut = (jax.vmap(partial(function, params=params)) for function in of_one)

    def start(keys: Jax) -> Jax:
        both = jax.vmap(jax.random.split)(keys)
        frame, state = begin(both[:, 1])
        return (both[:, 0], state, jax.numpy.zeros(len(keys), jax.numpy.int32)), frame

    def step(carry: Jax, action: Jax) -> Jax:
        keys, state, elapsed = carry[0], carry[1], carry[2] + 1
        three = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
        reached, state, reward, terminated, _ = move(three[:, 1], state, action)
        truncated = (cut(state) | (elapsed >= limit)) & ~terminated
        done, ended = terminated | truncated, (reached, state)

        def restarted() -> Jax:
            return jax.tree.map(partial(jax.vmap(jax.numpy.where), done), begin(three[:, 2]), ended)

        # On a GPU a branch would wait for the host, so every row draws a new start in every step.
        current, after = jax.lax.cond(done.any(), restarted, lambda: ended) if on_host else restarted()
        carry = three[:, 0], after, jax.numpy.where(done, 0, elapsed)
        return carry, (current, reward.astype(jax.numpy.float32), terminated, truncated, reached)

    return jax.jit(start), jax.jit(step)


def _as_gymnax(env: Jax, params: Jax) -> Jax:
    """Adapt Brax's interface, which has no parameters and keeps random keys in its states, to gymnax's."""
    if params is not None or not (hasattr(env, "observation_size") and hasattr(env, "action_size")):
        fix = "(observation_size, action_size; no params). Pass it without its library's wrappers."
        raise BadTypeError(f"JaxEnv: {type(env).__name__} has neither gymnax's interface (step_env) nor Brax's {fix}")

    def as_step(state: Jax) -> Jax:
        return state.obs, state, state.reward, state.done > 0, {}

    def box(size: Jax, bound: float = np.inf) -> spaces.Box:
        return spaces.Box(-bound, bound, (size,) if isinstance(size, int) else tuple(size))

    size = env.observation_size
    frames = spaces.Dict({key: box(size[key]) for key in size}) if isinstance(size, Mapping) else box(size)
    return SimpleNamespace(
        default_params=None, reset_env=lambda key, params: as_step(env.reset(key))[:2],
        step_env=lambda key, state, action, params: as_step(env.step(state, action)),
        is_truncated=lambda _, params: False,
        observation_space=lambda params: frames, action_space=lambda params: box(env.action_size, 1.0),
    )  # fmt: skip
