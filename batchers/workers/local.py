"""Workers on this machine: processes forked from a server, each with a socket and shared memory."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from selectors import EVENT_READ, PollSelector
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.arguments import LONGEST_WAIT
from rlstruct.batchers.backend import BackendSettings
from rlstruct.batchers.progress import Interrupted, Phase, Progress
from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.batchers.workers.placement import WorkerPlacement
from rlstruct.batchers.workers.pool import WorkerPool
from rlstruct.batchers.workers.processes import (
    GUARD,
    NO_MAIN_GUARD,
    WORKER_NAME,
    Leftovers,
    exit_worker,
    has_ended,
    open_standard_streams,
    quiet_start,
)
from rlstruct.batchers.workers.system import start_process
from rlstruct.batchers.workers.transport import Executed, Order, PublishedWeights
from rlstruct.batchers.workers.worker import Worker
from rlstruct.core import Layout
from rlstruct.device import registered_backends
from rlstruct.profiling.operations import start_if_requested

# Two batches can be outstanding, each with its own weights, while the next weights arrive.
_SLOTS = range(3)
# A killed worker is gone at once. One that cannot import the main script closes its socket seconds before it ends,
# while Python tears torch down on a busy machine. Its exit code is worth the wait.
_LEAVING_SECONDS = 5.0
_UNREAD_BYTES = 2**18  # about as many as on Linux by default
_LENGTH = struct.Struct("!Q")  # header of a message


class Channel:
    """One end of a socket pair that carries pickled objects.

    `multiprocessing.connection.Connection` would block if the other process stopped in the middle of a message, and
    torch would put each tensor of a message into a file and start a thread to serve it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(_LENGTH.size)
        self._filled = 0
        self._has_length = False

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Any, seconds: float | None = None) -> None:  # noqa: ANN401 - whatever can be pickled
        """Send a message other than None. Wait at most ``seconds`` for the other process to read it (None: no limit).

        Raises:
            TimeoutError, BlockingIOError: the message was not read in time; the channel cannot be used any more.
            ConnectionError: the other process is gone.
        """
        pickled = pickle.dumps(message)
        self._socket.settimeout(seconds)
        self._socket.sendall(_LENGTH.pack(len(pickled)) + pickled)

    def receive(self, wait: bool) -> Any:  # noqa: ANN401 - what was sent
        """Return the next message. Unless ``wait`` is set, return None if it is incomplete, and keep its beginning."""
        self._socket.setblocking(wait)
        while True:
            while self._filled < len(self._buffer):
                try:
                    n = self._socket.recv_into(memoryview(self._buffer)[self._filled :])
                except BlockingIOError:
                    return None
                if n == 0:
                    raise EOFError
                self._filled += n
            read, self._filled, self._has_length = self._buffer, 0, not self._has_length
            self._buffer = bytearray(_LENGTH.unpack(read)[0] if self._has_length else _LENGTH.size)
            if not self._has_length:
                return pickle.loads(read)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


@dataclass(frozen=True)
class WorkerArguments:
    """Arguments of a worker process, except its end of the channel."""

    index: int
    n_workers: int
    factory: SharedBlock  # a pipe would hold only its beginning, and the parent would wait until the worker reads on
    factory_layout: Layout
    backends: dict[str, str]
    progress: SharedBlock  # one row per worker
    buffers: tuple[SharedBlock, SharedBlock]
    weights: tuple[SharedBlock, ...]

    def words(self) -> Tensor:
        """Return the worker's row of the progress: a cache line of 8 words, of which `Progress` uses three."""
        return self.progress.map(Layout({"words": ((self.n_workers, 8), torch.int64)}))["words"][self.index]


class LocalTransport:
    """Sockets for orders and answers, and shared memory for buffers and three sets of weights."""

    is_local = True

    def __init__(self, n_workers: int, placement: WorkerPlacement, timeout: float) -> None:
        open_standard_streams()  # otherwise a socket could get the descriptor of one
        self._n_workers, self._placement, self._timeout = n_workers, placement, timeout
        self._selector = PollSelector()
        self._progress, self._factory = SharedBlock(), SharedBlock()
        self._buffers = [(SharedBlock(), SharedBlock()) for _ in range(n_workers)]
        self._weights = tuple(SharedBlock() for _ in _SLOTS)

    def open(self, index: int, factory: bytes) -> LocalLink:
        """Start a process with its share of the GPU."""
        buffers, backends = self._buffers[index], registered_backends()
        layout = Layout({"bytes": ((len(factory),), torch.uint8)})
        self._factory.map(layout)["bytes"].numpy()[:] = memoryview(factory)  # sync: on the CPU
        start = WorkerArguments(
            index, self._n_workers, self._factory, layout, backends, self._progress, buffers, self._weights
        )
        with quiet_start(), self._placement.starting(index):
            return LocalLink(start, self._selector, self._timeout)

    def publish(
        self, weights: Mapping[str, Tensor], version: int, in_use: Sequence[PublishedWeights]
    ) -> PublishedWeights | None:
        """Copy weights, from any device, to a slot that no outstanding order uses."""
        free = {*_SLOTS}.difference(map(attrgetter("place"), in_use))
        if not free:
            return None
        slot, layout = min(free), Layout.of(weights)
        for key, tensor in self._weights[slot].map(layout).items():
            tensor.copy_(weights[key].detach())
        return PublishedWeights(version, layout, slot)

    def wait(self, seconds: float) -> list[int]:
        """Poll the sockets and sentinels of all processes."""
        indices = set[int]()
        for key, _ in self._selector.select(min(max(0.0, seconds), LONGEST_WAIT)):
            indices.add(key.data)
        return sorted(indices)

    def n_bytes(self) -> int:
        """Return the size of all slots that have been written."""
        return sum(block.layout.nbytes() for block in self._weights)

    def close(self) -> None:
        """Release the shared memory and the workers' shares of the GPU."""
        for block in (
            self._progress,
            self._factory,
            *self._weights,
            *(block for buffers in self._buffers for block in buffers),
        ):
            block.close()
        self._placement.close()


