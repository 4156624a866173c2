"""Worker: the other end of a link, with one agent and one VecEnv.

The transport provides the memory of batches and weights.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlstruct.batchers.collector_factory import CollectorFactory
from rlstruct.batchers.progress import Failure, Phase, Progress, describe_failure
from rlstruct.batchers.rollout_buffer import RolloutBuffer
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.workers.transport import Created, Executed, Order, PublishedWeights
from rlstruct.core import DictTensor, Layout
from rlstruct.core.transfer import Packed, allocate_packed
from rlstruct.indexed_actions import indices_of
from rlstruct.spaces import integer_bounds

_logger = logging.getLogger(__name__)


class Worker:
    """An agent and its environments. An order is the name of a method without its underscore.

    Args:
        factory: pickled `CollectorFactory`.
        backends: see `rlstruct.device.registered_backends`.
        progress: updated with phase and step.
        memories: allocate the tensors of two rollout buffers, then held in ``buffers``. The second one is used once a
            batch has been queued.
        read: returns the tensors of published weights.
    """

    def __init__(
        self,
        factory: bytes,
        backends: dict[str, str],
        progress: Progress,
        memories: Sequence[Callable[[Layout], dict[str, Tensor]]],
        read: Callable[[PublishedWeights], Mapping[str, Tensor]],
    ) -> None:
        self._pickled, self._backends, self._read_weights = factory, backends, read
        self._progress, self._memories = progress, memories
        self.buffers: list[dict[str, Tensor]] = [{} for _ in memories]
        self._packed: dict[int, tuple[Packed, Tensor]] = {}  # buffers on an accelerator, and CPU memory for a copy
        self._buffer = 0  # index of the buffer that batches are written to
        self._other: RolloutBuffer | None = None  # the other buffer, once a batch has been queued
        self._new_layout: Layout | None = None

    def begin(self) -> None:
        """Unpickle the factory."""
        self._progress.enter(Phase.START)
        for module in self._backends.values():
            importlib.import_module(module)
        self._factory: CollectorFactory = cloudpickle.loads(self._pickled)

    def carry_out(self, order: Order) -> Any:  # noqa: ANN401 - of that method
        """Carry out an order, and return the answer."""
        if order.weights is not None:
            self._collector.update(self._read_weights(order.weights), order.weights.version)
        answer = getattr(self, f"_{order.name}")(*order.arguments)
        self._progress.clock.enter(Phase.WAIT)  # so that a profile shows waiting before the pool continues
        return answer

    def describe(self, error: BaseException) -> Failure:
        """Turn an exception into an answer."""
        inputs = self._collector.describe_inputs() if hasattr(self, "_collector") else ""
        return describe_failure(error, self._progress, inputs)

    def close(self) -> None:
        """Close agent and environments."""
        if hasattr(self, "_collector"):
            try:
                with self._progress.closing():
                    self._collector.close()
            except Exception:  # the batcher is being closed and waits for no answer
                _logger.warning("RL_Batcher.close", exc_info=True)
            del self._collector

    def _create(self, seed: int, agent_seed: int) -> Created:
        self._progress.enter(Phase.START)
        self.close()  # of an earlier order, whose seed was guessed from a wrong number of environments
        torch.manual_seed(agent_seed)
        self._collector = self._factory.create(seed, agent_seed, self._progress, self._allocate)
        env = self._collector.env
        cuda_initialised = self._factory.device.type != "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        bounds = integer_bounds(env.observation_space, "frame")
        return Created(env.n_envs(), env.auto_reset, cuda_initialised, indices_of(env), bounds)

    def _reset(self, agent_info: DictTensor, env_info: DictTensor) -> bool:
        self._collector.reset(agent_info, env_info)
        return True

    def _execute(self, agent_info: DictTensor | None, buffer_number: int) -> Executed:
        collector = self._collector
        if buffer_number != self._buffer:
            self._progress.enter(Phase.COPY)
            self._buffer, self._other = buffer_number, collector.renew(self._other)
        collected = collector.collect(agent_info)
        if buffer_number in self._packed:
            self._progress.enter(Phase.COPY)
            packed, copy = self._packed[buffer_number]
            copy.copy_(packed.block)  # sync: once per batch
            for shared, tensor in zip(self.buffers[buffer_number].values(), packed.unpack(copy), strict=True):
                shared.copy_(tensor)
        layout, self._new_layout = self._new_layout, None
        return Executed(collected, collector.count_running(), self._progress.clock.seconds(), layout)

    def _save(self) -> CollectorState:
        return {**self._collector.state_dict(), "generator": torch.get_rng_state()}

    def _load(self, state: CollectorState, agent_info: DictTensor, env_info: DictTensor) -> tuple[bool, int]:
        exact = self._collector.load_state_dict(state, agent_info, env_info)
        if state["generator"] is not None:
            torch.set_rng_state(state["generator"])
        return exact, self._collector.seed

    def _allocate(self, layout: Layout) -> dict[str, Tensor]:
        """Allocate a buffer: in the transport's memory or else on its own device; then batches are copied."""
        self._new_layout, device = layout, self._factory.device
        self.buffers[self._buffer] = shared = self._memories[self._buffer](layout)
        if device.type == "cpu":
            return shared
        packed = allocate_packed(layout, device)
        copy = torch.empty(len(packed.block), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self._packed[self._buffer] = packed, copy
        return dict(zip(layout, packed.unpack(packed.block), strict=True))
