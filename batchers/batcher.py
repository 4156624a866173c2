"""RL_Batcher: the one class that users of batchers see. Part of rlstruct.batchers."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.backend import Backend
from rlstruct.batchers.hand_over import hand_over
from rlstruct.batchers.in_process import InProcess
from rlstruct.batchers.worker import CreateAgent, CreateEnv, Factories
from rlstruct.batchers.worker_pool import WorkerPool
from rlstruct.core import DictTensor, Trajectories
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BatcherStateError, DeviceMismatchError, ShapeMismatchError, WorkerError, WorkerTimeout
from rlstruct.profile import PhaseClock

_PARENT_PHASES = ("elsewhere", "wait", "hand_over")


@dataclass(frozen=True)
class BatcherStats:
    """Where the wall-clock time of a batcher went, in seconds since its creation.

    Attributes:
        workers: for each worker (one when collecting in this process) the seconds spent in ``environment``, ``agent``,
            ``copy`` (writing the batch), ``reset``, ``start`` (creating agent and environments) and ``wait`` (for
            orders), as of its last batch.
        wait: seconds that this process waited in `get`.
        hand_over: seconds that this process spent on copying finished batches out.
        batches: how many were handed over.
    """

    workers: tuple[dict[str, float], ...]
    wait: float
    hand_over: float
    batches: int

    def __str__(self) -> str:
        """Spell the seconds as a table, one row per worker."""
        names = ("environment", "agent", "copy", "reset", "start", "wait")
        rows = ["worker  " + "  ".join(f"{name:>11}" for name in names)]
        for index, seconds in enumerate(self.workers):
            rows.append(f"{index:>6}  " + "  ".join(f"{seconds.get(name, 0.0):>9.3f} s" for name in names))
        rows.append(f"this process: waited {self.wait:.3f} s, copied batches out for {self.hand_over:.3f} s")
        return "\n".join(rows)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a batcher holds on to, environments and agents not counted.

    Attributes:
        slabs: for each worker, the room for one batch. On the CPU the room for final observations becomes real memory
            only as far as episodes end.
        weights: the buffer through which weights travel to worker processes.
    """

    slabs: tuple[int, ...]
    weights: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.slabs) + self.weights


