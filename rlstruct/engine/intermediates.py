"""Compiled code whose intermediate results stay in memory, instead of being allocated anew in every call.

TorchInductor's code for the CPU is a Python function that allocates each intermediate tensor, and each view of one,
whenever it is called. In the gradient step of a small network that is as much work as its loops. The shapes never
change here, so `preallocated` moves these statements out of the function: they run once.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_BYTES = 16 * 2**20
"""Memory that one function keeps, at most. Larger results are allocated in every call, where it costs little."""
_ALLOCATE, _VIEW = "empty_strided_cpu", "reinterpret_tensor"  # names in TorchInductor's code

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def preallocated(
    code: Callable[[list[Tensor]], Sequence[Tensor]],
    n_inputs: int,
    held: Sequence[Tensor],
    operators: Mapping[str, Callable[..., Tensor]] = MappingProxyType({}),
) -> Run:
    """Bind compiled code to tensors that are the same in every call, and keep its intermediate results in memory.

    What a call returns is new memory in every call, as before. A call that begins before another one has ended, in
    another thread, allocates everything itself, and so does code in a form that is not expected here.

    Args:
        code: of TorchInductor, called with a list of all inputs, which it empties.
        n_inputs: number of inputs that are passed in each call, the first ones.
        held: the other inputs. Each call reads their current values.
        operators: Python functions by the name of the operator of torch that they implement, such as
            ``"rlstruct.sum_rows"``: they are called without torch's dispatcher.

    Returns:
        A function of the first inputs that returns what the code returns.
    """
    held = [*held]

    def plain(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return code([*inputs, *held])

    function: Any = getattr(code, "__func__", code)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # no Python code, or its file is gone
        return plain
    if (rewritten := _rewrite(source, n_inputs)) is None:
        return plain
    for i, name in enumerate(operators):
        rewritten = rewritten.replace(f"torch.ops.{name}.default(", f"operators[{i}](")
    names: dict[str, Any] = {}
    exec(rewritten, function.__globals__, names)
    call, in_use = names["bind"]([*operators.values()], *held), threading.Lock()

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not in_use.acquire(blocking=False):
            return plain(inputs)
        try:
            result: Sequence[Tensor] = call(inputs)
        finally:
            in_use.release()
        return result

    return run


class _Code(NamedTuple):
    """The parts of a function that unpacks its list of inputs, empties it, and runs statements without control flow."""

    inputs: list[str]
    statements: list[ast.stmt]  # each assigns a name that is new, calls a function, or deletes names
    answer: ast.Return
    returned: set[str]  # all names whose memory may be part of the result

    @classmethod
    def parse(cls, source: str) -> _Code | None:
        """Return the parts; None if the function has another form."""
        match ast.parse(source).body:
            case [
                ast.FunctionDef(
                    args=ast.arguments(args=[*_, ast.arg(arg=argument)]),
                    body=[
                        ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Name(id=unpacked)),
                        clear,
                        *statements,
                        ast.Return() as answer,
                    ],
                )
            ] if unpacked == argument and ast.unparse(clear) == f"{argument}.clear()":
                inputs = [ast.unparse(element) for element in elements]
            case _:
                return None
        groups = _Groups(inputs)
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in groups.parents:
                    groups.add(name, _names(value))
                case ast.Expr(value=ast.Call()) | ast.Delete():
                    pass
                case _:
                    return None
        if {argument, "self"} & {name for statement in statements for name in _names(statement)}:
            return None
        ends = {groups.first(name) for name in _names(answer) if name in groups.parents}
        returned = {name for name in groups.parents if groups.first(name) in ends}
        return cls(inputs, statements, answer, returned)


def _rewrite(source: str, n_inputs: int) -> str | None:
    """Write a function of the held inputs that allocates memory once and returns the rest of the code as a function.

    Args:
        source: of TorchInductor's function.
        n_inputs: number of inputs that are not held.

    Returns:
        The source of ``bind``; None if the function has another form than `_Code`.
    """
    if (code := _Code.parse(source)) is None:
        return None
    own, held = code.inputs[:n_inputs], code.inputs[n_inputs:]
    views = _Views({*held} - code.returned)
    once, rest, n_bytes = [], [f"{', '.join(own)}, = inputs"] if own else [], 0
    for statement in code.statements:
        if isinstance(statement, ast.Assign):
            name, size = ast.unparse(statement.targets[0]), _n_bytes(statement.value)
            fits = size is not None and n_bytes + size <= MOST_BYTES
            if name not in code.returned and (fits or views.is_view(statement.value)):
                once.append(ast.unparse(statement))
                views.kept.add(name)
                n_bytes += size or 0
                continue
        elif isinstance(statement, ast.Delete):
            stay = {*views.kept, *held}
            statement.targets = [target for target in statement.targets if ast.unparse(target) not in stay]
            if not statement.targets:
                continue
        rest.append(ast.unparse(views.visit(statement)))
    call = ["def call(inputs):", *(f"    {line}" for line in [*rest, ast.unparse(code.answer)])]
    lines = [f"    {line}" for line in [*once, *views.once, *call, "return call"]]
    return "\n".join([f"def bind({', '.join(['operators', *held])}):", *lines])


class _Groups:
    """Disjoint groups of names that may stand for the same memory.

    Attributes:
        parents: another name of the group by name; of the first one, itself.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.parents = {name: name for name in names}

    def first(self, name: str) -> str:
        """Return the first name of a group."""
        while (parent := self.parents[name]) != name:
            name = parent
        return name

    def add(self, name: str, used: Iterable[str]) -> None:
        """Add a name, and make one group of it and the groups of those that its value uses."""
        self.parents[name] = name
        for other in used:
            if other in self.parents:
                self.parents[self.first(other)] = self.first(name)


class _Views(ast.NodeTransformer):
    """Takes views of kept tensors out of the arguments of calls.

    Attributes:
        kept: names of these tensors.
        once: statements that assign the views to names.
    """

    def __init__(self, kept: set[str]) -> None:
        self.kept = kept
        self.once: list[str] = []

    def is_view(self, value: ast.expr) -> bool:
        """Return True for a view, or another name, of a kept tensor."""
        match value:
            case ast.Call(func=ast.Name(id=called), args=[ast.Name(id=name), *_]):
                return called == _VIEW and name in self.kept
        return isinstance(value, ast.Name) and value.id in self.kept

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace a view by its name."""
        self.generic_visit(node)
        if not self.is_view(node):
            return node
        name = f"view_{len(self.once)}"
        self.once.append(f"{name} = {ast.unparse(node)}")
        return ast.Name(name, ast.Load())


def _names(node: ast.AST) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]


def _n_bytes(value: ast.expr) -> int | None:
    """Return the size of the tensor that an expression allocates; None if it does something else."""
    match value:
        case ast.Call(func=ast.Name(id=called), args=[shape, stride, ast.Attribute(attr=dtype)]) if called == _ALLOCATE:
            sizes, strides = ast.literal_eval(shape), ast.literal_eval(stride)
            last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            n_elements = last + 1 if math.prod(sizes) else 0
            n_bytes: int = n_elements * getattr(torch, dtype).itemsize
            return n_bytes
    return None
