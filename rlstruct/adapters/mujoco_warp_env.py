"""MujocoWarpEnv: B worlds of one MuJoCo model, simulated by MuJoCo Warp in memory that torch shares."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.adapters.torch_vector_env import TensorsEnv
from rlstruct.core import Layout, expect
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadValueError, import_extra
from rlstruct.functional.masks import rows_of
from rlstruct.functional.random import child_key
from rlstruct.options import check_seed
from rlstruct.spaces import Space

Model = Any  # a mujoco.MjModel: MuJoCo is not a dependency
_CARRIED = ("qpos", "qvel", "act", "time", "qacc_warmstart")  # state of a world; some models lack some of these


class MujocoTask(Protocol):
    """Start states, observations, rewards and ends for a model. No function may wait for the device."""

    observation_space: Space

    def start(self, key: Tensor, qpos: Tensor, qvel: Tensor) -> tuple[Tensor, Tensor]:
        """Draw start states, as new tensors with the shapes of ``qpos`` and ``qvel``.

        Args:
            key: a random key for each world, see `rlstruct.functional.random`.  [B] int64
            qpos: the model's default state in every row.  [B, nq] float32
            qvel: zeros.  [B, nv] float32
        """

    def observe(self, qpos: Tensor, qvel: Tensor) -> Tensor:
        """Return the frames, [B, ...] with the dtype of ``observation_space``."""

    def reward_and_terminated(self, qpos: Tensor, qvel: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(reward, terminated)`` for the step that led to this state.  [B] float32, [B] bool."""


class MujocoWarpEnv(TensorsEnv):
    """B worlds of one MuJoCo model, simulated by MuJoCo Warp on CUDA or, slowly, on the CPU for tests.

    The tensors ``qpos``, ``qvel`` and ``ctrl`` are views of Warp's arrays, and Warp launches on torch's stream, so
    nothing is copied between the two. Actions are clipped to the range of the controls. The first step compiles
    MuJoCo's kernels, once per machine; on a CPU that takes minutes.

    Args:
        model: a ``mujoco.MjModel``.
        task: see `MujocoTask`.
        n_envs: B.
        seed: world j draws its start states with ``seed + j``.
        frame_skip: number of simulation steps per action.
        time_limit: number of actions after which an episode is truncated; None sets no limit.
        device: ``"cpu"`` or a CUDA device.
        **sizes: limits of MuJoCo Warp's buffers, such as ``nconmax`` and ``njmax``; see ``mujoco_warp.make_data``.

    Raises:
        ImportError: MuJoCo Warp is missing.
        ValueError: the device does not exist, or a number is below 1.
    """

    def __init__(
        self, model: Model, task: MujocoTask, n_envs: int, seed: int = 0, *, frame_skip: int = 1,
        time_limit: int | None = None, device: DeviceLike = "cpu", **sizes: int,
    ) -> None:  # fmt: skip
        if min(n_envs, frame_skip, 1 if time_limit is None else time_limit) < 1:
            raise BadValueError(f"MujocoWarpEnv: got {n_envs=}, {frame_skip=}, {time_limit=}, expected at least 1.")
        seed = check_seed("MujocoWarpEnv", "seed", seed, n_envs)
        self._mjw = import_extra("mujoco_warp", "mujoco-warp", "MujocoWarpEnv")
        self._warp = import_extra("warp", "mujoco-warp", "MujocoWarpEnv")
        self._outcome = getattr(task, "judge", None) or task.reward_and_terminated  # judge: its name in 0.3
        self._task, self._frame_skip, self._limit = task, frame_skip, time_limit or np.inf
        limits = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, [-np.inf, np.inf])
        low, high = limits.astype(np.float32).T
        actions = spaces.Box(low, high, (int(model.nu),), np.float32)
        super().__init__(n_envs, task.observation_space, actions, resolve_device(device))
        self._low, self._high = torch.tensor(low, device=self.device), torch.tensor(high, device=self.device)
        with self._on_torchs_stream():
            self._model = self._mjw.put_model(model)
            self._data = self._mjw.make_data(model, nworld=n_envs, **sizes)
            arrays = {name: getattr(self._data, name, None) for name in (*_CARRIED, "ctrl")}
            views = {
                name: self._warp.to_torch(array) for name, array in arrays.items() if array is not None and array.size
            }
        self._ctrl = views.pop("ctrl")
        start = torch.arange(seed, seed + n_envs, dtype=torch.int64, device=self.device)
        counts = {"key": child_key(start, 0), "episode": torch.full_like(start, -1), "elapsed": torch.zeros_like(start)}
        self._state = {**views, **counts}
        self._qpos0 = torch.tensor(model.qpos0, dtype=torch.float32, device=self.device).expand(n_envs, -1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of every world."""
        return {name: tensor.clone() for name, tensor in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of these or identically created worlds.

        Raises:
            KeyError, ShapeMismatchError: the state comes from other worlds.
        """
        expect("MujocoWarpEnv.load_state_dict:", state, Layout.of(self._state), fix="Make the same worlds.")
        self._begun = True
        for name, tensor in self._state.items():
            tensor.copy_(state[name])

    def _begin(self) -> Tensor:
        """Start a new episode in every world."""
        self._start(torch.ones_like(self._state["key"], dtype=torch.bool))
        return self._frame()

    def _advance(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Take ``frame_skip`` steps in all worlds and restart those that ended."""
        torch.clamp(action, self._low, self._high, out=self._ctrl)
        with self._on_torchs_stream():
            for _ in range(self._frame_skip):
                self._mjw.step(self._model, self._data)
        reward, terminated = self._outcome(self._state["qpos"], self._state["qvel"], self._ctrl)
        truncated = (self._state["elapsed"].add_(1) >= self._limit) & ~terminated
        reached = self._frame()
        reward = reward.clone()  # it may be a view of the state, too
        self._start(terminated | truncated)
        return self._frame(), reward, terminated, truncated, reached

    def _start(self, chosen: Tensor) -> None:
        """Start new episodes in the ``chosen`` worlds, [B] bool, without waiting for the device."""
        state, zeros = self._state, torch.zeros_like(self._state["qvel"])
        key = child_key(state["key"], state["episode"].add_(chosen))
        fresh = dict(zip(("qpos", "qvel"), self._task.start(key, self._qpos0, zeros), strict=True))
        for name in state.keys() - {"key", "episode"}:
            start = fresh.get(name, torch.zeros_like(state[name]))
            state[name].copy_(torch.where(rows_of(chosen, start), start, state[name]))

    def _frame(self) -> Tensor:
        return self._task.observe(self._state["qpos"], self._state["qvel"]).clone()  # it may be a view of Warp's arrays

    def _on_torchs_stream(self) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = self._warp.ScopedDevice(str(self.device))
        if self.device.type == "cuda":
            stream = self._warp.stream_from_torch(torch.cuda.current_stream(self.device))
            scope = self._warp.ScopedStream(stream, sync_enter=False)  # on the stream's device, too
        return scope
