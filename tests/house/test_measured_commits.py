"""Every result, and every commit that a page names, is one of this repository's history."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
OF_OTHERS = {"fe8d8a0"}  # CleanRL's


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def history() -> list[str]:
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("needs the whole history of the repository")
    return git("rev-list", "HEAD").split()


def strangers(found: dict[str, str], history: list[str]) -> dict[str, str]:
    """The commits that are not in the history, and who names them."""
    known = {commit[:length] for commit in history for length in {len(one) for one in found}}
    return {commit: who for commit, who in found.items() if commit not in known}


def test_every_result_names_a_commit_of_the_history(history: list[str]) -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*-*.json"))
    found = {json.loads(file.read_text())["machine"]["commit"]: file.name for file in files}
    assert len(found) > 10
    assert strangers(found, history) == {}


def test_every_commit_on_a_page_is_one_of_the_history(history: list[str]) -> None:
    found = {}
    for page in PAGES:
        for commit in re.findall(r"`([0-9a-f]{7,8})`", page.read_text()):
            if re.search("[a-f]", commit) and commit not in OF_OTHERS:
                found[commit] = page.name
    for recorded in sorted((ROOT / "docs" / "tutorials").glob("*.txt")):
        found[recorded.read_text().partition("\n")[0]] = recorded.name
    assert len(found) > 10
    assert strangers(found, history) == {}


def test_a_commit_that_has_gone_is_found(history: list[str]) -> None:
    assert strangers({"abcdef0": "a page", history[0][:8]: "another"}, history) == {"abcdef0": "a page"}
