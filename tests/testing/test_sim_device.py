"""The simulated accelerator computes what the CPU computes, aliases as memory does, and refuses to mix devices."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F

from rlstruct.device import registered_backends, resolve_device
from rlstruct.errors import DeviceMismatchError

if torch.cuda.is_available():
    pytest.skip("one process has one accelerator, and here it is CUDA", allow_module_level=True)

from rlstruct.testing import HostSyncError, forbid_host_sync
from rlstruct.testing.sim_device import DEVICE_COUNT, SimDeviceMismatchError

SIM0, SIM1 = torch.device("sim:0"), torch.device("sim:1")


def on_host(value: object) -> object:
    """Bring every tensor of a nested result to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return [on_host(item) for item in value] if isinstance(value, list | tuple) else value


def devices(value: object) -> set[str]:
    if isinstance(value, Tensor):
        return {str(value.device)}
    return set().union(*map(devices, value)) if isinstance(value, list | tuple) else set()


# --- devices by name -------------------------------------------------------------------------------------------------


def test_devices_exist_by_name() -> None:
    assert torch.sim.device_count() == DEVICE_COUNT == 4
    assert registered_backends()["sim"] == "rlstruct.testing.sim_device"
    assert resolve_device("sim:1") == SIM1
    assert resolve_device("sim") == SIM0
    with pytest.raises(ValueError, match="sim:9 does not exist"):
        resolve_device("sim:9")
    with pytest.raises(RuntimeError, match="sim:9 does not exist"):
        torch.zeros(1, device="sim:9")
    with pytest.raises(RuntimeError, match="sim:9 does not exist"):
        torch.zeros(1).to("sim:9")


FACTORIES: dict[str, Callable[[torch.device], Tensor]] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones((), dtype=torch.bool, device=d),
    "full": lambda d: torch.full((2,), 7, device=d),
    "arange": lambda d: torch.arange(1, 5, 2, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor_of_numbers_on_device": lambda d: torch.tensor([x for x in torch.arange(3, device=d)]),
    "as_tensor": lambda d: torch.as_tensor(np.arange(3), device=d),
    "rand": lambda d: torch.rand(3, device=d),
    "randn": lambda d: torch.randn(3, device=d),
    "randint": lambda d: torch.randint(5, (3,), device=d),
    "randperm": lambda d: torch.randperm(5, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (3,), device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, device=d)),
    "rand_like": lambda d: torch.rand_like(torch.ones(2, device=d)),
    "zeros_like_elsewhere": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3),
    "new_full": lambda d: torch.ones(2, device=d).new_full((3,), 4.0),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1, 2]),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_what_the_cpu_makes(name: str) -> None:
    made = []
    for device in (torch.device("cpu"), SIM1, torch.device("sim")):
        torch.manual_seed(3)
        made.append(FACTORIES[name](device))
    expected, first, second = made
    if name != "tensor_of_numbers_on_device":  # torch.tensor without device= makes a CPU tensor
        assert (first.device, second.device) == (SIM1, SIM0)
    assert first.dtype == expected.dtype
    torch.testing.assert_close(first.cpu(), expected, rtol=0, atol=0)


def test_device_context_and_keyword_decide_the_device() -> None:
    with torch.device("sim:2"):
        assert torch.zeros(1).device == torch.device("sim:2")
    x = torch.ones(2, device=SIM1)
    assert torch.zeros_like(x, device="cpu").device == torch.device("cpu")
    assert x.new_zeros(2, device=SIM0).device == SIM0
    assert torch.empty(5, 2, device=SIM1).shape == (5, 2)


def test_moves_keep_values_and_dtype() -> None:
    x = torch.arange(6).view(2, 3)
    for target in ("sim:0", "sim:3", "cpu"):
        moved = x.to("sim:1").to(target)
        assert moved.device == torch.device(target)
        torch.testing.assert_close(moved.cpu(), x)
    on_sim = x.to("sim:1")
    assert on_sim.to("sim:1") is on_sim
    assert on_sim.to("sim:2", torch.float64).dtype == torch.float64
    assert x.to(on_sim).device == SIM1
    on_sim[0] = 9  # a move is a copy
    assert x[0].tolist() == [0, 1, 2]


