"""Rules for reward, lives and the end of a game, converted to look-up tables over bytes of RAM.

Every rule is a sum or a conjunction over single bytes, so it becomes one table of 256 entries per byte that it reads,
and the kernel in `scoring` needs no code for individual games.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlstruct.errors import BadValueError

MOST_WAYS = 29  # alternative ends of a game: bits of a word
DROPS, HELD = 1 << 29, 1 << 30
"""Bits that say that a life may be lost, and that lives do not change."""
_BYTES = np.arange(256)
_HIGH, _LOW = _BYTES >> 4, _BYTES & 15
_CONDITION = re.compile(r"(\d+)(?:&(\d+))?(==|!=|<|>)(\d+)")
_COMPARE: dict[str, Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.bool_]]] = {
    "==": lambda byte, value: byte == value,
    "!=": lambda byte, value: byte != value,
    "<": lambda byte, value: byte < value,
    ">": lambda byte, value: byte > value,
}
SHAPES = {
    "d": 10 * _HIGH + _LOW, "b": _BYTES, "l": _LOW, "h": _HIGH, "z": _LOW * (_LOW != 10), "y": _HIGH * (_HIGH != 10),
    "e": (_BYTES >> 3) * (_BYTES % 8 == 0) * (_BYTES <= 72),
}  # fmt: skip
"""Number that a byte stands for, by the letter of its notation and the byte's value.  [256] each"""


@dataclass(frozen=True)
class Rules:
    """Scoring rules of a game.

    Attributes:
        score: sum of words such as ``10000*d57``: weight, shape and address. The shapes are ``d`` two decimal digits,
            ``b`` the byte, ``l`` and ``h`` its lower and upper half, ``z`` and ``y`` the same where ten shows no digit,
            ``e`` a digit in steps of eight; ``b5>>3&7`` takes bits.
        sets: a sum that counts more than points: in a frame in which it changes, its change is the reward.
        lives: a sum, also of numbers; 0 when the game is over.
        over: end of the game: conditions on bytes such as ``39==83 123&15==0``, all of which must hold; ``|`` separates
            alternatives.
        held: conditions under which lives do not change; "" for never.
        drops: conditions under which the loss of one life counts; otherwise lives do not change. "" for always.
        special: bytes with another score than their shape says: address, byte, number.
        special_lives: likewise for lives.
        wraps: score after which the display begins again from 0; 0 for never.
        most: greatest reward of a frame.
        still_at_end: the frame that ends the game gives no reward.
        before: the address of a byte whose value before the frame conditions can read, at address 128.
        counts_down: lives go down by one whenever that byte does, whatever its first value.
    """

    score: str = ""
    sets: str = ""
    lives: str = "0"
    over: str = ""
    held: str = ""
    drops: str = ""
    special: tuple[tuple[int, int, int], ...] = ()
    special_lives: tuple[tuple[int, int, int], ...] = ()
    wraps: int = 0
    most: int = 1 << 30
    still_at_end: bool = False
    before: int = -1
    counts_down: bool = False


def tables(rules: Rules) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Convert the rules of a game to tables over the T bytes that they read; rules that read no byte read byte 0.

    Returns:
        The addresses of the bytes, [T] int32; and four numbers for each value of each byte: what it adds to score, sets
        and lives, and a bit for each way to end that it allows, with `DROPS` and `HELD` likewise, [4, T, 256] int32.

    >>> addresses, values = tables(Rules(score="b13", over="13==21"))
    >>> (values[3, 0, [20, 21]] & 1).tolist()
    [0, 1]
    """
    score, sets, lives = sums = _sum(rules.score), _sum(rules.sets), _sum(rules.lives)
    for parts, special in ((score, rules.special), (lives, rules.special_lives)):
        for address, byte, number in special:
            parts[address][byte] = number
    ways = {1 << k: _conditions(way) for k, way in enumerate(rules.over.split("|")) if way.strip()}
    if len(ways) > MOST_WAYS:
        raise BadValueError(f"rlstruct.atari.rules: got {len(ways)} ways to end a game, expected at most {MOST_WAYS}.")
    ways[DROPS] = _conditions(rules.drops)
    if rules.held:
        ways[HELD] = _conditions(rules.held)
    addresses = sorted({*score, *sets, *lives, *(address for way in ways.values() for address in way)} - {-1}) or [0]
    yes, none = _BYTES >= 0, 0 * _BYTES
    over = {a: sum((bit * way.get(a, yes) for bit, way in ways.items()), none) for a in addresses}
    values = np.array([[part.get(a, none) for a in addresses] for part in (*sums, over)], np.int32)
    values[:3, 0] += np.array([part.get(-1, none) for part in sums], np.int32)  # numbers without a byte
    return np.array(addresses, np.int32), values


def _sum(words: str) -> dict[int, npt.NDArray[np.int64]]:
    """Return what each value of each byte adds; numbers without a byte are at address -1."""
    parts: dict[int, npt.NDArray[np.int64]] = {}
    for word in words.replace("-", " -").split():
        match = re.fullmatch(r"(-)?(?:(\d+)\*)?([dblhyze])(\d+)(?:>>(\d+))?(?:&(\d+))?|(-?\d+)", word)
        if match is None:
            raise BadValueError(f"rlstruct.atari.rules: got {word!r}, expected a word such as 10000*d57, b5>>3&7 or 1.")
        minus, weight, shape, address, shift, mask, number = match.groups()
        if number is not None:
            parts[-1] = parts.get(-1, 0 * _BYTES) + int(number)
            continue
        values = SHAPES[shape] >> int(shift or 0)
        values = values & int(mask) if mask else values
        parts[int(address)] = parts.get(int(address), 0 * _BYTES) + (-1 if minus else 1) * int(weight or 1) * values
    return parts


def _conditions(words: str) -> dict[int, npt.NDArray[np.bool_]]:
    """Return a mask for each byte: the values that meet all its conditions."""
    agree: dict[int, npt.NDArray[np.bool_]] = {}
    for word in words.split():
        match = _CONDITION.fullmatch(word)
        if match is None:
            raise BadValueError(f"rlstruct.atari.rules: got {word!r}, expected a condition such as 123&15==0.")
        address, mask, sign, value = match.groups()
        holds = _COMPARE[sign](_BYTES & int(mask or 255), int(value))
        agree[int(address)] = agree.get(int(address), _BYTES >= 0) & holds
    return agree
