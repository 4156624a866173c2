"""CPU tensors travel to CUDA in one block: the same values, strides and shared memory, one copy, no wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlstruct import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core import transfer
from rlstruct.testing import forbid_host_sync


def batch() -> Trajectories:
    """Two environments, four steps, as a batcher hands them over: time first in memory, frames kept once."""
    frames = torch.arange(5 * 2 * 3.0).view(5, 2, 3)  # [T + 1, B, 3]
    steps = {
        "observation/frame": frames[:4].transpose(0, 1),
        "_observation/frame": frames[1:].transpose(0, 1),
        "_observation/terminated": torch.tensor([[True, False, True, False]] * 2),
        "action/action": torch.arange(8).view(4, 2).transpose(0, 1),
        "action/logits": torch.randn(2, 4, 2).to(torch.bfloat16),
    }
    info = DictTensor({"policy_version": torch.tensor([3]).expand(2), "seed": torch.arange(9)[4:6]})
    return Trajectories(info, TemporalDictTensor(steps, torch.tensor([4, 2])))


def all_of(trajectories: Trajectories) -> list[Tensor]:
    steps = trajectories.steps
    return [*trajectories.info.values(), *steps.values(), steps.lengths]


def test_a_block_holds_every_value_with_its_strides_and_what_is_shared_once() -> None:
    wide = torch.arange(40.0).view(4, 10)
    tensors = [*all_of(batch()), wide[:, :2], torch.empty(0, 3), torch.tensor(7), torch.ones(2, dtype=torch.complex128)]
    packed = transfer.pack(tensors, pin=False)
    moved = packed.unpack(packed.block.clone())
    for before, after in zip(tensors, moved, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
    observed, reached = moved[2], moved[3]
    assert observed[:, 1].data_ptr() == reached[:, 0].data_ptr()
    assert observed.stride() == tensors[2].stride()
    # Frames once (120 bytes), not twice; of the wide tensor the two columns (32 bytes), not the memory between them.
    assert 120 + 32 < len(packed.block) < 120 + 32 + 16 * len(tensors) + 100


def test_arrays_that_begin_at_one_address_keep_their_sizes() -> None:
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    tensors = [torch.from_numpy(array[:, 0]), torch.from_numpy(array)]  # the memory of the first is shorter
    packed = transfer.pack(tensors, pin=False)
    column, all_columns = packed.unpack(packed.block.clone())
    assert column.tolist() == array[:, 0].tolist()
    assert all_columns.tolist() == array.tolist()


def test_the_block_is_filled_when_packing_returns() -> None:
    source = torch.ones(4)
    packed = transfer.pack([source], pin=False)
    source.zero_()
    assert packed.unpack(packed.block)[0].tolist() == [1.0] * 4


def test_what_needs_gradients_is_moved_by_itself() -> None:
    plain, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    assert transfer.can_stage(plain)
    assert not transfer.can_stage(weight)
    assert not transfer.can_stage(torch.nn.Parameter(torch.ones(2)))
    assert not transfer.can_stage(torch.ones(2, dtype=torch.complex64).conj())


class Copies(TorchDispatchMode):
    """Counts copies from the CPU to CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        self.n += copies and result.is_cuda and any(tensor.is_cpu for tensor in tensors)
        return result


@pytest.mark.gpu
def test_a_batch_reaches_a_cuda_learner_in_one_copy_without_a_wait() -> None:
    here = batch()
    expected = here.clone()
    here.to("cuda:0")  # the first time CUDA starts and pinned memory is allocated
    with forbid_host_sync(), Copies() as copies:
        there = here.to("cuda:0")
        for tensor in all_of(here):
            tensor.copy_(torch.zeros_like(tensor)) if tensor.stride()[0] else None
    assert copies.n == 1
    assert {str(tensor.device) for tensor in all_of(there)} == {"cuda:0"}
    for before, after in zip(all_of(expected), all_of(there), strict=True):
        assert torch.equal(after.cpu(), before)


@pytest.mark.gpu
def test_gradients_flow_through_a_copy_to_the_device() -> None:
    weight = torch.ones(2, requires_grad=True)
    moved = DictTensor({"weight": weight, "plain": torch.ones(2)}).to("cuda:0")
    (moved["weight"] * moved["plain"]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
