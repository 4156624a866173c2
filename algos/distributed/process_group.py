"""Data-parallel learners: processes that train one network together, each on its share of the environments.

A training with k learners equals the training with one. Settings describe all learners together and the environments
are the same. Each learner collects with its share of them, and every gradient step uses the mean over all shares. The
processes are started by torchrun, on one or several machines, or by `run_training`, on this machine. torch.distributed
transfers the numbers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from rlstruct import renamed
from rlstruct.algos.distributed.gpu_all_reduce import GpuAllReduce, by_gpu
from rlstruct.algos.distributed.peers import ANSWER_SECONDS, Peers
from rlstruct.algos.training.checkpoint import on_cpu
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers.workers.processes import inheriting
from rlstruct.errors import LearnerError
from rlstruct.functional.all_reduce import summing_by
from rlstruct.options import declared

AnyConfig = TypeVar("AnyConfig", bound=TrainingConfig)

_CLOSING_SECONDS = 2.0

_SHARED = (
    *("model", "optimizer", "online_model", "target_model", "target_critics"),
    *("config", "policy_version", "format", "env_steps", "policy"),
)

Terms = dict[str, Tensor]


@renamed.members
class LearnerGroup:
    """All learners of a training, as seen by one of them. In this base class there is only one."""

    rank, size = 0, 1
    can_capture = True
    """True if an update can be captured as a CUDA graph."""

    def local_config(self, config: AnyConfig) -> AnyConfig:
        """Return the settings of this learner's share; LearnerError if a number is not divisible by the learners."""
        return config

    def broadcast(self, value: Any) -> Any:  # noqa: ANN401 - anything that can be pickled
        """Return the value that rank 0 passes."""
        return value

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Combine the learners' checkpoints to one in rank 0."""
        return state

    def scatter(self, checkpoint: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return each learner's checkpoint from the combined one, which rank 0 passes."""
        if (complete := self.broadcast(checkpoint)) is None:
            return None
        others = complete.pop("others", [])
        return {**complete, **others[self.rank - 1]} if self.rank else complete

    def broadcast_weights(self, model: nn.Module) -> None:
        """Copy the weights of rank 0 to every learner."""
        own = {name: tensor.detach().to("cpu") for name, tensor in model.state_dict().items()}
        try:
            model.load_state_dict(self.broadcast(None if self.rank else own))
        except RuntimeError as error:
            raise LearnerError(
                f"run_training: learner {self.rank} has another network than learner 0, whose weights it cannot load: "
                f"{error}. Make create_model return the same network in every process.",
                ranks=(self.rank,),
            ) from error

    def raise_if_lost(self) -> None:
        """Raise LearnerError if another learner is lost: sums on the device may then lack its share."""

    def finish(self) -> None:
        """Report that this learner no longer needs the others and may end before them."""


_groups: list[LearnerGroup] = [LearnerGroup()]


def learner_group() -> LearnerGroup:
    """Return the learners of the current training in this process."""
    return _groups[-1]


def local_device(device: str, local_rank: int) -> str:
    """Return the device of a process of this machine: for ``"cuda"`` the visible GPUs in turn."""
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}" if device == "cuda" else device


