"""Workers of this machine: processes that are forked from a server, with a socket and shared memory for each."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from selectors import EVENT_READ, PollSelector
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.backend import Settings
from rlstruct.batchers.progress import Interrupted, Phase, Progress
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.batchers.slab import Steps
from rlstruct.batchers.workers.fork_server import start_process
from rlstruct.batchers.workers.pool import WorkerPool
from rlstruct.batchers.workers.processes import (
    GUARD,
    NO_MAIN_GUARD,
    WORKER_NAME,
    leave,
    open_standard_streams,
    quiet_start,
)
from rlstruct.batchers.workers.transport import Batch, Order, Weights
from rlstruct.batchers.workers.worker import Worker
from rlstruct.core import Layout
from rlstruct.device import registered_backends
from rlstruct.profiling.operations import join as join_profile
from rlstruct.sharing import GpuSharing

# Two batches can be outstanding, each with its own weights, while the next weights arrive.
_SLOTS = range(3)
# A killed worker is gone at once. One whose main script cannot be imported closes its end of the channel first, and
# then Python tears torch down, which takes seconds on a busy machine: its exit code is worth the wait.
_LEAVING_SECONDS = 5.0
_LENGTH = struct.Struct("!Q")  # of a message
_LONGEST = 1e6  # seconds; poll() counts milliseconds in 32 bits


class Channel:
    """One end of a socket pair that carries pickled objects.

    `multiprocessing.connection.Connection` would read a message to its end, however long the other process stops in
    the middle of it; and torch would put each tensor of a message into a file and start a thread that serves it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(_LENGTH.size)
        self._filled = 0
        self._has_length = False

    def fileno(self) -> int:
        """Return the file descriptor, for whoever waits for messages."""
        return self._socket.fileno()

    def send(self, message: Any, seconds: float | None = None) -> None:  # noqa: ANN401 - whatever can be pickled
        """Send a message, never None, that the other process must read within ``seconds``; None waits for ever.

        Raises:
            TimeoutError, BlockingIOError: it has not been read in time. The channel is of no use any more.
            ConnectionError: the other process is gone.
        """
        pickled = pickle.dumps(message)
        self._socket.settimeout(seconds)
        self._socket.sendall(_LENGTH.pack(len(pickled)) + pickled)

    def receive(self, wait: bool) -> Any:  # noqa: ANN401 - what was sent
        """Return the next message; None unless all of it is there or ``wait`` is set. What has come is kept."""
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
class Start:
    """Arguments of a worker process, besides its end of the channel."""

    index: int
    n_workers: int
    recipe: bytes
    backends: dict[str, str]
    progress: SharedBlock  # where each worker writes what it is doing
    slabs: tuple[SharedBlock, SharedBlock]
    weights: tuple[SharedBlock, ...]

    def words(self) -> Tensor:
        """Map the worker's row of the progress: 8 words, a cache line; `Progress` uses the first three."""
        return self.progress.map(Layout({"words": ((self.n_workers, 8), torch.int64)}))["words"][self.index]


class LocalTransport:
    """Sockets for orders and answers; slabs and three copies of the weights in memory that processes share."""

    is_local = True

    def __init__(self, n_workers: int, placement: GpuSharing) -> None:
        open_standard_streams()  # no socket and no memory gets the number of one
        self._n_workers, self._placement, self._selector = n_workers, placement, PollSelector()
        self._progress = SharedBlock()
        self._slabs = [(SharedBlock(), SharedBlock()) for _ in range(n_workers)]
        self._weights = tuple(SharedBlock() for _ in _SLOTS)

    def open(self, index: int, recipe: bytes) -> LocalLink:
        """Start a process where the placement wants it."""
        slabs, backends = self._slabs[index], registered_backends()
        start = Start(index, self._n_workers, recipe, backends, self._progress, slabs, self._weights)
        with quiet_start(), self._placement.starting(index):
            return LocalLink(start, self._selector)

    def publish(self, weights: Mapping[str, Tensor], version: int, in_use: Sequence[Weights]) -> Weights | None:
        """Write weights, from any device, to a slot that no order may still read."""
        free = {*_SLOTS}.difference(map(attrgetter("place"), in_use))
        if not free:
            return None
        slot, layout = min(free), Layout.of(weights)
        for key, tensor in self._weights[slot].map(layout).items():
            tensor.copy_(weights[key].detach())
        return Weights(version, layout, slot)

    def wait(self, seconds: float) -> list[int]:
        """Poll all sockets, and what tells the end of a process."""
        indices = set[int]()
        for key, _ in self._selector.select(min(max(0.0, seconds), _LONGEST)):
            indices.add(key.data)
        return sorted(indices)

    def n_bytes(self) -> int:
        """Return the size of all slots that were written."""
        return sum(block.layout.nbytes() for block in self._weights)

    def close(self) -> None:
        """Give the shared memory back, and the places of the workers."""
        for block in (self._progress, *self._weights, *(block for slabs in self._slabs for block in slabs)):
            block.close()
        self._placement.close()


