"""Pictures of the classic control tasks, from what the agent sees of them; needs Pillow.

Gymnasium's own pictures need pygame, and a device simulator has none; an observation says where everything is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

WIDTH, HEIGHT = 360, 240
_FINE = 2  # drawn so much larger, and shrunk: smooth edges
_GROUND, _CART, _POLE, _JOINT, _GOAL = "#3b4252", "#1f5fa8", "#d08a3c", "#4c566a", "#2f9e62"

Frame = Any  # a numpy array, the frame of one environment
Point = tuple[float, float]


class Canvas:
    """A white picture with the origin in a place of one's choice and y upward.

    Args:
        centre: where the origin is, in parts of width and height from the lower left corner.
        scale: pixels of one unit.
    """

    def __init__(self, centre: Point, scale: float) -> None:
        """Begin with white."""
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (WIDTH * _FINE, HEIGHT * _FINE), "white")
        self._draw = ImageDraw.Draw(self.image)
        self._x, self._y = centre[0] * WIDTH * _FINE, (1 - centre[1]) * HEIGHT * _FINE
        self._scale = scale * _FINE

    def line(self, points: list[Point], colour: str, width: float) -> None:
        """Draw a line of ``width`` pixels, with round ends."""
        places = [self._place(point) for point in points]
        self._draw.line(places, colour, round(width * _FINE), "curve")
        for place in (places[0], places[-1]):
            self._dot(place, colour, width / 2)

    def disc(self, point: Point, colour: str, radius: float) -> None:
        """Draw a disc of ``radius`` pixels."""
        self._dot(self._place(point), colour, radius)

    def box(self, low: Point, high: Point, colour: str) -> None:
        """Fill a rectangle."""
        (left, bottom), (right, top) = self._place(low), self._place(high)
        self._draw.rectangle((left, top, right, bottom), colour)

    def shrunk(self) -> Any:  # noqa: ANN401 - a picture of Pillow, which may be absent
        """Return the picture, WIDTH x HEIGHT."""
        from PIL import Image

        return self.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)

    def _place(self, point: Point) -> Point:
        return self._x + point[0] * self._scale, self._y - point[1] * self._scale

    def _dot(self, place: Point, colour: str, radius: float) -> None:
        x, y, r = *place, radius * _FINE
        self._draw.ellipse((x - r, y - r, x + r, y + r), colour)


def cart_pole(frame: Frame) -> Any:  # noqa: ANN401 - a picture
    """Draw x and theta; the ends of the track are where the episode ends."""
    x, theta = float(frame[0]), float(frame[2])
    canvas = Canvas((0.5, 0.3), WIDTH / 5.4)
    canvas.line([(-2.4, 0.0), (2.4, 0.0)], _GROUND, 2)
    for end in (-2.4, 2.4):
        canvas.line([(end, -0.08), (end, 0.08)], _GROUND, 2)
    canvas.box((x - 0.33, -0.14), (x + 0.33, 0.14), _CART)
    tip = (x + 1.9 * math.sin(theta), 0.05 + 1.9 * math.cos(theta))
    canvas.line([(x, 0.05), tip], _POLE, 9)
    canvas.disc((x, 0.05), _JOINT, 4)
    return canvas.shrunk()


def pendulum(frame: Frame) -> Any:  # noqa: ANN401 - a picture
    """Draw the angle; upright is the goal."""
    cos, sin = float(frame[0]), float(frame[1])
    canvas = Canvas((0.5, 0.5), HEIGHT / 2.6)
    canvas.disc((0.0, 1.0), "#d8efe2", 12)
    canvas.line([(0.0, 0.0), (-sin, cos)], _POLE, 14)
    canvas.disc((0.0, 0.0), _JOINT, 5)
    return canvas.shrunk()


def acrobot(frame: Frame) -> Any:  # noqa: ANN401 - a picture
    """Draw both links; the tip shall rise above the line."""
    first = math.atan2(float(frame[1]), float(frame[0]))
    second = first + math.atan2(float(frame[3]), float(frame[2]))
    middle = (math.sin(first), -math.cos(first))
    tip = (middle[0] + math.sin(second), middle[1] - math.cos(second))
    canvas = Canvas((0.5, 0.5), HEIGHT / 4.5)
    canvas.line([(-3.2, 1.0), (3.2, 1.0)], _GOAL, 2)
    canvas.line([(0.0, 0.0), middle], _CART, 9)
    canvas.line([middle, tip], _POLE, 9)
    for joint in ((0.0, 0.0), middle):
        canvas.disc(joint, _JOINT, 5)
    return canvas.shrunk()


def mountain_car(frame: Frame, goal: float = 0.5) -> Any:  # noqa: ANN401 - a picture
    """Draw the car in its valley, and the flag."""
    x = float(frame[0])
    canvas = Canvas((0.67, 0.2), WIDTH / 1.9)
    canvas.line([(at, _hill(at)) for at in np.linspace(-1.2, 0.6, 90).tolist()], _GROUND, 2)  # sync: numpy
    canvas.line([(goal, _hill(goal)), (goal, _hill(goal) + 0.12)], _GOAL, 2)
    canvas.box((goal, _hill(goal) + 0.07), (goal + 0.07, _hill(goal) + 0.12), _GOAL)
    slope = math.atan(0.27 * 3 * math.cos(3 * x))
    along = (0.05 * math.cos(slope), 0.05 * math.sin(slope))
    up = _hill(x) + 0.03
    canvas.line([(x - along[0], up - along[1]), (x + along[0], up + along[1])], _CART, 11)
    return canvas.shrunk()


def mountain_car_continuous(frame: Frame) -> Any:  # noqa: ANN401 - a picture
    """Draw it with its own goal."""
    return mountain_car(frame, goal=0.45)


def _hill(x: float) -> float:
    return 0.27 * math.sin(3 * x) + 0.33  # flatter than it is, so that it fits


CLASSICS: dict[str, Callable[[Frame], Any]] = {
    "CartPole": cart_pole,
    "Pendulum": pendulum,
    "Acrobot": acrobot,
    "MountainCar": mountain_car,
    "MountainCarContinuous": mountain_car_continuous,
}
"""Names of environments without their version, and who draws them."""
