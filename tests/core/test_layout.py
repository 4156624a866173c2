"""Layouts: allocation, equality, and the one check with its messages."""

from __future__ import annotations

import pickle

import pytest
import torch

from rlstruct import DictTensor
from rlstruct.core import Layout, TensorSpec, expect
from rlstruct.errors import BadKeyError, DeviceMismatchError, ShapeMismatchError

TENSORS = {"a": torch.zeros(4, 3), "b": torch.zeros(4, dtype=torch.int64)}


def test_layouts_describe_and_allocate() -> None:
    layout = Layout.of(TENSORS, drop=1)
    assert layout == {"a": TensorSpec((3,), torch.float32), "b": TensorSpec((), torch.int64)}
    assert layout == DictTensor(TENSORS).specs()
    assert layout.behind(5, 4)["b"].shape == (5, 4)
    made = layout.behind(4, prefix="x/").allocate(torch.device("cpu"))
    assert {key: (value.shape, value.dtype) for key, value in made.items()} == {
        "x/a": ((4, 3), torch.float32),
        "x/b": ((4,), torch.int64),
    }
    assert Layout.of(TENSORS).nbytes() == 4 * 3 * 4 + 4 * 8
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_equal_layouts_have_their_keys_in_order_and_one_hash() -> None:
    one, other = Layout.of(TENSORS), Layout.of(dict(reversed(TENSORS.items())))
    assert hash(one) == hash(Layout.of(TENSORS))
    assert one != other  # in shared memory they lie differently
    assert {one: 1}[Layout.of(DictTensor(TENSORS))] == 1
    expect("order does not matter here:", TENSORS, other)


@pytest.mark.parametrize(
    ("changes", "arguments", "error", "message"),
    [
        ({"a": None}, {}, BadKeyError, r"agent: action 'a' is missing, expected \[4, 3\] torch.float32. The keys are"),
        (
            {"a": None, "aa": torch.zeros(4)},
            {},
            BadKeyError,
            r"are \['b', 'aa'\]. Did you mean 'aa'\? Fix it.",
        ),
        ({"logits": torch.zeros(4)}, {}, BadKeyError, r"'logits' is \[4\] torch.float32, expected no such key"),
        (
            {"a": torch.zeros(4, 1)},
            {},
            ShapeMismatchError,
            r"'a' is \[4, 1\] torch.float32, expected \[4, 3\] torch.fl",
        ),
        (
            {"b": torch.zeros(4)},
            {},
            ShapeMismatchError,
            r"'b' is \[4\] torch.float32, expected \[4\] torch.int64. Fix it.",
        ),
        ({}, {"rows": 5}, ShapeMismatchError, r"'a' is \[4, 3\] torch.float32, expected \[5, 3\] torch.float32"),
        (
            {},
            {"rows": 5, "layout": None},
            ShapeMismatchError,
            r"'a' is \[4, 3\] torch.float32, expected \[5, ...\]. Fix",
        ),
        ({}, {"device": torch.device("meta")}, DeviceMismatchError, r"'a' is on cpu, expected meta. Fix it."),
        (
            {},
            {"device": torch.device("meta"), "fix": ""},
            DeviceMismatchError,
            "expected meta. Create it with device='m",
        ),
    ],
)
def test_a_mismatch_says_where_what_and_how_to_fix_it(changes, arguments, error, message) -> None:
    layout = Layout.of(TENSORS, drop=1 if "rows" in arguments else 0)
    tensors = {key: value for key, value in (TENSORS | changes).items() if value is not None}
    with pytest.raises(error, match=message):
        expect("agent: action", tensors, **{"layout": layout, "fix": "Fix it."} | arguments)


def test_the_nearest_key_is_suggested() -> None:
    with pytest.raises(BadKeyError, match="Did you mean 'memroy'"):
        expect("agent: state", {"memroy": torch.zeros(1)}, Layout.of({"memory": torch.zeros(1)}))
