"""docs/how_it_works.md: every function that it names exists, no journey is long, and the drawing shows its stops."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ET

import pytest

from checkers import ROOT

PAGE = (ROOT / "docs" / "how_it_works.md").read_text()
NAMED = re.compile(r"`([\w./]+\.py)::([\w.]+)`")
STOP = re.compile(rf"^\d+\. {NAMED.pattern}", re.MULTILINE)
JOURNEYS = {
    heading: STOP.findall(text)
    for heading, _, text in (section.partition("\n") for section in PAGE.split("\n## ")[1:])
    if STOP.search(text)
}


def is_defined(file: str, name: str) -> bool:
    """Return True if a file of the repository defines this function, or this method of this class."""
    path = ROOT / file
    body: list[ast.stmt] = ast.parse(path.read_text()).body if path.is_file() else []
    found: ast.stmt | None = None
    for part in name.split("."):
        named = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        found = named[-1] if named else None
        body = [] if found is None else found.body
    return isinstance(found, ast.FunctionDef)


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        ("batchers/assemble.py", "assemble", True),
        ("batchers/batcher.py", "RL_Batcher.execute", True),
        ("batchers/batcher.py", "RL_Batcher.missing", False),
        ("batchers/batcher.py", "RL_Batcher", False),  # a class
        ("batchers/batcher.py", "execute", False),
        ("batchers/missing.py", "execute", False),
        ("algos/ppo.py", "PPOLearner.descend", False),  # inherited
    ],
)
def test_a_missing_function_is_noticed(file: str, name: str, expected: bool) -> None:
    assert is_defined(file, name) == expected


def test_every_function_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) == PAGE.count("::")
    assert [f"{file}::{name}" for file, name in named if not is_defined(file, name)] == []


def test_four_journeys_have_at_most_fifteen_stops_each() -> None:
    assert [*JOURNEYS] == [
        "A batch in two processes", "An update of PPO", "A step of SAC", "An iteration on one GPU"
    ]  # fmt: skip
    for heading, stops in JOURNEYS.items():
        assert 5 <= len(stops) <= 15, heading
        numbers = re.findall(r"^(\d+)\. ", PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0], re.MULTILINE)
        assert numbers == [str(i + 1) for i in range(len(stops))], heading


def test_the_drawing_shows_every_stop_under_its_number() -> None:
    shown: dict[str, dict[int, str]] = {}
    for text in ET.parse(ROOT / "docs" / "how_it_works.svg").iter("{http://www.w3.org/2000/svg}text"):
        words = text.text or ""
        if text.get("class") == "h":
            shown[words] = journey = {}
        elif text.get("class") == "f":
            number, _, name = words.partition(" ")
            journey[int(number)] = name
    assert [*shown] == [*JOURNEYS]
    for heading, stops in JOURNEYS.items():
        assert sorted(shown[heading]) == [*range(1, len(stops) + 1)], heading
        for i, (_, name) in enumerate(stops, 1):
            assert f".{shown[heading][i]}." in f".{name}.", (heading, i)