def test_copy_crosses_devices() -> None:
    target, source = torch.zeros(2, device=SIM0), torch.tensor([1.0, 2.0], device=SIM1)
    target.copy_(source)
    host = torch.zeros(2).copy_(source)
    torch._foreach_copy_([target], [host * 10])
    target[0] = torch.tensor(5.0)
    assert (host.tolist(), target.tolist()) == ([1, 2], [5, 20])


# --- the look of a tensor --------------------------------------------------------------------------------------------


def test_printing_shows_values_and_device() -> None:
    x = torch.tensor([1.0, 2.0], device=SIM1)
    assert repr(x) == "tensor([1., 2.], device='sim:1')"
    assert repr(x.requires_grad_()) == "tensor([1., 2.], device='sim:1', requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 4.], device='sim:1', grad_fn=<MulBackward0>)"
    assert f"{x.sum():.2f}" == "3.00"


def test_host_reads_work_and_numpy_raises_as_on_cuda() -> None:
    x = torch.tensor([1.0, 2.0], device=SIM1)
    assert (x.tolist(), x.sum().item(), float(x[0]), bool(x[0] > 0), [7, 8][x.long()[0]]) == ([1, 2], 3, 1.0, True, 8)
    for read in (x.numpy, lambda: np.asarray(x), lambda: np.array(x), lambda: x + np.ones(2)):
        with pytest.raises(TypeError, match=r"can't convert sim:1 device type tensor to numpy"):
            read()
    assert x.numpy(force=True).tolist() == [1, 2]
    assert (x.is_sim, x.is_cuda, x.is_cpu, x.get_device()) == (True, False, False, 1)


