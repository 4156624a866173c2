"""Registries: things by name, some of which are imported only when they are chosen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlstruct.registry import Registry

ENTRIES = [
    ("rlstruct.algos", "ALGORITHMS", "alphazero", "rlstruct.search"),
    ("rlstruct.algos.training.presets", "PRESETS", ("alphazero", "ConnectFour-v0"), "rlstruct.search"),
    ("rlstruct.batchers.backend", "BACKENDS", "workers", "rlstruct.batchers.workers.local"),
    ("rlstruct.batchers.workers.placement", "SHARING", "workers", "rlstruct.sharing"),
]


def test_a_part_of_the_top_layer_is_imported_when_it_is_chosen() -> None:
    code = f"""
import importlib, os, sys, gymnasium, torch  # once for all
for place, registry, name, part in {ENTRIES}:
    if os.fork() == 0:
        registry = getattr(importlib.import_module(place), registry)
        assert name in registry and name in list(registry)
        assert part not in sys.modules or part == "rlstruct.batchers.workers.local", "imported too early"
        assert not isinstance(registry[name], str)
        assert part in sys.modules
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_a_registry_is_a_mapping_that_users_extend() -> None:
    registry: Registry[str, object] = Registry({"gcd": "math:gcd", "abs": abs})
    registry["lcm"] = "math:lcm"
    assert (list(registry), len(registry), "other" in registry) == (["gcd", "abs", "lcm"], 3, False)
    assert dict(registry) == {"gcd": __import__("math").gcd, "abs": abs, "lcm": __import__("math").lcm}
    assert registry.get("other") is None
    del registry["abs"]
    assert repr(registry) == "Registry(gcd, lcm)"
    with pytest.raises(KeyError, match="abs"):
        registry["abs"]


def test_a_wrong_place_is_an_error_of_the_import() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        Registry({"a": "not_there:name"})["a"]
    with pytest.raises(AttributeError, match="not_there"):
        Registry({"a": "math:not_there"})["a"]
