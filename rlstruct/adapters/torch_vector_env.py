"""TorchVectorEnv: a VecEnv from a vector environment that returns tensors on a device, such as Isaac Lab's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlstruct.core import DictTensor, Layout, expect
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadValueError, UsageError
from rlstruct.functional.masks import rows_of
from rlstruct.profiling import operation
from rlstruct.spaces import leaves, nest, zeros
from rlstruct.vec_env import Observed, StepResult, VecEnv, check_action

Tensors = dict[str, Tensor]

# Names of an episode's last observation in several libraries.
_FINAL_KEYS = ("final_obs", "final_observation")


class TorchVectorEnv(VecEnv):
    """A gymnasium-like vector environment that already returns tensors on a device, as a `VecEnv`.

    It must restart rows in the step that ends their episode (gymnasium's mode SAME_STEP), as GPU simulators do. It gets
    a copy of the action, which it may change in place. The tensors that it returns become ``current`` uncopied, so they
    change if it writes its next observation into the same memory. Clone them to keep them, as RL_Batcher does.
    The simulation cannot be saved: `state_dict` returns None.

    The true final observation is taken from the info's ``final_obs`` (gymnasium; Isaac Lab where it is switched on) or
    ``final_observation`` (ManiSkill): tensors [B, ...] of the observation's structure, read in the rows that ended.
    Without these keys the last observation of an episode is lost; ``missing_final`` chooses what happens then.

    >>> # env = ManagerBasedRLEnv(cfg); RL_Batcher(32, create_agent, lambda seed: TorchVectorEnv(env, "cuda:0"), …)

    Args:
        vec: the environment: ``num_envs, single_observation_space, single_action_space, reset, step``. This object
            closes it.
        device: device of its tensors.
        seed: passed to the first reset.
        missing_final: ``"raise"`` raises if an episode ends and the info has no final observation; the host waits for
            the device in each step without one. ``"previous"`` uses the observation before the last step instead, which
            is correct for episodes that terminate, because their value is 0 then, and approximate for truncated ones.

    Raises:
        ValueError: the device does not exist, or ``missing_final`` is neither of these.
    """

    auto_reset = True
    restarts_take_steps = False

    def __init__(
        self,
        vec: Any,  # noqa: ANN401 - of whatever library
        device: DeviceLike,
        seed: int | None = None,
        *,
        missing_final: Literal["raise", "previous"] = "raise",
    ) -> None:
        self._n_envs, self._device = int(vec.num_envs), resolve_device(device)
        self.observation_space, self.action_space = vec.single_observation_space, vec.single_action_space
        self._frame_leaves = leaves(self.observation_space, "frame", where="TorchVectorEnv")
        self._action_leaves = leaves(self.action_space, "action", where="TorchVectorEnv")
        self._no = torch.zeros(self._n_envs, dtype=torch.bool, device=self._device)
        self._yes = ~self._no
        if missing_final not in ("raise", "previous"):
            raise BadValueError(f"TorchVectorEnv: missing_final={missing_final!r}, expected 'raise' or 'previous'.")
        self.vec = vec
        self._seed = seed
        self._missing = missing_final
        self._previous: Tensors = {}
        self._closed = False

    @property
    def device(self) -> torch.device:
        """Device of the simulation."""
        return self._device

    def n_envs(self) -> int:
        """Return B."""
        return self._n_envs

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Start a new episode in every environment; see `VecEnv.reset`."""
        if env_info is not None and not env_info.empty():
            raise BadValueError(f"TorchVectorEnv.reset: got env_info {list(env_info.keys())}, expected none.")
        seed, self._seed = self._seed, None
        frames = self._flat(self.vec.reset(seed=seed)[0])
        if self._missing == "previous":
            self._previous = {key: value.clone() for key, value in frames.items()}
        fix = "Make the simulation on the device that you name, with a row for each environment."
        expect("TorchVectorEnv.reset:", frames, device=self._device, rows=self._n_envs, fix=fix)
        flags = dict.fromkeys(("terminated", "truncated", "done"), self._no)
        last = zeros(self.action_space, "last_action", self._n_envs, self._device)
        reward = torch.zeros(self._n_envs, dtype=torch.float32, device=self._device)
        return DictTensor({**frames, "reward": reward, **flags, "initial_state": self._yes, **last}), self._yes

    @operation("simulator")
    def step(self, action: DictTensor) -> StepResult:
        """Take one step in every environment; see `VecEnv.step`."""
        check_action("TorchVectorEnv", action)
        # Two copies: simulators clamp actions in place, and agents overwrite theirs in the next step.
        last = {f"last_{key}": action[key].clone() for key in self._action_leaves}
        sent = nest(self.action_space, {key: action[key].clone() for key in self._action_leaves}, "action")
        observation, reward, terminated, truncated, info = self.vec.step(sent)
        terminated, truncated = terminated.to(torch.bool), truncated.to(torch.bool)
        current = self._flat(observation)
        done = terminated | truncated
        final = next((info[key] for key in _FINAL_KEYS if info.get(key) is not None), None)
        reached: Tensors | None = None
        if final is not None:
            reached = _choose(done, self._flat(final), current)
        elif self._missing == "previous":
            reached = _choose(done, self._previous, current)
        elif bool(done.any()):  # sync: only if the info has no final observation
            raise UsageError(
                f"TorchVectorEnv: an episode of {type(self.vec).__name__} ended, and the info has no final "
                f"observation (looked for {' and '.join(_FINAL_KEYS)}; it has {sorted(map(str, info))}). Switch it on "
                "in the simulator, or pass missing_final='previous' and accept wrong values where episodes are "
                "truncated."
            )
        if self._missing == "previous":  # stored only if it may be needed
            self._previous = {key: value.clone() for key, value in current.items()}
        reward = reward.to(torch.float32)
        flags = {"terminated": terminated, "truncated": truncated, "done": done, "initial_state": self._no}
        seen = DictTensor.unchecked({**(reached or current), "reward": reward, **flags, **last})
        if reached is None:  # no environment restarted
            return StepResult((seen, self._yes), (seen, self._yes), restarted=False)
        last = {key: value.masked_fill(rows_of(done, value), 0) for key, value in last.items()}
        flags = {"terminated": self._no, "truncated": self._no, "done": self._no, "initial_state": done}
        after = DictTensor.unchecked({**current, "reward": reward.masked_fill(done, 0), **flags, **last})
        return StepResult((seen, self._yes), (after, self._yes))

    def close(self) -> None:
        """Close the vector environment. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self.vec.close()

    def _flat(self, observation: Mapping[str, Any] | Tensor) -> Tensors:
        """Return the frames of an observation by name."""
        return {key: leaf.get(observation) for key, leaf in self._frame_leaves.items()}


def _choose(mask: Tensor, final: Tensors, current: Tensors) -> Tensors:
    """Take the rows of ``final`` where the mask is set, else those of ``current``."""
    fix = "The observation itself has them: let the simulator give a row for each environment."
    expect("TorchVectorEnv.step: the final observation", final, Layout.of(current), fix=fix)  # where() would broadcast
    return {key: torch.where(rows_of(mask, value), final[key], value) for key, value in current.items()}
