"""Films of agents: let an agent act, draw every step, and write a film or a contact sheet; needs Pillow."""

from __future__ import annotations

import contextlib
import functools
import itertools
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

from rlstruct.algos.training.shipped_callbacks import DEFAULT_FPS, GIF_FPS, frame_times
from rlstruct.cli.messages import UserError, blame, check_output, require, say
from rlstruct.cli.tasks import Factory, is_own, spaces_of
from rlstruct.core import DictTensor
from rlstruct.engine.validity import StepChecks
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.functional.random import step_keys
from rlstruct.indexed_actions import env_for
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

Picture = Any  # of Pillow
Frame = Any  # a numpy array, the frame of one environment
Painter = Callable[[VecEnv, DictTensor, int], Picture]
"""Draws one environment, from the environments, their observation and a row."""
# Draw without a screen or a sound card, and print nothing.
_QUIET_PYGAME = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
_GIF_COLOURS = 64
_GAME_FPS = 8  # of MinAtar and board games
_SHEET_KEPT = 200  # frames from which a sheet is chosen
_GAP, _SHEET_GAP = 4, 16  # pixels between environments, and between two steps on a sheet
_LARGEST = 400  # pixels of the longer side of a screen, so that a film of many environments fits into memory
_CELL = 24  # pixels of a cell of MinAtar and of Connect Four
_DARK, _YELLOW, _RED = "#20242c", "#ffd84a", "#e8604c"
# One colour for each channel of a MinAtar frame: far apart, bright on dark.
_CHANNELS = ("#4aa8ff", _YELLOW, "#8d7b3a", _RED, "#63c96b", "#c77dff", "#ff9e45", "#4fd6c8", "#f08fc0", "#b8c0cc")


def film(
    factory: Factory,
    agent: RL_Agent,
    path: Path,
    *,
    n_envs: int,
    n_steps: int,
    seed: int,
    agent_info: DictTensor | None = None,
    one_episode: bool = False,
) -> int:
    """Film an agent, which acts on the CPU, at the speed of the environment, and return the number of frames.

    Every frame of an episode is drawn once, the first and the last included. The file is a gif, an mp4, or, with the
    ending .png, some of the frames on one sheet; its folder is created.

    Args:
        factory: creates the environments.
        agent: the agent that acts in them.
        path: output file, see `check_path`.
        n_envs: number of environments, side by side, each with its own episodes.
        n_steps: number of steps in each environment.
        seed: environment j has the seed ``seed + j``.
        agent_info: settings of the agent in an environment; None for none.  [1]
        one_episode: end with the first episode, which ``n_steps`` may cut.
    """
    os.environ.update(_QUIET_PYGAME)
    factory = replace(factory, render=True, auto_reset=False)
    spaces_of(factory)  # raises if the environment cannot be drawn
    with contextlib.ExitStack() as stack:
        envs = [_without_restarts(factory(n_envs=1, seed=seed + j), seed + j) for j in range(n_envs)]
        for env in envs:
            stack.callback(env.close)
        fps, paint = _look_of(factory, envs[0])
        legend = _legend_of(factory, envs[0])
        info = DictTensor() if agent_info is None else agent_info
        played = [_played(env, agent, paint, n_steps, seed + j, info, one_episode) for j, env in enumerate(envs)]
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures = _side_by_side(factory.name, played)
        if path.suffix.lower() == ".png":
            return _write_sheet(pictures, legend, path)
        write = _write_mp4 if path.suffix.lower() == ".mp4" else _write_gif
        return write((_grid([picture, *legend], 2) for picture in pictures), path, fps)


def _without_restarts(env: VecEnv, seed: int) -> VecEnv:
    """Let an environment idle after its episode, so that its last frame can be drawn."""
    return GymEnv(env.envs, seed) if type(env) is GymEnvInf else env


