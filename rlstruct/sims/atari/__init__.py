"""The Atari 2600 as Warp kernels: thousands of consoles on one device, verified against ALE register by register.

`Atari` is the environment; ``rlstruct.sims.make("ALE/Pong-v5", ...)`` makes one. `Consoles` is the machine alone: it
loads an ALE state and runs frames from there. Needs the extras ``warp`` and ``atari``: ROMs and start states come from
the user's ale-py.
"""

from rlstruct.errors import MissingPackageError, how_to_install

try:
    import warp  # noqa: F401 - reports a missing package early
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