class DistributedLearnerGroup(LearnerGroup):
    """Several learners, connected through a store.

    All learners create this object at the same time.

    Attributes:
        store: connects the learners.
        facts: ``host``, ``pid`` and ``device`` of each learner, by rank; on CUDA also its GPU's UUID (``gpu``) and PCI
            address (``bus``).
    """

    def __init__(self, rank: int, local_rank: int, store: Store, facts: Sequence[dict[str, Any]]) -> None:
        self.rank, self.size, self._local_rank, self.store, self.facts = rank, len(facts), local_rank, store, facts
        groups = by_gpu(facts)
        self._nccl = len(groups) == len(facts)  # each has its own GPU
        self.can_capture = self._nccl  # gloo needs the host
        # Otherwise torch ends the process as soon as NCCL loses a learner, before our thread can name it.
        handling = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")}
        share = not self._nccl and bool(groups) and torch.cuda.is_available()
        with inheriting(handling if groups else {}):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._nccl else "gloo",
                store=PrefixStore("group", store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=ANSWER_SECONDS),
            )
            self._sums = GpuAllReduce(rank, groups, store, self.poll) if share else None
        self.peers = Peers(rank, store, facts, _abort if self._nccl else None)
        if self._sums is not None:
            opened = torch.tensor([self._sums.open(1, torch.device(facts[rank]["device"]))], device="cpu").long()
            self.wait(dist.all_reduce(opened, dist.ReduceOp.MIN, async_op=True))
            self._sums = self._sums if opened[0] else None  # sync: none, it is on the CPU

    def mean(self, terms: Terms, gradient: Terms, weight: Tensor | None) -> tuple[Terms, Terms]:
        """Average numbers [] and the gradient of each weight over all learners, weighted by ``weight`` [].

        This is one all-reduce of one flat buffer, with bit-equal results in all learners.
        """
        numbers = {name: term for name, term in terms.items() if term.dim() == 0}
        tensors = [x.to_dense() if x.is_sparse else x for x in (*gradient.values(), *numbers.values())]
        flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_ones(1)])
        total = self.all_reduce_sum(flat if weight is None else flat.mul_(weight))
        pieces = torch.split(total[:-1].div_(total[-1].clamp(min=1)), [tensor.numel() for tensor in tensors])
        dtypes = [tensor.dtype if tensor.is_floating_point() else total.dtype for tensor in tensors]
        averages = iter(
            [piece.view_as(like).to(dtype) for piece, like, dtype in zip(pieces, tensors, dtypes, strict=True)]
        )
        averaged = {name: next(averages) for name in gradient}
        for name, own in gradient.items():
            if own.is_sparse:  # a sparse optimiser takes no other
                averaged[name] = averaged[name].to_sparse(own.sparse_dim())
        return {**terms, **{name: next(averages) for name in numbers}}, averaged

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum over all learners, in new memory."""
        if self._nccl and x.device.type == "cuda":
            self.raise_if_lost()
            total = x.clone()
            dist.all_reduce(total)  # ordered by the stream; the host does not wait
            return total
        if self._sums is not None and x.device.type == "cuda":
            return self._sums.all_reduce_sum(x)
        total = x.detach().to("cpu", copy=True)
        self.wait(dist.all_reduce(total, async_op=True))
        return total.to(x.device)

    def local_config(self, config: AnyConfig) -> AnyConfig:
        """See `LearnerGroup.local_config`."""
        names = ["n_processes" if config.n_processes else "n_envs"]
        names += [name for name, divided in declared(type(config), "divided").items() if divided]
        for name in names:
            if (number := getattr(config, name)) % self.size:
                raise LearnerError(
                    f"{type(config).__name__}: {name} is {number}, expected a multiple of the {self.size} learners, "
                    "which share it. Change one of the two numbers."
                )
        changed: dict[str, Any] = {
            name: local_device("cuda", self._local_rank)
            for name in ("learner_device", "batcher_device", "evaluation_device", "replay_device")
            if getattr(config, name, None) == "cuda"
        }
        changed |= {name: getattr(config, name) // self.size for name in names}
        return replace(config, **changed)

    def broadcast(self, value: Any) -> Any:  # noqa: ANN401 - see LearnerGroup
        """See `LearnerGroup.broadcast`."""
        packed = _packed(value if self.rank == 0 else None)
        own = 0 if self.rank or value is None else len(packed)
        n = int(self.all_reduce_sum(torch.tensor([own], device="cpu")))  # sync: none, it is on the CPU
        if n:
            packed = packed if self.rank == 0 else packed.new_empty(n)
            self.wait(dist.broadcast(packed, 0, async_op=True))
        return value if self.rank == 0 else _unpacked(packed)

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `LearnerGroup.gather`; other ranks return their argument."""
        own = _packed({name: value for name, value in state.items() if name not in _SHARED} if self.rank else None)
        sizes = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        sizes[self.rank] = len(own)
        longest = int(self.all_reduce_sum(sizes).max())  # sync: none, it is on the CPU
        padded = torch.nn.functional.pad(own, (0, longest - len(own)))
        gathered = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        self.wait(dist.gather(padded, gathered, dst=0, async_op=True))
        return state if gathered is None else {**state, "others": [_unpacked(one) for one in gathered[1:]]}

    def raise_if_lost(self) -> None:
        """See `LearnerGroup.raise_if_lost`."""
        self.peers.raise_if_lost()

    def finish(self) -> None:
        """See `LearnerGroup.finish`."""
        self.peers.finish()

    def close(self) -> None:
        """Disconnect. If gloo waits for a stopped learner, abandon the thread that waits."""
        self.peers.close()
        if self._nccl:
            gc.collect()  # NCCL would wait for graphs that contain an all-reduce of this group
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(_CLOSING_SECONDS)

    def check_others(self, waited: float) -> None:
        """Raise LearnerError if another learner is lost; called once a second during a wait."""
        self.peers.check(waited)

    def poll(self, work: dist.Work | None) -> None:
        """Like `wait`, but also for NCCL, whose own timed wait would abort the group."""
        begin = looked = time.monotonic()
        while work is not None and not work.is_completed():
            if (now := time.monotonic()) > looked + 1.0:
                self.check_others(now - begin)
                looked = now
            time.sleep(0.0 if now < begin + 0.01 else 1e-4)
        self.wait(work)

    def wait(self, work: dist.Work | None) -> None:
        """Wait until all learners have contributed; check once a second that they are alive."""
        begin, broken = time.monotonic(), False
        while work is not None:
            try:
                work.wait(timedelta(seconds=1))
                return
            except RuntimeError as error:
                if broken:  # the cause may take a moment to show
                    end = time.monotonic() + 3.0
                    while time.monotonic() < end:
                        self.check_others(0.0)
                        time.sleep(0.05)
                    raise LearnerError(f"run_training: learner {self.rank} lost another one: {error}") from error
                broken = work.is_completed()  # it may have completed just as the second ended: wait once more
                if not broken:
                    self.check_others(time.monotonic() - begin)


