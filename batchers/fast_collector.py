"""Collection by the fastest available executor: one kernel, one graph, or single steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected, Collector, LoopState
from rlstruct.batchers.progress import Phase
from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.core import DictTensor, Layout
from rlstruct.engine.executors import PROMISE
from rlstruct.engine.fused import FusedRollout, Perceptron
from rlstruct.engine.graph import Graph, capture_on
from rlstruct.engine.precision import EXACT, products
from rlstruct.engine.runner import Runner
from rlstruct.errors import warn_user
from rlstruct.functional.random import step_keys
from rlstruct.profiling import operation
from rlstruct.vec_env import Capturable

_logger = logging.getLogger(__name__)
Outputs = dict[str, Tensor]
"""Tensors of `Rollout`, and ``invalid`` of `BatchValidator.first_invalid`."""


class FastCollector(Collector):
    """A collector that takes T steps at once if the agent is pure; results equal those of single steps.

    The first of these ways that is available takes a batch: one kernel, one graph, single steps.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - see Collector
        super().__init__(*args, **settings)
        env, agent = self.env, self.agent
        self._reported = False
        # Looked up on classes, because a wrapper may forward attributes of an inner object that only it may call.
        self._perceptron: Callable[..., Perceptron | None] = getattr(type(agent), "perceptron", lambda agent: None)
        self._fused_rollout: Callable[..., FusedRollout | None] | None = None
        if agent.pure:
            self._fused_rollout = getattr(type(env), "fused_rollout", None)
        self._kernel: tuple[object, FusedRollout | None] = (None, None)  # for which `Perceptron.kind`
        capture = capture_on(self._device) if isinstance(env, Capturable) else None
        if capture is not None and not agent.pure:
            capture = None
            self._report(f"the agent does not promise to be pure: {PROMISE}")
        graph = None if capture is None else partial(Graph, how=capture, loops=True)
        self._graph = Runner(self.program, agent, self._device, graph, failed=self._warn)
        self._runners.append(self._graph)

    def collect(self, agent_info: DictTensor | None) -> Collected:
        """Collect a batch into ``steps``; see `Collector.collect`."""
        if agent_info is not None:
            self._set_agent_info(agent_info)
        return self._by_kernel() or self._by_graph() or super().collect(None)

    def program(self, state: LoopState) -> tuple[LoopState, Outputs]:
        """Take T steps as one step of `rlstruct.engine`, from a loop state to the next, into new memory."""
        capturing = self._graph.executor == "graph"  # otherwise these steps run now
        if capturing:
            self._progress.enter(Phase.GRAPH)
        self.set_loop_state(state)
        before = self.renew()
        try:
            buffer, _ = self.take_steps(until_ended=False)
            outputs = {**buffer.tensors, "invalid": self._validator.first_invalid(buffer, self._T)}
        finally:
            self.renew(before)
            if capturing:  # again: the captured steps entered other phases
                self._progress.enter(Phase.GRAPH)
        return self.loop_state(), outputs

    def _by_kernel(self) -> Collected | None:
        """Take T steps in one kernel; return None if there is none for the agent as it is now."""
        if self._fused_rollout is None:
            return None
        if products(self._device) > EXACT:
            self._report('torch.set_float32_matmul_precision is not "highest", as its products are', "kernel")
            return None
        if (perceptron := self._perceptron(self.agent)) is None:
            return None
        if (kind := perceptron.kind()) != self._kernel[0]:
            self._kernel = kind, self._fused_rollout(self.env, perceptron, self._T)
        if (rollout := self._kernel[1]) is None:  # the simulator has no kernel for this agent
            self._fused_rollout = None
            return None
        observation = self._observation._tensors
        self._progress.enter(Phase.ENVIRONMENT)
        with operation("simulator"):
            outputs = rollout(observation, step_keys(self._seeds, self._episode_now, self._steps), perceptron)
        self._observation = DictTensor({key: outputs[f"stream/{key}"][-1].clone() for key in observation})
        self._steps = self._steps + self._T
        running = torch.ones_like(outputs["stream/done"][0]).expand(self._T, -1)
        return self.finish_whole({**outputs, "running": running}, "kernel")

    def _by_graph(self) -> Collected | None:
        """Replay the graph of T steps, once a batch has run eagerly; return None if there can be none."""
        if self._graph.make is None:
            return None
        if not self.agent_info.empty() and self.agent_info.device != self._device:
            self._report("agent_info is on the CPU and its values would be frozen: set `agent_info_on_device = True`")
            return None
        if self._graph.executor == "graph":
            self._progress.enter(Phase.GRAPH)
        after, outputs = self._graph(self.loop_state())
        self.set_loop_state(after)
        return self.finish_whole(outputs, "graph" if self._graph.executor == "graph" else self._runner.executor)

    def finish_whole(self, outputs: Outputs, executor: str) -> Collected:
        """Count and check the T steps that an executor took."""
        invalid = outputs.pop("invalid", None)
        self.steps = Rollout(outputs)
        self.layout = self.layout or Layout.of(outputs)
        return replace(self.finish(self._T, executor, invalid), reused=executor == "graph")

    def _warn(self, why_not: str) -> None:
        warn_user(
            f"RL_Batcher: a batch on {self._device} cannot be captured as one graph, so its steps run one by "
            f"one, slower and with equal results: {why_not}. RL_Batcher(graph=False) silences this warning."
        )

    def _report(self, why_not: str, what: str = "graph") -> None:
        if not self._reported:
            self._reported = True
            _logger.info("RL_Batcher: a batch on %s could run as one %s, but %s.", self._device, what, why_not)
