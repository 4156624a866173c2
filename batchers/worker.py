"""What a worker process does. Part of rlstruct.batchers.

The parent sends one small tuple per order through a pipe, the worker answers with one small object; tensors travel
through shared blocks. A worker ends when it is told to, when it is killed, or when its parent is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import signal
import threading
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlstruct.batchers.action_range import ActionRange
from rlstruct.batchers.collector import Collected, Collector
from rlstruct.batchers.failures import describe
from rlstruct.batchers.making import Factories, make_collector, measure
from rlstruct.batchers.processes import die_with, leave
from rlstruct.batchers.progress import Interrupted, Phase, Progress
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.shared_memory import Layout, SharedBlock, layout_of
from rlstruct.batchers.slab import Slab
from rlstruct.core import DictTensor
from rlstruct.device import resolve_device

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Created:
    """First answer: the environments are there."""

    n_envs: int
    auto_reset: bool
    cuda_initialised: bool


@dataclass(frozen=True)
class Batch:
    """Answer to an execute order. ``layout`` comes when the slab is new, which is with the first batch in it."""

    collected: Collected
    n_still_running: int
    layout: Layout | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """Answer to a measure order: the slab that the first batch will make."""

    layout: Layout


@dataclass(frozen=True)
class Saved:
    """Answer to an order to save: a pickled CollectorState, since tensors in a message would become files."""

    state: bytes


@dataclass(frozen=True)
class Loaded:
    """Answer to an order to load: whether everything is as it was, and the seed of the first environment."""

    exact: bool
    seed: int


@dataclass(frozen=True)
class Start:
    """Everything a worker is born with, except its end of the pipe. ``steps``: where its two slabs are shared."""

    factories: bytes
    n_timesteps: int
    device: str
    backends: dict[str, str]
    index: int
    status: SharedBlock
    n_workers: int
    steps: tuple[SharedBlock, SharedBlock]
    weights: SharedBlock


def status_layout(n_workers: int) -> Layout:
    """One row of 8 words per worker, a cache line each; `Progress` uses the first four."""
    return {"status": ((n_workers, 8), torch.int64)}


def main(start: Start, connection: Connection, parent: int | None) -> None:
    """Run a worker until it is told to stop.

    Args:
        start: see there.
        connection: where orders come from and answers go.
        parent: process whose death the kernel shall not let this one survive, None if it cannot know of it.
    """
    if parent is not None:
        die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    worker = _Worker(start, connection)
    try:
        worker.serve()
    except Interrupted:
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent is gone: nobody is left to tell
            connection.send(describe(error, worker.progress, worker.given()))
    finally:
        worker.close()
    leave()


class _Worker:
    def __init__(self, start: Start, connection: Connection) -> None:
        self._start = start
        self._connection = connection
        self.progress = Progress(start.status.map(status_layout(start.n_workers))["status"][start.index])
        self._collector: Collector | None = None
        self._seeds = (0, 0)
        self._slab = 0  # the one of its two that it writes to; the second exists once a batch was queued
        self._slabs: list[Slab | None] = [None, None]  # the collector has the one that it writes to
        self._shared: list[dict[str, Tensor]] = [{}, {}]
        self._new_layout: Layout | None = None
        self._weights: dict[str, Tensor] = {}

    def serve(self) -> None:
        self.progress.enter(Phase.START)
        for module in self._start.backends.values():
            importlib.import_module(module)
        factories = cloudpickle.loads(self._start.factories)
        while True:
            self.progress.enter(Phase.WAIT)
            order, *arguments = self._next_order()
            if order == "create":
                self._answer(self._create(factories, *arguments))
            elif order == "measure":
                self._answer(Measured(self._measure(factories, *arguments)))
            elif order == "reset":
                self._ready.reset(*arguments)
            elif order == "save":
                state = self._ready.state_dict()
                self._answer(Saved(pickle.dumps({**state, "generator": torch.get_rng_state()})))
            elif order == "load":
                self._answer(self._load(*arguments))
            elif order == "weights":
                self._take_weights(*arguments)
            elif order == "execute":
                self._answer(self._execute(*arguments))
            else:
                return

    def given(self) -> str:
        return "" if self._collector is None else self._collector.given()

    def close(self) -> None:
        if self._collector is not None:
            try:
                self._collector.close()
            except Exception:  # the batcher is closing: nobody waits for an answer
                _logger.warning("RL_Batcher.close: worker %d", self._start.index, exc_info=True)
            self._collector = None

    def _next_order(self) -> tuple[Any, ...]:
        try:
            order: tuple[Any, ...] = self._connection.recv()
        except (EOFError, OSError):  # not those that the user's code raises
            raise Interrupted from None
        return order

    def _answer(self, answer: Created | Measured | Saved | Loaded | Batch) -> None:
        try:
            self._connection.send(answer)
        except OSError:
            raise Interrupted from None

    @property
    def _ready(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("rlstruct.batchers.worker: an order came before 'create'.")
        return self._collector

    def _create(self, factories: Factories, seed: int, agent_seed: int) -> Created:
        self.progress.enter(Phase.START)
        self.close()  # ordered again with another seed: the number of environments was not what env_args said
        self._seeds = seed, agent_seed
        torch.manual_seed(agent_seed)
        device = resolve_device(self._start.device)
        self._collector = make_collector(
            factories,
            seed,
            agent_seed,
            n_timesteps=self._start.n_timesteps,
            device=device,
            allocate=self._allocate if device.type == "cpu" else self._allocate_on_device,
            progress=self.progress,
        )
        env = self._collector.env
        self._actions = ActionRange(env.action_space)
        return Created(env.n_envs(), env.auto_reset, device.type != "cuda" and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def _measure(self, factories: Factories, agent_info: DictTensor, env_info: DictTensor) -> Layout:
        self.progress.enter(Phase.START)
        start = self._start
        device = resolve_device(start.device)
        seeds = self._seeds
        return measure(factories, *seeds, agent_info, env_info, n_timesteps=start.n_timesteps, device=device)

    def _execute(self, agent_info: DictTensor | None, slab_number: int) -> Batch:
        collector = self._ready
        if slab_number != self._slab:
            self.progress.enter(Phase.COPY)
            self._slabs[self._slab], self._slab = collector.slab, slab_number
            collector.renew(self._slabs[slab_number])
        collected = collector.collect(agent_info)
        slab, shared = collector.slab, self._shared[slab_number]
        if slab is not None:
            self._actions.check(slab, collected.n_steps)
        if slab is not None and slab.tensors is not shared:
            self.progress.enter(Phase.COPY)
            for name, tensor in slab.tensors.items():
                shared[name].copy_(tensor)
        layout, self._new_layout = self._new_layout, None
        return Batch(collected, collector.count_running(), layout, self.progress.clock.seconds())

    def _load(self, state: CollectorState, agent_info: DictTensor, env_info: DictTensor) -> Loaded:
        exact = self._ready.load_state_dict(state, agent_info, env_info)
        if state["generator"] is not None:
            torch.set_rng_state(state["generator"])
        return Loaded(exact, self._ready.seed)

    def _take_weights(self, version: int, edition: int, layout: Layout | None) -> None:
        if layout is not None:
            self._weights = self._start.weights.map(layout)
        self._ready.update(self._weights, version)
        self.progress.edition = edition

    def _allocate(self, layout: Layout) -> dict[str, Tensor]:
        self._new_layout = layout
        self._shared[self._slab] = self._start.steps[self._slab].map(layout)
        return self._shared[self._slab]

    def _allocate_on_device(self, layout: Layout) -> dict[str, Tensor]:
        device = resolve_device(self._start.device)
        tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}
        self._allocate(layout_of(tensors))
        return tensors


def _leave_with_parent() -> None:
    """End this process as soon as its parent is gone, whatever it is doing."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
