"""Many learners: processes that train one network together, each on its share of the environments.

A training with k learners is the training with one: the settings are those of all together, the environments are the
same, each learner collects with its share of them, and every gradient step follows the mean over all shares.
torchrun starts the processes, on one machine or many, or `run_training` does, on this machine; torch.distributed moves
the numbers.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import platform
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from rlstruct.algos.config import TrainingConfig
from rlstruct.engine.compiled import Tensors
from rlstruct.errors import LearnerError
from rlstruct.functional.learners import sum_over_learners, summing_by

AnyConfig = TypeVar("AnyConfig", bound=TrainingConfig)

ANSWER_SECONDS = 1800.0
"""How long a learner waits for one that still lives, or whose machine does not say; the first may be evaluating."""

_CLOSING_SECONDS = 2.0

_SHARED = ("model", "optimizer", "online_model", "target_model", "config", "policy_version", "format", "env_steps")


class Learners:
    """All learners of a training, as one of them sees them. This one learns alone."""

    rank, size = 0, 1
    records = True
    """Whether an update can be recorded as a CUDA graph."""

    def mean(self, terms: Tensors, gradient: Tensors, weight: Tensor | None) -> tuple[Tensors, Tensors]:
        """Average over all learners.

        Args:
            terms: name to number; those with more than one entry stay as they are.  [] each
            gradient: by number of the weight.
            weight: how much this learner's share counts, None for as much as any other's.  []
        """
        return terms, gradient

    def average(self, x: Tensor) -> Tensor:
        """Average a tensor, with equal weights."""
        return sum_over_learners(x) / self.size if self.size > 1 else x

    def share(self, config: AnyConfig) -> AnyConfig:
        """Return this learner's share of what the settings ask for.

        Raises:
            LearnerError: the learners do not divide it.
        """
        return config

    def from_first(self, value: Any) -> Any:  # noqa: ANN401 - anything that can be pickled
        """Return what the first learner passes."""
        return value

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of all learners in the first one, from that of each."""
        return state

    def scatter(self, checkpoint: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the own checkpoint of each learner, from that of all, which the first one passes."""
        return checkpoint

    def level(self, model: nn.Module) -> None:
        """Give every learner the weights of the first."""


_present: list[Learners] = [Learners()]


def learners() -> Learners:
    """Return the learners of the training that runs in this process."""
    return _present[-1]


class Group(Learners):
    """Several learners; see `Learners`.

    Args:
        rank: of this one.
        local_rank: from 0 on each machine, to choose a GPU.
        store: where they find each other.
        facts: about each of them: its ``host``, ``pid`` and ``device``.
    """

    def __init__(self, rank: int, local_rank: int, store: Store, facts: Sequence[dict[str, Any]]) -> None:
        """Connect; all learners do that together."""
        self.rank, self.size, self._local_rank, self._store, self._facts = rank, len(facts), local_rank, store, facts
        places = {(one["host"], one["device"]) for one in facts}
        self._nccl = facts[0]["device"].startswith("cuda") and len(places) == self.size
        self.records = self._nccl  # gloo needs the host
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._nccl else "gloo",
            store=PrefixStore("group", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=ANSWER_SECONDS),
        )

    def mean(self, terms: Tensors, gradient: Tensors, weight: Tensor | None) -> tuple[Tensors, Tensors]:
        """See `Learners.mean`: one sum of one flat buffer, which is the same in all learners bit by bit."""
        numbers = {name: term for name, term in terms.items() if term.dim() == 0}
        tensors = [*gradient.values(), *numbers.values()]
        one = tensors[0].new_ones(1) if weight is None else weight.to(tensors[0].dtype).view(1)
        flat = self.add_up(torch.cat([*(tensor.reshape(-1) * one for tensor in tensors), one]))
        pieces = torch.split(flat[:-1] / flat[-1], [tensor.numel() for tensor in tensors])
        found = iter([piece.view_as(like).to(like.dtype) for piece, like in zip(pieces, tensors, strict=True)])
        gradient = {name: next(found) for name in gradient}
        return {**terms, **{name: next(found) for name in numbers}}, gradient

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over all learners, in new memory."""
        if self._nccl and x.device.type == "cuda":
            total = x.clone()
            dist.all_reduce(total)  # in the order of the stream, without a wait of the host
            return total
        total = x.detach().to("cpu", copy=True)
        self._wait(dist.all_reduce(total, async_op=True))
        return total.to(x.device)

    def share(self, config: AnyConfig) -> AnyConfig:
        """See `Learners.share`."""
        names = ["n_processes" if config.n_processes else "n_envs"]
        names += [name for name in ("batch_size", "replay_capacity") if hasattr(config, name)]
        for name in names:
            if (number := getattr(config, name)) % self.size:
                raise LearnerError(
                    f"{type(config).__name__}: {name} is {number}, expected a multiple of the {self.size} learners, "
                    "who share it. Choose other numbers."
                )
        changed: dict[str, Any] = {
            name: f"cuda:{self._local_rank % max(1, torch.cuda.device_count())}"
            for name in ("learner_device", "batcher_device", "evaluation_device")
            if getattr(config, name) == "cuda"
        }
        changed |= {name: getattr(config, name) // self.size for name in names}
        return replace(config, **changed)

    def from_first(self, value: Any) -> Any:  # noqa: ANN401 - see Learners
        """See `Learners.from_first`."""
        packed = _packed(value if self.rank == 0 else None)
        n = torch.tensor([len(packed)], device="cpu")
        self._wait(dist.broadcast(n, 0, async_op=True))
        packed = packed if self.rank == 0 else packed.new_empty(int(n))  # sync: none, it is on the CPU
        self._wait(dist.broadcast(packed, 0, async_op=True))
        return value if self.rank == 0 else _unpacked(packed)

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `Learners.gather`; the others return what they passed."""
        own = _packed({name: value for name, value in state.items() if name not in _SHARED} if self.rank else None)
        sizes = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        sizes[self.rank] = len(own)
        self._wait(dist.all_reduce(sizes, async_op=True))
        longest = int(sizes.max())  # sync: none, it is on the CPU
        padded = torch.nn.functional.pad(own, (0, longest - len(own)))
        found = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        self._wait(dist.gather(padded, found, dst=0, async_op=True))
        return state if found is None else {**state, "others": [_unpacked(one) for one in found[1:]]}

    def scatter(self, checkpoint: dict[str, Any] | None) -> dict[str, Any] | None:
        """See `Learners.scatter`."""
        if (whole := self.from_first(checkpoint)) is None:
            return None
        others = whole.pop("others")
        return {**whole, **others[self.rank - 1]} if self.rank else whole

    def level(self, model: nn.Module) -> None:
        """See `Learners.level`."""
        for name, tensor in model.state_dict().items():
            held = self.from_first((name, tensor.shape, tensor.dtype))
            if held != (name, tensor.shape, tensor.dtype):
                raise LearnerError(
                    f"run_training: the network of learner {self.rank} has {name!r} {tuple(tensor.shape)} "
                    f"{tensor.dtype}, that of learner 0 {held[0]!r} {tuple(held[1])} {held[2]}, expected the same. Let "
                    "create_model make the same network in every process.",
                    ranks=(self.rank,),
                )
            first = tensor.detach().to("cpu", copy=True)
            self._wait(dist.broadcast(first, 0, async_op=True))
            tensor.copy_(first)

    def tell(self, error: Exception) -> None:
        """Let the others know why this learner leaves, and mark the error as told."""
        with contextlib.suppress(dist.DistError):  # whoever holds the store is gone
            text = "".join(traceback.format_exception(error))
            self._store.compare_set("failed", "", json.dumps([self.rank, text]))
            error.told = True  # type: ignore[attr-defined]

    def close(self) -> None:
        """Disconnect, also where gloo waits for a learner that was stopped: that thread is then left to itself."""
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(_CLOSING_SECONDS)

    def _wait(self, work: dist.Work | None) -> None:
        """Wait until all have done their part; look after them once a second.

        Raises:
            LearnerError: one of them never will.
        """
        end = time.monotonic() + ANSWER_SECONDS
        while work is not None:
            try:
                work.wait(timedelta(seconds=1))
                return
            except RuntimeError as error:
                broken = work.is_completed()
                self._refuse_lost(3.0 if broken else 0.0)
                if broken or time.monotonic() > end:
                    raise LearnerError(f"run_training: learner {self.rank} lost another one: {error}") from error

    def _refuse_lost(self, seconds: float) -> None:
        """Raise if another learner has failed, died or been stopped; give what has just happened time to show."""
        end = time.monotonic() + seconds
        while True:
            for rank, one in enumerate(self._facts):
                if rank != self.rank and one["host"] == platform.node() and (how := _gone(one["pid"])):
                    self._refuse_failed()
                    raise LearnerError(f"run_training: {name(rank, one)} {how}.", ranks=(rank,))
            if seconds:
                self._refuse_failed()
            if time.monotonic() >= end:
                return
            time.sleep(0.05)

    def _refuse_failed(self) -> None:
        with contextlib.suppress(dist.DistError):
            if self._store.check(["failed"]):
                rank, text = json.loads(self._store.get("failed"))
                if rank != self.rank:
                    raise LearnerError(f"run_training: {name(rank, self._facts[rank])} failed:\n{text}", ranks=(rank,))


@contextlib.contextmanager
def learning_in(group: Group) -> Iterator[None]:
    """Let `learners` and `sum_over_learners` be about a group."""
    _present.append(group)
    try:
        with summing_by(torch.ops.rlstruct.sum_over_learners):
            yield
    except Exception as error:
        group.tell(error)
        raise
    finally:
        _present.pop()


@torch.library.custom_op("rlstruct::sum_over_learners", mutates_args=(), schema="(Tensor x) -> Tensor")
def _sum_over_learners(x: Tensor) -> Tensor:
    """What compiled code calls, too."""
    group = learners()
    return group.add_up(x) if isinstance(group, Group) else x.clone()


@_sum_over_learners.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def name(rank: int, facts: dict[str, Any]) -> str:
    """Name a learner in a message."""
    return f"learner {rank} (pid {facts['pid']} on {facts['host']})"


def _gone(pid: int) -> str:
    """Say why a process of this machine does nothing any more; "" if it may, or where there is no /proc."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        return ""
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "has died"
    return {"T": "was stopped by a signal", "t": "is held by a debugger", "Z": "has died", "X": "has died"}.get(
        state, ""
    )


def _packed(value: object) -> Tensor:
    """Turn a value into bytes.  [N] uint8 on the CPU."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:  # noqa: ANN401 - what was packed
    return pickle.loads(packed.numpy().tobytes())  # sync: none, it is on the CPU