class LocalLink:
    """A worker process and the socket to it."""

    def __init__(self, start: WorkerArguments, selector: PollSelector, timeout: float) -> None:
        self._buffers, self._steps, self._selector = start.buffers, dict[int, Rollout](), selector
        self.progress = Progress(start.words())
        self.progress.clear()
        self._start = time.time()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):  # macOS has room for 8 KiB only, and an order would wait for a busy worker
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        self._channel = Channel(ours)
        self.send = self._channel.send
        with theirs:
            self._process: Any = start_process(main, (start, theirs), f"{WORKER_NAME}-{start.index}", timeout)
        self._sources = self._channel, self._process.sentinel
        for source in self._sources:
            selector.register(source, EVENT_READ, start.index)

    @property
    def pid(self) -> int | None:
        """Process id; None until the process has been forked, and once it is closed."""
        return None if self._process is None else self._process.pid

    def receive(self) -> Any:  # noqa: ANN401 - see `Link`
        """Read an answer from the socket, if it is complete."""
        return self._channel.receive(wait=False)

    def steps(self, batch: Executed, buffer: int) -> Rollout:
        """Return the steps in the buffer, which is mapped when its first batch arrives."""
        if batch.layout is not None:
            self._steps[buffer] = Rollout(self._buffers[buffer].map(batch.layout))
        return self._steps[buffer]

    def where(self) -> str:
        """Describe phase and step; see `Link.where`."""
        if not self.progress.started:
            return "in its start, while Python imports your main script"
        if self.progress.phase is Phase.WAIT:
            return "idle, waiting for the next command"
        return f"in {self.progress.phase.words}, step {self.progress.step}"

    def ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process is None or has_ended(self._process)

    def death(self) -> str:
        """Return the signal or exit code, and the likely cause."""
        self.join(_LEAVING_SECONDS)
        code = None if self._process is None else self._process.exitcode
        if code is None and self.ended():
            how = "ended with a code that is lost, since this program ignores SIGCHLD,"
        elif code is None:
            how = "closed its connection but has not ended"
        elif code < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
        else:
            how = f"exited with code {code}"
        hint = ""
        if code == NO_MAIN_GUARD:
            hint = f" Every worker imports your main script, and this one creates a batcher when imported. {GUARD}"
        elif code == -signal.SIGKILL:
            hint = " Unless somebody killed it, the machine ran out of memory, and the kernel log says so."
        elif not self.progress.started:
            hint = " Its traceback, printed above on standard error, says why it could not start."
        return f"{how} while it was {self.where()}.{hint}"

    def stop(self) -> None:
        """Ask the worker to end at its next phase, or when it next reads an order."""
        self.progress.stop()
        with contextlib.suppress(OSError, ValueError):
            self._channel.send(Order("close"), 0.0)

    def join(self, seconds: float) -> None:
        """Wait at most this long for the process to end."""
        if self._process is not None:
            self._process.join(max(0.0, seconds))

    def kill(self) -> None:
        """Kill the process, even if it is stopped or in C code, and remove what it leaves behind."""
        if self._process is None or self.ended():
            return
        leftovers = None if self.pid is None else Leftovers(self.pid, self._start)
        self._process.kill()
        if leftovers is not None:
            leftovers.remove()

    def close(self) -> None:
        """Reap the process, and close all file descriptors."""
        if self._process is None:
            return
        for source in self._sources:
            self._selector.unregister(source)
        with contextlib.suppress(ValueError):  # it has not ended
            self._process.close()
        self._process = None
        self._channel.close()
        self._steps.clear()


def create_pool(settings: BackendSettings) -> WorkerPool:
    """Create the backend of worker processes on this machine."""
    return WorkerPool(settings, LocalTransport(settings.n_processes, settings.placement, settings.timeout))


def main(start: WorkerArguments, end: socket.socket) -> None:
    """Run a worker until it is ordered to stop, fails, or loses its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides what to do
    torch.set_num_threads(1)
    start_if_requested()
    progress = Progress(start.words())

    def read(weights: PublishedWeights) -> dict[str, Tensor]:
        block: SharedBlock = start.weights[weights.place]
        return block.map(weights.layout)

    factory = bytes(start.factory.map(start.factory_layout)["bytes"].numpy())  # sync: on the CPU
    worker = Worker(factory, start.backends, progress, [block.map for block in start.buffers], read)
    channel, failure = Channel(end), None
    try:
        _serve(worker, channel, progress)
    except Interrupted:
        pass
    except BaseException as error:
        failure = worker.describe(error)
    finally:
        with progress.closing():  # before the parent learns of the failure, and until the process has ended
            if failure is not None:
                with contextlib.suppress(OSError):  # the parent is gone
                    channel.send(failure)
            worker.close()
            exit_worker()


def _serve(worker: Worker, channel: Channel, progress: Progress) -> None:
    """Carry out orders until one of them is to close, or the parent is gone."""
    worker.begin()
    while True:
        progress.enter(Phase.WAIT)
        try:
            order = channel.receive(wait=True)
        except (EOFError, OSError):
            return
        if order.name == "close":
            return
        answer = worker.carry_out(order)
        try:
            channel.send(answer)
        except OSError:
            return
