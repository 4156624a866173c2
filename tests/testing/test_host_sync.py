"""The guard raises at every call that waits for the device, names it, and lets clean code pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlstruct.testing import HostSyncError, allow_host_sync, count_host_syncs, forbid_host_sync

Call = Callable[[Tensor], object]

SYNCING: dict[str, Call] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": lambda x: torch.nonzero(x),
    "argwhere": lambda x: torch.argwhere(x),
    "where_one_argument": lambda x: torch.where(x > 1),
    "bool": lambda x: bool((x > 1).any()),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "index": lambda x: [1, 2, 3][x.long()[0]],
    "range": lambda x: range(x.long()[0]),
    "contains": lambda x: 1.0 in x,
    "mask_read": lambda x: x[x > 1],
    "mask_in_a_tuple": lambda x: x.view(2, 2)[(x > 1)[:2], 0],
    "mask_write_of_a_tensor": lambda x: x.__setitem__(x > 1, x.new_zeros(())),
    "index_by_device_scalar": lambda x: x[x.long()[0]],
    "index_write_of_a_number": lambda x: x.__setitem__(torch.zeros_like(x, dtype=torch.int64), 0.0),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
    "multinomial": lambda x: torch.multinomial(x + 1, 1),
    "normal": lambda x: torch.normal(x, x + 1),
    "histc": lambda x: torch.histc(x, 4),
    "mode": lambda x: x.mode(),
    "cholesky": lambda x: torch.linalg.cholesky(torch.eye(4, device=x.device)),
    "inverse": lambda x: torch.linalg.inv(torch.eye(4, device=x.device)),
    "print": lambda x: repr(x),
    "format": lambda x: f"{x.sum():.2f}",
    "distribution_validation": lambda x: torch.distributions.Categorical(logits=x),
    "clip_grad_norm": lambda x: torch.nn.utils.get_total_norm([x], error_if_nonfinite=True),
}

CLEAN: dict[str, Call] = {
    "arithmetic": lambda x: (x * 2 + 1).pow(2).sum() / 3,
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "gather": lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.int64)),
    "index_select": lambda x: x.index_select(0, torch.zeros_like(x, dtype=torch.int64)),
    "index_by_int64": lambda x: x[torch.zeros_like(x, dtype=torch.int64)],
    "index_by_number_and_slice": lambda x: (x[0], x[1:], x[None], x[-1]),
    "write_by_slice": lambda x: x.__setitem__(slice(1, 3), 7.0),
    "write_by_int64": lambda x: x.__setitem__(torch.zeros_like(x, dtype=torch.int64), x.clone()),
    "mask_write_of_a_number": lambda x: x.__setitem__(x > 1, 0.0),
    "index_fill": lambda x: x.index_fill_(0, torch.zeros_like(x, dtype=torch.int64), 0.0),
    "masked_fill": lambda x: x.masked_fill_(x > 1, 0.0),
    "scatter": lambda x: x.scatter_add_(0, torch.zeros_like(x, dtype=torch.int64), x.clone()),
    "clamp_softmax": lambda x: x.clamp(0, 1).softmax(0).log().cumsum(0),
    "factories": lambda x: (x.new_zeros(2), torch.arange(3, device=x.device), torch.rand_like(x)),
    "stack_cat": lambda x: torch.cat([torch.stack([x, x]).view(-1), x]),
    "to_dtype": lambda x: x.to(torch.int64).to(x.device),
    "copy_same_device": lambda x: x.clone().copy_(x),
    "matmul": lambda x: x @ x,
    "shape": lambda x: (x.shape, x.numel(), len(x), x.dim(), x.device, x.is_contiguous()),
    "foreach": lambda x: torch._foreach_add([x], [x]),
    "distribution": lambda x: torch.distributions.Categorical(logits=x, validate_args=False).log_prob(x.long() % 2),
    "rsample": lambda x: torch.distributions.Normal(x, x + 1, validate_args=False).rsample(),
}


@pytest.fixture(params=["cpu", "sim:0"])
def x(request: pytest.FixtureRequest) -> Tensor:
    return torch.arange(4.0, device=request.param)


@pytest.fixture(params=[torch.enable_grad, torch.inference_mode])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("name", SYNCING)
def test_a_waiting_call_raises_and_names_this_file(name: str, x: Tensor) -> None:
    call = SYNCING[name]
    call(x.clone())  # outside it works
    with (
        pytest.raises(HostSyncError, match=rf"test_host_sync\.py:{call.__code__.co_firstlineno}: "),
        forbid_host_sync(),
    ):
        call(x)


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("name", CLEAN)
def test_clean_code_passes(name: str, x: Tensor) -> None:
    with forbid_host_sync():
        CLEAN[name](x)


def test_numpy_raises() -> None:
    with pytest.raises(HostSyncError, match=r"numpy\(\) makes the host wait"), forbid_host_sync():
        torch.zeros(1).numpy()


def test_the_message_says_call_and_mend(x: Tensor) -> None:
    message = r"item\(\) makes the host wait for the device.*allow_host_sync"
    with pytest.raises(HostSyncError, match=message), forbid_host_sync():
        x.sum().item()
    with pytest.raises(HostSyncError, match=r"boolean mask.*torch\.where"), forbid_host_sync():
        x[x > 1]


CROSSING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "to_cpu": lambda on_cpu, on_sim: on_sim.to("cpu"),
    "to_cpu_without_blocking": lambda on_cpu, on_sim: on_sim.to("cpu", non_blocking=True),
    "to_device": lambda on_cpu, on_sim: on_cpu.to("sim:0"),
    "to_other": lambda on_cpu, on_sim: on_sim.to(on_cpu),
    "copy_": lambda on_cpu, on_sim: on_cpu.copy_(on_sim),
    "write": lambda on_cpu, on_sim: on_sim.__setitem__(0, on_cpu[0]),
    "tensor": lambda on_cpu, on_sim: torch.tensor([1.0], device="sim:0"),
    "as_tensor": lambda on_cpu, on_sim: torch.as_tensor(on_cpu, device="sim:0"),
    "host_indices": lambda on_cpu, on_sim: on_sim[on_cpu.long()],
    "list_of_indices": lambda on_cpu, on_sim: on_sim[[0, 1]],
}


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("name", CROSSING)
def test_a_copy_between_devices_raises(name: str) -> None:
    on_cpu, on_sim = torch.ones(4), torch.ones(4, device="sim:0")
    CROSSING[name](on_cpu, on_sim)
    with pytest.raises(HostSyncError, match=r"cpu|host data|by a list"), forbid_host_sync():
        CROSSING[name](on_cpu, on_sim)


def test_copies_that_do_not_wait_pass() -> None:
    on_cpu, on_sim = torch.ones(4), torch.ones(4, device="sim:0")
    with forbid_host_sync():
        on_cpu.to("cpu")
        on_sim.to("sim:0")
        on_sim.to("sim:1")
        on_sim.copy_(on_cpu, non_blocking=True)
        on_cpu.to("sim:0", non_blocking=True)


def test_a_wait_inside_backward_raises() -> None:
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * grad.sum().item()

    x = torch.ones(2, device="sim:0", requires_grad=True)
    with pytest.raises(HostSyncError, match="item"), forbid_host_sync():
        Peek.apply(x).sum().backward()
    with forbid_host_sync():
        (x * x).sum().backward()


def test_allow_lets_intended_waits_pass_and_ends(x: Tensor) -> None:
    with forbid_host_sync():
        with allow_host_sync():
            assert x.sum().item() == 6
            assert x[x > 1].numel() == 2
        with pytest.raises(HostSyncError):
            x.sum().item()
    with allow_host_sync():  # outside a guard it does nothing
        assert x.sum().item() == 6


def test_the_guard_ends_with_its_block(x: Tensor) -> None:
    with pytest.raises(ZeroDivisionError), forbid_host_sync():
        1 / 0  # noqa: B018
    assert x.sum().item() == 6
    with forbid_host_sync(), forbid_host_sync(), allow_host_sync():
        assert x.sum().item() == 6


def test_count_sees_each_wait_once_and_lets_it_happen(x: Tensor) -> None:
    with count_host_syncs() as found:
        assert x.sum().item() == 6  # 1
        assert x.tolist() == [0, 1, 2, 3]  # 2
        assert x[x > 1].numel() == 2  # 3
        torch.where(x > 1, x, 0.0)
        with allow_host_sync():
            x.sum().item()
    x.sum().item()
    assert found.count == 3
    assert [call.partition(": ")[2] for call in found.calls] == ["item()", "tolist()", "indexing by a boolean mask"]
    assert all("test_host_sync.py:" in call for call in found.calls)


def test_cuda_alarm_becomes_the_same_error_with_its_line() -> None:
    alarm = "called a synchronizing CUDA operation"  # what torch says
    with pytest.raises(HostSyncError, match=rf"test_host_sync\.py:\d+: {alarm}"), forbid_host_sync():
        raise RuntimeError(alarm)
    with pytest.raises(RuntimeError, match="other"), forbid_host_sync():
        raise RuntimeError("other")


def test_cuda_is_told_to_raise_and_its_prototype_warning_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]

    def set_mode(mode: str | int) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with forbid_host_sync():
            assert modes[-1] == "error"
            monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)  # it says so once only
            with allow_host_sync():
                assert modes[-1] == "default"
            assert modes[-1] == "error"
    assert modes[-1] == 0


@pytest.mark.gpu
def test_cuda_waits_raise_and_the_alarm_is_restored() -> None:
    x = torch.ones(4, device="cuda:0")
    before = torch.cuda.get_sync_debug_mode()
    with forbid_host_sync():
        x[x > 1] = 0.0
        (x * 2).sum()
    for wait in (SYNCING["item"], SYNCING["index_write_of_a_number"]):
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            wait(x)
        torch.cuda.set_sync_debug_mode(before)
        with pytest.raises(HostSyncError), forbid_host_sync():
            wait(x)
    assert torch.cuda.get_sync_debug_mode() == before


def test_pages_recommend_what_works_outside_of_this_repository() -> None:
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")
    assert [page.name for page in pages if "# sync:" in page.read_text()] == []  # a comment that only our tests read