class RL_Batcher:  # noqa: N801 - the name that users of rlstructures know
    """Runs an agent in many environments and hands over what happened, T steps at a time.

    The life cycle is ``reset``, then ``execute`` and ``get`` in turn. With ``n_processes=0`` this process collects;
    with k >= 1, k spawned processes do, each with its own agent and environments. Episodic environments give whole
    episodes: rows are padded, ``lengths`` and ``mask()`` say how far they go, and a later ``execute`` goes on with
    those that have not ended. Auto-resetting environments give B rows of T steps, always.

    Args:
        n_timesteps: T, the longest piece that one ``execute`` collects.
        create_agent: called as ``create_agent(**agent_args)`` in every process; returns an RL_Agent.
        create_env: called as ``create_env(**env_args, seed=…)`` in every process; returns a VecEnv on ``device``.
        agent_args: arguments of ``create_agent``.
        env_args: arguments of ``create_env``. The batch has (environments of one VecEnv) x (processes) rows.
        n_processes: 0 to collect in this process, or the number of worker processes.
        seed: process p seeds with ``seed`` plus the index of its first environment, so that the same environments
            draw the same numbers however they are split. Drawn at random if neither it nor ``seeds`` is given.
        seeds: instead of ``seed``, one per process.
        agent_info: settings of the agent, used where ``reset`` gets none. [B], or [1] for all alike; on the CPU.
        env_info: settings of the environments, likewise.
        agent_seeds: one per process for ``agent.seed``; by default the seed of its environments.
        device: where agent and environments live and trajectories appear.
        timeout: seconds that a worker may take for one answer before `WorkerTimeout` is raised.

    Raises:
        ValueError: a number is out of range, the device does not exist, or seeds are given twice.
        WorkerError: agent or environments cannot be created; with worker processes the first call says so.
    """

    def __init__(
        self,
        n_timesteps: int,
        create_agent: CreateAgent,
        create_env: CreateEnv,
        *,
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        n_processes: int = 0,
        seed: int | None = None,
        seeds: Sequence[int] | None = None,
        agent_info: DictTensor | None = None,
        env_info: DictTensor | None = None,
        agent_seeds: Sequence[int] | None = None,
        device: DeviceLike = "cpu",
        timeout: float = 300.0,
    ) -> None:
        """Create agent and environments, or start the processes that do."""
        self._state = "closed"  # until everything is there: __del__ and close() may come early
        if n_timesteps < 1 or n_processes < 0:
            raise ValueError(
                f"RL_Batcher: n_timesteps is {n_timesteps} and n_processes {n_processes}; "
                "expected at least 1 step, and 0 processes (collect in this one) or more."
            )
        self.device = resolve_device(device)
        self.timeout = timeout
        n_collectors = max(1, n_processes)
        self.seeds = _choose_seeds(seed, seeds, n_collectors)
        _check_count("agent_seeds", agent_seeds, n_collectors)
        if self.device.type == "cuda" and n_processes > 1:
            warnings.warn(
                f"RL_Batcher: {n_processes} processes on {self.device} open {n_processes} CUDA contexts, 300 to 700 MB "
                "of GPU memory each, and share the GPU in turns. One process with more environments is usually faster.",
                stacklevel=2,
            )
        factories = Factories(create_agent, dict(agent_args or {}), create_env, dict(env_args or {}))
        self._default_infos = (agent_info or DictTensor(), env_info or DictTensor())
        self._infos = DictTensor()
        self._version = 0
        self._n_running = 0
        self._n_batches = 0
        self._clock = PhaseClock(_PARENT_PHASES)
        self._backend: Backend
        if n_processes == 0:
            agent_seed = self.seeds[0] if agent_seeds is None else agent_seeds[0]
            self._backend = InProcess(factories, n_timesteps, self.device, self.seeds[0], agent_seed)
        else:
            n_envs = factories.env_args.get("n_envs")
            self._backend = WorkerPool(
                factories,
                n_processes,
                n_timesteps,
                self.device,
                seeds=self.seeds,
                agent_seeds=agent_seeds,
                n_envs=n_envs if isinstance(n_envs, int) else None,
                timeout=timeout,
            )
        self._state = "new"
        self._seeds_may_overlap = seeds is not None

    def n_envs(self) -> int:
        """Return B, the environments of all processes together. Waits until they are created."""
        self._refuse_closed("n_envs")
        n_envs = self._backend.n_envs()
        self._warn_of_overlap(n_envs)
        return sum(n_envs)

    def reset(self, agent_info: DictTensor | None = None, env_info: DictTensor | None = None) -> None:
        """Start a new episode in every environment; the agent starts from its initial state.

        Args:
            agent_info: settings of the agent for each environment.  [B] or [1] on the CPU; default: the constructor's
            env_info: settings of the environments, for ``reset(options=…)`` of gymnasium's.  Likewise.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            ShapeMismatchError: an info has another number of rows than B or 1.
            DeviceMismatchError: an info is not on the CPU.
            WorkerError: creating or resetting failed; with worker processes the next `get` may say so instead.
        """
        self._refuse_closed("reset")
        if self._state == "executing":
            raise BatcherStateError("RL_Batcher.reset: a batch is being collected. Call get() first.")
        B = self.n_envs()
        agent_infos = _spread("agent_info", agent_info or self._default_infos[0], B)
        env_infos = _spread("env_info", env_info or self._default_infos[1], B)
        with self._failing():
            self._backend.reset(self._split(agent_infos), self._split(env_infos))
        self._infos = agent_infos.prepend_key("agent_info/") + env_infos.prepend_key("env_info/")
        self._n_running = B
        self._state = "ready"

    def execute(self, agent_info: DictTensor | None = None) -> None:
        """Begin to collect the next batch, with the weights of the last `update`.

        With worker processes this returns at once. With ``n_processes=0`` it collects.

        Args:
            agent_info: new settings of the agent.  [B] or [1] on the CPU; default: those of `reset`

        Raises:
            BatcherStateError: `reset` or `get` is missing, every episode has ended, or the batcher is closed.
            ShapeMismatchError: agent_info has another number of rows than B or 1.
            DeviceMismatchError: agent_info is not on the CPU.
        """
        self._refuse_closed("execute")
        if self._state != "ready":
            missing = "reset" if self._state == "new" else "get"
            raise BatcherStateError(f"RL_Batcher.execute: {missing}() has not been called. Call {missing}() first.")
        if self._n_running == 0:
            raise BatcherStateError("RL_Batcher.execute: every episode has ended. Call reset() to start new ones.")
        infos: Sequence[DictTensor | None] = [None] * len(self._backend.n_envs())
        if agent_info is not None:
            agent_info = _spread("agent_info", agent_info, self.n_envs())
            infos = self._split(agent_info)
            kept = self._infos.truncate_key("env_info/").prepend_key("env_info/")
            self._infos = agent_info.prepend_key("agent_info/") + kept
        with self._failing():
            self._backend.execute(infos)
        self._state = "executing"

    def get(self, blocking: bool = True, timeout: float | None = None) -> tuple[Trajectories, int] | tuple[None, None]:
        """Hand over the batch that `execute` began.

        Args:
            blocking: whether to wait for it.
            timeout: seconds to wait; default: the constructor's.

        Returns:
            ``(trajectories, n_still_running)``: what happened, in memory that no later call changes, and how many
            environments go on. ``(None, None)`` if not blocking and the batch is not ready.

        Raises:
            BatcherStateError: `execute` is missing, or the batcher is closed.
            WorkerError: a worker raised or died; the batcher can only be closed after that.
            WorkerTimeout: the batch was not ready in time; `get` can be called again.
        """
        self._refuse_closed("get")
        if self._state != "executing":
            raise BatcherStateError("RL_Batcher.get: no batch is being collected. Call execute() first.")
        seconds = self.timeout if timeout is None else timeout
        self._clock.enter(1)
        try:
            with self._failing():
                parts = self._backend.collect(blocking, seconds)
            if parts is None:
                return None, None
            self._clock.enter(2)
            on_cpu = self._backend.in_cpu_memory
            trajectories = hand_over(parts, self._infos, self._backend.auto_reset, self.device, on_cpu)
        finally:
            self._clock.enter(0)
        self._n_running = sum(part.collected.n_still_running for part in parts)
        self._state = "ready"
        self._n_batches += 1
        return trajectories, self._n_running

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Give new weights to every agent; the next `execute` acts with them.

        Args:
            weights: name to tensor, usually ``model.state_dict()``, on any device. Read before this call returns.

        Raises:
            BatcherStateError: the batcher is closed.
            TypeError: a value is not a tensor.
        """
        self._refuse_closed("update")
        for key, value in weights.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"RL_Batcher.update: weight {key!r} is a {type(value).__name__}, expected a tensor. "
                    "Pass model.state_dict(), without extra state."
                )
        self._version += 1
        with self._failing():
            self._backend.update(weights, self._version)

    @property
    def policy_version(self) -> int:
        """How many times `update` was called; trajectories carry the version that acted."""
        return self._version

    def stats(self) -> BatcherStats:
        """Return where the time went."""
        seconds = self._clock.seconds()
        return BatcherStats(tuple(self._backend.seconds()), seconds["wait"], seconds["hand_over"], self._n_batches)

    def memory_report(self) -> MemoryReport:
        """Return how many bytes the batcher holds on to.

        Raises:
            BatcherStateError: no batch has been collected yet, so the size of the agent's output is unknown.
        """
        slabs, weights = self._backend.n_bytes()
        if not all(slabs):
            raise BatcherStateError(
                "RL_Batcher.memory_report: sizes are known after the first batch. Call get() first."
            )
        return MemoryReport(tuple(slabs), weights)

    def close(self) -> None:
        """End the workers and close agents and environments, in at most two seconds. Calling it again does nothing."""
        if self._state != "closed":
            self._state = "closed"
            self._backend.close()

    def __enter__(self) -> RL_Batcher:
        """Return the batcher; leaving the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the batcher."""
        self.close()

    def __del__(self) -> None:
        """Close a batcher that was dropped."""
        if getattr(self, "_state", "closed") != "closed":
            self.close()

    def _refuse_closed(self, method: str) -> None:
        if self._state in ("closed", "failed"):
            why = "the batcher is closed" if self._state == "closed" else "collection has failed; close() this batcher"
            raise BatcherStateError(f"RL_Batcher.{method}: {why}. Create a new one.")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """After a worker has failed only close() is left; a worker that is merely late may still answer."""
        try:
            yield
        except WorkerTimeout:
            raise
        except WorkerError:
            self._state = "failed"
            raise

    def _split(self, info: DictTensor) -> list[DictTensor]:
        """Cut an info into the parts of the collectors; each gets the empty one if it is empty."""
        parts: list[DictTensor] = []
        first = 0
        for n in self._backend.n_envs():
            parts.append(info if info.empty() else info.slice(first, first + n).clone())
            first += n
        return parts

    def _warn_of_overlap(self, n_envs: list[int]) -> None:
        if not self._seeds_may_overlap:
            return
        self._seeds_may_overlap = False
        spans = sorted(zip(self.seeds, n_envs, strict=True))
        if any(low + n > high for (low, n), (high, _) in pairwise(spans)):
            warnings.warn(
                f"RL_Batcher: seeds={list(self.seeds)} with {n_envs[0]} environments per process overlap: environment j "
                f"of a process seeds with its seed + j, so some environments are copies of others. "
                f"Pass seed={self.seeds[0]} instead, or space the seeds by {n_envs[0]}.",
                stacklevel=4,
            )


def _choose_seeds(seed: int | None, seeds: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """One seed per process, or that of process 0 alone when the others follow from the number of environments."""
    if seed is not None and seeds is not None:
        raise ValueError("RL_Batcher: seed and seeds are both given. Pass one of them.")
    _check_count("seeds", seeds, n)
    if seeds is not None:
        return tuple(seeds)
    return (secrets.randbits(31) if seed is None else seed,)


def _check_count(name: str, values: Sequence[int] | None, n: int) -> None:
    if values is not None and len(values) != n:
        raise ValueError(f"RL_Batcher: {name} has {len(values)} entries, expected {n}, one per process.")


def _spread(name: str, info: DictTensor, B: int) -> DictTensor:
    """Check an info at the boundary, and repeat a single row for all B environments."""
    if info.empty():
        return info
    if info.device != torch.device("cpu"):
        key = next(iter(info.keys()))
        raise DeviceMismatchError(
            f"RL_Batcher: {name} {key!r} is on {info.device}, expected cpu. Settings stay on the CPU: create it there."
        )
    if info.n_elems() not in (1, B):
        raise ShapeMismatchError(
            f"RL_Batcher: {name} has {info.n_elems()} rows, expected {B}, one per environment, or 1 for all alike."
        )
    return info.map(lambda value: value.repeat(B, *[1] * (value.dim() - 1))) if info.n_elems() < B else info.clone()
