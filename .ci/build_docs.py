"""Build the documentation site: `make docs`, or `python .ci/build_docs.py`; the site is in build/docs/site.

Some pages are in docs/; this script adds the others: benchmarks, the changelog, each tutorial as a page and as a
notebook, and a reference of all public names. Then Zensical builds what mkdocs.yml describes, with a link to the
repository if its address is known. Finally, `llms.txt` and every page as Markdown are written next to the HTML.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rlstruct.algos import Algorithm

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "docs"
PAGES, CODE, SITE = BUILD / "pages", BUILD / "code", BUILD / "site"
PACKAGES = (  # by importance
    "rlstruct.batchers", "rlstruct", "rlstruct.core", "rlstruct.envs", "rlstruct.algos", "rlstruct.agents",
    "rlstruct.sims", "rlstruct.functional", "rlstruct.testing", "rlstruct.profiling", "rlstruct.search",
    "rlstruct.search.alphazero", "rlstruct.sharing", "rlstruct.adapters", "rlstruct.errors",
)  # fmt: skip
# Names that most users need; they come first on their page.
FIRST = (
    "RL_Batcher", "EpisodeStatistics", "collect_episodes", "DictTensor", "TemporalDictTensor", "Trajectories",
    "GymEnv", "GymEnvInf", "GymVectorEnv", "run_training", "TrainingConfig", "TrainingResult", "RunFolder", "Callback",
    "ppo", "a2c", "dqn", "reinforce", "ActorCriticAgent", "ActorCritic", "make", "TensorEnv",
)  # fmt: skip
REDIRECTS = {  # addresses of pages that have moved or gone, each with that of its successor
    "addons.html": "index.html",
    "reference/rlstruct_search.html": "reference/rlstruct.search.html",
    "reference/rlstruct_search.alphazero.html": "reference/rlstruct.search.alphazero.html",
    "reference/rlstruct_sharing.html": "reference/rlstruct.sharing.html",
}
HEADING = re.compile(r"# --- (.*?) -+$")
# The last cell of a notebook whose tutorial draws pictures. It finds them in all folders below the notebook's own.
SHOW = """\
import pathlib
import time
from IPython.display import Image, display

for picture in pathlib.Path().rglob("*.png"):
    if time.time() - picture.stat().st_mtime < 600:  # older ones belong to another run
        display(Image(picture))
"""
# An example in a docstring: from its first line to an empty line or the end of the docstring.
EXAMPLE = re.compile(r'^( *)>>> .*(?:\n(?! *$| *""").+)*', re.MULTILINE)


def public_names(package: str) -> list[str]:
    """Return the dotted names on a page of the reference."""
    module = importlib.import_module(package)
    if package == "rlstruct":
        return [f"rlstruct.{name}" for name in module.__all__]
    if hasattr(module, "__all__"):
        names = [name for name in FIRST if name in module.__all__]
        return [
            f"{package}.{name}"
            for name in (*names, *sorted(set(module.__all__) - set(names), key=module.__all__.index))
        ]
    if hasattr(module, "__path__"):  # a package without its own names: list its modules
        files = sorted(Path(module.__path__[0]).glob("[!_]*.py"))
        return [f"{package}.{file.stem}" for file in files]
    return [f"{package}.{name}" for name in vars(module) if _belongs(module, name)]


def _belongs(module: object, name: str) -> bool:
    found = getattr(module, name)
    own = getattr(found, "__module__", None) == getattr(module, "__name__", "")
    return not name.startswith("_") and (own or isinstance(found, Algorithm))


def notebook_cells(script: str) -> Iterator[tuple[str, str]]:
    """Cut a tutorial into cells, ("markdown" or "code", text).

    The docstring, headings and comments between paragraphs become text. The main block loses its guard, because workers
    never import a notebook.
    """
    tree, lines = ast.parse(script), script.splitlines()
    yield "markdown", _first_cell(ast.get_docstring(tree) or "")
    main = next((node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)), None)
    end = main.lineno - 1 if main else len(lines)
    while main and lines[end - 1].startswith("#"):  # the comment that explains the guard
        end -= 1
    yield from _paragraphs(lines[tree.body[0].end_lineno or 0 : end])
    if main:
        yield "markdown", "## Run it"
        yield from _paragraphs(textwrap.dedent("\n".join(lines[main.lineno :])).splitlines())


