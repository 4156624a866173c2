"""Link the packages that rlstruct requires from this environment into another one, to save a second download.

Usage: python link_packages.py SITE_PACKAGES
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def needed(name: str, found: set[str]) -> None:
    """Add the requirements of a distribution to ``found``, recursively."""
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.name not in found and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            found.add(requirement.name)
            needed(requirement.name, found)


def main() -> None:
    target = Path(sys.argv[1])
    names: set[str] = set()
    needed("rlstruct", names)
    for name in sorted(names):
        one = distribution(name)
        for top in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (target / top).exists():
                (target / top).symlink_to(Path(str(one.locate_file(top))))
    print("Linked:", *sorted(names))


if __name__ == "__main__":
    main()
