"""Use an installed rlstruct from outside the repository: every module imports, and structures work.

Usage: python smoke.py REPOSITORY, where nothing may be imported from.
"""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
import sys

import torch

import rlstruct

EXPECTED = {"rlstruct.core", "rlstruct.functional", "rlstruct.agents", "rlstruct.batchers", "rlstruct.algos"}


def import_everything(repository: pathlib.Path) -> list[str]:
    """Import every module of the installed package and return their names."""
    names = [module.name for module in pkgutil.walk_packages(rlstruct.__path__, "rlstruct.")]
    for name in names:
        file = pathlib.Path(importlib.import_module(name).__file__ or "")
        if file.resolve().is_relative_to(repository):
            raise SystemExit(f"{name} came from the repository ({file}), not from the wheel")
    if missing := EXPECTED - set(names):
        raise SystemExit(f"the wheel lacks {sorted(missing)}")
    return names


def use_structures() -> None:
    """Build a structure, join it with itself and read a row back."""
    frames = rlstruct.DictTensor({"frame": torch.arange(6.0).reshape(3, 2)})
    both = rlstruct.DictTensor.cat([frames, frames])
    if both.n_elems() != 6 or not torch.equal(both.slice(4)["frame"], torch.tensor([[2.0, 3.0]])):
        raise SystemExit(f"DictTensor gave a wrong answer: {both}")


def main() -> None:
    repository = pathlib.Path(sys.argv[1]).resolve()
    names = import_everything(repository)
    use_structures()
    print(f"{len(names)} modules imported from {pathlib.Path(rlstruct.__file__).parent}")


if __name__ == "__main__":
    main()
