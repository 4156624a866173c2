"""Workers on a cluster: Ray starts them, as actors, and carries orders, weights and batches.

An actor does what a worker process of this machine does, with the same code, and answers the same orders. A batch goes
into Ray's object store once, and `assemble` reads it there; weights go in once, and from there to each node once.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.backend import BackendStats, Settings
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.recipe import versions
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.batchers.slab import Steps
from rlstruct.batchers.workers.handle import WorkerHandle
from rlstruct.batchers.workers.pool import WorkerPool
from rlstruct.batchers.workers.weights import Weights
from rlstruct.batchers.workers.worker import Batch, Start, Worker
from rlstruct.core import DictTensor, Layout
from rlstruct.errors import ClusterError, MissingPackageError, WorkerError, how_to_install

try:
    import ray
    from ray.exceptions import RayError
except ImportError as error:
    raise MissingPackageError(f"RL_Batcher(cluster=…) needs Ray on every node. {how_to_install('ray')}") from error

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

Packed = dict[str, tuple[Any, tuple[int, ...], torch.dtype]]
"""Tensors as bytes in numpy arrays, which Ray shows to every process of a node without copying, with their shapes."""


@dataclass(frozen=True)
class PackedBatch(Batch):
    """A batch that travels together with its answer."""

    steps: Packed


@dataclass(frozen=True, eq=False)
class StoredWeights(Weights):
    """Weights in the object store."""

    packed: Any  # ray.ObjectRef[Packed]


class WeightStore:
    """Stands in for `SharedWeights`. Nothing is overwritten, so all versions have the same slot."""

    slots = ()

    def __init__(self) -> None:
        """Begin without weights."""
        self.newest: StoredWeights | None = None

    def write(self, weights: Mapping[str, Tensor], version: int, slot: int) -> None:
        """Store new weights, from any device; Ray drops the old ones once nobody reads them."""
        self.newest = StoredWeights(slot, version, Layout.of(weights), ray.put(pack(weights)))

    def n_bytes(self) -> int:
        """Return the size of the newest weights, which is what each node holds."""
        return 0 if self.newest is None else self.newest.layout.nbytes()


class ActorWorker(Worker):
    """Body of a Ray actor: a worker that is called and reads no channel."""

    def __init__(self, recipe: bytes, backends: dict[str, str], versions: dict[str, str]) -> None:
        """Write batches into memory of this process alone."""
        torch.set_num_threads(1)
        blocks = SharedBlock(), SharedBlock()
        super().__init__(Start(recipe, backends, 0, 1, SharedBlock(), blocks, ()))
        self._versions = versions
        self._here = ray.util.get_node_ip_address(), os.getpid()

    def answer(
        self, name: str, arguments: tuple[Any, ...], version: int, weights: Packed | None
    ) -> tuple[str, int, Any]:
        """Carry out an order, with new weights if there are any; return node, process and answer."""
        try:
            if name == "close":
                self.close()
                return *self._here, None
            if name == "create":
                self._refuse_other_versions()
                self.begin()
            if weights is not None:
                self._collector.update(unpack(weights), version)
            return *self._here, getattr(self, f"_{name}")(*arguments)
        except Exception as error:
            failure = self.describe(error)
            return *self._here, replace(failure, traceback=f"(on node {self._here[0]})\n{failure.traceback}")

    def _execute(self, agent_info: DictTensor | None, slab_number: int) -> PackedBatch:
        batch = super()._execute(agent_info, slab_number)
        n_steps, shared = batch.collected.n_steps, self._shared[slab_number]
        rows = {"stream": n_steps + 1, "action": n_steps, "running": n_steps, "restarted": n_steps}
        used = {name: x[: rows.get(name.partition("/")[0])] for name, x in shared.items()}
        at = Steps(shared).finals(n_steps)
        used |= {name: x.flatten(0, 1).index_select(0, at) for name, x in shared.items() if name.startswith("final/")}
        return PackedBatch(**vars(batch), steps=pack(used))

    def _refuse_other_versions(self) -> None:
        for package, found in versions().items():
            if found != (expected := self._versions[package]):
                raise ClusterError(
                    f"RL_Batcher: node {self._here[0]} has {package} {found}, the batcher's process {expected}. "
                    "Install the same on every node."
                )


class Actor:
    """An actor as the pool sees it, in place of the process and its channel.

    Attributes:
        answers: references to the answers that are due, the oldest first.
        node: its address, "" until it has answered.
    """

    def __init__(self, start: Start, options: Mapping[str, Any]) -> None:
        """Ask Ray for it; Ray finds a place."""
        self._actor = ray.remote(ActorWorker).options(**options).remote(start.recipe, start.backends, versions())
        self.answers: deque[Any] = deque()
        self.node = self.fate = ""
        self.pid: int | None = None

    def send(self, message: tuple[str, StoredWeights | None, tuple[Any, ...]], seconds: float | None = None) -> None:
        """Send an order. It never waits."""
        name, weights, arguments = message
        stored = (0, None) if weights is None else (weights.version, weights.packed)
        self.answers.append(self._actor.answer.remote(name, arguments, *stored))

    def receive(self, wait: bool) -> Any:  # noqa: ANN401 - see `Channel`
        """Return the next answer; None if it is not there.

        Raises:
            EOFError: there will be none.
        """
        if not self.answers or not ray.wait([self.answers[0]], timeout=0.0)[0]:
            return None
        try:
            self.node, self.pid, answer = ray.get(self.answers.popleft(), timeout=60.0)
        except RayError as error:
            self.fate = str(error).strip()
            raise EOFError from error
        return answer

    def join(self, seconds: float) -> None:
        """Wait until it has answered everything."""
        if self.answers and ray.is_initialized():
            ray.wait([self.answers[-1]], timeout=max(0.0, seconds))

    def kill(self) -> None:
        """End it, and give its place back."""
        if ray.is_initialized():
            ray.kill(self._actor)

    def close(self) -> None:
        """Drop the answers that are due."""
        self.answers.clear()


class ActorHandle(WorkerHandle):
    """One actor; see `WorkerHandle`."""

    def __init__(self, start: Start, progress: Progress, timeout: float, options: Mapping[str, Any]) -> None:
        """Remember everything, with Ray's options for the actor."""
        super().__init__(start, progress, timeout)
        self._options = options

    def start(self) -> None:
        """See `WorkerHandle.start`."""
        self.channel = self.process = Actor(self._start, self._options)

    def sources(self) -> Sequence[Any]:
        """Return nothing that can be selected: `ActorPool` asks Ray."""
        return ()

    def death(self) -> WorkerError:
        """Say how it was lost, in Ray's words."""
        return self._about(WorkerError, f"is lost, or its node is. Ray says: {self.channel.fate}")

    def steps_of(self, batch: Any, slab: int) -> Steps:  # noqa: ANN401 - a PackedBatch
        """Return the steps that came with a batch, in the object store."""
        self.layout = batch.layout or self.layout
        tensors = unpack(batch.steps)
        steps = Steps(tensors)
        at = steps.finals(batch.collected.n_steps)
        for name, packed in tensors.items():
            if name.startswith("final/"):
                plane = packed.new_empty(
                    (steps.running.numel(), *packed.shape[1:])
                )  # memory that is written alone is real
                plane[at] = packed
                tensors[name] = plane.view(*steps.running.shape, *packed.shape[1:])
        return Steps(tensors)

    def _where(self) -> str:
        if self.channel.node:
            return f"its order {self.orders[0].name!r} on node {self.channel.node}"
        return f"Ray's queue: it asks for {self._options}, and the nodes have {ray.available_resources()} to give"


