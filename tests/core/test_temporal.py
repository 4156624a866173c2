"""TemporalDictTensor against plain dicts of tensors with lengths, and each of its errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import columns, ragged, same, tensors
from torch import Tensor

from rlstruct import DeviceMismatchError, ShapeMismatchError
from rlstruct.core import DictTensor, TemporalDictTensor, TensorSpec

Ragged = tuple[dict[str, Tensor], Tensor]


def shape(expected: dict[str, Tensor]) -> tuple[int, int]:
    first = next(iter(expected.values()))
    return first.shape[0], first.shape[1]


@given(ragged())
def test_reads_like_its_parts(given_: Ragged) -> None:
    expected, lengths = given_
    made = TemporalDictTensor(expected, lengths)
    n_rows, n_steps = shape(expected)
    same(dict(made), expected)
    assert made.lengths is lengths
    assert (made.n_elems(), made.n_steps()) == (n_rows, n_steps)
    assert made.mask().tolist() == [[t < n for t in range(n_steps)] for n in lengths.tolist()]
    assert made.full() is all(n == n_steps for n in lengths.tolist())
    assert made.specs() == {k: TensorSpec(tuple(v.shape[2:]), v.dtype) for k, v in expected.items()}
    assert TemporalDictTensor(expected).lengths.tolist() == [n_steps] * n_rows


@given(ragged(), st.lists(st.integers(0, 3), max_size=5))
def test_rows_are_chosen_with_their_lengths(given_: Ragged, rows: list[int]) -> None:
    expected, lengths = given_
    made = TemporalDictTensor(expected, lengths)
    rows = [row for row in rows if row < made.n_elems()]
    index = torch.tensor(rows, dtype=torch.int64)
    for got in (made.index(index), made.index(rows)):
        same(dict(got), {k: v[index] for k, v in expected.items()})
        assert got.lengths.tolist() == lengths[index].tolist()
    cut = made.slice(1, 3)
    same(dict(cut), {k: v[1:3] for k, v in expected.items()})
    assert cut.lengths.tolist() == lengths[1:3].tolist()
    for i, row in enumerate(made.unfold()):
        same(dict(row), {k: v[i : i + 1] for k, v in expected.items()})
        assert row.lengths.tolist() == [int(lengths[i])]
        same(dict(made.slice(i)), dict(row))
    assert len(made.unfold()) == made.n_elems()


@given(ragged(), st.integers(-5, 5), st.integers(-5, 5))
def test_temporal_slice_is_python_slicing_of_time(given_: Ragged, start: int, stop: int) -> None:
    expected, lengths = given_
    made = TemporalDictTensor(expected, lengths)
    got = made.temporal_slice(start, stop)
    same(dict(got), {k: v[:, start:stop] for k, v in expected.items()})
    assert got.mask().tolist() == made.mask()[:, start:stop].tolist()


@given(ragged())
def test_single_steps(given_: Ragged) -> None:
    expected, lengths = given_
    made = TemporalDictTensor(expected, lengths)
    n_rows, n_steps = shape(expected)
    for t in range(-n_steps, n_steps):
        same(dict(made.temporal_index(t)), {k: v[:, t] for k, v in expected.items()})
    for t in range(n_steps):
        step, rows = made.masked_temporal_index(t)
        assert rows.tolist() == [b for b in range(n_rows) if lengths[b] > t]
        same(dict(step), {k: v[rows, t] for k, v in expected.items()})
    with pytest.raises(IndexError, match=r"masked_temporal_index: got step -1, expected 0 to .*lengths - 1"):
        made.masked_temporal_index(-1)
    if n_steps:
        each = torch.arange(n_rows) % n_steps
        chosen = made.temporal_multi_index(each)
        same(dict(chosen), {k: v[torch.arange(n_rows), each] for k, v in expected.items()})


@given(ragged())
def test_shorten_cuts_padding_only(given_: Ragged) -> None:
    expected, lengths = given_
    short = TemporalDictTensor(expected, lengths).shorten()
    longest = max(lengths.tolist(), default=0)
    assert short.n_steps() == longest
    same(dict(short), {k: v[:, :longest] for k, v in expected.items()})


@given(columns().filter(bool), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3))
def test_cat_pads_with_zeros(spec: dict, sizes: list[tuple[int, int]]) -> None:
    parts = [tensors(spec, size, start=1 + 9 * i) for i, size in enumerate(sizes)]
    made = TemporalDictTensor.cat([TemporalDictTensor(part) for part in parts])
    n_steps = max(size[1] for size in sizes)
    assert made.lengths.tolist() == [steps for rows, steps in sizes for _ in range(rows)]
    row = 0
    for part, (n_rows, steps) in zip(parts, sizes, strict=True):
        for key, value in part.items():
            joined = made[key][row : row + n_rows]
            assert joined.dtype is value.dtype
            assert joined.shape[1] == n_steps
            assert torch.equal(joined[:, :steps], value)
            assert not joined[:, steps:].any()
        row += n_rows


@given(ragged())
def test_copies_have_the_same_values(given_: Ragged) -> None:
    expected, lengths = given_
    made = TemporalDictTensor(expected, lengths)
    for copied in (
        made.clone(),
        made.detach(),
        made.to("cpu"),
        made.map(lambda v: v),
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        made.prepend_key("x").truncate_key("x"),
        made.get(list(expected)),
        made + TemporalDictTensor(),
        TemporalDictTensor() + made,
    ):
        same(dict(copied), expected)
        assert torch.equal(copied.lengths, lengths)
        copied.set("new key", torch.zeros(shape(expected)))
        assert "new key" not in made
    assert made.clone().lengths is not lengths
    both = made + made.prepend_key("zz")
    assert len(list(both)) == 2 * len(expected)
    assert both.lengths is lengths


def test_without_keys() -> None:
    nothing = TemporalDictTensor()
    assert (nothing.n_elems(), nothing.n_steps(), nothing.device) == (0, 0, None)
    assert nothing.mask().shape == (0, 0)
    assert nothing.full()
    assert nothing.shorten().empty()
    assert nothing.unfold() == []
    assert TemporalDictTensor.cat([]).empty()
    nothing.set("a", torch.zeros(2, 3))
    assert nothing.lengths.tolist() == [3, 3]


def test_rows_without_keys_keep_their_lengths() -> None:
    made = TemporalDictTensor({"a": torch.zeros(3, 4)}, torch.tensor([4, 2, 0])).truncate_key("none of them")
    assert made.empty()
    assert (made.n_elems(), made.n_steps()) == (3, 0)
    assert made.index([2, 1]).lengths.tolist() == [0, 2]
    assert made.slice(1).lengths.tolist() == [2]
    assert made.mask().shape == (3, 0)
    assert made.temporal_index(9).empty()
    with pytest.raises(ShapeMismatchError, match=r"'lengths' is \[3\] .*expected \[2\]"):
        made.set("b", torch.zeros(2, 4))
    made.set("b", torch.zeros(3, 4))
    assert made.lengths.tolist() == [4, 2, 0]


def test_set_checks_time_too() -> None:
    made = TemporalDictTensor({"a": torch.zeros(2, 3)})
    with pytest.raises(ShapeMismatchError, match=r"'b' is \[2, 4\] .*expected \[2, 3, ...\]. All .* those of 'a'"):
        made.set("b", torch.zeros(2, 4))
    with pytest.raises(DeviceMismatchError, match="'b' is on meta, expected cpu"):
        made.set("b", torch.zeros(2, 3, device="meta"))
    assert list(made) == ["a"]


@pytest.mark.parametrize(
    ("tensors", "lengths", "error", "message"),
    [
        (
            {"a": torch.zeros(2)},
            None,
            ShapeMismatchError,
            r"'a' is \[2\] .*expected at least 2 leading axes \[B, T",
        ),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2)}, None, ShapeMismatchError, "'b' is "),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, None, ShapeMismatchError, r"expected \[2, 3, ...\]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(1, 3)}, None, ShapeMismatchError, r"expected \[2, 3, ...\]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, device="meta")}, None, DeviceMismatchError, "'b' is on meta"),
        ({"a": torch.zeros(2, 3)}, [3, 3], TypeError, "lengths is a list"),
        ({"a": torch.zeros(2, 3)}, torch.tensor([3.0, 3.0]), ShapeMismatchError, "torch.float32"),
        (
            {"a": torch.zeros(2, 3)},
            torch.tensor([[3, 3]]),
            ShapeMismatchError,
            r"\[1, 2\] .*expected \[2\] torch",
        ),
        ({"a": torch.zeros(2, 3)}, torch.tensor([3]), ShapeMismatchError, r"'lengths' is \[1\] .*expected \[2\]"),
        (
            {"a": torch.zeros(2, 3, device="meta")},
            torch.tensor([3, 3]),
            DeviceMismatchError,
            "'lengths' is on cpu, expected meta",
        ),
    ],
)
def test_wrong_parts_are_named_at_birth(tensors: dict, lengths: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TemporalDictTensor(tensors, lengths)  # type: ignore[arg-type]


def test_wrong_steps_are_named() -> None:
    made = TemporalDictTensor({"a": torch.zeros(2, 3)})
    with pytest.raises(IndexError, match="got step 3, expected -3 to 2"):
        made.temporal_index(3)
    with pytest.raises(ShapeMismatchError, match=r"'t' is \[3\] torch.int64, expected \[2\] torch.int64"):
        made.temporal_multi_index(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeMismatchError, match=r"'t' is .2. torch.float32"):
        made.temporal_multi_index(torch.zeros(2))
    with pytest.raises(DeviceMismatchError, match="'t' is on meta"):
        made.temporal_multi_index(torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(ShapeMismatchError, match=r"TemporalDictTensor.cat: part 1: tensor 'a' is .* torch.int64"):
        TemporalDictTensor.cat([made, TemporalDictTensor({"a": torch.zeros(2, 5, dtype=torch.int64)})])
    with pytest.raises(ShapeMismatchError, match=r"part 1: tensor 'a' is \[2, 5, 1\] .*expected \[2, 5\]"):
        TemporalDictTensor.cat([made, TemporalDictTensor({"a": torch.zeros(2, 5, 1)})])


def test_lengths_follow_the_device(device: torch.device) -> None:
    made = TemporalDictTensor({"a": torch.zeros(2, 3, device=device)})
    assert made.lengths.device == made.mask().device == device
    assert TemporalDictTensor.cat([made, made.temporal_slice(0, 1)]).lengths.device == device
    assert made.to("cpu").lengths.device.type == "cpu"
    assert made.to("meta").lengths.device.type == "meta"


def test_repr_shows_no_value() -> None:
    assert repr(DictTensor.stack([DictTensor({"a": torch.zeros(2)})] * 3)) == (
        "TemporalDictTensor on cpu:\n  a  float32 [2, 3]"
    )


def test_rows_without_keys_keep_their_lengths_when_keys_are_added() -> None:
    steps = TemporalDictTensor({"reward": torch.zeros(2, 3)}, torch.tensor([3, 1]))
    added = steps.get([]) + TemporalDictTensor({"value": torch.ones(2, 3)})
    assert added.lengths.tolist() == [3, 1]
    with pytest.raises(ValueError, match="lengths"):
        steps.get([]) + TemporalDictTensor({"value": torch.ones(4, 3)})