def _paragraphs(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Cut code at headings and at comments that open a paragraph; both become text."""
    code: list[str] = []
    while lines:
        said = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
        if not said or (code and code[-1].strip()):
            code.append(lines.pop(0))
            continue
        yield "code", "\n".join(code)
        heading = HEADING.match(said[0])
        text = " ".join(line.removeprefix("#").strip() for line in said)
        yield "markdown", f"## {heading[1]}" if heading else re.sub(r"^(\d+\.) ", r"**\1** ", text)
        code, lines = [], lines[1 if heading else len(said) :]
    yield "code", "\n".join(code)


def _first_cell(docstring: str) -> str:
    title, _, text = docstring.partition("\n")
    return f"# {title.rstrip('.')}\n{text}"


def notebook(script: str) -> dict[str, object]:
    """Make a Jupyter notebook (nbformat 4) of a tutorial."""
    cells: list[dict[str, object]] = []
    pictures = [("code", SHOW)] if ".png" in script else []
    for number, (kind, text) in enumerate([*notebook_cells(script), *pictures]):
        if text.strip():
            code = {"execution_count": None, "outputs": []} if kind == "code" else {}
            source = text.strip("\n").splitlines(keepends=True)
            cells.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source, **code})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def stage() -> None:
    """Collect all pages in build/docs/pages, and the code, laid out as installed, in build/docs/code."""
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for page in PAGES.rglob("*.md"):
        # On the site, benchmarks/ and tutorials/ are inside docs/.
        page.write_text(re.sub(r"\]\(\.\./((?:\.\./)?(?:benchmarks|tutorials)/)", r"](\1", page.read_text()))
    example = re.findall(r"```python\n.*?```\n\n```\n.*?```\n", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    index = PAGES / "index.md"
    index.write_text(index.read_text().replace("<!-- example -->\n", example))
    for name, place in (("rlstruct", ""), ("agents", "agents"), ("batchers", "batchers"), ("algos", "algos")):
        for file in (ROOT / name).rglob("*.py"):
            _write(CODE / "rlstruct" / place / file.relative_to(ROOT / name), fenced(file.read_text()))
    for source, page in (
        ("benchmarks/README.md", "benchmarks/README.md"),
        ("benchmarks/TRIED.md", "benchmarks/TRIED.md"),
    ):
        _write(PAGES / page, (ROOT / source).read_text().replace("](../docs/", "](../"))
    _write(PAGES / "changelog.md", (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "]("))
    for page in (PAGES / "changelog").glob("*.md"):
        page.write_text(page.read_text().replace("](../../CHANGELOG.md)", "](../changelog.md)"))
    for page in PAGES.rglob("*.md"):  # a tutorial's page, not its script
        page.write_text(re.sub(r"\]\(((?:\.\./)*tutorials/\w+)\.py\)", r"](\1.md)", page.read_text()))
    _stage_tutorials()
    _stage_reference()


def fenced(code: str) -> str:
    """Put the examples of docstrings into fences: Markdown takes ``>>>`` for quotations."""
    return EXAMPLE.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", code)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _stage_tutorials() -> None:
    index = ["# Tutorials", "", "Each is a script in `tutorials/`, and a notebook to download.", ""]
    for script in sorted((ROOT / "tutorials").glob("[0-9]*.py")):
        title = ""
        parts = [f"[This page as a notebook]({script.stem}.ipynb){{download}}"]
        for kind, text in notebook_cells(script.read_text()):
            if kind == "markdown":
                title = title or text.splitlines()[0].removeprefix("# ")
                parts.append(text.strip())
            elif text.strip():
                parts.append("```python\n" + text.strip("\n") + "\n```")
        parts[0], parts[1] = parts[1], parts[0]  # the title first
        parts += recorded(script.stem)
        _write(PAGES / "tutorials" / f"{script.stem}.md", "\n\n".join(parts) + "\n")
        _write(PAGES / "tutorials" / f"{script.stem}.ipynb", json.dumps(notebook(script.read_text()), indent=1))
        index.append(f"- [{title}]({script.stem}.md)")
    _write(PAGES / "tutorials" / "index.md", "\n".join(index) + "\n")


def recorded(name: str) -> list[str]:
    """Return the recorded output and pictures of a tutorial as Markdown; [] if there are none."""
    place = ROOT / "docs" / "tutorials"
    if not (place / f"{name}.txt").exists():
        return []
    commit, _, text = (place / f"{name}.txt").read_text().partition("\n")
    pictures = sorted(place.glob(f"{name}-*.png"))
    shown = [f"![{file.stem.removeprefix(name)[1:].replace('_', ' ')}]({file.name})" for file in pictures]
    return ["## Output", f"On two CPU cores, at commit `{commit}`:", f"```text\n{text.rstrip()}\n```", *shown]


def repository() -> str:
    """Return the address of the repository from the workflow or from git's remote; "" if neither is known."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    command = ["git", "config", "--get", "remote.origin.url"]
    url = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    url = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", url).removesuffix(".git")
    return url if url.startswith("https://") else ""


def _stage_reference() -> None:
    index = ["# Reference", "", "All public names, by the package from which you import them.", ""]
    for package in PACKAGES:
        about = (inspect.getdoc(importlib.import_module(package)) or "").split("\n\n")[0]
        about = " ".join(about.split()).removeprefix("rlstruct: ")
        index.append(f"- [`{package}`]({package}.md): {about}")
        entries = "\n\n".join(f"::: {name}" for name in public_names(package))
        _write(PAGES / "reference" / f"{package}.md", f"# {package}\n\n{about}\n\n{entries}\n")
    _write(PAGES / "reference" / "index.md", "\n".join(index) + "\n")


def described(name: str) -> str:
    """Return the signature and docstring of a public name as Markdown."""
    found = find(name)
    if inspect.ismodule(found):
        return "\n\n".join(described(f"{name}.{entry}") for entry in vars(found) if _belongs(found, entry))
    text = [f"## `{name}`", inspect.getdoc(found) or ""]
    if inspect.isclass(found):
        methods = {key: value for key, value in vars(found).items() if not key.startswith("_") and callable(value)}
        text += [f"### `{key}{_signature(value)}`\n\n{inspect.getdoc(value) or ''}" for key, value in methods.items()]
    elif callable(found):
        text[0] = f"## `{name}{_signature(found)}`"
    return "\n\n".join(text)


def find(name: str) -> object:
    """Return a module, or a name of one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


def _signature(function: object) -> str:
    return str(inspect.signature(function)) if callable(function) and not inspect.isclass(function) else ""


def write_plain_text() -> None:
    """Write each page as Markdown next to its HTML, and `llms.txt`, which lists them."""
    lines = [
        "# rlstruct",
        "",
        "> Collect reinforcement-learning trajectories with many processes or one GPU process.",
        "",
    ]
    for page in sorted(PAGES.rglob("*.md")):
        place = page.relative_to(PAGES)
        text = re.sub(r"^::: (\S+)$", lambda match: described(match[1]), page.read_text(), flags=re.MULTILINE)
        _write(SITE / place, text)
        title = next((line[2:] for line in text.splitlines() if line.startswith("# ")), place.stem)
        lines.append(f"- [{title}]({place})")
    _write(SITE / "llms.txt", "\n".join(lines) + "\n")


def write_redirects() -> None:
    """Write a page at the address of each one that has gone, which leads on to its successor."""
    for old, new in REDIRECTS.items():
        address = os.path.relpath(SITE / new, (SITE / old).parent)
        head = f'<meta http-equiv="refresh" content="0; url={address}"><link rel="canonical" href="{address}">'
        _write(SITE / old, f'<!doctype html>{head}<a href="{address}">This page has moved.</a>\n')


def main() -> int:
    """Build the site and return the exit code of the builder."""
    stage()
    settings = (ROOT / "mkdocs.yml").read_text()
    config = ROOT / "mkdocs.yml"
    if url := repository():  # paths in it are relative, so the copy lies next to it
        config = ROOT / ".mkdocs-with-repository.yml"
        config.write_text(f"{settings}repo_url: {url}\n")
    command = [sys.executable, "-m", "zensical", "build", "--config-file", str(config), "--clean"]
    try:
        run = subprocess.run(command, cwd=ROOT, check=False)
    finally:
        (ROOT / ".mkdocs-with-repository.yml").unlink(missing_ok=True)
    if run.returncode == 0:
        write_plain_text()
        write_redirects()
        print(f"The site is at {SITE / 'index.html'}")
    return run.returncode


if __name__ == "__main__":
    raise SystemExit(main())
