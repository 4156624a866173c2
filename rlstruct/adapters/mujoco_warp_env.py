"""MujocoWarpEnv: one MuJoCo model in B worlds, simulated by MuJoCo Warp in memory that torch sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.adapters.torch_vector_env import TorchVectorEnv
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadValueError, MissingPackageError, how_to_install
from rlstruct.functional.masks import rows_of
from rlstruct.functional.random import child_key
from rlstruct.spaces import Space

_CARRIED = ("qpos", "qvel", "act", "time", "qacc_warmstart")  # from step to step, as far as a model has them


class MujocoTask(Protocol):
    """Start states, observations, rewards and ends for a model. No function may wait for the device."""

    observation_space: Space

    def start(self, key: Tensor, qpos: Tensor, qvel: Tensor) -> tuple[Tensor, Tensor]:
        """Draw where episodes begin, as new tensors of the shapes of ``qpos`` and ``qvel``.

        Args:
            key: one for each world, for `rlstruct.functional.random`.  [B] int64
            qpos: the model's own start in every row.                   [B, nq] float32
            qvel: zeros.                                                [B, nv] float32
        """

    def observe(self, qpos: Tensor, qvel: Tensor) -> Tensor:
        """Return the frames, [B, ...] in the dtype of ``observation_space``."""

    def judge(self, qpos: Tensor, qvel: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(reward [B] float32, terminated [B] bool)`` of the step that led to this state."""


class MujocoWarpEnv(TorchVectorEnv):
    """B worlds of one MuJoCo model. MuJoCo Warp simulates, on CUDA or (slowly, for tests) on the CPU.

    torch sees ``qpos``, ``qvel`` and ``ctrl`` as views of Warp's own arrays, and Warp launches on torch's stream: the
    action is written into the controls, clipped to their range, and the task reads the state where it is. The first
    step compiles MuJoCo's kernels, once on a machine; on a CPU that takes minutes. World j draws from ``seed + j``.

    Args:
        model: a ``mujoco.MjModel``.
        task: see `MujocoTask`.
        n_envs: B.
        seed: world j draws its start states from ``seed + j``.
        frame_skip: steps of the simulation for each action.
        time_limit: actions after which an episode is truncated; None for never.
        device: ``"cpu"`` or a CUDA device.
        **sizes: limits of MuJoCo Warp's buffers, such as ``nconmax`` and ``njmax``; see ``mujoco_warp.make_data``.

    Raises:
        ImportError: MuJoCo Warp is missing.
        ValueError: the device does not exist, or a number is below 1.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - MuJoCo is no dependency
        task: MujocoTask,
        n_envs: int,
        seed: int = 0,
        *,
        frame_skip: int = 1,
        time_limit: int | None = None,
        device: DeviceLike = "cpu",
        **sizes: int,
    ) -> None:
        if min(n_envs, frame_skip, 1 if time_limit is None else time_limit) < 1:
            raise BadValueError(f"MujocoWarpEnv: got {n_envs=}, {frame_skip=}, {time_limit=}, expected at least 1.")
        self._worlds = _Worlds(model, task, n_envs, seed, frame_skip, time_limit, resolve_device(device), sizes)
        super().__init__(self._worlds, device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of every world."""
        return {name: tensor.clone() for name, tensor in self._worlds.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was called, here or in worlds made alike."""
        for name, tensor in self._worlds.state.items():
            tensor.copy_(state[name])


class _Worlds:
    """The vector environment behind `MujocoWarpEnv`, in gymnasium's mode SAME_STEP."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        task: MujocoTask,
        n_envs: int,
        seed: int,
        frame_skip: int,
        time_limit: int | None,
        device: torch.device,
        sizes: dict[str, int],
    ) -> None:
        try:
            import mujoco_warp
            import warp
        except ImportError as error:
            raise MissingPackageError(
                f"MujocoWarpEnv needs MuJoCo Warp, which is not installed. {how_to_install('mujoco-warp')}."
            ) from error
        self.num_envs, self._warp, self._mjw, self._device = n_envs, warp, mujoco_warp, device
        self._task, self._frame_skip, self._time_limit = task, frame_skip, time_limit
        limits = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, [-np.inf, np.inf])
        low, high = limits.astype(np.float32).T
        self.single_observation_space = task.observation_space
        self.single_action_space = spaces.Box(low, high, (int(model.nu),), np.float32)
        self._low, self._high = torch.tensor(low, device=device), torch.tensor(high, device=device)
        with self._on_torchs_stream():
            self._model = mujoco_warp.put_model(model)
            self._data = mujoco_warp.make_data(model, nworld=n_envs, **sizes)
            arrays = {name: getattr(self._data, name, None) for name in (*_CARRIED, "ctrl")}
            views = {name: warp.to_torch(array) for name, array in arrays.items() if array is not None and array.size}
        self.ctrl = views.pop("ctrl")
        start = torch.arange(seed, seed + n_envs, dtype=torch.int64, device=device)
        counts = {"key": child_key(start, 0), "episode": torch.full_like(start, -1), "elapsed": torch.zeros_like(start)}
        self.state = {**views, **counts}
        self._qpos0 = torch.tensor(model.qpos0, dtype=torch.float32, device=device).expand(n_envs, -1)

    def reset(self, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Start new episodes in all worlds, which have their own keys."""
        self._start(torch.ones(self.num_envs, dtype=torch.bool, device=self._device))
        return self._frame(), {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Take ``frame_skip`` steps in all worlds and restart those that ended."""
        torch.clamp(action, self._low, self._high, out=self.ctrl)
        with self._on_torchs_stream():
            for _ in range(self._frame_skip):
                self._mjw.step(self._model, self._data)
        reward, terminated = self._task.judge(self.state["qpos"], self.state["qvel"], self.ctrl)
        elapsed = self.state["elapsed"].add_(1)
        limit = self._time_limit
        truncated = torch.zeros_like(terminated) if limit is None else (elapsed >= limit) & ~terminated
        reached = self._frame()
        self._start(terminated | truncated)
        return self._frame(), reward, terminated, truncated, {"final_obs": reached}

    def close(self) -> None:
        """Leave the arrays to the garbage collector."""

    def _start(self, chosen: Tensor) -> None:
        """Begin new episodes in some worlds, [B] bool, without asking which."""
        state, zeros = self.state, torch.zeros_like(self.state["qvel"])
        key = child_key(state["key"], state["episode"].add_(chosen))
        fresh = dict(zip(("qpos", "qvel"), self._task.start(key, self._qpos0, zeros), strict=True))
        for name in state.keys() - {"key", "episode"}:
            start = fresh.get(name, torch.zeros_like(state[name]))
            state[name].copy_(torch.where(rows_of(chosen, start), start, state[name]))

    def _frame(self) -> Tensor:
        return self._task.observe(self.state["qpos"], self.state["qvel"]).clone()  # it may be a view of Warp's memory

    @contextlib.contextmanager
    def _on_torchs_stream(self) -> Iterator[None]:
        with self._warp.ScopedDevice(str(self._device)):
            if self._device.type != "cuda":
                yield
                return
            stream = self._warp.stream_from_torch(torch.cuda.current_stream(self._device))
            with self._warp.ScopedStream(stream, sync_enter=False):
                yield
