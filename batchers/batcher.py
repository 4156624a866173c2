"""RL_Batcher: the one class that users of batchers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from rlstruct.batchers.arguments import (
    check_choices,
    check_factories,
    check_info,
    check_weights,
    choose_seeds,
    named,
    one_each,
    split,
    spread,
    whole,
)
from rlstruct.batchers.hand_over import hand_over
from rlstruct.batchers.in_process import InProcess
from rlstruct.batchers.life_cycle import LifeCycle
from rlstruct.batchers.recipe import CreateAgent, CreateEnv, Recipe
from rlstruct.batchers.reports import BatcherStats, LostEpisodes, MemoryReport, report_memory
from rlstruct.batchers.saved_state import BatcherState, check_state, on_cpu
from rlstruct.batchers.workers.pool import WorkerPool, actor_pool
from rlstruct.core import DictTensor, Trajectories
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.compiled import warn_uncompiled
from rlstruct.engine.streams import move
from rlstruct.errors import BatcherStateError
from rlstruct.profiling import Clock, operation
from rlstruct.sharing import Mode, Placement


class RL_Batcher:  # noqa: N801 - the name that users of rlstructures know
    """Runs an agent in many environments and hands over what happened, T steps at a time.

    The life cycle is ``reset``, then ``execute`` and ``get`` in turn. With ``n_processes=0`` this process collects;
    with k >= 1, k worker processes do, each with its own agent and environments. Episodic environments give whole
    episodes: rows are padded, ``lengths`` and ``mask()`` say how far they go, and a later ``execute`` goes on with
    those that have not ended. Auto-resetting environments give B rows of T steps, always.

    Args:
        n_timesteps: T, the most steps that one ``execute`` collects.
        create_agent: called as ``create_agent(**agent_args)`` in every process; returns an RL_Agent.
        create_env: called as ``create_env(**env_args, seed=…)`` in every process; returns a VecEnv on ``device``.
        agent_args: arguments of ``create_agent``, by value: each process gets copies of the tensors and models in them,
            this one too, so that `update` is the only way to new weights. What ``create_agent`` reaches otherwise, as a
            global variable or from an enclosing function, is copied for worker processes only.
        env_args: arguments of ``create_env``. The batch has (environments of one VecEnv) x (processes) rows.
        n_processes: 0 to collect in this process, or the number of worker processes.
        seed: process p seeds with ``seed`` plus the index of its first environment, so that the same environments
            draw the same numbers however they are split. Drawn at random if neither it nor ``seeds`` is passed.
        seeds: instead of ``seed``, one per process.
        agent_info: values for the agent in each environment, used where ``reset`` gets none. [B], or [1] for all alike;
            on the CPU.
        env_info: options of each environment, likewise.
        agent_seeds: one per process for ``agent.seed``; by default the seed of its environments.
        device: where agent and environments live and trajectories appear.
        timeout: seconds that a worker may take for one answer before `WorkerTimeout` is raised.
        graph: on CUDA with ``n_processes=0``, run a whole batch (agent, environments, random numbers) as one CUDA
            graph, if the environments are `Carrying`, as all of `rlstruct.sims` are, and the agent promises to be
            `RL_Agent.pure`. The trajectories are those of single steps. An agent that cannot be recorded acts step by
            step after all, with one warning that says why.
        compile_agent: let TorchInductor compile what the agent does in a step, if it promises to be `RL_Agent.pure`; on
            the CPU, small networks then act many times faster. Answers are equal to rounding. An agent that cannot be
            compiled acts as it is, with one warning that says why. The first batch takes seconds longer.
        on_worker_error: ``"restart"`` starts a worker that raised or died again, with new episodes in its environments,
            and lists what was lost in `lost_episodes`; batches stay full. One that fails before its environments exist
            raises all the same: it would fail again. ``"raise"`` raises `WorkerError`.
        max_restarts: how often, over the batcher's life, before the next failure raises after all.
        sharing: how worker processes share a GPU: ``"none"``, in turns; ``"mps"``, at the same time, under a private
            MPS daemon; ``"mig"``, in the MIG instances that are there; ``"auto"``, MIG if there is, else MPS if it can
            be had, else in turns. Under MPS and MIG each sees one GPU, as ``cuda:0``. See `rlstruct.sharing`.
        thread_percentage: of the GPU's threads, the most that one worker gets under MPS.
        cluster: where Ray starts the workers instead: the address of a cluster, ``"auto"`` for the one that this
            machine is in, ``"local"`` for a new one on it; or ``"address"`` with options of Ray's actors, such as
            ``{"address": "auto", "num_gpus": 0.25}``. The trajectories are those of as many processes here.

    Raises:
        ValueError: a number is out of range, the device does not exist, or both ``seed`` and ``seeds`` are passed.
        TypeError: an argument has a wrong type, such as an agent or a model where ``create_agent`` belongs.
        WorkerError: agent or environments cannot be created; with worker processes the first call says so.
        SharingError: this machine lacks what ``sharing`` needs.
        ClusterError: there is no such cluster.
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
        graph: bool = True,
        compile_agent: bool = False,
        on_worker_error: Literal["raise", "restart"] = "raise",
        max_restarts: int = 3,
        sharing: Mode = "none",
        thread_percentage: float | None = None,
        cluster: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Create agent and environments, or start the processes that do."""
        self._life = LifeCycle()
        n_timesteps, n_processes = whole("n_timesteps", n_timesteps, 1), whole("n_processes", n_processes, 0)
        max_restarts = whole("max_restarts", max_restarts, 0)
        check_choices(timeout, on_worker_error, n_processes, cluster, sharing, device)
        n = max(1, n_processes)
        self.seeds = choose_seeds(seed, seeds, n)
        of_agents = None if agent_seeds is None else one_each("agent_seeds", agent_seeds, n)
        self.device, self.timeout = resolve_device(device), timeout
        agent_args, env_args = named("agent_args", agent_args), named("env_args", env_args)
        recipe = Recipe(create_agent, agent_args, create_env, env_args, n_timesteps, self.device, compile_agent)
        check_factories(recipe, seed)
        self._recipe, placement = recipe, Placement(self.device, n_processes, sharing, thread_percentage)
        self._default_infos = check_info("agent_info", agent_info), check_info("env_info", env_info)
        self._n_batches, self._executors = 0, tuple[str, ...]()
        self._told = False  # whether the user knows that the agent is not compiled
        self._clock = Clock({"elsewhere": None, "wait": "wait", "hand_over": "hand-over"})
        self._backend: InProcess | WorkerPool
        if n_processes == 0:
            self._backend = InProcess(recipe, self.seeds[0], (of_agents or self.seeds)[0], graph)
        else:
            restarts = max_restarts if on_worker_error == "restart" else 0
            kind = WorkerPool if cluster is None else actor_pool(cluster)
            self._backend = kind(recipe, n_processes, self.seeds, of_agents, timeout, placement, restarts)
        # The state after Ctrl-C in the middle of a call: a worker may have missed an order then.
        self._broken: Literal["new", "failed"] = "new" if n_processes == 0 else "failed"
        self._life.state = "new"

    def n_envs(self) -> int:
        """Return B, the environments of all processes together. Waits until they are created."""
        self._life.refuse_closed("n_envs")
        with self._life.failing():
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
        self._life.refuse_executing("reset")
        B = self.n_envs()
        agent_infos = spread("agent_info", self._default_infos[0] if agent_info is None else agent_info, B)
        env_infos = spread("env_info", self._default_infos[1] if env_info is None else env_info, B)
        with self._life.failing(self._broken):
            self._backend.reset(split(agent_infos, self._backend.n_envs()), split(env_infos, self._backend.n_envs()))
        infos = self._moved(agent_infos.prepend_key("agent_info/") + env_infos.prepend_key("env_info/"))
        self._life.begin(infos, B)

    def execute(self, agent_info: DictTensor | None = None) -> None:
        """Begin to collect the next batch, with the weights of the last `update`.

        Worker processes whose environments restart by themselves take a second order before `get` has handed over the
        first batch. They begin it as soon as they have finished the first, without waiting for this process::

            batcher.execute()
            for _ in range(n):
                batcher.execute()
                trajectories, n_running = batcher.get()  # the oldest batch

        The batches are the same as those of execute and get in turn. Each acts with the weights and the agent_info of
        its own ``execute``, so with weights that are one batch old, as ``policy_version`` tells.

        With worker processes this returns at once. With ``n_processes=0`` it collects; on CUDA it queues the work on a
        stream of its own, behind what is queued now, and returns: call it before you compute on the last batch. (For
        episodes that are not captured as a graph it waits in every 16th step.)

        Args:
            agent_info: new values for the agent; default: those of the batch before.  [B] or [1] on the CPU

        Raises:
            BatcherStateError: `reset` or `get` is missing, every episode has ended, or the batcher is closed. `get` is
                missing if two batches are outstanding, or one where none can be queued.
            TypeError: agent_info is not a DictTensor.
            ShapeMismatchError: agent_info has another number of rows than B or 1.
            DeviceMismatchError: agent_info is not on the CPU.
        """
        backend, life = self._backend, self._life
        life.check_execute(backend.queues and backend.auto_reset)
        of_collectors: Sequence[DictTensor | None] = [None] * len(backend.n_envs())
        infos = life.infos
        if agent_info is not None:
            agent_info = spread("agent_info", agent_info, self.n_envs())
            of_collectors = split(agent_info, backend.n_envs())
            env_info = infos.truncate_key("env_info/").prepend_key("env_info/")
            infos = self._moved(agent_info.prepend_key("agent_info/")) + env_info
        with life.failing(self._broken):
            backend.execute(of_collectors)
        life.executed(infos)

    @overload
    def get(self, blocking: Literal[True] = True, timeout: float | None = None) -> tuple[Trajectories, int]: ...

    @overload
    def get(self, blocking: bool, timeout: float | None = None) -> tuple[Trajectories, int] | tuple[None, None]: ...

    def get(self, blocking: bool = True, timeout: float | None = None) -> tuple[Trajectories, int] | tuple[None, None]:
        """Hand over the batch that `execute` began; the oldest, if two are outstanding.

        Its tensors carry no gradients: the agent acted without. For a loss, `replay_agent` computes the agent's outputs
        again, with gradients. A batch is read-only, since keys share memory (see `Trajectories`): write to its `clone`.

        Args:
            blocking: whether to wait for it.
            timeout: seconds to wait; default: the constructor's.

        Returns:
            ``(trajectories, n_still_running)``: what happened, in memory that no later call changes, and how many
            environments go on. ``(None, None)`` if not blocking and the batch is not ready. With ``n_processes=0`` on
            CUDA the tensors may not be finished yet, but anything queued on the current stream runs after them.

        Raises:
            BatcherStateError: `execute` is missing, or the batcher is closed.
            WorkerError: a worker raised or died; the batcher can only be closed after that.
            WorkerTimeout: the batch was not ready in time; `get` can be called again.
        """
        backend, seconds = self._backend, self.timeout if timeout is None else timeout
        self._life.check_get()
        self._clock.enter(1)
        try:
            with self._life.failing(self._broken, lambda: backend.waiting):
                shares = backend.collect(blocking, seconds)
            if shares is None:
                return None, None
            self._clock.enter(2)
            kind = {"auto_reset": backend.auto_reset, "gaps": backend.gaps}
            trajectories, self._life.n_running = hand_over(shares, self._life.taken(), self.device, **kind)
        finally:
            self._clock.enter(0)
        self._n_batches += 1
        self._executors = tuple(share.collected.executor for share in shares)
        why_not = next((share.collected.uncompiled for share in shares if share.collected.uncompiled), "")
        if why_not and not self._told:
            self._told = True
            warn_uncompiled("RL_Batcher: the agent", why_not, "compile_agent")
        return trajectories, self._life.n_running

    @operation("weights")
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Give new weights to every agent; the next `reset` and `execute` act with them.

        Args:
            weights: name to tensor, usually ``model.state_dict()``, on any device. Read before this call returns.

        Raises:
            BatcherStateError: the batcher is closed.
            TypeError: this is not a mapping, or one of its values is not a tensor.
        """
        self._life.refuse_closed("update")
        check_weights(weights)
        self._life.version += 1
        with self._life.failing(self._broken):
            self._backend.update(weights, self._life.version)

    def state_dict(self) -> BatcherState:
        """Return what decides the next batch, for a checkpoint: environments, agent states, counters of random keys.

        It leaves out what the caller has (the weights, and with ``n_processes=0`` the state of torch's generator), and
        gymnasium's environments, which cannot be saved. `torch.load` reads it with ``weights_only=True``.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            WorkerError: a worker raised or died.
        """
        self._life.refuse_executing("state_dict")
        life = self._life
        with life.failing(self._broken):
            states = self._backend.state_dicts()
        return BatcherState(
            collectors=states,
            infos=on_cpu(life.infos),
            begun=life.state == "ready",
            n_running=life.n_running,
            policy_version=life.version,
        )

    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> bool:
        """Go on where `state_dict` was called, in a batcher with the same arguments: the next batches are bit-equal.

        Args:
            state: what `state_dict` returned.
            weights: those of the last `update` before it; None leaves the agents as they are until the next `update`.

        Returns:
            True if everything is as it was. False if environments could not be saved (`VecEnv.state_dict` is None, as
            it is for gymnasium's): they have begun new episodes, as after `reset`; create the batcher with another seed
            then, or it plays the first episodes again.

        Raises:
            BatcherStateError: a batch is being collected, or the batcher is closed.
            KeyError, ValueError: the state is not that of such a batcher.
            WorkerError: an environment refused it.
        """
        self._life.refuse_executing("load_state_dict")
        B, n_envs = self.n_envs(), self._backend.n_envs()
        check_state(state, len(n_envs))
        infos = DictTensor(state["infos"])
        of_collectors = [split(infos.truncate_key(prefix), n_envs) for prefix in ("agent_info/", "env_info/")]
        with self._life.failing(self._broken):
            if weights is not None:  # first: where new episodes begin, the agent's first state may come from them
                self._backend.update(weights, state["policy_version"])
            exact = self._backend.load_state_dicts(state["collectors"], *of_collectors)
        self._life.version = state["policy_version"]
        self._life.begin(self._moved(infos), state["n_running"] if exact else B, begun=state["begun"])
        return exact

    @property
    def policy_version(self) -> int:
        """How many times `update` was called; trajectories carry the version that acted."""
        return self._life.version

    @property
    def lost_episodes(self) -> tuple[LostEpisodes, ...]:
        """What was lost because workers failed and were started again, oldest first; see ``on_worker_error``."""
        return tuple(self._backend.lost)

    def stats(self) -> BatcherStats:
        """Return where the time went, the workers' process ids, and what took their steps."""
        spent, backend = self._clock.seconds(), self._backend
        times = tuple(backend.seconds()), spent["wait"], spent["hand_over"]
        return BatcherStats(*times, self._n_batches, tuple(backend.pids()), self._executors)

    def memory_report(self, queued: bool = False) -> MemoryReport:
        """Return how many bytes collecting takes, also before anything is collected.

        Before the first batch, a second agent and environment take one step in this process to find out.

        Args:
            queued: whether to count the second slab in each worker that queueing a batch takes (see `execute`). Once a
                batch has been queued it is counted anyway.

        Raises:
            BatcherStateError: the first batch is being collected, or the batcher is closed.
            Exception: whatever the second agent or environment raises.
        """
        self._life.refuse_closed("memory_report")
        if self._life.state == "executing" and self._n_batches == 0:
            raise BatcherStateError("RL_Batcher.memory_report: the first batch is being collected. Call get() first.")
        names = ("agent_info", "env_info")
        infos = [spread(name, info, self.n_envs()) for name, info in zip(names, self._default_infos, strict=True)]
        if self._life.state == "ready":
            infos = [self._life.infos.truncate_key(f"{name}/").to("cpu") for name in names]
        layouts = self._backend.layouts()
        if not layouts[0]:
            of_one = self._recipe.measure(self.seeds[0], *(split(info, self._backend.n_envs())[0] for info in infos))
            layouts = [of_one] * len(layouts)
        n_slabs = max(self._life.deepest, 2 if queued and self._backend.queues else 1)
        backend = self._backend
        return report_memory(layouts, infos, backend.auto_reset, backend.weight_bytes(), n_slabs, backend.pids())

    def close(self) -> None:
        """End the workers and close agents and environments, in at most two seconds. Calling it again does nothing."""
        if self._life.state != "closed":
            self._life.state = "closed"
            self._backend.close()

    def __enter__(self) -> RL_Batcher:
        """Return the batcher; leaving the block closes it."""
        self._life.refuse_closed("__enter__")
        return self

    def __exit__(self, *error: object) -> None:
        """Close the batcher."""
        self.close()

    def __del__(self) -> None:
        """Close a batcher that was dropped."""
        if hasattr(self, "_life"):  # not if the arguments did not fit
            self.close()

    def _moved(self, infos: DictTensor) -> DictTensor:
        """An agent_info or env_info on the device of the trajectories, which carry it."""
        return infos.map(lambda tensor: move(tensor, self.device))