@contextlib.contextmanager
def use_group(group: DistributedLearnerGroup) -> Iterator[None]:
    """Make `learner_group` and `sum_over_learners` refer to a group."""
    _groups.append(group)
    try:
        with summing_by(torch.ops.rlstruct.sum_over_learners):
            yield
    except Exception as error:
        cause = group.peers.lost or error  # without the lost learner, anything that the device computed may be wrong
        group.peers.report(cause)
        if cause is error:
            raise
        raise cause from error
    finally:
        _groups.pop()


@torch.library.custom_op("rlstruct::sum_over_learners", mutates_args=(), schema="(Tensor x) -> Tensor")
def _sum_over_learners(x: Tensor) -> Tensor:
    """Sum over all learners; compiled code calls this as well."""
    group = learner_group()
    return group.all_reduce_sum(x) if isinstance(group, DistributedLearnerGroup) else x.clone()


@_sum_over_learners.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _abort() -> None:
    """Abort every all-reduce that this process still waits for on its device."""
    if (world := dist.group.WORLD) is not None:
        world.abort()


def _packed(value: object) -> Tensor:
    """Pickle a value, whose tensors arrive on the CPU.  [N] uint8 on the CPU."""
    return torch.frombuffer(bytearray(pickle.dumps(on_cpu(value))), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:  # noqa: ANN401 - what was packed
    return pickle.loads(packed.numpy().tobytes())  # sync: none, it is on the CPU


__getattr__ = renamed.attributes(__name__)
