"""CleanRL's ``ppo.py`` on CartPole-v1 with its own settings, until 475.

Run: ``python cleanrl_training.py CHECKOUT SEED``, with the path of a checkout of vwxyzjn/cleanrl; writes one line of
JSON. The script runs unchanged. What it imports for settings and logs (tyro, tensorboard) is replaced, so it
saves what logging costs; its environments restart within a step, as in the gymnasium that it was written for. The
clock stands still during evaluations of 100 episodes, with actions drawn from the policy. After 200,000 of its 500,000
steps it is stopped.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import sys
import tempfile
import time
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

TARGET, EPISODES, INTERVAL, LIMIT = 475.0, 100, 2_500, 200_000


class Finished(Exception):
    """The target is reached, or no more steps are allowed."""


class Watch:
    """Stands in for the script's writer, which gets the speed at the end of each update."""

    def __init__(self, seed: int) -> None:
        self.seed, self.due, self.paused, self.start = seed, INTERVAL, 0.0, 0.0
        self.stepped = self.learning = 0.0
        self.reached: dict[str, dict[str, float]] = {}
        self.returns: dict[int, float] = {}
        self.env_steps = 0

    def __call__(self, *_: object) -> Watch:
        return self

    def add_text(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def seconds(self) -> float:
        return time.perf_counter() - self.start - self.paused

    def add_scalar(self, name: str, _: object, step: int) -> None:
        if name == "charts/learning_rate":  # the first after the last gradient step
            self.learning += time.perf_counter() - self.stepped
        if name != "charts/SPS":
            return
        self.env_steps = step
        if step >= self.due:
            self.due += INTERVAL
            seconds, at = self.seconds(), time.perf_counter()
            mean = self.evaluate(sys._getframe(1).f_globals["agent"], 10_000_000 * (self.seed + 1) + step)
            self.returns[step] = round(mean, 1)
            self.paused += time.perf_counter() - at
            if mean >= TARGET:
                self.reached["drawn"] = {"seconds": seconds, "env_steps": step}
            if mean >= TARGET or step >= LIMIT:
                raise Finished

    def evaluate(self, agent: Any, seed: int) -> float:  # noqa: ANN401 - the script's network
        """Play the first episode of 100 environments, and return the mean return."""
        env = gymnasium.make_vec("CartPole-v1", EPISODES, vectorization_mode="vector_entry_point")
        observation, _ = env.reset(seed=seed)
        returns, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
        with torch.random.fork_rng(), torch.no_grad():
            while running.any():
                action = agent.get_action_and_value(torch.as_tensor(observation, dtype=torch.float32))[0]
                observation, reward, terminated, truncated, _ = env.step(action.numpy())
                returns += reward * running
                running &= ~(terminated | truncated)
        return float(returns.mean())


def main(checkout: Path, seed: int) -> None:
    torch.set_num_threads(1)
    watch, script = Watch(seed), (checkout / "cleanrl" / "ppo.py").resolve()

    class Timed(SyncVectorEnv):
        """Starts the clock with the first step: start-up is not counted."""

        def step(self, actions: Any) -> Any:  # noqa: ANN401 - of gymnasium
            watch.start = watch.start or time.perf_counter()
            *step, infos = super().step(actions)
            infos.pop("final_info", None)  # it is only printed, and has another form in newer releases of gymnasium
            watch.stepped = time.perf_counter()
            return *step, infos

    gymnasium.vector.SyncVectorEnv = functools.partial(Timed, autoreset_mode=AutoresetMode.SAME_STEP)  # type: ignore
    tyro, tensorboard = types.ModuleType("tyro"), types.ModuleType("torch.utils.tensorboard")
    tyro.cli = lambda kind: kind(seed=seed, cuda=False)  # type: ignore[attr-defined]
    tensorboard.SummaryWriter = watch  # type: ignore[attr-defined]
    sys.modules |= {"tyro": tyro, "torch.utils.tensorboard": tensorboard}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        with contextlib.suppress(Finished):
            runpy.run_path(str(script), run_name="__main__")
        os.chdir("/")
    answer = {
        "seconds": watch.seconds(), "learning": watch.learning, "env_steps": watch.env_steps, "reached": watch.reached,
        "returns": {"drawn": watch.returns}, "versions": {name: version(name) for name in ("gymnasium", "torch")},
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
