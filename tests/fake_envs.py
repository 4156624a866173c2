"""Small environments whose every number is known beforehand.

`CountingEnv` counts, `SlowEnv` and `FailingEnv` misbehave around another. The
``create_…`` functions are what a batcher wants: they live at module level, so that spawned processes can import them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import tag_environment
from rlstruct.functional.masks import masked_dicttensor
from rlstruct.vec_env import EnvWrapper, Observed, StepResult, VecEnv

LENGTHS = (3, 1, 4, 2, 6)


def counting_length(env_seed: int, episode: int, lengths: Sequence[int] = LENGTHS) -> int:
    """Return how many steps an episode of `CountingEnv` takes.

    Args:
        env_seed: the environment, ``seed + b``.
        episode: which of its episodes, from 0.
        lengths: the lengths that environments and episodes walk through.

    >>> [counting_length(0, episode) for episode in range(6)]
    [3, 1, 4, 2, 6, 3]
    """
    return lengths[(env_seed + episode) % len(lengths)]


class CountingEnv(VecEnv):
    """B environments that only count, so that every boundary can be predicted by arithmetic.

    The frame is [3] int64: the environment (``seed + b``), its episode from 0, the steps taken in that episode. Step k
    is rewarded with k. An episode takes `counting_length` steps; it is terminated where environment + episode is even,
    else truncated. Actions (0 or 1) change nothing. Every reset begins the next episode everywhere.

    Args:
        n_envs: B.
        seed: environment b is number ``seed + b``.
        lengths: see `counting_length`; ``env_info["length"]`` ([B] int64) replaces them until the next reset.
        auto_reset: whether ended environments restart at once.
        device: where everything lives.
    """

    restarts_take_steps = False

    def __init__(
        self,
        n_envs: int,
        seed: int = 0,
        *,
        lengths: Sequence[int] = LENGTHS,
        auto_reset: bool = False,
        device: DeviceLike = "cpu",
    ) -> None:
        """Build the counters; nothing runs before `reset`."""
        self._device = resolve_device(device)
        self.auto_reset = auto_reset
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(0, np.iinfo(np.int64).max, (3,), np.int64)
        self._number = torch.arange(seed, seed + n_envs, device=self._device)  # [B]
        self._lengths = torch.tensor(lengths, device=self._device, dtype=torch.int64)
        self._fixed_length: Tensor | None = None
        self._episode = torch.full_like(self._number, -1)
        self._step = torch.zeros_like(self._number)
        self._running = torch.zeros_like(self._number, dtype=torch.bool)
        self._current = DictTensor()

    @property
    def device(self) -> torch.device:
        """Device that the counters are on."""
        return self._device

    def n_envs(self) -> int:
        """Return B."""
        return len(self._number)

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Begin the next episode in every environment; see `VecEnv.reset`."""
        given = None if env_info is None or env_info.empty() else env_info
        self._fixed_length = given["length"].to(self._device) if given is not None and "length" in given else None
        self._episode = self._episode + 1
        self._step = torch.zeros_like(self._step)
        self._running = torch.ones_like(self._running)
        self._current = self._first()
        return self._current, self._running

    def step(self, action: DictTensor) -> StepResult:
        """Count one further where an environment runs; see `VecEnv.step`."""
        ran = self._running
        self._step = torch.where(ran, self._step + 1, self._step)
        done = self._step >= self._length()
        terminated = done & ((self._number + self._episode) % 2 == 0)
        answer = DictTensor(
            {
                "frame": self._frame(),
                "reward": self._step.to(torch.float32),
                "terminated": terminated,
                "truncated": done & ~terminated,
                "done": done,
                "initial_state": torch.zeros_like(done),
                "last_action": action["action"].clone(),
            }
        )
        idle = self._current + DictTensor()
        idle.set("reward", torch.zeros_like(answer["reward"]))
        reached = masked_dicttensor(idle, answer, ran)
        self._current = reached
        if self.auto_reset:
            self._restart(reached, done)
        else:
            self._running = ran & ~done
        restarted = self._current is not reached
        return StepResult((reached, ran), (self._current, self._running), restarted=restarted)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the counters; see `VecEnv.state_dict`."""
        fixed = {} if self._fixed_length is None else {"fixed_length": self._fixed_length}
        counters = {"number": self._number, "episode": self._episode, "step": self._step, "running": self._running}
        return counters | fixed | dict(self._current.prepend_key("current/").items())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on counting; see `VecEnv.load_state_dict`."""
        saved = DictTensor({name: value.to(self._device, copy=True) for name, value in state.items()})
        self._number, self._episode, self._step = saved["number"], saved["episode"], saved["step"]
        self._running, self._current = saved["running"], saved.truncate_key("current/")
        self._fixed_length = state["fixed_length"].to(self._device) if "fixed_length" in state else None

    def _restart(self, reached: DictTensor, done: Tensor) -> None:
        # On the CPU a look costs nothing; elsewhere it would stall the device, so `current` is always a new object.
        if self._device.type == "cpu" and not bool(done.any()):  # sync: on the CPU only, once a step
            return
        self._episode = self._episode + done
        self._step = torch.where(done, torch.zeros_like(self._step), self._step)
        self._current = masked_dicttensor(reached, self._first(), done)

    def _first(self) -> DictTensor:
        no = torch.zeros_like(self._running)
        return DictTensor(
            {
                "frame": self._frame(),
                "reward": torch.zeros_like(self._step, dtype=torch.float32),
                "terminated": no,
                "truncated": no.clone(),
                "done": no.clone(),
                "initial_state": ~no,
                "last_action": torch.zeros_like(self._step),
            }
        )

    def _frame(self) -> Tensor:
        return torch.stack([self._number, self._episode, self._step], dim=1)  # [B, 3]

    def _length(self) -> Tensor:
        if self._fixed_length is not None:
            return self._fixed_length
        return self._lengths[(self._number + self._episode) % len(self._lengths)]


