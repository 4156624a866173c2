"""Films of agents at work: act, draw, write; needs Pillow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rlstruct.cli.complaint import UserError
from rlstruct.cli.environments import Factory, SimulatorFactory
from rlstruct.cli.pictures import Painter, Picture, beside, captioned, grid, legend_of, painter_of
from rlstruct.core import DictTensor
from rlstruct.functional.random import step_keys
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

_SECONDS = {"CartPole": 0.02, "Pendulum": 0.05, "Acrobot": 0.06, "MountainCar": 0.03, "MountainCarContinuous": 0.03}
_COLOURS = 64  # of a gif
_SHEET_GAP = 16  # pixels between two steps on a sheet


@dataclass(frozen=True)
class Film:
    """An agent at work.

    Attributes:
        pictures: the first observations, and what every step led to; where an episode ended, both its end and the next
            start.
        legend: what the colours mean; None where they mean nothing.
    """

    pictures: list[Picture]
    legend: Picture | None


def film(factory: Factory, agent: RL_Agent, *, n_envs: int, n_steps: int, seed: int, one_episode: bool) -> Film:
    """Let an agent act and draw every step.

    Args:
        factory: of the environments.
        agent: on the CPU.
        n_envs: environments, drawn side by side.
        n_steps: at most so many steps.
        seed: of environments and agent.
        one_episode: stop when an episode of the first environment ends.
    """
    env = factory(n_envs=n_envs, seed=seed)
    try:
        pictures = list(_frames(env, agent, painter_of(factory), n_steps, seed, one_episode, factory.name))
        return Film(pictures, legend_of(factory, env))
    finally:
        env.close()


def write(shot: Film, path: Path, *, seconds: float) -> None:
    """Write a film as a gif, or some of its pictures on one sheet as a png; the legend once beside them.

    Args:
        shot: at least one picture.
        path: ends with .gif or .png; its folder is made.
        seconds: time of one picture in the gif.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = shot.pictures
    if path.suffix.lower() == ".png":
        n = min(12, len(pictures))
        chosen = [pictures[round(i * (len(pictures) - 1) / max(1, n - 1))] for i in range(n)]
        beside(grid(chosen, min(n, 4), _SHEET_GAP), shot.legend).save(path)
        return
    few = [beside(picture, shot.legend).quantize(_COLOURS) for picture in pictures]
    # Gifs count in hundredths of a second. The last picture stays for a second: the end is what one wants to see.
    times = [max(20, round(seconds * 100) * 10)] * (len(few) - 1) + [1000]
    few[0].save(path, save_all=True, append_images=few[1:], duration=times, loop=0, optimize=True)


def check_path(path: Path) -> None:
    """Refuse a name that is neither a film nor a sheet.

    Raises:
        UserError: with the two that are.
    """
    if path.suffix.lower() not in (".gif", ".png"):
        raise UserError(f"{path}: expected a name that ends with .gif (a film) or .png (a sheet of pictures).")


def seconds_of(factory: Factory) -> float:
    """Return how long a step is shown: as long as it takes, where that is known, else so that one can follow."""
    stem = factory.name.rpartition("-v")[0]
    if stem in _SECONDS:
        return _SECONDS[stem]
    if isinstance(factory, SimulatorFactory):
        return 0.12
    return 4 / 60 if factory.atari else 0.03


def _frames(
    env: VecEnv, agent: RL_Agent, paint: Painter, n_steps: int, seed: int, one_episode: bool, name: str
) -> Iterator[Picture]:
    B = env.n_envs()
    columns = math.ceil(math.sqrt(B))
    returns = torch.zeros(B, device="cpu")

    def picture(observation: DictTensor, step: int) -> Picture:
        whole = grid([paint(env, observation, row) for row in range(B)], columns)
        worth = " ".join(f"{value:.1f}".removesuffix(".0") for value in returns.tolist())  # sync: once per picture
        return captioned(whole, f"step {step}   return {worth}")

    observation, _ = env.reset()
    state, info = agent.initial_state(DictTensor(), B), DictTensor()
    seeds = torch.arange(seed, seed + B, dtype=torch.int64, device="cpu")
    yield picture(observation, 0)
    for step in range(n_steps):
        keys = step_keys(seeds, 0, torch.tensor([step], dtype=torch.int64, device="cpu"))[0]
        with torch.no_grad():
            action, state = agent(state, observation + DictTensor({"rng": keys}), info)
        (reached, _), (observation, _) = env.step(action)
        returns = returns + reached["reward"].to("cpu")
        yield picture(reached, step + 1)
        done = reached["done"].to("cpu")
        if bool(done.any()):  # sync: on the CPU, once per picture
            if one_episode:
                return
            returns = torch.where(done, 0.0, returns)
            yield picture(observation, step + 1)
