"""One library, four worker processes, one fault: what its user sees. Run by benchmarks/robustness.py.

``python faulty.py LIBRARY FOLDER``. The program steps until something is raised, closes, and tells on standard
output what happened when. The time limit of 10 s is set wherever the library has one. A file called ``raise`` in the
folder has an environment raise; ``exit``, ``error`` and ``forget`` end the program without closing anything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

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


class Library(Protocol):
    packages: tuple[str, ...]

    def step(self) -> None:
        """Step all environments at least once."""

    def close(self) -> None:
        """Close it as its documentation says."""


class GymnasiumAsync:
    packages = ("gymnasium",)

    def __init__(self, folder: str) -> None:
        from gymnasium.vector import AsyncVectorEnv

        self.env = AsyncVectorEnv([partial(TroubledEnv, folder, index) for index in range(N_WORKERS)])
        self.env.reset()

    def step(self) -> None:
        self.env.step_async(np.zeros(N_WORKERS, np.int64))
        self.env.step_wait(timeout=LIMIT)

    def close(self) -> None:
        self.env.close()


class StableBaselines3:
    packages = ("stable-baselines3",)

    def __init__(self, folder: str) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self.env = SubprocVecEnv([partial(TroubledEnv, folder, index) for index in range(N_WORKERS)])
        self.env.reset()

    def step(self) -> None:
        self.env.step(np.zeros(N_WORKERS, np.int64))

    def close(self) -> None:
        self.env.close()


def torchrl_env(folder: str, index: int) -> Any:  # noqa: ANN401
    from torchrl.envs import GymWrapper

    return GymWrapper(TroubledEnv(folder, index))


class TorchRLParallel:
    packages = ("torchrl", "torch")

    def __init__(self, folder: str) -> None:
        from torchrl.envs import ParallelEnv

        self.env = ParallelEnv(N_WORKERS, [partial(torchrl_env, folder, index) for index in range(N_WORKERS)])
        self.env.reset()

    def step(self) -> None:
        self.env.rollout(10)

    def close(self) -> None:
        self.env.close()


class TorchRLCollector:
    packages = ("torchrl", "torch")

    def __init__(self, folder: str) -> None:
        from torchrl.collectors import MultiSyncCollector

        make = [partial(torchrl_env, folder, index) for index in range(N_WORKERS)]
        self.collector: Any = MultiSyncCollector(make, None, frames_per_batch=10 * N_WORKERS, total_frames=-1)
        self.batches = iter(self.collector)
        next(self.batches)

    def step(self) -> None:
        next(self.batches)

    def close(self) -> None:
        self.collector.shutdown()


def rlstruct_env(folder: str, seed: int) -> Any:  # noqa: ANN401
    from rlstruct.envs import GymEnvInf

    return GymEnvInf([TroubledEnv(folder, seed)], seed=seed)  # seed 0 and one environment each: the seed is the index


def rlstruct_agent() -> Any:  # noqa: ANN401
    from rlstruct.agents import RandomAgent

    return RandomAgent(TroubledEnv.action_space)


class RlStruct:
    packages = ("torch",)

    def __init__(self, folder: str) -> None:
        from rlstruct.batchers import RL_Batcher

        self.batcher = RL_Batcher(
            10, rlstruct_agent, rlstruct_env, env_args={"folder": folder}, n_processes=N_WORKERS, seed=0
        )
        self.batcher.reset()
        self.step()

    def step(self) -> None:
        self.batcher.execute()
        self.batcher.get(timeout=LIMIT)

    def close(self) -> None:
        self.batcher.close()


LIBRARIES = {
    "gymnasium": GymnasiumAsync,
    "sb3": StableBaselines3,
    "torchrl_parallel": TorchRLParallel,
    "torchrl_collector": TorchRLCollector,
    "rlstruct": RlStruct,
}


def asked(folder: str) -> str:
    """Return the way in which the program ends now, "" if it goes on."""
    return next((word for word in ("exit", "error", "forget") if os.path.exists(f"{folder}/{word}")), "")


def work(library: Library, folder: str, channel: TextIO) -> None:
    """Step until something happens; report what is raised, and how closing goes."""

    def tell(event: str, **facts: Any) -> None:  # noqa: ANN401
        print(json.dumps({"event": event, "at": time.monotonic(), **facts}), file=channel)

    tell("ready", versions={name: version(name) for name in library.packages})
    try:
        while not asked(folder):
            library.step()
    except Exception as error:
        origin = error.__cause__ or error.__context__
        cause = None if origin is None else repr(origin)
        tell("raised", type=type(error).__name__, text=str(error), cause=cause)
    else:
        return
    try:
        library.close()
        tell("closed", error=None)
    except Exception as error:
        tell("closed", error=repr(error)[:200])
    time.sleep(60)  # the driver looks for what is left, and kills this


def main() -> None:
    # A shell that runs the driver in the background has all its children ignore Ctrl-C; a user's shell does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    library: Library = LIBRARIES[sys.argv[1]](sys.argv[2])
    library.step()
    work(library, sys.argv[2], channel)
    if (ending := asked(sys.argv[2])) == "exit":
        sys.exit(7)
    if ending == "error":
        raise ValueError("a mistake in my own loop")
    del library


if __name__ == "__main__":
    main()
