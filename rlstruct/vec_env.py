"""VecEnv: the contract of B environments that step together, and DeviceEnv, which moves one to another device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadTypeError, DeviceMismatchError, MissingMethodError, UsageError

if TYPE_CHECKING:
    import gymnasium

IDLE_STEPS = 1000
"""Most steps that may pass without any environment running; batchers look at least every 16 steps."""
_MASK = "mask/"  # of a mask that travels with an observation, whose keys begin otherwise

Observed = tuple[DictTensor, Tensor]
"""An observation of all B environments, and the mask [B] bool of those that run."""


class _Pair(NamedTuple):
    reached: Observed
    current: Observed


class StepResult(_Pair):
    """Result of `VecEnv.step`: the pair ``((reached, running), (current, still_running))``, with a hint about restarts.

    It unpacks like the plain pair, which an environment of your own may return instead: then everything is assumed.

    Attributes:
        reached: ``(reached, running)``.
        current: ``(current, still_running)``.
        restarted: False says that no environment restarted in this step, so that ``current`` equals ``reached`` in
            every row and a batcher has no final observation to keep. True says that some may have.
    """

    restarted: bool

    def __new__(cls, reached: Observed, current: Observed, *, restarted: bool = True) -> StepResult:
        """Put the pair together."""
        made = super().__new__(cls, reached, current)
        made.restarted = restarted
        return made


Stepped = StepResult  # its name in 0.2


class VecEnv(ABC):
    """B environments that step together. B is fixed for life: nothing ever shrinks.

    Every observation is a DictTensor [B] on ``device`` with the frame keys (``frame``, or ``frame/<key>`` for nested
    spaces) in their native dtype, and besides them:

    ===================== ======= ==============================================================================
    key                   dtype   meaning
    ===================== ======= ==============================================================================
    reward [B]            float32 reward of the step that led here; 0 after a reset
    terminated [B]        bool    the episode ended by its own rules: its value is 0 from here on
    truncated [B]         bool    the episode was cut, by a time limit for example: bootstrap from this observation
    done [B]              bool    terminated or truncated
    initial_state [B]     bool    first observation of an episode: recurrent agents restart their state here
    last_action [B, ...]  native  the action that led here (``last_action/<key>`` for nested spaces); 0 after a reset
    ===================== ======= ==============================================================================

    Attributes:
        action_space: gymnasium space of one environment's action.
        observation_space: gymnasium space of one environment's frame.
        auto_reset: whether an ended environment restarts within the same step; otherwise it idles until `reset`.
        restarts_take_steps: whether `step` may leave out rows of an auto-resetting environment (see there). False lets
            a batcher return a batch without asking the device whether there were any.
    """

    action_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    auto_reset: bool
    restarts_take_steps: bool = True

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of every tensor that goes in (actions) and comes out (observations, masks)."""

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
            ``reached`` is the true next observation of the environments that ran (``running``), also at an episode's
            end. ``current`` is what the agent acts on next; it differs from ``reached`` only in the rows where an
            auto-resetting environment restarted. Return a `StepResult` with ``restarted=False`` where none did, which
            spares the batcher a look.
            Masks keep their B entries: a loop goes on while ``running.any()``, and counts with ``running.sum()``.
            In an auto-resetting environment all rows run in every step. Only a wrapped vector environment that takes a
            step to restart may leave a row out of one step; batchers drop that step.
        """

    def close(self) -> None:
        """Release what the environments hold. Calling it again does nothing."""
        return

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return all that decides what comes next, for a checkpoint; None: these environments cannot be saved.

        Override `load_state_dict` too.

        Returns:
            Tensors of any shape by name, on any device; later steps do not write to them.
        """
        return None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on, bit by bit, where `state_dict` was called, here or in environments made alike.

        Args:
            state: what `state_dict` returned; its tensors may be on any device, and are copied.

        Raises:
            NotImplementedError: these environments cannot be saved.
        """
        raise MissingMethodError(
            f"{type(self).__name__}.load_state_dict: these environments cannot be saved, so there is nothing to go on "
            "from. Begin new episodes with reset(), or write state_dict and load_state_dict."
        )


def check_action(where: str, action: object) -> DictTensor:
    """Return what was passed to `VecEnv.step`, if it is a DictTensor; an environment of your own may call this first.

    Args:
        where: start of the message, the name of the environment.
        action: what was passed.

    Raises:
        TypeError: it is something else, such as the tensor itself.
    """
    if isinstance(action, DictTensor):
        return action
    named = action if isinstance(action, Mapping) else {"action": action}
    keys = ", ".join(f"{key!r}: …" for key in named)
    raise BadTypeError(
        f"{where}.step: the action is a {type(action).__name__}, expected a DictTensor. Pass DictTensor({{{keys}}})."
    )


class IdleWatch:
    """Guard against loops that go on after every episode has ended, as one that counts rows does.

    An environment of your own calls `begin` in ``reset`` and `look` in ``step``.

    Args:
        where: start of the message, the name of the environment.
        time_limit: steps after which no episode goes on; None if there is no limit.
    """

    def __init__(self, where: str, time_limit: int | None = None) -> None:
        self._where, self._time_limit = where, time_limit
        self.begin()

    def begin(self) -> None:
        """Forget the steps before a reset."""
        self._n_steps, self._idle = 0, False

    def look(self, ran: Tensor) -> None:
        """Count a step, and see at every 1,000th whether all episodes have ended long ago.

        Args:
            ran: who took the step; looked at where there is no time limit, on the CPU: elsewhere the host would wait.
                [B] bool

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
    """A VecEnv that can show and take back all that one step passes to the next, as tensors.

    Such an environment can be captured in a CUDA graph (its `step` uses no other state, and never waits for the
    device), and can go on where another one, made alike, has stopped.
    """

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the whole simulation by name; these tensors are never written to afterwards."""

    def set_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `state_tensors` returned."""


