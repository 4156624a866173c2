"""Films of agents at work: act, draw what the agent sees, write a gif or a sheet of pictures; needs Pillow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from rlstruct.cli.complaint import UserError, require
from rlstruct.cli.environments import Factory, is_own, spaces_of
from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv
from rlstruct.functional.random import step_keys
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

Picture = Any  # of Pillow
Frame = Any  # a numpy array, the frame of one environment
Painter = Callable[[VecEnv, DictTensor, int], Picture]
"""Draws one row of an observation; gets the environments too, for those that draw themselves."""
Point = tuple[float, float]
Lines = Sequence[tuple[Sequence[Point], str, float]]
Scene = tuple[Point, float, Lines]
"""Origin, in parts of width and height from the lower left corner; pixels of one unit; and lines: points
with y upward, colour and width in pixels. A line of one point is a disc."""

_GIF_COLOURS = 64
_GAP, _SHEET_GAP = 4, 16  # pixels between environments, and between two steps on a sheet
_CELL = 24  # pixels of a cell of MinAtar and of Connect Four
_DARK, _YELLOW, _RED = "#20242c", "#ffd84a", "#e8604c"
# One colour for each channel of a MinAtar frame: far apart, bright on dark.
_CHANNELS = ("#4aa8ff", _YELLOW, "#8d7b3a", _RED, "#63c96b", "#c77dff", "#ff9e45", "#4fd6c8", "#f08fc0", "#b8c0cc")
_WIDTH, _HEIGHT = 360, 240  # of a classic control task
_FINE = 2  # drawn so much larger, and shrunk: smooth edges
_GROUND, _CART, _POLE, _JOINT, _GOAL = "#3b4252", "#1f5fa8", "#d08a3c", "#4c566a", "#2f9e62"


def film(
    factory: Factory, agent: RL_Agent, path: Path, *, n_envs: int, n_steps: int, seed: int, one_episode: bool
) -> int:
    """Let an agent on the CPU act, draw every step, and return how many pictures were drawn.

    Where an episode ends, both its end and the next start are drawn. The file is a gif, an mp4, or with .png some of
    the pictures on one sheet; its folder is made.
    """
    seconds, paint = _look_of(factory)
    factory = replace(factory, render=True)
    spaces_of(factory)  # refuses one that cannot be drawn
    env = factory(n_envs=n_envs, seed=seed)
    try:
        pictures = list(_pictures(env, agent, paint, n_steps, seed, one_episode))
        legend = _legend_of(factory, env)
    finally:
        env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        n = min(12, len(pictures))
        chosen = [pictures[round(i * (len(pictures) - 1) / max(1, n - 1))] for i in range(n)]
        _joined([_grid(chosen, min(n, 4), _SHEET_GAP), *legend]).save(path)
        return len(pictures)
    shown = [_joined([picture, *legend]) for picture in pictures]
    # The last picture stays for a second: the end is what one wants to see.
    if path.suffix.lower() == ".mp4":
        _write_mp4(shown + shown[-1:] * round(1 / seconds), path, seconds)
        return len(pictures)
    few = [picture.quantize(_GIF_COLOURS) for picture in shown]
    times = [max(20, round(seconds * 100) * 10)] * (len(few) - 1) + [1000]  # gifs count in hundredths of a second
    few[0].save(path, save_all=True, append_images=few[1:], duration=times, loop=0, optimize=True)
    return len(pictures)


def _write_mp4(pictures: Sequence[Picture], path: Path, seconds: float) -> None:
    from imageio_ffmpeg import write_frames

    # H.264 wants even sides; what is cut off is the white margin of the caption.
    size = pictures[0].width // 2 * 2, pictures[0].height // 2 * 2
    writer = write_frames(str(path), size, fps=1 / seconds, macro_block_size=2, quality=8)
    writer.send(None)  # it is a generator
    for picture in pictures:
        writer.send(picture.crop((0, 0, *size)).tobytes())
    writer.close()


def check_path(path: Path) -> None:
    """Refuse a name that is neither a film nor a sheet, and a film that cannot be written here."""
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
        worth = " ".join(f"{value:.1f}".removesuffix(".0") for value in returns.tolist())  # sync: once per picture
        return _captioned(whole, f"step {step}   return {worth}")

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


def _captioned(picture: Picture, text: str) -> Picture:
    """Put a line of text below a picture."""
    line = Image.new("RGB", (picture.width, 20), "white")
    ImageDraw.Draw(line).text((5, 3), text, "#333333", ImageFont.load_default(12))
    return _joined([picture, line], 0, down=True)


def _joined(pictures: Sequence[Picture], gap: int = _GAP, *, down: bool = False) -> Picture:
    """Put pictures side by side, or one below the other, on white."""
    across, along = [p.height for p in pictures], [p.width for p in pictures]
    if down:
        across, along = along, across
    size = sum(along) + gap * (len(pictures) - 1), max(across)
    whole = Image.new("RGB", size[::-1] if down else size, "white")
    at = 0
    for picture, length in zip(pictures, along, strict=True):
        whole.paste(picture, (0, at) if down else (at, 0))
        at += length + gap
    return whole


def _grid(pictures: Sequence[Picture], columns: int, gap: int) -> Picture:
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    return _joined([_joined(row, gap) for row in rows], gap, down=True)


def _look_of(factory: Factory) -> tuple[float, Painter]:
    """Return the seconds of a step, as long as it takes or long enough to follow, and the function that draws it."""
    classic = _CLASSICS.get(factory.name.rpartition("-v")[0])
    if classic is not None:
        return classic[0], lambda env, observation, row: _scene(classic[1], observation, row)
    if is_own(factory.name):
        return 0.03, _own
    if factory.atari:
        return 4 / 60, _screen_and_frame
    if factory.backend is None:
        return 0.03, _screen
    return 0.12, _minatar if factory.name.endswith("-MinAtar") else _board


def _array(observation: DictTensor, key: str, row: int) -> Any:  # noqa: ANN401 - a numpy array
    return observation[key][row].cpu().numpy()  # sync: a picture is for people, once per frame of a film


def _legend_of(factory: Factory, env: VecEnv) -> list[Picture]:
    """Return the meaning of the colours, for MinAtar's games; empty for others."""
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
    """Colour the cells by channel, the first channel on top; see `_legend_of`."""
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
    """Draw Connect Four, the first player yellow. A frame shows the player to move first."""
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
    """Let the environment of a user draw itself, by ``render(row)`` or as gymnasium's do."""
    if isinstance(env, GymEnv):
        spec = env.envs[row].spec
        classic = None if spec is None else _CLASSICS.get(spec.name)
        return _screen(env, observation, row) if classic is None else _scene(classic[1], observation, row)
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
        raise UserError(f"this environment draws itself with a package that is missing: {error}") from None
    except NotImplementedError:
        raise UserError("this environment cannot be drawn: write its render().") from None
    if not isinstance(screen, np.ndarray):
        raise UserError("this environment does not support render_mode='rgb_array', and rlstruct has no drawing of it.")
    picture = Image.fromarray(screen.astype(np.uint8))
    return picture if picture.width <= 600 else picture.resize((600, 600 * picture.height // picture.width))


def _screen_and_frame(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Show the screen of an Atari game next to the newest frame that the agent sees, at the same height."""
    if isinstance(env, GymEnv):
        screen = _screen(env, observation, row)
    else:  # a simulated console, at twice its size
        picture = env.screen(row).cpu().numpy()  # type: ignore[attr-defined]  # sync: once per frame of a film
        screen = Image.fromarray(picture).resize((2 * picture.shape[1], 2 * picture.shape[0]), Image.Resampling.NEAREST)
    newest = Image.fromarray(_array(observation, "frame", row)[-1])
    frame = newest.resize((screen.height, screen.height), Image.Resampling.NEAREST)
    return _joined([screen, frame.convert("RGB")])


def _scene(compose: Callable[[Frame], Scene], observation: DictTensor, row: int) -> Picture:
    """Draw a scene; gymnasium's own pictures need pygame, and a device simulator has none."""
    origin, scale, lines = compose(_array(observation, "frame", row))
    picture = Image.new("RGB", (_WIDTH * _FINE, _HEIGHT * _FINE), "white")
    draw = ImageDraw.Draw(picture)
    for points, colour, width in lines:
        places = [
            ((origin[0] * _WIDTH + x * scale) * _FINE, ((1 - origin[1]) * _HEIGHT - y * scale) * _FINE)
            for x, y in points
        ]
        draw.line(places, colour, round(width * _FINE), "curve")
        radius = width * _FINE / 2
        for x, y in (places[0], places[-1]):  # round ends
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), colour)
    return picture.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS)


