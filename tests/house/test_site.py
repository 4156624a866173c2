"""The documentation site: it builds, its links lead somewhere, public names are explained, tutorials are notebooks."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from checkers import IMITATING, ROOT, library_files
from rlstruct.errors import Explained

SCRIPT = ROOT / ".ci" / "build_docs.py"
_spec = importlib.util.spec_from_file_location("build_docs", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
build_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_docs)

TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Links of all pages to files or anchors of the site that are not there."""
    pages = {file: Page(file.read_text()) for file in site.rglob("*.html") if file.name != "404.html"}
    broken = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            missing = not target.exists()
            if missing or (parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors):
                broken.append(f"{file.relative_to(site)}: {link}")
    return sorted(set(broken))


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a id="x" href="b.html#y">there</a><a href="a.html#x">here</a><img src="c.png">')
    (tmp_path / "b.html").write_text("<p>no anchor</p>")
    assert broken_links(tmp_path) == ["a.html: b.html#y", "a.html: c.png"]


def test_links_of_the_pages_lead_somewhere_in_the_repository_too() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
            if not urlsplit(link).scheme and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="the extra 'docs' is not installed")
def test_the_site_builds_and_all_of_its_links_lead_somewhere() -> None:
    before = time.monotonic()
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "No issues found" in run.stderr, run.stderr
    print(f"built in {time.monotonic() - before:.0f} s")
    assert broken_links(build_docs.SITE) == []
    known = (build_docs.SITE / "llms.txt").read_text()
    for page in build_docs.PAGES.rglob("*.md"):
        place = page.relative_to(build_docs.PAGES)
        assert f"({place})" in known
        assert ":::" not in (build_docs.SITE / place).read_text()
    anchors = set().union(*(Page(file.read_text()).anchors for file in (build_docs.SITE / "reference").glob("*.html")))
    missing = [
        name for package in build_docs.PACKAGES for name in build_docs.public_names(package) if name not in anchors
    ]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w./]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    pages |= {f"tutorials/{script.stem}.md" for script in TUTORIALS}
    pages |= {f"reference/{package}.md" for package in build_docs.PACKAGES}
    assert pages - listed == set()


def test_an_address_that_has_gone_leads_to_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_docs, "SITE", tmp_path)
    build_docs.write_redirects()
    pages = re.findall(r"\b([\w./]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    for old in build_docs.REDIRECTS:
        (link,) = Page((tmp_path / old).read_text()).links[1:]  # after that of the canonical address
        successor = ((tmp_path / old).parent / link).resolve().relative_to(tmp_path.resolve())
        assert str(successor.with_suffix("")) in pages
        assert old.removesuffix(".html") not in pages


@pytest.mark.parametrize("package", build_docs.PACKAGES)
def test_public_names_are_explained(package: str) -> None:
    silent = []
    for name in build_docs.public_names(package):
        found = build_docs.find(name)
        if (inspect.isclass(found) or inspect.isroutine(found) or inspect.ismodule(found)) and not found.__doc__:
            silent.append(name)
    assert silent == []


def test_recorded_output_belongs_to_tutorials_and_is_shown_with_its_commit() -> None:
    recorded = {file.stem for file in (ROOT / "docs" / "tutorials").glob("*.txt")}
    assert recorded - {script.stem for script in TUTORIALS} == set()
    heading, when, text, *pictures = build_docs.recorded("08_evaluation_checkpoints_and_plots")
    assert heading == "## Output"
    assert re.fullmatch("On two CPU cores, at commit `[0-9a-f]{7}`:", when)
    assert text.startswith("```text\n")
    assert "![curves](08_evaluation_checkpoints_and_plots-curves.png)" in pictures
    assert build_docs.recorded("99_missing") == []


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@example.org:team/rlstruct.git", "https://example.org/team/rlstruct"),
        ("ssh://git@example.org/team/rlstruct", "https://example.org/team/rlstruct"),
        ("https://example.org/team/rlstruct.git", "https://example.org/team/rlstruct"),
        ("/a/folder", ""),
    ],
)
def test_the_address_of_the_repository_comes_from_its_remote(
    remote: str, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.setattr(build_docs, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    assert build_docs.repository() == address
    monkeypatch.setenv("GITHUB_REPOSITORY", "team/other")
    assert build_docs.repository().endswith("/team/other")


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda file: file.name)
def test_a_tutorial_is_a_whole_notebook(script: Path) -> None:
    notebook = build_docs.notebook(script.read_text())
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "__main__" not in code
    compile(code, script.name, "exec")
    # Nothing but the guard, with what it is for, is missing; comments between paragraphs have become text.
    text = "".join("".join(cell["source"]) for cell in notebook["cells"])
    flat = re.sub(r"[\s*#]+", "", text)
    body = re.sub(r"(?m)(^#.*\n)*^if __name__.*\n", "", script.read_text().split('"""', 2)[2])
    for line in body.splitlines():
        assert re.sub(r"^--- | -+$|[\s*#]+", "", line.removeprefix("# ")) in flat, line
    assert not re.search(r"(?:^|\n\n)#", code), "a paragraph of text was left in the code"
    json.dumps(notebook)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=() if script.name.startswith("02") else pytest.mark.exhaustive, id=script.name)
        for script in TUTORIALS
    ],
)
def test_a_tutorial_runs_as_a_notebook(script: Path, tmp_path: Path) -> None:
    """Tutorial 02 has worker processes, and classes that are defined in the notebook."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.reads(json.dumps(build_docs.notebook(script.read_text())), as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    said = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert said
    shown = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert bool(shown) == (".png" in script.read_text())


def test_every_error_of_the_library_is_explained_on_its_page() -> None:
    """Every exception class that is raised anywhere, ours or builtin, has a heading on the page of faults."""
    headings = re.findall("^## (.*)$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    explained = {name for heading in headings for name in heading.split(", ")}
    raised = set()
    for file in set(library_files()) - IMITATING:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                raised.add(node.exc.func.id)
    of_the_command_line = {"UserError", "ForeignRun", "KeyboardInterrupt", "SystemExit"}
    as_they_are = {"EOFError", "AttributeError", "NotStarted", "Unavailable"}  # caught; __getattr__ raises the second
    lower_case = {name for name in raised if name[0].islower() or name[0] == "_"}  # functions that make an error
    assert raised - explained - of_the_command_line - as_they_are - lower_case == set()
    for name in ("testing.sim_device", "testing", "profiling", "engine.graph"):  # where classes of errors are
        importlib.import_module(f"rlstruct.{name}")
    ours = [Explained]
    while ours:
        kinds = [kind for kind in ours.pop().__subclasses__() if kind.__module__.startswith("rlstruct.")]
        assert {kind.page for kind in kinds} <= {f"faults#{heading.lower()}" for heading in headings}
        ours += kinds
