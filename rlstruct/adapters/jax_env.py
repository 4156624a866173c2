"""JaxEnv: environments that are pure functions in JAX, such as those of gymnax, Brax and MuJoCo Playground."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rlstruct.adapters._jax_interfaces import Tree, device_of, interface_of
from rlstruct.adapters.torch_vector_env import TorchVectorEnv
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadValueError, MissingPackageError, UsageError, how_to_install
from rlstruct.spaces import Element


class JaxEnv(TorchVectorEnv):
    """B copies of a functional JAX environment, stepped by one jitted and vmapped function.

    It takes gymnax's interface (1.0 or newer: ``reset_env, step_env, is_truncated``) and Brax's, which MuJoCo
    Playground has too (``reset(key)``, and ``step(state, action)`` of a state with ``obs, reward, done``). Pass the
    environment without its library's wrappers for episodes, vmap and restarts: those lose the true final observation.

    Observations reach torch and actions JAX by DLPack: both see the same memory, and on CUDA each waits for the other's
    stream. JAX never writes to an array again, so neither may you. Row j draws from ``seed + j``, whatever B is.

    On CUDA, JAX takes most of the GPU's memory when it starts: set ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` before.

    >>> # env, params = gymnax.make("Breakout-MinAtar"); JaxEnv(env, 4096, seed, params=params, device="cuda:0")
    >>> # JaxEnv(mujoco_playground.registry.load("CartpoleBalance"), 2048, seed, time_limit=1000, device="cuda:0")

    Args:
        env: the environment.
        n_envs: B.
        seed: row j draws from ``seed + j``, modulo 2^32.
        params: parameters of a gymnax environment; by default ``env.default_params``.
        time_limit: steps after which an episode is truncated, in addition to what the environment itself does.
        device: where JAX and torch both compute.

    Raises:
        ImportError: JAX is missing.
        ValueError: ``n_envs`` or ``time_limit`` is below 1, or torch or JAX has no such device.
        TypeError: the environment has neither interface, or a space that gymnasium does not know.
    """

    def __init__(
        self,
        env: Any,  # noqa: ANN401 - JAX is no dependency
        n_envs: int,
        seed: int = 0,
        *,
        params: Any | None = None,  # noqa: ANN401
        time_limit: int | None = None,
        device: DeviceLike = "cpu",
    ) -> None:
        if min(n_envs, 1 if time_limit is None else time_limit) < 1:
            raise BadValueError(f"JaxEnv: got {n_envs=} and {time_limit=}, expected at least 1.")
        self._sim = _Simulation(env, n_envs, seed, params, time_limit, resolve_device(device))
        super().__init__(self._sim, device)

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the leaves of JAX's state, keys of the rows included; None before the first reset."""
        leaves = self._sim.jax.tree.leaves(self._sim.carry)
        return {f"leaf/{i}": from_dlpack(leaf).clone() for i, leaf in enumerate(leaves)} or None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on, bit by bit, where `state_dict` was called, here or in environments made alike.

        Raises:
            ValueError: the state is of another environment or of another number of rows.
        """
        sim, jax, tensors = self._sim, self._sim.jax, [state[f"leaf/{i}"] for i in range(len(state))]
        leaves, structure = jax.tree.flatten(jax.eval_shape(sim.start, sim.keys)[0])
        found = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
        expected = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        if found != expected:
            raise BadValueError(
                f"JaxEnv.load_state_dict: got leaves {found}, expected {expected}. Load a state of the same "
                "environment, parameters and number of rows."
            )
        arrays = [jax.device_put(tensor.cpu().numpy().copy(), sim.place) for tensor in tensors]  # sync: once per load
        sim.carry = jax.tree.unflatten(structure, arrays)


class _Simulation:
    """The vector environment behind `JaxEnv`, in gymnasium's mode SAME_STEP."""

    def __init__(
        self,
        env: Any,  # noqa: ANN401
        n_envs: int,
        seed: int,
        params: Tree,
        limit: int | None,
        device: torch.device,
    ) -> None:
        try:
            import jax
        except ImportError as error:
            raise MissingPackageError(f"JaxEnv needs JAX, which is not installed. {how_to_install('jax')}.") from error
        np_, on_host = jax.numpy, device.type == "cpu"
        begin, move, self.single_observation_space, self.single_action_space = interface_of(env, params)

        def start(keys: Tree) -> Tree:
            both = jax.vmap(jax.random.split)(keys)
            state, frame = jax.vmap(begin)(both[:, 1])
            return (both[:, 0], state, np_.zeros(n_envs, np_.int32)), frame

        def step(carry: Tree, action: Tree) -> Tree:
            keys, state, elapsed = carry
            three = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
            state, reached, reward, terminated, truncated = jax.vmap(move)(three[:, 1], state, action)
            elapsed = elapsed + 1
            truncated = (truncated if limit is None else truncated | (elapsed >= limit)) & ~terminated
            done = terminated | truncated

            def pick(new: Tree, old: Tree) -> Tree:
                rows = new.shape[:1] == (n_envs,)  # empty arrays of MJX have no axis of rows
                return np_.where(done.reshape(-1, *[1] * (new.ndim - 1)), new, old) if rows else old

            def restarted() -> Tree:
                return jax.tree.map(pick, jax.vmap(begin)(three[:, 2]), (state, reached))

            # On a GPU a branch would wait for the host: there every row draws a start in every step.
            after, current = jax.lax.cond(done.any(), restarted, lambda: (state, reached)) if on_host else restarted()
            carry = three[:, 0], after, np_.where(done, 0, elapsed)
            return carry, (current, reward.astype(np_.float32), terminated, truncated, reached)

        self.jax, self.num_envs, self._on_host = jax, n_envs, on_host
        self.place, self.start, self._step = device_of(jax, device), jax.jit(start), jax.jit(step)
        seeds = (np.arange(n_envs, dtype=np.uint64) + seed % 2**32).astype(np.uint32)  # wraps around
        self.keys = jax.vmap(jax.random.PRNGKey)(jax.device_put(seeds, self.place))
        self.carry: Tree = None

    def reset(self, seed: int | None = None) -> tuple[Element, dict[str, Any]]:
        """Start new episodes. The rows have their own keys: no seed is read, and a later reset continues them."""
        self.carry, frame = self.start(self.keys if self.carry is None else self.carry[0])
        return self._to_torch(frame), {}

    def step(self, action: Element) -> tuple[Element, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all rows and restart those that ended."""
        if self.carry is None:
            raise UsageError("JaxEnv.step: there is nothing to step. Call reset() first.")
        self.carry, answer = self._step(self.carry, self.jax.tree.map(self._to_jax, action))
        current, reward, terminated, truncated, reached = self._to_torch(answer)
        return current, reward, terminated, truncated, {"final_obs": reached}

    def close(self) -> None:
        """Forget the state."""
        self.carry = None

    def _to_torch(self, tree: Tree) -> Element:
        ready = self.jax.block_until_ready(tree) if self._on_host else tree  # on CUDA DLPack orders the streams
        return self.jax.tree.map(from_dlpack, ready)

    def _to_jax(self, tensor: Tensor) -> Tree:
        narrow = tensor.to(torch.int32) if tensor.dtype is torch.int64 else tensor  # JAX's default integers
        return self.jax.numpy.from_dlpack(narrow.detach().contiguous())
