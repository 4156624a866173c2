"""The parent's end of one worker: its orders and answers, and what to tell the user when it fails."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlstruct.batchers.assemble import Part
from rlstruct.batchers.progress import Failure, Phase, Progress, spell, unpickled, worker_error
from rlstruct.batchers.slab import Steps
from rlstruct.batchers.workers.channel import Channel
from rlstruct.batchers.workers.fork_server import start_process
from rlstruct.batchers.workers.processes import GUARD, NO_MAIN_GUARD, WORKER_NAME
from rlstruct.batchers.workers.weights import Weights
from rlstruct.batchers.workers.worker import Batch, Created, Start, main
from rlstruct.core import DictTensor, Layout
from rlstruct.errors import WorkerError, WorkerTimeout

# A killed worker is gone at once. One whose main script cannot be imported closes its end of the channel first, and
# then Python tears torch down, which takes seconds on a busy machine: its exit code is worth the wait.
_LEAVING_SECONDS = 5.0

AnyWorkerError = TypeVar("AnyWorkerError", bound=WorkerError)


@dataclass(frozen=True)
class Order:
    """An order that the worker has not answered yet; ``weights`` are those that it reads first, if any."""

    name: str
    arguments: tuple[Any, ...]
    weights: Weights | None


class WorkerHandle:
    """One worker process, as its parent sees it. The worker answers every order, in the order in which they came.

    It may leave an order unread for ``timeout`` seconds.

    Attributes:
        orders: those that it has not answered, oldest first.
        batches: its shares of batches that it has finished and `RL_Batcher.get` has not returned, oldest first.
        answer: its last answer to an order to save or load.
        created: its answer to the last order to create agent and environments.
        seed: seed of its first environment.
        n_envs: how many environments it has, 0 until it has said so.
        n_running: how many of them go on, as far as is known.
        seconds: how long each phase took, as of its last batch.
        layout: of its slabs; empty until known.
    """

    def __init__(self, start: Start, progress: Progress, timeout: float) -> None:
        """Remember everything; `spawn` starts the process."""
        self.index = start.index
        self.progress = progress
        self.orders: deque[Order] = deque()
        self.batches: deque[Part] = deque()
        self.answer: Any = None
        self.created: Created | None = None
        self.seed = -1
        self.n_envs = self.n_running = 0
        self.seconds = {phase.name.lower(): 0.0 for phase in Phase}
        self.layout = Layout()
        self.blocks = start.slabs
        self.channel: Any = None  # a Channel, or what stands in for it, as for the process
        self.process: Any = None
        self._start = start
        self._timeout = timeout
        self._infos: tuple[DictTensor, DictTensor] | None = None  # agent_info and env_info of its episodes
        self._slab = 0  # the one that its newest batch goes to
        self._slabs: dict[int, Steps] = {}
        self._weights: Weights | None = None  # the newest that it knows of

    def spawn(self) -> None:
        """Start a process, which may replace one that is gone."""
        self.progress.clear()
        try:
            self.start()
        except OSError as error:  # such as too many open files
            text = f"worker {self.index} cannot be started: {error.strerror or error}. Raise the limit that it names"
            raise WorkerError(f"{text} (see ulimit -a), or start fewer workers.", worker=self.index) from error
        self.n_running = self.n_envs
        self._weights = None

    def start(self) -> None:
        """Start the process itself."""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            self.process = start_process(main, (self._start, theirs), f"{WORKER_NAME}-{self.index}")

    @property
    def pid(self) -> int | None:
        """Id of the process, None while there is none."""
        return None if self.process is None else self.process.pid

    def sources(self) -> Sequence[Any]:
        """Return what becomes readable when it answers or ends."""
        return self.channel, self.process.sentinel if self.process else -1

    def join(self, seconds: float) -> None:
        """Wait for it to end, but no longer than this."""
        if self.process is not None:
            self.process.join(max(0.0, seconds))

    @property
    def environments(self) -> range:
        """Global indices of its environments."""
        return range(self.index * self.n_envs, (self.index + 1) * self.n_envs)

    @property
    def owes(self) -> bool:
        """Return True if it was ordered a batch that has not been returned."""
        return bool(self.batches) or any(order.name == "execute" for order in self.orders)

    def reads(self) -> set[int]:
        """Return the slots of the weights that it may still read."""
        return {order.weights.slot for order in self.orders if order.weights is not None}

    def order(self, name: str, *arguments: Any, weights: Weights | None = None) -> None:  # noqa: ANN401
        """Order a method of `Worker`; the newest weights travel along if the worker has others."""
        new = weights if weights is not self._weights else None
        self.orders.append(Order(name, arguments, new))
        try:
            self.channel.send((name, new, arguments), self._timeout)
        except ConnectionError:
            while self.take_answer():  # what it said last, before its end of the channel closed
                pass
            raise self.death() from None
        except OSError as error:
            text = f"has read none of its orders for {self._timeout:g} s; it is in {self._where()}."
            raise self._about(WorkerError, text) from error
        self._weights = weights if new is not None else self._weights

    def order_creation(self, seed: int, agent_seed: int | None) -> None:
        """Order agent and environments; by default the agent gets the seed of the environments."""
        self.seed = seed
        self.order("create", seed, seed if agent_seed is None else agent_seed)

    def order_reset(self, agent_info: DictTensor, env_info: DictTensor, weights: Weights | None) -> None:
        """Order new episodes."""
        self.n_running, self._infos = self.n_envs, (agent_info, env_info)
        self.order("reset", agent_info, env_info, weights=weights)

    def order_batch(self, agent_info: DictTensor | None, weights: Weights | None) -> None:
        """Order a batch; it goes to the other slab if this one has not been returned."""
        self._slab = 1 - self._slab if self.owes else 0
        self.order("execute", agent_info, self._slab, weights=weights)

    def order_again(self, seed: int, agent_seed: int | None, weights: Weights | None) -> None:
        """Let a new process begin new episodes, and order the batches that the old one still owes."""
        owed = [order for order in self.orders if order.name == "execute"]
        self.orders.clear()
        self.order_creation(seed, agent_seed)
        if self._infos is not None:
            agent_info, env_info = self._infos
            newest = owed[0].arguments[0] if owed else None
            self.order("reset", agent_info if newest is None else newest, env_info, weights=weights)
        for order in owed:
            self.order("execute", *order.arguments, weights=weights)

    def take_answer(self) -> bool:
        """Read one answer; return whether a whole one was there."""
        try:
            answer = self.channel.receive(wait=False)
        except (EOFError, OSError):
            raise self.death() from None
        if answer is None:
            return False
        if isinstance(answer, Failure):
            cause = unpickled(answer.error)
            raise worker_error(answer, cause, self.index, self.pid, self.seed, self.environments)
        order = self.orders.popleft()
        if isinstance(answer, Created):
            if self.n_envs not in (0, answer.n_envs):
                raise self._about(WorkerError, f"has made {answer.n_envs} environments after {self.n_envs} before.")
            self.created, self.n_envs = answer, answer.n_envs
        elif isinstance(answer, Batch):
            self._finish(answer, *order.arguments)
        else:
            self.answer = answer
        return True

    def _finish(self, batch: Batch, agent_info: DictTensor | None, slab: int) -> None:
        if agent_info is not None and self._infos is not None:
            self._infos = agent_info, self._infos[1]
        self.seconds = batch.seconds
        # The seed as it is now: the process may be replaced by one with another seed before the batch is returned.
        steps, first = self.steps_of(batch, slab), self.environments.start
        self.batches.append(Part(steps, batch.collected, self.seed, first, batch.n_running))

    def steps_of(self, batch: Batch, slab: int) -> Steps:
        """Find the steps of a batch in its slab."""
        if batch.layout is not None:  # the first batch in this slab
            self.layout = batch.layout
            self._slabs[slab] = Steps(self.blocks[slab].map(batch.layout))
        return self._slabs[slab]

    def go_on(self, seed: int, agent_info: DictTensor, env_info: DictTensor) -> None:
        """Note that it has loaded a state."""
        self.seed, self.n_running, self._infos = seed, self.n_envs, (agent_info, env_info)

    def take_batch(self) -> Part:
        """Return the oldest finished batch, which is no longer owed then."""
        share = self.batches.popleft()
        self.n_running = int(share.running)  # sync: none, a worker has counted
        return share

    def stop(self) -> None:
        """Tell it to end, at its next phase or when it reads its next order."""
        self.progress.stop()
        with contextlib.suppress(OSError, ValueError):
            self.channel.send(("close", None, ()), 0.0)

    def release(self) -> None:
        """Give the slabs back; the process has ended."""
        self.batches.clear()
        self._slabs.clear()
        for block in self.blocks:
            block.close()

    def died(self) -> bool:
        """Return True if the process has ended."""
        return self.process is None or not self.process.is_alive()

    def death(self) -> WorkerError:
        """Say how it died."""
        self.join(_LEAVING_SECONDS)
        code = None if self.process is None else self.process.exitcode
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
        return self._about(WorkerError, f"{how} in {self._where()}.{hint}")

    def timeout_error(self, seconds: float, others: Sequence[WorkerHandle]) -> WorkerTimeout:
        """Say that it is late, and which others are."""
        text = (
            f"gave no answer within {seconds:g} s; it is in {self._where()}. "
            "If that is normal, pass a longer timeout to RL_Batcher or get(); else close() the batcher."
        )
        if others:
            text += f" Late as well: worker {', '.join(str(worker.index) for worker in others)}."
        return self._about(WorkerTimeout, text)

    def _where(self) -> str:
        if not self.progress.born:
            return "its start, while Python imports your main script"
        if self.progress.phase is Phase.WAIT:
            return "no call of yours: it waits for orders"
        return f"{self.progress.phase.words}, step {self.progress.step}"

    def _about(self, kind: type[AnyWorkerError], text: str) -> AnyWorkerError:
        ids = self.environments
        return kind(
            f"worker {self.index} (pid {self.pid}, {spell(ids)}, seed {self.seed}) {text}",
            worker=self.index,
            pid=self.pid,
            phase=self.progress.phase.words,
            environments=(ids.start, ids.stop),
            seed=self.seed,
            step=self.progress.step,
        )


def end(workers: Sequence[WorkerHandle]) -> None:
    """End workers at once, even stopped ones and those in C code; leave no zombie and no file descriptor."""
    started = [(worker, worker.process) for worker in workers if worker.process is not None]
    for _, process in started:
        process.kill()
    for worker, process in started:
        process.join(1.0)  # not for ever: the kernel may hold a process that waits for a broken disk or driver
        with contextlib.suppress(ValueError):  # it has not ended
            process.close()
        worker.process = None
        worker.channel.close()