# --- memory ----------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], object]] = {
    "row": lambda x: x[0].copy_(torch.full((3,), 9.0)),
    "column": lambda x: x.__setitem__((slice(None), 1), 9.0),
    "row_of_tensor": lambda x: x.__setitem__(1, x[0] * 2),
    "view": lambda x: x.view(-1)[4].fill_(9.0),
    "transposed": lambda x: x.t()[2].add_(1),
    "narrowed": lambda x: x.narrow(1, 1, 2).zero_(),
    "strided_slice": lambda x: x[:, ::2].mul_(3),
    "chunk": lambda x: x.chunk(2, 1)[0].neg_(),
    "unbind": lambda x: x.unbind(1)[2].fill_(8),
    "expand_then_read": lambda x: x[0].expand(4, 3)[3].sum(),
    "view_of_view": lambda x: x.view(3, 2)[1:].t()[0].fill_(5),
    "select_unsqueeze": lambda x: x.select(0, 1).unsqueeze(0).sub_(1),
    "diagonal": lambda x: x.diagonal().fill_(0),
    "detach": lambda x: x.detach().fill_(4),
    "data": lambda x: x.data[0].fill_(4),
    "mask": lambda x: x.__setitem__(x > 2, 0.0),
    "index": lambda x: x.__setitem__(x.new_tensor([1], dtype=torch.int64), 3.0),
    "host_index": lambda x: x.__setitem__(torch.tensor([1]), 3.0),
    "index_copy_": lambda x: x[:, 1].index_fill_(0, x.new_tensor([0], dtype=torch.int64), 6.0),
    "scatter_": lambda x: x.scatter_(1, x.new_zeros(2, 1, dtype=torch.int64), 7.0),
    "masked_fill_": lambda x: x[1].masked_fill_(x[1] > 4, -1.0),
    "where": lambda x: x.copy_(torch.where(x > 2, x, 0.0)),
    "out": lambda x: torch.add(x, 1, out=x),
    "out_view": lambda x: torch.add(x[0], 1, out=x[1]),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], [2.0, 3.0]),
    "foreach_copy": lambda x: torch._foreach_copy_([x[0]], [x[1]]),
    "iadd": lambda x: x.__iadd__(1),
    "bits": lambda x: x.view(torch.int32).bitwise_and_(~0x7FFFFF),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_through_views_arrive(name: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    expected = torch.arange(6.0).view(2, 3)
    x = expected.to(SIM1)
    whole, address = x.view(6), x.data_ptr()
    with mode():
        WRITES[name](expected)
        WRITES[name](x)
    torch.testing.assert_close(x.cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(whole.cpu(), expected.view(6), rtol=0, atol=0)  # the same memory, not a new tensor
    assert (x.device, x.data_ptr()) == (SIM1, address)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_writes_return_the_tensor_itself(mode: Callable[[], AbstractContextManager[None]]) -> None:
    x, host = torch.zeros(2, device=SIM1), torch.zeros(2)
    with mode():
        assert x.add_(1) is x
        assert torch.ops.aten.add_.Scalar(x, 1) is x
        assert torch.add(x, 1, out=x) is x
        assert host.copy_(x) is host
        assert x.to("sim:1") is x


def test_copies_are_copies() -> None:
    x = torch.zeros(3, device=SIM1)
    for other in (x.clone(), x + 0, x[torch.tensor([0, 1, 2])], x.reshape(3).clone(), copy.deepcopy(x)):
        other.fill_(1)
    assert x.tolist() == [0, 0, 0]


def test_in_place_changes_of_shape() -> None:
    x = torch.arange(6.0, device=SIM1).view(2, 3)
    assert x.t_().shape == (3, 2)
    assert x.unsqueeze_(0).shape == (1, 3, 2)
    assert x.squeeze_().stride() == (1, 3)
    assert (x + 0)[:, 1].tolist() == [3, 4, 5]
    out = torch.empty(0, device=SIM1)
    assert torch.arange(3, device=SIM1).add(1).shape == torch.add(x[:, 0], 1, out=out).shape
    assert out.tolist() == [1, 2, 3]


def test_assigning_data_replaces_the_memory() -> None:
    x, y = torch.zeros(2, device=SIM0), torch.ones(2, device=SIM0)
    x.data = y
    y.mul_(3)
    assert x.tolist() == [3, 3]


# --- mixtures --------------------------------------------------------------------------------------------------------

Mixture = Callable[[Tensor, Tensor], object]

REFUSED: dict[str, Mixture] = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "compare": lambda a, b: a == b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "where_condition": lambda a, b: torch.where(b > 0, a, a),
    "matmul": lambda a, b: a @ b.T,
    "gather": lambda a, b: a.gather(0, b.long()),
    "scatter_": lambda a, b: a.scatter_(0, b.long(), 1.0),
    "index_select": lambda a, b: a.index_select(0, b[0].long()),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.0),
    "masked_select": lambda a, b: a.masked_select(b > 0),
    "index_put_values": lambda a, b: a.__setitem__(a[0].long(), b),
    "embedding": lambda a, b: F.embedding(b.long(), a),
    "linear": lambda a, b: F.linear(a, b),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b[:, 0].long()),
    "out": lambda a, b: torch.add(a, a, out=b.clone()),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
    "foreach_list": lambda a, b: torch._foreach_mul_([a, b], 2.0),
    "equal": lambda a, b: torch.equal(a, b),
    "lerp": lambda a, b: a.lerp(a, b),
    "clamp": lambda a, b: a.clamp(max=b),
    "searchsorted": lambda a, b: torch.searchsorted(a, b),
    "conv": lambda a, b: F.conv1d(a[None], b[:, :, None]),
}


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_mixture_is_refused_and_names_both_devices(name: str, other: str) -> None:
    a, b = torch.ones(2, 2, device=SIM0), torch.ones(2, 2, device=other)
    for first, second in ((a, b), (b, a)):
        with pytest.raises(SimDeviceMismatchError) as caught:
            REFUSED[name](first, second)
        assert "sim:0" in str(caught.value)
        assert other in str(caught.value)
        assert "torch." in str(caught.value)
    REFUSED[name](a, a.clone())  # the operation itself is fine


