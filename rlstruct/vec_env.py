"""VecEnv, the contract of B environments that step together; what one may offer besides; and wrappers.

Optional: `Capturable`, a state that can be read and set as tensors; `StepsInto`, steps that write into a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.core import DictTensor, expect
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import (
    BadKeyError,
    BadTypeError,
    DeviceMismatchError,
    MissingMethodError,
    UsageError,
    expect_type,
    kind_of,
)

if TYPE_CHECKING:
    import gymnasium
    import numpy as np

    Array = np.ndarray[Any, Any]

IDLE_STEPS = 1000
"""Steps that may pass without a running environment before an error; batchers check at least every 16 steps."""
TIME_LIMITS = "gymnasium.make(..., max_episode_steps=...), or time_limit=... of a TensorEnv"
"""Ways to limit an episode, for messages."""
FLAGS = ("terminated", "truncated", "done", "initial_state")
"""Keys of an observation that are masks [B] bool, in the order of `ObservationBuffer.flags`."""
_MASK = "mask/"  # prefix of a mask that is moved together with an observation

Observed = tuple[DictTensor, Tensor]
"""An observation of all B environments, and the mask [B] bool of those that run."""


class _Pair(NamedTuple):
    reached: Observed
    current: Observed


class StepResult(_Pair):
    """Result of `VecEnv.step`: the pair ``((reached, running), (current, still_running))``, and whether rows restarted.

    It unpacks like a plain pair. Your own environment may return a plain pair, which means that any row may have
    restarted.

    Attributes:
        reached: ``(reached, running)``.
        current: ``(current, still_running)``.
        restarted: False if no environment restarted in this step, so ``current`` equals ``reached`` in every row and
            a batcher has no final observation to store. True if some may have restarted.
    """

    restarted: bool

    def __new__(cls, reached: Observed, current: Observed, *, restarted: bool = True) -> StepResult:
        """Create the pair."""
        made = super().__new__(cls, reached, current)
        made.restarted = restarted
        return made


class VecEnv(ABC):
    """B environments that step together. B never changes.

    Memory: whatever a call gets is read or copied before it returns, so callers may overwrite their actions and
    ``env_info`` afterwards. Returned tensors keep their values in all later calls, but do not write to them: the
    observations of a step may share memory with each other, and with the environment.

    Every observation is a DictTensor [B] on ``device`` with the frame keys (``frame``, or ``frame/<key>`` for nested
    spaces) in their native dtype, and these keys:

    ===================== ======= ==============================================================================
    key                   dtype   meaning
    ===================== ======= ==============================================================================
    reward [B]            float32 reward of the step that led here; 0 after a reset
    terminated [B]        bool    the episode ended by its own rules: the value of this state is 0
    truncated [B]         bool    the episode was cut, for example by a time limit: bootstrap from this observation
    done [B]              bool    terminated or truncated
    initial_state [B]     bool    first observation of an episode: recurrent agents reset their state here
    last_action [B, ...]  native  the action that led here (``last_action/<key>`` for nested spaces); 0 after a reset
    info/<name> [B]       float64 optional: a number of gymnasium's info, see `GymEnv`; NaN after a reset
    ===================== ======= ==============================================================================

    Attributes:
        action_space: gymnasium space of one environment's action.
        observation_space: gymnasium space of one environment's frame.
        auto_reset: True if an environment restarts in the step in which its episode ends; otherwise it idles until
            `reset`.
        restarts_take_steps: True if `step` of an auto-resetting environment may leave out rows (see there). False lets
            a batcher return a batch without asking the device for such rows.
    """

    action_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    auto_reset: bool
    restarts_take_steps: bool = True

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of all actions, observations and masks."""

    @abstractmethod
    def n_envs(self) -> int:
        """Return B, the number of environments."""

    @abstractmethod
    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Start a new episode in every environment.

        Args:
            env_info: settings of each environment, [B] on the CPU; empty or None for the defaults.

        Returns:
            ``(observation, running)``: observation [B], and running [B] bool, all True.
        """

    @abstractmethod
    def step(self, action: DictTensor) -> tuple[Observed, Observed]:
        """Take one step in every environment that runs.

        Args:
            action: ``action`` (or ``action/<key>`` for nested spaces) [B, ...] in the action space's dtype, on
                ``device``. Other keys are allowed and ignored. Rows that do not run are ignored.

        Returns:
            ``((reached, running), (current, still_running))``, each a DictTensor [B] with a mask [B] bool.
            ``reached`` is the true next observation of the environments that ran (``running``), even at an episode's
            end. ``current`` is the observation for the agent's next action. It differs from ``reached`` only in rows
            whose auto-resetting environment restarted. If none did, return a `StepResult` with ``restarted=False``,
            which saves the batcher a check.
            Masks always have B entries: loop while ``running.any()``, and count with ``running.sum()``. In an
            auto-resetting environment all rows run in every step, except in a wrapped vector environment that needs a
            step to restart: there the row sits out that step, and batchers drop it.
        """

    def close(self) -> None:
        """Release the environments' resources. A second call does nothing."""
        return

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the complete state for a checkpoint, or None if these environments cannot be saved.

        Override `load_state_dict` too.

        Returns:
            Tensors of any shape by name, on any device. Later steps do not modify them.
        """
        return None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of these or identically created environments, bit for bit.

        Args:
            state: the result of `state_dict`. Its tensors may be on any device, and are copied.

        Raises:
            NotImplementedError: these environments cannot be saved.
        """
        raise MissingMethodError(
            f"{type(self).__name__}.load_state_dict: these environments cannot be saved, so there is no state to "
            "continue from. Start new episodes with reset(), or define state_dict and load_state_dict."
        )


