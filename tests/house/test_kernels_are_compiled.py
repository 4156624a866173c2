"""Every Warp kernel of the library is compiled for an H100 by a test, which looks at its registers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from checkers import ROOT, library_files

MAKER = re.compile(r"(wp|warp)\.(kernel|Kernel)")
CODE = """
import warp as wp

@wp.kernel(enable_backward=False)
def move(x: int): pass

def make_sum(dtype):
    @wp.kernel
    def add(x: dtype): pass

    return add, wp.Kernel(move.func, module=None)

@wp.func
def square(x: float): return x * x
"""


def kernels(source: str) -> list[tuple[str, ...]]:
    """Return the name of every kernel, after those of the functions that make it; a line if it is not decorated."""
    functions: list[str] = []
    names: list[tuple[str, ...]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef):
            functions.append(node.name)
            decorators = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
            if any(MAKER.fullmatch(decorator) for decorator in decorators):
                names.append(tuple(functions))
        elif isinstance(node, ast.Call) and MAKER.fullmatch(ast.unparse(node.func)) and id(node) not in decorating:
            names.append((*functions, f"line {node.lineno}"))
        for child in ast.iter_child_nodes(node):
            visit(child)
        if isinstance(node, ast.FunctionDef):
            functions.pop()

    tree = ast.parse(source)
    decorating = {id(one) for node in ast.walk(tree) for one in getattr(node, "decorator_list", ())}
    visit(tree)
    return names


def not_compiled(source: str, tests: Iterable[str]) -> list[str]:
    """Return the kernels that no test of compiled kernels names, nor the function that makes them."""
    words = {word for test in tests for word in re.findall(r"\w+", test)}
    return [".".join(names) for names in kernels(source) if not words & {*names}]


def test_every_kernel_is_compiled_for_an_h100() -> None:
    texts = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    tests = [text for text in texts if re.search(r"^ *from cubins import .*\bcompiled\b", text, re.MULTILINE)]
    made = {file: kernels(file.read_text()) for file in library_files()}
    assert sum(map(len, made.values())) >= 7
    complaints = [
        f"{file.relative_to(ROOT)}: {name}: compile it in a test, as tests/atari/test_console_registers.py does"
        for file in made
        for name in not_compiled(file.read_text(), tests)
    ]
    assert not complaints, "\n".join(complaints)


def test_a_kernel_that_no_test_compiles_is_reported() -> None:
    assert not_compiled(CODE, ["compiled(move.module)"]) == ["make_sum.add", "make_sum.line 11"]
    assert not_compiled(CODE, ["for kernel in make_sum(wp.float32): compiled(kernel.module)"]) == ["move"]
    assert not_compiled(CODE, ["remove(), make_sums()"]) == ["move", "make_sum.add", "make_sum.line 11"]
