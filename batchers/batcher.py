"""RL_Batcher: the one class that users of batchers see."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, overload

from torch import Tensor

from rlstruct.batchers import arguments
from rlstruct.batchers.arguments import State
from rlstruct.batchers.assemble import assemble
from rlstruct.batchers.backend import Settings, create_backend
from rlstruct.batchers.recipe import CreateAgent, CreateEnv, Recipe, expect_type
from rlstruct.batchers.reports import BatcherStats, LostEpisodes, MemoryReport, report_memory
from rlstruct.batchers.saved_state import BatcherState, check_state, on_cpu
from rlstruct.core import DictTensor, Trajectories
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.compiled import warn_uncompiled
from rlstruct.engine.streams import move
from rlstruct.errors import BatcherStateError, WorkerTimeout
from rlstruct.profiling import Clock, operation
from rlstruct.sharing import GpuSharing, Mode


class RL_Batcher:  # noqa: N801 - the name that users of rlstructures know
    """An agent in many environments, whose steps are collected T at a time.

    Call ``reset``, then ``execute`` and ``get`` in turn. With ``n_processes=0`` this process collects; with k >= 1, k
    worker processes do, each with its own agent and environments. Episodic environments give whole episodes: rows are
    padded, ``lengths`` and ``mask()`` say how far they go, and a later ``execute`` goes on with those that have not
    ended. Auto-resetting environments always give B rows of T steps.

    Args:
        n_timesteps: T, the most steps that one ``execute`` collects.
        create_agent: called as ``create_agent(**agent_args)`` in every process; returns an RL_Agent.
        create_env: called as ``create_env(**env_args, seed=…)`` in every process; returns a VecEnv on ``device``.
        agent_args: arguments of ``create_agent``, by value: each process, also this one, gets copies of their tensors
            and models, so `update` is the only way to new weights. What ``create_agent`` reaches otherwise, as a global
            variable or from an enclosing function, is copied for worker processes only.
        env_args: arguments of ``create_env``. The batch has (environments of one VecEnv) x (processes) rows.
        n_processes: 0 to collect in this process, or the number of worker processes.
        seed: process p seeds with ``seed`` plus the index of its first environment, so that the same environments
            draw the same numbers however they are split. Drawn at random if neither it nor ``seeds`` is passed.
        seeds: instead of ``seed``, one per process.
        agent_info, env_info: values for the agent, and options, of each environment, if ``reset`` gets none.
            [B], or [1] for all alike; on the CPU.
        agent_seeds: one per process for ``agent.seed``; by default the seed of its environments.
        device: where agent and environments live and trajectories appear.
        timeout: seconds that a worker may take for one answer before `WorkerTimeout` is raised.
        graph: on CUDA with ``n_processes=0``, run a whole batch (agent, environments, random numbers) as one CUDA
            graph, if the environments are `Capturable`, as `rlstruct.sims` are, and the agent is `RL_Agent.pure`. The
            results are equal. An agent that cannot be captured runs step by step, with one warning that says why.
        compile_agent: let TorchInductor compile a step of the agent, if it is `RL_Agent.pure`; on the CPU, small
            networks then act many times faster. Results are equal up to rounding. An agent that cannot be compiled runs
            eagerly, with one warning that says why. The first batch takes seconds longer.
        on_worker_error: ``"restart"`` starts a worker that raised or died again, with new episodes in its environments,
            and lists the lost ones in `lost_episodes`; batches stay full. A worker that fails before its environments
            exist raises all the same: it would fail again. ``"raise"`` raises `WorkerError`.
        max_restarts: how often, over the batcher's life, before the next failure raises after all.
        sharing: how worker processes share a GPU: ``"none"``, in turns; ``"mps"``, at the same time, under a private
            MPS daemon; ``"mig"``, in existing MIG instances; ``"auto"``, MIG, else MPS, else in turns. Under MPS and
            MIG each sees one GPU, as ``cuda:0``. See `rlstruct.sharing`.
        thread_percentage: of the GPU's threads, the most that one worker gets under MPS.
        cluster: where Ray starts the workers instead: the address of a cluster, ``"auto"`` for the one that this
            machine is in, ``"local"`` for a new one on it; or ``"address"`` with options of Ray's actors, such as
            ``{"address": "auto", "num_gpus": 0.25}``. Results are those of as many processes here. ``"name://…"``
            chooses another backend, see `rlstruct.batchers.backend.BACKENDS`.

    Raises:
        ValueError: a number is out of range, the device does not exist, or both ``seed`` and ``seeds`` are passed.
        TypeError: an argument has a wrong type, such as an agent or a model where ``create_agent`` belongs.
        WorkerError: agent or environments cannot be created; with worker processes the first call says so.
        SharingError: this machine lacks what ``sharing`` needs.
        ClusterError: there is no such cluster.
    """

    _state: State = "closed"  # until it has everything: ``__del__`` and close() find nothing to do

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
        graph: bool = True,
        compile_agent: bool = False,
        on_worker_error: Literal["raise", "restart"] = "raise",
        max_restarts: int = 3,
        sharing: Mode = "none",
        thread_percentage: float | None = None,
        cluster: str | Mapping[str, Any] | None = None,
    ) -> None:
        n_timesteps = arguments.whole("n_timesteps", n_timesteps, 1)
        n_processes = arguments.whole("n_processes", n_processes, 0)
        max_restarts = arguments.whole("max_restarts", max_restarts, 0)
        arguments.check_choices(timeout, on_worker_error, n_processes, cluster, sharing, device)
        self.seeds = arguments.choose_seeds(seed, seeds, n := max(1, n_processes))
        agent_seeds = None if agent_seeds is None else arguments.one_each("agent_seeds", agent_seeds, n)
        self.device, self.timeout = resolve_device(device), timeout
        agent_args, env_args = arguments.named("agent_args", agent_args), arguments.named("env_args", env_args)
        recipe = Recipe(create_agent, agent_args, create_env, env_args, n_timesteps, self.device, compile_agent)
        arguments.check_factories(recipe, seed)
        placement = GpuSharing(self.device, n_processes, sharing, thread_percentage)
        self._default_infos = arguments.check_info("agent_info", agent_info), arguments.check_info("env_info", env_info)
        self._infos = DictTensor()  # ``agent_info/…`` and ``env_info/…`` of the next batch.  [B] on the device
        self._outstanding: deque[DictTensor] = deque()  # those of each batch that was ordered, the oldest first
        self._n_running = self._n_updates = self._n_batches = self._deepest = 0  # the most that were ever outstanding
        self._executors: tuple[str, ...] = ()
        self._warned = False  # that the agent is not compiled
        self._clock = Clock({"elsewhere": None, "wait": "wait", "hand_over": "hand-over"})
        max_restarts = max_restarts if on_worker_error == "restart" else 0
        self._backend = create_backend(
            Settings(recipe, n_processes, self.seeds, agent_seeds, timeout, max_restarts, graph, placement, cluster)
        )
        self._state = "new"

    def n_envs(self) -> int:
        """Return B, the environments of all processes together. Waits until they are created."""
        arguments.refuse_call("n_envs", self._state)
        with self._failing():
            return sum(self._backend.n_envs())

    @property
    def auto_reset(self) -> bool:
        """True if environments restart by themselves, see `VecEnv.auto_reset`. Waits until they are created."""
        return bool(self.n_envs()) and self._backend.auto_reset

    def reset(self, agent_info: DictTensor | None = None, env_info: DictTensor | None = None) -> None:
        """Start a new episode in every environment; the agent starts from its initial state.

        Args:
            agent_info: values for the agent in each environment.  [B] or [1] on the CPU; default: the constructor's
            env_info: options of each environment, for ``reset(options=…)`` of gymnasium's.  Likewise.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            TypeError: agent_info or env_info is not a DictTensor.
            ShapeMismatchError: one of them has another number of rows than B or 1.
            DeviceMismatchError: one of them is not on the CPU.
            WorkerError: creating or resetting failed; with worker processes the next `get` may say so instead.
        """
        arguments.refuse_call("reset", self._state)
        B, n_envs = self.n_envs(), self._backend.n_envs()
        agent_infos = arguments.spread("agent_info", self._default_infos[0] if agent_info is None else agent_info, B)
        env_infos = arguments.spread("env_info", self._default_infos[1] if env_info is None else env_info, B)
        with self._failing():
            self._backend.reset(arguments.split(agent_infos, n_envs), arguments.split(env_infos, n_envs))
        self._infos = self._moved(agent_infos.prepend_key("agent_info/") + env_infos.prepend_key("env_info/"))
        self._n_running, self._state = B, "ready"

    def execute(self, agent_info: DictTensor | None = None) -> None:
        """Begin to collect the next batch, with the weights of the last `update`.

        Workers whose environments restart by themselves take a second order before `get` has returned the first batch::

            batcher.execute()
            for _ in range(n):
                batcher.execute()
                trajectories, n_running = batcher.get()  # the oldest batch

        The batches are those of execute and get in turn. Each acts with the weights and the agent_info of the
        ``execute`` that ordered it, so with weights that are one batch old, as ``policy_version`` shows.

        With worker processes this returns at once. With ``n_processes=0`` it collects; on CUDA it queues the work on
        another stream, behind what is queued now: call it before you compute on the last batch.

        Args:
            agent_info: new values for the agent; default: those of the batch before.  [B] or [1] on the CPU

        Raises:
            BatcherStateError: `reset` or `get` is missing, every episode has ended, or the batcher is closed.
            TypeError: agent_info is not a DictTensor.
            ShapeMismatchError: agent_info has another number of rows than B or 1.
            DeviceMismatchError: agent_info is not on the CPU.
        """
        arguments.refuse_call("execute", self._state)
        backend, agent_infos = self._backend, None
        if agent_info is not None:
            n_envs = backend.n_envs()
            agent_info = arguments.spread("agent_info", agent_info, sum(n_envs))
            agent_infos = arguments.split(agent_info, n_envs)
            env_info = self._infos.truncate_key("env_info/").prepend_key("env_info/")
            self._infos = self._moved(agent_info.prepend_key("agent_info/")) + env_info
        with self._failing():
            backend.execute(agent_infos)
        self._outstanding.append(self._infos)
        self._deepest = max(self._deepest, len(self._outstanding))
        one: State = "executing" if backend.queues and backend.auto_reset else "alone"
        self._state = one if len(self._outstanding) == 1 else "full"

    @overload
    def get(self, blocking: Literal[True] = True, timeout: float | None = None) -> tuple[Trajectories, int]: ...

    @overload
    def get(self, blocking: bool, timeout: float | None = None) -> tuple[Trajectories, int] | tuple[None, None]: ...

    def get(self, blocking: bool = True, timeout: float | None = None) -> tuple[Trajectories, int] | tuple[None, None]:
        """Return the batch that `execute` began; the oldest, if two are outstanding.

        Its tensors carry no gradients; for a loss, `replay_agent` computes the agent's outputs again, with gradients. A
        batch is read-only, since keys share memory (see `Trajectories`): write to its `clone`.

        Args:
            blocking: whether to wait for it.
            timeout: seconds to wait; default: the constructor's.

        Returns:
            ``(trajectories, n_still_running)``: the steps, in memory that no later call changes, and how many
            environments go on. ``(None, None)`` if not blocking and the batch is not ready. With ``n_processes=0`` on
            CUDA the tensors may not be finished yet, but anything queued on the current stream runs after them.

        Raises:
            BatcherStateError: `execute` is missing, or the batcher is closed.
            WorkerError: a worker raised or died; the batcher can only be closed after that.
            WorkerTimeout: the batch was not ready in time; `get` can be called again.
        """
        arguments.refuse_call("get", self._state)
        self._clock.enter(1)
        try:
            with self._failing():
                parts = self._backend.collect(blocking, self.timeout if timeout is None else timeout)
            if parts is None:
                return None, None
            self._clock.enter(2)
            infos, self._state = self._outstanding.popleft(), "executing" if self._outstanding else "ready"
            kind = {"auto_reset": self._backend.auto_reset, "has_gaps": self._backend.has_gaps}
            trajectories, self._n_running = assemble(parts, infos, self.device, **kind)
        finally:
            self._clock.enter(0)
        if self._state == "ready" and not self._n_running:
            self._state = "ended"
        self._n_batches += 1
        self._executors = tuple(map(attrgetter("collected.executor"), parts))
        why_not = "" if self._warned else next(filter(None, map(attrgetter("collected.uncompiled"), parts)), "")
        if why_not:
            self._warned = True
            warn_uncompiled("RL_Batcher: the agent", why_not, "compile_agent")
        return trajectories, self._n_running

    @operation("weights")
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Give new weights to every agent; the next `reset` and `execute` act with them.

        Args:
            weights: name to tensor, usually ``model.state_dict()``, on any device. Read before this call returns.

        Raises:
            BatcherStateError: the batcher is closed.
            TypeError: this is not a mapping, or one of its values is not a tensor.
        """
        arguments.refuse_call("update", self._state)
        fix = "Pass model.state_dict()"
        expect_type(".update: the weights are", weights, Mapping, "a mapping of names to tensors", f"{fix}.")
        for key, value in weights.items():
            expect_type(f".update: weight {key!r} is", value, Tensor, "a tensor", f"{fix}, without extra state.")
        self._n_updates += 1
        with self._failing():
            self._backend.update(weights, self._n_updates)

    def state_dict(self) -> BatcherState:
        """Return everything that decides the next batch, for a checkpoint: environments, agent states, counters.

        Left out are the weights, with ``n_processes=0`` the state of torch's generator, and gymnasium's environments,
        which cannot be saved. `torch.load` reads it with ``weights_only=True``.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            WorkerError: a worker raised or died.
        """
        arguments.refuse_call("state_dict", self._state)
        with self._failing():
            states = self._backend.state_dicts()
        infos, begun = on_cpu(self._infos), self._state != "new"
        return BatcherState(
            collectors=states, infos=infos, begun=begun, n_running=self._n_running, policy_version=self._n_updates
        )

    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> bool:
        """Go on where `state_dict` was called, in a batcher with the same arguments: the next batches are bit-equal.

        Args:
            state: result of `state_dict`.
            weights: those of the last `update` before it; None leaves the agents alone.

        Returns:
            True if everything was restored. False if environments could not be saved (`VecEnv.state_dict` is None, as
            for gymnasium's): they have begun new episodes; another seed avoids playing the first ones again.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            KeyError, ValueError: the state is not that of such a batcher.
            WorkerError: an environment refused it.
        """
        arguments.refuse_call("load_state_dict", self._state)
        B, n_envs = self.n_envs(), self._backend.n_envs()
        check_state(state, len(n_envs))
        infos = DictTensor(state["infos"])
        info_parts = [arguments.split(infos.truncate_key(prefix), n_envs) for prefix in ("agent_info/", "env_info/")]
        with self._failing():
            if weights is not None:  # first: where new episodes begin, the agent's first state may come from them
                self._backend.update(weights, state["policy_version"])
            exact = self._backend.load_state_dicts(state["collectors"], *info_parts)
        self._n_updates, self._infos = state["policy_version"], self._moved(infos)
        self._n_running = state["n_running"] if exact else B
        self._state = "new" if not state["begun"] else "ready" if self._n_running else "ended"
        return exact

    @property
    def policy_version(self) -> int:
        """Number of calls of `update`; trajectories carry the version that acted."""
        return self._n_updates

    @property
    def lost_episodes(self) -> tuple[LostEpisodes, ...]:
        """Episodes that were lost when workers failed and were started again, oldest first; see ``on_worker_error``."""
        return self._backend.stats().lost

    def stats(self) -> BatcherStats:
        """Return seconds by activity, the workers' process ids, and their executors."""
        own, stats = self._clock.seconds(), self._backend.stats()
        return BatcherStats(stats.seconds, own["wait"], own["hand_over"], self._n_batches, stats.pids, self._executors)

    def memory_report(self, queued: bool = False) -> MemoryReport:
        """Return how many bytes collecting takes. All but the weights grow with the number of steps and environments.

        Args:
            queued: whether to count the second slab of each worker, which queueing a batch takes (see `execute`).

        Raises:
            BatcherStateError: no batch has been returned yet, or the batcher is closed.
        """
        arguments.refuse_call("memory_report", self._state)
        if not self._n_batches:
            raise BatcherStateError("RL_Batcher.memory_report: there was no batch yet. Call execute() and get() first.")
        backend, stats = self._backend, self._backend.stats()
        n_slabs = max(1, self._deepest, 2 if queued and backend.queues else 1)
        return report_memory(stats.layouts, self._infos, backend.auto_reset, stats.weight_bytes, n_slabs, stats.pids)

    def close(self) -> None:
        """End the workers and close agents and environments, within two seconds. Calling it again does nothing."""
        if self._state != "closed":
            self._state = "closed"
            self._backend.close()

    def __enter__(self) -> RL_Batcher:
        """Return the batcher; leaving the block closes it."""
        arguments.refuse_call("__enter__", self._state)
        return self

    def __exit__(self, *error: object) -> None:
        """Close the batcher."""
        self.close()

    def __del__(self) -> None:
        """Close a batcher that was dropped."""
        self.close()

    def _moved(self, infos: DictTensor) -> DictTensor:
        return infos.map(lambda tensor: move(tensor, self.device))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Run a call of the backend. After an error only close() is left; a late worker may still answer."""
        try:
            yield
        except WorkerTimeout:
            raise
        except Exception:
            self._state = "failed"
            raise
        except BaseException:
            if (state := self._backend.interrupted) is not None:
                self._state = state
                self._outstanding.clear()
            raise
