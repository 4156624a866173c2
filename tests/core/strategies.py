"""Random structures for property tests: keys, dtypes, trailing shapes, ragged lengths, empty batches."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
]
KEYS = st.text(alphabet="ab/_é", max_size=5)
Columns = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def columns(max_size: int = 4) -> st.SearchStrategy[Columns]:
    """Key to dtype and trailing shape."""
    tail = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    return st.dictionaries(KEYS, st.tuples(st.sampled_from(DTYPES), tail), max_size=max_size)


def fill(dtype: torch.dtype, shape: tuple[int, ...], start: int = 0) -> Tensor:
    """Distinct values where the dtype has them; int64 beyond what a float32 holds."""
    n = int(torch.Size(shape).numel())
    values = torch.arange(start, start + n).reshape(shape)
    if dtype is torch.bool:
        return values % 3 == 0
    if dtype is torch.int64:
        return values + 2**53
    return (values % 200).to(dtype)


def tensors(spec: Columns, lead: tuple[int, ...], start: int = 0) -> dict[str, Tensor]:
    """One tensor [*lead, *tail] for each column."""
    return {key: fill(dtype, (*lead, *tail), start + i) for i, (key, (dtype, tail)) in enumerate(spec.items())}


@st.composite
def plain(draw: st.DrawFn, max_rows: int = 5) -> dict[str, Tensor]:
    """A plain dict of tensors [B, ...], B from 0, maybe no key at all."""
    return tensors(draw(columns()), (draw(st.integers(0, max_rows)),))


@st.composite
def ragged(draw: st.DrawFn) -> tuple[dict[str, Tensor], Tensor]:
    """A plain dict of tensors [B, T, ...] and lengths [B] from 0 to T; at least one key."""
    spec = draw(columns().filter(bool))
    n_rows, n_steps = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, n_steps), min_size=n_rows, max_size=n_rows))
    return tensors(spec, (n_rows, n_steps)), torch.tensor(lengths, dtype=torch.int64)


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same keys in the same order, same dtypes, shapes and values."""
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert got[key].dtype is value.dtype, key
        assert got[key].shape == value.shape, key
        assert torch.equal(got[key], value), key
