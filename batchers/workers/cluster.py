"""Workers on a cluster: Ray actors. Ray transports orders, weights and batches.

A batch is stored in Ray's object store once, where `assemble` reads it. Weights are stored once, and copied to each
node once.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.backend import BackendSettings
from rlstruct.batchers.collector_factory import versions
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.batchers.workers.pool import WorkerPool
from rlstruct.batchers.workers.processes import ONE_THREAD
from rlstruct.batchers.workers.transport import Executed, Order, PublishedWeights
from rlstruct.batchers.workers.worker import Worker
from rlstruct.core import Layout
from rlstruct.core.layout import take_rows
from rlstruct.device import registered_backends
from rlstruct.errors import ClusterError, import_extra

ray = import_extra("ray", "ray", "RL_Batcher(cluster=…)")

Packed = dict[str, tuple[Any, tuple[int, ...], torch.dtype]]
"""Tensors as numpy arrays of bytes, which Ray maps into all processes of a node, with their shapes and dtypes."""


class RayTransport:
    """Actors as workers, and the object store for weights and batches, where nothing is overwritten."""

    is_local = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._links: dict[int, RayLink] = {}
        self._n_bytes = 0

    def open(self, index: int, factory: bytes) -> RayLink:
        """Ask Ray for an actor; Ray chooses the node."""
        self._links[index] = link = RayLink(factory, self._options)
        return link

    def publish(
        self, weights: Mapping[str, Tensor], version: int, in_use: Sequence[PublishedWeights]
    ) -> PublishedWeights | None:
        """Store weights, from any device. Ray frees the old ones once they have been read."""
        layout = Layout.of(weights)
        self._n_bytes = layout.nbytes()
        return PublishedWeights(version, layout, ray.put(to_bytes(weights)))

    def wait(self, seconds: float) -> list[int]:
        """Wait for the next answer of any actor."""
        pending = {link.answers[0][0]: index for index, link in self._links.items() if link.answers}
        ready, _ = ray.wait(list(pending), timeout=min(max(0.0, seconds), 1e6))
        return [pending[reference] for reference in ready]

    def n_bytes(self) -> int:
        """Return the size of the newest weights, of which each node has a copy."""
        return self._n_bytes

    def close(self) -> None:
        """Stay connected, since other code may use the cluster."""


class RayLink:
    """An actor.

    Attributes:
        answers: references to outstanding answers, oldest first, each with the name of its order.
    """

    def __init__(self, factory: bytes, options: Mapping[str, Any]) -> None:
        self.answers: deque[tuple[Any, str]] = deque()
        self._actor = ray.remote(RayActor).options(**options).remote(factory, registered_backends(), versions())
        self.progress: Progress = ActorProgress(self.answers)
        self.pid: int | None = None
        self._options, self._node, self._fate = options, "", ""

    def send(self, order: Order, seconds: float) -> None:
        """Call the actor, without waiting."""
        version, packed = (0, None) if order.weights is None else (order.weights.version, order.weights.place)
        reference = self._actor.answer.remote(order.name, order.arguments, version, packed)
        self.answers.append((reference, order.name))

    def receive(self) -> Any:  # noqa: ANN401 - see `Link`
        """Return the oldest answer from the object store, if it has arrived."""
        if not self.answers or not ray.wait([self.answers[0][0]], timeout=0.0)[0]:
            return None
        try:
            self._node, self.pid, answer = ray.get(self.answers.popleft()[0], timeout=60.0)
        except ray.exceptions.RayError as error:
            self._fate = str(error).strip()
            raise EOFError from error
        return answer

    def steps(self, batch: Executed, buffer: int) -> Rollout:
        """Map the steps in the object store."""
        return Rollout(from_bytes(batch.tensors), packed=True)

    def where(self) -> str:
        """Name order and node, or the resources that the actor waits for; see `Link.where`."""
        if self._node:
            return f"in its order {self.answers[0][1]!r} on node {self._node}"
        return f"in Ray's queue: it asks for {self._options}, and the nodes have {ray.available_resources()} available"

    def ended(self) -> bool:
        """Return False: Ray reports it with the next answer."""
        return False

    def death(self) -> str:
        """Return Ray's message."""
        return f"or its node is lost. Ray says: {self._fate}"

    def stop(self) -> None:
        """Order the actor to close its environments."""
        if ray.is_initialized():
            self.send(Order("close"), 0.0)

    def join(self, seconds: float) -> None:
        """Wait for the last answer."""
        if self.answers and ray.is_initialized():
            ray.wait([self.answers[-1][0]], timeout=max(0.0, seconds))

    def kill(self) -> None:
        """Kill the actor, and free its resources."""
        if ray.is_initialized():
            ray.kill(self._actor)

    def close(self) -> None:
        """Drop the outstanding answers."""
        self.answers.clear()


