"""`rlstruct envs`: the names that --env takes."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from rlstruct.cli.messages import UserError, nearest, say

_HELP = """usage: rlstruct envs [PART]

List the environments that you can train on here and whose names contain PART:
bundled simulators, and gymnasium's environments whose packages are installed.
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
    found = {kind: [name for name in known if part.lower() in name.lower()] for kind, known in kinds.items()}
    if not any(found.values()):
        every = [name for known in kinds.values() for name in known]
        raise UserError(f"no environment's name contains {part!r}.{nearest(part, every)}")
    width = min(80, shutil.get_terminal_size().columns)
    for kind, known in found.items():
        if known:
            say(f"{kind}:")
            say(textwrap.fill("  ".join(known), width, initial_indent="  ", subsequent_indent="  "))


def names() -> dict[str, list[str]]:
    """Return the names by origin, each environment with its latest version only."""
    import gymnasium  # imported here, because it is slow and a mistake in the arguments is reported without it
    from gymnasium.envs.registration import find_highest_version

    from rlstruct import sims
    from rlstruct.cli.environments import is_installed

    latest = {
        name
        for name, spec in gymnasium.registry.items()
        if is_installed(name) and spec.version == find_highest_version(spec.namespace, spec.name)
    }
    bundled = sims.names()
    return {"bundled simulators (--simulator torch)": sorted(bundled), "gymnasium": sorted(latest - set(bundled))}
