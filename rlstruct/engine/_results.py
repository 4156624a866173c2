"""Memory for the results of compiled code on the CPU, made once and used again.

A kernel of 10 us is called by some 30 us of Python if every result is allocated and every column of it addressed in
each call, and writes to memory that is in no cache. So all results of a call are one block, whose parts are found once,
and a block is used again as soon as nobody else holds any tensor of it: torch counts the holders of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_KEPT = 16
"""Blocks that wait to be used again: a caller that holds the results of more calls gets new ones each time."""

_LINE, _PAGE = 64, 4096  # bytes; places in the cache repeat every page
_Piece = tuple[int, tuple[int, ...], tuple[int, ...]]
_VIEWS = {torch.ops.aten.view.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int}


class Results:
    """Brings memory for the results of one call after the other.

    Args:
        outputs: examples of all results.
        vectors: how many vectors of one length each result was put together from, 0 for none; see `pieces_of`.
    """

    def __init__(self, outputs: Sequence[Tensor], vectors: Sequence[int]) -> None:
        """Make no block yet."""
        self._places: list[_Place] = []
        for output, n in zip(outputs, vectors, strict=True):
            begin = self._places[-1].end if self._places else 0
            self._places.append(_Place.of(output, n, begin))
        self._blocks: list[_Block] = []

    def next(self) -> tuple[list[Tensor], list[Tensor]]:
        """Find memory that nobody holds.

        Returns:
            The pieces to write, and the results that show them: new tensors, whose memory is not used again as long as
            one of them or of their views lives.
        """
        for block in self._blocks:
            if block.is_free():
                break
        else:
            block = _Block(self._places)
            self._blocks = [*self._blocks[1 - MAX_KEPT :], block]
        return block.pieces, [output.data for output in block.outputs]  # `detach`, in three fifths of its time


@dataclass(frozen=True)
class _Place:
    """Where a result is in its block.

    Attributes:
        shape: of the result.
        strides: of the result, in elements.
        dtype: of the result.
        begin: its first byte.
        end: where the next one may begin.
        pieces: first byte, shape and strides of what is written.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int
    pieces: list[_Piece]

    @staticmethod
    def of(output: Tensor, n_vectors: int, begin: int) -> _Place:
        shape, strides, size = tuple(output.shape), torch.empty_like(output).stride(), output.dtype.itemsize
        if not n_vectors:
            end = _spaced(begin, output.numel() * size)
            return _Place(shape, strides, output.dtype, begin, end, [(begin, shape, strides)])
        length = output.numel() // n_vectors
        within = all(n == 1 or s >= length or n * s <= length for n, s in zip(shape, strides, strict=True))
        step = _spaced(0, length * size) // size if within else length  # from vector to vector, in elements
        apart = tuple(s // length * step + s % length for s in strides)
        vectors: list[_Piece] = [(begin + i * step * size, (length,), (1,)) for i in range(n_vectors)]
        return _Place(shape, apart, output.dtype, begin, _spaced(begin, n_vectors * step * size), vectors)


class _Block:
    """The memory of the results of one call, and what addresses it.

    Attributes:
        pieces: what the code writes.
        outputs: what shows it.
    """

    def __init__(self, places: Sequence[_Place]) -> None:
        memory = torch.empty(places[-1].end, dtype=torch.uint8, device="cpu")
        of = {dtype: memory.view(dtype) for dtype in {place.dtype for place in places}}
        self.pieces: list[Tensor] = []
        self.outputs: list[Tensor] = []
        for place in places:
            size = place.dtype.itemsize
            self.outputs.append(of[place.dtype].as_strided(place.shape, place.strides, place.begin // size))
            written = memory if place.dtype is torch.bool else of[place.dtype]
            self.pieces += [written.as_strided(shape, strides, at // size) for at, shape, strides in place.pieces]
        self._memory = memory.untyped_storage()
        del memory, of, written
        self._held = self._holders()

    def is_free(self) -> bool:
        """Whether nobody else holds a tensor of this memory."""
        return self._holders() == self._held

    def _holders(self) -> int:
        n: int = torch._C._storage_Use_Count(self._memory._cdata)
        return n


def _spaced(begin: int, n_bytes: int) -> int:
    """Where the next piece may begin: not a multiple of a page behind, where it would be kept by the same cache lines.

    Eight steps of 1,024 CartPoles write 116 vectors side by side; a page apart each, that takes a third longer.
    """
    end = begin + -(-n_bytes // _LINE) * _LINE
    return end + _LINE if n_bytes >= _PAGE // 2 else end


def pieces_of(graph: torch.fx.Graph, outputs: Sequence[Tensor]) -> list[int]:
    """Let a graph write its outputs, instead of returning them, into further inputs: the pieces of each output.

    An output that was put together of vectors (`torch.cat`, `columns`, `stack_steps`) is written vector by vector,
    straight from the loop that computes them; any other one as a whole. Bools are written as bytes: for AVX2, Inductor
    writes a bool ten times slower than a float, 12 us for 1,024, and a float that becomes a byte about as fast.

    Args:
        graph: is changed.
        outputs: examples of what it returns.

    Returns:
        For each output the number of its vectors; 0 for one that is written as a whole.
    """
    answer = graph.find_nodes(op="output")[0]
    last = graph.find_nodes(op="placeholder")[-1]
    aten, n_vectors = torch.ops.aten, []
    for value, example in zip(answer.args[0], outputs, strict=True):
        vectors = _vectors(value)
        n_vectors.append(len(vectors))
        for number, vector in enumerate(vectors or [value]):
            with graph.inserting_after(last):
                last = graph.placeholder(f"piece_{len(n_vectors)}_{number}")
            with graph.inserting_before(answer):
                if example.dtype is torch.bool:
                    as_float = graph.call_function(
                        torch.ops.prims.convert_element_type.default, (vector, torch.float32)
                    )
                    vector = graph.call_function(torch.ops.prims.convert_element_type.default, (as_float, torch.uint8))
                graph.call_function(aten.copy_.default, (last, vector))
    answer.args = ((),)
    answer.meta = {}
    graph.eliminate_dead_code()
    return n_vectors


def _vectors(value: torch.fx.Node) -> list[torch.fx.Node]:
    """The vectors that a value shows one after the other, as its memory does; none if it is not made so."""
    while value.target in _VIEWS:
        value = value.all_input_nodes[0]
    if value.target is not torch.ops.aten.cat.default or value.args[1:] not in ((), (0,)):
        return []
    vectors: list[Any] = list(value.args[0])  # type: ignore[arg-type]
    shapes = {tuple(vector.meta["val"].shape) for vector in vectors}
    return vectors if len(shapes) == 1 and len(shapes.pop()) == 1 else []
