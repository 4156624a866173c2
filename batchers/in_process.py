"""The backend that collects in the caller's process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from rlstruct.batchers.assemble import Part
from rlstruct.batchers.backend import BackendSettings, BackendStats
from rlstruct.batchers.collector import Collected
from rlstruct.batchers.collector_factory import by_value
from rlstruct.batchers.progress import Phase, Progress, describe_failure, worker_error
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.core import DictTensor
from rlstruct.engine.streams import stream_on
from rlstruct.errors import WorkerError
from rlstruct.indexed_actions import indices_of
from rlstruct.spaces import integer_bounds
from rlstruct.vec_env import Capturable

R = TypeVar("R")

_logger = logging.getLogger(__name__)


class InProcess:
    """The backend that collects in the caller's process, in `execute`; `collect` returns the batch or raises."""

    restarts_take_steps = queues = False
    interrupted: Literal["new", "failed"] | None = "new"

    def __init__(self, settings: BackendSettings) -> None:
        factory = replace(settings.factory, agent_args=by_value(settings.factory.agent_args))
        self._seed = settings.seeds[0]
        self._stream = stream_on(factory.device, default=True)
        self._progress = Progress(waits=False)
        self._collected: Collected  # report on the last batch
        self._failure: BaseException | None = None
        self._n_envs: list[int] = []
        self._progress.enter(Phase.START)
        agent_seed = (settings.agent_seeds or settings.seeds)[0]
        self._collector = self._run(factory.create, self._seed, agent_seed, self._progress, at_once=settings.graph)
        env = self._collector.env
        self.actions = indices_of(env)
        self.bounds = integer_bounds(env.observation_space, "frame")
        self._n_envs, self.auto_reset, self.restarts_take_steps = (
            [env.n_envs()],
            env.auto_reset,
            env.restarts_take_steps,
        )
        # Such an environment uses only torch; others may launch work that is not ordered with torch's streams.
        if isinstance(env, Capturable):
            self._stream.to_caller(())
            self._stream = stream_on(factory.device)
            self._stream.record_use(env.state_tensors().values())

    def n_envs(self) -> list[int]:
        """Return the number of environments, which exist already."""
        return self._n_envs

    def reset(self, agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]) -> None:
        """Start new episodes."""
        self._run(self._collector.reset, agent_infos[0], env_infos[0])

    def execute(self, agent_infos: Sequence[DictTensor] | None) -> None:
        """Collect a batch; `collect` raises its errors."""
        try:
            self._collected = self._run(self._collector.collect, None if agent_infos is None else agent_infos[0])
        except WorkerError as error:
            self._failure = error

    def collect(self, blocking: bool, timeout: float) -> list[Part] | None:
        """Return the batch. On CUDA the host does not wait: whatever the caller queues next runs after the batch."""
        if self._failure is not None:
            raise self._failure
        if not blocking and not self._stream.ready():
            return None
        collector, steps = self._collector, self._collector.steps
        del collector.steps  # the memory may now belong to the caller
        self._stream.to_caller([*steps.tensors.values(), collector.running])
        n_running = self._n_envs[0] if self.auto_reset else collector.count_running()
        return [Part(steps, self._collected, self._seed, 0, n_running)]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give the agent the current values of the caller's tensors."""
        self._run(self._collector.update, self._stream.from_caller(weights), version)

    def state_dicts(self) -> list[CollectorState]:
        """Return the collector's state, without torch's generator: it belongs to the caller, who saves it."""
        return [self._run(self._collector.state_dict)]

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]
    ) -> bool:
        """Continue from a saved state."""
        exact = self._run(self._collector.load_state_dict, states[0], agent_infos[0], env_infos[0])
        self._seed = self._collector.seed
        return exact

    def stats(self) -> BackendStats:
        """Return the collector's seconds and layout."""
        return BackendStats((self._progress.clock.seconds(),), (self._collector.layout,))

    def close(self) -> None:
        """Close agent and environment."""
        try:
            self._stream.to_caller(())  # the caller may reuse the environment's memory for work that it queues next
            self._collector.close()
        except Exception:  # closing always succeeds, as for worker processes
            _logger.warning("RL_Batcher.close", exc_info=True)

    def _run(self, call: Callable[..., R], *arguments: Any, **keywords: Any) -> R:  # noqa: ANN401 - of that call
        """Call on the stream, and convert an exception of the user's code into a worker's WorkerError."""
        try:
            with self._stream.work():
                result = call(*arguments, **keywords)
        except (Exception, GeneratorExit) as error:
            inputs = self._collector.describe_inputs() if hasattr(self, "_collector") else ""
            failure = describe_failure(error, self._progress, inputs)
            self._progress.clock.enter(Phase.WAIT)
            raise worker_error(failure, error, 0, os.getpid(), self._seed, range(sum(self._n_envs))) from error
        self._progress.enter(Phase.WAIT)
        return result
