"""Train another library's SAC on a MuJoCo task, and evaluate the final policy; prints a line of JSON.

``soft_actor_critic.py sb3 ENV SEED STEPS`` trains stable-baselines3's SAC with its defaults, which are the paper's.
``soft_actor_critic.py cleanrl ENV SEED STEPS CHECKOUT`` runs ``sac_continuous_action.py`` of a CleanRL checkout,
unchanged and with its own settings, as ``training.py`` does.

Both start to learn after 5,000 steps. The policy plays ten episodes with its mean actions.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from training import Act, Restarting, run_cleanrl

EPISODES, LEARNING_STARTS = 10, 5_000


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


def cleanrl(env_id: str, seed: int, n_steps: int, checkout: Path) -> Act:
    nothing = lambda *_: None  # noqa: E731 - a writer that writes nothing
    writer = SimpleNamespace(add_text=nothing, add_scalar=nothing, close=nothing)
    settings = {"seed": seed, "env_id": env_id, "total_timesteps": n_steps}
    names = run_cleanrl(checkout / "cleanrl" / "sac_continuous_action.py", Restarting, writer, **settings)
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
