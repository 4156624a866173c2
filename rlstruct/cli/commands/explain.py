"""`rlstruct explain`: the documentation of an error, offline."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlstruct.cli.messages import UserError, nearest, say

_PAGE = Path(__file__).parents[1] / "faults.md"
_WIDTH = 80
_HELP = """usage: rlstruct explain [ERROR]

Explain an error, such as WorkerError: what it means, and what to do. Without a
name, list all that are explained."""


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct explain`` with these arguments."""
    if arguments[:1] in (["-h"], ["--help"]):
        say(_HELP)
        return
    if len(arguments) > 1:
        raise UserError(f"expected the name of one error, or nothing, got {' '.join(arguments)}.")
    parts = sections()
    if not arguments:
        say("Explained errors (rlstruct explain NAME):")
        for title in parts:
            say(f"  {title}")
        return
    names = {name: title for title in parts for name in (title, *title.split(", "))}
    wanted = arguments[0].rpartition(".")[2].lower()  # rlstruct.errors.WorkerError, as a traceback has it
    match = next((title for name, title in names.items() if name.lower() == wanted), None)
    if match is None:
        raise UserError(
            f"no error is called {arguments[0]!r}.{nearest(wanted, names) or ' `rlstruct explain` lists all.'}"
        )
    say(match)
    say("-" * len(match))
    for line in plain(parts[match]):
        say(line)


def sections() -> dict[str, str]:
    """Return the sections of docs/faults.md by heading."""
    _, *parts = re.split(r"^## ", _PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: text.strip() for title, _, text in (part.partition("\n") for part in parts)}


def plain(markdown: str) -> Iterator[str]:
    r"""Lay out Markdown for a terminal: paragraphs of 80 columns, and rows of tables as lists.

    >>> list(plain("| said | fix |\n|---|---|\n| [a](b.md) | c |"))
    ['- said: a (docs/b.md)', '  fix: c']
    """
    text = re.sub(r"\[([^\]]+)\]\((\w+\.md)[^)]*\)", r"\1 (docs/\2)", markdown)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)  # other links
    for block in re.split(r"(```.*?```|\n\n+)", text, flags=re.DOTALL):
        if block.startswith("```"):
            yield from textwrap.indent(block.partition("\n")[2].rstrip("`\n"), "    ").splitlines()
        elif block.startswith("|"):
            head, _, *rows = (re.split(r"(?<!\\)\|", line.strip("| ")) for line in block.splitlines())
            for row in rows:
                for i, (name, cell) in enumerate(zip(head, row, strict=True)):
                    mark = "  " if i else "- "
                    yield from textwrap.wrap(f"{mark}{name.strip()}: {cell.strip()}", _WIDTH, subsequent_indent="    ")
        elif block.strip():
            yield from textwrap.wrap(" ".join(block.split()), _WIDTH)
        elif "\n\n" in block:
            yield ""
