"""Contract between RL_Batcher and the backend that collects for it, and the registry of backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from rlstruct.batchers.assemble import Part
from rlstruct.batchers.collector_factory import CollectorFactory
from rlstruct.batchers.reports import LostEpisodes
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.workers.placement import WorkerPlacement
from rlstruct.batchers.workers.system import check_platform
from rlstruct.core import DictTensor, Layout
from rlstruct.errors import BadValueError
from rlstruct.registry import Registry
from rlstruct.spaces import ActionIndices, Bounds

BACKENDS: Registry[str, Callable[[BackendSettings], Backend]] = Registry(
    {
        "process": "rlstruct.batchers.in_process:InProcess",
        "workers": "rlstruct.batchers.workers.local:create_pool",
        "ray": "rlstruct.batchers.workers.cluster:create_pool",
    }
)
"""Function or class that creates a backend from `BackendSettings`, by name."""


class Backend(Protocol):
    """The collectors of one batcher. Lists have one entry per collector, in the order of their environments.

    RL_Batcher checks arguments and the order of calls. After an error other than WorkerTimeout it only calls `close`.

    Attributes:
        auto_reset: see `VecEnv.auto_reset`. This and ``restarts_take_steps`` are known once `n_envs` has returned.
        restarts_take_steps: see `VecEnv.restarts_take_steps`.
        actions: `rlstruct.indexed_actions.indices_of` the environments; known then, too.
        bounds: of the integers in their frames, see `rlstruct.spaces.integer_bounds`; known then, too.
        queues: whether auto-resetting environments accept an order for a second batch before the first is returned.
        interrupted: state of the batcher if Ctrl-C arrives now: None if nothing is lost, ``"new"`` if `reset` must be
            called next, ``"failed"`` if only `close` can be called.
    """

    auto_reset: bool
    restarts_take_steps: bool
    actions: ActionIndices | None
    bounds: Bounds
    queues: bool
    interrupted: Literal["new", "failed"] | None

    def n_envs(self) -> list[int]:
        """Return the number of environments of each collector. Wait until they exist."""

    def reset(self, agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]) -> None:
        """Start new episodes; agents start from their initial state. Infos have one row per environment, on the CPU."""

    def execute(self, agent_infos: Sequence[DictTensor] | None) -> None:
        """Order a batch from collectors that have running episodes. None keeps the last agent_infos."""

    def collect(self, blocking: bool, timeout: float) -> list[Part] | None:
        """Return the oldest batch, or None if it is not ready; if blocking, wait for it, then raise WorkerTimeout."""

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give weights to the agents, and read them before returning. Outstanding batches keep the old weights."""

    def state_dicts(self) -> list[CollectorState]:
        """Return everything that determines the next batch, except weights and infos. Called between batches."""

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]
    ) -> bool:
        """Continue from saved states. Return False if environments cannot, and have started new episodes instead."""

    def stats(self) -> BackendStats:
        """Return statistics as of the last batch, without waiting."""

    def close(self) -> None:
        """Release everything within two seconds, or ``close_timeout`` if an environment takes longer. Works once."""


@dataclass(frozen=True)
class BackendStats:
    """Statistics of a backend."""

    seconds: tuple[dict[str, float], ...]  # spent in each `Phase`, for each collector
    layouts: tuple[Layout, ...]  # layout of a buffer, for each collector; empty before the first batch
    weight_bytes: int = 0  # size of the buffers for weights
    pids: tuple[int, ...] = ()  # process ids of workers on this machine
    lost: tuple[LostEpisodes, ...] = ()  # oldest first


@dataclass(frozen=True)
class BackendSettings:
    """Checked arguments of RL_Batcher, from which a backend is created."""

    factory: CollectorFactory  # creates a collector
    n_processes: int  # number of worker processes; 0 to collect in this process
    seeds: Sequence[int]  # one per collector; or only the first, from which the number of environments gives the rest
    agent_seeds: Sequence[int] | None  # one per collector; None to use the seed of its environments
    timeout: float  # seconds that a worker may take for one answer
    close_timeout: float  # seconds that a worker may take to close agent and environments
    max_restarts: int  # number of failed workers that are restarted
    graph: bool  # whether a whole batch may be captured as one CUDA graph
    placement: WorkerPlacement  # how workers share a GPU; the backend closes it
    cluster: str | Mapping[str, Any] | None  # see `RL_Batcher`


def create_backend(settings: BackendSettings) -> Backend:
    """Create a backend: in this process, with workers on this machine, or on the cluster given by its address."""
    cluster = settings.cluster
    if cluster is None:
        name = "workers" if settings.n_processes else "process"
    else:
        address = cluster if isinstance(cluster, str) else str(cluster.get("address", ""))
        name = address.partition("://")[0] if "://" in address else "ray"
    if name not in BACKENDS:
        raise BadValueError(
            f"RL_Batcher: cluster={cluster!r} names the backend {name!r}, expected one of {sorted(BACKENDS)}. "
            f"Register yours: rlstruct.batchers.backend.BACKENDS[{name!r}] = 'module:callable'."
        )
    if name == "workers":
        check_platform("RL_Batcher")
    return BACKENDS[name](settings)
