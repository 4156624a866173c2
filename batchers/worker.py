"""What a worker process does. Part of rlstruct.batchers.

The parent sends one small tuple per order through a pipe, the worker answers with one small object; tensors travel
through shared blocks. A worker ends when it is told to, when it is killed, or when its parent is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected, Collector, Interrupted, Phase, Progress
from rlstruct.batchers.failures import describe
from rlstruct.batchers.shared_memory import Layout, SharedBlock, layout_of
from rlstruct.core import DictTensor
from rlstruct.device import resolve_device
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

CreateAgent = Callable[..., RL_Agent]
CreateEnv = Callable[..., VecEnv]


@dataclass(frozen=True)
class Factories:
    """How to make an agent and an environment, by value: lambdas and classes of a notebook travel too."""

    create_agent: CreateAgent
    agent_args: dict[str, Any]
    create_env: CreateEnv
    env_args: dict[str, Any]


@dataclass(frozen=True)
class Created:
    """First answer: the environments are there."""

    n_envs: int
    auto_reset: bool
    cuda_initialised: bool


@dataclass(frozen=True)
class Batch:
    """Answer to an execute order. ``layout`` comes with the first batch only."""

    collected: Collected
    layout: Layout | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Start:
    """Everything a worker is born with."""

    connection: Connection
    factories: bytes
    n_timesteps: int
    device: str
    backends: dict[str, str]
    index: int
    status: SharedBlock
    n_workers: int
    steps: SharedBlock
    weights: SharedBlock


def create(factories: Factories, seed: int, agent_seed: int) -> tuple[VecEnv, RL_Agent]:
    """Call both factories and seed the agent."""
    env = factories.create_env(**{**factories.env_args, "seed": seed})
    agent = factories.create_agent(**factories.agent_args)
    agent.seed(agent_seed)
    return env, agent


def status_layout(n_workers: int) -> Layout:
    """One row of 8 words per worker, a cache line each; `Progress` uses the first three."""
    return {"status": ((n_workers, 8), torch.int64)}


def main(start: Start) -> None:
    """Run a worker until it is told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    progress = Progress(start.status.map(status_layout(start.n_workers))["status"][start.index])
    worker = _Worker(start, progress)
    try:
        worker.serve()
    except (Interrupted, EOFError, ConnectionError):
        pass  # the batcher was closed, or its process is gone: nobody is left to answer
    except BaseException as error:
        with contextlib.suppress(OSError):
            start.connection.send(describe(error, progress))
    finally:
        worker.close()


class _Worker:
    def __init__(self, start: Start, progress: Progress) -> None:
        self._start = start
        self._progress = progress
        self._collector: Collector | None = None
        self._shared: dict[str, Tensor] = {}
        self._new_layout: Layout | None = None
        self._weights: dict[str, Tensor] = {}

    def serve(self) -> None:
        connection = self._start.connection
        for module in self._start.backends.values():
            importlib.import_module(module)
        factories = cloudpickle.loads(self._start.factories)
        while True:
            self._progress.enter(Phase.WAIT)
            order, *arguments = connection.recv()
            if order == "create":
                connection.send(self._create(factories, *arguments))
            elif order == "reset":
                self._ready.reset(*arguments)
            elif order == "weights":
                self._take_weights(*arguments)
            elif order == "execute":
                connection.send(self._execute(*arguments))
            else:
                return

    def close(self) -> None:
        if self._collector is not None:
            with contextlib.suppress(Exception):  # the batcher is closing: there is nobody to tell
                self._collector.close()

    @property
    def _ready(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("rlstruct.batchers.worker: an order came before 'create'.")
        return self._collector

    def _create(self, factories: Factories, seed: int, agent_seed: int) -> Created:
        self._progress.enter(Phase.START)
        torch.manual_seed(agent_seed)
        env, agent = create(factories, seed, agent_seed)
        device = resolve_device(self._start.device)
        self._collector = Collector(
            env,
            agent,
            n_timesteps=self._start.n_timesteps,
            device=device,
            seed=seed,
            allocate=self._allocate if device.type == "cpu" else self._allocate_on_device,
            progress=self._progress,
        )
        return Created(env.n_envs(), env.auto_reset, device.type != "cuda" and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def _execute(self, agent_info: DictTensor | None) -> Batch:
        collected = self._ready.collect(agent_info)
        slab = self._ready.slab
        if slab is not None and slab.tensors is not self._shared:
            self._progress.enter(Phase.COPY)
            for name, tensor in slab.tensors.items():
                self._shared[name].copy_(tensor)
        layout, self._new_layout = self._new_layout, None
        return Batch(collected, layout, self._progress.clock.seconds())

    def _take_weights(self, version: int, layout: Layout | None) -> None:
        if layout is not None:
            self._weights = self._start.weights.map(layout)
        self._ready.update(self._weights, version)

    def _allocate(self, layout: Layout) -> dict[str, Tensor]:
        self._new_layout = layout
        self._shared = self._start.steps.map(layout)
        return self._shared

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
