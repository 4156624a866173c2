"""Learners that are forks of a process of their own, on machines that are names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.distributed import FileStore

from rlstruct.algos.learners import Group


def fork_learners(hosts: Sequence[str], do: Callable[[Group], Any], device: str = "cpu") -> list[Any]:
    """Return what ``do`` returns in each learner."""
    cloudpickle.register_pickle_by_value(sys.modules[do.__module__])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "do.pkl").write_bytes(cloudpickle.dumps((hosts, do, device)))
        subprocess.run([sys.executable, __file__, name], check=True, timeout=120)
        return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(len(hosts))]


def main(folder: Path) -> None:
    hosts, do, device = cloudpickle.loads((folder / "do.pkl").read_bytes())
    torch.set_num_threads(1)
    rank = 0
    children = []
    for other in range(1, len(hosts)):
        if not (pid := os.fork()):
            rank, children = other, []
            break
        children.append(pid)
    store = FileStore(str(folder / "store"), len(hosts))
    store.set(f"pid {rank}", str(os.getpid()))
    facts = [{"host": host, "pid": int(store.get(f"pid {i}")), "device": device} for i, host in enumerate(hosts)]
    platform.node = lambda: hosts[rank]
    group = Group(rank, rank, store, facts)
    torch.save(do(group), folder / f"found-{rank}.pt")
    group.close()
    sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
