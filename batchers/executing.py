"""A batch by the fastest executor that agent and environments allow: one kernel, one graph, or step by step."""

from __future__ import annotations

import logging

import torch

from rlstruct.batchers.collector import Collected, Collector
from rlstruct.batchers.slab import Steps
from rlstruct.core import DictTensor
from rlstruct.engine.acting import PROMISE
from rlstruct.engine.compiled import Tensors
from rlstruct.engine.fused import Fused
from rlstruct.engine.graph import Graph, RecordingError, recorder_of
from rlstruct.errors import warn_user
from rlstruct.profiling import operation
from rlstruct.vec_env import Carrying, VecEnv

_logger = logging.getLogger(__name__)


class Executing:
    """Collects batches; the trajectories are those of single steps, however they come about.

    Args:
        collector: takes single steps.
        n_timesteps: T.
        device: where they happen.
        whole: whether to look for ways to take T steps at once. All need an agent that promises to be pure.

    Attributes:
        owned: whether the memory of a batch becomes the caller's, so that nothing is copied. Environments that write to
            memory that they are lent hold on to it.
    """

    def __init__(self, collector: Collector, n_timesteps: int, device: torch.device, *, whole: bool) -> None:
        """Record nothing yet."""
        env, agent = collector.env, collector.actor.agent
        self.owned = type(env).lend is VecEnv.lend
        self._collector, self._T, self._device = collector, n_timesteps, device
        self._fused = Fused(env, agent, n_timesteps) if whole else None
        self._generation = -1  # of the agent's weights, when a batch was last taken step by step
        self._told = False
        self._graph: Graph | None = None
        recorder = recorder_of(device) if whole and isinstance(env, Carrying) else None
        if recorder is not None and agent.pure:
            self._graph = Graph(self._program, recorder)
        elif recorder is not None:
            self._tell(f"the agent does not promise to be pure: {PROMISE}")

    def collect(self, agent_info: DictTensor | None) -> tuple[Collected, Steps]:
        """Collect a batch.

        Args:
            agent_info: see `Collector.collect`.

        Returns:
            What happened, and the steps, in memory that the next batch writes to unless it is `owned`.
        """
        collector = self._collector
        if agent_info is not None:
            collector.actor.set_agent_info(agent_info)
        record = self._launch()
        if record is None and self._graph is not None and self._may_replay():
            record = self._replay(self._graph)
        if record is not None:
            found, steps = record.pop("found", None), Steps(record)
            return collector.finish(self._T, 0, steps, found), steps
        collected, slab = collector.collect(None), collector.slab
        if self.owned:
            collector.renew()
        if self._graph is not None and self._generation != collector.actor.generation:
            self._graph.forget()
        self._generation = collector.actor.generation
        return collected, slab

    def _launch(self) -> Tensors | None:
        """Take T steps in one kernel; None if that is not possible."""
        collector = self._collector
        observation = collector.observation
        record = None if self._fused is None else self._fused(observation._tensors, collector.keys())
        if record is None:
            return None
        collector.go_on(DictTensor({key: record[f"stream/{key}"][-1].clone() for key in observation.keys()}))
        running = torch.ones_like(record["stream/done"][0]).expand(self._T, -1)
        return {**record, "running": running}

    @operation("graph")
    def _replay(self, graph: Graph) -> Tensors | None:
        """Take T steps as one graph; None, now and later, if that is not possible."""
        before = self._collector.carry()
        try:
            after, record = graph(before)
        except RecordingError as error:
            self._collector.set_carry(before)
            self._graph = None
            warn_user(
                f"RL_Batcher: a batch on {self._device} cannot be recorded as one graph, its steps are taken one by "
                f"one, slower and with equal results: {error}. RL_Batcher(graph=False) does not warn.",
            )
            return None
        self._collector.set_carry(after)
        return record

    def _program(self, carry: Tensors) -> tuple[Tensors, Tensors]:
        """T steps as a step of `rlstruct.engine`; the record is a slab, and ``found``, see `BatchChecks.look`."""
        collector, before = self._collector, self._collector.slab
        collector.set_carry(carry)
        collector.renew()  # what is recorded writes to memory of its own
        try:
            collector.take_steps(look=False)
            record = collector.written()
        finally:
            collector.renew(before)
        return collector.carry(), record

    def _may_replay(self) -> bool:
        """Whether a graph does what single steps would do, and they have warmed up what it needs."""
        actor = self._collector.actor
        if actor.agent_info.empty() or actor.agent_info.device == self._device:
            return self._generation == actor.generation
        self._tell("agent_info is on the CPU, where its values would be frozen: set `agent_info_on_device = True`")
        return False

    def _tell(self, why_not: str) -> None:
        if not self._told:
            self._told = True
            _logger.info("RL_Batcher: a batch on %s could run as one graph, but %s.", self._device, why_not)