class ActorProgress(Progress):
    """Progress of an actor, as far as its outstanding answers show it.

    Args:
        answers: see `RayLink`.
    """

    def __init__(self, answers: deque[tuple[Any, str]]) -> None:
        super().__init__()
        self._answers = answers
        self.clear()

    @property
    def is_closing(self) -> bool:
        """Return True if the only order that the actor has not carried out is to close."""
        if not self._answers or self._answers[-1][1] != "close" or not ray.is_initialized():
            return False
        references = [reference for reference, _ in self._answers]
        return bool(ray.wait(references, num_returns=len(references), timeout=0.0)[1] == references[-1:])


class RayActor:
    """A worker on a node. It writes batches into its own memory, and sends them with its answers."""

    def __init__(self, factory: bytes, backends: dict[str, str], versions: dict[str, str]) -> None:
        torch.set_num_threads(1)
        memories = [SharedBlock().map, SharedBlock().map]
        self._worker = Worker(factory, backends, Progress(), memories, lambda weights: from_bytes(weights.place))
        self._versions = versions
        self._here = ray.util.get_node_ip_address(), os.getpid()

    def answer(
        self, name: str, arguments: tuple[Any, ...], version: int, weights: Packed | None
    ) -> tuple[str, int, Any]:
        """Carry out an order, after loading any new weights. Return node, process id and answer."""
        try:
            if name == "close":
                self._worker.close()
                return *self._here, None
            if name == "create":
                for package, installed in versions().items():
                    if installed != (expected := self._versions[package]):
                        raise ClusterError(
                            f"RL_Batcher: node {self._here[0]} has {package} {installed}, the batcher's process "
                            f"{expected}. Install the same version on every node."
                        )
                self._worker.begin()
            new = None if weights is None else PublishedWeights(version, Layout(), weights)
            answer = self._worker.carry_out(Order(name, arguments, new))
            if isinstance(answer, Executed):
                answer = replace(answer, tensors=_packed_steps(self._worker.buffers[arguments[1]], answer))
        except Exception as error:
            failure = self._worker.describe(error)
            answer = replace(failure, traceback=f"(on node {self._here[0]})\n{failure.traceback}")
        return *self._here, answer


def create_pool(settings: BackendSettings) -> WorkerPool:
    """Connect to the cluster, and create a backend of actors on it."""
    cluster = settings.cluster
    named: dict[str, Any] = dict(cluster) if isinstance(cluster, Mapping) else {"address": cluster}
    connect(named.pop("address", "auto"))
    options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "runtime_env": {"env_vars": ONE_THREAD}, **named}
    return WorkerPool(settings, RayTransport(options))


def connect(address: str) -> None:
    """Connect this process to a cluster unless it is connected. It stays connected until ``ray.shutdown()``.

    Args:
        address: address of a node, "auto" for the cluster of this machine, or "local" for a new one on this machine.

    Raises:
        ClusterError: there is no such cluster.
    """
    if ray.is_initialized():
        return
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # if no server listens, Ray would retry for two minutes and then exit this process
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises errors of many classes
        raise ClusterError(
            f"RL_Batcher: no cluster at {address!r}: {error}\nStart one with `ray start --head` on one machine and "
            "`ray start --address=…` on the others, or pass cluster='local' (--cluster local) for one on this machine."
        ) from error


def _packed_steps(buffer: Mapping[str, Tensor], batch: Executed) -> Packed:
    """Pack those rows of a buffer that the batch uses."""
    n_steps = batch.collected.n_steps
    rows = {"stream": n_steps + 1, "action": n_steps, "running": n_steps, "restarted": n_steps}
    used = {name: x[: rows.get(name.partition("/")[0])] for name, x in buffer.items()}
    if "restarted" in buffer:
        at = Rollout(dict(buffer)).final_rows(n_steps)
        used |= {name: take_rows(x.flatten(0, 1), at) for name, x in buffer.items() if name.startswith("reached/")}
    return to_bytes(used)


def to_bytes(tensors: Mapping[str, Tensor]) -> Packed:
    """Convert tensors, from any device, to bytes."""
    packed: Packed = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        packed[name] = flat.view(torch.uint8).numpy(), tuple(tensor.shape), tensor.dtype  # sync: of CPU memory
    return packed


def from_bytes(packed: Packed) -> dict[str, Tensor]:
    """Return read-only tensors that share memory with the packed ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {
            name: torch.from_numpy(array).view(dtype).view(shape)
            if array.size
            else torch.empty(shape, dtype=dtype, device="cpu")
            for name, (array, shape, dtype) in packed.items()
        }
