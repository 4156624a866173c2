"""The Atari 2600 as Warp kernels: thousands of consoles on one device, compared with ALE register by register.

`Atari` is the environment (``rlstruct.sims.make("ALE/Pong-v5", ...)`` makes one), `Consoles` the machine alone, which
goes on from states of ALE and runs frames. Needs the extras ``warp`` and ``atari``: ROMs and beginnings come from the
user's ale-py.
"""

from rlstruct.errors import MissingPackageError, how_to_install

try:
    import warp  # noqa: F401 - to say early what is missing
except ImportError as error:
    raise MissingPackageError(
        f"rlstruct.sims.atari needs NVIDIA Warp, which is not installed. {how_to_install('warp')}."
    ) from error

from rlstruct.sims.atari.ale_game import open_ale, open_consoles, playable_games
from rlstruct.sims.atari.ale_state import AleState, read_ale_state, write_ale_state
from rlstruct.sims.atari.env import Atari, AtariState
from rlstruct.sims.atari.machine import FIELDS, MAPPERS, Consoles

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
