"""Sums through shared memory are the same bits in all learners, and nobody waits for one who never comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked_learners import fork_learners
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlstruct.algos import shared_sum
from rlstruct.algos.process_group import Group
from rlstruct.algos.shared_sum import ORDERED, SharedSum
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.errors import LearnerError

pytestmark = pytest.mark.skipif(not ORDERED, reason="memory is shared on Linux on x86-64")

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16)


def refuse(waited: float) -> None:
    raise LearnerError(f"nobody came for {waited:.1f} s")


def no_gpu(n_bytes: int) -> Tensor:
    raise AssertionError(f"{n_bytes} bytes on a GPU")


def in_threads(size: int, do: Callable[[SharedSum, int], Any]) -> list[Any]:
    """Let learners that are threads of this process do something together, and return what each found."""
    block, found = SharedBlock(), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = do(SharedSum(rank, size, block, refuse, no_gpu), rank)
        except LearnerError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.integers(0, 2**31),
)
def test_all_find_the_sum_in_the_order_of_the_ranks(size: int, sums: list[tuple[int, torch.dtype]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    passed = [[(8 * torch.randn(n, 2, generator=generator)).abs().to(dtype) for n, dtype in sums] for _ in range(size)]
    found = in_threads(size, lambda one, rank: [one.add_up(x) for x in passed[rank]])
    for i in range(len(sums)):
        expected = passed[0][i].clone()
        for rank in range(1, size):
            expected = expected + passed[rank][i]
        for rank in range(size):
            assert torch.equal(found[rank][i], expected)


def test_who_adds_up_something_else_is_told() -> None:
    found = in_threads(2, lambda one, rank: one.add_up(torch.ones(2 + rank)))
    assert "this learner adds up 8 bytes, another one 12, expected the same" in str(found[0])
    assert "this learner adds up 12 bytes, another one 8" in str(found[1])


def test_others_are_looked_after_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sum, "_LOOK_SECONDS", 0.01)
    alone = SharedSum(0, 2, SharedBlock(), refuse, no_gpu)
    with pytest.raises(LearnerError, match=r"nobody came for 0\.0 s"):
        alone.add_up(torch.ones(2))


def sums_of(group: Group) -> dict[str, Any]:
    x = torch.arange(5.0) + 10**group.rank
    first = group.from_first({"weights": torch.ones(3)} if group.rank == 0 else None)
    return {
        "sums": [group.add_up(x), group.add_up(x.to(torch.int64))],
        "first": first["weights"],
        "none": group.from_first(None),
        "gathered": group.gather({"own": group.rank, "model": 0}).get("others"),
        "memory": group._memory is not None,
    }


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "a"]])
def test_learners_of_several_machines_add_up_first_on_each(hosts: list[str]) -> None:
    x = sum(torch.arange(5.0) + 10**rank for rank in range(len(hosts)))
    found = fork_learners(hosts, sums_of)
    for rank, one in enumerate(found):
        assert torch.equal(one["sums"][0], x)
        assert torch.equal(one["sums"][1], x.to(torch.int64))
        assert torch.equal(one["first"], torch.ones(3))
        assert one["none"] is None
        assert one["gathered"] == ([{"own": other} for other in range(1, len(hosts))] if rank == 0 else None)
        assert one["memory"] == (len(set(hosts)) < len(hosts))


def sums_on_gpu(group: Group) -> list[Tensor]:
    sizes = (3, 70_000, 5, 1_000_000, 2)
    found = [group.add_up(torch.full((n,), 1.5 + group.rank, device="cuda:0")) for n in sizes]
    assert all(one.is_cuda for one in found)
    return [one.cpu() for one in found]


@pytest.mark.gpu
def test_learners_that_share_a_gpu_add_up_in_its_memory() -> None:
    for found in fork_learners(["a", "a"], sums_on_gpu, device="cuda:0"):
        assert [len(one) for one in found] == [3, 70_000, 5, 1_000_000, 2]
        assert all(one.eq(4.0).all() for one in found)
