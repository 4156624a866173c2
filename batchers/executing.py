"""A batch by the fastest executor that agent and environments allow: one kernel, one graph, or step by step."""

from __future__ import annotations

import logging
from typing import Any

import torch

from rlstruct.batchers.collector import Collected, Collector
from rlstruct.batchers.progress import Phase
from rlstruct.batchers.slab import Steps
from rlstruct.core import DictTensor
from rlstruct.engine.acting import PROMISE
from rlstruct.engine.compiled import Tensors
from rlstruct.engine.fused import FusedRollout, Perceptron
from rlstruct.engine.graph import Graph, RecordingError, recorder_of
from rlstruct.errors import warn_user
from rlstruct.profiling import operation
from rlstruct.vec_env import Carrying, VecEnv

_logger = logging.getLogger(__name__)


class FastCollector(Collector):
    """A collector whose trajectories are those of single steps, however they come about.

    With ``whole`` it looks for ways to take T steps at once. All need an agent that promises to be pure.

    Attributes:
        steps: those of the last batch; the next one writes to the same memory unless it is ``owned``.
        owned: whether the memory of a batch becomes the caller's, so that nothing is copied. Environments that write to
            memory that they are lent hold on to it.
    """

    steps: Steps

    def __init__(self, *args: Any, whole: bool, **settings: Any) -> None:  # noqa: ANN401 - see Collector
        """Record nothing yet."""
        super().__init__(*args, **settings)
        env, agent = self.env, self.actor.agent
        self.owned = type(env).lend is VecEnv.lend
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
        record = self._launch()
        if record is None and self._graph is not None and self._may_replay():
            record = self._replay(self._graph)
        if record is not None:
            found, self.steps = record.pop("found", None), Steps(record)
            return self.finish(self._T, 0, self.steps, found)
        collected, self.steps = super().collect(None), self.slab
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
        before = self.slab
        self.set_carry(carry)
        self.renew()  # what is recorded writes to memory of its own
        try:
            self.take_steps(look=False)
            record = {**self.slab.tensors, "found": self._checks.look(self.slab, self._T, 0)}
        finally:
            self.renew(before)
            self._progress.enter(Phase.GRAPH)
        return self.carry(), record

    def _may_replay(self) -> bool:
        """Whether a graph does what single steps would do, and they have warmed up what it needs."""
        if self.actor.agent_info.empty() or self.actor.agent_info.device == self._device:
            return self._generation == self.actor.generation
        self._tell("agent_info is on the CPU, where its values would be frozen: set `agent_info_on_device = True`")
        return False

    def _tell(self, why_not: str) -> None:
        if not self._told:
            self._told = True
            _logger.info("RL_Batcher: a batch on %s could run as one graph, but %s.", self._device, why_not)