Carrying = Capturable  # its name in 0.2


class EnvWrapper(VecEnv):
    """A VecEnv around another one that does everything as that one does: override what is to differ.

    Args:
        env: the environment to wrap.

    Attributes:
        env: as given.
    """

    def __init__(self, env: VecEnv) -> None:
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
        """Return what the wrapped environment does; see `VecEnv.state_dict`."""
        return self.env.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Let the wrapped environment go on from a state; see `VecEnv.load_state_dict`."""
        self.env.load_state_dict(state)


class DeviceEnv(EnvWrapper):
    """A VecEnv that lives on another device than the one it wraps; everything else is the same.

    Args:
        env: the environment to move.
        to_device: where observations and masks appear, and where actions are expected.
        from_device: where ``env`` itself lives; by default ``env.device``.

    Raises:
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
        if env_info is not None and env_info.device not in (None, torch.device("cpu")):
            raise DeviceMismatchError(
                f"DeviceEnv.reset: tensor {next(iter(env_info.keys()))!r} of env_info is on {env_info.device}, "
                "expected cpu. env_info stays on the CPU: create it there."
            )
        observation, running = self.env.reset(env_info)
        first, (running,) = self._out(observation, running)
        return first, running

    def step(self, action: DictTensor) -> StepResult:
        """Step the wrapped environment; see `VecEnv.step`.

        Raises:
            TypeError: the action is no DictTensor.
            DeviceMismatchError: the action is not on ``device``.
        """
        if check_action("DeviceEnv", action).device != self._device:
            key = next(iter(action.keys()), "action")
            raise DeviceMismatchError(
                f"DeviceEnv.step: tensor {key!r} of the action is on {action.device}, expected {self._device}. "
                f"Create it with device={str(self._device)!r}, or move the agent's model there."
            )
        answer = self.env.step(action.to(self.env.device))
        (reached, current), restarted = answer, getattr(answer, "restarted", True)
        # Without a restart the two observations are equal: move one.
        seen, (ran, running) = self._out(reached[0], reached[1], current[1])
        after, _ = self._out(current[0]) if restarted else (seen, [])
        return StepResult((seen, ran), (after, running), restarted=restarted)

    def _out(self, observation: DictTensor, *masks: Tensor) -> tuple[DictTensor, list[Tensor]]:
        """Move an observation and masks [B], with a single copy to CUDA for all of them."""
        named = {f"{_MASK}{i}": mask for i, mask in enumerate(masks)}
        moved = DictTensor.unchecked({**observation._tensors, **named}).to(self._device)._tensors
        seen = DictTensor.unchecked({key: moved[key] for key in observation._tensors})
        return seen, [moved[name] for name in named]
