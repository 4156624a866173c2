"""The one walker of spaces, against tables written by hand; tests/envs/test_codec.py sends every space both ways."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstruct.errors import ShapeMismatchError
from rlstruct.spaces import leaves, nest, sample, zeros

CPU = torch.device("cpu")
NESTED = spaces.Dict(
    {
        "where": spaces.Box(-1, 1, (2, 3), np.float64),
        "inventory": spaces.Dict({"count": spaces.Discrete(5, start=2), "flags": spaces.MultiBinary((2, 2))}),
        "pair": spaces.Tuple((spaces.MultiDiscrete([3, 4]), spaces.Box(0, 255, (4,), np.uint8))),
    }
)


def test_keys_shapes_dtypes_and_bounds() -> None:
    table = {
        "frame/inventory/count": ((), torch.int64, 2, 6),
        "frame/inventory/flags": ((2, 2), torch.int8, 0, 1),
        "frame/pair/0": ((2,), torch.int64, 0, [2, 3]),
        "frame/pair/1": ((4,), torch.uint8, 0, 255),
        "frame/where": ((2, 3), torch.float64, -1, 1),
    }
    found = leaves(NESTED, "frame")
    assert sorted(found) == sorted(table)
    for key, (shape, dtype, low, high) in table.items():
        leaf = found[key]
        assert (leaf.key, leaf.shape, leaf.torch_dtype) == (key, shape, dtype)
        for bound, expected in zip(leaf.bounds(), (low, high), strict=True):
            np.testing.assert_array_equal(np.broadcast_to(bound, shape), np.broadcast_to(expected, shape))


def test_a_plain_space_is_one_leaf_under_the_name_itself() -> None:
    assert list(leaves(spaces.Discrete(3), "action")) == ["action"]


def test_an_element_comes_apart_and_together_again() -> None:
    element = NESTED.sample()
    flat = {key: leaf.get(element) for key, leaf in leaves(NESTED, "x").items()}
    assert flat["x/inventory/count"] == element["inventory"]["count"]
    again = nest(NESTED, flat, "x")
    assert again["pair"][1] is element["pair"][1]
    assert NESTED.contains(again)
    with pytest.raises(ShapeMismatchError, match=r"x/pair/0: .* gave a dict without the entry 'pair'"):
        leaves(NESTED, "x")["x/pair/0"].get({"where": 0})


def test_zeros_and_samples_have_the_dtypes_of_the_space() -> None:
    expected = {key: ((3, *leaf.shape), leaf.torch_dtype) for key, leaf in leaves(NESTED, "a").items()}
    for rows in (zeros(NESTED, "a", 3, CPU), sample(NESTED, "a", 3, CPU)):
        assert {key: (tuple(value.shape), value.dtype) for key, value in rows.items()} == expected
    NESTED.seed(3)
    first = sample(NESTED, "a", 3, CPU)
    NESTED.seed(3)
    assert all(value.equal(first[key]) for key, value in sample(NESTED, "a", 3, CPU).items())


@pytest.mark.parametrize(
    ("space", "key"),
    [
        (spaces.Text(5), "frame"),
        (spaces.Dict({"inventory": spaces.Dict({"name": spaces.Text(5)})}), "frame/inventory/name"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Graph(spaces.Discrete(2), None))), "frame/1"),
        (spaces.Dict({"s": spaces.Sequence(spaces.Discrete(2))}), "frame/s"),
        (spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))), "frame"),
        (spaces.Dict({"none": spaces.Dict({})}), "frame/none"),
        (spaces.Dict({"b": spaces.Box(0, 1, (2,), np.longdouble)}), "frame/b"),
        (None, "frame"),
    ],
)  # fmt: skip
def test_a_space_without_a_shape_names_its_key(space: spaces.Space[Any], key: str) -> None:
    with pytest.raises(TypeError, match=f"MyEnv: space '{key}' "):
        leaves(space, "frame", where="MyEnv")


def test_the_front_page_does_not_import_it() -> None:
    program = "import sys, rlstruct; rlstruct.VecEnv; sys.exit('rlstruct.spaces' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
