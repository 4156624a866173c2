"""Collection in the process of the caller."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected
from rlstruct.batchers.executing import Executing
from rlstruct.batchers.hand_over import Share
from rlstruct.batchers.making import Factories, make_collector, measure
from rlstruct.batchers.progress import Phase, Progress, describe, worker_error
from rlstruct.batchers.reports import LostEpisodes
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.shared_memory import Layout, layout_of
from rlstruct.batchers.slab import Steps
from rlstruct.core import DictTensor
from rlstruct.engine.streams import lane_of
from rlstruct.errors import WorkerError

_logger = logging.getLogger(__name__)


class InProcess:
    """Collects in the process of the caller, in `execute`; `collect` only hands over, or raises what happened."""

    def __init__(
        self, factories: Factories, n_timesteps: int, device: torch.device, seed: int, agent_seed: int, graph: bool
    ) -> None:
        """Create agent and environment."""
        self._lane = lane_of(device)
        self._progress = Progress(torch.zeros(4, dtype=torch.int64, device="cpu"))
        self.lost: list[LostEpisodes] = []
        self.queues = self.waiting = False
        self._seed = seed
        self._batch: tuple[Collected, Steps] | None = None
        self._failure: BaseException | None = None
        self._n_envs = 0

        def allocate(layout: Layout) -> dict[str, Tensor]:
            return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}

        self._measure = partial(measure, factories, seed, agent_seed, n_timesteps=n_timesteps, device=device)
        self._progress.enter(Phase.START)
        with self._named(), self._lane.work():
            self._collector = make_collector(
                factories,
                seed,
                agent_seed,
                n_timesteps=n_timesteps,
                device=device,
                allocate=allocate,
                progress=self._progress,
            )
        env = self._collector.env
        self._n_envs, self.auto_reset, self.gaps = env.n_envs(), env.auto_reset, env.restarts_take_steps
        self._executing = Executing(self._collector, n_timesteps, device, whole=graph)

    def n_envs(self) -> list[int]:
        """See Backend."""
        return [self._n_envs]

    def reset(self, agent_infos: list[DictTensor], env_infos: list[DictTensor]) -> None:
        """See Backend."""
        with self._named(), self._lane.work():
            self._collector.reset(agent_infos[0], env_infos[0])

    def execute(self, agent_infos: Sequence[DictTensor | None]) -> None:
        """See Backend."""
        self._batch = None
        try:
            with self._named(), self._lane.work():
                self._batch = self._executing.collect(agent_infos[0])
        except WorkerError as error:
            self._failure = error

    def collect(self, blocking: bool, timeout: float) -> list[Share] | None:
        """See Backend. On CUDA the host waits for nothing: what the caller queues from now on comes after the batch."""
        if self._failure is not None:
            raise self._failure
        if self._batch is None:  # unreachable: RL_Batcher calls execute first
            raise RuntimeError("rlstruct.batchers.in_process: collect before execute.")
        if not blocking and not self._lane.ready():
            return None
        (collected, steps), self._batch = self._batch, None
        running = self._collector.running()
        self._lane.give([*steps.tensors.values(), *([] if running is None else [running])])
        return [
            Share(steps, collected, self._seed, 0, self._n_envs if running is None else running, self._executing.owned)
        ]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See Backend."""
        taken = self._lane.take(weights)
        with self._named(), self._lane.work():
            self._collector.update(taken, version)

    def state_dicts(self) -> list[CollectorState]:
        """See Backend. Torch's generator belongs to the caller's process, and is the caller's to save."""
        with self._named(), self._lane.work():
            return [self._collector.state_dict()]

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: list[DictTensor], env_infos: list[DictTensor]
    ) -> bool:
        """See Backend."""
        with self._named(), self._lane.work():
            exact = self._collector.load_state_dict(states[0], agent_infos[0], env_infos[0])
        self._seed = self._collector.seed
        return exact

    def seconds(self) -> list[dict[str, float]]:
        """See Backend."""
        return [self._progress.clock.seconds()]

    def layouts(self, agent_info: DictTensor, env_info: DictTensor) -> list[Layout]:
        """See Backend."""
        if self._collector.slab is not None:
            return [layout_of(self._collector.slab.tensors)]
        with self._named():
            self._progress.enter(Phase.START)
            return [self._measure(agent_info, env_info)]

    def weight_bytes(self) -> int:
        """See Backend. The agent gets the caller's tensors."""
        return 0

    def close(self) -> None:
        """See Backend."""
        try:
            self._collector.close()
        except Exception:  # as with worker processes: closing always succeeds
            _logger.warning("RL_Batcher.close", exc_info=True)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn whatever the user's code raises into the WorkerError that a worker process would give."""
        try:
            yield
            self._progress.enter(Phase.WAIT)
        except Exception as error:
            given = self._collector.given() if hasattr(self, "_collector") else ""
            failure = describe(error, self._progress, given)
            raise worker_error(failure, error, 0, os.getpid(), self._seed, range(self._n_envs)) from error