def test_the_message_names_operation_arguments_and_mend() -> None:
    x = torch.ones(2, device=SIM1)
    with pytest.raises(DeviceMismatchError, match=r"torch.add: .*on sim:1: 'self'; on cpu: 'other'.*\.to\('sim:1'\)"):
        x + torch.ones(2)
    with pytest.raises(
        RuntimeError, match=r"torch.cat: .*on sim:1: 'tensors\[0\]', 'tensors\[2\]'; on cpu: 'tensors\[1\]'"
    ):
        torch.cat([x, torch.ones(2), x])


ALLOWED: dict[str, Mixture] = {  # x on the device, n a CPU tensor without dimensions: as on CUDA
    "add": lambda x, n: x + n,
    "radd": lambda x, n: n + x,
    "div_": lambda x, n: x.clone().div_(n),
    "where": lambda x, n: torch.where(x > 1, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "clamp": lambda x, n: x.clamp(max=n),
    "pow": lambda x, n: x**n,
    "compare": lambda x, n: x >= n,
    "foreach": lambda x, n: torch._foreach_mul([x], n),
    "write": lambda x, n: x.clone().__setitem__(0, n),
    "write_by_index": lambda x, n: x.clone().__setitem__(x.long(), n),
    "host_indices": lambda x, n: x[torch.tensor([1, 0])],
    "host_mask": lambda x, n: x[torch.tensor([True, False])],
    "host_slice_write": lambda x, n: x.clone().__setitem__(slice(0, 2), torch.zeros(2)),
    "xor": lambda x, n: x.long() ^ n.long(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_lets_meet_may_meet(name: str) -> None:
    x, number = torch.tensor([0.0, 1.0]), torch.tensor(2.0)
    result = ALLOWED[name](x.to(SIM1), number)
    torch.testing.assert_close(on_host(result), ALLOWED[name](x, number))
    assert devices(result) <= {"sim:1"}


def test_numbers_are_not_written_to_and_not_indices() -> None:
    x, number = torch.ones(2, device=SIM0), torch.tensor(0.0)
    for refused in (
        lambda: number.add_(x.sum()),
        lambda: x.index_select(0, number.long()),
        lambda: torch.ones(2) + x[0],  # only CPU numbers are free to move
        lambda: x + x.to(SIM1)[0],
        lambda: torch.ones(2)[x.long()],
    ):
        with pytest.raises(SimDeviceMismatchError):
            refused()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_products_of_integer_matrices_are_refused_as_on_cuda(dtype: torch.dtype) -> None:
    a, b = torch.ones(2, 3, dtype=dtype, device="sim:1"), torch.ones(3, 2, dtype=dtype, device="sim:1")
    for product in (lambda: a @ b, lambda: a @ b[:, 0], lambda: a[0] @ b[:, 0], lambda: a.expand(4, 2, 3) @ b):
        with pytest.raises(NotImplementedError, match=r"CUDA cannot multiply matrices of torch\.u?int"):
            product()
    assert (a.unsqueeze(-1) * b).sum(-2).tolist() == [[3, 3], [3, 3]]  # what the message says
    assert (a.double() @ b.double()).tolist() == [[3, 3], [3, 3]]


def test_a_mixture_names_file_and_line_of_the_callers_code() -> None:
    x = torch.ones(2, 2, device=SIM0, requires_grad=True)
    backward = _AddsHostTensor.backward.__code__
    mixtures: list[tuple[Callable[[], object], int]] = [
        (lambda: x + torch.ones(2), 0),
        (lambda: nn.Linear(2, 2)(x), 0),  # the line that calls the module, not a line of torch
        (lambda: torch.randn(2, device=SIM0, generator=torch.Generator()), 0),
        (lambda: x.long() @ x.long(), 0),
        (lambda: _AddsHostTensor.apply(x).sum().backward(), backward.co_firstlineno + 2),
    ]
    for mixture, line in mixtures:
        with pytest.raises((SimDeviceMismatchError, NotImplementedError)) as caught:
            mixture()
        assert str(caught.value).startswith(f"{__file__}:{line or mixture.__code__.co_firstlineno}: torch.")


class _AddsHostTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + torch.ones(2)


def test_a_wait_in_backward_names_the_line_that_calls_it() -> None:
    x = torch.ones(2, device=SIM0, requires_grad=True)
    loss = x[torch.tensor([True, False], device=SIM0)].sum()
    with pytest.raises(HostSyncError, match=r"test_sim_device\.py:\d+: indexing by a boolean mask"), forbid_host_sync():
        loss.backward()


def test_what_a_hook_raises_leaves_backward() -> None:  # and does not end the process
    def stop(gradient: Tensor) -> None:
        raise KeyError("no gradient wanted")

    for hooked in (lambda x: x, lambda x: x * 2):
        x = torch.ones(2, device=SIM0, requires_grad=True)
        y = hooked(x)
        y.register_hook(stop)
        for run in (y.sum().backward, lambda: torch.autograd.grad((y * 3).sum(), x)):  # noqa: B023
            with pytest.raises(KeyError, match="no gradient wanted"):
                run()


DRAWS: dict[str, Callable[[torch.device, torch.Generator], Tensor]] = {
    "randn": lambda d, g: torch.randn(2, device=d, generator=g),
    "randperm": lambda d, g: torch.randperm(4, device=d, generator=g),
    "normal_": lambda d, g: torch.zeros(2, device=d).normal_(generator=g),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((4,), 0.5, device=d), generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.ones(4, device=d), 1, generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_draws_for_its_device_only(name: str) -> None:
    generator = torch.Generator("sim:1").manual_seed(3)
    expected = DRAWS[name](torch.device("cpu"), torch.Generator().manual_seed(3))
    drawn = DRAWS[name](SIM1, generator)
    assert (drawn.device, generator.device) == (SIM1, SIM1)
    torch.testing.assert_close(drawn.cpu(), expected, rtol=0, atol=0)
    for other, home in ((torch.Generator(), "cpu"), (torch.Generator("sim"), "sim:0")):
        with pytest.raises(SimDeviceMismatchError, match=f"generator is on {home}, the tensor on sim:1"):
            DRAWS[name](SIM1, other)


def test_generators_stay_generators() -> None:
    generator = torch.Generator(device="sim:1")
    generator.manual_seed(5)
    expected = torch.rand(3, device=SIM1, generator=generator.clone_state())
    twins = copy.deepcopy(generator), pickle.loads(pickle.dumps(generator)), generator
    for twin in twins:
        assert isinstance(twin, torch.Generator)
        assert twin.device == SIM1
        assert torch.equal(torch.rand(3, device=SIM1, generator=twin), expected)
    assert isinstance(torch.default_generator, torch.Generator)
    assert issubclass(type(torch.Generator()), torch.Generator)
    assert torch.Generator().device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="sim:9 does not exist"):
        torch.Generator("sim:9")


def test_fork_rng_restores_the_draws() -> None:
    torch.manual_seed(1)
    with torch.random.fork_rng(devices=[1], device_type="sim"):
        inside = torch.rand(4, device=SIM1)
    assert torch.equal(torch.rand(4, device=SIM1), inside)


def test_checkpointed_activations_draw_the_same_again() -> None:
    x = torch.ones(1000, device=SIM1, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x * 2), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())  # y = x * (0 or 4), x = 1


AUTOCAST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype | None]] = {  # None: the low precision
    "linear": (lambda x, w: F.linear(x, w), None),
    "matmul": (lambda x, w: x @ w, None),
    "conv": (lambda x, w: F.conv1d(x[None].mT, w[:, :, None]), None),
    "lstm": (lambda x, w: nn.LSTM(3, 5).to(SIM1)(x[None])[0], None),
    "exp": (lambda x, w: x.to(torch.bfloat16).exp(), torch.float32),
    "log_softmax": (lambda x, w: F.log_softmax(x @ w, -1), torch.float32),
    "sum": (lambda x, w: (x @ w).sum(), torch.float32),
    "mse_loss": (lambda x, w: F.mse_loss(x @ w, x), torch.float32),
    "stack": (lambda x, w: torch.stack([x @ w, x]), torch.float32),
    "relu": (lambda x, w: F.relu(x @ w), None),
    "double": (lambda x, w: x.double().exp(), torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_casts_as_on_cuda(name: str, dtype: torch.dtype) -> None:
    work, wanted = AUTOCAST[name]
    x, w = torch.ones(4, 3, device=SIM1), torch.eye(3, device=SIM1).requires_grad_()
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), torch.autocast("sim", dtype=dtype):
            assert work(x, w).dtype == (wanted or dtype)
    assert work(x, w).dtype in (torch.float32, torch.bfloat16, torch.float64)  # outside nothing is cast


def test_gradients_pass_through_autocast_and_mixtures_are_still_refused() -> None:
    x, w = torch.full((4, 3), 2.0, device=SIM1), torch.ones(5, 3, device=SIM1, requires_grad=True)
    with torch.autocast("sim"):
        loss = F.linear(x, w).sum()
        with pytest.raises(SimDeviceMismatchError, match=r"test_sim_device\.py:\d+: torch\.mm: "):
            F.linear(x, torch.ones(5, 3))
    torch.amp.GradScaler("sim", init_scale=8.0).scale(loss).backward()
    assert w.grad is not None
    assert (w.grad.dtype, w.grad.tolist()) == (torch.float32, [[64.0] * 3] * 5)  # 8 * 4 rows * 2


# --- random programs against the CPU ---------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "affine": lambda x: x * 2 - 1,
    "flip": lambda x: x.flip(0),
    "transpose": lambda x: x.transpose(0, 1),
    "stack": lambda x: torch.stack([x, -x], 1).flatten(0, 1),
    "cat": lambda x: torch.cat([x, x.new_ones(1, x.shape[1])]),
    "slice": lambda x: x[: max(1, x.shape[0] - 1)],
    "step": lambda x: x[::2],
    "where": lambda x: torch.where(x > 0, x, x.cos()),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(1).values,
    "gather": lambda x: x.gather(0, x.argmin(0, keepdim=True).expand(2, -1)),
    "index_select": lambda x: x.index_select(1, torch.arange(x.shape[1], device=x.device).roll(1)),
    "mask": lambda x: x.masked_fill(x > 1, 0.5),
    "softmax": lambda x: x.softmax(1),
    "bits": lambda x: ((x.clamp(-9, 9) * 100).long() ^ 0x5DEECE66D).remainder(7).float(),
    "shift": lambda x: ((x.clamp(-9, 9) * 64).long() >> 2 << 1).float(),
    "matmul": lambda x: x @ x.T / x.shape[1],
    "scatter": lambda x: torch.zeros_like(x).scatter_(0, x.argmax(0, keepdim=True), 1.0) + x,
    "write": lambda x: x.clone().index_put_((x[:, 0] > 0,), x.new_zeros(())),
    "noise": lambda x: x + torch.rand_like(x),
    "fill_row": lambda x: (y := x.clone())[0].fill_(3.0).new_zeros(()) + y,
    "add_to_column": lambda x: (y := x.clone())[:, -1].add_(1).sum() * 0 + y,
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=8), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_a_random_program_gives_what_the_cpu_gives(names: list[str], rows: int, columns: int, seed: int) -> None:
    results = []
    for device in ("cpu", "sim:1"):
        torch.manual_seed(seed)
        x = torch.randn(rows, columns).to(device)
        for name in names:
            x = STEPS[name](x)
        assert x.device == torch.device(device)
        results.append(x.cpu())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


