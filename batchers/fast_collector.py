"""Collection by the fastest available executor: one kernel, one graph, or single steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected, Collector, LoopState
from rlstruct.batchers.progress import Phase
from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.core import DictTensor, Layout
from rlstruct.engine.executors import PROMISE
from rlstruct.engine.fused import FusedRollout, Perceptron
from rlstruct.engine.graph import Capture, Graph, capture_on
from rlstruct.engine.precision import EXACT, products
from rlstruct.engine.purity import Unavailable
from rlstruct.engine.runner import Runner
from rlstruct.errors import warn_user
from rlstruct.functional.random import step_keys
from rlstruct.profiling import operation
from rlstruct.vec_env import Capturable

_logger = logging.getLogger(__name__)
Outputs = dict[str, Tensor]
"""Tensors of `Rollout`, and ``invalid`` of `BatchValidator.first_invalid`."""


class FastCollector(Collector):
    """A collector that takes T steps at once if the agent is pure; results equal those of single steps."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - see Collector
        super().__init__(*args, **settings)
        env, agent = self.env, self.agent
        self._reported = False
        # Looked up on classes, because a wrapper may forward attributes of an inner object that only it may call.
        self._perceptron: Callable[..., Perceptron | None] = getattr(type(agent), "perceptron", lambda agent: None)
        self._kind: object = None  # of the last perceptron
        rollout = getattr(type(env), "fused_rollout", None) if agent.pure else None
        capture = capture_on(self._device) if isinstance(env, Capturable) else None
        if capture is not None and not agent.pure:
            capture = None
            self._report(f"the agent does not promise to be pure: {PROMISE}")
        kernel = None if rollout is None else lambda _: LaunchedBatch(self, rollout)
        graph = None if capture is None else lambda _: CapturedBatch(self, capture)
        self._kernel = Runner(self._by_graph, agent, self._device, kernel, alike=True)
        self._graph = Runner(self._by_steps, agent, self._device, graph, failed=self._warn)
        self._runners.append(self._graph)

    def collect(self, agent_info: DictTensor | None) -> Collected:
        """Collect a batch into ``steps``; see `Collector.collect`."""
        if agent_info is not None:
            self._set_agent_info(agent_info)
        if self._kernel.make is None:
            return self._by_graph()
        if products(self._device) > EXACT:
            self._report('torch.set_float32_matmul_precision is not "highest", as its products are', "kernel")
            return self._by_graph()
        if (perceptron := self._perceptron(self.agent)) is None:
            return self._by_graph()
        if (form := perceptron.kind()) != self._kind:
            self._kind = form
            self._kernel.forget()
        return self._kernel(perceptron)

    def program(self, state: LoopState) -> tuple[LoopState, Outputs]:
        """Take T steps as one step of `rlstruct.engine`, from a loop state to the next."""
        self.set_loop_state(state)
        before = self.renew()  # a graph has separate memory
        try:
            buffer, *_ = self.take_steps(until_ended=False)
            outputs = {**buffer.tensors, "invalid": self._validator.first_invalid(buffer, self._T)}
        finally:
            self.renew(before)
        return self.loop_state(), outputs

    def launch(self, rollout: FusedRollout, perceptron: Perceptron) -> Collected:
        """Take T steps in one kernel."""
        observation = self._observation._tensors
        self._progress.enter(Phase.ENVIRONMENT)
        with operation("simulator"):
            outputs = rollout(observation, step_keys(self._seeds, self._episode_now, self._steps), perceptron)
        self._observation = DictTensor({key: outputs[f"stream/{key}"][-1].clone() for key in observation})
        self._steps = self._steps + self._T
        running = torch.ones_like(outputs["stream/done"][0]).expand(self._T, -1)
        return self.finish_whole({**outputs, "running": running}, "kernel")

    def finish_whole(self, outputs: Outputs, executor: str) -> Collected:
        """Count and check the T steps that an executor took."""
        invalid = outputs.pop("invalid", None)
        self.steps, self.owned = Rollout(outputs), executor == "kernel"  # the next replay of a graph overwrites them
        self.layout = self.layout or Layout.of(outputs)
        return self.finish(self._T, executor, invalid)

    def _by_graph(self, _: object = None) -> Collected:
        """Replay a graph if its results equal those of single steps; otherwise take single steps."""
        if self._graph.make is None:
            return self._by_steps()
        if self.agent_info.empty() or self.agent_info.device == self._device:
            return self._graph(self.loop_state())
        self._report("agent_info is on the CPU and its values would be frozen: set `agent_info_on_device = True`")
        return self._by_steps()

    def _by_steps(self, _: object = None) -> Collected:
        return super().collect(None)

    def _warn(self, why_not: str) -> None:
        warn_user(
            f"RL_Batcher: a batch on {self._device} cannot be captured as one graph, so its steps run one by "
            f"one, slower and with equal results: {why_not}. RL_Batcher(graph=False) silences this warning."
        )

    def _report(self, why_not: str, what: str = "graph") -> None:
        if not self._reported:
            self._reported = True
            _logger.info("RL_Batcher: a batch on %s could run as one %s, but %s.", self._device, what, why_not)


class CapturedBatch(Graph):
    """An `Executor` that collects a batch as one graph, from the loop state of its collector to the next."""

    def __init__(self, collector: FastCollector, how: Capture) -> None:
        super().__init__(collector.program, how, loops=True)
        self._collector = collector

    def _prepare(self, state: LoopState) -> None:
        """Capture the batch, and restore the collector's state."""
        try:
            super()._prepare(state)
        finally:
            self._collector.set_loop_state(state)
            self._collector._progress.enter(Phase.GRAPH)  # again: the captured steps entered other phases

    def __call__(self, state: LoopState) -> Collected:
        """Replay the batch."""
        self._collector._progress.enter(Phase.GRAPH)
        after, outputs = super().__call__(state)
        self._collector.set_loop_state(after)
        return self._collector.finish_whole(outputs, "graph")


class LaunchedBatch:
    """An `Executor` that collects a batch with one kernel; its argument is the agent's perceptron."""

    name, warm_up, prepare, max_instances, writes = "kernel", 0, None, 1, False

    def __init__(self, collector: FastCollector, fused_rollout: Callable[..., FusedRollout | None]) -> None:
        self._collector, self._fused_rollout = collector, fused_rollout
        self._rollout: FusedRollout | None = None

    def __call__(self, perceptron: Perceptron) -> Collected:
        """Launch the kernel, which the first call creates."""
        collector = self._collector
        self._rollout = self._rollout or self._fused_rollout(collector.env, perceptron, collector.n_timesteps)
        if self._rollout is None:
            raise Unavailable("the simulator has no kernel for this agent")
        return collector.launch(self._rollout, perceptron)

    def rebind(self, places: Mapping[tuple[object, ...], str], weights: Mapping[str, Tensor]) -> bool:
        """Return True: every launch reads the current perceptron."""
        return True
