"""TorchVectorEnv: a VecEnv from a vector environment that returns tensors on a device, such as Isaac Lab's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from rlstruct.core import DictTensor, Layout, expect
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.validity import StepChecks
from rlstruct.errors import BadTypeError, BadValueError, ShapeMismatchError, UsageError, kind_of
from rlstruct.functional.masks import rows_of, zero_rows
from rlstruct.options import check_seed
from rlstruct.profiling import operation
from rlstruct.spaces import Element, Limits, Space, leaves, nest, zeros
from rlstruct.vec_env import Observed, StepResult, VecEnv, check_action

Tensors = dict[str, Tensor]

_OUTCOME = Layout({"reward": ((), torch.float32), "terminated": ((), torch.bool), "truncated": ((), torch.bool)})
# Names of an episode's last observation in several libraries.
_FINAL_KEYS = ("final_obs", "final_observation")


class TensorsEnv(VecEnv):
    """Base of environments that step all rows at once, as tensors on one device, and restart ended rows immediately.

    Subclasses define `_begin` and `_advance`, whose observations and actions are nested like the spaces, with tensors
    [B, ...].
    """

    auto_reset = True
    restarts_take_steps = False

    def __init__(self, n_envs: int, observation_space: Space, action_space: Space, device: torch.device) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._name, self._n_envs, self._device = type(self).__name__, n_envs, device
        self._frame_leaves = leaves(observation_space, "frame", where=self._name)
        self._action_leaves = leaves(action_space, "action", where=self._name)
        self._shapes = {
            key: (n_envs, *leaf.shape) for key, leaf in {**self._frame_leaves, **self._action_leaves}.items()
        }
        self._no = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self._yes = ~self._no
        self._limits = Limits(action_space, "action", device)
        self._checks = StepChecks(self._name, self)
        self._begun = False  # True after a reset or a loaded state

    @abstractmethod
    def _begin(self) -> Element:
        """Start a new episode in every row, and return the observation, in memory that never changes afterwards."""

    @abstractmethod
    def _advance(self, action: Element) -> tuple[Element, Tensor, Tensor, Tensor, Element | None]:
        """Take one step in every row, and restart the rows that ended. The action may be changed in place.

        Returns:
            ``(observation, reward, terminated, truncated, final)``. ``final`` is the true last observation, read only
            in rows that ended; None if no row ended. The observation's memory never changes afterwards; the rest is
            copied.
        """

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
            raise BadValueError(f"{self._name}.reset: got env_info {list(env_info.keys())}, expected none.")
        self._checks.read()
        frames = self._flat(self._begin())
        self._begun = True
        fix = "Make the simulation on the device that you name."
        expect(f"{self._name}.reset:", frames, device=self._device, fix=fix)
        flags = dict.fromkeys(("terminated", "truncated", "done"), self._no)
        last = zeros(self.action_space, "last_action", self._n_envs, self._device)
        reward = torch.zeros(self._n_envs, dtype=torch.float32, device=self._device)
        first = DictTensor({**frames, "reward": reward, **flags, "initial_state": self._yes, **last})
        self._checks.observation(first)
        return first, self._yes

    @operation("simulator")
    def step(self, action: DictTensor) -> StepResult:
        """Take one step in every environment; see `VecEnv.step`.

        Raises:
            ValueError: on the CPU, an action is not in its space, or a frame or reward is NaN. On an accelerator the
                next `reset` or `close` raises it.
            ShapeMismatchError: an action or observation has another shape than its space, or rewards or flags are not
                one number for each environment.
            BadTypeError: the simulation returned something else than tensors.
        """
        if not self._begun:
            raise UsageError(f"{self._name}.step: there is nothing to step. Call reset() first.")
        check_action(self._name, action, self._action_leaves)
        for key in self._action_leaves:
            self._check(f"step: the action {key!r}", action[key], self._shapes[key])
        self._checks.action(action)
        # Two copies: simulators clamp actions in place, and agents overwrite theirs in the next step.
        last = {f"last_{key}": action[key].clone() for key in self._action_leaves}
        # An index out of range would end all work on CUDA, so wrong ones are clamped there until the error is read.
        within = self._limits.clamp({key: action[key] for key in self._action_leaves})
        copies = {key: value.clone() if value is action[key] else value for key, value in within.items()}
        sent = nest(self.action_space, copies, "action")
        observation, reward, terminated, truncated, final = self._advance(sent)
        current = self._flat(observation)
        for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            self._check(f"step: {name!r}", value)
        # Copies: the simulator may write the next step's to the same memory.
        terminated, truncated = terminated.to(torch.bool, copy=True), truncated.to(torch.bool, copy=True)
        reward = reward.to(torch.float32, copy=True)
        outcome = {"reward": reward, "terminated": terminated, "truncated": truncated}
        fix = "Return one number for each environment, such as reward.squeeze(1)."
        expect(f"{self._name}.step:", outcome, _OUTCOME, device=self._device, rows=self._n_envs, fix=fix)
        done = terminated | truncated
        frames = current if final is None else self._choose(done, self._flat(final, "final observation"), current)
        reached = DictTensor.unchecked({**frames, **outcome, "done": done, "initial_state": self._no, **last})
        if final is None:
            return self._checks.step(StepResult((reached, self._yes), (reached, self._yes), restarted=False))
        last = {key: zero_rows(value, done) for key, value in last.items()}
        flags = {"terminated": self._no, "truncated": self._no, "done": self._no, "initial_state": done}
        after = DictTensor.unchecked({**current, "reward": reward.masked_fill(done, 0), **flags, **last})
        return self._checks.step(StepResult((reached, self._yes), (after, self._yes)))

    def close(self) -> None:
        """Raise the error of an earlier step on an accelerator, see `step`."""
        self._checks.read()

    def _flat(self, observation: Element, where: str = "observation") -> Tensors:
        """Return the frames of an observation by name; ``where`` names it in an error."""
        frames = {key: leaf.get(observation) for key, leaf in self._frame_leaves.items()}
        for key, frame in frames.items():
            self._check(f"{where} {key!r}", frame, self._shapes[key])
        return frames

    def _check(self, what: str, value: object, shape: tuple[int, ...] | None = None) -> None:
        """Raise unless a value is a tensor, and has this shape."""
        if not isinstance(value, Tensor):
            raise BadTypeError(
                f"{self._name}: {what} is {kind_of(value)}, expected a tensor on {self._device}. "
                "rlstruct.envs.GymVectorEnv takes environments that return numpy arrays."
            )
        if shape is not None and value.shape != shape:
            raise ShapeMismatchError(
                f"{self._name}: {what} is {list(value.shape)}, expected {list(shape)}: a row for each of "
                f"{self._n_envs} environments, with the shape of the space."
            )

    def _choose(self, mask: Tensor, final: Tensors, current: Tensors) -> Tensors:
        """Take the rows of ``final`` where the mask is set, else those of ``current``."""
        fix = "The observation itself has them: let the simulator give a row for each environment."
        where = f"{self._name}.step: the final observation"
        expect(where, final, Layout.of(current), fix=fix)  # where() would broadcast
        return {key: torch.where(rows_of(mask, value), final[key], value) for key, value in current.items()}


class TorchVectorEnv(TensorsEnv):
    """A gymnasium-like vector environment that already returns tensors on a device, as a `VecEnv`.

    It must restart rows in the step that ends their episode (gymnasium's mode SAME_STEP), as GPU simulators do. It gets
    a copy of the action, which it may change in place, and its results are copied, so it may reuse its memory. The
    simulation cannot be saved: `state_dict` returns None.

    True final observations come from the info's ``final_obs`` (gymnasium; Isaac Lab, where it is an option) or
    ``final_observation`` (ManiSkill): tensors [B, ...] like the observation, read only in rows that ended. Without
    these keys the last observation of an episode is lost, and ``missing_final`` says what to do.

    >>> # env = ManagerBasedRLEnv(cfg); RL_Batcher(32, create_agent, lambda seed: TorchVectorEnv(env, "cuda:0"), …)

    Args:
        vec: the environment: ``num_envs, single_observation_space, single_action_space, reset, step``. This object
            closes it.
        device: device of its tensors.
        seed: passed to the first reset.
        missing_final: ``"raise"`` raises if an episode ends and the info has no final observation; the host waits for
            the device in every step without one. ``"previous"`` uses the observation before the last step instead. That
            is exact for terminated episodes, whose final value is 0, and an approximation for truncated ones.

    Raises:
        ValueError: the device does not exist, or ``missing_final`` is neither of these.
    """

    def __init__(
        self,
        vec: Any,  # noqa: ANN401 - of whatever library
        device: DeviceLike,
        seed: int | None = None,
        *,
        missing_final: Literal["raise", "previous"] = "raise",
    ) -> None:
        place, observations = resolve_device(device), vec.single_observation_space
        super().__init__(int(vec.num_envs), observations, vec.single_action_space, place)
        if missing_final not in ("raise", "previous"):
            raise BadValueError(f"TorchVectorEnv: missing_final={missing_final!r}, expected 'raise' or 'previous'.")
        self.vec = vec
        self._seed = None if seed is None else check_seed("TorchVectorEnv", "seed", seed, self._n_envs)
        self._keeps_previous = missing_final == "previous"
        self._previous: Element = None  # the last observation, if it may be needed
        self._closed = False

    def _begin(self) -> Element:
        seed, self._seed = self._seed, None
        return self._own(self.vec.reset(seed=seed)[0])

    def _advance(self, action: Element) -> tuple[Element, Tensor, Tensor, Tensor, Element | None]:
        observation, reward, terminated, truncated, info = self.vec.step(action)
        final = next((info[key] for key in _FINAL_KEYS if info.get(key) is not None), self._previous)
        if final is None and bool(terminated.any() | truncated.any()):  # sync: only without final
            raise UsageError(
                f"TorchVectorEnv: an episode of {type(self.vec).__name__} ended, and the info has no final "
                f"observation (looked for {' and '.join(_FINAL_KEYS)}; it has {sorted(map(str, info))}). Switch it on "
                "in the simulator, or pass missing_final='previous' and accept wrong values where episodes are "
                "truncated."
            )
        return self._own(observation), reward, terminated, truncated, final

    def close(self) -> None:
        """Close the vector environment. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self.vec.close()
            super().close()

    def _own(self, observation: Element) -> Element:
        """Return a copy of the observation, and keep it if it may be needed as a final one."""
        copies = {key: frame.clone() for key, frame in self._flat(observation).items()}
        own = nest(self.observation_space, copies, "frame")
        self._previous = own if self._keeps_previous else None
        return own