def _played(
    env: VecEnv, agent: RL_Agent, paint: Painter, n_steps: int, seed: int, info: DictTensor, one_episode: bool
) -> Iterator[Picture]:
    """Play a single environment, and yield every frame of its episodes; see `film`."""

    def picture(observation: DictTensor) -> Picture:
        frame = paint(env, observation, 0)
        caption = Image.new("RGB", (frame.width, 20), "white")
        text = f"step {step}   return {f'{total:.1f}'.removesuffix('.0')}"
        ImageDraw.Draw(caption).text((5, 3), text, "#333333", _font())
        return _grid([frame, caption], 1, 0)

    acted_in, seeds = env_for(agent, env), torch.tensor([seed], dtype=torch.int64, device="cpu")
    checks = StepChecks("film", acted_in)  # for a VecEnv of a user, which may check nothing
    step, done = 0, False
    while step < n_steps and not (done and one_episode):
        observation, _ = acted_in.reset()
        state, total, done = agent.initial_state(info, 1), 0.0, False
        yield picture(observation)
        while not done and step < n_steps:
            keys = step_keys(seeds, 0, torch.tensor([step], dtype=torch.int64, device="cpu"))[0]
            with torch.no_grad():
                action, state = agent(state, observation + DictTensor({"rng": keys}), info)
            checks.action(action)
            (reached, _), (observation, _) = checks.step(acted_in.step(action))
            step, total = step + 1, total + float(reached["reward"])  # sync: once per frame
            done = bool(reached["done"])  # sync: once per frame
            if not (done and env.auto_reset and paint is _own):  # then it would draw the next episode
                yield picture(reached)


@functools.cache
def _font() -> Any:  # noqa: ANN401 - of Pillow
    return ImageFont.load_default(12)


def _side_by_side(name: str, played: Sequence[Iterator[Picture]]) -> Iterator[Picture]:
    """Show several environments at once; one that has ended keeps its last frame."""
    shown: list[Picture] = [None] * len(played)
    while True:
        try:
            fresh = [next(pictures, None) for pictures in played]
        except Exception as error:
            raise blame(f"{name} raised", error) from None
        if not any(fresh):
            return
        shown = [old if new is None else new for new, old in zip(fresh, shown, strict=True)]
        yield _grid(shown, math.ceil(math.sqrt(len(shown))), _GAP)


def _write_gif(pictures: Iterator[Picture], path: Path, fps: float) -> int:
    few = [picture.quantize(_GIF_COLOURS) for picture in pictures]
    if fps > GIF_FPS:
        say(f"{path}: a .gif shows at most {GIF_FPS} of {fps:g} frames per second, so it is slower; .mp4 is not.")
    times = frame_times(len(few), fps)
    few[0].save(path, save_all=True, append_images=few[1:], duration=times, loop=0, optimize=True)
    return len(few)


def _write_mp4(pictures: Iterator[Picture], path: Path, fps: float) -> int:
    """Write each frame as soon as it is drawn, so that a film of any length fits into memory."""
    from imageio_ffmpeg import write_frames

    first = next(pictures)
    # H.264 wants even sides; the pixels that are cut off belong to the white margin of the caption.
    size = first.width // 2 * 2, first.height // 2 * 2
    writer = write_frames(str(path), size, fps=fps, macro_block_size=2, quality=8)
    n = 0
    with contextlib.closing(writer):
        writer.send(None)  # it is a generator
        for picture in itertools.chain([first], pictures):
            writer.send(picture.crop((0, 0, *size)).tobytes())
            n += 1
    return n


def _write_sheet(pictures: Iterator[Picture], legend: Sequence[Picture], path: Path) -> int:
    """Write at most 12 frames at equal distances, the first and the last included."""
    kept: list[tuple[int, Picture]] = []  # every frame, or every 2nd, 4th, … of a longer film: fits into memory
    every, n, last = 1, 0, None
    for n, last in enumerate(pictures, 1):
        if (n - 1) % every == 0:
            kept.append((n - 1, last))
        if len(kept) > _SHEET_KEPT:
            kept, every = kept[::2], 2 * every
    kept.append((n - 1, last))
    places = [i * (n - 1) / max(1, min(12, n) - 1) for i in range(min(12, n))]
    chosen = [min(kept, key=lambda one: abs(one[0] - place))[1] for place in places]
    _grid([_grid(chosen, 4, _SHEET_GAP), *legend], 2).save(path)
    return n


