"""docs/custom_algorithms.md names the module of every class that it mentions."""

from __future__ import annotations

import importlib
import re

from checkers import ROOT

PAGE = (ROOT / "docs" / "custom_algorithms.md").read_text()
TABLE = PAGE.partition("## Where each class is")[2].partition("\n## ")[0]
LISTINGS = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


def places() -> dict[str, str]:
    """Return the module of each name in the table; in a cell, ``.ppo`` stands next to its full neighbour."""
    found = {}
    for row in re.findall(r"(?m)^\| (`rlstruct[^|]*)\| (.*) \|$", TABLE):
        modules, names = (re.findall(r"`([\w.]+)`", cell) for cell in row)
        package = modules[0].rpartition(".")[0]
        modules = [package + module if module.startswith(".") else module for module in modules]
        for name in names:
            (found[name],) = (module for module in modules if hasattr(importlib.import_module(module), name))
    return found


def test_every_class_has_a_module() -> None:
    mentioned = set(re.findall(r"`([A-Z]\w*[a-z]\w*)[`(.]", PAGE))
    known = places()
    defined = set(re.findall(r"(?m)^class (\w+)", LISTINGS))
    imported = {name for names in re.findall(r"import (.*)", LISTINGS) for name in names.split(", ")}
    assert sorted(mentioned - known.keys() - defined - imported) == []
    assert len(mentioned & known.keys()) > 12
