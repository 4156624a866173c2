"""All-reduce for learners that share GPUs: first within each GPU, then across GPUs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rlstruct.algos.distributed.peers import ANSWER_SECONDS
from rlstruct.errors import LearnerError

_ALIGNED = 64  # bytes; every dtype may start at such an offset


def by_gpu(facts: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the ranks on each GPU; [] if a learner has no GPU, or sums cannot use GPU memory.

    Learners can open each other's memory on one GPU or MIG instance, if it has the same device number in all of them.
    The first learners of all GPUs are connected by NCCL, which needs a different GPU for each, not parts of one.

    >>> gpu = {"host": "a", "gpu": "u1", "bus": "1", "device": "cuda:0"}
    >>> by_gpu([gpu, {**gpu, "gpu": "u2", "bus": "2"}, gpu])
    [[0, 2], [1]]
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, one in enumerate(facts):
        groups.setdefault((one["host"], one.get("gpu"), one["device"]), []).append(rank)
    buses = {(one["host"], one.get("bus")) for one in facts}
    return list(groups.values()) if len(buses) == len(groups) and all(one.get("gpu") for one in facts) else []


class GpuAllReduce:
    """All-reduce through memory shared by CUDA IPC, with one row for each learner of a GPU.

    Each learner writes its numbers into its row. Then the first learner of the GPU sums the rows, all-reduces the sum
    with the first learners of the other GPUs through the backend ``across``, and writes the total into the last row.
    All learners read that row, so their results are bit-equal. They create this object at the same time, with the
    result of `by_gpu`.
    """

    def __init__(
        self,
        rank: int,
        groups: Sequence[Sequence[int]],
        store: Store,
        wait: Callable[[dist.Work | None], None],
        across: str = "nccl",
    ) -> None:
        self._rank, self._store, self._wait, self._n_openings = rank, store, wait, 0
        limit = timedelta(seconds=ANSWER_SECONDS)
        for ranks in groups:
            group = dist.new_group(list(ranks), backend="gloo", timeout=limit)
            if rank in ranks:
                self._near, self._ranks, self._row = group, ranks, ranks.index(rank)
        firsts = [ranks[0] for ranks in groups]
        self._far = dist.new_group(firsts, backend=across, timeout=limit) if len(groups) > 1 else None
        self._rows = torch.empty(0, 0, dtype=torch.uint8, device="cpu")  # [learners of this GPU + 1, bytes]

    def open(self, n_bytes: int, device: torch.device) -> bool:
        """Allocate rows of ``n_bytes`` in the GPU's first learner and open them in the others; False if that fails."""
        key, others, self._n_openings = f"rows {self._n_openings} of ", self._ranks[1:], self._n_openings + 1
        shown = [""] * len(others)
        try:
            if self._row > 0:
                self._rows = pickle.loads(bytes.fromhex(self._store.get(f"{key}{self._rank}").decode()))
            else:
                shape = len(self._ranks) + 1, -(-n_bytes // _ALIGNED) * _ALIGNED
                self._rows = torch.empty(shape, dtype=torch.uint8, device=device)
                shown = [bytes(ForkingPickler.dumps(self._rows)).hex() for _ in others]  # each is opened once
        except (RuntimeError, EOFError):  # no IPC or no memory, here or in the first learner
            return False
        finally:
            if self._row == 0:
                for rank, handle in zip(others, shown, strict=True):
                    self._store.set(f"{key}{rank}", handle)
        return True

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum over all learners, in new memory; the host waits for the device.

        Raises:
            LearnerError: if another learner is lost, or the GPU has no memory for the rows.
        """
        if x.nbytes > self._rows.shape[1]:
            self._meet(x)  # no learner reads the old rows any more
            if not self.open(x.nbytes, x.device):
                raise LearnerError(
                    f"run_training: learner {self._rank} found no memory on {x.device} for a sum of {x.nbytes} bytes "
                    f"in {len(self._ranks)} learners. Use fewer learners on a GPU, or fewer environments.",
                    ranks=(self._rank,),
                )
        rows = self._rows[:, : x.nbytes].view(x.dtype)  # [learners of this GPU + 1, N]
        rows[self._row] = x.detach().reshape(-1)
        self._meet(x)
        if self._row == 0:
            total = rows[:-1].sum(0, dtype=x.dtype)
            if self._far is not None:
                try:
                    self._wait(dist.all_reduce(total, group=self._far, async_op=True))
                except LearnerError:
                    self._far.abort()  # NCCL's kernel would wait on the GPU for the lost learner
                    raise
            rows[-1] = total
        self._meet(x)
        return rows[-1].clone().view_as(x)

    def _meet(self, x: Tensor) -> None:
        """Wait for this learner's work on the device, and for the other learners of this GPU."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        self._wait(dist.all_reduce(torch.zeros(1, device="cpu"), group=self._near, async_op=True))
