"""Learners that are forks of a separate process, on machines that are names."""

from __future__ import annotations

import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import FileStore

from rlstruct.algos.distributed.launch import gpu_facts
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup


def fork_learners(
    hosts: Sequence[str],
    do: Callable[[DistributedLearnerGroup], Any],
    device: str = "cpu",
    *,
    gpus: Sequence[str] | None = None,
    dying: Sequence[int] = (),
) -> list[Any]:
    """Return what ``do`` returns in each learner.

    Args:
        hosts: their machines.
        do: called with the group of each.
        device: of all of them; "cuda" gives each a GPU in turn.
        gpus: their UUIDs, which they only pretend to have: gloo stands in for NCCL.
        dying: learners that are killed.
    """
    cloudpickle.register_pickle_by_value(sys.modules[do.__module__])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "do.pkl").write_bytes(cloudpickle.dumps((hosts, do, device, gpus, dying)))
        subprocess.run([sys.executable, __file__, name], check=True, timeout=120)
        return [
            torch.load(folder / f"found-{rank}.pt", weights_only=False)
            for rank in range(len(hosts))
            if rank not in dying
        ]


def main(folder: Path) -> None:
    hosts, do, device, gpus, dying = cloudpickle.loads((folder / "do.pkl").read_bytes())
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # by the first optimiser, and here before the fork: it takes a second
    rank = 0
    children = []
    for other in range(1, len(hosts)):
        if not (pid := os.fork()):
            rank, children = other, []
            break
        children.append(pid)
    store = FileStore(str(folder / "store"), len(hosts))
    own: dict[str, Any] = {
        "host": hosts[rank],
        "pid": os.getpid(),
        "device": f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else device,
    }
    own |= gpu_facts(own["device"]) if gpus is None else {"gpu": gpus[rank], "bus": gpus[rank], "device": "cuda:0"}
    if gpus is not None:
        connect = dist.init_process_group
        dist.init_process_group = lambda backend, **settings: connect("gloo", **settings)
    store.set(f"facts {rank}", json.dumps(own))
    facts = [json.loads(store.get(f"facts {i}")) for i in range(len(hosts))]
    platform.node = lambda: hosts[rank]
    group = DistributedLearnerGroup(rank, rank, store, facts)
    torch.save(do(group), folder / f"found-{rank}.pt")
    group.close()
    for i, pid in enumerate(children, 1):
        if i in dying:
            os.kill(pid, signal.SIGKILL)
    ends = [os.waitpid(pid, 0)[1] for pid in children]
    sys.exit(any(end != 0 for i, end in enumerate(ends, 1) if i not in dying))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
