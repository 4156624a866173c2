"""Contract between RL_Batcher and a backend, which collects for it, and the choice of one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from rlstruct.batchers.assemble import Part
from rlstruct.batchers.recipe import Recipe
from rlstruct.batchers.reports import LostEpisodes
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.core import DictTensor, Layout
from rlstruct.errors import BadValueError
from rlstruct.sharing import GpuSharing

BACKENDS = {
    "process": "rlstruct.batchers.in_process:InProcess",
    "workers": "rlstruct.batchers.workers.local:create_pool",
    "ray": "rlstruct.batchers.workers.cluster:create_pool",
}
"""The function or class that makes a backend from `Settings`, as ``module:name``; imported when it is chosen."""


class Backend(Protocol):
    """Collectors of one batcher, wherever they run. Lists have one entry per collector, in the order of environments.

    RL_Batcher checks arguments and the order of calls. After an error other than WorkerTimeout it calls `close` only.

    Attributes:
        auto_reset: see `VecEnv.auto_reset`. This and ``has_gaps`` are known once `n_envs` has returned.
        has_gaps: see `VecEnv.restarts_take_steps`.
        queues: whether a second batch may be ordered before the first is returned, if environments restart.
        interrupted: consequence of Ctrl-C at this moment: None if nothing is lost, ``"new"`` if `reset` must come next,
            ``"failed"`` if only `close` helps.
    """

    auto_reset: bool
    has_gaps: bool
    queues: bool
    interrupted: Literal["new", "failed"] | None

    def n_envs(self) -> list[int]:
        """Return the number of environments of each collector; wait until they exist."""

    def reset(self, agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]) -> None:
        """Start new episodes, with CPU tensors of one row per environment; the agents start from their first state."""

    def execute(self, agent_infos: Sequence[DictTensor] | None) -> None:
        """Order a batch of collectors whose environments go on; None keeps the agent_infos of the batch before."""

    def collect(self, blocking: bool, timeout: float) -> list[Part] | None:
        """Return the oldest batch. If it is not ready: None unless blocking, else WorkerTimeout after these seconds."""

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give weights to the agents. Read them before this returns; batches that were ordered keep the old ones."""

    def state_dicts(self) -> list[CollectorState]:
        """Return everything that decides the next batch, except weights and infos, between two batches."""

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: Sequence[DictTensor], env_infos: Sequence[DictTensor]
    ) -> bool:
        """Go on from saved states; return False if environments could not, and began new episodes."""

    def stats(self) -> BackendStats:
        """Return times and sizes as of the last batch, and losses. This waits for nothing."""

    def close(self) -> None:
        """Release everything within two seconds; calling it again does nothing."""


@dataclass(frozen=True)
class BackendStats:
    """Times, sizes and losses of a backend."""

    seconds: tuple[dict[str, float], ...]  # of each `Phase`, for each collector
    layouts: tuple[Layout, ...]  # of a slab of each collector; empty before the first batch
    weight_bytes: int = 0  # size of the buffers through which weights travel
    pids: tuple[int, ...] = ()  # process ids of workers on this machine
    lost: tuple[LostEpisodes, ...] = ()  # with workers that failed and were started again, oldest first


@dataclass(frozen=True)
class Settings:
    """Arguments of RL_Batcher that backends are made from, checked."""

    recipe: Recipe  # how a collector is made
    n_processes: int  # number of worker processes; 0 to collect in this process
    seeds: Sequence[int]  # one per collector, or that of the first alone if the number of environments gives the others
    agent_seeds: Sequence[int] | None  # one per collector; None for that of its environments
    timeout: float  # seconds that a worker may take for one answer
    max_restarts: int  # number of failed workers that are replaced before one raises
    graph: bool  # whether a whole batch may be taken at once
    placement: GpuSharing  # how workers share a GPU; the backend closes it
    cluster: str | Mapping[str, Any] | None  # see `RL_Batcher`


def create_backend(settings: Settings) -> Backend:
    """Create the backend that fits: in this process, with workers here, or on the cluster that an address names."""
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
    module, _, attribute = BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)(settings)
    return backend
