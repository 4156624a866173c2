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
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_BYTES = 16 * 2**20
"""Memory that one function keeps, at most. The largest results are allocated in every call, where it costs little."""
_ALLOCATE, _VIEW = "empty_strided_cpu", "reinterpret_tensor"  # names in TorchInductor's code

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Bind = Callable[[Sequence[Tensor]], Run]


def preallocated(
    code: Callable[[list[Tensor]], Sequence[Tensor]],
    n_inputs: int,
    operators: Mapping[str, Callable[..., Tensor]] = MappingProxyType({}),
) -> Bind:
    """Rewrite compiled code so that it can be bound to memory: to inputs of every call, and to intermediate results.

    What a call returns is new memory in every call, as before. A call that begins before another one has ended, in
    another thread, allocates everything itself, and so does code in a form that is not expected here.

    Args:
        code: of TorchInductor, called with a list of all inputs, which it empties.
        n_inputs: number of inputs that are passed in each call, the first ones.
        operators: Python functions by the name of the operator of torch that they implement, such as
            ``"rlstruct.sum_rows"``: they are called without torch's dispatcher.

    Returns:
        A function of the other inputs, the held ones. It returns the function of the first inputs, which returns what
        the code returns, and reads the current values of the held ones.
    """
    function: Any = getattr(code, "__func__", code)
    try:
        parts = _Parts.of(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):  # no Python code, a piece of a line, or its file is gone
        parts = None
    make = None
    if parts is not None:
        names: dict[str, Any] = {}
        exec(_rewrite(parts, n_inputs, [*operators]), function.__globals__, names)
        make = names["bind"]

    def bind(held: Sequence[Tensor]) -> Run:
        held = [*held]

        def plain(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return code([*inputs, *held])

        if make is None:
            return plain
        with torch.inference_mode(False):  # other modes could not use memory of this one
            call = make([*operators.values()], *held)
        in_use = threading.Lock()

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            if not in_use.acquire(blocking=False):
                return plain(inputs)
            try:
                result: Sequence[Tensor] = call(inputs)
            finally:
                in_use.release()
            return result

        return run

    return bind


class _Parts(NamedTuple):
    """The parts of a function that unpacks its list of inputs, empties it, and runs statements without control flow."""

    inputs: list[str]
    statements: list[ast.stmt]  # each assigns a name that is new, calls a function, or deletes names
    answer: ast.Return

    @classmethod
    def of(cls, source: ast.Module) -> _Parts | None:
        """Return the parts; None if the function has another form."""
        match source.body:
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
        names = {*inputs, argument, "self"}
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)]) if name not in names:
                    names.add(name)
                case ast.Expr(value=ast.Call()) | ast.Delete():
                    pass
                case _:
                    return None
        uses_arguments = any({argument, "self"} & _names(statement) for statement in statements)
        return None if uses_arguments else cls(inputs, statements, answer)

    def changing(self) -> set[str]:
        """Return the names of tensors that a result may be part of, or that an operator changes in place.

        The latter may record a gradient, which would stay with the tensor.
        """
        names = _names(self.answer)
        for statement in reversed(self.statements):
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                    names |= _names(value)
                case ast.Expr(value=ast.Call(func=called)) if (
                    ast.unparse(called).removesuffix(".default").endswith("_")
                ):
                    names |= _names(statement)
        return names


def _rewrite(parts: _Parts, n_inputs: int, operators: Sequence[str]) -> str:
    """Write a function of operators and held inputs that allocates memory, and returns the rest as a function."""
    passed, held = parts.inputs[:n_inputs], parts.inputs[n_inputs:]
    changing, sizes = parts.changing(), {}
    for statement in parts.statements:
        if isinstance(statement, ast.Assign) and (size := _n_bytes(statement.value)) is not None:
            sizes[ast.unparse(statement.targets[0])] = size
    kept, n_bytes = {*held} - changing, 0
    for name in sorted({*sizes} - changing, key=lambda name: sizes[name]):
        if (n_bytes := n_bytes + sizes[name]) <= MOST_BYTES:
            kept.add(name)
    hoist = _Hoist(kept, operators)
    once, every_call = [], [f"{', '.join(passed)}, = inputs"] if passed else []
    for statement in parts.statements:
        if isinstance(statement, ast.Assign):
            name = ast.unparse(statement.targets[0])
            if name in kept or (name not in changing and hoist.is_view(statement.value)):
                once.append(ast.unparse(statement))
                kept.add(name)
                continue
        elif isinstance(statement, ast.Delete):
            statement.targets = [one for one in statement.targets if ast.unparse(one) not in {*kept, *held}]
            if not statement.targets:
                continue
        every_call.append(ast.unparse(hoist.visit(statement)))
    call = ["def call(inputs):", *(f"    {line}" for line in [*every_call, ast.unparse(parts.answer)])]
    lines = [*once, *hoist.views, *call, "return call"]
    return "\n".join([f"def bind({', '.join(['operators', *held])}):", *(f"    {line}" for line in lines)])


class _Hoist(ast.NodeTransformer):
    """Takes what is the same in every call out of a statement: views of kept tensors, and operators.

    Attributes:
        views: statements that assign the views to names, after the kept tensors.
    """

    def __init__(self, kept: set[str], operators: Sequence[str]) -> None:
        self.views: list[str] = []
        self._kept = kept
        self._operators = {f"torch.ops.{name}.default": f"operators[{i}]" for i, name in enumerate(operators)}

    def is_view(self, value: ast.expr) -> bool:
        """Return True for a view, or another name, of a kept tensor."""
        match value:
            case ast.Call(func=ast.Name(id=called), args=[ast.Name(id=name), *_]):
                return called == _VIEW and name in self._kept
        return isinstance(value, ast.Name) and value.id in self._kept

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace a view by its name, and an operator by the function that implements it."""
        self.generic_visit(node)
        if self.is_view(node):
            name = f"view_{len(self.views)}"
            self.views.append(f"{name} = {ast.unparse(node)}")
            return ast.Name(name, ast.Load())
        if (function := self._operators.get(ast.unparse(node.func))) is not None:
            node.func = ast.parse(function, mode="eval").body
        return node


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _n_bytes(value: ast.expr) -> int | None:
    """Return the size of the tensor that an expression allocates; None if it does something else."""
    match value:
        case ast.Call(func=ast.Name(id=called), args=[shape, stride, ast.Attribute(attr=dtype)]) if called == _ALLOCATE:
            try:
                sizes, strides = ast.literal_eval(shape), ast.literal_eval(stride)
            except ValueError:  # a name
                return None
            last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            n_elements = last + 1 if math.prod(sizes) else 0
            n_bytes: int = n_elements * getattr(torch, dtype).itemsize
            return n_bytes
    return None
