"""Train another library on a MuJoCo task, and evaluate the final policy; prints a line of JSON.

``mujoco_returns.py sb3|sbx ENV SEED STEPS sac`` trains SAC of stable-baselines3, or of sbx, which is JAX, with their
defaults, which are the paper's.
``mujoco_returns.py cleanrl ENV SEED STEPS sac|ppo CHECKOUT`` runs ``sac_continuous_action.py`` or
``ppo_continuous_action.py`` of a CleanRL checkout, unchanged and with its own settings, as ``training.py`` does.

SAC starts to learn after 5,000 steps. The policy plays 100 episodes with its mean actions; the rows of
docs/algorithms/sac.md were measured with ten. ``last_100`` is the mean return of PPO's last 100 training episodes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from training import Act, Restarting, run_cleanrl

EPISODES, LEARNING_STARTS = 100, 5_000
SCRIPTS = {"sac": "sac_continuous_action.py", "ppo": "ppo_continuous_action.py"}


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


def sb3(library: str, env_id: str, seed: int, n_steps: int) -> Act:
    """Train SAC of stable-baselines3, or of sbx, which has the same interface."""
    model = import_module({"sb3": "stable_baselines3"}.get(library, library)).SAC(
        "MlpPolicy", env_id, seed=seed, device="cpu", learning_starts=LEARNING_STARTS
    )
    model.learn(n_steps)
    return lambda observation: model.predict(observation, deterministic=True)[0]


def cleanrl(env_id: str, seed: int, n_steps: int, script: Path) -> dict[str, Any]:
    """Return the names that a script leaves behind."""
    nothing = lambda *_: None  # noqa: E731 - a writer that writes nothing
    writer = SimpleNamespace(add_text=nothing, add_scalar=nothing, close=nothing)
    transform: Any = gymnasium.wrappers.TransformObservation
    # gymnasium 0.29 took the space from the environment.
    gymnasium.wrappers.TransformObservation = lambda env, function: transform(env, function, env.observation_space)  # type: ignore
    settings = {"seed": seed, "env_id": env_id, "total_timesteps": n_steps}
    return run_cleanrl(script, Restarting, writer, **settings)


def sac_policy(names: dict[str, Any]) -> Act:
    return lambda frame: names["actor"].get_action(torch.as_tensor(frame, dtype=torch.float32)[None])[2][0].numpy()


def ppo_policy(names: dict[str, Any]) -> Act:
    """Return the mean actions for frames that are normalised with the training's statistics."""
    (env,), agent = names["envs"].envs, names["agent"]
    moments, space = env.get_wrapper_attr("obs_rms"), env.action_space

    def act(frame: Any) -> Any:  # noqa: ANN401 - numpy arrays
        frame = np.clip((frame - moments.mean) / np.sqrt(moments.var + 1e-8), -10, 10)
        action = agent.actor_mean(torch.as_tensor(frame, dtype=torch.float32)[None])[0].numpy()
        return np.clip(action, space.low, space.high)

    return act


if __name__ == "__main__":
    torch.set_num_threads(1)
    library, env_id, seed, n_steps, algorithm, *checkout = sys.argv[1:]
    settings = (env_id, int(seed), int(n_steps))
    start, last = time.perf_counter(), {}
    if library == "cleanrl":
        names = cleanrl(*settings, Path(*checkout).resolve() / "cleanrl" / SCRIPTS[algorithm])
        act = sac_policy(names) if algorithm == "sac" else ppo_policy(names)
        if algorithm == "ppo":
            (env,) = names["envs"].envs
            last = {"last_100": round(statistics.fmean(env.get_wrapper_attr("return_queue")), 1)}
    else:
        act = sb3(library, *settings)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        returns = evaluate(act, env_id, int(seed))
    package = {"cleanrl": "gymnasium", "sb3": "stable-baselines3", "sbx": "sbx-rl"}[library]
    versions = {name: version(name) for name in (package, "mujoco", "torch")}
    print(json.dumps({
        "final_return": round(float(np.mean(returns)), 1), "final_std": round(float(np.std(returns)), 1), **last,
        "env_steps": int(n_steps), "seconds": round(seconds, 1), "versions": versions,
    }))  # fmt: skip
