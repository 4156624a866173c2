"""The parent's end of one worker process: orders, answers, and what to say when it fails. Part of rlstruct.batchers."""

from __future__ import annotations

import contextlib
import pickle
import signal
from collections import deque
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from rlstruct.batchers.failures import Failure, spell, unpickled, worker_error
from rlstruct.batchers.hand_over import Part
from rlstruct.batchers.processes import GUARD, NO_MAIN_GUARD, WORKER_NAME, limit_sending, mortal_parent
from rlstruct.batchers.progress import Phase, Progress
from rlstruct.batchers.shared_memory import Layout
from rlstruct.batchers.slab import Steps
from rlstruct.batchers.worker import Batch, Created, Loaded, Measured, Saved, Start, main
from rlstruct.core import DictTensor
from rlstruct.errors import WorkerError, WorkerTimeout

# A killed worker is gone at once. One whose main script cannot be imported closes its end of the pipe, and then Python
# takes torch apart, on a busy machine for seconds: its exit code is worth them.
_LEAVING_SECONDS = 5.0

AnyWorkerError = TypeVar("AnyWorkerError", bound=WorkerError)


@dataclass(frozen=True)
class Order:
    """A batch that a worker owes.

    Attributes:
        agent_info: new settings of its agent from this batch on, or None.  [B]
        slab: which of its two slabs is written: not the one of the order before, if that is still owed.
    """

    agent_info: DictTensor | None
    slab: int


