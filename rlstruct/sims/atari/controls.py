"""Joysticks and paddles: what an action of ALE presses."""

import warp as wp

from rlstruct.sims.atari.state import Outer

JOYSTICK, RIGHT_JOYSTICK, PADDLE, SECOND_PADDLE = range(4)
"""What the player holds."""
PADDLE_STEP = 23000  # ohms that a paddle turns in a frame

LEFT, RIGHT = 4, 8  # up and down are 1 and 2: the order of SWCHA's bits
DIRECTIONS = wp.uint64(0x6A59248100)
"""What ALE's actions 0 to 9 press, four bits each; 10 to 17 are 2 to 9 with FIRE, and 1 is FIRE alone."""


@wp.func
def turn(outer: Outer, ohms: int, pressed: int) -> int:
    """Turn a paddle."""
    turned = ohms
    if (pressed & RIGHT) != 0:
        turned -= PADDLE_STEP
    if (pressed & LEFT) != 0:
        turned += PADDLE_STEP
    return wp.clamp(turned, outer.paddle_least, outer.paddle_most)


@wp.func
def press(outer: Outer, action: int):
    """Press what an action says; the other controllers are not touched."""
    controller = outer.controller
    fire = wp.where(action == 1 or action >= 10, 1, 0)
    direction = wp.where(action >= 10, action - 8, action)
    pressed = int((DIRECTIONS >> wp.uint64(4 * direction)) & wp.uint64(15))
    outer.sticks = 0xFF
    outer.trigger0 = 0x80
    outer.trigger1 = 0x80
    if controller == JOYSTICK:
        outer.sticks = 0xFF ^ (pressed << 4)
        outer.trigger0 = wp.where(fire != 0, 0, 0x80)
    elif controller == RIGHT_JOYSTICK:
        outer.sticks = 0xFF ^ pressed
        outer.trigger1 = wp.where(fire != 0, 0, 0x80)
    elif controller == PADDLE:
        outer.paddle0 = turn(outer, outer.paddle0, pressed)
        outer.sticks = wp.where(fire != 0, 0x7F, 0xFF)
    else:
        outer.paddle1 = turn(outer, outer.paddle1, pressed)
        outer.sticks = wp.where(fire != 0, 0xBF, 0xFF)