def check_path(path: Path) -> None:
    """Raise UserError unless a film or a sheet can be written under this name."""
    if path.suffix.lower() not in (".gif", ".mp4", ".png"):
        raise UserError(f"{path}: expected a name that ends with .gif or .mp4 (a film) or .png (a sheet of pictures).")
    if path.suffix.lower() == ".mp4":
        require("video", "imageio_ffmpeg", what=f"{path}: a film as .mp4")
    check_output("the film", path)


def _grid(pictures: Sequence[Picture], columns: int, gap: int = _GAP) -> Picture:
    """Arrange pictures in rows, on white."""
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    width = max(sum(picture.width + gap for picture in row) for row in rows) - gap
    heights = [max(picture.height for picture in row) for row in rows]
    sheet = Image.new("RGB", (width, sum(heights) + gap * (len(rows) - 1)), "white")
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for picture in row:
            sheet.paste(picture, (left, top))
            left += picture.width + gap
        top += height + gap
    return sheet


def _look_of(factory: Factory, env: VecEnv) -> tuple[float, Painter]:
    """Return the number of frames per second, and the function that draws one."""
    spec = env.envs[0].spec if isinstance(env, GymEnv) else None
    name = factory.name if spec is None else spec.id
    if name in _CLASSICS:
        require("train", "pygame", what=f"a film of {name}")
    if isinstance(env, GymEnv) and (name not in _CLASSICS or env.envs[0].render_mode == "rgb_array"):
        return _fps(env.envs[0]), _screen_and_frame if factory.atari else _screen
    if name in _CLASSICS:
        return _classic(name)
    if factory.atari:
        return DEFAULT_FPS, _screen_and_frame
    if is_own(factory.name):
        return _fps(env), _own
    return _GAME_FPS, _minatar if factory.name.endswith("-MinAtar") else _board


def _fps(env: Any) -> float:  # noqa: ANN401 - of gymnasium, or a user's VecEnv
    """Return the frames per second that an environment declares in its metadata."""
    fps = (getattr(env, "metadata", None) or {}).get("render_fps") or DEFAULT_FPS
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise UserError(f"metadata['render_fps'] is {fps!r}, expected a number of frames per second, such as 30.")
    return float(fps)


def _array(observation: DictTensor, key: str, row: int) -> Any:  # noqa: ANN401 - a numpy array
    return observation[key][row].cpu().numpy()  # sync: once per frame of a film


def _legend_of(factory: Factory, env: VecEnv) -> list[Picture]:
    """Return a legend of the colours for MinAtar's games, and nothing for others."""
    if not factory.name.endswith("-MinAtar") or factory.backend is None:
        return []
    names: Sequence[str] = env.channels  # type: ignore[attr-defined]
    picture = Image.new("RGB", (112, 20 * len(names) + 8), _DARK)
    draw, font = ImageDraw.Draw(picture), _font()
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
    except AssertionError as error:
        if "render_mode" not in str(error):
            raise
        raise UserError(  # by the checker that gymnasium.make adds
            "this environment cannot be drawn: name 'rgb_array' in its metadata['render_modes']."
        ) from None
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
    """Return gymnasium's frames per second, and a painter that puts its environment into the state of a frame."""
    twin: Any = gymnasium.make(name, render_mode="rgb_array").unwrapped
    twin.reset()

    def paint(env: VecEnv, observation: DictTensor, row: int) -> Picture:
        twin.state = _CLASSICS[name](_array(observation, "frame", row))
        return _small(twin.render())

    return _fps(twin), paint


# The state of gymnasium's environment that has this frame.
_CLASSICS: dict[str, Callable[[Frame], Frame]] = {
    "CartPole-v1": lambda frame: frame,
    "Pendulum-v1": lambda frame: (np.arctan2(frame[1], frame[0]), frame[2]),
    "Acrobot-v1": lambda frame: (*np.arctan2(frame[1:4:2], frame[0:4:2]), *frame[4:]),
    "MountainCar-v0": lambda frame: frame,
    "MountainCarContinuous-v0": lambda frame: frame,
}
