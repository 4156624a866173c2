"""The compiled backend does what the eager one does. Slow: a compiler runs."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.engine import torch_private
from rlstruct.engine.compiled import Compiled
from rlstruct.engine.donated import Donated
from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.random import categorical, child_key, randint, split, symmetric_uniform, uniform
from rlstruct.sims import make

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
B, T = 64, 57


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("CartPole-v1", {}, marks=pytest.mark.slow),  # the one simulator that every run compiles
        pytest.param("CartPole-v1", {"auto_reset": False}, marks=pytest.mark.exhaustive),
        pytest.param("Breakout-MinAtar", {"time_limit": 30}, marks=pytest.mark.exhaustive),
        pytest.param("ConnectFour-v0", {}, marks=pytest.mark.exhaustive),
        pytest.param("Freeway-MinAtar", {"n_envs": 33, "time_limit": 9}, marks=pytest.mark.exhaustive),
        pytest.param("Asterix-MinAtar", {"n_envs": 3, "time_limit": 30}, marks=pytest.mark.exhaustive),
        pytest.param("SpaceInvaders-MinAtar", {"n_envs": 9, "time_limit": 14}, marks=pytest.mark.exhaustive),
        pytest.param("Seaquest-MinAtar", {"n_envs": 9, "time_limit": 30}, marks=pytest.mark.exhaustive),
        pytest.param("CartPole-v1", {"device": "cuda:0"}, marks=pytest.mark.gpu),
        pytest.param("Breakout-MinAtar", {"device": "cuda:0", "time_limit": 30}, marks=pytest.mark.gpu),
    ],
)
def test_trajectories_are_those_of_the_eager_backend(name: str, settings: dict) -> None:
    settings = {"n_envs": B, "seed": 3, **settings}
    eager, compiled = make(name, **settings), make(name, backend="compile", **settings)
    environment = torch.arange(eager.n_envs(), device=eager.device)
    observed = [(eager.reset(), compiled.reset())]
    for t in range(T):
        action = DictTensor({"action": randint(child_key(environment, t), int(eager.action_space.n))})
        observed += zip(eager.step(action), compiled.step(action), strict=True)
    for (expected, ran), (got, also) in observed:
        assert torch.equal(ran, also)
        assert expected.keys() == got.keys()
        for key in expected.keys():
            assert expected[key].dtype == got[key].dtype
            # Fused arithmetic rounds otherwise, and 57 steps of a falling pole let 1e-7 grow; all else is exact.
            tolerance = 1e-3 if expected[key].is_floating_point() else 0
            torch.testing.assert_close(got[key], expected[key], rtol=tolerance, atol=tolerance)
    assert sum(bool(e["done"].any()) for (e, _), _ in observed) > 3


@pytest.mark.slow
@pytest.mark.parametrize("n_envs", [1, 3, 33])
def test_compiled_draws_are_those_of_eager_torch(n_envs: int) -> None:
    """Numbers with separate keys, which once overflowed in C++: only the first of them was ever written."""

    def draw(given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor]]:
        key = given["key"]
        numbers = {"uniform": uniform(key, (3,), 5), "many": uniform(key, (40,), 1 << 20), "one": uniform(key, (1,))}
        alone = {"alone": uniform(key), "integer": randint(key, 5), "sign": symmetric_uniform(key, 1, 1.0)[0]}
        chosen = {
            "class": categorical(torch.zeros(len(key), 6), key),
            "classes": categorical(torch.zeros(len(key), 9), key, 3),
        }
        return ({**numbers, **alone, **chosen, "integers": randint(key, 5, (8,)), "keys": split(key, 5)},)

    key = {"key": child_key(torch.arange(n_envs), 2)}
    (got,) = Compiled(draw)(key)
    for name, expected in draw(key)[0].items():
        assert torch.equal(got[name], expected), name


@pytest.mark.slow
@pytest.mark.parametrize("n", [16, 19])  # whole vectors, and some that are not
def test_every_dtype_is_loaded_as_it_is(n: int) -> None:
    dtypes = [torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]
    given = {str(dtype): (torch.arange(n) * 7 % 5).to(dtype) for dtype in dtypes}
    given["half"] = given["torch.int64"].half()

    def double(values: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor]]:
        return ({name: torch.where(values["torch.bool"], value, value + value) for name, value in values.items()},)

    (got,) = Compiled(double)(given)
    for name, value in double(given)[0].items():
        assert got[name].dtype is value.dtype
        assert torch.equal(got[name], value), name


def triple(values: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor]]:
    return ({name: value * 3 for name, value in values.items()},)


@pytest.mark.slow
def test_pictures_of_bools_are_gathered_and_turned_into_floats() -> None:
    """They reach the code as bytes, unless something else is computed from them."""
    frames, only_shown = torch.rand(9, 1, 5, 4, generator=torch.Generator().manual_seed(0)) < 0.3, torch.eye(3) > 0
    rows = torch.tensor([7, 0, 3])

    def gathered(frames: torch.Tensor, only_shown: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = frames.index_select(0, rows).squeeze(1)
        return chosen.flatten(1).to(torch.float32), frames[rows, 0].double().sum(-1), only_shown | only_shown.t()

    compiled, arguments = Compiled(gathered), (frames, only_shown, rows)
    for _ in range(2):
        for one, other in zip(compiled(*arguments), gathered(*arguments), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        arguments = (~frames, ~only_shown, rows.flip(0))


ONEDNN = "rlstruct::product"


class _Products(torch_private.OperatorObserver):
    """Names of the operators that multiply matrices, and shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.name().split(".")[0] in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", ONEDNN):
            self.seen.append((func.name(), tuple(result.shape)))
        return result


