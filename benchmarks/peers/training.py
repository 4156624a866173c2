"""Trainings of other libraries on CartPole-v1 until an evaluation over 100 episodes reaches 475; prints a line of JSON.

``training.py a2c|ppo|dqn SEED`` trains with stable-baselines3 and the settings that rl-baselines3-zoo publishes, until
the zoo's last step, or until every kind of evaluation has reached 475: greedy and, except for DQN, with actions sampled
from the policy.

``training.py cleanrl SEED CHECKOUT`` runs CleanRL's ``ppo.py`` from a checkout, unchanged and with its own settings.
What it imports for settings and logs (tyro, tensorboard) is replaced, so it saves what logging costs; its environments
restart within a step, as in the gymnasium that it was written for. After 200,000 of its 500,000 steps it is stopped.

The clock starts with the training, and stands still during evaluations.
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
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

TARGET, EPISODES = 475.0, 100
Act = Callable[[Any], Any]  # actions for observations, numpy arrays

# hyperparams/a2c.yml, hyperparams/ppo.yml and hyperparams/dqn.yml of rl-baselines3-zoo, "CartPole-v1"
ZOO: dict[str, dict[str, Any]] = {
    "a2c": {
        "n_envs": 8, "n_steps": 500_000, "interval": 10_000, "kinds": ("sampled", "greedy"),
        "settings": {"ent_coef": 0.0},
    },
    "ppo": {
        "n_envs": 8, "n_steps": 100_000, "interval": 2_500, "kinds": ("sampled",),
        "settings": {
            "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0,
            "learning_rate": lambda left: 0.001 * left, "clip_range": lambda left: 0.2 * left,
        },
    },
    "dqn": {
        "n_envs": 1, "n_steps": 50_000, "interval": 2_000, "kinds": ("greedy",),
        "settings": {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
            "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
        },
    },
}  # fmt: skip


class Watch:
    """Evaluates now and then, and keeps the time: without evaluations, and learning alone.

    Args:
        interval: environment steps between evaluations.
        kinds: of evaluation.
        seed: of the training.
    """

    def __init__(self, interval: int, kinds: tuple[str, ...], seed: int) -> None:
        self.interval, self.kinds, self.seed = interval, kinds, seed
        self.due, self.paused, self.start, self.learning = interval, 0.0, 0.0, 0.0
        self.reached: dict[str, dict[str, float]] = {}
        self.returns: dict[str, dict[int, float]] = {kind: {} for kind in kinds}

    def seconds(self) -> float:
        return time.perf_counter() - self.start - self.paused

    def look(self, env_steps: int, player: Callable[[str], Act]) -> bool:
        """Evaluate if it is time; return True if every kind has reached the target."""
        if env_steps < self.due:
            return False
        self.due += self.interval
        seconds, at = self.seconds(), time.perf_counter()
        for number, kind in enumerate(self.kinds):
            mean = evaluate(player(kind), 10_000_000 * (self.seed + 1) + 2 * env_steps + number)
            self.returns[kind][env_steps] = round(mean, 1)
            if mean >= TARGET and kind not in self.reached:
                self.reached[kind] = {"seconds": seconds, "env_steps": env_steps}
        self.paused += time.perf_counter() - at
        return len(self.reached) == len(self.kinds)

    def answer(self, env_steps: int, *packages: str) -> dict[str, Any]:
        return {
            "seconds": self.seconds(), "learning": self.learning, "env_steps": env_steps, "reached": self.reached,
            "returns": self.returns, "versions": {name: version(name) for name in (*packages, "torch")},
        }  # fmt: skip


def evaluate(act: Act, seed: int) -> float:
    """Play the first episode of 100 environments, and return the mean return; the training draws as without it."""
    env = gymnasium.make_vec("CartPole-v1", EPISODES, vectorization_mode="vector_entry_point")
    observation, _ = env.reset(seed=seed)
    returns, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
    with torch.random.fork_rng(), torch.no_grad():
        while running.any():
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            returns += reward * running
            running &= ~(terminated | truncated)
    return float(returns.mean())


def sb3(name: str, seed: int) -> dict[str, Any]:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    zoo = ZOO[name]
    env = make_vec_env("CartPole-v1", zoo["n_envs"], seed=seed)
    model = getattr(stable_baselines3, name.upper())("MlpPolicy", env, seed=seed, device="cpu", **zoo["settings"])
    watch, train = Watch(zoo["interval"], zoo["kinds"], seed), model.train

    def player(kind: str) -> Act:
        return lambda observation: model.predict(observation, deterministic=kind == "greedy")[0]

    def timed(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        start = time.perf_counter()
        train(*args, **kwargs)
        watch.learning += time.perf_counter() - start

    class Callback(BaseCallback):
        def _on_training_start(self) -> None:
            watch.start = time.perf_counter()

        def _on_step(self) -> bool:
            return not watch.look(self.num_timesteps, player)

    model.train = timed
    model.learn(zoo["n_steps"], callback=Callback())
    return watch.answer(model.num_timesteps, "stable-baselines3")


class Finished(Exception):
    """The target is reached, or no more steps are allowed."""


class Writer:
    """Stands in for the writer of CleanRL's script, which gets the speed at the end of each update."""

    def __init__(self, watch: Watch, limit: int) -> None:
        self.watch, self.limit, self.env_steps, self.stepped = watch, limit, 0, 0.0

    def add_text(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def add_scalar(self, name: str, _: object, step: int) -> None:
        if name == "charts/learning_rate":  # the first after the last gradient step
            self.watch.learning += time.perf_counter() - self.stepped
        if name == "charts/SPS":
            self.env_steps, agent = step, sys._getframe(1).f_globals["agent"]

            def act(observation: Any) -> Any:  # noqa: ANN401 - numpy arrays
                return agent.get_action_and_value(torch.as_tensor(observation, dtype=torch.float32))[0].numpy()

            if self.watch.look(step, lambda _: act) or step >= self.limit:
                raise Finished


class Restarting(SyncVectorEnv):
    """Vector environment that gives the last observation of an episode the name it had in gymnasium 0.29."""

    def step(self, actions: Any) -> Any:  # noqa: ANN401 - of gymnasium
        *step, infos = super().step(actions)
        infos.pop("final_info", None)  # it is only printed, and has another form in newer releases of gymnasium
        if "final_obs" in infos:
            infos["final_observation"] = infos.pop("final_obs")
        return *step, infos


def run_cleanrl(
    script: Path, create_vector: type[Restarting], writer: object,
    run: Callable[[str, str], dict[str, Any]] = lambda path, name: runpy.run_path(path, run_name=name),
    **settings: Any,  # noqa: ANN401 - of the script
) -> dict[str, Any]:  # fmt: skip
    """Run a script of CleanRL unchanged, except for what it imports for settings and logs; return its names."""
    gymnasium.vector.SyncVectorEnv = functools.partial(create_vector, autoreset_mode=AutoresetMode.SAME_STEP)  # type: ignore
    tyro, tensorboard = ModuleType("tyro"), ModuleType("torch.utils.tensorboard")
    tyro.cli = lambda kind: kind(cuda=False, **settings)  # type: ignore[attr-defined]
    tensorboard.SummaryWriter = lambda *_: writer  # type: ignore[attr-defined]
    sys.modules |= {"tyro": tyro, "torch.utils.tensorboard": tensorboard}
    script = script.resolve()
    sys.path.insert(0, str(script.parents[1]))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            return run(str(script), "__main__")
        finally:
            os.chdir("/")


def cleanrl(seed: int, checkout: Path) -> dict[str, Any]:
    watch = Watch(2_500, ("sampled",), seed)
    writer = Writer(watch, 200_000)

    class Timed(Restarting):
        """Starts the clock with the first step: start-up is not counted."""

        def step(self, actions: Any) -> Any:  # noqa: ANN401 - of gymnasium
            watch.start = watch.start or time.perf_counter()
            result = super().step(actions)
            writer.stepped = time.perf_counter()
            return result

    with contextlib.suppress(Finished):
        run_cleanrl(checkout / "cleanrl" / "ppo.py", Timed, writer, seed=seed)
    return watch.answer(writer.env_steps, "gymnasium")


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, seed, *checkout = sys.argv[1:]
    print(json.dumps(cleanrl(int(seed), Path(*checkout)) if name == "cleanrl" else sb3(name, int(seed))))