class ActorPool(WorkerPool):
    """k actors; see `WorkerPool`, and ``cluster`` of `RL_Batcher`."""

    def __init__(self, settings: Settings) -> None:
        """Connect to the cluster, and ask it for the actors.

        Raises:
            ClusterError: there is none.
        """
        cluster = settings.cluster
        named = dict(cluster) if isinstance(cluster, Mapping) else {"address": cluster}
        connect(named.pop("address", "auto"))
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "runtime_env": {"env_vars": _ONE_THREAD}, **named}
        self.create_handle, self.create_weights = partial(ActorHandle, options=options), WeightStore
        super().__init__(settings)

    def stats(self) -> BackendStats:
        """Leave out process ids: actors may be on other machines."""
        return replace(super().stats(), pids=())

    def _receive(self, seconds: float) -> bool:
        """See `WorkerPool`."""
        due = {worker.channel.answers[0]: worker for worker in self._workers if worker.channel.answers}
        self.interrupted = self._if_waiting
        ready, _ = ray.wait(list(due), timeout=min(max(0.0, seconds), 1e6))
        self.interrupted = "failed"
        for reference in ready:
            due[reference].take_answer()
        return bool(ready)


def connect(address: str) -> None:
    """Connect this process to a cluster, unless it is connected; until it ends, or ``ray.shutdown()``.

    Args:
        address: of a node, "auto" for the cluster that this machine belongs to, "local" for a new one on it.

    Raises:
        ClusterError: there is none.
    """
    if ray.is_initialized():
        return
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # where nobody listens, Ray would try for two minutes and end this process
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises all kinds
        raise ClusterError(
            f"RL_Batcher: no cluster at {address!r}: {error}\nStart one with `ray start --head` on one machine and "
            "`ray start --address=…` on the others, or pass cluster='local' (--cluster local) for one of this machine."
        ) from error


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Show tensors, from any device, as bytes."""
    packed: Packed = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        packed[name] = flat.view(torch.uint8).numpy(), tuple(tensor.shape), tensor.dtype  # sync: of CPU memory
    return packed


def unpack(packed: Packed) -> dict[str, Tensor]:
    """Return tensors that share the memory of what was packed; nobody may write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {
            name: torch.from_numpy(array).view(dtype).view(shape)
            if array.size
            else torch.empty(shape, dtype=dtype, device="cpu")
            for name, (array, shape, dtype) in packed.items()
        }
