"""Memory of compiled results is used again only when nobody can see it any more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlstruct.engine._results import MAX_KEPT, Results

B, K = 2048, 3


def examples() -> list[Tensor]:
    """A frame of four columns, two steps of bools, a whole matrix."""
    frame = torch.zeros(4, B, device="cpu").t()
    return [frame, torch.zeros(K, B, dtype=torch.bool, device="cpu").t(), torch.zeros(B, 5, device="cpu")]


def write(pieces: list[Tensor], value: int) -> None:
    for piece in pieces:
        piece.fill_(value)


def test_pieces_are_the_vectors_of_the_results_in_order() -> None:
    pieces, (frame, ends, whole) = Results(examples(), [4, K, 0]).next()
    assert [list(piece.shape) for piece in pieces] == [[B]] * 4 + [[B]] * K + [[B, 5]]
    assert [piece.dtype for piece in pieces] == [torch.float32] * 4 + [torch.uint8] * K + [torch.float32]
    for i, piece in enumerate(pieces):
        piece.fill_(i % 2 if piece.dtype is torch.uint8 else i)
    assert torch.equal(frame, torch.arange(4.0).expand(B, 4))
    assert torch.equal(ends, torch.tensor([False, True, False]).expand(B, K))
    assert torch.equal(whole, torch.full((B, 5), 7.0))


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(lambda frame: frame, id="a result"),
        pytest.param(lambda frame: frame[3:5, 1], id="a view of one"),
        pytest.param(lambda frame: frame.numpy(), id="an array"),
        pytest.param(lambda frame: (frame * torch.ones(4, requires_grad=True)).sum(), id="a graph"),
    ],
)
def test_what_is_kept_is_never_written_again(keep: object) -> None:
    results = Results(examples(), [4, K, 0])
    pieces, outputs = results.next()
    write(pieces, 1)
    first = pieces[0].data_ptr()
    kept = keep(outputs[0])  # type: ignore[operator]
    del outputs
    assert all(results.next()[0][0].data_ptr() != first for _ in range(3))
    del kept
    assert first in {results.next()[0][0].data_ptr() for _ in range(2)}


def test_memory_is_used_again_and_bounded() -> None:
    results = Results(examples(), [4, K, 0])
    assert len({results.next()[0][0].data_ptr() for _ in range(10)}) == 1
    kept = [results.next() for _ in range(3 * MAX_KEPT)]
    for i, (pieces, _) in enumerate(kept):
        write(pieces, i % 2)
    assert all(bool((frame == i % 2).all()) for i, (_, (frame, *_)) in enumerate(kept))
    assert len(results._blocks) == MAX_KEPT
