"""One library, four worker processes, one fault: what its user sees. Run by benchmarks/robustness.py.

``python faulty.py LIBRARY FOLDER``. The program steps until something is raised, closes, and tells on standard
output what happened when. The time limit of 10 s is set wherever the library has one. A file called ``raise`` in the
folder has an environment raise; ``exit``, ``error`` and ``forget`` end the program without closing anything.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

os.environ["BATCHED_PIPE_TIMEOUT"] = "10"  # TorchRL reads its time limit here

import gymnasium
import numpy as np

N_WORKERS = 4
LIMIT = 10.0
VICTIM = 2


class TroubledEnv(gymnasium.Env[Any, Any]):
    """Steps of 1 ms without end. Number 2 raises on demand, by a file called ``raise``."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder: str, index: int) -> None:
        self.folder, self.index = Path(folder), index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        (self.folder / f"pid{self.index}").write_text(str(os.getpid()))
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        time.sleep(0.001)
        if self.index == VICTIM and (self.folder / "raise").exists():
            raise ValueError("the arm has left the table")
        return np.zeros(4, np.float32), 1.0, False, False, {}


Act = Callable[[], object]
Library = tuple[Act, Act]
"""A step of all environments, and the way to close that the documentation of the library names."""


def makers(folder: str, make: Callable[[str, int], Any] = TroubledEnv) -> list[Callable[[], Any]]:
    return [partial(make, folder, index) for index in range(N_WORKERS)]


def gymnasium_async(folder: str) -> Library:
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv(makers(folder))
    env.reset()

    def step() -> None:
        env.step_async(np.zeros(N_WORKERS, np.int64))
        env.step_wait(timeout=LIMIT)

    return step, env.close


def stable_baselines3(folder: str) -> Library:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv(makers(folder))
    env.reset()
    return partial(env.step, np.zeros(N_WORKERS, np.int64)), env.close


def torchrl_env(folder: str, index: int) -> Any:  # noqa: ANN401
    from torchrl.envs import GymWrapper

    return GymWrapper(TroubledEnv(folder, index))


def torchrl_parallel(folder: str) -> Library:
    from torchrl.envs import ParallelEnv

    env = ParallelEnv(N_WORKERS, makers(folder, torchrl_env))
    env.reset()
    return partial(env.rollout, 10), env.close


def torchrl_collector(folder: str) -> Library:
    from torchrl.collectors import MultiSyncCollector

    collector: Any = MultiSyncCollector(
        makers(folder, torchrl_env), None, frames_per_batch=10 * N_WORKERS, total_frames=-1
    )
    step = partial(next, iter(collector))
    step()
    return step, collector.shutdown


def rlstruct_env(folder: str, seed: int) -> Any:  # noqa: ANN401
    from rlstruct.envs import GymEnvInf

    return GymEnvInf([TroubledEnv(folder, seed)], seed=seed)  # seed 0 and one environment each: the seed is the index


def rl_batcher(folder: str) -> Library:
    from rlstruct.agents import RandomAgent
    from rlstruct.batchers import RL_Batcher

    batcher = RL_Batcher(
        10, RandomAgent, rlstruct_env, agent_args={"action_space": TroubledEnv.action_space},
        env_args={"folder": folder}, n_processes=N_WORKERS, seed=0,
    )  # fmt: skip
    batcher.reset()

    def step() -> None:
        batcher.execute()
        batcher.get(timeout=LIMIT)

    step()
    return step, batcher.close


LIBRARIES: dict[str, tuple[Any, ...]] = {  # what starts it, and the packages that it uses
    "gymnasium": (gymnasium_async, "gymnasium"), "sb3": (stable_baselines3, "stable-baselines3"),
    "torchrl_parallel": (torchrl_parallel, "torchrl", "torch"),
    "torchrl_collector": (torchrl_collector, "torchrl", "torch"), "rlstruct": (rl_batcher, "torch"),
}  # fmt: skip


def asked(folder: str) -> str:
    """Return the way in which the program ends now, "" if it goes on."""
    return next((word for word in ("exit", "error", "forget") if os.path.exists(f"{folder}/{word}")), "")


def work(library: Library, packages: Sequence[str], folder: str, channel: TextIO) -> None:
    """Step until something happens; report what is raised, and how closing goes."""

    def tell(event: str, **facts: Any) -> None:  # noqa: ANN401
        print(json.dumps({"event": event, "at": time.monotonic(), **facts}), file=channel)

    step, close = library
    tell("ready", versions={"Python": platform.python_version(), **{name: version(name) for name in packages}})
    try:
        while not asked(folder):
            step()
    except Exception as error:
        origin = error.__cause__ or error.__context__
        cause = None if origin is None else repr(origin)
        tell("raised", type=type(error).__name__, text=str(error), cause=cause)
    else:
        return
    try:
        close()
        tell("closed", error=None)
    except Exception as error:
        tell("closed", error=repr(error)[:200])
    time.sleep(60)  # the driver looks for what is left, and kills this


def main() -> None:
    # A shell that runs the driver in the background has all its children ignore Ctrl-C; a user's shell does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, folder = sys.argv[1:]
    start, *packages = LIBRARIES[name]
    library: Library = start(folder)
    library[0]()
    work(library, packages, folder, channel)
    if (ending := asked(folder)) == "exit":
        sys.exit(7)
    if ending == "error":
        raise ValueError("a mistake in my own loop")
    del library


if __name__ == "__main__":
    main()
