"""RL_Batcher, the interface of batchers for users."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any, Literal, overload

from torch import Tensor

from rlstruct.batchers import arguments
from rlstruct.batchers.arguments import State
from rlstruct.batchers.assemble import assemble
from rlstruct.batchers.backend import BackendSettings, create_backend
from rlstruct.batchers.collector_factory import CollectorFactory, CreateAgent, CreateEnv
from rlstruct.batchers.reports import BatcherStats, LostEpisodes, MemoryReport, report_memory
from rlstruct.batchers.saved_state import BatcherState, check_state, on_cpu
from rlstruct.batchers.workers.placement import Mode, place_workers
from rlstruct.core import DictTensor, Trajectories
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.compiled import warn_uncompiled
from rlstruct.engine.memory import keep_freed_memory
from rlstruct.engine.streams import move
from rlstruct.errors import BatcherStateError, WorkerTimeout, expect_type
from rlstruct.profiling import Clock, operation
from rlstruct.spaces import ActionIndices, Bounds

Batch = tuple[Trajectories, int]
NotReady = tuple[None, None]


class RL_Batcher:  # noqa: N801 - the name in rlstructures
    """Collector of batches of T steps, which an agent takes in many environments.

    Call ``reset``, then ``execute`` and ``get`` in turn. With ``n_processes=0`` this process collects; otherwise worker
    processes do, each with its own agent and environments. Episodic environments give padded rows; ``lengths`` and
    ``mask()`` tell real steps from padding, and the next ``execute`` continues the episodes that have not ended.
    Auto-resetting environments always give B rows of T steps, fewer of them real where a vector environment spends some
    on restarts.

    Args:
        n_timesteps: T, the maximum number of steps per ``execute``.
        create_agent: called as ``create_agent(**agent_args)`` in every process; returns an RL_Agent.
        create_env: called as ``create_env(**env_args, seed=…)`` in every process; returns a VecEnv on ``device``.
        agent_args: arguments of ``create_agent``. Each process, including this one, gets copies of their tensors and
            models, so new weights arrive only through `update`. Other objects that ``create_agent`` uses, such as
            global variables or variables of an enclosing function, are copied for worker processes only.
        env_args: arguments of ``create_env``, without ``seed``. The batch has (environments of one VecEnv) x
            (processes) rows.
        n_processes: 0 to collect in this process, or the number of worker processes.
        seed: each process seeds with ``seed`` plus the index of its first environment, so results do not depend on the
            number of processes. Drawn at random if neither ``seed`` nor ``seeds`` is passed.
        seeds: one seed per process, instead of ``seed``.
        agent_info: default of ``reset``: values for the agent.  [B], or [1] if equal for all; on the CPU
        env_info: default of ``reset``: options of each environment.  [B], or [1] if equal for all; on the CPU
        agent_seeds: one argument of ``agent.seed`` per process; by default the seed of its environments.
        device: device of agent, environments and trajectories.
        timeout: seconds that a worker may take for one answer before `WorkerTimeout` is raised.
        close_timeout: seconds that `close` gives a worker whose agent or environments are being closed. Then a warning
            says which worker was killed.
        graph: on CUDA with ``n_processes=0``, run a whole batch (agent, environments, random numbers) as one CUDA
            graph, if the environments are `Capturable`, such as those of `rlstruct.sims`, and the agent is
            `RL_Agent.pure`. Results are equal. An agent that cannot be captured runs step by step, after one warning
            that says why.
        compile_agent: compile the agent's step with TorchInductor, if the agent is `RL_Agent.pure`. Small networks
            then act many times faster on the CPU. Results are equal up to rounding. An agent that cannot be compiled
            runs eagerly, after one warning that says why. The first batch takes seconds longer. There is no
            "auto", unlike in a training's settings, because a batcher does not know for how many steps it will run.
        on_worker_error: ``"raise"`` raises `WorkerError` if a worker raises or dies. ``"restart"`` restarts it with new
            episodes, in whichever call, and lists the lost ones in `lost_episodes`; batches stay full. A worker that
            fails before its environments exist raises in both cases, because it would fail again.
        max_restarts: number of restarts in the batcher's lifetime, after which a failure raises.
        sharing: how worker processes share a GPU: ``"none"`` (taking turns), ``"mps"`` (concurrently, under a private
            MPS daemon), ``"mig"`` (in existing MIG instances) or ``"auto"`` (MIG, else MPS, else taking turns). Under
            MPS and MIG each process sees one GPU, as ``cuda:0``.
        thread_percentage: maximum share of the GPU's threads for one worker under MPS.
        cluster: let Ray start the workers: the address of a cluster, ``"auto"`` for the cluster of this machine,
            ``"local"`` for a new one on this machine; or a dict of ``"address"`` and options of Ray's actors, such as
            ``{"address": "auto", "num_gpus": 0.25}``. Results equal those of as many processes here. ``"name://…"``
            chooses another backend, see `rlstruct.batchers.backend.BACKENDS`.

    Raises:
        ValueError: a number is out of range, the device does not exist, or both ``seed`` and ``seeds`` are passed.
        TypeError: an argument has a wrong type, such as an agent or a model instead of ``create_agent``.
        WorkerError: agent or environments cannot be created. With worker processes, the first call raises it.
        SharingError: this machine lacks what ``sharing`` needs.
        MissingPackageError: ``cluster`` needs the extra ``ray``, which is not installed.
        ClusterError: there is no such cluster.
    """

    _state: State = "closed"  # until the constructor succeeds, so that ``__del__`` has nothing to close

    @arguments.explain_unknown
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
        close_timeout: float = 10.0,
        graph: bool = True,
        compile_agent: bool = False,
        on_worker_error: Literal["raise", "restart"] = "raise",
        max_restarts: int = 3,
        sharing: Mode = "none",
        thread_percentage: float | None = None,
        cluster: str | Mapping[str, Any] | None = None,
    ) -> None:
        n_timesteps = arguments.as_integer("n_timesteps", n_timesteps, 1)
        n_processes = arguments.as_integer("n_processes", n_processes, 0)
        max_restarts = arguments.as_integer("max_restarts", max_restarts, 0)
        timeout = arguments.as_seconds("timeout", timeout)
        close_timeout = arguments.as_seconds("close_timeout", close_timeout)
        arguments.check_choices(on_worker_error, n_processes, cluster, sharing, device)
        self.seeds = arguments.choose_seeds(seed, seeds, n := max(1, n_processes))
        agent_seeds = None if agent_seeds is None else arguments.one_each("agent_seeds", agent_seeds, n)
        keep_freed_memory()
        self.device = device = resolve_device(device)
        self.timeout, max_restarts = timeout, max_restarts if on_worker_error == "restart" else 0
        agent_args, env_args = (
            arguments.as_arguments("agent_args", agent_args),
            arguments.as_arguments("env_args", env_args),
        )
        factory = CollectorFactory(create_agent, agent_args, create_env, env_args, n_timesteps, device, compile_agent)
        arguments.check_factories(factory, seed)
        placement = place_workers(device, n_processes, sharing, thread_percentage)
        self._default_infos = arguments.check_info("agent_info", agent_info), arguments.check_info("env_info", env_info)
        self._infos = DictTensor()  # ``agent_info/…`` and ``env_info/…`` of the next batch.  [B] on the device
        self._outstanding: deque[DictTensor] = deque()  # infos of each batch that was ordered, oldest first
        self._n_running = self._n_updates = self._n_batches = 0
        self._deepest, self._executors = 0, tuple[str, ...]()  # most batches outstanding at a time; see `stats`
        self._warned = False  # that the agent cannot be compiled
        self._clock = Clock({"elsewhere": None, "wait": "wait", "assembly": "assembly"})
        settings = BackendSettings(
            factory=factory,
            n_processes=n_processes,
            seeds=self.seeds,
            agent_seeds=agent_seeds,
            timeout=timeout,
            close_timeout=close_timeout,
            max_restarts=max_restarts,
            graph=graph,
            placement=placement,
            cluster=cluster,
        )
        self._backend = create_backend(settings)
        self._state = "new"

    def n_envs(self) -> int:
        """Return B, the number of environments of all processes. Waits until they have been created."""
        arguments.check_call_order("n_envs", self._state)
        with self._failing():
            return sum(self._backend.n_envs())

    @property
    def auto_reset(self) -> bool:
        """True if environments reset automatically, see `VecEnv.auto_reset`. Waits until they have been created."""
        return bool(self.n_envs()) and self._backend.auto_reset

    @property
    def actions(self) -> ActionIndices | None:
        """Indices that the agent returns instead of the environments' actions; None if it returns these.

        See `RL_Agent.action_form`. Waits until the environments have been created.
        """
        return self._backend.actions if self.n_envs() else None

    @property
    def bounds(self) -> Bounds:
        """Smallest and largest value of the frames that hold integers, see `rlstruct.spaces.integer_bounds`.

        Waits until the environments have been created.
        """
        return self._backend.bounds if self.n_envs() else {}

    def reset(self, agent_info: DictTensor | None = None, env_info: DictTensor | None = None) -> None:
        """Start a new episode in every environment. The agent starts from its initial state.

        Args:
            agent_info: values for the agent in each environment.  [B] or [1] on the CPU; default: the constructor's
            env_info: options of each environment, such as gymnasium's ``reset(options=…)``; same form and default.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            TypeError: agent_info or env_info is not a DictTensor.
            ShapeMismatchError: the number of rows is neither B nor 1.
            DeviceMismatchError: agent_info or env_info is not on the CPU.
            WorkerError: creating or resetting failed. With worker processes, the next `get` may raise it instead.
        """
        arguments.check_call_order("reset", self._state)
        B, n_envs = self.n_envs(), self._backend.n_envs()
        agent_infos = arguments.expand("agent_info", self._default_infos[0] if agent_info is None else agent_info, B)
        env_infos = arguments.expand("env_info", self._default_infos[1] if env_info is None else env_info, B)
        with self._failing():
            self._backend.reset(arguments.split(agent_infos, n_envs), arguments.split(env_infos, n_envs))
        self._infos = self._moved(agent_infos.prepend_key("agent_info/") + env_infos.prepend_key("env_info/"))
        self._n_running, self._state = B, "ready"

    def execute(self, agent_info: DictTensor | None = None) -> None:
        """Start collecting the next batch, with the weights of the last `update`.

        With workers and auto-resetting environments, you may call `execute` again before `get` has returned the first
        batch::

            batcher.execute()
            for _ in range(n):
                batcher.execute()
                trajectories, n_running = batcher.get()  # the oldest batch

        Each batch uses the weights and the agent_info at the time of its ``execute``. In this loop the weights are
        therefore one batch old, as ``policy_version`` shows.

        With worker processes this returns at once. With ``n_processes=0`` it collects; on CUDA it queues the work on
        another stream, after the work queued so far, so call it before you compute on the last batch.

        Args:
            agent_info: new values for the agent; default: those of the last batch.  [B] or [1] on the CPU

        Raises:
            BatcherStateError: `reset` or `get` must be called first, every episode has ended, or the batcher is closed.
            TypeError: agent_info is not a DictTensor.
            ShapeMismatchError: the number of rows is neither B nor 1.
            DeviceMismatchError: agent_info is not on the CPU.
        """
        arguments.check_call_order("execute", self._state)
        backend, agent_infos = self._backend, None
        if agent_info is not None:
            n_envs = backend.n_envs()
            agent_info = arguments.expand("agent_info", agent_info, sum(n_envs))
            agent_infos = arguments.split(agent_info, n_envs)
            env_info = self._infos.truncate_key("env_info/").prepend_key("env_info/")
            self._infos = self._moved(agent_info.prepend_key("agent_info/")) + env_info
        with self._failing():
            backend.execute(agent_infos)
        self._outstanding.append(self._infos)
        self._deepest = max(self._deepest, len(self._outstanding))
        if len(self._outstanding) > 1:
            self._state = "full"
        else:
            self._state = "executing" if backend.queues and backend.auto_reset else "alone"

    @overload
    def get(self, blocking: Literal[True] = True, timeout: float | None = None, *, reuse: bool = False) -> Batch: ...

    @overload
    def get(self, blocking: bool, timeout: float | None = None, *, reuse: bool = False) -> Batch | NotReady: ...

    def get(self, blocking: bool = True, timeout: float | None = None, *, reuse: bool = False) -> Batch | NotReady:
        """Return the batch that `execute` started, or the older of two.

        Its tensors carry no gradients; for a loss, `replay_agent` recomputes the agent's outputs with gradients. Do not
        write to a batch, because keys share memory (see `Trajectories`); write to its `clone`.

        Args:
            blocking: whether to wait for the batch.
            timeout: seconds to wait; default: the constructor's.
            reuse: let the next `execute` write over this batch. That saves a copy of what a CUDA graph has collected;
                other batches are the same either way.

        Returns:
            ``(trajectories, n_still_running)``: the steps, in memory that no later call changes unless ``reuse``, and
            the number of environments whose episodes have not ended. ``(None, None)`` if not blocking and the batch is
            not ready. With ``n_processes=0`` on CUDA the tensors may still be being computed, but the current stream
            waits for them.

        Raises:
            TypeError: the timeout is not a number.
            BatcherStateError: `execute` must be called first, or the batcher is closed.
            WorkerError: a worker raised or died. The batcher can then only be closed.
            WorkerTimeout: the batch was not ready in time. `get` can be called again.
        """
        arguments.check_call_order("get", self._state)
        expect_type("RL_Batcher.get: timeout is", timeout, Real | None, "seconds", "Pass a number.")
        seconds = self.timeout if timeout is None else float(timeout)
        self._clock.enter(1)
        try:
            with self._failing():
                parts = self._backend.collect(blocking, seconds)
                if parts is None:
                    return None, None
                self._clock.enter(2)
                infos, self._state = self._outstanding.popleft(), "executing" if self._outstanding else "ready"
                auto_reset, restarts = self._backend.auto_reset, self._backend.restarts_take_steps
                layout = {"auto_reset": auto_reset, "restarts_take_steps": restarts, "reuse": reuse}
                trajectories, self._n_running = assemble(parts, infos, self.device, **layout)
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
        """Send new weights to every agent, for the next `reset` and `execute`.

        Args:
            weights: name to tensor, usually ``model.state_dict()``, on any device. Read before this call returns.

        Raises:
            BatcherStateError: the batcher is closed.
            TypeError: weights is not a mapping, or one of its values is not a tensor.
        """
        arguments.check_call_order("update", self._state)
        fix = "Pass model.state_dict()"
        expect_type("RL_Batcher.update: the weights are", weights, Mapping, "a mapping of names to tensors", f"{fix}.")
        for key, value in weights.items():
            expect_type(
                f"RL_Batcher.update: weight {key!r} is", value, Tensor, "a tensor", f"{fix}, without extra state."
            )
        self._n_updates += 1
        with self._failing():
            self._backend.update(weights, self._n_updates)

    def state_dict(self) -> BatcherState:
        """Return everything that determines the next batch, for a checkpoint: environments, agent states, counters.

        Not included are the weights, gymnasium's environments, which cannot be saved, and with ``n_processes=0`` the
        state of torch's generator. `torch.load` can read it with ``weights_only=True``.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            WorkerError: a worker raised or died.
        """
        arguments.check_call_order("state_dict", self._state)
        with self._failing():
            states = self._backend.state_dicts()
        infos, begun = on_cpu(self._infos), self._state != "new"
        return BatcherState(
            collectors=states, infos=infos, begun=begun, n_running=self._n_running, policy_version=self._n_updates
        )

    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> bool:
        """Continue from a saved state, in a batcher with the same arguments. The next batches are bit-equal.

        Args:
            state: result of `state_dict`.
            weights: weights of the last `update` before it; None keeps the agents' weights.

        Returns:
            True if everything was restored. False if environments could not be saved (`VecEnv.state_dict` is None, as
            in gymnasium) and have started new episodes; pass another seed to avoid repeating the first ones.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            KeyError, ValueError: the state does not come from such a batcher.
            WorkerError: an environment refused the state.
        """
        arguments.check_call_order("load_state_dict", self._state)
        B, n_envs = self.n_envs(), self._backend.n_envs()
        check_state(state, len(n_envs))
        infos = DictTensor(state["infos"])
        info_parts = [arguments.split(infos.truncate_key(prefix), n_envs) for prefix in ("agent_info/", "env_info/")]
        with self._failing():
            if weights is not None:  # first, because the agent's initial state may depend on them
                self._backend.update(weights, state["policy_version"])
            exact = self._backend.load_state_dicts(state["collectors"], *info_parts)
        self._n_updates, self._infos = state["policy_version"], self._moved(infos)
        self._n_running = state["n_running"] if exact else B
        self._state = "new" if not state["begun"] else "ready" if self._n_running else "ended"
        return exact

    @property
    def policy_version(self) -> int:
        """Number of calls of `update`. Trajectories carry the version that they were collected with."""
        return self._n_updates

    @property
    def lost_episodes(self) -> tuple[LostEpisodes, ...]:
        """Episodes lost when workers were restarted, oldest first; see ``on_worker_error``."""
        return self._backend.stats().lost

    def stats(self) -> BatcherStats:
        """Return the seconds spent in each activity, and the workers' process ids and executors."""
        own, stats = self._clock.seconds(), self._backend.stats()
        return BatcherStats(stats.seconds, own["wait"], own["assembly"], self._n_batches, stats.pids, self._executors)

    def memory_report(self, queued: bool = False) -> MemoryReport:
        """Return the bytes used for collecting. All except the weights grow with the number of steps and environments.

        Args:
            queued: whether to count the second buffer of each worker, which a queued batch needs (see `execute`).

        Raises:
            BatcherStateError: no batch has been returned yet, or the batcher is closed.
        """
        arguments.check_call_order("memory_report", self._state)
        if not self._n_batches:
            raise BatcherStateError("RL_Batcher.memory_report: there is no batch yet. Call execute() and get() first.")
        backend, stats = self._backend, self._backend.stats()
        n_buffers = max(1, self._deepest, 2 if queued and backend.queues else 1)
        return report_memory(stats.layouts, self._infos, backend.auto_reset, stats.weight_bytes, n_buffers, stats.pids)

    def close(self) -> None:
        """Stop the workers and close agents and environments. Calling it again does nothing.

        This takes at most two seconds, or the constructor's ``close_timeout`` while an environment's or agent's own
        ``close()`` takes longer. With ``n_processes=0`` there is no limit. Ctrl-C ends the wait.
        """
        if self._state != "closed":
            self._state = "closed"
            self._backend.close()

    def __enter__(self) -> RL_Batcher:
        """Return the batcher; leaving the block closes it."""
        arguments.check_call_order("__enter__", self._state)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _moved(self, infos: DictTensor) -> DictTensor:
        return infos.map(lambda tensor: move(tensor, self.device))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Run a call of the backend. After an error other than a timeout, only close() may be called."""
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
