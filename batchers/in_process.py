"""Collection in the process of the caller, by the fastest executor: one kernel, one graph, or step by step."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rlstruct.batchers.assemble import Part
from rlstruct.batchers.backend import BackendStats, Settings
from rlstruct.batchers.collector import Collected, Collector
from rlstruct.batchers.progress import Phase, Progress, describe, worker_error
from rlstruct.batchers.recipe import by_value
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.slab import Steps
from rlstruct.core import DictTensor
from rlstruct.engine.acting import PROMISE
from rlstruct.engine.compiled import Tensors
from rlstruct.engine.fused import FusedRollout, Perceptron
from rlstruct.engine.graph import Graph, RecordingError, recorder_of
from rlstruct.engine.precision import EXACT, products
from rlstruct.engine.streams import lane_of
from rlstruct.errors import UsageError, WorkerError, warn_user
from rlstruct.profiling import operation
from rlstruct.vec_env import Carrying

R = TypeVar("R")

_WORTH_GIVING = 1 << 20  # bytes
_logger = logging.getLogger(__name__)


class FastCollector(Collector):
    """A collector whose trajectories are those of single steps, however they come about.

    With ``whole`` it looks for ways to take T steps at once. All need an agent that promises to be pure.

    Attributes:
        steps: those of the last batch, until they are handed over. The next one writes to the same memory unless it is
            ``owned``.
        owned: whether the memory of a batch becomes the caller's, so that nothing is copied.
    """

    steps: Steps

    def __init__(self, *args: Any, whole: bool, **settings: Any) -> None:  # noqa: ANN401 - see Collector
        """Record nothing yet."""
        super().__init__(*args, **settings)
        env, agent = self.env, self.actor.agent
        self.owned = False
        # Asked of classes: what a wrapper forwards to an object inside is not for others to call.
        self._perceptron: Any = getattr(type(agent), "perceptron", None) if whole and agent.pure else None
        self._kernel: Any = getattr(type(env), "fused_rollout", None)
        self._rollout: FusedRollout | None = None
        self._kind: object = None  # of the perceptron that the rollout was made for
        self._generation = -1  # of the agent's weights, when a batch was last taken step by step
        self._told = False
        self._graph: Graph | None = None
        recorder = recorder_of(self._device) if whole and isinstance(env, Carrying) else None
        if recorder is not None and agent.pure:
            self._graph = Graph(self._program, recorder)
        elif recorder is not None:
            self._tell(f"the agent does not promise to be pure: {PROMISE}")

    def collect(self, agent_info: DictTensor | None) -> Collected:
        """Collect a batch into ``steps``; see `Collector.collect`."""
        if agent_info is not None:
            self.actor.set_agent_info(agent_info)
        record, executor = self._launch(), "kernel"
        if record is None and self._graph is not None and self._may_replay():
            record, executor = self._replay(self._graph), "graph"
        if record is not None:
            found, self.steps = record.pop("found", None), Steps(record)
            return replace(self.finish(self._T, 0, self.steps, found), executor=executor)
        collected, self.steps = super().collect(None), self.slab
        # A small one is copied in less time than the views of another slab take.
        self.owned = self.layout().nbytes() >= _WORTH_GIVING
        if self.owned:
            self.renew()
        if self._graph is not None and self._generation != self.actor.generation:
            self._graph.forget()
        self._generation = self.actor.generation
        return collected

    def _launch(self) -> Tensors | None:
        """Take T steps in one kernel; None if that is not possible."""
        if self._perceptron is None or self._kernel is None:
            return None
        if products(self._device) > EXACT:
            self._tell('torch.set_float32_matmul_precision is not "highest", as its products are', "kernel")
            return None
        perceptron: Perceptron | None = self._perceptron(self.actor.agent)
        if perceptron is None:
            return None
        if perceptron.kind() != self._kind:
            self._kind, self._rollout = perceptron.kind(), self._kernel(self.env, perceptron, self._T)
        if self._rollout is None:
            return None
        seen = self._observation._tensors
        self._progress.enter(Phase.ENVIRONMENT)
        with operation("simulator"):
            record = self._rollout(seen, self.keys(), perceptron)
        self._observation = DictTensor({key: record[f"stream/{key}"][-1].clone() for key in seen})
        self._steps = self._steps + self._T
        running = torch.ones_like(record["stream/done"][0]).expand(self._T, -1)
        return {**record, "running": running}

    def _replay(self, graph: Graph) -> Tensors | None:
        """Take T steps as one graph; None, now and later, if that is not possible."""
        before = self.carry()
        self._progress.enter(Phase.GRAPH)
        try:
            after, record = graph(before)
        except RecordingError as error:
            self.set_carry(before)
            self._graph = None
            warn_user(
                f"RL_Batcher: a batch on {self._device} cannot be recorded as one graph, its steps are taken one by "
                f"one, slower and with equal results: {error}. RL_Batcher(graph=False) does not warn."
            )
            return None
        self.set_carry(after)
        return record

    def _program(self, carry: Tensors) -> tuple[Tensors, Tensors]:
        """T steps as a step of `rlstruct.engine`; the record is a slab, and ``found``, see `BatchChecks.look`."""
        self.set_carry(carry)
        before = self.renew()  # what is recorded writes to memory of its own
        try:
            self.take_steps(look=False)
            record = {**self.slab.tensors, "found": self._checks.look(self.slab, self._T, 0)}
        finally:
            self.renew(before)
            self._progress.enter(Phase.GRAPH)
        return self.carry(), record

    def _may_replay(self) -> bool:
        """Return True if the graph may be replayed: a warm-up batch has run with these weights."""
        if self.actor.agent_info.empty() or self.actor.agent_info.device == self._device:
            return self._generation == self.actor.generation
        self._tell("agent_info is on the CPU, where its values would be frozen: set `agent_info_on_device = True`")
        return False

    def _tell(self, why_not: str, what: str = "graph") -> None:
        if not self._told:
            self._told = True
            _logger.info("RL_Batcher: a batch on %s could run as one %s, but %s.", self._device, what, why_not)


class InProcess:
    """The backend of the caller's process: `execute` collects; `collect` only returns the batch, or raises."""

    has_gaps = queues = False
    interrupted: Literal["new", "failed"] | None = "new"

    def __init__(self, settings: Settings) -> None:
        """Create agent and environment."""
        recipe = replace(settings.recipe, agent_args=by_value(settings.recipe.agent_args))
        self._seed = settings.seeds[0]
        self._lane = lane_of(recipe.device, default=True)
        self._progress = Progress(torch.zeros(4, dtype=torch.int64, device="cpu"), waits=False)
        self._batch: Collected | None = None
        self._failure: BaseException | None = None
        self._n_envs: list[int] = []
        self._progress.enter(Phase.START)
        agent_seed = (settings.agent_seeds or settings.seeds)[0]
        kind = functools.partial(FastCollector, whole=settings.graph)
        self._collector: FastCollector = self._run(recipe.make, self._seed, agent_seed, self._progress, kind=kind)
        env = self._collector.env
        self._n_envs, self.auto_reset, self.has_gaps = [env.n_envs()], env.auto_reset, env.restarts_take_steps
        if isinstance(
            env, Carrying
        ):  # it computes with torch only; others may launch where torch's streams do not wait
            self._lane.give(())
            self._lane = lane_of(recipe.device)
            self._lane.keep(env.carry().values())

    def n_envs(self) -> list[int]:
        """Return the number of environments, which exist already."""
        return self._n_envs

    def reset(self, agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]) -> None:
        """Start new episodes."""
        self._run(self._collector.reset, agent_infos[0], env_infos[0])

    def execute(self, agent_infos: Sequence[DictTensor] | None) -> None:
        """Take the steps of a batch; errors wait for `collect`."""
        self._batch = None
        try:
            self._batch = self._run(self._collector.collect, None if agent_infos is None else agent_infos[0])
        except WorkerError as error:
            self._failure = error

    def collect(self, blocking: bool, timeout: float) -> list[Part] | None:
        """Return the batch. On CUDA nothing waits: what the caller queues from now on comes after the batch."""
        if self._failure is not None:
            raise self._failure
        if self._batch is None:  # unreachable: RL_Batcher calls execute first
            raise UsageError("rlstruct.batchers.in_process: collect before execute.")
        if not blocking and not self._lane.ready():
            return None
        collector, collected, self._batch = self._collector, self._batch, None
        running, steps = collector.running(), collector.steps
        del collector.steps  # else it would keep memory that is another's now
        self._lane.give([*steps.tensors.values(), *([] if running is None else [running])])
        going_on = self._n_envs[0] if running is None else running
        return [Part(steps, collected, self._seed, 0, going_on, collector.owned)]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give the agent the caller's tensors, as they are now."""
        self._run(self._collector.update, self._lane.take(weights), version)

    def state_dicts(self) -> list[CollectorState]:
        """Return the collector's state. Torch's generator belongs to the caller's process, and the caller saves it."""
        return [self._run(self._collector.state_dict)]

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]
    ) -> bool:
        """Go on from a saved state."""
        exact = self._run(self._collector.load_state_dict, states[0], agent_infos[0], env_infos[0])
        self._seed = self._collector.seed
        return exact

    def stats(self) -> BackendStats:
        """Return the collector's seconds and layout."""
        return BackendStats((self._progress.clock.seconds(),), (self._collector.layout(),))

    def close(self) -> None:
        """Close agent and environment."""
        try:
            self._lane.give(())  # tables of the environment are free for what the caller queues from now on
            self._collector.close()
        except Exception:  # as with worker processes: closing always succeeds
            _logger.warning("RL_Batcher.close", exc_info=True)

    def _run(self, call: Callable[..., R], *arguments: Any, **keywords: Any) -> R:  # noqa: ANN401 - of that call
        """Call in the lane; turn an exception of the user's code into the WorkerError that a worker would give."""
        try:
            with self._lane.work():
                result = call(*arguments, **keywords)
        except (Exception, GeneratorExit) as error:
            seen = self._collector.given() if hasattr(self, "_collector") else ""
            failure = describe(error, self._progress, seen)
            self._progress.clock.enter(Phase.WAIT)
            raise worker_error(failure, error, 0, os.getpid(), self._seed, range(sum(self._n_envs))) from error
        self._progress.enter(Phase.WAIT)
        return result