def _cart_pole(frame: Frame) -> Scene:
    """X and theta; the ends of the track are where the episode ends."""
    x, theta = float(frame[0]), float(frame[2])
    lines = [
        ([(-2.4, -0.08), (-2.4, 0.0), (2.4, 0.0), (2.4, -0.08)], _GROUND, 2),
        ([(x - 0.22, 0.0), (x + 0.22, 0.0)], _CART, 18),
        ([(x, 0.05), (x + 1.9 * math.sin(theta), 0.05 + 1.9 * math.cos(theta))], _POLE, 9),
        ([(x, 0.05)], _JOINT, 8),
    ]
    return (0.5, 0.3), _WIDTH / 5.4, lines


def _pendulum(frame: Frame) -> Scene:
    """The angle; upright is the goal."""
    cos, sin = float(frame[0]), float(frame[1])
    lines = [([(0.0, 1.0)], "#d8efe2", 24), ([(0.0, 0.0), (-sin, cos)], _POLE, 14), ([(0.0, 0.0)], _JOINT, 10)]
    return (0.5, 0.5), _HEIGHT / 2.6, lines


def _acrobot(frame: Frame) -> Scene:
    """Both links; the tip has to rise above the line."""
    first = math.atan2(float(frame[1]), float(frame[0]))
    second = first + math.atan2(float(frame[3]), float(frame[2]))
    middle = (math.sin(first), -math.cos(first))
    tip = (middle[0] + math.sin(second), middle[1] - math.cos(second))
    links = [([(0.0, 0.0), middle], _CART, 9), ([middle, tip], _POLE, 9)]
    joints = [([(0.0, 0.0)], _JOINT, 10), ([middle], _JOINT, 10)]
    return (0.5, 0.5), _HEIGHT / 4.5, [([(-3.2, 1.0), (3.2, 1.0)], _GOAL, 2), *links, *joints]


