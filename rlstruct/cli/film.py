"""Films of agents: let an agent act, draw every step, and write a film or a contact sheet; needs Pillow."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from rlstruct.cli.environments import Factory, is_own, spaces_of
from rlstruct.cli.messages import UserError, require
from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv
from rlstruct.functional.random import step_keys
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

Picture = Any  # of Pillow
Frame = Any  # a numpy array, the frame of one environment
Painter = Callable[[VecEnv, DictTensor, int], Picture]
"""Draws one environment, from the environments, their observation and a row."""
# Draw without a screen or a sound card, and print nothing.
_QUIET_PYGAME = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
_GIF_COLOURS = 64
_GAP, _SHEET_GAP = 4, 16  # pixels between environments, and between two steps on a sheet
_LARGEST = 400  # pixels of the longer side of a screen, so that a film of many environments fits into memory
_CELL = 24  # pixels of a cell of MinAtar and of Connect Four
_DARK, _YELLOW, _RED = "#20242c", "#ffd84a", "#e8604c"
# One colour for each channel of a MinAtar frame: far apart, bright on dark.
_CHANNELS = ("#4aa8ff", _YELLOW, "#8d7b3a", _RED, "#63c96b", "#c77dff", "#ff9e45", "#4fd6c8", "#f08fc0", "#b8c0cc")


def film(
    factory: Factory, agent: RL_Agent, path: Path, *, n_envs: int, n_steps: int, seed: int, one_episode: bool
) -> int:
    """Film an agent, which acts on the CPU, and return the number of frames.

    The last frame of an episode and the first one of the next are both drawn. The file is a gif, an mp4, or, with the
    ending .png, some of the frames on one sheet; its folder is created.
    """
    os.environ.update(_QUIET_PYGAME)
    factory = replace(factory, render=True)
    spaces_of(factory)  # raises if the environment cannot be drawn
    env = factory(n_envs=n_envs, seed=seed)
    try:
        seconds, paint = _look_of(factory, env)
        pictures = list(_pictures(env, agent, paint, n_steps, seed, one_episode))
        legend = _legend_of(factory, env)
    finally:
        env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        n = min(12, len(pictures))
        chosen = [pictures[round(i * (len(pictures) - 1) / max(1, n - 1))] for i in range(n)]
        _grid([_grid(chosen, 4, _SHEET_GAP), *legend], 2).save(path)
        return len(pictures)
    shown = [_grid([picture, *legend], 2) for picture in pictures]
    # The last frame stays for a second, because it shows how the episode ends.
    if path.suffix.lower() == ".mp4":
        _write_mp4(shown + shown[-1:] * round(1 / seconds), path, seconds)
        return len(pictures)
    few = [picture.quantize(_GIF_COLOURS) for picture in shown]
    times = [max(20, round(seconds * 100) * 10)] * (len(few) - 1) + [1000]  # gifs count in hundredths of a second
    few[0].save(path, save_all=True, append_images=few[1:], duration=times, loop=0, optimize=True)
    return len(pictures)


def _write_mp4(pictures: Sequence[Picture], path: Path, seconds: float) -> None:
    from imageio_ffmpeg import write_frames

    # H.264 wants even sides; the pixels that are cut off belong to the white margin of the caption.
    size = pictures[0].width // 2 * 2, pictures[0].height // 2 * 2
    writer = write_frames(str(path), size, fps=1 / seconds, macro_block_size=2, quality=8)
    writer.send(None)  # it is a generator
    for picture in pictures:
        writer.send(picture.crop((0, 0, *size)).tobytes())
    writer.close()


def check_path(path: Path) -> None:
    """Raise UserError unless a film or a sheet can be written under this name."""
    if path.suffix.lower() not in (".gif", ".mp4", ".png"):
        raise UserError(f"{path}: expected a name that ends with .gif or .mp4 (a film) or .png (a sheet of pictures).")
    if path.suffix.lower() == ".mp4":
        require("video", "imageio_ffmpeg", what=f"{path}: a film as .mp4")


def _pictures(
    env: VecEnv, agent: RL_Agent, paint: Painter, n_steps: int, seed: int, one_episode: bool
) -> Iterator[Picture]:
    B = env.n_envs()
    columns = math.ceil(math.sqrt(B))
    returns = torch.zeros(B, device="cpu")

    def picture(observation: DictTensor, step: int) -> Picture:
        whole = _grid([paint(env, observation, row) for row in range(B)], columns, _GAP)
        worth = " ".join(f"{value:.1f}".removesuffix(".0") for value in returns.tolist())  # sync: once per frame
        caption = Image.new("RGB", (whole.width, 20), "white")
        ImageDraw.Draw(caption).text((5, 3), f"step {step}   return {worth}", "#333333", ImageFont.load_default(12))
        return _grid([whole, caption], 1, 0)

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
        if bool(done.any()):  # sync: on the CPU, once per frame
            if one_episode:
                return
            returns = torch.where(done, 0.0, returns)
            yield picture(observation, step + 1)


def _grid(pictures: Sequence[Picture], columns: int, gap: int = _GAP) -> Picture:
    """Arrange pictures in rows, on white."""
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    width = max(sum(picture.width + gap for picture in row) for row in rows) - gap
    heights = [max(picture.height for picture in row) for row in rows]
    whole = Image.new("RGB", (width, sum(heights) + gap * (len(rows) - 1)), "white")
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for picture in row:
            whole.paste(picture, (left, top))
            left += picture.width + gap
        top += height + gap
    return whole


def _look_of(factory: Factory, env: VecEnv) -> tuple[float, Painter]:
    """Return the seconds for which a step is shown, and the function that draws it."""
    spec = env.envs[0].spec if isinstance(env, GymEnv) else None
    name = factory.name if spec is None else spec.id
    if name in _CLASSICS:
        return _classic(name)
    if factory.atari:
        return 4 / 60, _screen_and_frame
    if isinstance(env, GymEnv):
        return 0.03, _screen
    if is_own(factory.name):
        return 0.03, _own
    return 0.12, _minatar if factory.name.endswith("-MinAtar") else _board


def _array(observation: DictTensor, key: str, row: int) -> Any:  # noqa: ANN401 - a numpy array
    return observation[key][row].cpu().numpy()  # sync: once per frame of a film


def _legend_of(factory: Factory, env: VecEnv) -> list[Picture]:
    """Return a legend of the colours for MinAtar's games, and nothing for others."""
    if not factory.name.endswith("-MinAtar") or factory.backend is None:
        return []
    names: Sequence[str] = env.channels  # type: ignore[attr-defined]
    picture = Image.new("RGB", (112, 20 * len(names) + 8), _DARK)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    for channel, name in enumerate(names):
        top = 8 + 20 * channel
        draw.rectangle((8, top, 19, top + 11), _CHANNELS[channel])
        draw.text((25, top - 1), name.replace("_", " "), "white", font)
    return [picture]


