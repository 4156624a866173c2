"""Batches as replays of one recorded batch, wherever that is right. Part of rlstruct.batchers.

On a GPU a step of a small network and simulator costs what its few dozen kernels cost to launch. Recorded as a CUDA
graph, the T steps of a batch (agent, simulator, random numbers, writes) are one launch. A graph reads its inputs where
they were when it was recorded, and repeats what Python did then; so the inputs of a batch live in tensors that stay,
the last operation of a batch copies its results into them, and a change of anything that a graph would freeze has the
batch recorded again.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected, Collector
from rlstruct.batchers.fingerprint import Fingerprint, fingerprint, first_change, host_generators, values_of
from rlstruct.batchers.shared_memory import layout_of
from rlstruct.batchers.slab import Slab, Steps
from rlstruct.core import DictTensor
from rlstruct.engine.graph import Record, RecordingError, Work, record
from rlstruct.vec_env import VecEnv

# So many recordings in a row that were each replayed once only are worse than none.
_MOST_RECORDINGS = 3


class Replayer:
    """Collects as a Collector does, by replay where device, environment and agent allow it.

    Args:
        collector: takes the steps.
        n_timesteps: T.
        device: where they happen.
        recorder: records device work; None to take the steps one by one, always.

    Attributes:
        gives: whether the memory of a batch is given away, instead of to be copied. Environments that write into lent
            memory (`VecEnv.lend`) hold on to it, so they get the same again for every batch.
    """

    def __init__(self, collector: Collector, n_timesteps: int, device: torch.device, recorder: Record | None) -> None:
        """Record nothing yet: the first batch is taken step by step, which tells shapes and warms up libraries."""
        self.gives = type(collector.env).lend is VecEnv.lend
        self._collector = collector
        self._T = n_timesteps
        self._device = device
        self._recorder = recorder
        self._replay: Work | None = None
        self._static: dict[str, Tensor] = {}  # where the recorded batch begins, and what it leaves for the next one
        self._frozen: Fingerprint = {}
        self._n_recordings = 0

    def collect(self, agent_info: DictTensor | None) -> tuple[Collected, Steps]:
        """Collect a batch.

        Args:
            agent_info: see `Collector.collect`.

        Returns:
            What happened, and the steps, in memory that the next batch writes to unless it is given away.
        """
        collector = self._collector
        if agent_info is not None:
            collector.set_agent_info(agent_info)
        slab = collector.slab
        if slab is None or not self._ready():
            collected, slab = collector.collect(None), _made(collector.slab)
            if self.gives:
                collector.renew()
            return collected, slab
        self._run()
        return collector.count_steps(self._T, 0), Steps({key: value.clone() for key, value in slab.tensors.items()})

    def _run(self) -> None:
        """Replay. What came from elsewhere since the last replay, a reset for example, is copied to where it reads."""
        now = self._collector.carry()
        moved = [(place, now[key]) for key, place in self._static.items() if now[key] is not place]
        if moved:
            torch._foreach_copy_([place for place, _ in moved], [value for _, value in moved])
        if self._replay is None:  # unreachable: _ready said so; narrows the type
            raise RuntimeError("rlstruct.batchers.replayer: there is no recording.")
        self._replay()
        self._collector.set_carry(self._static)

    def _ready(self) -> bool:
        """Whether there is a recording that does what taking the steps would do; makes one if it can."""
        if self._recorder is None:
            return False
        frozen = self._freezes()
        changed = first_change(self._frozen, frozen) if self._replay is not None else None
        if self._replay is not None and changed is None:
            self._n_recordings = 0
            return True
        if self._n_recordings == _MOST_RECORDINGS:
            self._give_up(f"{changed} is another one in every batch. Keep it in a tensor on {self._device}")
            return False
        try:
            self._make_recording(self._recorder, frozen)
        except RecordingError as error:
            self._give_up(str(error))
            return False
        return True

    def _make_recording(self, recorder: Record, frozen: Fingerprint) -> None:
        collector, before = self._collector, self._collector.carry()
        self._static = static = {key: value.clone() for key, value in before.items()}
        generators = host_generators(self._device)
        collector.set_carry(static)
        try:
            replay = record(recorder, self._batch)
            changed = first_change(frozen, self._freezes()) or first_change(generators, host_generators(self._device))
            if changed is not None:
                raise RecordingError(
                    f"{changed} changes while the agent acts, on the host. Keep it in a tensor on {self._device} that "
                    "is written in place; draw random numbers from observation['rng']"
                )
        except RecordingError:
            collector.set_carry(before)
            raise
        collector.set_carry(before)
        self._replay, self._frozen = replay, frozen
        self._n_recordings += 1

    @torch.no_grad()
    def _batch(self) -> None:
        """Take T steps from the static tensors, and leave there where they ended."""
        self._collector.take_steps(look=False)
        after = self._collector.carry()
        places = {tensor.untyped_storage().data_ptr() for tensor in self._static.values()}
        new = {key: value for key, value in after.items() if value is not self._static[key]}
        # One that shows another's static memory is copied before that is written.
        sources = [v.clone() if v.untyped_storage().data_ptr() in places else v for v in new.values()]
        torch._foreach_copy_([self._static[key] for key in new], sources)

    def _freezes(self) -> Fingerprint:
        """Everything that decides what a recording does, beside the values in tensors on the device."""
        collector = self._collector
        found = fingerprint(collector.agent, self._device, "agent")
        if collector.agent_info.device != self._device:
            found |= values_of(collector.agent_info, "agent_info")
        return found | {f"shape of {key}": layout for key, layout in layout_of(collector.carry()).items()}

    def _give_up(self, reason: str) -> None:
        self._recorder = self._replay = None
        self._static = {}
        warnings.warn(
            f"RL_Batcher: a batch on {self._device} cannot be recorded as one graph, its steps are taken one by one, "
            f"slower and with equal results: {reason}. RL_Batcher(graph=False) does so without this warning.",
            stacklevel=2,
        )


def _made(slab: Slab | None) -> Slab:
    if slab is None:  # unreachable: collecting made it; narrows the type
        raise RuntimeError("rlstruct.batchers.replayer: the slab is missing.")
    return slab
