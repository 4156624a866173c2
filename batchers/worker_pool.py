"""Collection in k spawned processes, seen from their parent. Part of rlstruct.batchers."""

from __future__ import annotations

import contextlib
import signal
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor

from rlstruct.batchers.collector import Progress
from rlstruct.batchers.failures import Failure, spell, worker_error
from rlstruct.batchers.hand_over import Part
from rlstruct.batchers.processes import kill, quiet_start
from rlstruct.batchers.shared_memory import Layout, SharedBlock, layout_of, n_bytes
from rlstruct.batchers.slab import Slab
from rlstruct.batchers.worker import Batch, Created, Factories, Start, main, status_layout
from rlstruct.core import DictTensor
from rlstruct.device import registered_backends
from rlstruct.errors import WorkerError, WorkerTimeout

AnyWorkerError = TypeVar("AnyWorkerError", bound=WorkerError)

_CLOSING_SECONDS = 0.8  # how long a worker may take to close its environments before it is killed


class Worker:
    """The parent's end of one worker process."""

    def __init__(
        self, index: int, process: SpawnProcess, connection: Connection, block: SharedBlock, seed: int
    ) -> None:
        """Remember where the worker is."""
        self.index = index
        self.process = process
        self.connection = connection
        self.block = block
        self.seed = seed
        self.first_environment = 0
        self.created: Created | None = None
        self.slab: Slab | None = None
        self.batch: Batch | None = None
        self.layout: Layout = {}

    @property
    def environments(self) -> range:
        """Global indices of its environments."""
        n = self.created.n_envs if self.created else 0
        return range(self.first_environment, self.first_environment + n)


