"""MujocoWarpEnv: a MuJoCo model in B worlds at once, simulated by MuJoCo Warp, its state shared with torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.adapters._adapter import Adapter, choose, optional, rows
from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.functional.random import child_key
from rlstruct.profiling import operation
from rlstruct.spaces import Space
from rlstruct.vec_env import Observed, Stepped

# What a world carries from step to step beside qpos and qvel, as far as the model has it.
_MEMORY = ("act", "time", "qacc_warmstart")


class Task(Protocol):
    """What makes a task of a model. All tensors are on the device, and no function may wait for it."""

    observation_space: Space

    def start(self, key: Tensor, qpos: Tensor, qvel: Tensor) -> tuple[Tensor, Tensor]:
        """Draw where episodes begin.

        Args:
            key: one for each world, for `rlstruct.functional.random`.  [B] int64
            qpos: the model's own start, in every row.                  [B, nq] float32
            qvel: zeros.                                                [B, nv] float32

        Returns:
            ``(qpos, qvel)``, new tensors of the same shapes.
        """

    def observe(self, qpos: Tensor, qvel: Tensor) -> Tensor:
        """Show the worlds to the agent: a new tensor, [B, ...] float32."""

    def judge(self, qpos: Tensor, qvel: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(reward [B] float32, terminated [B] bool)`` of a step that led to this state."""


class MujocoWarpEnv(Adapter):
    """B worlds of one MuJoCo model. MuJoCo Warp simulates, on CUDA or (slowly, for tests) on a CPU.

    torch sees ``qpos``, ``qvel`` and ``ctrl`` as views of Warp's own arrays: the action is written straight into the
    controls, and the task reads the state where it is. The first step compiles MuJoCo's kernels, once on a machine: on
    a CPU that takes minutes. World j draws its starts from ``seed + j``. They are not saved: `state_dict` is None.

    Args:
        model: a ``mujoco.MjModel``.
        task: what is observed, rewarded and ended; see `Task`.
        n_envs: B.
        seed: world j draws from ``seed + j``.
        frame_skip: steps of the simulation for each action.
        time_limit: an episode is truncated after so many actions; None for never.
        device: ``cpu`` or a CUDA device.
        **sizes: limits of MuJoCo Warp's buffers, such as ``nconmax`` and ``njmax``; see ``mujoco_warp.make_data``.

    Raises:
        ImportError: MuJoCo Warp is missing.
        ValueError: the device does not exist, or a number is below 1.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - mujoco is no dependency
        task: Task,
        n_envs: int,
        seed: int = 0,
        *,
        frame_skip: int = 1,
        time_limit: int | None = None,
        device: DeviceLike = "cpu",
        **sizes: int,
    ) -> None:
        """Put the model and B worlds onto the device."""
        self._warp = optional("warp", "mujoco-warp", "MujocoWarpEnv")
        self._mjw = optional("mujoco_warp", "mujoco-warp", "MujocoWarpEnv")
        if min(n_envs, frame_skip, time_limit or 1) < 1:
            raise ValueError(f"MujocoWarpEnv: got {n_envs=}, {frame_skip=}, {time_limit=}, expected at least 1 each.")
        where = resolve_device(device)
        limits = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, [-np.inf, np.inf])
        low, high = limits.astype(np.float32).T
        super().__init__(n_envs, where, task.observation_space, spaces.Box(low, high, (int(model.nu),), np.float32))
        self._task, self._frame_skip, self._time_limit = task, frame_skip, time_limit
        with self._on_warp():
            self._model = self._mjw.put_model(model)
            self._data = self._mjw.make_data(model, nworld=n_envs, **sizes)
            to_torch = self._warp.to_torch
            self.qpos, self.qvel, self.ctrl = (to_torch(getattr(self._data, k)) for k in ("qpos", "qvel", "ctrl"))
            found = (getattr(self._data, name, None) for name in _MEMORY)
            self._memory = [to_torch(array) for array in found if array is not None and array.size > 0]
        self._qpos0 = torch.tensor(model.qpos0, dtype=torch.float32, device=where).expand(n_envs, -1)
        self._key = child_key(torch.arange(seed, seed + n_envs, dtype=torch.int64, device=where), 0)
        self._episode = torch.full_like(self._key, -1)
        self._elapsed = torch.zeros_like(self._key)

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Start a new episode in every world; see `VecEnv.reset`.

        Raises:
            ValueError: ``env_info`` is not empty: worlds take none.
        """
        self._refuse_info(env_info)
        self._start(self._yes)
        return self._begin({"frame": self._frame()})

    @operation("simulator")
    def step(self, action: DictTensor) -> Stepped:
        """Take ``frame_skip`` steps in every world; see `VecEnv.step`."""
        sent = action["action"]
        self.ctrl.copy_(sent)
        with self._on_warp():
            for _ in range(self._frame_skip):
                self._mjw.step(self._model, self._data)
        reward, terminated = self._task.judge(self.qpos, self.qvel, sent)
        self._elapsed = self._elapsed + 1
        truncated = self._no if self._time_limit is None else (self._elapsed >= self._time_limit) & ~terminated
        reached = {"frame": self._frame()}
        done = terminated | truncated
        self._start(done)
        current = choose(done, {"frame": self._frame()}, reached)
        return self._answer({"action": sent}, reward, (terminated, truncated), reached, current)

    def _start(self, chosen: Tensor) -> None:
        """Begin new episodes in some worlds, [B] bool, without asking which."""
        self._episode = self._episode + chosen
        starts = self._task.start(child_key(self._key, self._episode), self._qpos0, torch.zeros_like(self.qvel))
        for place, start in zip((self.qpos, self.qvel), starts, strict=True):
            place.copy_(torch.where(rows(chosen, place), start, place))
        for memory in self._memory:
            memory.masked_fill_(rows(chosen, memory), 0)
        self._elapsed = self._elapsed.masked_fill(chosen, 0)

    def _frame(self) -> Tensor:
        frame = self._task.observe(self.qpos, self.qvel)
        shown = frame.untyped_storage().data_ptr()
        return frame.clone() if any(v.untyped_storage().data_ptr() == shown for v in (self.qpos, self.qvel)) else frame

    @contextlib.contextmanager
    def _on_warp(self) -> Iterator[None]:
        """Let Warp launch on the device, and there on torch's stream."""
        with self._warp.ScopedDevice(str(self._device)):
            if self._device.type != "cuda":
                yield
                return
            stream = self._warp.stream_from_torch(torch.cuda.current_stream(self._device))
            with self._warp.ScopedStream(stream, sync_enter=False):
                yield
