"""Collection in the process of the caller."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected
from rlstruct.batchers.executing import FastCollector
from rlstruct.batchers.hand_over import Share
from rlstruct.batchers.progress import Phase, Progress, describe, worker_error
from rlstruct.batchers.recipe import Recipe, by_value
from rlstruct.batchers.reports import LostEpisodes
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.shared_memory import Layout
from rlstruct.core import DictTensor
from rlstruct.engine.streams import lane_of
from rlstruct.errors import UsageError, WorkerError

_logger = logging.getLogger(__name__)


class InProcess:
    """Collects in the process of the caller, in `execute`; `collect` only hands over, or raises what happened."""

    def __init__(self, recipe: Recipe, seed: int, agent_seed: int, graph: bool) -> None:
        """Create agent and environment."""
        self._lane = lane_of(recipe.device)
        self._progress = Progress(torch.zeros(4, dtype=torch.int64, device="cpu"), waits=False)
        self.lost: list[LostEpisodes] = []
        self.queues = self.waiting = False
        self._seed = seed
        self._batch: Collected | None = None
        self._failure: BaseException | None = None
        self._n_envs = 0
        self._progress.enter(Phase.START)
        with self._working():
            kind = functools.partial(FastCollector, whole=graph)
            recipe = replace(recipe, agent_args=by_value(recipe.agent_args))
            self._collector: FastCollector = recipe.make(seed, agent_seed, self._progress, kind=kind)
        env = self._collector.env
        self._n_envs, self.auto_reset, self.gaps = env.n_envs(), env.auto_reset, env.restarts_take_steps

    def n_envs(self) -> list[int]:
        """See WorkerPool."""
        return [self._n_envs]

    def reset(self, agent_infos: list[DictTensor], env_infos: list[DictTensor]) -> None:
        """See WorkerPool."""
        with self._working():
            self._collector.reset(agent_infos[0], env_infos[0])

    def execute(self, agent_infos: Sequence[DictTensor | None]) -> None:
        """See WorkerPool."""
        self._batch = None
        try:
            with self._working():
                self._batch = self._collector.collect(agent_infos[0])
        except WorkerError as error:
            self._failure = error

    def collect(self, blocking: bool, timeout: float) -> list[Share] | None:
        """See WorkerPool. On CUDA nothing waits: what the caller queues from now on comes after the batch."""
        if self._failure is not None:
            raise self._failure
        if self._batch is None:  # unreachable: RL_Batcher calls execute first
            raise UsageError("rlstruct.batchers.in_process: collect before execute.")
        if not blocking and not self._lane.ready():
            return None
        collector, collected, self._batch = self._collector, self._batch, None
        running = collector.running()
        self._lane.give([*collector.steps.tensors.values(), *([] if running is None else [running])])
        going_on = self._n_envs if running is None else running
        return [Share(collector.steps, collected, self._seed, 0, going_on, collector.owned)]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See WorkerPool."""
        taken = self._lane.take(weights)
        with self._working():
            self._collector.update(taken, version)

    def state_dicts(self) -> list[CollectorState]:
        """See WorkerPool. Torch's generator belongs to the caller's process, and is the caller's to save."""
        with self._working():
            return [self._collector.state_dict()]

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: list[DictTensor], env_infos: list[DictTensor]
    ) -> bool:
        """See WorkerPool."""
        with self._working():
            exact = self._collector.load_state_dict(states[0], agent_infos[0], env_infos[0])
        self._seed = self._collector.seed
        return exact

    def seconds(self) -> list[dict[str, float]]:
        """See WorkerPool."""
        return [self._progress.clock.seconds()]

    def layouts(self) -> list[Layout]:
        """See WorkerPool."""
        return [self._collector.layout()]

    def weight_bytes(self) -> int:
        """See WorkerPool. The agent gets the caller's tensors."""
        return 0

    def close(self) -> None:
        """See WorkerPool."""
        try:
            self._collector.close()
        except Exception:  # as with worker processes: closing always succeeds
            _logger.warning("RL_Batcher.close", exc_info=True)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Queue in the lane; turn whatever the user's code raises into the WorkerError that a worker would give."""
        try:
            with self._lane.work():
                yield
            self._progress.enter(Phase.WAIT)
        except Exception as error:
            given = self._collector.given() if hasattr(self, "_collector") else ""
            failure = describe(error, self._progress, given)
            self._progress.clock.enter(Phase.WAIT)
            raise worker_error(failure, error, 0, os.getpid(), self._seed, range(self._n_envs)) from error