class WorkerPool:
    """k spawned processes; they start side by side, and the first call that needs them waits.

    Args:
        factories: how to make agents and environments.
        n_workers: k.
        n_timesteps: T.
        device: where they collect.
        seeds: one per worker, or the one of worker 0 if the others follow from the number of environments.
        agent_seeds: one per worker, or None for its environments' seed.
        n_envs: environments per worker, if known before they are created.
        timeout: seconds that a worker may take to answer.
    """

    def __init__(
        self,
        factories: Factories,
        n_workers: int,
        n_timesteps: int,
        device: torch.device,
        *,
        seeds: Sequence[int],
        agent_seeds: Sequence[int] | None,
        n_envs: int | None,
        timeout: float,
    ) -> None:
        """Start the processes."""
        self.auto_reset = False
        self.in_cpu_memory = True  # what workers collect elsewhere, they copy to shared memory
        self._timeout = timeout
        self._device = device
        self._agent_seeds = agent_seeds
        self._status_block = SharedBlock()
        self._weights_block = SharedBlock()
        self._weights: dict[str, Tensor] = {}
        self._pending_weights: tuple[dict[str, Tensor], int] | None = None
        self._in_flight = False
        self._status = [Progress(row) for row in self._status_block.map(status_layout(n_workers))["status"]]
        self._workers: list[Worker] = []
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._finalizer = weakref.finalize(self, kill, self._processes, self._connections)
        payload = cloudpickle.dumps(factories)
        with quiet_start():
            for index in range(n_workers):
                self._workers.append(self._spawn(index, payload, n_workers, n_timesteps, seeds))
        for worker in self._workers:
            if len(seeds) > worker.index or n_envs is not None:
                worker.seed = (
                    seeds[worker.index] if len(seeds) > worker.index else seeds[0] + worker.index * (n_envs or 0)
                )
                self._order_creation(worker)
        self._created = False

    def n_envs(self) -> list[int]:
        """See Backend."""
        if not self._created:
            self._await_creation()
        return [len(worker.environments) for worker in self._workers]

    def reset(self, agent_infos: list[DictTensor], env_infos: list[DictTensor]) -> None:
        """See Backend."""
        for worker, agent_info, env_info in zip(self._workers, agent_infos, env_infos, strict=True):
            self._send(worker, ("reset", agent_info, env_info))

    def execute(self, agent_infos: Sequence[DictTensor | None]) -> None:
        """See Backend."""
        if self._pending_weights is not None:
            self._publish(*self._pending_weights)
            self._pending_weights = None
        for worker, agent_info in zip(self._workers, agent_infos, strict=True):
            worker.batch = None
            self._send(worker, ("execute", agent_info))
        self._in_flight = True

    def collect(self, blocking: bool, timeout: float) -> list[Part] | None:
        """See Backend."""
        deadline = time.monotonic() + (timeout if blocking else 0.0)
        while missing := [worker for worker in self._workers if worker.batch is None]:
            if not self._receive(missing, deadline - time.monotonic()):
                if blocking:
                    raise self._timeout_error(missing[0], timeout)
                return None
        self._in_flight = False
        return [
            Part(worker.slab, worker.batch.collected, worker.seed, worker.first_environment)
            for worker in self._workers
            if worker.slab is not None and worker.batch is not None
        ]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See Backend. The shared buffer is written only while no worker reads it: between two batches."""
        if self._in_flight or not self._created:
            self._pending_weights = ({key: tensor.detach().clone() for key, tensor in weights.items()}, version)
        else:
            self._pending_weights = None
            self._publish(weights, version)

    def seconds(self) -> list[dict[str, float]]:
        """See Backend. As of the last batch."""
        return [worker.batch.seconds if worker.batch else {} for worker in self._workers]

    def n_bytes(self) -> tuple[list[int], int]:
        """See Backend."""
        return [n_bytes(worker.layout) for worker in self._workers], n_bytes(layout_of(self._weights))

    def close(self) -> None:
        """See Backend. Never takes more than two seconds: a worker that does not stop is killed."""
        for worker, status in zip(self._workers, self._status, strict=False):
            status.stop()
            with contextlib.suppress(OSError, ValueError):
                worker.connection.send(("close",))
        deadline = time.monotonic() + _CLOSING_SECONDS
        alive = [worker.process for worker in self._workers if worker.process.pid is not None]
        for child in alive:
            child.join(max(0.0, deadline - time.monotonic()))
        self._finalizer()
        for block in (self._status_block, self._weights_block, *(worker.block for worker in self._workers)):
            block.close()

    def _spawn(self, index: int, payload: bytes, n_workers: int, n_timesteps: int, seeds: Sequence[int]) -> Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        block = SharedBlock()
        start = Start(
            connection=theirs,
            factories=payload,
            n_timesteps=n_timesteps,
            device=str(self._device),
            backends=registered_backends(),
            index=index,
            status=self._status_block,
            n_workers=n_workers,
            steps=block,
            weights=self._weights_block,
        )
        child = context.Process(target=main, args=(start,), name=f"rlstruct-worker-{index}", daemon=True)
        worker = Worker(index, child, ours, block, seeds[0])
        child.start()
        theirs.close()
        self._processes.append(child)
        self._connections.append(ours)
        return worker

    def _order_creation(self, worker: Worker) -> None:
        agent_seed = worker.seed if self._agent_seeds is None else self._agent_seeds[worker.index]
        self._send(worker, ("create", worker.seed, agent_seed))

    def _await_creation(self) -> None:
        deadline = time.monotonic() + self._timeout
        ordered = [worker for worker in self._workers if worker.index == 0 or worker.seed != self._workers[0].seed]
        while missing := [worker for worker in self._workers if worker.created is None]:
            waiting = [worker for worker in missing if worker in ordered]
            if not self._receive(waiting, deadline - time.monotonic()):
                raise self._timeout_error(waiting[0], self._timeout)
            first = self._workers[0].created
            if first is not None and len(ordered) < len(self._workers):
                for worker in self._workers[1:]:
                    worker.seed = self._workers[0].seed + worker.index * first.n_envs
                    self._order_creation(worker)
                ordered = self._workers
        self._created = True
        self._look_at_creation()

    def _look_at_creation(self) -> None:
        created = [worker.created for worker in self._workers if worker.created is not None]
        self.auto_reset = created[0].auto_reset
        if len({(answer.n_envs, answer.auto_reset) for answer in created}) > 1:
            found = [(answer.n_envs, answer.auto_reset) for answer in created]
            raise ValueError(
                f"RL_Batcher: create_env made different environments in different processes: (n_envs, auto_reset) is "
                f"{found}. Make create_env depend on nothing but env_args and seed."
            )
        for worker in self._workers:
            worker.first_environment = worker.index * created[0].n_envs
        if any(answer.cuda_initialised for answer in created):
            warnings.warn(
                "RL_Batcher: device='cpu', but a worker opened a CUDA context (300 to 700 MB of GPU memory for each "
                "process). Keep CUDA tensors out of agent_args and env_args, or pass device='cuda:0'.",
                stacklevel=4,
            )

    def _publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        layout = layout_of(weights)
        new = layout != layout_of(self._weights)
        if new:
            self._weights = self._weights_block.map(layout)
        for key, tensor in weights.items():
            self._weights[key].copy_(tensor.detach())
        for worker in self._workers:
            self._send(worker, ("weights", version, layout if new else None))

    def _send(self, worker: Worker, order: tuple[Any, ...]) -> None:
        try:
            worker.connection.send(order)
        except (BrokenPipeError, ConnectionError):
            self._answer(worker)  # what it said last, before its end of the pipe closed
            raise self._death(worker) from None

    def _receive(self, waiting: Sequence[Worker], timeout: float) -> bool:
        """Take in the answers that are there, or wait for one; False if none came in time."""
        sources: dict[Any, Worker] = {worker.connection: worker for worker in waiting}
        sources |= {worker.process.sentinel: worker for worker in self._workers}
        ready = wait(list(sources), max(0.0, timeout))
        for worker in {sources[source].index: sources[source] for source in ready}.values():
            if not self._answer(worker) and not worker.process.is_alive():
                raise self._death(worker)
        return bool(ready)

    def _answer(self, worker: Worker) -> bool:
        """Read one answer of a worker, if there is one; raise what it says if it failed."""
        try:
            if not worker.connection.poll():
                return False
            answer = worker.connection.recv()
        except (EOFError, OSError):
            raise self._death(worker) from None
        if isinstance(answer, Failure):
            raise self._failure(worker, answer)
        if isinstance(answer, Created):
            worker.created = answer
        else:
            worker.batch = answer
            if answer.layout is not None:
                worker.layout = answer.layout
                worker.slab = Slab(worker.block.map(answer.layout))
        return True

    def _failure(self, worker: Worker, failure: Failure) -> WorkerError:
        cause: BaseException | None = None
        if failure.error is not None:
            with contextlib.suppress(Exception):  # its class may not exist here: the traceback still tells
                cause = cloudpickle.loads(failure.error)
        error = worker_error(failure, cause, worker.index, worker.process.pid, worker.seed, worker.environments)
        error.__cause__ = cause
        return error

    def _death(self, worker: Worker) -> WorkerError:
        worker.process.join(1.0)
        code = worker.process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with code {code}"
        )
        hint = ""
        if worker.created is None:
            hint = (
                " It never came up: if the lines above speak of the bootstrapping phase, put the code that starts the "
                'batcher under `if __name__ == "__main__":`, since every worker imports your script.'
            )
        status = self._status[worker.index]
        return self._about(WorkerError, worker, f"{how} during {status.phase.words}, step {status.step}.{hint}")

    def _timeout_error(self, worker: Worker, timeout: float) -> WorkerTimeout:
        status = self._status[worker.index]
        text = (
            f"gave no answer within {timeout:g} s; it is in {status.phase.words}, step {status.step}. "
            "If that is normal, pass a longer timeout to RL_Batcher or get(); else close() the batcher."
        )
        return self._about(WorkerTimeout, worker, text)

    def _about(self, kind: type[AnyWorkerError], worker: Worker, text: str) -> AnyWorkerError:
        status, ids = self._status[worker.index], worker.environments
        return kind(
            f"worker {worker.index} (pid {worker.process.pid}, {spell(ids)}, seed {worker.seed}) {text}",
            worker=worker.index,
            pid=worker.process.pid,
            phase=status.phase.words,
            environments=(ids.start, ids.stop),
            seed=worker.seed,
            step=status.step,
        )
