"""The compiled executor: a pure step of tensors as few kernels, made by TorchInductor.

The step of a simulator or of a small policy is a few dozen operations on small tensors, and each costs a call.
`torch.compile` fuses them into a few kernels, but its guards check all arguments in every call, which takes longer than
the kernels. Here the shapes never change, so the step is traced once and Inductor's code is called directly.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from rlstruct.core.pytree import TreeSpec
from rlstruct.engine import bits, products, torch_private
from rlstruct.engine.donated import Donated, is_donated
from rlstruct.engine.intermediates import Bind, Run, preallocated
from rlstruct.engine.purity import place_of
from rlstruct.errors import Explained, ShapeMismatchError, warn_user

_simulators_compiled: ContextVar[bool] = ContextVar("simulators_compiled", default=False)
_compiling = threading.RLock()  # tracing and Inductor's settings belong to the process, not to a thread

MAX_FUSED = 4096
"""Largest number of stores in one loop. Inductor's default is 64, and large games need more."""
_aten: Any = torch.ops.aten


class NotPureError(Explained, RuntimeError):
    """The function changes an argument or a captured tensor in place; the message names the operation."""


class Use(NamedTuple):
    """Views of a `Donated` dict that code needs in each call."""

    inputs: list[Tensor]  # its tensors, in the layout of the code
    written: list[Tensor]  # those that the code writes to
    copied: dict[str, Tensor]  # those of them that had another layout, so that what is written is not in the dict


