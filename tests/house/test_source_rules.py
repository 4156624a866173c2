"""The library keeps the rules of the house."""

from __future__ import annotations

import ast
import pathlib
import re
from collections import Counter
from collections.abc import Callable

import pytest

from checkers import (
    IMITATING,
    ROOT,
    factory_complaints,
    imports,
    known_private_complaints,
    library_files,
    names_of_classes,
    private_complaints,
    sync_complaints,
    unexplained_complaints,
)

Checker = Callable[[str], list[str]]


def in_all(files: list[pathlib.Path], checker: Checker) -> list[str]:
    return [f"{file.relative_to(ROOT)}:{complaint}" for file in files for complaint in checker(file.read_text())]


@pytest.mark.parametrize("checker", [factory_complaints, sync_complaints])
def test_the_library_keeps_the_rule(checker: Checker) -> None:
    complaints = in_all(library_files(), checker)
    assert not complaints, "\n".join(complaints)


def test_private_names_of_torch_are_in_the_engine_only() -> None:
    engine = ROOT / "rlstruct" / "engine"
    own = {ROOT / "batchers" / "workers" / "weights.py"}  # its _version is its own
    files = [file for file in library_files() if engine not in file.parents and file not in own]
    assert in_all(files, private_complaints) == []


def test_no_test_knows_a_private_name_of_the_library() -> None:
    files = [ROOT / "conftest.py", *sorted((ROOT / "tests").rglob("*.py"))]
    own = set().union(*(names_of_classes(file.read_text()) for file in files))
    complaints = in_all(files, lambda source: known_private_complaints(source, own))
    assert not complaints, "\n".join(complaints)


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """Of two in different folders only one would run, since pytest imports a file by its name alone."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    "source",
    [
        "batcher._backend.close()",
        "self._backend = self._other",
        "from rlstruct.batchers.batcher import _COUNT",
        "from rlstruct._hidden import shown",
        "import rlstruct._hidden",
        'monkeypatch.setattr(batcher, "_clock", None)',
        'monkeypatch.setattr("rlstruct.algos.learner._NONE", 0)',
        'importlib.import_module("rlstruct._hidden")',
        'vars(batcher)["_clock"]',
    ],
)
def test_a_private_name_of_the_library_in_a_test_is_noticed(source: str) -> None:
    assert known_private_complaints(source, {"_backend"})


def test_private_names_of_test_classes_and_of_others_are_free() -> None:
    source = (
        "class Fake:\n    _n: int\n    def _step(self):\n        self._rows = self._n\n        return self._step()\n"
    )
    assert names_of_classes(source) == {"_n", "_step", "_rows"}
    others = 'torch._C._x()\nos._exit(1)\nimport torch._inductor\nsetattr(torch._C, "_x", 1)\nframe["_observation/x"]\n'
    assert known_private_complaints(source + others, names_of_classes(source)) == []


def test_every_error_names_the_page_that_explains_it() -> None:
    complaints = in_all([file for file in library_files() if file not in IMITATING], unexplained_complaints)
    assert not complaints, "\n".join(complaints)


def test_the_core_tests_are_collected_where_torch_has_no_simulated_accelerator() -> None:
    """`make torch` runs them with torch 2.7, which has none: tests import it in functions, and are skipped there."""
    folders = sorted({*re.findall(r"tests/\w+", (ROOT / ".ci" / "torch_versions").read_text())})
    assert len(folders) == 8
    for file in [file for folder in folders for file in (ROOT / folder).rglob("*.py")]:
        top = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [name for _, name in imports("\n".join(map(ast.unparse, top)))]
        assert not [name for name in names if name.startswith("rlstruct.testing") and "sim_" in name], file