def products_of(
    step: Callable[..., tuple[Tensor, ...]], arguments: list[Tensor], tolerance: float
) -> list[tuple[str, tuple[int, ...]]]:
    """Compile a step, call it with other numbers, compare it with itself, and return the products of that call."""
    compiled = Compiled(step)
    compiled(*arguments)
    others = [one * factor for one, factor in zip(arguments, (0.5, 3.0, 2.0, 0.1, 0.7), strict=True)]  # nothing is kept
    with _Products() as products:
        found = compiled(*others)
    for one, other in zip(found, step(*others), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return products.seen


@pytest.mark.slow
@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("rows", [64, 8192])
def test_large_products_are_those_of_onednn_where_mkl_is_slower(
    rows: int, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward: a layer of 65 x 33 units, whose products are smaller or larger than the limit."""
    monkeypatch.setattr(torch_private, "onednn_is_faster", lambda: faster)
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, 65), (33, 65), (33,), (2, 1, 40), (2, 33, 40)
    given = [torch.randn(shape, generator=generator) for shape in shapes]

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x, weight, bias, biases, weights = leaves = [one.detach().requires_grad_() for one in given]
            y = torch.nn.functional.linear(x, weight, bias).relu()
            twins = torch.baddbmm(biases, y.expand(2, -1, -1), weights)  # as of twin critics
            return (twins.detach(), *torch.autograd.grad(twins.square().sum() + (y @ torch.ones(33, 40)).sum(), leaves))

    names = {name for name, _ in products_of(step, given, tolerance=1e-3)}
    assert (ONEDNN in names) == (faster and rows == 8192)
    assert bool(names - {ONEDNN}) == (not faster or rows == 64)


@pytest.mark.slow
@pytest.mark.parametrize("n_inputs", [1, 3, 24, 25])
def test_products_with_few_columns_are_computed_as_their_transposes(n_inputs: int) -> None:
    """The gradients of the first layer's weights, [40, n_inputs], and of its inputs, and the same of twin layers."""
    generator = torch.Generator().manual_seed(n_inputs)
    shapes = (50, n_inputs), (40, n_inputs), (40,), (2, 50, n_inputs), (2, n_inputs, 40)
    given = [torch.randn(shape, generator=generator) for shape in shapes]

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x, weight, bias, xs, weights = leaves = [one.detach().requires_grad_() for one in given]
            y = torch.nn.functional.linear(x, weight, bias).tanh().sum() + torch.bmm(xs, weights).tanh().sum()
            return torch.autograd.grad(y, leaves)

    results = [shape for _, shape in products_of(step, given, tolerance=1e-4)]
    few = [shape for shape in results if 1 < shape[-1] <= 24]
    turned = [shape for shape in results if shape[-2] == n_inputs]
    assert not few
    assert len(turned) == 4 if 1 < n_inputs <= 24 else len(turned) <= 1  # twins' weights have so few rows anyway


@pytest.mark.slow
def test_two_threads_compile_one_after_the_other() -> None:
    together, right = threading.Barrier(2), []

    def work(n: int) -> None:
        given = {"a": torch.arange(n)}
        together.wait()
        right.append(torch.equal(Compiled(triple)(given)[0]["a"], given["a"] * 3))

    threads = [threading.Thread(target=work, args=(n,)) for n in (48, 56)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True, True]


@pytest.mark.exhaustive
def test_tensors_of_other_strides_are_taken() -> None:
    env, eager = make("CartPole-v1", 4, backend="compile"), make("CartPole-v1", 4)
    wide = torch.arange(8).view(4, 2) % 2
    for one in (env, eager):
        one.reset()
        one.step(DictTensor({"action": wide[:, 0].contiguous()}))
        one.step(DictTensor({"action": wide[:, 1]}))  # every second number
    torch.testing.assert_close(env.get_state().x_dot, eager.get_state().x_dot)


@pytest.mark.slow
@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_compiled_step_reports_impossible_values(auto_reset: bool) -> None:
    env = make("CartPole-v1", 4, backend="compile", auto_reset=auto_reset)
    env.reset()
    for steps in range(2):
        with pytest.raises(ValueError, match="action 'action' of environment 2 is 2, expected an element of Discrete"):
            env.step(DictTensor({"action": torch.tensor([0, 1, 2, 1])}))
        assert (env.state_tensors()["elapsed"] == steps).all()
        env.step(DictTensor({"action": torch.tensor([0, 1, 1, 0])}))
    walk = make("MountainCarContinuous-v0", 3, backend="compile", auto_reset=auto_reset)
    walk.reset()
    walk.step(DictTensor({"action": torch.zeros(3, 1)}))
    with pytest.raises(ValueError, match="action 'action' of environment 1"):
        walk.step(DictTensor({"action": torch.tensor([[0.0], [float("nan")], [0.0]])}))
    state = walk.get_state()
    broken = dataclasses.replace(state, x=state.x.index_fill(0, torch.tensor([2]), float("nan")))
    walk.set_state(None, broken)
    with pytest.raises(ValueError, match="'frame' of environment 2 is NaN"):
        walk.step(DictTensor({"action": torch.zeros(3, 1)}))


@pytest.mark.slow  # a C++ compiler
@pytest.mark.parametrize("seen", ["nothing", "the weight", "a part of it"])
def test_donated_arguments_are_written_over_after_everything_has_read_them(seen: str) -> None:
    weight, x = torch.randn(5, 4), torch.randn(3, 5)
    part = {"nothing": torch.ones(5, 4), "the weight": weight, "a part of it": weight[:5]}[seen]
    part = part.view(20)[:16].view(4, 4) if seen == "a part of it" else part

    def step(x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = x @ state["weight"] + part.sum(0)
        new = state["weight"] - 0.1 * (x.t() @ y)
        return y + part.mean(), {"weight": new, "n": state["n"] + 1.0}

    state = Donated({"n": torch.zeros(()), "weight": weight, "rate": torch.ones(3)})
    compiled = Compiled(step)
    compiled.prepare(x, state)
    for n in range(3):
        expected, after = step(x, state)
        got, new = compiled(x, state)
        torch.testing.assert_close(got, expected)
        in_place = seen != "a part of it"  # code that writes over memory which it reads under another name is not made
        assert [*new] == ([] if in_place else ["weight", "n"])
        for key, value in new.items():
            state[key].copy_(value)
        torch.testing.assert_close(weight, after["weight"])
        assert state["n"].item() == n + 1


@pytest.mark.slow  # a C++ compiler
def test_autograd_knows_that_donated_arguments_have_changed() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = weight.square().sum()
    compiled = Compiled(lambda state: (state["weight"].sum(), {"weight": state["weight"] + 1.0}))
    compiled(Donated({"weight": weight.detach()}))
    assert weight.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow  # a C++ compiler
@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_taken_several_times_at_once_is_the_step_each_time(in_place: bool) -> None:
    memory, x = torch.randn(6, 4), torch.randn(3, 5)

    def step(x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = torch.tanh(x @ state["weight"]) + (0.0 if in_place else memory.sum())  # which overlaps the weight
        return y, {"weight": state["weight"] - 0.1 * (x.t() @ y), "n": state["n"] + 1}

    one, other = (Donated({"weight": memory[:5], "n": torch.zeros((), dtype=torch.int64)}) for _ in range(2))
    if in_place:
        other["weight"] = memory[:5].clone()
    each, at_once = Compiled(step), Compiled(step)
    each.prepare(x, one)
    at_once.prepare(x, other)
    found = at_once.times(4, x, other)
    if not in_place:
        assert found is None
        assert other["n"].item() == 0
        return
    expected = [each(x, one)[0] for _ in range(4)]
    assert found is not None
    for (got,), wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    assert not torch.equal(expected[0], expected[3])
    assert one["n"].item() == other["n"].item() == 4
    assert torch.equal(one["weight"], other["weight"])


@pytest.mark.slow  # a C++ compiler
def test_a_donated_argument_keeps_no_code_alive() -> None:
    compiled, state = Compiled(lambda state: (state["n"] * 2.0, {"n": state["n"] + 1.0})), Donated({"n": torch.ones(2)})
    compiled(state)
    code = weakref.ref(compiled)
    del compiled
    gc.collect()
    assert code() is None
    assert state["n"].tolist() == [2.0, 2.0]


@pytest.mark.slow  # a C++ compiler
def test_donated_results_keep_apart_what_the_function_gives_twice() -> None:
    def step(state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = state["a"] + state["b"]
        return total, {"a": state["b"], "b": total, "c": total, "flag": total > 2.0}

    abc = {name: torch.tensor([float(i), 1.0]) for i, name in enumerate("abc")}
    state = Donated({**abc, "flag": torch.zeros(2) > 0})
    expected = step({key: value.clone() for key, value in state.items()})
    total, new = Compiled(step)(state)
    assert torch.equal(total, expected[0])
    assert not new
    for key, value in expected[1].items():
        assert torch.equal(state[key], value), key


@pytest.mark.slow  # a C++ compiler
def test_a_donated_argument_in_another_layout_is_returned() -> None:
    compiled = Compiled(lambda state: (state["b"].sum(), {"a": state["a"] + 1.0, "b": state["b"] * 2.0}))
    for layout in ("first", "transposed"):
        a, b = torch.rand(2, 3), torch.rand(3)
        state = Donated({"a": a.t().contiguous().t() if layout == "transposed" else a.clone(), "b": b.clone()})
        _, new = compiled(state)
        assert [*new] == (["a"] if layout == "transposed" else [])
        for key, value in {**state, **new}.items():
            torch.testing.assert_close(value, {"a": a + 1.0, "b": b * 2.0}[key])


@pytest.mark.slow
def test_a_donated_argument_of_another_shape_is_refused() -> None:
    wide = Compiled(lambda state: (state["a"].sum(), {"a": state["a"].expand(2, 3)}))
    with pytest.raises(ShapeMismatchError, match=r"'a' is torch.float32 \[2, 3\], and the argument .* \[3\]"):
        wide(Donated({"a": torch.ones(3)}))


@pytest.mark.slow
def test_code_is_generated_once_and_then_loaded_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = importlib.import_module("torch._dynamo.utils").counters
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": (x * y).sum(1), "same": x.gt(0).any(1)}

    x, y = torch.randn(7, 5), torch.randn(7, 5)
    for n_hits in (0, 1):
        counters.clear()
        found = Compiled(step)(x, y)
        counted = counters["inductor"]
        assert (counted["fxgraph_cache_hit"], counted["fxgraph_cache_bypass"]) == (n_hits, 0)
        torch.testing.assert_close(found["sum"], step(x, y)["sum"])
        assert found["same"].tolist() == step(x, y)["same"].tolist()
