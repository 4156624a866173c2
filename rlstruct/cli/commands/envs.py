"""`rlstruct envs`: the names that --env takes."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from rlstruct.cli.messages import UserError, nearest, say

_HELP = """usage: rlstruct envs [PART]

List the environments that you can train on here and whose names contain PART:
bundled simulators, and gymnasium's environments whose packages are installed,
Atari's games among them.
To train on your own environment, pass --env module:Name-v0."""


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct envs`` with these arguments."""
    if arguments[:1] in (["-h"], ["--help"]):
        say(_HELP)
        return
    if len(arguments) > 1:
        raise UserError(f"expected a part of a name, or nothing, got {' '.join(arguments)}.")
    part = arguments[0] if arguments else ""
    kinds = names()
    matches = {heading: [name for name in listed if part.lower() in name.lower()] for heading, listed in kinds.items()}
    if not any(matches.values()):
        every = [name for listed in kinds.values() for name in listed]
        raise UserError(f"no environment's name contains {part!r}.{nearest(part, every)}")
    width = min(80, shutil.get_terminal_size().columns)
    for heading, listed in matches.items():
        if listed:
            say(f"{heading}:")
            say(textwrap.fill("  ".join(listed), width, initial_indent="  ", subsequent_indent="  "))


def names() -> dict[str, list[str]]:
    """Return the names by origin, of gymnasium's environments those of the latest version.

    A name in two lists is gymnasium's environment, unless --simulator asks for the bundled one.
    """
    import gymnasium  # imported here, because it is slow and a mistake in the arguments is reported without it
    from gymnasium.envs.registration import find_highest_version

    from rlstruct import sims
    from rlstruct.cli.tasks import is_installed, register_atari

    register_atari()
    latest = [
        (name, str(spec.entry_point).startswith("ale_py"))
        for name, spec in sorted(gymnasium.registry.items())
        if is_installed(name) and spec.version == find_highest_version(spec.namespace, spec.name)
    ]
    return {
        "bundled simulators (--simulator torch)": sorted(sims.names()),
        "gymnasium": [name for name, is_atari in latest if not is_atari],
        "ale-py": [name for name, is_atari in latest if is_atari and name.startswith("ALE/")],
    }