# --- modules, gradients, optimisers ----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Convolution, embedding, LSTM, GRU cell, norms and attention in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3)
        self.embedding = nn.Embedding(5, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(8, 8)
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, frame: Tensor, word: Tensor) -> Tensor:
        seen = F.max_pool2d(self.convolution(frame).relu(), 2).flatten(1)  # [B, 8]
        steps, _ = self.lstm(self.embedding(word) + seen[:, None])  # [B, T, 8]
        steps = steps + self.attention(steps, steps, steps)[0]
        return self.head(self.batch_norm(self.norm(self.cell(steps[:, -1], seen))))  # [B, 3]


def train(device: str, optimiser: Callable[..., torch.optim.Optimizer], **options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = Mixed().double()  # Adam makes full steps of gradients that are rounding errors in float32
    inputs = torch.randn(4, 1, 6, 6).double().to(device), torch.randint(5, (4, 3)).to(device)
    label = torch.randint(3, (4,)).to(device)
    learner = optimiser(model.parameters(), lr=0.01, **options)  # before the move: it must keep its parameters
    model.to(device)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(*inputs), label)
        learner.zero_grad()
        loss.backward()
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        learner.step()
        losses.append(loss.detach())
    assert {tensor.device for tensor in [*losses, *model.parameters(), *model.buffers()]} == {torch.device(device)}
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_training_gives_the_same_numbers_as_on_the_cpu(
    optimiser: type[torch.optim.Optimizer], options: dict[str, bool]
) -> None:
    on_cpu, on_sim = train("cpu", optimiser, **options), train("sim:0", optimiser, **options)
    torch.testing.assert_close(on_host(on_sim), on_cpu, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("index", range(DEVICE_COUNT))
def test_forward_works_on_every_index(index: int) -> None:
    torch.manual_seed(0)
    model, frame, word = Mixed().eval(), torch.randn(2, 1, 6, 6), torch.randint(5, (2, 3))
    expected = model(frame, word).detach()
    device = f"sim:{index}"
    model.to(device)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(model(frame.to(device), word.to(device)).cpu(), expected)


def test_backward_runs_on_every_index_and_through_two_of_them() -> None:
    for finish in (lambda loss: loss, lambda loss: loss.cpu(), lambda loss: loss.to(SIM0)):
        x = torch.ones(2, device=SIM1, requires_grad=True)
        finish((x * x).sum()).backward()
        (gradient,) = torch.autograd.grad(finish((x * x * x).sum()), x)
        assert x.grad is not None
        assert x.grad.device == gradient.device == SIM1
        assert x.grad.tolist() == [2, 2]
        assert gradient.tolist() == [3, 3]


def test_backward_runs_in_the_thread_that_calls_it() -> None:
    x = torch.ones(3, device=SIM0, requires_grad=True)
    threads: list[int] = []
    x.register_hook(lambda _: threads.append(threading.get_ident()))
    (x * x).sum().backward()
    assert threads == [threading.get_ident()]  # another thread, still at work as Python ends, would abort the process


def test_gradients_cross_devices_and_views() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    moved = x.to(SIM0) * 1
    moved[0] *= 3
    moved[:, 1].zero_()
    moved.cpu().sum().backward()
    assert x.grad is not None
    assert (x.grad.device, x.grad.tolist()) == (torch.device("cpu"), [[3, 0], [1, 0]])


def test_autograd_notices_writes_to_what_it_saved() -> None:
    x = torch.ones(2, device=SIM0, requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    y[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_a_gradient_on_another_device_is_refused() -> None:
    x = torch.ones(2, device=SIM0, requires_grad=True)
    with pytest.raises(RuntimeError, match="device"):
        x.grad = torch.ones(2)


def test_moves_keep_parameters_tied_and_known() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    kept = first.weight
    for device in ("sim:0", "sim:1"):
        model.to(device)
        assert model[0].weight is model[1].weight is kept
        assert isinstance(kept, nn.Parameter)
        assert kept.device == torch.device(device)
    assert model.to("cpu")[0].weight.device == torch.device("cpu")


def test_weights_load_across_devices() -> None:
    source, target = nn.Linear(2, 3), nn.Linear(2, 3).to(SIM1)
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target.weight.cpu(), source.weight)
    nn.Linear(2, 3).load_state_dict(target.state_dict())
    assert target.weight.device == SIM1
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.zeros(9, device=SIM1), target.parameters())
    assert target(torch.ones(2, device=SIM1)).tolist() == [0, 0, 0]


def test_models_copy_and_pickle() -> None:
    model = nn.LSTM(2, 3).to(SIM1)
    x = torch.ones(1, 1, 2, device=SIM1)
    expected = model(x)[0].cpu()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x)[0].cpu(), expected)
        assert all(isinstance(p, nn.Parameter) and p.device == SIM1 and p.requires_grad for p in twin.parameters())
        with torch.no_grad():
            twin.weight_ih_l0.zero_()
    torch.testing.assert_close(model(x)[0].cpu(), expected)
    whole = torch.ones(4, device=SIM1)
    twins = copy.deepcopy({"whole": whole, "part": whole[:2]})
    twins["whole"].zero_()
    assert twins["part"].tolist() == [0.0, 0.0]  # it is a view of the copy, as on CUDA
    assert whole.tolist() == [1.0] * 4
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["x"].device == SIM1