class SlowEnv(EnvWrapper):
    """Another environment whose steps (and resets, if asked) take longer.

    Args:
        env: the environment to slow down.
        seconds: how long each step sleeps before it is taken.
        reset_seconds: how long each reset sleeps.
    """

    def __init__(self, env: VecEnv, seconds: float, *, reset_seconds: float = 0.0) -> None:
        """Wrap ``env``."""
        super().__init__(env)
        self.seconds, self.reset_seconds = seconds, reset_seconds

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Sleep, then reset."""
        time.sleep(self.reset_seconds)
        return self.env.reset(env_info)

    def step(self, action: DictTensor) -> tuple[Observed, Observed]:
        """Sleep, then step."""
        time.sleep(self.seconds)
        return self.env.step(action)


class FailingEnv(EnvWrapper):
    """Another environment that fails at one step of its life, in one of its rows.

    Args:
        env: the environment to break.
        failure: the exception to raise, or a function to call instead, such as ``partial(os._exit, 3)``.
        step: fails in this call of `step`, counted from 0 over all episodes.
        environment: the row that the exception is blamed on.
    """

    def __init__(
        self, env: VecEnv, failure: BaseException | Callable[[], object], *, step: int = 0, environment: int = 0
    ) -> None:
        """Wrap ``env``."""
        super().__init__(env)
        self.failure, self.failing_step, self.environment = failure, step, environment
        self._calls = 0

    def step(self, action: DictTensor) -> tuple[Observed, Observed]:
        """Fail if it is time to, else step."""
        self._calls += 1
        if self._calls == self.failing_step + 1:
            if not isinstance(self.failure, BaseException):
                self.failure()
            else:
                tag_environment(self.failure, self.environment)
                raise self.failure
        return self.env.step(action)


def create_counting_env(n_envs: int, seed: int = 0, **settings: Any) -> CountingEnv:
    """Make a `CountingEnv`; ``settings`` are its keyword arguments."""
    return CountingEnv(n_envs, seed, **settings)


def create_slow_env(
    n_envs: int,
    seed: int = 0,
    *,
    seconds: float,
    **settings: Any,
) -> SlowEnv:
    """Make a `CountingEnv` inside a `SlowEnv`."""
    return SlowEnv(CountingEnv(n_envs, seed, **settings), seconds)


def create_failing_env(
    n_envs: int,
    seed: int = 0,
    *,
    failure: BaseException | Callable[[], object],
    step: int = 0,
    failing_seed: int = 0,
    **settings: Any,
) -> VecEnv:
    """Make a `CountingEnv`, inside a `FailingEnv` if it holds the environment with the number ``failing_seed``.

    So that of several processes, which all get the same arguments, only one fails.
    """
    env = CountingEnv(n_envs, seed, **settings)
    if not seed <= failing_seed < seed + n_envs:
        return env
    return FailingEnv(env, failure, step=step, environment=failing_seed - seed)