def _minatar(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Draw the cells of a MinAtar game, one colour for each channel, the first channel on top."""
    frame = _array(observation, "frame", row)  # [10, 10, C] bool
    size = frame.shape[0] * _CELL
    picture = Image.new("RGB", (size, size), _DARK)
    draw = ImageDraw.Draw(picture)
    for channel in reversed(range(frame.shape[2])):
        for y, x in np.argwhere(frame[:, :, channel]):
            left, top = int(x) * _CELL, int(y) * _CELL
            draw.rectangle((left + 1, top + 1, left + _CELL - 2, top + _CELL - 2), _CHANNELS[channel])
    return picture


def _board(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Draw Connect Four, the first player in yellow; the first plane of a frame belongs to the player to move."""
    board = _array(observation, "frame/board", row)  # [2, 6, 7] bool
    if board.sum() % 2:
        board = board[::-1]
    cell = 2 * _CELL
    picture = Image.new("RGB", (7 * cell, 6 * cell), "#1f5fa8")
    draw = ImageDraw.Draw(picture)
    for y, x in np.ndindex(6, 7):
        colour = _YELLOW if board[0, y, x] else _RED if board[1, y, x] else "white"
        draw.ellipse((x * cell + 5, y * cell + 5, (x + 1) * cell - 6, (y + 1) * cell - 6), colour)
    return picture


def _own(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Let the simulator of a user draw itself, by ``render(row)``."""
    if not hasattr(env, "render"):
        raise UserError(
            f"{type(env).__name__} cannot be drawn. Give it a method render(row) that returns an array of bytes "
            "[height, width, 3], the picture of one environment."
        )
    return Image.fromarray(np.asarray(env.render(row), np.uint8))


def _screen(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Let a gymnasium environment draw itself."""
    try:
        screen = env.envs[row].render()  # type: ignore[attr-defined]  # a GymEnv
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(f"this environment needs a package to draw itself: {error}") from None
    except NotImplementedError:
        raise UserError("this environment cannot be drawn: define its render().") from None
    if not isinstance(screen, np.ndarray):
        raise UserError("this environment cannot be drawn: it does not support render_mode='rgb_array'.")
    return _small(screen)


def _small(screen: Any) -> Picture:  # noqa: ANN401 - a numpy array
    picture = Image.fromarray(screen.astype(np.uint8))
    picture.thumbnail((_LARGEST, _LARGEST))
    return picture


def _screen_and_frame(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Show the screen of an Atari game next to the newest frame that the agent sees, at the same height."""
    if isinstance(env, GymEnv):
        screen = _screen(env, observation, row)
    else:  # a simulated console, at twice its size
        picture = env.screen(row).cpu().numpy()  # type: ignore[attr-defined]  # sync: once per frame of a film
        screen = Image.fromarray(picture).resize((2 * picture.shape[1], 2 * picture.shape[0]), Image.Resampling.NEAREST)
    newest = Image.fromarray(_array(observation, "frame", row)[-1])
    frame = newest.resize((screen.height, screen.height), Image.Resampling.NEAREST)
    return _grid([screen, frame.convert("RGB")], 2)


def _classic(name: str) -> tuple[float, Painter]:
    """Return a painter that puts gymnasium's environment into the state that a frame shows, and lets it draw itself."""
    require("train", "pygame", what=f"a film of {name}")
    twin: Any = gymnasium.make(name, render_mode="rgb_array").unwrapped
    twin.reset()

    def paint(env: VecEnv, observation: DictTensor, row: int) -> Picture:
        twin.state = _CLASSICS[name](_array(observation, "frame", row))
        return _small(twin.render())

    return 1 / twin.metadata["render_fps"], paint


# The state of gymnasium's environment that has this frame.
_CLASSICS: dict[str, Callable[[Frame], Frame]] = {
    "CartPole-v1": lambda frame: frame,
    "Pendulum-v1": lambda frame: (np.arctan2(frame[1], frame[0]), frame[2]),
    "Acrobot-v1": lambda frame: (*np.arctan2(frame[1:4:2], frame[0:4:2]), *frame[4:]),
    "MountainCar-v0": lambda frame: frame,
    "MountainCarContinuous-v0": lambda frame: frame,
}