class Compiled:
    """An `Executor` that compiles a pure function of pytrees in its first call.

    If the last argument is `Donated`, the last part of the function's result is a dict of tensors, and each is written
    over the argument of the same key instead of to new memory. Only those that are not there yet are returned. The
    function itself changes nothing.

    Args:
        fn: the function, without Python control flow on values. All calls have the same keys, shapes and dtypes.
        writes: it may change its arguments in place; they must be contiguous.

    Attributes:
        held: tensors that the function reads besides its arguments, such as weights. Every call reads their current
            values.
    """

    name = "compiled"

    def __init__(self, fn: Callable[..., Any], *, writes: bool = False) -> None:
        self.held: list[Tensor] = []
        self.writes = writes
        self._fn = fn
        self._bind: Bind  # the code
        self._run: Run | None = None  # bound to what it holds
        self._arguments: TreeSpec
        self._donates = False
        self._memory: list[str] = []  # keys of the donated dict; its tensors are the last inputs
        self._strides: list[tuple[int, ...]] = []  # of each input
        self._result: TreeSpec
        self._outputs: list[int] = []  # index of the output, for each tensor of the result
        self._new: list[str] = []  # keys of the results that belong into the donated dict, the last outputs
        self._in_place = False  # the code writes them there, and they are no outputs
        self._masks: list[int] = []  # indices of outputs that are bytes instead of bools [B]
        self._bytes: set[int] = set()  # indices of inputs that are passed as bytes instead of bools

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - pytrees
        """Return ``fn(*args)``."""
        if self._run is None:
            self._compile(args)
        use = self._use(args[-1]) if self._donates else None
        inputs = self._laid_out(self._arguments.flatten(args if use is None else args[:-1]))
        if use is not None:
            inputs += use.inputs
        outputs = list(self._run(inputs))  # type: ignore[misc]  # _compile sets it
        result = self._answer(outputs)
        if use is None:
            return result
        if not self._in_place:
            return (*result, dict(zip(self._new, outputs[-len(self._new) :], strict=True)))
        torch.autograd.graph.increment_version(use.written)
        return (*result, use.copied)

    def times(self, n: int, *args: Any) -> list[Any] | None:  # noqa: ANN401
        """Call ``fn(*args)`` n times, if every call writes all its results for the last argument over it.

        Returns:
            The results without that last part; None, and nothing was called, if it does not.
        """
        use = self._use(args[-1])
        if not self._in_place or use.copied:
            return None
        inputs = [*self._laid_out(self._arguments.flatten(args[:-1])), *use.inputs]
        results = [self._answer(list(self._run(inputs))) for _ in range(n)]  # type: ignore[misc]  # as above
        torch.autograd.graph.increment_version(use.written)
        return results

    def _answer(self, outputs: list[Tensor]) -> Any:  # noqa: ANN401
        """Return the result of the function, without a donated dict, from the outputs of the code."""
        for i in self._masks:
            outputs[i] = outputs[i].view(torch.bool)
        return self._result.unflatten([outputs[i] for i in self._outputs])

    def _laid_out(self, inputs: list[Tensor], first: int = 0) -> list[Tensor]:
        """Bring inputs, the first of which has this index, to the strides of the first call, and masks to bytes."""
        for i, tensor in enumerate(inputs, first):
            if tensor.stride() != (strides := self._strides[i]):
                empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
                inputs[i - first] = empty.copy_(tensor)
            if i in self._bytes:
                inputs[i - first] = inputs[i - first].view(torch.uint8)
        return inputs

    def _use(self, memory: Donated) -> Use:
        use: Use | None = memory.uses.get(self)
        if use is None:
            first = len(self._strides) - len(self._memory)
            own = [memory[key] for key in self._memory]
            inputs = self._laid_out([*own], first)
            shown = dict(zip(self._memory, inputs, strict=True))
            copied = {key: value for key, value in shown.items() if value.data_ptr() != memory[key].data_ptr()}
            new = {key: copied[key] for key in self._new if key in copied}
            use = Use(inputs, [shown[key] for key in self._new], new)
            if not copied:  # otherwise the tensors may have changed in the next call
                memory.uses[self] = use
        return use

    def rebind(self, places: Mapping[tuple[object, ...], str], weights: Mapping[str, Tensor]) -> bool:
        """Read ``weights`` instead of the tensors at ``places``; return False if one has another layout."""
        pairs = [(old, weights.get(places[at]) if (at := place_of(old)) in places else old) for old in self.held]
        if any(new is None or place_of(new)[1:] != place_of(old)[1:] for old, new in pairs):
            return False
        self._hold([new.detach() for _, new in pairs if new is not None])
        return True

    def prepare(self, *args: Any) -> None:  # noqa: ANN401
        """Compile the function for these arguments, which may advance torch's global generators."""
        self._compile(args)

    def _compile(self, args: tuple[Any, ...]) -> None:
        with _compiling, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch imports its own deprecated modules
            self._trace(args)

    def _trace(self, args: tuple[Any, ...]) -> None:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        self._donates = is_donated(args)
        memory = args[-1] if self._donates else {}
        args = args[:-1] if self._donates else args
        self._arguments, self._memory = structure, names = TreeSpec(args), list(memory)
        leaves_in = [*structure.flatten(args), *memory.values()]
        first = len(leaves_in) - len(names)  # index of the first donated input
        on_cpu = not leaves_in or leaves_in[0].device.type == "cpu"

        def flat(*inputs: Tensor) -> list[Tensor]:
            given = dict(zip(names, inputs[first:], strict=True))
            result = self._fn(*structure.unflatten(inputs[:first]), *([given] if self._donates else []))
            new: dict[str, Tensor] = {}
            if self._donates:
                *result, new = result
            self._result, self._new = TreeSpec(result), list(new)
            leaves = self._result.flatten(result)
            outputs = {id(value): value for value in leaves}
            place = {identity: i for i, identity in enumerate(outputs)}
            self._outputs = [place[id(value)] for value in leaves]
            masks = {i for i, v in enumerate(outputs.values()) if on_cpu and is_mask(v)}
            self._masks = sorted(masks)
            for key, value in new.items():
                _expect_same(key, value, given[key])
            # Cloned, because an input may be written over before it is copied.
            last = [value.clone() if any(value is one for one in inputs) else value for value in new.values()]
            return [mask_bytes(v) if i in masks else v for i, v in enumerate(outputs.values())] + last

        # Cloned, because a tensor that occurs twice, such as two zeros of a first state, would be traced as one input.
        inputs = [tensor.clone() for tensor in leaves_in]
        # __call__ compares strides. Random numbers must equal those of eager torch.
        settings = {"max_fusion_size": MAX_FUSED, "size_asserts": False, "fallback_random": True}
        patched = torch._inductor.config.patch(settings)
        with torch.no_grad(), patched, torch_private.scalar_loops_of_bools():
            # On CUDA, Inductor generates wrong code for foreach operators.
            foreach = torch_private.foreach_decompositions()
            table = {**select_decomp_table(), **products.DECOMPOSITIONS, **foreach}
            # Fake tensors have no values: a function that asks for one raises instead of specialising on the value.
            traced = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
            if not self.writes:
                _refuse_changes(traced.graph)
            pure = torch.func.functionalize(traced, remove="mutations")
            graph = make_fx(pure, decomposition_table=table)(*inputs)
            places = graph.graph.find_nodes(op="placeholder")
            written = {first + names.index(key) for key in self._new}
            flags = {
                i
                for i, x in enumerate(inputs)
                if x.dim() > 1 and i not in written and places[i].users and bits.is_only_converted(places[i])
            }
            if on_cpu and flags:
                inputs = [x.view(torch.uint8) if i in flags else x for i, x in enumerate(inputs)]
                graph = make_fx(pure, decomposition_table=table)(*inputs)
                self._bytes = flags
                places = graph.graph.find_nodes(op="placeholder")
                bits.sum_rows(graph.graph, [places[i] for i in flags])
            outputs = traced(*inputs)
            held = _lift_held(graph, leaves_in if self._donates else ())
            self._in_place = self._donates and not _overlap(held, leaves_in)
            if self._in_place:
                _write_over(graph.graph, [first + names.index(key) for key in self._new])
                outputs = outputs[: len(outputs) - len(self._new)]
            answer = graph.graph.find_nodes(op="output")[0]
            answer.meta["user_visible_output_idxs"] = range(len(outputs))  # outputs keep their strides:
            answer.meta["original_output_strides"] = strides = [tensor.stride() for tensor in outputs]
            graph.recompile()
            with torch_private.code_on_disk([*inputs, *held], strides) as fakes:
                run = compile_fx_inner(graph, fakes)
        self._strides = [tensor.stride() for tensor in inputs]
        code = getattr(run, "current_callable", run)  # without Inductor's wrapper
        self._bind = preallocated(code, len(inputs), bits.OPERATORS)
        self._hold(held)

    def _hold(self, held: list[Tensor]) -> None:
        self.held, self._run = held, self._bind(held)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the function alone: the copy compiles it again, for the tensors that it then reads."""
        return partial(Compiled, writes=self.writes), (self._fn,)


def is_mask(value: Tensor) -> bool:
    """Return True for [B] bool, which code should write as `mask_bytes`."""
    return value.dtype is torch.bool and value.dim() == 1


def mask_bytes(mask: Tensor) -> Tensor:
    """Turn a mask into bytes. Inductor's vectors store bools one by one; a loop that stores none keeps its vectors."""
    return mask.to(torch.float32).to(torch.uint8)


