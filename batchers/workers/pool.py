"""Collection by k workers over any transport: restarts, timeouts, seeds and queueing."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import filterfalse, pairwise
from multiprocessing.util import Finalize
from operator import attrgetter
from typing import Any, Literal

import cloudpickle
from torch import Tensor

from rlstruct import profiling
from rlstruct.batchers.assemble import Part
from rlstruct.batchers.backend import BackendSettings, BackendStats
from rlstruct.batchers.collector_factory import CollectorFactory
from rlstruct.batchers.reports import LostEpisodes
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.workers.handle import WorkerHandle, end
from rlstruct.batchers.workers.transport import PublishedWeights, Transport
from rlstruct.core import DictTensor
from rlstruct.errors import BadTypeError, BadValueError, WorkerError, WorkerTimeout, warn_user
from rlstruct.spaces import ActionIndices, Bounds

_logger = logging.getLogger(__name__)

_STOPPING_SECONDS = 1.2  # time that workers get to end their step before they are killed
_WRITING_SECONDS = 60.0  # the same while a profile is recorded, which they write at the end
_SEED_STRIDE = 1_000_003  # added to the seed of a restarted worker; larger than any number of environments


class WorkerPool:
    """Backend of k workers on any transport. The constructor starts all of them; the first call waits for them."""

    restarts_take_steps = queues = True

    def __init__(self, settings: BackendSettings, transport: Transport) -> None:
        self.auto_reset = False
        self.actions: ActionIndices | None = None
        self.bounds: Bounds = {}
        self.interrupted: Literal["new", "failed"] | None = "failed"
        self._lost: list[LostEpisodes] = []
        self._pid = os.getpid()
        self._timeout, self._close_timeout = settings.timeout, settings.close_timeout
        self._max_restarts = settings.max_restarts
        self._seeds, self._agent_seeds = settings.seeds, settings.agent_seeds
        self._n_batches = 0
        self._n_envs: list[int] = []
        self._transport = transport
        self._weights: PublishedWeights | None = None  # the newest weights
        factory, indices = _pickled(settings.factory), range(settings.n_processes)
        self._workers = [WorkerHandle(index, transport, factory, self._timeout) for index in indices]
        # Unlike weakref.finalize, this does nothing in a forked child and, at exit, runs before multiprocessing waits
        # for its children, one of which may be stopped.
        self._kill = Finalize(self, end, args=(self._workers,), exitpriority=100)
        for worker in self._workers:
            worker.open()
        n_envs = settings.factory.env_args.get("n_envs")
        for worker in self._workers:  # if the seed is known, or can be guessed from env_args
            if worker.index == 0 or len(self._seeds) == len(self._workers) or isinstance(n_envs, int):
                worker.order_creation(*self._seeds_of(worker, n_envs or 0))

    def n_envs(self) -> list[int]:
        """Return the number of environments of each worker. Wait until they have been created."""
        if not self._n_envs:
            with profiling.operation("start"):
                first = self._workers[0]
                self._wait([first], self._timeout)
                for worker in self._workers:
                    seeds = self._seeds_of(worker, first.n_envs)
                    if worker.seed != seeds[0]:
                        worker.order_creation(*seeds)
                self._wait(self._workers, self._timeout)
            self._check_created()
            self._n_envs = [worker.n_envs for worker in self._workers]
        return self._n_envs

    def reset(self, agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]) -> None:
        """Order new episodes. The weights go along, because the agent's initial state may depend on them."""
        for worker, agent_info, env_info in zip(self._workers, agent_infos, env_infos, strict=True):
            with self._replacing():
                worker.order_reset(agent_info, env_info, self._weights)

    def execute(self, agent_infos: Sequence[DictTensor] | None) -> None:
        """Order a batch from every worker that has a running episode."""
        for worker in self._workers:
            if worker.n_running:
                with self._replacing():
                    worker.order_batch(None if agent_infos is None else agent_infos[worker.index], self._weights)

    def collect(self, blocking: bool, timeout: float) -> list[Part] | None:
        """Return the oldest batch, some of which may come from workers that were restarted in the meantime."""
        collecting = list(filter(attrgetter("n_owed"), self._workers))
        try:
            self._wait(collecting, timeout if blocking else 0.0, for_batches=True)
        except WorkerTimeout:
            if blocking:
                raise
            return None
        self._n_batches += 1
        return list(map(WorkerHandle.take_batch, collecting))

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish the weights. Wait if the weights of outstanding batches leave no room for more."""
        self.interrupted = "failed"
        in_use: list[PublishedWeights] = []
        for worker in self._workers:
            in_use.extend(filter(None, map(attrgetter("weights"), worker.orders)))
        published = self._transport.publish(weights, version, in_use)
        if published is None:
            self._wait(self._workers, self._timeout)
            published = self._transport.publish(weights, version, ())
        self._weights = published

    def state_dicts(self) -> list[CollectorState]:
        """Ask all workers for their states."""
        return self._ask("save", [()] * len(self._workers))

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]
    ) -> bool:
        """Restore these states in all workers."""
        answers = self._ask("load", zip(states, agent_infos, env_infos, strict=True), self._weights)
        for worker, (_, seed), *infos in zip(self._workers, answers, agent_infos, env_infos, strict=True):
            worker.loaded(seed, *infos)
        return all(exact for exact, _ in answers)

    def stats(self) -> BackendStats:
        """Return the statistics as of each worker's last batch."""
        workers = self._workers
        return BackendStats(
            seconds=tuple(worker.seconds for worker in workers),
            layouts=tuple(worker.layout for worker in workers),
            weight_bytes=self._transport.n_bytes(),
            pids=tuple(worker.link.pid for worker in workers if self._transport.is_local and worker.link.pid),
            lost=tuple(self._lost),
        )

    def close(self) -> None:
        """Stop the workers, kill those that do not stop, and release everything."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of this object, but the workers belong to its parent
        if not self._kill.still_active():
            return
        start = time.monotonic()
        deadline = start + (_WRITING_SECONDS if profiling.is_on() else _STOPPING_SECONDS)
        try:
            for worker in self._workers:
                worker.link.stop()
            for worker in self._workers:
                if worker.created or worker.link.progress.started:  # before that there is nothing to close
                    worker.link.join(deadline - time.monotonic())
            end(self._workers, max(0.0, start + self._close_timeout - time.monotonic()))
        finally:  # also after Ctrl-C
            self._kill()
            for worker in self._workers:
                worker.batches.clear()
            self._transport.close()

    def _ask(
        self, name: str, arguments: Iterable[tuple[Any, ...]], weights: PublishedWeights | None = None
    ) -> list[Any]:
        """Send an order to every worker, and return their answers."""
        self.n_envs()  # waits until they have been created
        self.interrupted = "failed"
        for worker, arguments_of_worker in zip(self._workers, arguments, strict=True):
            with self._replacing():
                worker.order(name, *arguments_of_worker, weights=weights)
        # Interrupted while they load, the batcher would not know which state they are in.
        self._wait(self._workers, self._timeout, if_interrupted="failed" if name == "load" else None)
        return [worker.answer for worker in self._workers]

    def _wait(
        self,
        workers: Sequence[WorkerHandle],
        seconds: float,
        *,
        for_batches: bool = False,
        if_interrupted: Literal["failed"] | None = None,
    ) -> None:
        """Receive answers from all workers until these have answered all orders or, ``for_batches``, have a batch."""
        deadline = time.monotonic() + seconds
        unready = partial(filterfalse, attrgetter("batches")) if for_batches else partial(filter, attrgetter("orders"))
        while late := list(unready(workers)):
            with self._replacing():
                self.interrupted = if_interrupted  # None: no answer is lost
                ready = self._transport.wait(deadline - time.monotonic())
                self.interrupted = "failed"
                if not ready:
                    raise late[0].timeout_error(seconds, late[1:])
                for index in ready:
                    worker = self._workers[index]
                    if not worker.take_answer() and worker.link.ended():
                        raise worker.death_error()

    def _seeds_of(self, worker: WorkerHandle, n_envs: int) -> tuple[int, int]:
        """Return the seeds of a worker's environments and agent, given the number of environments per worker."""
        one_each = len(self._seeds) == len(self._workers)
        seed = self._seeds[worker.index] if one_each else self._seeds[0] + worker.index * n_envs
        return seed, seed if self._agent_seeds is None else self._agent_seeds[worker.index]

    def _check_created(self) -> None:
        created = [worker.created for worker in self._workers if worker.created is not None]
        self.auto_reset, self.actions, self.bounds = created[0].auto_reset, created[0].actions, created[0].bounds
        shapes = [(answer.n_envs, answer.auto_reset) for answer in created]
        if len(set(shapes)) > 1:
            raise BadValueError(
                "RL_Batcher: create_env created different environments in different processes: (n_envs, auto_reset) "
                f"is {shapes}. Let create_env depend only on env_args and seed."
            )
        gaps = [high - low for low, high in pairwise(sorted(self._seeds))]
        if gaps and min(gaps) < (n := created[0].n_envs):
            warn_user(
                f"RL_Batcher: seeds={list(self._seeds)} with {n} environments per process overlap: environment j of a "
                f"process is seeded with the process's seed + j, so some environments are copies of others. "
                f"Pass seed={self._seeds[0]} instead, or space the seeds by {n}."
            )
        if any(answer.cuda_initialised for answer in created):
            warn_user(
                "RL_Batcher: device='cpu', but a worker opened a CUDA context (300 to 700 MB of GPU memory for each "
                "process). Keep CUDA tensors out of agent_args and env_args, or pass device='cuda:0'."
            )

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Restart a worker that fails once all environments exist, unless all restarts have been used up."""
        self.interrupted = "failed"
        try:
            yield
        except WorkerTimeout:
            raise  # it may still answer
        except WorkerError as error:
            if not self._n_envs or len(self._lost) >= self._max_restarts:
                raise
            with self._replacing():
                self._replace(self._workers[error.worker], error)

    def _replace(self, worker: WorkerHandle, error: WorkerError) -> None:
        """Restart a worker, and repeat the orders that it has not carried out."""
        ids, seed = worker.environments, worker.seed + _SEED_STRIDE
        self._lost.append(
            LostEpisodes(
                worker=worker.index,
                environments=(ids.start, ids.stop),
                seed=worker.seed,
                new_seed=seed,
                batch=self._n_batches + len(worker.batches),
                step=error.step or 0,
                reason=str(error),
            )
        )
        _logger.warning("RL_Batcher restarts a worker; its episodes are lost: %s", error)
        end([worker], self._close_timeout)
        worker.open()
        worker.order_again(seed, worker.agent_seed + _SEED_STRIDE, self._weights)


def _pickled(factory: CollectorFactory) -> bytes:
    """Pickle the factory by value, including lambdas, closures and classes of the main script."""
    for field in fields(factory):
        try:
            cloudpickle.dumps(getattr(factory, field.name))
        except Exception as error:
            raise BadTypeError(
                f"RL_Batcher: {field.name} cannot be sent to worker processes: {error}. "
                "Create what cannot be pickled inside create_env or create_agent, or collect with n_processes=0."
            ) from error
    payload: bytes = cloudpickle.dumps(factory)
    return payload
