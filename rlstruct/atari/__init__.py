"""The Atari 2600 as Warp kernels: thousands of consoles on one device, verified against ALE register by register.

`Atari` is the environment; ``rlstruct.sims.make("ALE/Pong-v5", ...)`` makes one. `Consoles` is the machine alone: it
loads an ALE state and runs frames from there. ROMs and start states come from the user's ale-py.
"""

import rlstruct.sims.kernels  # noqa: F401 - names what is missing
from rlstruct.atari.ale_game import open_ale, open_consoles, playable_games
from rlstruct.atari.ale_state import AleState, read_ale_state, write_ale_state
from rlstruct.atari.env import Atari, AtariState
from rlstruct.atari.machine import FIELDS, MAPPERS, Consoles

__all__ = [
    "FIELDS",
    "MAPPERS",
    "AleState",
    "Atari",
    "AtariState",
    "Consoles",
    "open_ale",
    "open_consoles",
    "playable_games",
    "read_ale_state",
    "write_ale_state",
]