def why_no_compiler() -> str:
    """Return the reason why nothing can be compiled for the CPU here; empty if it can."""
    if why_not := torch_private.why_missing("compiled"):
        return why_not
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return "" if shutil.which(name) else f"there is no C++ compiler called {name}"


@contextlib.contextmanager
def compiling_simulators(compiled: bool) -> Iterator[None]:
    """Let the simulators that are created with ``backend="auto"`` in a with block be compiled, or not."""
    before = _simulators_compiled.set(compiled)
    try:
        yield
    finally:
        _simulators_compiled.reset(before)


def simulators_are_compiled() -> bool:
    """Return True in such a block."""
    return _simulators_compiled.get()


def warn_uncompiled(what: str, why: str, switch: str) -> None:
    """Warn that compilation was requested but is not possible."""
    warn_user(
        f"{what} cannot be compiled and runs eagerly, slower and with equal results: {why}. Turn {switch} off to "
        "silence this warning."
    )


def _refuse_changes(graph: torch.fx.Graph) -> None:
    """Raise NotPureError for in-place operations on tensors that the function did not create."""
    outer = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        for argument, value in zip(torch_private.schema_of(node.target).arguments, node.args, strict=False):
            shown = isinstance(value, torch.fx.Node) and value in outer
            if shown and argument.alias_info is not None:
                if argument.alias_info.is_write:
                    raise NotPureError(f"{node.target} changes a tensor in place that was not created in the same call")
                if node.target is not torch.ops.aten.lift_fresh_copy.default:
                    outer.add(node)  # a view of it


def _expect_same(key: str, result: Tensor, place: Tensor) -> None:
    """Raise unless a result can be written over an argument without a broadcast or a cast."""
    if result.shape != place.shape or result.dtype is not place.dtype:
        raise ShapeMismatchError(
            f"{key!r} is {result.dtype} {list(result.shape)}, and the argument that it is written over "
            f"{place.dtype} {list(place.shape)}, expected the same"
        )


def _write_over(graph: torch.fx.Graph, places: Sequence[int]) -> None:
    """Write the last outputs over these inputs instead of returning them."""
    inputs, answer = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")[0]
    outputs = list(answer.args[0])
    kept = len(outputs) - len(places)
    with graph.inserting_before(answer):
        for i, value in zip(places, outputs[kept:], strict=True):
            graph.call_function(_aten.copy_.default, (inputs[i], value)).meta = dict(inputs[i].meta)
    answer.args = (outputs[:kept],)


def _overlap(held: Sequence[Tensor], arguments: Sequence[Tensor]) -> bool:
    """Return True if a held tensor shares memory with an argument."""
    return bool({t.untyped_storage().data_ptr() for t in held} & {t.untyped_storage().data_ptr() for t in arguments})


def _lift_held(module: torch.fx.GraphModule, arguments: Sequence[Tensor] = ()) -> list[Tensor]:
    """Turn tensors found while tracing into further inputs: Inductor would inline small ones as constants.

    Those that are ``arguments``, the first inputs, are read from there.
    """
    graph = module.graph
    given = dict(zip(map(place_of, arguments), graph.find_nodes(op="placeholder"), strict=False))
    held: dict[str, Tensor] = {}
    places: dict[str, torch.fx.Node] = {}
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in graph.find_nodes(op="get_attr"):
        if first is None or all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
            continue
        name = str(node.target)
        if (own := given.get(place_of(getattr(module, name)))) is not None:
            places[name] = own
        elif name not in held:
            held[name] = getattr(module, name).detach()
            with graph.inserting_before(first):
                places[name] = graph.placeholder(f"held_{len(held)}")
            places[name].meta = dict(node.meta)
        node.replace_all_uses_with(places[name])
        if node is not first:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return list(held.values())
