"""Products of frames of bits as sums of rows: equal to products of matrices, and only where they take less time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from rlstruct.engine import bits, torch_private
from rlstruct.engine.compiled import Compiled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # a compiler runs
ROWS, SIDE, CHANNELS, COLUMNS = 128, 10, 4, 64
SUMS, GRADIENT = "rlstruct.sum_rows", "rlstruct.sum_rows_gradient"


class Operators(torch_private.OperatorObserver):
    """Names of the operators that are called, by torch or directly."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().replace("::", "."))
        return func(*args, **kwargs or {})

    def noting(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Note the calls of a function that implements an operator."""

        def call(*args: Tensor) -> Tensor:
            self.names.append(name)
            return function(*args)

        return call


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    """For code that is compiled from now on."""
    observer = Operators()
    for name, function in bits.OPERATORS.items():
        monkeypatch.setitem(bits.OPERATORS, name, observer.noting(name, function))
    return observer


def random_bits(shape: tuple[int, ...], share: float, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory that is not initialised hold a number that no result has."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **words: empty(*args, **words).fill_(1 << 20))


@settings(deadline=None)
@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 200),
    vectors=st.integers(1, 14),
    share=st.sampled_from([0.0, 0.03, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 1000),
)
def test_sums_are_products(rows: int, n: int, vectors: int, share: float, seed: int) -> None:
    """Against float64, few ones and many, with one thread and three, in blocks of 8, 4 and 1 vectors of columns."""
    columns, generator = 16 * vectors, torch.Generator().manual_seed(seed)
    frames = random_bits((rows, n), share, seed)
    weight, g = torch.randn(columns, n, generator=generator), torch.randn(rows, columns, generator=generator)
    x, w, dy = frames.view(torch.uint8), weight.t(), g.t()
    expected = frames.double() @ weight.double().t(), g.double().t() @ frames.double()
    before, results = torch.get_num_threads(), []
    with pytest.MonkeyPatch.context() as patch:
        poisoned(patch)
        try:
            for n_threads in (1, 3):
                torch.set_num_threads(n_threads)
                results.append((bits.product(x, w), bits.gradient(dy, x)))
        finally:
            torch.set_num_threads(before)
    summed = bits.LIMITS[torch.float32] * int(frames.sum()) + 16 * n <= rows * n  # others are MKL's: threads matter
    for one, other, exact in zip(*results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if summed else 1e-4)
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-4)
        assert one.is_contiguous()


@pytest.mark.parametrize(("dtype", "places_per_one"), [(torch.float32, 8), (torch.bfloat16, 10)])
def test_many_ones_are_multiplied(dtype: torch.dtype, places_per_one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    weight, g = torch.randn(64, 400, dtype=dtype), torch.randn(128, 64, dtype=dtype)
    limit = (128 * 400 - 16 * 400) // places_per_one
    for n_ones, multiplied in ((limit, False), (limit + 1, True)):
        frames = torch.zeros(128 * 400, dtype=torch.uint8)
        frames[torch.randperm(len(frames))[:n_ones]] = 1
        frames = frames.view(128, 400)
        with Operators() as operators:
            results = bits.product(frames, weight.t()), bits.gradient(g.t(), frames)
        assert operators.names.count("aten.mm") == 2 * multiplied
        exact = frames.double() @ weight.double().t(), g.double().t() @ frames.double()
        for one, other in zip(results, exact, strict=True):
            assert one.dtype is dtype
            torch.testing.assert_close(one, other.to(dtype), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)


def test_long_sums_keep_their_digits() -> None:
    """A place that is always one, with gradients of one sign: 65,536 numbers are no single chain of float32."""
    frames = torch.zeros(1 << 16, 64, dtype=torch.uint8)
    frames[:, 5] = 1
    result = bits.gradient(torch.full((16, 1 << 16), 0.1), frames)
    torch.testing.assert_close(result[:, 5], torch.full((16,), 6553.6), rtol=5e-6, atol=0)
    assert not result[:, :5].any()
    assert not result[:, 6:].any()


@pytest.mark.parametrize(("columns", "dtype"), [(17, torch.float32), (16, torch.float64)])
def test_what_the_kernel_cannot_sum_is_multiplied(columns: int, dtype: torch.dtype) -> None:
    frames, weight = random_bits((128, 400), 0.02, 3).view(torch.uint8), torch.randn(columns, 400, dtype=dtype)
    torch.testing.assert_close(bits.product(frames, weight.t()), frames.to(dtype) @ weight.t(), rtol=1e-5, atol=1e-4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        bits.product(frames, weight[:, 1:].t())


def test_sums_are_float32_whatever_torch_allocates_by_default() -> None:
    frames, weight = random_bits((128, 400), 0.02, 3).view(torch.uint8), torch.randn(16, 400)
    expected = bits.product(frames, weight.t()), bits.gradient(frames[:, :16].float().t(), frames)
    torch.set_default_dtype(torch.float64)
    try:
        sums = bits.product(frames, weight.t()), bits.gradient(frames[:, :16].float().t(), frames)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(sums, expected, strict=True):
        assert torch.equal(one, other)


ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "flat, then floats": lambda x: x.flatten(1).float(),
    "floats, then flat": lambda x: x.float().flatten(1),
    "permuted floats": lambda x: x.float().permute(0, 3, 1, 2).reshape(len(x), -1),
    "bfloat16": lambda x: x.float().to(torch.bfloat16).flatten(1),
    "gathered": lambda x: x[torch.arange(len(x) - 1, -1, -1)].flatten(1).float(),
}


@pytest.mark.parametrize("arranged", ARRANGED)
def test_compiled_layers_sum_rows(arranged: str, operators: Operators) -> None:
    """A layer with a bias and one without, and the gradients of their weights."""
    generator = torch.Generator().manual_seed(1)
    frames = random_bits((ROWS, SIDE, SIDE, CHANNELS), 0.08, 1)
    weight = torch.randn(COLUMNS, frames[0].numel(), generator=generator)
    bias = torch.randn(COLUMNS, generator=generator)

    def step(frames: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        x = ARRANGED[arranged](frames)
        with torch.enable_grad():
            leaves = [one.detach().to(x.dtype).requires_grad_() for one in (weight, bias)]
            y = F.linear(x, *leaves).relu() + F.linear(x, leaves[0]).tanh()
            return (y.detach(), *torch.autograd.grad(y.square().sum(), leaves))

    compiled = Compiled(step)
    compiled(frames, weight, bias)
    others = frames.flip(0), weight * 0.5, bias * 3.0  # nothing is kept from the first call
    operators.names.clear()
    with operators:
        results = compiled(*others)
    assert operators.names.count(SUMS) == 2
    assert operators.names.count(GRADIENT) == 2
    assert not {"aten.mm", "aten.addmm"} & {*operators.names}
    tolerance = 0.05 if arranged == "bfloat16" else 1e-4
    for one, other in zip(results, step(*others), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize("faster", [True, False])
def test_oneDNN_does_not_get_them(faster: bool, monkeypatch: pytest.MonkeyPatch, operators: Operators) -> None:
    """And the number of ones may differ between calls: the same code then multiplies."""
    monkeypatch.setattr(torch_private, "onednn_is_faster", lambda: faster)
    frames, weight = random_bits((ROWS, 400), 0.08, 4), torch.randn(COLUMNS, 400)

    def step(frames: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(frames.float(), weight).relu(),)

    compiled = Compiled(step)
    compiled(frames, weight)
    for others in (frames, ~frames):
        operators.names.clear()
        with operators:
            (result,) = compiled(others, weight)
        assert operators.names.count(SUMS) == 1
        torch.testing.assert_close(result, step(others, weight)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "reason", ["pictures", "scaled", "few rows", "odd columns", "a torch without the name", "a compiler that refuses"]
)
def test_other_products_stay_products(reason: str, monkeypatch: pytest.MonkeyPatch, operators: Operators) -> None:
    if reason == "a torch without the name":
        monkeypatch.setitem(torch_private.NEEDED, "sums of bits", ("torch._inductor.codecache:NoSuchCache",))
        with pytest.warns(UserWarning, match="NoSuchCache, so products of compiled steps with frames of bits"):
            torch_private.check()
    if reason == "a compiler that refuses":
        monkeypatch.setattr(bits, "SOURCE", bits.SOURCE + "no C++")
    for cached in ("why_not", "kernel"):  # empty caches, and the former ones again afterwards
        monkeypatch.setattr(bits, cached, functools.cache(getattr(bits, cached).__wrapped__))
    rows, columns = 16 if reason == "few rows" else ROWS, 65 if reason == "odd columns" else COLUMNS
    frames = random_bits((rows, SIDE, SIDE, CHANNELS), 0.08, 2)
    if reason == "pictures":
        frames = frames.to(torch.uint8) * 200
    weight = torch.randn(columns, frames[0].numel(), generator=torch.Generator().manual_seed(2))

    def step(frames: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        x = frames.flatten(1).float()
        return (F.linear(x * 0.5 if reason == "scaled" else x, weight),)

    compiled = Compiled(step)
    compiled(frames, weight)
    with operators:
        (result,) = compiled(frames, weight)
    assert SUMS not in operators.names
    torch.testing.assert_close(result, step(frames, weight)[0], rtol=1e-4, atol=1e-4)