def test_packed_sequences_match_the_cpu() -> None:
    torch.manual_seed(0)
    model, x, lengths = nn.GRU(2, 3, batch_first=True), torch.randn(2, 4, 2), torch.tensor([4, 2])
    results = []
    for device in ("cpu", "sim:0"):
        packed = nn.utils.rnn.pack_padded_sequence(x.to(device), lengths, batch_first=True)
        padded, _ = nn.utils.rnn.pad_packed_sequence(model.to(device)(packed)[0], batch_first=True)
        padded.sum().backward()
        results.append(padded.cpu())
    torch.testing.assert_close(results[1], results[0])


DISTRIBUTIONS: dict[str, Callable[[Tensor], torch.distributions.Distribution]] = {
    "categorical": lambda x: torch.distributions.Categorical(logits=x),
    "bernoulli": lambda x: torch.distributions.Bernoulli(logits=x),
    "normal": lambda x: torch.distributions.Independent(torch.distributions.Normal(x, x.exp()), 1),
    "beta": lambda x: torch.distributions.Beta(x.exp(), x.exp()),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_draw_what_the_cpu_draws(name: str) -> None:
    results = []
    for device in (torch.device("cpu"), SIM1):
        torch.manual_seed(0)
        distribution = DISTRIBUTIONS[name](torch.tensor([[0.1, 0.5], [-0.3, 0.2]], device=device))
        sample = distribution.sample()
        result = [sample, distribution.log_prob(sample), distribution.entropy()]
        assert devices(result) == {str(device)}
        results.append(on_host(result))
    torch.testing.assert_close(results[1], results[0])


def test_a_process_that_works_on_cuda_is_refused() -> None:
    code = "import torch; torch.cuda.is_initialized = lambda: True; import rlstruct.testing.sim_device"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "got a process that works on CUDA already, expected one that does not" in run.stderr


# --- other processes -------------------------------------------------------------------------------------------------


def _work(queue: multiprocessing.Queue[object]) -> None:
    import rlstruct.testing.sim_device  # noqa: F401  (what a worker does)

    x = torch.arange(3.0, device="sim:1")
    queue.put((str(x.device), (x * 2).tolist(), pickle.dumps(x)))


@pytest.mark.slow
def test_works_in_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_work, args=(queue,))
    process.start()
    device, values, pickled = queue.get(timeout=60)
    process.join(timeout=60)
    assert (device, values, process.exitcode) == ("sim:1", [0, 2, 4], 0)
    assert pickle.loads(pickled).device == SIM1
