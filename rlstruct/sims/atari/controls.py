"""Joysticks and paddles: what an action of ALE presses."""

import warp as wp

from rlstruct.sims.atari.state import Registers

JOYSTICK, RIGHT_JOYSTICK, PADDLE, SECOND_PADDLE = range(4)
"""What the player holds."""
PADDLE_STEP = 23000  # ohms that a paddle turns in a frame

UP, DOWN, LEFT, RIGHT, FIRE = 1, 2, 4, 8, 16  # the directions in the order of SWCHA's bits
_PRESSED = (
    0, FIRE, UP, RIGHT, LEFT, DOWN, UP | RIGHT, UP | LEFT, DOWN | RIGHT, DOWN | LEFT, UP | FIRE, RIGHT | FIRE,
    LEFT | FIRE, DOWN | FIRE, UP | RIGHT | FIRE, UP | LEFT | FIRE, DOWN | RIGHT | FIRE, DOWN | LEFT | FIRE,
)  # fmt: skip
PRESSED = wp.types.vector(length=18, dtype=int)(*_PRESSED)
"""What each of ALE's 18 actions presses."""


@wp.func
def turn(m: Registers, ohms: int, pressed: int) -> int:
    """Turn a paddle."""
    turned = ohms
    if (pressed & RIGHT) != 0:
        turned -= PADDLE_STEP
    if (pressed & LEFT) != 0:
        turned += PADDLE_STEP
    return wp.clamp(turned, m[0].paddle_least, m[0].paddle_most)


@wp.func
def press(m: Registers, action: int):
    """Press what an action says; the other controllers are not touched."""
    controller = m[0].controller
    pressed = PRESSED[action]
    fire = pressed & FIRE
    m[0].sticks = 0xFF
    m[0].trigger0 = 0x80
    m[0].trigger1 = 0x80
    if controller == JOYSTICK:
        m[0].sticks = 0xFF ^ ((pressed & 15) << 4)
        m[0].trigger0 = wp.where(fire != 0, 0, 0x80)
    elif controller == RIGHT_JOYSTICK:
        m[0].sticks = 0xFF ^ (pressed & 15)
        m[0].trigger1 = wp.where(fire != 0, 0, 0x80)
    elif controller == PADDLE:
        m[0].paddle0 = turn(m, m[0].paddle0, pressed)
        m[0].sticks = wp.where(fire != 0, 0x7F, 0xFF)
    else:
        m[0].paddle1 = turn(m, m[0].paddle1, pressed)
        m[0].sticks = wp.where(fire != 0, 0xBF, 0xFF)
