"""Compiled code keeps its intermediate results in memory, and returns new memory in every call."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.guards import _reinterpret_tensor as reinterpret_tensor

from rlstruct.engine import compiled, intermediates
from rlstruct.engine.compiled import Compiled
from rlstruct.engine.intermediates import preallocated
from rlstruct.engine.purity import place_of

# Functions in the form of TorchInductor's code, which calls these by name.
allocated: list[tuple[int, ...]] = []
during: list[Callable[[], None]] = []


def empty_strided_cpu(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    allocated.append(shape)
    return torch.empty_strided(shape, stride, dtype=dtype).fill_(torch.nan)


def kernel(a: Tensor, b: Tensor, result: Tensor) -> None:
    while during:
        during.pop()()
    torch.add(a, b, out=result)


def identity(x: Tensor) -> Tensor:
    return x


def sums(args: list[Tensor]) -> Sequence[Tensor]:
    arg0_1, arg1_1, arg2_1 = args
    args.clear()
    buf0 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
    kernel(arg0_1, arg1_1, buf0)
    del arg0_1
    buf1 = buf0
    del buf0  # reuse
    buf2 = reinterpret_tensor(buf1, (3, 2), (1, 3), 0)  # alias
    buf3 = empty_strided_cpu((3, 2), (2, 1), torch.float32)
    kernel(buf2, reinterpret_tensor(arg2_1, (3, 2), (1, 3), 0), buf3)
    del arg1_1
    del arg2_1
    buf4 = buf3
    return (reinterpret_tensor(buf4, (2,), (1,), 0), buf4)


def returns_its_input(args: list[Tensor]) -> Sequence[Tensor]:
    arg0_1, arg1_1 = args
    args.clear()
    buf0 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
    kernel(arg0_1, arg1_1, buf0)
    buf1 = identity(buf0)
    buf2 = identity(arg1_1)
    return (buf1, buf2)


def changes_in_place(args: list[Tensor]) -> Sequence[Tensor]:
    arg0_1, arg1_1 = args
    args.clear()
    buf0 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
    Tensor.copy_(buf0, arg0_1)
    buf1 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
    kernel(buf0.detach(), arg1_1.detach(), buf1)
    return (buf1,)


def of_unknown_size(args: list[Tensor]) -> Sequence[Tensor]:
    arg0_1, arg1_1 = args
    args.clear()
    s0 = arg0_1.shape[0]
    buf0 = empty_strided_cpu((s0, 3), (3, 1), torch.float32)
    kernel(arg0_1, arg1_1, buf0)
    buf1 = empty_strided_cpu((s0, 3), (3, 1), torch.float32)
    kernel(buf0, buf0, buf1)
    return (buf1,)


def of_another_form(args: list[Tensor]) -> Sequence[Tensor]:
    arg0_1, arg1_1 = args
    args.clear()
    buf0 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
    if arg0_1.dim() == 2:
        kernel(arg0_1, arg1_1, buf0)
    buf1 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
    kernel(buf0, buf0, buf1)
    return (buf1,)


@pytest.fixture(autouse=True)
def _nothing_allocated() -> Iterator[None]:
    allocated.clear()
    yield
    during.clear()


def numbers(first: float) -> Tensor:
    return torch.arange(6.0).view(2, 3) + first


def test_intermediate_results_are_allocated_once_and_results_in_every_call() -> None:
    held = [numbers(10.0), numbers(20.0)]
    run = preallocated(sums, 1)(held)
    assert allocated == [(2, 3)]
    earlier = []
    for first in (0.0, 1.0, 2.0):
        inputs = [numbers(first)]
        view, result = run(inputs)
        expected = (numbers(first) + numbers(10.0) + numbers(20.0)).t()
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(view, result.flatten()[:2])
        assert len(inputs) == 1
        earlier.append((result, result.clone()))
    assert allocated == [(2, 3), (3, 2), (3, 2), (3, 2)]
    for result, before in earlier:
        assert torch.equal(result, before)
    held[0].fill_(0.0)
    torch.testing.assert_close(run([numbers(0.0)])[1], (numbers(0.0) + numbers(20.0)).t())


def test_what_may_be_part_of_the_result_is_allocated_in_every_call() -> None:
    held = numbers(1.0)
    run = preallocated(returns_its_input, 1)([held])
    first, same = run([numbers(0.0)])
    assert same is held
    run([numbers(5.0)])
    assert torch.equal(first, numbers(0.0) + numbers(1.0))
    assert allocated == [(2, 3), (2, 3)]


def test_what_an_operator_changes_in_place_keeps_no_gradients() -> None:
    run, x = preallocated(changes_in_place, 1)([numbers(1.0)]), numbers(0.0).requires_grad_()
    for _ in range(2):
        assert torch.equal(run([x])[0], numbers(0.0) + numbers(1.0))
    assert len(allocated) == 4


def test_tensors_of_unknown_size_are_allocated_in_every_call() -> None:
    run = preallocated(of_unknown_size, 1)([numbers(1.0)])
    for first in (0.0, 1.0):
        assert torch.equal(run([numbers(first)])[0], 2.0 * (numbers(first) + numbers(1.0)))
    assert len(allocated) == 4


def test_large_results_are_allocated_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intermediates, "MOST_BYTES", 23)
    run = preallocated(sums, 3)([])
    assert allocated == []
    torch.testing.assert_close(run([numbers(0.0), numbers(1.0), numbers(2.0)])[1], (3 * numbers(1.0)).t())
    assert allocated == [(2, 3), (3, 2)]


def test_code_of_another_form_runs_as_it_was_compiled() -> None:
    run = preallocated(of_another_form, 1)([numbers(1.0)])
    for first in (0.0, 1.0):
        assert torch.equal(run([numbers(first)])[0], 2.0 * (numbers(first) + numbers(1.0)))
    assert len(allocated) == 4
    run = preallocated(eval("lambda args: [sum(args)]"), 1)([numbers(1.0)])  # its source is in no file
    assert torch.equal(run([numbers(0.0)])[0], numbers(0.0) + numbers(1.0))


def test_a_call_within_a_call_has_its_memory_to_itself() -> None:
    run = preallocated(sums, 1)([numbers(10.0), numbers(20.0)])
    inner: list[Tensor] = []

    def call() -> None:
        inner.append(run([numbers(100.0)])[1])

    def interrupt() -> None:  # another thread, while this one is in the first kernel
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    during.append(interrupt)
    outer = run([numbers(0.0)])[1]
    for first, result in ((0.0, outer), (100.0, inner[0])):
        torch.testing.assert_close(result, (numbers(first) + numbers(10.0) + numbers(20.0)).t())
    assert allocated == [(2, 3), (2, 3), (3, 2), (3, 2)]  # once; the inner call's two; the outer call's result


def test_an_error_in_a_call_leaves_the_next_one_as_it_was() -> None:
    run = preallocated(sums, 1)([numbers(10.0), numbers(20.0)])

    def fail() -> None:
        raise ZeroDivisionError

    during.append(fail)
    with pytest.raises(ZeroDivisionError):
        run([numbers(0.0)])
    allocated.clear()
    torch.testing.assert_close(run([numbers(0.0)])[1], (numbers(0.0) + numbers(10.0) + numbers(20.0)).t())
    assert allocated == [(3, 2)]


def test_the_code_of_this_torch_is_of_the_expected_form(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []

    def note(code: Any, *args: Any) -> Any:
        codes.append(code)
        return preallocated(code, *args)

    monkeypatch.setattr(compiled, "preallocated", note)
    weights = [torch.randn(16, 16) for _ in range(3)]

    def network(x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.layer_norm(torch.relu(x @ weight), [16])
        return x

    function, x = Compiled(network), torch.randn(8, 16)
    torch.testing.assert_close(function(x), network(x), rtol=1e-4, atol=1e-5)
    allocate = codes[0].__globals__["empty_strided_cpu"]

    def count(*args: Any) -> Tensor:
        allocated.append(args[0])
        result: Tensor = allocate(*args)
        return result

    monkeypatch.setitem(codes[0].__globals__, "empty_strided_cpu", count)
    torch.testing.assert_close(function(x), network(x), rtol=1e-4, atol=1e-5)
    assert len(allocated) == 1


def product(weight: Tensor) -> Compiled:
    """Two products that are calls of a library, which write into a tensor."""
    return Compiled(lambda x: ((x @ weight).relu() @ weight,))


def right(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).relu() @ weight


@pytest.mark.parametrize("first", [True, False])
def test_memory_serves_with_and_without_inference_mode(first: bool) -> None:
    weight, x = torch.randn(64, 64), torch.randn(64, 64)
    function = product(weight)
    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            torch.testing.assert_close(function(x)[0], right(x, weight), rtol=1e-4, atol=1e-4)


def test_new_weights_are_read_also_when_bound_in_inference_mode() -> None:
    weight, x = torch.randn(64, 64), torch.randn(64, 64)
    function = product(weight)
    function(x)
    other = torch.randn(64, 64)
    with torch.inference_mode():
        assert function.rebind({place_of(weight): "weight"}, {"weight": other})
    torch.testing.assert_close(function(x)[0], right(x, other), rtol=1e-4, atol=1e-4)


class Layer:
    """A function with a weight, which can be copied and pickled."""

    def __init__(self) -> None:
        self.weight = torch.randn(64, 64)
        self.compiled = Compiled(self.forward)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (right(x, self.weight),)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_reads_its_own_weights(copied: Callable[[Layer], Layer]) -> None:
    layer, x = Layer(), torch.randn(64, 64)
    layer.compiled(x)
    other = copied(layer)
    other.weight.fill_(0.0)
    assert not other.compiled(x)[0].any()
    torch.testing.assert_close(layer.compiled(x)[0], right(x, layer.weight), rtol=1e-4, atol=1e-4)
