"""Alias of `rlstruct_atari`, the add-on with the Atari 2600."""

from rlstruct.addons import load

load("rlstruct_atari", __name__)

from rlstruct_atari import *  # noqa: E402, F403