class Worker:
    """One worker process.

    Args:
        start: what it is born with, its own end of the pipe excepted.
        status: its row of the status block.
        timeout: seconds that it may leave an order unread.

    Attributes:
        seed: seed of its first environment.
        first_environment: global index of that environment.
        ordered: whether it was told to create agent and environments.
        created: its answer to that.
        n_envs: how many environments it has, 0 as long as it has not said so.
        n_running: how many of them go on, as far as is known.
        n_batches: how many it has handed over since the last reset.
        settings: ``agent_info`` and ``env_info`` of its last reset, or newer ones that finished batches had.  [B] each
        owed: the batches that it was ordered and that have not been handed over, the oldest first.
        finished: those of them that are ready, also the oldest first.
        edition: which writing of the weights it was told to read, 0 for none.
        weights_layout: their layout.
        layout: of where it writes; empty as long as nobody knows.
        reply: its answer to an order to save or load, None while it does so.
    """

    def __init__(self, start: Start, status: Progress, timeout: float) -> None:
        """Remember everything; `spawn` starts the process."""
        self.index = start.index
        self.ordered = False
        self.seed = -1
        self.n_envs = 0
        self.first_environment = 0
        self.created: Created | None = None
        self.n_running = 0
        self.n_batches = 0
        self.settings: tuple[DictTensor, DictTensor] | None = None
        self.owed: deque[Order] = deque()
        self.finished: deque[Part] = deque()
        self.edition = 0
        self.weights_layout: Layout = {}
        self.reply: Saved | Loaded | None = None
        self.seconds = {phase.name.lower(): 0.0 for phase in Phase}
        self.layout: Layout = {}
        self.blocks = start.steps
        self._slabs: list[Steps | None] = [None, None]
        self.status = status
        self._start = start
        self._timeout = timeout

    def spawn(self) -> tuple[SpawnProcess, Connection]:
        """Start a process, also in place of one that is gone, and return what must be killed and closed some day."""
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        limit_sending(self.connection, self._timeout)
        self.status.clear()
        # No daemon: those may not have children of their own, as gymnasium's AsyncVectorEnv has.
        self.process = context.Process(
            target=main, args=(self._start, theirs, mortal_parent()), name=f"{WORKER_NAME}-{self.index}", daemon=False
        )
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        self.n_running = self.n_envs
        self.edition, self.weights_layout = 0, {}
        return self.process, self.connection

    @property
    def environments(self) -> range:
        """Global indices of its environments."""
        return range(self.first_environment, self.first_environment + self.n_envs)

    def order_creation(self, seed: int, agent_seed: int | None) -> None:
        """Order agent and environments; the agent is seeded as its environments unless told otherwise."""
        self.seed, self.created, self.ordered = seed, None, True
        self.order("create", seed, seed if agent_seed is None else agent_seed)

    def begin(self, agent_info: DictTensor, env_info: DictTensor) -> None:
        """Note the new episodes that `order_reset` is going to order."""
        self.n_running, self.n_batches, self.settings = self.n_envs, 0, (agent_info, env_info)

    def order_reset(self) -> None:
        """Order the episodes that were noted last."""
        self.order("reset", *(self.settings or ()))

    def owe(self, agent_info: DictTensor | None) -> None:
        """Note a batch that `order_batch` is going to order."""
        self.owed.append(Order(agent_info, 1 - self.owed[-1].slab if self.owed else 0))

    def order_batch(self) -> None:
        """Order the batch that was noted last."""
        order = self.owed[-1]
        self.order("execute", order.agent_info, order.slab)

    def order_again(self) -> None:
        """Order from a new process what the old one has not done: the last reset, and every batch it still owes."""
        unfinished = list(self.owed)[len(self.finished) :]
        if self.settings is not None:
            agent_info, env_info = self.settings
            newest = unfinished[0].agent_info if unfinished else None
            self.order("reset", agent_info if newest is None else newest, env_info)
        for order in unfinished:
            self.order("execute", order.agent_info, order.slab)

    def order(self, *order: Any) -> None:  # noqa: ANN401 - tensors, layouts, numbers
        """Send an order.

        Raises:
            WorkerError: the worker is dead, or reads nothing.
        """
        try:
            # Not connection.send: torch would put each tensor into a file of its own and start a thread to serve it.
            self.connection.send_bytes(pickle.dumps(order))
        except (BrokenPipeError, ConnectionError):
            while self.take_answer():  # what it said last, before its end of the pipe closed
                pass
            raise self.death() from None
        except OSError as error:
            text = f"has read none of its orders for {self._timeout:g} s; it is in {self._where()}"
            raise self._about(WorkerError, text + ".") from error

    def take_answer(self) -> bool:
        """Read one answer, if there is one.

        Returns:
            Whether there was one.

        Raises:
            WorkerError: the answer is that it failed, or it is dead.
        """
        try:
            if not self.connection.poll():
                return False
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self.death() from None
        if isinstance(answer, Failure):
            cause = unpickled(answer.error)
            raise worker_error(answer, cause, self.index, self.pid, self.seed, self.environments)
        if isinstance(answer, Measured):
            self.layout = answer.layout
        elif isinstance(answer, Created):
            if self.n_envs not in (0, answer.n_envs):
                raise self._about(WorkerError, f"has made {answer.n_envs} environments after {self.n_envs} before.")
            self.created, self.n_envs = answer, answer.n_envs
        elif isinstance(answer, Saved | Loaded):
            self.reply = answer
        else:
            self._finish(answer)
        return True

    def _finish(self, answer: Batch) -> None:
        """Note that the oldest batch that was not finished is."""
        order = self.owed[len(self.finished)]
        if order.agent_info is not None and self.settings is not None:
            self.settings = order.agent_info, self.settings[1]
        if answer.layout is not None:
            self.layout = answer.layout
            self._slabs[order.slab] = Steps(self.blocks[order.slab].map(answer.layout))
        slab = self._slabs[order.slab]
        if slab is None:  # unreachable: the first batch in a slab brings its layout; narrows the type
            raise RuntimeError("rlstruct.batchers.worker_handle: the slab is missing.")
        self.seconds = answer.seconds
        # The seed now: this process may be replaced by one with another before the batch is handed over.
        self.finished.append(Part(slab, answer.collected, self.seed, self.first_environment, answer.n_still_running))

    def take(self) -> Part:
        """Return the oldest finished batch, which is no longer owed then."""
        self.owed.popleft()
        part = self.finished.popleft()
        self.n_batches += 1
        if isinstance(part.running, int):  # always: the worker has counted; narrows the type
            self.n_running = part.running
        return part

    def stop(self) -> None:
        """Tell it to end, at its next phase or when it reads its next order."""
        self.status.stop()
        with contextlib.suppress(OSError, ValueError):
            limit_sending(self.connection, 0.0)
            self.connection.send(("close",))

    def death(self) -> WorkerError:
        """Say how it died."""
        self.process.join(_LEAVING_SECONDS)
        code = self.process.exitcode
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
            hint = " If nobody killed it, the machine has run out of memory: its kernel log would say so."
        elif not self.status.born:
            hint = " What kept it from starting is in its traceback, printed above on standard error."
        return self._about(WorkerError, f"{how} in {self._where()}.{hint}")

    def timeout_error(self, seconds: float, others: list[Worker]) -> WorkerTimeout:
        """Say that it is late, and which others are."""
        text = (
            f"gave no answer within {seconds:g} s; it is in {self._where()}. "
            "If that is normal, pass a longer timeout to RL_Batcher or get(); else close() the batcher."
        )
        if others:
            text += f" Late as well: worker {', '.join(str(worker.index) for worker in others)}."
        return self._about(WorkerTimeout, text)

    def _where(self) -> str:
        if not self.status.born:
            return "its start, while Python imports your main script"
        if self.status.phase is Phase.WAIT:
            return "no call of yours: it waits for orders"
        return f"{self.status.phase.words}, step {self.status.step}"

    def _about(self, kind: type[AnyWorkerError], text: str) -> AnyWorkerError:
        ids = self.environments
        return kind(
            f"worker {self.index} (pid {self.pid}, {spell(ids)}, seed {self.seed}) {text}",
            worker=self.index,
            pid=self.pid,
            phase=self.status.phase.words,
            environments=(ids.start, ids.stop),
            seed=self.seed,
            step=self.status.step,
        )
