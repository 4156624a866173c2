"""One picture of an environment, from what the agent sees; needs Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlstruct.cli.classics import CLASSICS
from rlstruct.cli.complaint import UserError
from rlstruct.cli.environments import Factory, GymFactory
from rlstruct.core import DictTensor
from rlstruct.vec_env import VecEnv

Picture = Any  # of Pillow, which may be absent
Painter = Callable[[VecEnv, DictTensor, int], Picture]
"""Draws row ``b`` of an observation; the environments are at hand for those that draw themselves."""

_CELL = 24  # pixels of a cell of MinAtar and of Connect Four
_GAP = 4  # between pictures
_DARK = "#20242c"
# One colour for each channel of a MinAtar frame: far apart, bright on dark.
_COLOURS = (
    *("#4aa8ff", "#ffd84a", "#8d7b3a", "#e8604c", "#63c96b", "#c77dff", "#ff9e45", "#4fd6c8", "#f08fc0", "#b8c0cc"),
)


def painter_of(factory: Factory) -> Painter:
    """Return who draws the environments of a factory."""
    classic = CLASSICS.get(factory.name.rpartition("-v")[0])
    if classic is not None:
        return lambda env, observation, row: classic(_frame(observation, row))
    if isinstance(factory, GymFactory):
        return _screen_and_frame if factory.atari else _screen
    if factory.name.endswith("-MinAtar"):
        return _minatar
    return _board


def array_of(observation: DictTensor, key: str, row: int) -> Any:  # noqa: ANN401 - a numpy array
    """Return row ``row`` of an observation as numpy."""
    return observation[key][row].cpu().numpy()  # sync: a picture is for people, once per frame of a film


def grid(pictures: Sequence[Picture], columns: int, gap: int = _GAP) -> Picture:
    """Put pictures of equal size side by side, in rows of ``columns``, so many pixels apart."""
    from PIL import Image

    width, height = pictures[0].size
    rows = -(-len(pictures) // columns)
    whole = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for i, picture in enumerate(pictures):
        whole.paste(picture, ((i % columns) * (width + gap), (i // columns) * (height + gap)))
    return whole


def captioned(picture: Picture, text: str) -> Picture:
    """Add a line of text below a picture."""
    from PIL import Image, ImageDraw, ImageFont

    height = 20
    whole = Image.new("RGB", (picture.width, picture.height + height), "white")
    whole.paste(picture, (0, 0))
    ImageDraw.Draw(whole).text((5, picture.height + 3), text, "#333333", ImageFont.load_default(12))
    return whole


def _frame(observation: DictTensor, row: int) -> Any:  # noqa: ANN401 - a numpy array
    return array_of(observation, "frame", row)


def legend_of(factory: Factory, env: VecEnv) -> Picture | None:
    """Return what the colours of its pictures mean, where they mean something: in MinAtar's games."""
    from PIL import Image, ImageDraw, ImageFont

    if not factory.name.endswith("-MinAtar") or isinstance(factory, GymFactory):
        return None
    n = env.observation_space.shape[2]  # type: ignore[index]  # [10, 10, C]
    names: Sequence[str] = getattr(env, "channels", [f"channel {c}" for c in range(n)])
    picture = Image.new("RGB", (112, 20 * n + 8), _DARK)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    for channel, name in enumerate(names):
        top = 8 + 20 * channel
        draw.rectangle((8, top, 19, top + 11), _COLOURS[channel])
        draw.text((25, top - 1), name.replace("_", " "), "white", font)
    return picture


def beside(picture: Picture, legend: Picture | None) -> Picture:
    """Put a legend to the right of a picture, or nothing."""
    from PIL import Image

    if legend is None:
        return picture
    whole = Image.new("RGB", (picture.width + _GAP + legend.width, max(picture.height, legend.height)), "white")
    whole.paste(picture, (0, 0))
    whole.paste(legend, (picture.width + _GAP, 0))
    return whole


def _minatar(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Colour the cells by channel, the first channel on top; see `legend_of`."""
    from PIL import Image, ImageDraw

    frame = _frame(observation, row)  # [10, 10, C] bool
    size = frame.shape[0] * _CELL
    picture = Image.new("RGB", (size, size), _DARK)
    draw = ImageDraw.Draw(picture)
    for channel in reversed(range(frame.shape[2])):
        for y, x in np.argwhere(frame[:, :, channel]):
            left, top = int(x) * _CELL, int(y) * _CELL
            draw.rectangle((left + 1, top + 1, left + _CELL - 2, top + _CELL - 2), _COLOURS[channel])
    return picture


def _board(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Draw Connect Four, the first player yellow. A frame shows whoever moves next first."""
    from PIL import Image, ImageDraw

    board = array_of(observation, "frame/board", row)  # [2, 6, 7] bool
    if board.sum() % 2:
        board = board[::-1]
    cell = 2 * _CELL
    picture = Image.new("RGB", (7 * cell, 6 * cell), "#1f5fa8")
    draw = ImageDraw.Draw(picture)
    for y in range(6):
        for x in range(7):
            colour = "#ffd84a" if board[0, y, x] else "#e8604c" if board[1, y, x] else "white"
            draw.ellipse((x * cell + 5, y * cell + 5, (x + 1) * cell - 6, (y + 1) * cell - 6), colour)
    return picture


def _screen(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Let a gymnasium environment draw itself; where it cannot, draw an image that the agent sees."""
    from PIL import Image

    try:
        screen = env.envs[row].render()  # type: ignore[attr-defined]  # a GymEnv
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(f"this environment draws itself with a package that is missing: {error}") from None
    if not isinstance(screen, np.ndarray):
        raise UserError(
            "this environment does not draw itself as an array of pixels (render_mode='rgb_array'), and no picture of "
            "it is bundled."
        )
    picture = Image.fromarray(screen.astype(np.uint8))
    return picture if picture.width <= 600 else picture.resize((600, 600 * picture.height // picture.width))


def _screen_and_frame(env: VecEnv, observation: DictTensor, row: int) -> Picture:
    """Show the screen of an Atari game, and beside it the newest frame that the agent sees."""
    from PIL import Image

    screen = _screen(env, observation, row)
    frame = Image.fromarray(_frame(observation, row)[-1])  # [4, 84, 84] uint8: the newest
    side = screen.height
    both = Image.new("RGB", (screen.width + side + 6, side), "white")
    both.paste(screen, (0, 0))
    both.paste(frame.resize((side, side), Image.Resampling.NEAREST).convert("RGB"), (screen.width + 6, 0))
    return both
