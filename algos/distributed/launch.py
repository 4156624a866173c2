"""Start and rendezvous of several learners, by torchrun or by this process."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from rlstruct import renamed
from rlstruct.algos.distributed.peers import name
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup, LearnerGroup, local_device, use_group
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers.collector_factory import versions
from rlstruct.batchers.workers.placement import SHARING, WorkerPlacement
from rlstruct.batchers.workers.processes import (
    GUARD,
    NO_MAIN_GUARD,
    WORKER_NAME,
    exit_worker,
    has_ended,
    inheriting,
    quiet_start,
)
from rlstruct.batchers.workers.system import check_platform, start_process
from rlstruct.errors import LearnerError
from rlstruct.profiling.operations import start_if_requested

JOIN_SECONDS = 300.0
"""Seconds that a learner waits for the others to start."""
_LEAVING_SECONDS = 10.0

_trainings = count()  # numbers of this process's trainings under torchrun, each with its own keys in the store


@dataclass(frozen=True)
class Rendezvous:
    """Rank of a learner, and the address of rank 0."""

    rank: int  # from 0, which evaluates, logs and writes the checkpoints
    size: int  # number of learners
    local_rank: int  # from 0 on each machine, to choose a GPU
    host: str  # machine of the store
    port: int  # of the store through which the learners meet

    @classmethod
    def from_environment(cls) -> Rendezvous | None:
        """Read the variables that torchrun and similar launchers set; None if there is only one process."""
        env = os.environ
        if int(env.get("WORLD_SIZE", "1")) < 2:
            return None
        if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]:
            raise LearnerError(
                f"run_training: WORLD_SIZE is {env['WORLD_SIZE']}, but {', '.join(missing)} is not set. Start the "
                "script with torchrun, which sets all of them, or unset WORLD_SIZE to learn alone."
            )
        rank, size, port = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["MASTER_PORT"])
        return cls(rank, size, int(env.get("LOCAL_RANK", rank)), env["MASTER_ADDR"], port)


def launched_rank() -> int:
    """Return the rank from torchrun, or 0 without torchrun."""
    rendezvous = Rendezvous.from_environment()
    return 0 if rendezvous is None else rendezvous.rank


@contextlib.contextmanager
def launch_learners(config: TrainingConfig, train: Callable[[], object]) -> Iterator[LearnerGroup]:
    """Find the other learners, or start processes that call ``train``; processes started here end with the block."""
    rendezvous = Rendezvous.from_environment()
    n = config.n_learners
    if rendezvous is None and n == 1:
        yield LearnerGroup()
        return
    if rendezvous is not None and n not in (1, rendezvous.size):
        raise LearnerError(
            f"{type(config).__name__}: n_learners is {n}, but {rendezvous.size} processes were started together, "
            f"expected the same number. Omit n_learners, or start {n}: torchrun --nproc-per-node {n} …"
        )
    if dist.is_initialized():
        raise LearnerError(
            "run_training: torch.distributed is in use already, in this process. Leave it to run_training: call "
            "torch.distributed.destroy_process_group() first, or do not initialise it."
        )
    if rendezvous is None:
        check_platform("run_training")
    shares = share_gpus(config)
    with contextlib.ExitStack() as stack:
        processes = LearnerProcesses()
        if rendezvous is None:
            listening = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            rendezvous = Rendezvous(0, n, 0, "127.0.0.1", listening.port)
            stack.callback(processes.end)  # in case they never join
            processes.start(train, n, listening.port, None if shares is None else shares.environment)
            store = PrefixStore("rlstruct/0/0", listening)  # that of a follower's first training
        else:
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = PrefixStore(f"rlstruct/{restarts}/{next(_trainings)}", _store(rendezvous))
        group = DistributedLearnerGroup(
            rendezvous.rank,
            rendezvous.local_rank,
            store,
            gather_facts(rendezvous, store, learner_facts(config, rendezvous), processes),
        )
        stack.callback(group.close)
        stack.callback(processes.end)  # runs first, because a group with a stopped learner cannot close
        with use_group(group):
            yield group
        processes.end(patience=_LEAVING_SECONDS)


def share_gpus(config: TrainingConfig) -> WorkerPlacement | None:
    """Give this process rank 0's share of a GPU, before anything here uses CUDA.

    Returns the shares of all learners, or None if they share no GPU.
    """
    if not config.learners_share_gpus():
        return None
    shares: WorkerPlacement | None = SHARING["learners"](config)
    return shares


@lru_cache
def _store(rendezvous: Rendezvous) -> Store:
    """Open the store or connect to it, with new keys for each training of this process."""
    limit = timedelta(seconds=JOIN_SECONDS)
    # torchrun may have opened it.
    opens = rendezvous.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(rendezvous.host, rendezvous.port, is_master=opens, wait_for_workers=False, timeout=limit)
    except dist.DistError as error:
        raise LearnerError(
            f"run_training: learner {rendezvous.rank} cannot reach learner 0 at {rendezvous.host}:{rendezvous.port} "
            f"within {JOIN_SECONDS:g} s: {error}. Start all of them, and check MASTER_ADDR and MASTER_PORT.",
            ranks=(0,),
        ) from error


def learner_facts(config: TrainingConfig, rendezvous: Rendezvous) -> dict[str, Any]:
    """Return the facts about this learner that the others need."""
    device = local_device(config.learner_device, rendezvous.local_rank)
    settings = json.loads(json.dumps({**asdict(config), "n_learners": rendezvous.size}, default=str))
    own = {"host": platform.node(), "pid": os.getpid(), "device": device, **gpu_facts(device)}
    return {**own, "versions": versions(), "settings": settings}


def gpu_facts(device: str) -> dict[str, str]:
    """Return the UUID of a GPU or MIG instance as ``gpu`` and its PCI address as ``bus``; {} without a GPU."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return {}
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return {}
    properties: Any = torch.cuda.get_device_properties(index)  # torch's type stubs lack the PCI address
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    return {"gpu": visible if visible.startswith("MIG-") else str(properties.uuid), "bus": bus}


