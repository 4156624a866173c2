"""DictTensor against plain dicts of tensors, and each of its errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import columns, plain, same, tensors
from torch import Tensor

from rlstruct import DeviceMismatchError, ShapeMismatchError
from rlstruct.core import DictTensor, TensorSpec

ROWS = st.lists(st.integers(0, 4), max_size=6)


@given(plain())
def test_reads_like_the_dict_it_was_made_of(expected: dict[str, Tensor]) -> None:
    made = DictTensor(expected)
    same(dict(made.items()), expected)
    assert list(made.keys()) == list(made) == list(expected)
    assert [id(v) for v in made.values()] == [id(v) for v in expected.values()]
    assert made.empty() == (not expected)
    assert made.n_elems() == (next(iter(expected.values())).shape[0] if expected else 0)
    assert made.device == (torch.device("cpu") if expected else None)
    assert made.specs() == {k: TensorSpec(tuple(v.shape[1:]), v.dtype) for k, v in expected.items()}
    assert all(key in made for key in expected)
    assert "no such key" not in made


@given(plain(), ROWS)
def test_index_gathers_rows(expected: dict[str, Tensor], rows: list[int]) -> None:
    made = DictTensor(expected)
    rows = [row for row in rows if row < made.n_elems()]
    index = torch.tensor(rows, dtype=torch.int64)
    same(dict(made.index(index)), {k: v[index] for k, v in expected.items()})
    same(dict(made.index(rows)), {k: v[index] for k, v in expected.items()})


@given(plain(), st.integers(-6, 6), st.integers(-6, 6))
def test_slice_is_python_slicing_that_keeps_the_batch_axis(expected: dict[str, Tensor], start: int, stop: int) -> None:
    made = DictTensor(expected)
    same(dict(made.slice(start, stop)), {k: v[start:stop] for k, v in expected.items()})
    if expected and -made.n_elems() <= start < made.n_elems():
        same(dict(made.slice(start)), {k: v[start].unsqueeze(0) for k, v in expected.items()})


@given(plain())
def test_unfold_and_cat_are_inverse(expected: dict[str, Tensor]) -> None:
    rows = DictTensor(expected).unfold()
    assert len(rows) == DictTensor(expected).n_elems()
    for i, row in enumerate(rows):
        same(dict(row), {k: v[i : i + 1] for k, v in expected.items()})
    if rows:
        same(dict(DictTensor.cat(rows)), expected)


@given(columns(), st.lists(st.integers(0, 3), max_size=4))
def test_cat_joins_rows(spec: dict, sizes: list[int]) -> None:
    parts = [tensors(spec, (n,), start=7 * i) for i, n in enumerate(sizes)]
    expected = {k: torch.cat([part[k] for part in parts]) for k in spec} if parts else {}
    reordered = [DictTensor(dict(reversed(part.items())) if i else part) for i, part in enumerate(parts)]
    same(dict(DictTensor.cat([DictTensor(part) for part in parts])), expected)
    same(dict(DictTensor.cat(reordered)), expected)


@given(columns(), st.integers(0, 3), st.integers(1, 4))
def test_stack_puts_time_second(spec: dict, n_rows: int, n_steps: int) -> None:
    parts = [tensors(spec, (n_rows,), start=5 * t) for t in range(n_steps)]
    made = DictTensor.stack([DictTensor(part) for part in parts])
    same(dict(made), {k: torch.stack([part[k] for part in parts], dim=1) for k in spec})
    assert made.lengths.tolist() == ([n_steps] * n_rows if spec else [])


@given(plain(), st.text(alphabet="ab/", max_size=2))
def test_keys_are_prefixed_cut_and_selected(expected: dict[str, Tensor], prefix: str) -> None:
    made = DictTensor(expected)
    same(dict(made.prepend_key(prefix)), {prefix + k: v for k, v in expected.items()})
    same(dict(made.prepend_key(prefix).truncate_key(prefix)), expected)
    cut = {k.removeprefix(prefix): v for k, v in expected.items() if k.startswith(prefix)}
    same(dict(made.truncate_key(prefix)), cut)
    chosen = list(reversed(expected))[:2]
    same(dict(made.get(chosen)), {k: expected[k] for k in chosen})
    same(dict(made.get(iter(chosen))), {k: expected[k] for k in chosen})


@given(plain())
def test_add_is_the_union_and_the_empty_structure_adds_to_anything(expected: dict[str, Tensor]) -> None:
    made = DictTensor(expected)
    other = made.prepend_key("z")
    same(dict(made.prepend_key("y") + other), {y + k: v for y in "yz" for k, v in expected.items()})
    same(dict(made + DictTensor()), expected)
    same(dict(DictTensor() + made), expected)


@given(plain())
def test_copies_have_the_same_values(expected: dict[str, Tensor]) -> None:
    made = DictTensor(expected)
    for copied in (
        made.clone(),
        made.detach(),
        made.to("cpu"),
        made.to(torch.device("cpu")),
        made.map(lambda v: v),
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        DictTensor(made),
    ):
        same(dict(copied), expected)
        assert copied is not made
        copied.set("new key", torch.zeros(made.n_elems()))
        assert "new key" not in made


def test_the_callers_dict_is_not_aliased() -> None:
    mine = {"a": torch.zeros(2)}
    made = DictTensor(mine)
    made.set("b", torch.zeros(2))
    assert list(mine) == ["a"]
    mine["c"] = torch.zeros(5)
    assert list(made) == ["a", "b"]
    assert made["a"] is mine["a"]  # the tensors are shared, the dict is not


def test_set_works_on_the_empty_structure_and_replaces() -> None:
    made = DictTensor({})
    made.set("a", torch.zeros(3))
    made.set("a", torch.ones(2))  # the only key: B may change
    made.set("b", torch.ones(2, 4))
    assert made.n_elems() == 2
    with pytest.raises(ShapeMismatchError, match=r"'a' is \[3\] .*expected \[2, ...\]. All .* those of 'b'"):
        made.set("a", torch.zeros(3))
    with pytest.raises(TypeError, match="key 'c' holds a float"):
        made.set("c", 1.0)  # type: ignore[arg-type]
    with pytest.raises(DeviceMismatchError, match="'c' is on meta"):
        made.set("c", torch.zeros(2, device="meta"))
    assert list(made) == ["a", "b"]


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (
            {"a": torch.zeros(2), "b": torch.zeros(3, 1)},
            ShapeMismatchError,
            r"'b' is \[3, 1\] .*expected \[2, ...\].*'a'",
        ),
        ({"a": torch.tensor(1.0)}, ShapeMismatchError, r"'a' is \[\] .*expected at least 1 leading axis"),
        ({"loss": torch.tensor(1.0)}, ShapeMismatchError, r"such as losses, go into a plain dict: {'loss': value}"),
        ({"a": torch.zeros(0), "b": torch.tensor(1.0)}, ShapeMismatchError, r"'b' is \[\] "),
        ({"a": [1.0]}, TypeError, "key 'a' holds a list"),
        ({"a": torch.zeros(1), "b": None}, TypeError, "key 'b' holds a NoneType"),
        ({3: torch.zeros(1)}, TypeError, "key 3 is an int"),
        ([torch.zeros(1)], TypeError, "got a list, expected a mapping"),
        (
            {"b": torch.zeros(1), "a": torch.zeros(1, device="meta")},
            DeviceMismatchError,
            r"DictTensor: tensor 'a' is on meta, expected cpu. 'b' is on cpu; move the misplaced one "
            r"with .to\('meta'\) or .to\('cpu'\), or create it with device=\.\.\.",
        ),
        (
            {"b": torch.zeros(1, device="meta"), "a": torch.zeros(1)},
            DeviceMismatchError,
            "'a' is on cpu, expected meta",
        ),
    ],
)
def test_wrong_tensors_are_named_at_birth(tensors: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DictTensor(tensors)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (torch.nn.Linear(2, 2), r"got a Linear, .*model.state_dict\(\)"),
        (torch.zeros(2), r"got a Tensor, .*Name it: \{'frame': tensor\}"),
        ({"model": torch.nn.Linear(2, 2)}, r"key 'model' holds a Linear, .*create_agent\(model\)"),
        ({"epsilon": 0.5}, r"key 'epsilon' holds a float, .*torch.full\(\(B,\), 0.5\)"),
    ],
)
def test_what_is_no_mapping_of_tensors_says_the_mend(given_: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DictTensor(given_)  # type: ignore[arg-type]


def test_minibatches_hold_every_row_once() -> None:
    made = DictTensor({"row": torch.arange(10), "twice": 2 * torch.arange(10)})
    parts = list(made.minibatches(3, torch.Generator().manual_seed(0)))
    assert [part.n_elems() for part in parts] == [4, 3, 3]
    whole = DictTensor.cat(parts)
    assert sorted(whole["row"].tolist()) == list(range(10))
    assert whole["row"].tolist() != list(range(10))
    assert whole["twice"].equal(2 * whole["row"])
    again = list(made.minibatches(3, torch.Generator().manual_seed(0)))
    assert all(one["row"].equal(other["row"]) for one, other in zip(parts, again, strict=True))
    for n in (0, 11):
        with pytest.raises(ValueError, match=f"got n = {n}, expected 1 to 10"):
            made.minibatches(n)


def steps(B: int) -> DictTensor:
    keys = ("observation/frame", "observation/reward", "observation/done", "action/action")
    keys += ("_observation/frame", "_observation/reward", "_observation/done")
    return DictTensor({key: torch.zeros(B) for key in keys})


def test_a_missing_key_suggests_the_nearest() -> None:
    made = DictTensor({"observation/frame": torch.zeros(1), "reward": torch.zeros(1)})
    with pytest.raises(KeyError, match=r"no key 'rewad' among .*Did you mean 'reward'"):
        made["rewad"]
    with pytest.raises(KeyError, match="Did you mean 'observation/frame'"):
        made.get(["reward", "observation/frames"])
    for key, meant in (
        ("reward", "_observation/reward"),  # what the step brought
        ("frame", "observation/frame"),
        ("obs/frame", "observation/frame"),
        ("observations/reward", "observation/reward"),
        ("observation/rewrad", "observation/reward"),
        ("action", "action/action"),
    ):
        with pytest.raises(KeyError, match=f"no key '{key}' among .*Did you mean '{meant}'"):
            steps(1)[key]
    for key in ("observation/obs", "x", "action/x"):  # no key is near enough
        with pytest.raises(KeyError, match=rf"no key '{key}' among .*\]\."):
            steps(1)[key]
    with pytest.raises(KeyError, match=r"no key 'x', it is empty"):
        DictTensor()["x"]
    with pytest.raises(TypeError, match=r"get\(\['reward'\]\)"):
        made.get("reward")


def test_add_names_the_conflict() -> None:
    a = DictTensor({"a": torch.zeros(2)})
    with pytest.raises(KeyError, match="key 'a' is in both"):
        a + a
    with pytest.raises(ShapeMismatchError, match=r"'b' is \[3\] .*expected \[2, ...\]"):
        a + DictTensor({"b": torch.zeros(3)})
    with pytest.raises(DeviceMismatchError, match="'b' is on meta, expected cpu"):
        a + DictTensor({"b": torch.zeros(2, device="meta")})
    with pytest.raises(TypeError):
        a + {"b": torch.zeros(2)}  # type: ignore[operator]
    with pytest.raises(TypeError):
        a + DictTensor.stack([a])  # type: ignore[operator]


@pytest.mark.parametrize("join", [DictTensor.cat, DictTensor.stack])
@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        (
            {"a": torch.zeros(2, 3, dtype=torch.int64)},
            ShapeMismatchError,
            r"part 1: tensor 'a' is \[2, 3\] torch.int64, expected \[2, 3\] torch.float32",
        ),
        ({"a": torch.zeros(2, 4)}, ShapeMismatchError, r"part 1: tensor 'a' is \[2, 4\] .*expected \[2, 3\]"),
        ({"a": torch.zeros(2)}, ShapeMismatchError, r"part 1: tensor 'a' is \[2\]"),
        ({"a": torch.zeros(0)}, ShapeMismatchError, r"part 1: tensor 'a' is \[0\]"),
        ({"b": torch.zeros(2, 3)}, KeyError, r"part 1: tensor 'a' is missing.*The keys are \['b'\]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2)}, KeyError, "part 1: tensor 'b' is .*expected no such key"),
        ({}, KeyError, "part 1: tensor 'a' is missing"),
        ({"a": torch.zeros(2, 3, device="meta")}, DeviceMismatchError, "part 1: tensor 'a' is on meta, expected cpu"),
    ],
)
def test_joining_names_key_and_part(join, second: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        join([DictTensor({"a": torch.zeros(2, 3)}), DictTensor(second)])


def test_cat_of_a_batch_of_none_still_checks() -> None:
    # torch.cat drops a tensor of shape [0] whatever the others look like.
    with pytest.raises(ShapeMismatchError, match=r"part 1: tensor 'a' is \[2, 3\] .*expected \[2\]"):
        DictTensor.cat([DictTensor({"a": torch.zeros(0)}), DictTensor({"a": torch.zeros(2, 3)})])
    assert DictTensor.cat([]).empty()
    assert DictTensor.stack([]).empty()


def test_stack_checks_the_lengths() -> None:
    parts = [DictTensor({"a": torch.zeros(2)})] * 3
    assert DictTensor.stack(parts, lengths=torch.tensor([3, 1])).lengths.tolist() == [3, 1]
    with pytest.raises(ShapeMismatchError, match=r"'lengths' is \[3\] .*expected \[2\]"):
        DictTensor.stack(parts, lengths=torch.tensor([3, 1, 1]))


def test_index_wants_row_numbers() -> None:
    made = DictTensor({"a": torch.arange(3)})
    with pytest.raises(ShapeMismatchError, match=r"torch.bool \[3\], expected torch.int64 \[K\]"):
        made.index(torch.ones(3, dtype=torch.bool))
    wrong: Any
    for wrong in ([True, False, True], np.array([True, False, True])):
        with pytest.raises(ShapeMismatchError, match=r"torch.bool \[3\], expected torch.int64 \[K\]"):
            made.index(wrong)
    for wrong in ([0.7, 1.9], np.array([2.0])):
        with pytest.raises(ShapeMismatchError, match=r"torch.float\d+ \[\d\], expected torch.int64 \[K\]"):
            made.index(wrong)
    right: Any
    for right in ([2, 0], np.array([2, 0], np.int32), range(2, -1, -2)):
        assert made.index(right)["a"].tolist() == [2, 0]
    with pytest.raises(ShapeMismatchError, match=r"torch.int64 \[\]"):
        made.index(torch.tensor(1))
    with pytest.raises(DeviceMismatchError, match="'index' is on meta, expected cpu"):
        made.index(torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises(IndexError):
        made.index([3])
    assert DictTensor().index([]).empty()


def test_slice_of_a_row_that_is_not_there() -> None:
    with pytest.raises(IndexError, match="got row 3, expected -3 to 2, as B = 3"):
        DictTensor({"a": torch.arange(3)}).slice(3)
    with pytest.raises(IndexError, match="got row 0"):
        DictTensor({"a": torch.zeros(0)}).slice(0)
    assert DictTensor().slice(0).empty()


def test_to_and_slice_share_memory_and_clone_and_index_do_not() -> None:
    source = torch.zeros(2)
    made = DictTensor({"a": source})
    for shares, other in [
        (True, made.to("cpu")),
        (True, made.slice(0, 2)),
        (True, made.unfold()[0]),
        (False, made.clone()),
        (False, made.index([0, 1])),
        (False, DictTensor.cat([made])),
    ]:
        assert (other["a"].untyped_storage().data_ptr() == source.untyped_storage().data_ptr()) is shares


def test_to_moves_everything_and_rejects_unknown_devices() -> None:
    made = DictTensor({"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bool)})
    moved = made.to("meta")
    assert moved.device == torch.device("meta")
    assert moved.specs() == made.specs()
    with pytest.raises(ValueError, match="'nowhere' is not a device"):
        made.to("nowhere")


def test_detach_and_clone_in_the_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    made = DictTensor({"a": weight * 3})
    assert not made.detach()["a"].requires_grad
    made.clone()["a"].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_map_validates_what_comes_back() -> None:
    made = DictTensor({"a": torch.zeros(2, 3), "b": torch.zeros(2)})
    assert made.map(lambda v: v.repeat_interleave(2, dim=0)).n_elems() == 4
    with pytest.raises(ShapeMismatchError, match="'b' is "):
        made.map(lambda v: v.reshape(-1))
    with pytest.raises(TypeError, match="key 'a' holds a float"):
        made.map(lambda v: 0.0)  # type: ignore[arg-type,return-value]


def test_repr_shows_no_value() -> None:
    made = DictTensor({"a": torch.full((2, 3), 7.0, device="meta")})
    assert repr(made) == "DictTensor on meta:\n  a  float32 [2, 3]"
    assert repr(DictTensor()) == "DictTensor()"


def test_values_on_a_gpu_or_cpu(device: torch.device) -> None:
    made = DictTensor({"a": torch.arange(3, device=device)})
    assert made.device == device
    assert made.index([2, 0])["a"].device == device
    assert made.to(device.type)["a"] is made["a"]  # cuda is cuda:0
    assert DictTensor.stack([made]).lengths.device == device


def test_a_subclass_stays_a_subclass() -> None:
    class Mine(DictTensor):
        pass

    made = Mine({"a": torch.zeros(2)})
    assert all(
        type(x) is Mine for x in (made.index([0]), made.clone(), made.get(["a"]), made.slice(0), Mine.cat([made]))
    )


def test_a_key_that_merely_begins_alike_is_not_suggested() -> None:
    known = DictTensor({"observation/frame": torch.zeros(1), "observation/done": torch.zeros(1)})
    with pytest.raises(KeyError, match="no key 'observation/obs'") as error:
        known["observation/obs"]
    assert "Did you mean" not in str(error.value)


def test_an_assignment_names_set_and_a_deletion_get() -> None:
    d = DictTensor({"reward": torch.zeros(3)})
    with pytest.raises(TypeError, match=r"assignment to \['value'\], expected a call\. Write set\('value', tensor\)"):
        d["value"] = torch.zeros(3)
    with pytest.raises(TypeError, match=r"deletion of \['reward'\], expected a call\. Write get"):
        del d["reward"]
