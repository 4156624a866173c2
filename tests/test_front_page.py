"""What `import rlstruct` gives: every name of the page, each imported when it is first asked for."""

from __future__ import annotations

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import rlstruct


def test_every_name_is_what_its_module_has_and_what_type_checkers_see() -> None:
    tree = ast.parse(pathlib.Path(rlstruct.__file__).read_text())
    seen = next(node.body for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in seen if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(imported) == sorted(rlstruct.__all__)
    for name, module in imported.items():
        assert module is not None
        assert getattr(rlstruct, name) is getattr(importlib.import_module(module), name)
        assert name in dir(rlstruct)


def test_what_there_is_not_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'rlstruct' has no attribute 'DictTenser'"):
        rlstruct.DictTenser  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'DictTenser' from 'rlstruct'"):
        from rlstruct import DictTenser  # noqa: F401


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, rlstruct; print('torch' in sys.modules); rlstruct.core.DictTensor; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["False", "True"]
