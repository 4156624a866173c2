"""Body of a worker process.

The parent sends orders; the worker carries them out one by one and answers each. Tensors of batches and weights do not
travel: they are written into shared memory. A worker ends on an order, when it fails, or when its parent ends.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected, Collector
from rlstruct.batchers.progress import Interrupted, Phase, Progress, describe
from rlstruct.batchers.recipe import Recipe
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.batchers.slab import Slab
from rlstruct.batchers.workers.channel import Channel
from rlstruct.batchers.workers.processes import leave
from rlstruct.batchers.workers.weights import Weights
from rlstruct.core import DictTensor, Layout
from rlstruct.profiling.operations import join as join_profile

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Arguments of a worker process, besides its end of the channel."""

    recipe: bytes  # a pickled `Recipe`
    backends: dict[str, str]  # modules of registered backends, by device type
    index: int  # which of the workers it is
    n_workers: int
    progress: SharedBlock  # where each worker writes what it is doing
    slabs: tuple[SharedBlock, SharedBlock]  # where its batches go; the second is used once a second batch is queued
    weights: tuple[SharedBlock, ...]


@dataclass(frozen=True)
class Created:
    """Answer to ``create``."""

    n_envs: int
    auto_reset: bool
    cuda_initialised: bool


@dataclass(frozen=True)
class Batch:
    """Answer to ``execute``; ``layout`` comes with the first batch in a slab."""

    collected: Collected
    n_running: int
    layout: Layout | None
    seconds: dict[str, float]


def progress_layout(n_workers: int) -> Layout:
    """One row of 8 words per worker, a cache line each; `Progress` uses the first three."""
    return Layout({"progress": ((n_workers, 8), torch.int64)})


def main(start: Start, end: socket.socket) -> None:
    """Run a worker until it is ordered to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    join_profile()
    worker, channel = Worker(start), Channel(end)
    try:
        worker.serve(channel)
    except Interrupted:
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent is gone: no process is left to report to
            channel.send(worker.describe(error))
    finally:
        worker.close()
    leave()


class Worker:
    """A worker process: one agent, one VecEnv, and the orders of its parent.

    Each order is the name of a method without its underscore; what that returns is the answer.
    """

    def __init__(self, start: Start) -> None:
        """Create nothing yet: the parent orders that."""
        self._start = start
        self._progress = Progress(start.progress.map(progress_layout(start.n_workers))["progress"][start.index])
        self._seeds = 0, 0
        self._slab = 0  # the one that it writes to
        self._slabs: list[Slab | None] = [None, None]  # without that one, which the collector has
        self._shared: list[dict[str, Tensor]] = [{}, {}]
        self._new_layout: Layout | None = None
        self._weights: list[tuple[Layout, dict[str, Tensor]]] = [(Layout(), {}) for _ in start.weights]

    def begin(self) -> None:
        """Read what the parent has sent along."""
        self._progress.enter(Phase.START)
        for module in self._start.backends.values():
            importlib.import_module(module)
        self._recipe: Recipe = cloudpickle.loads(self._start.recipe)

    def serve(self, channel: Channel) -> None:
        """Carry out orders."""
        self.begin()
        while True:
            self._progress.enter(Phase.WAIT)
            try:
                name, weights, arguments = channel.receive(wait=True)
            except (EOFError, OSError):
                raise Interrupted from None
            if name == "close":
                return
            if weights is not None:
                self._read(weights)
            answer = getattr(self, f"_{name}")(*arguments)
            self._progress.clock.enter(Phase.WAIT)  # in a profile, from before the parent can go on
            try:
                channel.send(answer)
            except OSError:
                raise Interrupted from None

    def describe(self, error: BaseException) -> Any:  # noqa: ANN401
        """Turn an exception into an answer."""
        return describe(error, self._progress, self._collector.given() if self._created else "")

    def close(self) -> None:
        """Close agent and environments."""
        if self._created:
            try:
                self._collector.close()
            except Exception:  # the batcher is closing and waits for no answer
                _logger.warning("RL_Batcher.close: worker %d", self._start.index, exc_info=True)
            del self._collector

    @property
    def _created(self) -> bool:
        return hasattr(self, "_collector")

    def _create(self, seed: int, agent_seed: int) -> Created:
        self._progress.enter(Phase.START)
        self.close()  # ordered again with another seed: the number of environments was not what env_args said
        self._seeds = seed, agent_seed
        torch.manual_seed(agent_seed)
        self._collector: Collector = self._recipe.make(seed, agent_seed, self._progress, self._allocate)
        env = self._collector.env
        cuda_initialised = self._recipe.device.type != "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return Created(env.n_envs(), env.auto_reset, cuda_initialised)

    def _reset(self, agent_info: DictTensor, env_info: DictTensor) -> bool:
        self._collector.reset(agent_info, env_info)
        return True

    def _execute(self, agent_info: DictTensor | None, slab_number: int) -> Batch:
        collector = self._collector
        if slab_number != self._slab:
            self._progress.enter(Phase.COPY)
            before, self._slab = self._slab, slab_number
            self._slabs[before] = collector.renew(self._slabs[slab_number])
        collected = collector.collect(agent_info)
        tensors, shared = collector.slab.tensors, self._shared[slab_number]
        if tensors is not shared:
            self._progress.enter(Phase.COPY)
            for name, tensor in tensors.items():
                shared[name].copy_(tensor)
        layout, self._new_layout = self._new_layout, None
        return Batch(collected, collector.count_running(), layout, self._progress.clock.seconds())

    def _save(self) -> CollectorState:
        return {**self._collector.state_dict(), "generator": torch.get_rng_state()}

    def _load(self, state: CollectorState, agent_info: DictTensor, env_info: DictTensor) -> tuple[bool, int]:
        exact = self._collector.load_state_dict(state, agent_info, env_info)
        if state["generator"] is not None:
            torch.set_rng_state(state["generator"])
        return exact, self._collector.seed

    def _read(self, weights: Weights) -> None:
        layout, tensors = self._weights[weights.slot]
        if layout != weights.layout:
            tensors = self._start.weights[weights.slot].map(weights.layout)
            self._weights[weights.slot] = weights.layout, tensors
        self._collector.update(tensors, weights.version)

    def _allocate(self, layout: Layout) -> dict[str, Tensor]:
        """Bring memory for a slab: shared, or on another device; then batches are copied to the shared one."""
        self._new_layout = layout
        self._shared[self._slab] = shared = self._start.slabs[self._slab].map(layout)
        return shared if self._recipe.device.type == "cpu" else self._recipe.allocate(layout)


def _leave_with_parent() -> None:
    """End this process as soon as its parent is gone, whatever it is doing."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
