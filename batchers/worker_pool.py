"""Collection in k spawned processes, seen from their parent. Part of rlstruct.batchers."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlstruct.batchers.hand_over import Part
from rlstruct.batchers.making import Factories
from rlstruct.batchers.processes import kill, quiet_start
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.reports import LostEpisodes
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.shared_memory import Layout, SharedBlock
from rlstruct.batchers.shared_weights import SharedWeights
from rlstruct.batchers.watch import Watch
from rlstruct.batchers.worker import Loaded, Saved, Start, status_layout
from rlstruct.batchers.worker_handle import Worker
from rlstruct.core import DictTensor
from rlstruct.device import registered_backends
from rlstruct.errors import WorkerError, WorkerTimeout

_logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 1.2  # how long workers may take to close their environments before they are killed
# How many batches a worker may have handed over more than the last one, to begin another. Without a limit the workers
# whose environments take their time would be seen less often than the others.
_LEAD = 1
_SEED_STRIDE = 1_000_003  # added to the seed of a worker that is started again; more than anyone has environments


class WorkerPool:
    """k spawned processes; they start side by side, and the first call that needs them waits.

    Args:
        factories: how to make agents and environments.
        n_workers: k.
        n_timesteps: T.
        device: where they collect.
        seeds: one per worker, or that of worker 0 alone if the others follow from the number of environments.
        agent_seeds: one per worker, or None for its environments' seed.
        timeout: seconds that a worker may take to answer.
        max_restarts: how many failed workers are replaced before one raises.

    Raises:
        TypeError: a factory or an argument cannot be sent to another process.
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
        timeout: float,
        max_restarts: int,
    ) -> None:
        """Start the processes."""
        self.auto_reset = False
        self.gaps = self.queues = True
        self.waiting = False
        self.lost: list[LostEpisodes] = []
        self._pid = os.getpid()
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._n_batches = 0
        self._agent_seeds = agent_seeds
        self._status_block, self._weights = SharedBlock(), SharedWeights()
        self._created = False
        self._seeds = seeds
        payload = _pickled(factories)
        status = self._status_block.map(status_layout(n_workers))["status"]
        self._workers = []
        for index in range(n_workers):
            start = Start(
                factories=payload,
                n_timesteps=n_timesteps,
                device=str(device),
                backends=registered_backends(),
                index=index,
                status=self._status_block,
                n_workers=n_workers,
                steps=(SharedBlock(), SharedBlock()),
                weights=self._weights.block,
            )
            self._workers.append(Worker(start, Progress(status[index]), timeout))
        self._watch = Watch()
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        # Not weakref.finalize: this one does nothing in a forked child, and at exit it runs before multiprocessing
        # waits for its children, of which one may be stopped.
        self._kill = Finalize(self, kill, args=(self._processes, self._connections), exitpriority=100)
        self._spawn(self._workers)
        self._order_creation(factories.env_args.get("n_envs"))

    def n_envs(self) -> list[int]:
        """See Backend."""
        if not self._created:
            self._await_creation()
        return [len(worker.environments) for worker in self._workers]

    def reset(self, agent_infos: list[DictTensor], env_infos: list[DictTensor]) -> None:
        """See Backend."""
        self._weights.publish(self._workers, self._timeout)
        for worker, *infos in zip(self._workers, agent_infos, env_infos, strict=True):
            worker.begin(*infos)
            with self._replacing():
                self._weights.send(worker)  # the agent's first state may come from them
                worker.order_reset()

    def execute(self, agent_infos: Sequence[DictTensor | None], depth: int) -> None:
        """See Backend. Every such worker that has episodes to go on with, unless it is too far ahead."""
        self._weights.publish(self._workers, self._timeout)
        playing = [worker for worker in self._workers if worker.n_running]
        last = min(worker.n_batches for worker in playing)
        chosen = [worker for worker in playing if len(worker.owed) < depth and worker.n_batches <= last + _LEAD]
        for worker in chosen:
            worker.owe(agent_infos[worker.index])
        for worker in chosen:
            with self._replacing():
                self._weights.send(worker)
                worker.order_batch()

    def collect(self, blocking: bool, timeout: float, n_workers: int | None) -> list[Part] | None:
        """See Backend."""
        self.waiting = False  # it may have been interrupted
        deadline = time.monotonic() + (timeout if blocking else 0.0)
        collecting = self._collecting()
        while missing := [worker for worker in collecting if not worker.finished]:
            late = len(missing) > len(collecting) - (n_workers or len(collecting))
            with self._replacing():
                if not self._receive(deadline - time.monotonic() if late else 0.0):
                    if not late:
                        break
                    if not blocking:
                        return None
                    raise missing[0].timeout_error(timeout, missing[1:])
        self._n_batches += 1
        return [worker.take() for worker in collecting if worker.finished]

    def _collecting(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.owed]

    def n_running(self) -> int:
        """See Backend."""
        return sum(worker.n_running for worker in self._workers)

    def collecting(self) -> bool:
        """See Backend."""
        return bool(self._collecting())

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See Backend."""
        self._weights.update(weights, version, self._workers)

    def state_dicts(self) -> list[CollectorState]:
        """See Backend."""
        self._ask([("save",)] * len(self._workers))
        return [pickle.loads(worker.reply.state) for worker in self._workers if isinstance(worker.reply, Saved)]

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: list[DictTensor], env_infos: list[DictTensor]
    ) -> bool:
        """See Backend."""
        infos = list(zip(agent_infos, env_infos, strict=True))
        self._weights.publish(self._workers, self._timeout)
        for worker in self._workers:
            self._weights.send(worker)
        self._ask([("load", state, *settings) for state, settings in zip(states, infos, strict=True)])
        replies = [worker.reply for worker in self._workers if isinstance(worker.reply, Loaded)]
        for worker, reply, settings in zip(self._workers, replies, infos, strict=True):
            worker.seed, worker.n_running, worker.n_batches = reply.seed, worker.n_envs, 0
            worker.settings = settings
        return all(reply.exact for reply in replies)

    def seconds(self) -> list[dict[str, float]]:
        """See Backend. As of the last batch."""
        return [worker.seconds for worker in self._workers]

    def layouts(self, agent_info: DictTensor, env_info: DictTensor) -> list[Layout]:
        """See Backend. One worker measures for all."""
        first = self._workers[0]
        if not first.layout:
            first.order("measure", agent_info, env_info)
            deadline = time.monotonic() + self._timeout
            while not first.layout:
                if not self._receive(deadline - time.monotonic()):
                    raise first.timeout_error(self._timeout, [])
        return [worker.layout or first.layout for worker in self._workers]

    def weight_bytes(self) -> int:
        """See Backend."""
        return self._weights.n_bytes()

    def close(self) -> None:
        """See Backend. Never takes more than two seconds: a worker that does not stop is killed."""
        if os.getpid() != self._pid:
            return  # a forked child holds a copy of this object: the workers are not its own
        if self._kill.still_active():
            for worker in self._workers:
                worker.stop()
            deadline = time.monotonic() + _CLOSING_SECONDS
            for child in self._processes:
                with contextlib.suppress(ValueError):  # one that was replaced
                    child.join(max(0.0, deadline - time.monotonic()))
            self._kill()
        steps = [block for worker in self._workers for block in worker.blocks]
        for block in (self._status_block, self._weights.block, *steps):
            block.close()

    def _ask(self, orders: Sequence[tuple[Any, ...]]) -> None:
        """Send each worker an order that it replies to, and wait for all replies."""
        self.n_envs()  # waits for their creation
        for worker, order in zip(self._workers, orders, strict=True):
            worker.reply = None
            worker.order(*order)
        deadline = time.monotonic() + self._timeout
        while missing := [worker for worker in self._workers if worker.reply is None]:
            if not self._receive(deadline - time.monotonic()):
                raise missing[0].timeout_error(self._timeout, missing[1:])

    def _spawn(self, workers: Sequence[Worker]) -> None:
        with quiet_start():
            for worker in workers:
                process, connection = worker.spawn()
                self._processes.append(process)
                self._connections.append(connection)
                self._watch.add(worker)

    def _order_creation(self, n_envs: Any) -> None:  # noqa: ANN401 - whatever env_args["n_envs"] is, if anything
        """Order what can be ordered now: all workers if their seeds are known, or can be guessed from ``n_envs``."""
        for worker in self._workers:
            if len(self._seeds) == len(self._workers):
                worker.order_creation(self._seeds[worker.index], self._agent_seed(worker))
            elif worker.index == 0 or isinstance(n_envs, int):
                worker.order_creation(self._seeds[0] + worker.index * (n_envs or 0), self._agent_seed(worker))

    def _await_creation(self) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            waiting = [worker for worker in self._workers if worker.ordered and worker.created is None]
            if waiting:
                if not self._receive(deadline - time.monotonic()):
                    raise waiting[0].timeout_error(self._timeout, waiting[1:])
            elif wrong := [worker for worker in self._workers if worker.seed != self._right_seed(worker)]:
                for worker in wrong:
                    worker.order_creation(self._right_seed(worker), self._agent_seed(worker))
            else:
                break
        self._look_at_creation()
        self._created = True

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
                stacklevel=5,
            )

    def _right_seed(self, worker: Worker) -> int:
        """The seed that a worker must have, now that the number of environments is known."""
        if len(self._seeds) == len(self._workers):
            return self._seeds[worker.index]
        return self._seeds[0] + worker.index * self._workers[0].n_envs

    def _agent_seed(self, worker: Worker) -> int | None:
        return None if self._agent_seeds is None else self._agent_seeds[worker.index]

    def _receive(self, timeout: float) -> bool:
        """Take in the answers that are there, or wait for one; False if none came in time."""
        self.waiting = True
        ready = self._watch.wait(timeout)
        self.waiting = False
        for worker in ready:
            if not worker.take_answer() and not worker.process.is_alive():
                raise worker.death()
        return bool(ready)

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Start a worker that fails again, unless that has been done often enough."""
        try:
            yield
        except WorkerTimeout:
            raise  # it may still answer
        except WorkerError as error:
            failure: WorkerError | None = error
            while failure is not None:
                if len(self.lost) >= self._max_restarts:
                    raise failure from failure.__cause__
                failure = self._replace(self._workers[error.worker], failure)

    def _replace(self, worker: Worker, error: WorkerError) -> WorkerError | None:
        """Start a worker again and order what the old one was told; return the WorkerError of the new one, if any."""
        ids, seed = worker.environments, worker.seed + _SEED_STRIDE
        self.lost.append(
            LostEpisodes(
                worker=worker.index,
                environments=(ids.start, ids.stop),
                seed=worker.seed,
                new_seed=seed,
                batch=self._n_batches + len(worker.finished),
                step=error.step or 0,
                reason=str(error),
            )
        )
        _logger.warning("RL_Batcher starts a worker again, its episodes are lost: %s", error)
        self._watch.remove(worker)
        kill([worker.process], [worker.connection])
        self._processes.remove(worker.process)
        self._connections.remove(worker.connection)
        self._spawn([worker])
        agent_seed = self._agent_seed(worker)
        try:
            worker.order_creation(seed, None if agent_seed is None else agent_seed + _SEED_STRIDE)
            self._weights.send(worker)
            worker.order_again()
        except WorkerError as failure:
            return failure
        return None


def _pickled(factories: Factories) -> bytes:
    """The factories by value: lambdas, closures and classes of the main script travel too."""
    for field in fields(factories):
        try:
            cloudpickle.dumps(getattr(factories, field.name))
        except Exception as error:
            raise TypeError(
                f"RL_Batcher: {field.name} cannot be sent to worker processes: {error}. "
                "Create what cannot be pickled inside create_env or create_agent, or collect with n_processes=0."
            ) from error
    payload: bytes = cloudpickle.dumps(factories)
    return payload
