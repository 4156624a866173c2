"""One call for many operations: a pure function of tensors, compiled by TorchInductor. Part of rlstruct.sims.

The step of a simulator is a few dozen operations on small tensors, so what it costs is calls. `torch.compile` turns
them into one kernel, but looks at all its arguments again in each call (guards), which costs more than the kernel. Here
the shapes are known for life, so the function is traced once and Inductor's code is called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Pure = Callable[..., tuple[Tensors, ...]]

MAX_FUSED = 4096
"""So many stores may share a loop: eight steps of CartPole are some 150, beyond Inductor's own limit of 64."""


class Compiled:
    """A pure function of dicts of tensors that returns dicts of tensors, compiled in its first call.

    Args:
        fn: the function; no Python control flow on values, every later call with the same keys, shapes and dtypes.
    """

    def __init__(self, fn: Pure) -> None:
        """Remember ``fn``; nothing is compiled yet."""
        self._fn = fn
        self._run: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        self._in_keys: list[list[str]] = []
        self._strides: list[tuple[int, ...]] = []
        self._out: list[dict[str, int]] = []  # for each result: key to number of the output
        self._masks: list[int] = []

    def __call__(self, *dicts: Tensors) -> list[Tensors]:
        """Return what ``fn(*dicts)`` does."""
        if self._run is None:
            self._compile(dicts)
        inputs = [d[key] for d, keys in zip(dicts, self._in_keys, strict=True) for key in keys]
        for i, strides in enumerate(self._strides):
            if inputs[i].stride() != strides:  # the code reads its inputs with the strides of the first call
                inputs[i] = torch.empty_strided(
                    inputs[i].shape, strides, dtype=inputs[i].dtype, device=inputs[i].device
                ).copy_(inputs[i])
        outputs = list(self._run(inputs))  # type: ignore[misc]  # _compile sets it
        for i in self._masks:
            outputs[i] = outputs[i].view(torch.bool)
        return [{key: outputs[i] for key, i in result.items()} for result in self._out]

    def _compile(self, dicts: tuple[Tensors, ...]) -> None:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        self._in_keys = [list(d) for d in dicts]

        def flat(*inputs: Tensor) -> list[Tensor]:
            rest = iter(inputs)
            results = self._fn(*({key: next(rest) for key in keys} for keys in self._in_keys))
            outputs = {id(tensor): tensor for result in results for tensor in result.values()}
            place = {identity: i for i, identity in enumerate(outputs)}
            self._out = [{key: place[id(tensor)] for key, tensor in result.items()} for result in results]
            on_cpu = inputs[0].device.type == "cpu"
            self._masks = [i for i, v in enumerate(outputs.values()) if on_cpu and v.dtype is torch.bool]
            return [as_bytes(v) if i in self._masks else v for i, v in enumerate(outputs.values())]

        # Copies: a tensor that is there twice, such as two zeros of a first state, would be traced as one input.
        inputs: list[Any] = [tensor.clone() for d in dicts for tensor in d.values()]
        self._strides = [tensor.stride() for tensor in inputs]
        with torch.no_grad():
            traced = make_fx(flat)(*inputs)
            pure = torch.func.functionalize(traced, remove="mutations")
            graph = make_fx(pure, decomposition_table=select_decomp_table())(*inputs)
            _take_apart(graph.graph)
            graph.recompile()
            answer = graph.graph.find_nodes(op="output")[0]
            answer.meta["user_visible_output_idxs"] = range(len(answer.args[0]))  # these keep their strides:
            answer.meta["original_output_strides"] = [tensor.stride() for tensor in traced(*inputs)]
            with torch._inductor.config.patch(max_fusion_size=MAX_FUSED):
                self._run = compile_fx_inner(graph, inputs)


def _take_apart(graph: torch.fx.Graph) -> None:
    """Read columns that were put together (`columns`) at their sources: else all are stored, and end the fused loop."""
    aten = torch.ops.aten
    for unbind in graph.find_nodes(op="call_function", target=aten.unbind.int):
        columns = unbind.args[0]
        if unbind.args[1:] == (1,) and columns.target is aten.permute.default and list(columns.args[1]) == [1, 0]:
            rows = columns.args[0]
            if rows.target is aten.view.default and rows.args[0].target is aten.cat.default:
                pieces = rows.args[0].args[0]
                for item in list(unbind.users) if len(pieces) == len(unbind.users) else []:
                    item.replace_all_uses_with(pieces[item.args[1]])
    graph.eliminate_dead_code()


def as_bytes(mask: Tensor) -> Tensor:
    """For AVX2, Inductor writes a bool ten times slower than a float, 12 us for 1,024, and this about as fast."""
    return mask.to(torch.float32).to(torch.uint8)
