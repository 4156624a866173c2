"""The page for users of rlstructures: every name on it exists, and every name that v0.2's scripts use is on it."""

from __future__ import annotations

import importlib
import re

import pytest

from checkers import ROOT

PAGE = (ROOT / "docs" / "migrating_from_rlstructures.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
# Imported by the ten mains of rlalgos and the five tutorials of v0.2, by the module that they import it from.
USED = {
    "rlstructures": (
        "DictTensor", "TemporalDictTensor", "Trajectories", "RL_Agent", "RL_Agent_CheckDevice", "RL_Batcher", "logging",
        "masked_dicttensor", "masked_tensor", "replay_agent",
    ),
    "rlstructures.dicttensor": ("masked_dicttensor", "masked_tensor"),
    "rlstructures.env_wrappers": ("DeviceEnv", "GymEnv", "GymEnvInf"),
    "rlstructures.rl_batchers": ("RL_Batcher",),
    "rlstructures.logger": ("Logger", "TFLogger"),
    "rlstructures.tools": ("weight_init",),
    "rlstructures.batchers": ("Batcher", "EpisodeBatcher"),
}  # fmt: skip


def resolve(path: str) -> object:
    """Import the longest part of a dotted path that is a module, and get the rest from it."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for name in parts[n:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def imports() -> list[tuple[str, str]]:
    """(module, name) of every import from rlstruct on the page; an ellipsis stands for the names one column before."""
    found = set()
    for cells in ROWS:
        for before, cell in zip(["", *cells], cells, strict=False):
            for module, names in re.findall(r"from (rlstruct(?:\.\w+)*) import ([\w, …]+)", cell):
                listed = re.findall(r"import ([\w, ]+)", before)[0] if "…" in names else names
                found |= {(module, name.strip()) for name in listed.split(",")}
    return sorted(found)


def test_the_page_has_imports_to_check() -> None:
    assert len(imports()) > 10
    with pytest.raises(AttributeError):
        resolve("rlstruct.core.masked_tensor")  # where the page once said that it is


@pytest.mark.parametrize(("module", "name"), imports())
def test_an_import_of_the_page_works(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(rlstruct(?:\.\w+)+)(?:\([^`]*)?`", PAGE))))
def test_a_dotted_name_of_the_page_exists(path: str) -> None:
    assert resolve(path) is not None


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in USED.items() for name in names])
def test_a_name_that_the_scripts_of_v02_import_is_on_the_page(module: str, name: str) -> None:
    old = [cells[0] for cells in ROWS]
    assert any(re.search(rf"\b{name}\b", cell) for cell in old), f"{module}.{name}"
