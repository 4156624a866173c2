"""The prose is plain English: no docstring begins with a question word, and no text uses a worn-out word."""

import ast
import io
import re
import tokenize

import pytest

from checkers import ROOT

PLACES = ["rlstruct", "agents", "batchers", "algos", "benchmarks", "tests", "tutorials", ".ci", "docs"]
PLACES += ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
NOT_YET = ["docs/robustness.md"]  # quotes messages as they were measured; `make compare` writes it anew
NOT_YET += ["rlstruct/renamed.py"]  # lists old names

FIRST = re.compile(r"\s*(what|whatever|whether|where|who|whoever|whose|how|that)\b", re.IGNORECASE)
FIRST_BETTER = "begin with a noun phrase (class, module, attribute) or an imperative (function)"
WORN_OUT = {  # Each with a better wording. "As it is" may begin a clause: "as it is computed from…".
    r"mend(s|ed|ing)?": "fix",
    "told": "reported, shown, given; or name the actor",
    "beside": "next to, besides, in addition to, compared with",
    r"as (it is|they are)(?=\s*[^\w\s`])": "unchanged, eagerly",
    "nobody": "name the caller or the process that does not",
    "shall": "must, should, or the present tense",
    "(come|comes|came) to": "reach, become, or the verb alone",
    "of (its|their) own": "its own, a separate",
    "hands? over": "return, pass",
}
PATTERNS = [(re.compile(rf"\b{word}\b".replace(" ", r"\s+"), re.I), better) for word, better in WORN_OUT.items()]
PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def worn_out(text: str, line: int = 1) -> list[str]:
    """Return the worn-out words of a text that starts on a line."""
    return [
        f"{line + text.count(chr(10), 0, hit.start())}: {hit.group()!r}; better: {better}"
        for pattern, better in PATTERNS
        for hit in pattern.finditer(text)
    ]


def complaints(source: str) -> list[str]:
    """Return the complaints about docstrings, comments and strings of a module; names in code are free."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [
        complaint for token in tokens if token.type in PROSE for complaint in worn_out(token.string, token.start[0])
    ]
    for node in ast.walk(ast.parse(source)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring and (first := FIRST.match(str(node.value.value))):
            found.append(f"{node.lineno}: begins with {first.group().strip()!r}; better: {FIRST_BETTER}")
    return found


def test_a_complaint_names_the_line_the_word_and_a_better_wording() -> None:
    source = '"""Whether it works."""\nx = 1  # it is ' + 'told\nmend = """As it is\ncomputed, of its\n' + 'own."""\n'
    worn, own, first = complaints(source)
    assert worn.startswith("2: 'told'; better: ")
    assert own.startswith("4: 'of its\\nown'; better: ")
    assert first == f"1: begins with 'Whether'; better: {FIRST_BETTER}"


@pytest.mark.parametrize("place", PLACES)
def test_the_prose_is_plain_english(place: str) -> None:
    found = []
    for file in [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*.[pm][yd]")):
        name = file.relative_to(ROOT).as_posix()
        if name != "tests/house/test_english.py" and not any(f"{name}/".startswith(f"{start}/") for start in NOT_YET):
            text = file.read_text(encoding="utf-8")
            prose = re.sub("`[^`\n]+`", "", text)  # of a page; names in code are free
            found += [f"{name}:{line}" for line in (complaints(text) if name.endswith(".py") else worn_out(prose))]
    assert not found, "\n".join(found)