def expect_env(what: str, env: object) -> None:
    """Raise TypeError unless a value is a VecEnv; ``what`` begins the message."""
    fix = "Wrap gymnasium environments: GymEnv([...], seed), GymEnvInf([...], seed) or GymVectorEnv(vec, seed)."
    expect_type(what, env, VecEnv, "a VecEnv", fix)


def check_action(where: str, action: object, keys: Iterable[str] = ()) -> DictTensor:
    """Return the argument of `VecEnv.step` if it is a DictTensor. Your own environment can call this first.

    Args:
        where: name of the environment, the start of the message.
        action: the argument of ``step``.
        keys: names that it must have.

    Raises:
        TypeError: the argument is something else, such as a plain tensor.
        KeyError: a name is missing.
    """
    if isinstance(action, DictTensor):
        for key in keys:
            if key not in action._tensors:
                raise BadKeyError(
                    f"{where}.step: the action has no key {key!r}, only {sorted(action.keys())}. Return the agent's "
                    f"choice under {key!r}."
                )
        return action
    named = action if isinstance(action, Mapping) else {"action": action}
    keys = ", ".join(f"{key!r}: …" for key in named)
    raise BadTypeError(
        f"{where}.step: the action is {kind_of(action)}, expected a DictTensor. Pass DictTensor({{{keys}}})."
    )


def expect_on_cpu(where: str, info: DictTensor | None) -> None:
    """Raise DeviceMismatchError unless an agent_info or env_info is on the CPU; ``where`` starts the message."""
    if info is not None:
        expect(where, info, device=torch.device("cpu"), fix="It stays on the CPU: create it there.")


@renamed.members
class IdleGuard:
    """Guard against loops that keep stepping after every episode has ended, for example because they count rows.

    Your own environment can call `begin` in ``reset`` and `check` in ``step``.

    Args:
        where: name of the environment, the start of the message.
        time_limit: number of steps after which every episode has ended; None if there is no limit.
    """

    def __init__(self, where: str, time_limit: int | None = None) -> None:
        self._where, self._time_limit = where, time_limit
        self.begin()

    def begin(self) -> None:
        """Forget the steps before a reset."""
        self._n_steps, self._idle = 0, False

    def check(self, ran: Tensor) -> None:
        """Count a step. Every 1,000 steps, check whether all episodes ended long ago.

        Args:
            ran: True for environments that took the step. It is read only on the CPU and without a time limit, since
                reading it on another device would make the host wait.  [B] bool

        Raises:
            RuntimeError: no environment has run for 1,000 steps.
        """
        self._n_steps += 1
        if self._n_steps % IDLE_STEPS:
            return
        before = self._idle
        if self._time_limit is not None:
            before = self._idle = self._n_steps >= self._time_limit + IDLE_STEPS
        elif ran.is_cpu:
            self._idle = not bool(ran.any())  # sync: of CPU memory
        if before and self._idle:
            raise UsageError(
                f"{self._where}.step: every episode has ended, and no environment has run for {IDLE_STEPS} steps. "
                "Stop when running.any() is False, and call reset(). Finished environments keep their rows, so "
                "running.size() and len(running) never change."
            )