class LocalLink:
    """A worker process and the socket to it."""

    def __init__(self, start: Start, selector: PollSelector) -> None:
        self._slabs, self._steps, self._selector = start.slabs, dict[int, Steps](), selector
        self.progress = Progress(start.words())
        self.progress.clear()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self.send = self._channel.send
        with theirs:
            self._process: Any = start_process(main, (start, theirs), f"{WORKER_NAME}-{start.index}")
        self._sources = self._channel, self._process.sentinel
        for source in self._sources:
            selector.register(source, EVENT_READ, start.index)

    @property
    def pid(self) -> int | None:
        """Process id; None once the process is closed."""
        return None if self._process is None else self._process.pid

    def receive(self) -> Any:  # noqa: ANN401 - see `Link`
        """Read an answer from the socket, if all of it is there."""
        return self._channel.receive(wait=False)

    def steps(self, batch: Batch, slab: int) -> Steps:
        """Find the steps in the slab, which is mapped with its first batch."""
        if batch.layout is not None:
            self._steps[slab] = Steps(self._slabs[slab].map(batch.layout))
        return self._steps[slab]

    def where(self) -> str:
        """Name phase and step."""
        if not self.progress.born:
            return "its start, while Python imports your main script"
        if self.progress.phase is Phase.WAIT:
            return "no call of yours: it waits for orders"
        return f"{self.progress.phase.words}, step {self.progress.step}"

    def ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process is None or not self._process.is_alive()

    def death(self) -> str:
        """Name signal or exit code, and the likely cause."""
        self.join(_LEAVING_SECONDS)
        code = None if self._process is None else self._process.exitcode
        if code is None:
            how = "closed its connection but has not ended"
        elif code < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
        else:
            how = f"exited with code {code}"
        hint = ""
        if code == NO_MAIN_GUARD:
            hint = (
                f" Every worker imports your main script, and this one starts the batcher while it is imported. {GUARD}"
            )
        elif code == -signal.SIGKILL:
            hint = " Unless somebody killed it, the machine ran out of memory: its kernel log says so."
        elif not self.progress.born:
            hint = " What kept it from starting is in its traceback, printed above on standard error."
        return f"{how} in {self.where()}.{hint}"

    def stop(self) -> None:
        """Ask it to end at its next phase, or when it reads its next order."""
        self.progress.stop()
        with contextlib.suppress(OSError, ValueError):
            self._channel.send(Order("close"), 0.0)

    def join(self, seconds: float) -> None:
        """Wait for the process; one that still imports your script has nothing to close, and is not waited for."""
        if self._process is not None:
            self._process.join(max(0.0, seconds))

    def kill(self) -> None:
        """End the process, even a stopped one or one in C code."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Leave no zombie and no file descriptor."""
        if self._process is None:
            return
        for source in self._sources:
            self._selector.unregister(source)
        self._process.join(1.0)  # not for ever: the kernel may hold a process that waits for a broken disk or driver
        with contextlib.suppress(ValueError):  # it has not ended
            self._process.close()
        self._process = None
        self._channel.close()
        self._steps.clear()


def create_pool(settings: Settings) -> WorkerPool:
    """Create the backend of worker processes on this machine."""
    return WorkerPool(settings, LocalTransport(settings.n_processes, settings.placement))


def main(start: Start, end: socket.socket) -> None:
    """Run a worker until it is ordered to stop, fails, or loses its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    torch.set_num_threads(1)
    join_profile()
    progress = Progress(start.words())

    def read(weights: Weights) -> dict[str, Tensor]:
        block: SharedBlock = start.weights[weights.place]
        return block.map(weights.layout)

    worker = Worker(start.recipe, start.backends, progress, [block.map for block in start.slabs], read)
    channel = Channel(end)
    try:
        _serve(worker, channel, progress)
    except Interrupted:
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent is gone: no process is left to report to
            channel.send(worker.describe(error))
    finally:
        worker.close()
    leave()


def _serve(worker: Worker, channel: Channel, progress: Progress) -> None:
    """Carry out orders until one says to close, or the parent is gone."""
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