def gather_facts(
    rendezvous: Rendezvous, store: Store, facts: dict[str, Any], processes: LearnerProcesses
) -> list[dict[str, Any]]:
    """Wait until all learners have joined, and return their facts."""
    store.set(f"{rendezvous.rank}", json.dumps(facts))
    end = time.monotonic() + JOIN_SECONDS
    while missing := [rank for rank in range(rendezvous.size) if not store.check([f"{rank}"])]:
        processes.raise_if_ended()
        if time.monotonic() > end:
            raise LearnerError(
                f"run_training: learner {', '.join(map(str, missing))} of {rendezvous.size} has not joined within "
                f"{JOIN_SECONDS:g} s. Start all of them: torchrun on every machine, with the same --nnodes and "
                "--nproc-per-node.",
                ranks=tuple(missing),
            )
        time.sleep(0.02)
    by_rank = [json.loads(store.get(f"{rank}")) for rank in range(rendezvous.size)]
    for rank, one in enumerate(by_rank):
        for fact_name, fix in (
            ("versions", "Install the same version everywhere"),
            ("settings", "Start all of them in the same way"),
        ):
            for fact, expected in by_rank[0][fact_name].items():
                if (got := one[fact_name].get(fact)) != expected:
                    raise LearnerError(
                        f"run_training: {name(rank, one)} has {fact} {got}, but {name(0, by_rank[0])} has {expected}. "
                        f"{fix}.",
                        ranks=(rank,),
                    )
    return by_rank


@renamed.members
class LearnerProcesses:
    """Processes of the learners with ranks 1, 2, …, started by rank 0."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []  # ordered by rank

    def start(
        self,
        train: Callable[[], object],
        n: int,
        port: int,
        environment: Callable[[int], Mapping[str, str]] | None = None,
    ) -> None:
        """Start ``n - 1`` processes that call ``train``; they join through ``port``.

        Args:
            train: function without arguments.
            n: number of learners, the caller included.
            port: of the store.
            environment: returns additional environment variables of a rank, such as its share of a GPU.
        """
        payload = cloudpickle.dumps(train)
        with quiet_start():
            for rank in range(1, n):
                arguments = (payload, rank, n, port, torch.get_num_threads())
                with inheriting({} if environment is None else environment(rank)):
                    self.processes.append(
                        start_process(_train_as_rank, arguments, f"{WORKER_NAME}-learner-{rank}", JOIN_SECONDS)
                    )

    def raise_if_ended(self) -> None:
        """Raise LearnerError if one of them has ended."""
        for i, process in enumerate(self.processes):
            if has_ended(process):
                code = process.exitcode
                hint = GUARD if code == NO_MAIN_GUARD else "Its traceback, printed above, shows why."
                raise LearnerError(
                    f"run_training: learner {i + 1} (pid {process.pid}) ended with code {code} while it started. "
                    f"{hint}",
                    ranks=(i + 1,),
                )

    def end(self, patience: float = 0.0) -> None:
        """Kill those that have not ended after ``patience`` seconds, even stopped ones, with their worker processes."""
        end = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join(_LEAVING_SECONDS)
            with contextlib.suppress(ValueError):  # it is still running
                process.close()
        self.processes = []


def _train_as_rank(payload: bytes, rank: int, size: int, port: int, n_threads: int) -> None:
    """Train as one of several learners; errors are reported to rank 0 once this process has joined."""
    torch.set_num_threads(n_threads)
    start_if_requested()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"TORCHELASTIC_RESTART_COUNT": 0}  # torchrun may have restarted rank 0, but not this process
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        cloudpickle.loads(payload)()
    except Exception as error:
        if not getattr(error, "reported", False):
            raise
        sys.exit(1)  # rank 0 reports the error
    exit_worker()