@runtime_checkable
class Capturable(Protocol):
    """A VecEnv whose complete state between two steps can be read and set as tensors.

    It can be captured in a CUDA graph, because its `step` uses no other state and never waits for the device. It can
    also continue where another, identically created one has stopped.
    """

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the complete state by name. These tensors are never modified afterwards."""

    def set_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from a result of `state_tensors`."""


PureStep = Callable[[dict[str, Tensor], dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor], DictTensor]]
"""A step as a pure function of the tensors of a `Capturable` and an action: it returns those that changed, the
observation that the agent sees next, and the one reached, which differs where an episode has ended.  [B, ...] each"""


class ObservationBuffer:
    """One observation of B environments on the CPU, as writable numpy arrays.

    Args:
        arrays: by key, in the order of the observation's keys, without ``rng``.  [B, ...]

    Attributes:
        keys: as in ``arrays``.
        frames: the arrays of ``frame``, or of each ``frame/<key>``.        [B, ...]
        reward: reward of the step that led here.                           [B] float32
        flags: terminated, truncated, done and initial_state.               [B] bool each
        last_action: as ``frames``, of ``last_action``.                     [B, ...]
        info: the arrays of each ``info/<name>``, if there are any.         [B] float64 each
        arrays: all of them.
    """

    __slots__ = ("arrays", "flags", "frames", "info", "keys", "last_action", "reward")

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.keys = tuple(arrays)
        self.arrays = [*arrays.values()]
        self.frames = [array for key, array in arrays.items() if key.split("/")[0] == "frame"]
        self.reward = arrays["reward"]
        self.flags = tuple(arrays[key] for key in FLAGS)
        self.last_action = [array for key, array in arrays.items() if key.split("/")[0] == "last_action"]
        self.info = [array for key, array in arrays.items() if key.split("/")[0] == "info"]

    @classmethod
    def of(cls, observation: DictTensor) -> ObservationBuffer:
        """Return the memory of an observation on the CPU."""
        return cls({key: tensor.numpy() for key, tensor in observation.items()})  # sync: views of CPU memory

    def observation(self) -> DictTensor:
        """Return the same memory as tensors, [B]."""
        return DictTensor(dict(zip(self.keys, map(torch.from_numpy, self.arrays), strict=True)))


class Ended(NamedTuple):
    """Result of `StepsInto.step_into` where an episode ended, or an environment did not run.

    Attributes:
        ran: True for rows that took the step; None for all.          [B] bool
        running: True for rows that take the next one; None for all.  [B] bool
        restarted: numbers of the rows that restarted in this step.
    """

    ran: Tensor | None
    running: Tensor | None
    restarted: Sequence[int]


class StepsInto(Protocol):
    """A `VecEnv` on the CPU that can write observations directly into a batch. Batchers call this instead of ``step``.

    It is optional. Without it, or if a subclass overrides only ``step``, a batcher calls ``step`` and copies.
    """

    def step_into(
        self, action: DictTensor, before: ObservationBuffer, out: ObservationBuffer, final: ObservationBuffer | None
    ) -> Ended | None:
        """Take one step; see `VecEnv.step`.

        Args:
            action: see `VecEnv.step`.
            before: the observation that the agent acted on. Do not modify it.
            out: buffer for ``current``. Its flags are already False; write everything else in every row.
            final: buffer for ``reached``, to be written only in rows that restart, so that the other rows need no real
                memory. None for environments that do not reset themselves.

        Returns:
            None if every environment took the step and no episode ended.
        """


def steps_into(env: VecEnv) -> Any | None:  # noqa: ANN401 - a bound `StepsInto.step_into`
    """Return an environment's ``step_into``; None if it has none, or if ``step`` was overridden without it."""
    if "step" in vars(env):
        return None
    cls = next((cls for cls in type(env).__mro__ if "step_into" in vars(cls) or "step" in vars(cls)), VecEnv)
    return getattr(env, "step_into", None) if "step_into" in vars(cls) else None


