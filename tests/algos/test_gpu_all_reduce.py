"""Sums within each GPU and then across GPUs are the flat sums: in forked processes, with gloo in place of NCCL."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_learners import fork_learners

from rlstruct.algos.distributed.gpu_all_reduce import GpuAllReduce, by_gpu
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup
from rlstruct.errors import LearnerError


def learner(gpu: str, bus: str, device: str = "cuda:0", host: str = "a") -> dict[str, Any]:
    return {"host": host, "gpu": gpu, "bus": bus, "device": device}


ONE, TWO = learner("u1", "1"), learner("u2", "2")


@pytest.mark.parametrize(
    ("facts", "groups"),
    [
        ([ONE, ONE], [[0, 1]]),
        ([ONE, TWO, ONE, TWO], [[0, 2], [1, 3]]),
        ([ONE, ONE, TWO], [[0, 1], [2]]),
        ([ONE, learner("u1", "1", host="b"), ONE], [[0, 2], [1]]),
        ([learner("MIG-1", "1"), learner("MIG-1", "1")], [[0, 1]]),
        ([ONE, TWO], [[0], [1]]),  # NCCL alone
        ([learner("MIG-1", "1"), learner("MIG-2", "1"), learner("MIG-1", "1")], []),  # NCCL refuses parts of one GPU
        ([ONE, learner("u1", "1", "cuda:1"), ONE], []),  # other numbers of one GPU: its memory is not found
        ([{"host": "a", "device": "cpu"}] * 2, []),
    ],
)
def test_learners_meet_on_their_gpu_where_memory_and_nccl_allow(
    facts: list[dict[str, Any]], groups: list[list[int]]
) -> None:
    assert by_gpu(facts) == groups


def sum_in_two_phases(group: DistributedLearnerGroup) -> dict[str, Any]:
    """Return sums and flat sums of growing sizes, and the calls that one sum takes."""
    sums = GpuAllReduce(group.rank, by_gpu(group.facts), group.store, group.poll, across="gloo")
    generator = torch.Generator().manual_seed(group.rank)
    found = []
    for n in (1, 7, 1000, 40, 5000):
        x = torch.randn(n, 2, generator=generator)
        x[0, 0] = float(10 ** (4 * group.rank % 7))  # rounding depends on the order
        found.append((sums.all_reduce_sum(x), group.all_reduce_sum(x), x))
        sums.all_reduce_sum(torch.full_like(x, math.nan))  # the next sum must not read what is left in the memory
    whole = torch.arange(3) + group.rank
    found.append((sums.all_reduce_sum(whole), group.all_reduce_sum(whole), whole))

    calls, all_reduce = [], dist.all_reduce

    def noted(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        calls.append((dist.get_process_group_ranks(group), tensor.numel()))
        return all_reduce(tensor, group=group, async_op=async_op)

    dist.all_reduce = noted  # type: ignore[assignment]
    sums.all_reduce_sum(torch.ones(30))
    dist.all_reduce = all_reduce
    try:
        sums.all_reduce_sum(torch.ones(1).expand(10**15))  # 4 PB
    except LearnerError as error:
        refused = str(error)
    return {"sums": found, "calls": calls, "refused": refused}


@pytest.mark.slow
def test_sums_within_gpus_and_then_across_are_the_flat_sums() -> None:
    learners = fork_learners(["a"] * 5, sum_in_two_phases, gpus=["u1", "u2", "u1", "u2", "u1"])
    for all_found in zip(*(one["sums"] for one in learners), strict=True):
        xs = [x for *_, x in all_found]
        ordered = (xs[0] + xs[2] + xs[4]) + (xs[1] + xs[3])
        for total, flat, x in all_found:
            assert total.shape == x.shape
            assert total.dtype == x.dtype
            assert torch.equal(total, all_found[0][0])  # bit by bit
            torch.testing.assert_close(total, flat, rtol=1e-6, atol=1e-2)
        torch.testing.assert_close(all_found[0][0], ordered, rtol=1e-7, atol=0)
    near, far = {0: [0, 2, 4], 1: [1, 3]}, ([0, 1], 30)
    for rank, one in enumerate(learners):
        meeting = (near[rank % 2], 1)
        assert one["calls"] == [meeting, *([far] if rank < 2 else []), meeting]


def lose_the_other_gpu(group: DistributedLearnerGroup) -> tuple[str, int]:
    """Return the error of a sum whose other GPU loses its learner, and how often the sum across GPUs was aborted."""
    made, new_group = [], dist.new_group
    dist.new_group = lambda *args, **settings: made.append(new_group(*args, **settings)) or made[-1]  # type: ignore[func-returns-value]
    sums = GpuAllReduce(group.rank, by_gpu(group.facts), group.store, group.poll, across="gloo")
    sums.all_reduce_sum(torch.ones(1))
    across = made[-1]
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    aborted: list[object] = []
    type(across).abort = lambda self: aborted.append(self)  # type: ignore[method-assign, assignment]
    with pytest.raises(LearnerError) as error:
        sums.all_reduce_sum(torch.ones(1))
    return str(error.value), len([group for group in aborted if group is across])


@pytest.mark.slow
def test_a_sum_across_gpus_is_aborted_when_a_learner_is_lost() -> None:
    ((text, n_aborted),) = fork_learners(["a", "a"], lose_the_other_gpu, gpus=["u1", "u2"], dying=[1])
    assert "learner 1 (pid " in text
    assert text.endswith(" on a) has died.")
    assert n_aborted == 1


def sum_on_a_gpu(group: DistributedLearnerGroup) -> tuple[bool, list[tuple[torch.Tensor, torch.Tensor]]]:
    found, sizes, all_reduce_sum = [], [], GpuAllReduce.all_reduce_sum

    def noted(self: GpuAllReduce, x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return all_reduce_sum(self, x)

    GpuAllReduce.all_reduce_sum = noted  # type: ignore[method-assign]
    for n in (3, 100_000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(group.rank))
        found.append((group.all_reduce_sum(x.to(group.facts[group.rank]["device"])).cpu(), group.all_reduce_sum(x)))
    return sizes == [3, 100_000], found


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 3])
def test_learners_on_one_gpu_add_up_in_its_memory(n: int) -> None:
    for through_memory, found in fork_learners(["a"] * n, sum_on_a_gpu, "cuda:0"):
        assert through_memory
        for total, flat in found:
            torch.testing.assert_close(total, flat, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_learners_on_each_gpu_add_up_within_and_then_across() -> None:
    for through_memory, found in fork_learners(["a"] * 2 * torch.cuda.device_count(), sum_on_a_gpu, "cuda"):
        assert through_memory
        for total, flat in found:
            torch.testing.assert_close(total, flat, rtol=1e-6, atol=1e-6)