def _mountain_car(frame: Frame, goal: float = 0.5) -> Scene:
    """The car in its valley, and the flag."""

    def hill(x: float) -> float:
        return 0.27 * math.sin(3 * x) + 0.33  # flatter than it is, so that it fits

    x, top = float(frame[0]), hill(goal) + 0.11
    slope = math.atan(0.27 * 3 * math.cos(3 * x))
    along, up = (0.05 * math.cos(slope), 0.05 * math.sin(slope)), hill(x) + 0.03
    lines = [
        ([(at, hill(at)) for at in np.linspace(-1.2, 0.6, 90).tolist()], _GROUND, 2),  # sync: numpy
        ([(goal, hill(goal)), (goal, top), (goal + 0.06, top)], _GOAL, 2),
        ([(goal + 0.02, top - 0.02), (goal + 0.05, top - 0.02)], _GOAL, 8),
        ([(x - along[0], up - along[1]), (x + along[0], up + along[1])], _CART, 11),
    ]
    return (0.67, 0.2), _WIDTH / 1.9, lines


# Names of environments without their version: seconds of a step, and what to draw.
_CLASSICS: dict[str, tuple[float, Callable[[Frame], Scene]]] = {
    "CartPole": (0.02, _cart_pole),
    "Pendulum": (0.05, _pendulum),
    "Acrobot": (0.06, _acrobot),
    "MountainCar": (0.03, _mountain_car),
    "MountainCarContinuous": (0.03, lambda frame: _mountain_car(frame, goal=0.45)),
}