class EnvWrapper(VecEnv):
    """A VecEnv that forwards everything to another one. Override the parts that should differ.

    Args:
        env: the environment to wrap.

    Attributes:
        env: the wrapped environment.

    Raises:
        TypeError: ``env`` is not a VecEnv.
    """

    def __init__(self, env: VecEnv) -> None:
        expect_env(f"{type(self).__name__}: env is", env)
        self.env = env
        self.action_space, self.observation_space = env.action_space, env.observation_space
        self.auto_reset, self.restarts_take_steps = env.auto_reset, env.restarts_take_steps

    @property
    def device(self) -> torch.device:
        """The device of the wrapped environment."""
        return self.env.device

    def n_envs(self) -> int:
        """Return B, the number of environments."""
        return self.env.n_envs()

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Reset the wrapped environment; see `VecEnv.reset`."""
        return self.env.reset(env_info)

    def step(self, action: DictTensor) -> tuple[Observed, Observed]:
        """Step the wrapped environment; see `VecEnv.step`."""
        return self.env.step(action)

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the wrapped environment's state; see `VecEnv.state_dict`."""
        return self.env.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the wrapped environment's state; see `VecEnv.load_state_dict`."""
        self.env.load_state_dict(state)


class DeviceEnv(EnvWrapper):
    """A VecEnv that lives on another device than the one it wraps; everything else is the same.

    Args:
        env: the environment to move.
        to_device: where observations and masks appear, and where actions are expected.
        from_device: where ``env`` itself lives; by default ``env.device``.

    Raises:
        TypeError: ``env`` is not a VecEnv.
        DeviceMismatchError: ``from_device`` is not the device of ``env``.
        ValueError: a device does not exist on this machine.
    """

    def __init__(self, env: VecEnv, to_device: DeviceLike, from_device: DeviceLike | None = None) -> None:
        super().__init__(env)
        self._device = resolve_device(to_device)
        if from_device is not None and resolve_device(from_device) != env.device:
            raise DeviceMismatchError(
                f"DeviceEnv: from_device is {resolve_device(from_device)}, but {type(env).__name__} is on "
                f"{env.device}. Leave from_device out, or pass from_device={str(env.device)!r}."
            )

    @property
    def device(self) -> torch.device:
        """The device that ``env`` was moved to."""
        return self._device

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Reset the wrapped environment; see `VecEnv.reset`. ``env_info`` stays on the CPU.

        Raises:
            DeviceMismatchError: ``env_info`` is not on the CPU.
        """
        expect_on_cpu("DeviceEnv.reset: env_info", env_info)
        observation, running = self.env.reset(env_info)
        first, (running,) = self._out(observation, running)
        return first, running

    def step(self, action: DictTensor) -> StepResult:
        """Step the wrapped environment; see `VecEnv.step`.

        Raises:
            TypeError: the action is not a DictTensor.
            DeviceMismatchError: the action is not on ``device``.
        """
        fix = f"Create it with device={str(self._device)!r}, or move the agent's model there."
        expect("DeviceEnv.step: action", check_action("DeviceEnv", action), device=self._device, fix=fix)
        answer = self.env.step(action.to(self.env.device))
        (reached, current), restarted = answer, getattr(answer, "restarted", True)
        # Without a restart the two observations are equal, so move only one.
        observation, (ran, running) = self._out(reached[0], reached[1], current[1])
        after, _ = self._out(current[0]) if restarted else (observation, [])
        return StepResult((observation, ran), (after, running), restarted=restarted)

    def _out(self, observation: DictTensor, *masks: Tensor) -> tuple[DictTensor, list[Tensor]]:
        """Move an observation and masks [B], with a single copy to CUDA for all of them."""
        named = {f"{_MASK}{i}": mask for i, mask in enumerate(masks)}
        moved = DictTensor.unchecked({**observation._tensors, **named}).to(self._device)._tensors
        moved_observation = DictTensor.unchecked({key: moved[key] for key in observation._tensors})
        return moved_observation, [moved[name] for name in named]


__getattr__ = renamed.attributes(__name__)
