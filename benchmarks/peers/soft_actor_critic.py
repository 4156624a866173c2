"""Train another library's SAC on a MuJoCo task, and evaluate the final policy; prints a line of JSON.

``soft_actor_critic.py sb3 ENV SEED STEPS`` trains stable-baselines3's SAC with its defaults, which are the paper's.
``soft_actor_critic.py cleanrl ENV SEED STEPS CHECKOUT`` runs ``sac_continuous_action.py`` of a CleanRL checkout,
unchanged and with its own settings. Its imports for settings and logs (tyro, tensorboard) are replaced. Its
environments restart within a step, as in the gymnasium that it was written for.

Both start to learn after 5,000 steps. The policy plays ten episodes with its mean actions.
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
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

EPISODES, LEARNING_STARTS = 10, 5_000
Act = Callable[[Any], Any]  # actions for observations, numpy arrays


def evaluate(act: Act, env_id: str, seed: int) -> list[float]:
    """Return the returns of whole episodes."""
    env, returns = gymnasium.make(env_id), []
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=1_000_000 + EPISODES * seed + episode)
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def sb3(env_id: str, seed: int, n_steps: int) -> Act:
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", env_id, seed=seed, device="cpu", learning_starts=LEARNING_STARTS)
    model.learn(n_steps)
    return lambda observation: model.predict(observation, deterministic=True)[0]


class Restarting(SyncVectorEnv):
    """Vector environment that gives the last observation of an episode the name it had in gymnasium 0.29."""

    def step(self, actions: Any) -> Any:  # noqa: ANN401 - of gymnasium
        *step, infos = super().step(actions)
        infos.pop("final_info", None)  # it is only printed, and has another form in newer releases of gymnasium
        if "final_obs" in infos:
            infos["final_observation"] = infos.pop("final_obs")
        return *step, infos


def cleanrl(env_id: str, seed: int, n_steps: int, checkout: Path) -> Act:
    gymnasium.vector.SyncVectorEnv = functools.partial(Restarting, autoreset_mode=AutoresetMode.SAME_STEP)  # type: ignore
    tyro, tensorboard = ModuleType("tyro"), ModuleType("torch.utils.tensorboard")
    tyro.cli = lambda kind: kind(seed=seed, cuda=False, env_id=env_id, total_timesteps=n_steps)  # type: ignore
    nothing = lambda *_: None  # noqa: E731 - a writer that writes nothing
    tensorboard.SummaryWriter = lambda *_: SimpleNamespace(  # type: ignore[attr-defined]
        add_text=nothing, add_scalar=nothing, close=nothing
    )
    sys.modules |= {"tyro": tyro, "torch.utils.tensorboard": tensorboard}
    sys.path.insert(0, str(checkout))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        names = runpy.run_path(str(checkout / "cleanrl" / "sac_continuous_action.py"), run_name="__main__")
        os.chdir("/")
    actor = names["actor"]

    def act(observation: Any) -> Any:  # noqa: ANN401 - numpy arrays
        return actor.get_action(torch.as_tensor(observation, dtype=torch.float32)[None])[2][0].numpy()

    return act


if __name__ == "__main__":
    torch.set_num_threads(1)
    library, env_id, seed, n_steps, *checkout = sys.argv[1:]
    settings = (env_id, int(seed), int(n_steps))
    start = time.perf_counter()
    act = cleanrl(*settings, Path(*checkout).resolve()) if library == "cleanrl" else sb3(*settings)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        returns = evaluate(act, env_id, int(seed))
    package = "gymnasium" if library == "cleanrl" else "stable-baselines3"
    versions = {name: version(name) for name in (package, "mujoco", "torch")}
    print(json.dumps({
        "final_return": round(float(np.mean(returns)), 1), "final_std": round(float(np.std(returns)), 1),
        "env_steps": int(n_steps), "seconds": round(seconds, 1), "versions": versions,
    }))  # fmt: skip
