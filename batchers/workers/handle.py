"""The parent's record of one worker: its orders, its answers, and errors that name it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from rlstruct.batchers.assemble import Part
from rlstruct.batchers.progress import Failure, Phase, describe_environments, unpickle_error, worker_error
from rlstruct.batchers.workers.transport import Created, Executed, Link, Order, PublishedWeights, Transport
from rlstruct.core import DictTensor, Layout
from rlstruct.errors import WorkerError, WorkerTimeout, warn_user

_LEAVING_SECONDS = 1.0  # a process that waits for a broken disk or driver cannot be killed
AnyWorkerError = TypeVar("AnyWorkerError", bound=WorkerError)


class WorkerHandle:
    """A worker of a pool, which answers every order, first in, first out.

    Attributes:
        orders: orders that it has not answered, oldest first.
        batches: finished parts of batches that `RL_Batcher.get` has not returned, oldest first.
        answer: the last answer to an order to save or load.
        created: the last answer to an order to create agent and environments; ``n_envs`` is 0 until then.
        environments: global indices of its environments; ``seed`` seeds the first one, ``agent_seed`` the agent.
        n_running: number of environments with a running episode, as far as is known.
        n_owed: number of batches that were ordered and have not been returned.
        seconds: seconds spent in each phase, as of the last batch.
    """

    link: Link

    def __init__(self, index: int, transport: Transport, factory: bytes, timeout: float) -> None:
        self.index = index
        self.orders: deque[Order] = deque()
        self.batches: deque[Part] = deque()
        self.answer: Any = None
        self.created: Created | None = None
        self.seed = self.agent_seed = -1
        self.n_envs = self.n_running = self.n_owed = 0
        self.environments = range(0)
        self.seconds = {phase.name.lower(): 0.0 for phase in Phase}
        self.layout = Layout()
        self._transport, self._factory, self._timeout = transport, factory, timeout
        self._infos: tuple[DictTensor, DictTensor] | None = None  # agent_info and env_info of its episodes
        self._buffer = 0  # buffer of its newest batch
        self._weights: PublishedWeights | None = None  # the newest weights that were sent to it

    def open(self) -> None:
        """Start the worker process, perhaps in place of one that has ended."""
        try:
            self.link = self._transport.open(self.index, self._factory)
        except OSError as error:  # such as too many open files
            text = f"worker {self.index} cannot be started: {error.strerror or error}. Raise the limit that this names"
            raise WorkerError(f"{text} (see ulimit -a), or start fewer workers.", worker=self.index) from error
        self.n_running = self.n_envs
        self._weights = None

    def order(self, name: str, *arguments: Any, weights: PublishedWeights | None = None) -> None:  # noqa: ANN401
        """Order a method of `Worker`. The weights are sent along unless the worker has them."""
        order = Order(name, arguments, weights if weights is not self._weights else None)
        self.orders.append(order)
        try:
            self.link.send(order, self._timeout)
        except ConnectionError:
            while self.take_answer():  # an earlier answer may name the error
                pass
            raise self.death_error() from None
        except OSError as error:
            text = f"has read none of its orders for {self._timeout:g} s; it is {self.link.where()}."
            raise self._about(WorkerError, text) from error
        self._weights = order.weights or self._weights

    def order_creation(self, seed: int, agent_seed: int) -> None:
        """Order the creation of agent and environments."""
        self.seed, self.agent_seed = seed, agent_seed
        self.order("create", seed, agent_seed)

    def order_reset(self, agent_info: DictTensor, env_info: DictTensor, weights: PublishedWeights | None) -> None:
        """Order new episodes."""
        self.n_running, self._infos = self.n_envs, (agent_info, env_info)
        self.order("reset", agent_info, env_info, weights=weights)

    def order_batch(self, agent_info: DictTensor | None, weights: PublishedWeights | None) -> None:
        """Order a batch, which is written to the other buffer if the last batch has not been returned."""
        self._buffer = 1 - self._buffer if self.n_owed else 0
        self.n_owed += 1
        self.order("execute", agent_info, self._buffer, weights=weights)

    def order_again(self, seed: int, agent_seed: int, weights: PublishedWeights | None) -> None:
        """Start new episodes in a new process, and repeat the orders that the old process has not carried out."""
        owed = [order for order in self.orders if order.name not in ("create", "reset")]
        self.orders.clear()
        self.order_creation(seed, agent_seed)
        if self._infos is not None:
            agent_info, env_info = self._infos
            newest = owed[0].arguments[0] if owed and owed[0].name == "execute" else None
            self.order("reset", agent_info if newest is None else newest, env_info, weights=weights)
        for order in owed:
            self.order(order.name, *order.arguments, weights=weights)

    def take_answer(self) -> bool:
        """Receive one answer. Return False if there was none."""
        try:
            answer = self.link.receive()
        except (EOFError, OSError):
            raise self.death_error() from None
        if answer is None:
            return False
        if isinstance(answer, Failure):
            cause = unpickle_error(answer.error)
            raise worker_error(answer, cause, self.index, self.link.pid, self.seed, self.environments)
        order = self.orders.popleft()
        if isinstance(answer, Executed):
            agent_info, buffer = order.arguments
            if agent_info is not None and self._infos is not None:
                self._infos = agent_info, self._infos[1]
            self.seconds, self.layout = answer.seconds, answer.layout or self.layout
            # The present seed: a restart may change it before the batch is returned.
            steps, first = self.link.steps(answer, buffer), self.environments.start
            self.batches.append(Part(steps, answer.collected, self.seed, first, answer.n_running))
        elif isinstance(answer, Created):
            if self.n_envs not in (0, answer.n_envs):
                raise self._about(WorkerError, f"has created {answer.n_envs} environments, but {self.n_envs} before.")
            self.created, self.n_envs = answer, answer.n_envs
            self.environments = range(self.index * self.n_envs, (self.index + 1) * self.n_envs)
        else:
            self.answer = answer
        return True

    def loaded(self, seed: int, agent_info: DictTensor, env_info: DictTensor) -> None:
        """Record that the worker has loaded a state."""
        self.seed, self.n_running, self._infos = seed, self.n_envs, (agent_info, env_info)

    def take_batch(self) -> Part:
        """Return the oldest finished batch, which is then no longer owed."""
        part, self.n_owed = self.batches.popleft(), self.n_owed - 1
        self.n_running = part.n_running
        return part

    def death_error(self) -> WorkerError:
        """Return an error that says how the worker died."""
        return self._about(WorkerError, self.link.death())

    def timeout_error(self, seconds: float, others: Sequence[WorkerHandle]) -> WorkerTimeout:
        """Create the error for this worker, and others, that gave no answer in time."""
        text = (
            f"gave no answer within {seconds:g} s; it is {self.link.where()}. "
            "If that is normal, pass a longer timeout to RL_Batcher or get(); otherwise close() the batcher."
        )
        if others:
            text += f" Also late: worker {', '.join(str(worker.index) for worker in others)}."
        return self._about(WorkerTimeout, text)

    def is_closing(self) -> bool:
        """Return True while the worker closes its agent or environments."""
        return self.link.progress.is_closing and not self.link.ended()

    def words(self) -> str:
        """Return index, process id, environments and seed for a message."""
        pid = self.link.pid
        who = "no process yet" if pid is None else f"pid {pid}"
        return f"worker {self.index} ({who}, {describe_environments(self.environments)}, seed {self.seed})"

    def _about(self, error_class: type[AnyWorkerError], text: str) -> AnyWorkerError:
        ids, progress = self.environments, self.link.progress
        return error_class(
            f"{self.words()} {text}",
            worker=self.index,
            pid=self.link.pid,
            phase=progress.phase.words,
            environments=(ids.start, ids.stop),
            seed=self.seed,
            step=progress.step,
        )


def end(workers: Sequence[WorkerHandle], close_timeout: float | None = None) -> None:
    """Kill worker processes.

    Args:
        workers: their handles.
        close_timeout: seconds for those that are closing agent and environments; a warning names those that are killed
            nevertheless. None kills them at once, without a warning.
    """
    workers, killed = [worker for worker in workers if hasattr(worker, "link")], ""
    try:
        if close_timeout is not None:
            deadline, closing = time.monotonic() + close_timeout, [one for one in workers if one.is_closing()]
            for worker in workers:
                if worker not in closing:
                    worker.link.kill()
            for worker in closing:
                worker.link.join(deadline - time.monotonic())
            killed = ", ".join(worker.words() for worker in closing if worker.is_closing())
    finally:
        for worker in workers:
            worker.link.kill()
        deadline = time.monotonic() + _LEAVING_SECONDS
        for worker in workers:
            worker.link.join(deadline - time.monotonic())
            worker.link.close()
    if killed:
        warn_user(
            f"RL_Batcher: killed {killed}, because closing environments or agent took longer than close_timeout. What "
            "they were writing may be incomplete. Pass RL_Batcher a longer close_timeout."
        )
