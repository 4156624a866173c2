"""Speed and memory of a candidate: it collects or trains briefly, alternating with the fastest one so far."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.batchers.reports import kilobytes
from rlstruct.core import Trajectories
from rlstruct.sharing.tuning.search import MIN_ALPHA, Candidate, Measured, NotStarted, TimeIsUp

Learn = Callable[[Trajectories], Mapping[str, Tensor] | None]
CreateBatcher = Callable[[Candidate], RL_Batcher]

TURN = 0.05
"""Shortest time in seconds that a candidate collects before the other one's turn."""
_ROUNDS = 3, 20  # fewest rounds, and most rounds while the noise is too large
ROUND_SECONDS = 1.5
"""Seconds after which only the fewest rounds are completed."""
LONGEST_BATCH = 1.0, 1 / 40
"""Seconds, or this share of the search if that is longer: a probe takes four or more."""


class Session:
    """An open batcher that has collected its first batch.

    Args:
        batcher: the session closes it.
        learn: called with every batch.

    Attributes:
        batcher: the argument.
        bytes: memory in use by the batcher and its largest batch.
    """

    def __init__(self, batcher: RL_Batcher, learn: Learn | None) -> None:
        self.batcher, self._learn = batcher, learn
        self._ended = True
        self.bytes = 0
        try:
            self._collect()
        except BaseException:
            batcher.close()
            raise

    def rate(self, seconds: float = TURN) -> float:
        """Collect for at least this many seconds, and return the steps per second."""
        start, steps = time.perf_counter(), 0
        while True:
            steps += self._collect()
            if (spent := time.perf_counter() - start) >= seconds:
                return steps / spent

    def close(self) -> None:
        """Close the batcher."""
        self.batcher.close()

    def _collect(self) -> int:
        """Collect a batch, learn from it, and return its number of steps."""
        batcher = self.batcher
        if self._ended:
            batcher.reset()
        batcher.execute()
        batch, n_running = batcher.get()
        self._ended = n_running < batcher.n_envs()  # an episode has ended: reset all, as a training does
        if self._learn is not None and (weights := self._learn(batch)) is not None:
            batcher.update(weights)
        return int(batch.lengths.sum())  # sync: once a batch, to count steps and to wait for the device


@dataclass
class Prober:
    """Measurements of candidates, with at most two open batchers."""

    create: CreateBatcher
    create_learner: Callable[[], Learn] | None  # see `rlstruct.sharing.tune`, as for device and seconds
    device: torch.device
    limit: float = float("inf")  # bytes that may be in use
    seconds: float = float("inf")
    show: Callable[[Candidate], None] = lambda candidate: None  # called with each candidate before its probe
    _opening: float = field(default=0.0, init=False)  # seconds from creating the last batcher to its first batch
    _open: dict[Candidate, Session] = field(default_factory=dict, init=False)
    _rates: dict[Candidate, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._deadline = time.perf_counter() + self.seconds
        self.start = memory_in_use(self.device)

    def __call__(self, candidate: Candidate, best: Candidate | None, projected: float) -> Measured:
        """Measure a candidate, alternating with the fastest one so far; see `Measure`."""
        turn = self._turn(candidate)
        if turn > max(LONGEST_BATCH[0], LONGEST_BATCH[1] * self.seconds):
            raise NotStarted(f"a batch would take {turn:.1f} s")
        a_round = turn + (self._turn(best) if best else 0.0)
        if self._rates and time.perf_counter() + self._opening + (_ROUNDS[0] + 1) * a_round > self._deadline:
            raise TimeIsUp
        self.show(candidate)
        self.close(but=best)
        if sum(one.bytes for one in self._open.values()) + projected > self.limit:
            self.close()  # both batchers together would use too much
        session = self._open[candidate] = self._opened(candidate)
        rival = self._open.get(best) if best else None
        rates, ratios, late = list[float](), list[float](), time.perf_counter() + ROUND_SECONDS
        while len(rates) < _ROUNDS[1]:
            reference = rival.rate() if rival else self._rates[best] if best else 1.0
            rates.append(session.rate())
            ratios.append(rates[-1] / reference)
            noise = _noise(ratios)
            if len(rates) >= _ROUNDS[0] and (noise <= MIN_ALPHA or time.perf_counter() > late):
                break
        self._rates[candidate] = statistics.median(rates)
        ratio = statistics.median(ratios) if best else 1.0
        return Measured(self._rates[candidate], ratio, noise, self.start + session.bytes)

    def _turn(self, candidate: Candidate) -> float:
        """Estimate the seconds of a turn from the highest speed with the same number of workers."""
        rates = [rate for other, rate in self._rates.items() if other.n_processes == candidate.n_processes]
        return max(TURN, candidate.n_steps() / max(rates)) if rates else TURN

    def _opened(self, candidate: Candidate) -> Session:
        before, begin = memory_in_use(self.device), time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA contexts")  # whether they pay is measured here
            learn = self.create_learner() if self.create_learner else None
            batcher = self.create(candidate)
            session = Session(batcher, learn)
        self._opening = time.perf_counter() - begin
        session.bytes = memory_in_use(self.device) - before + batcher.memory_report().batch
        return session

    def close(self, but: Candidate | None = None) -> None:
        """Close the open batchers, except one."""
        for candidate in [candidate for candidate in self._open if candidate != but]:
            self._open.pop(candidate).close()


def batch_size(create: CreateBatcher, smallest: Candidate) -> Callable[[Candidate], float]:
    """Return a function that computes the bytes of a candidate's batches, which are linear in B and T.

    Two small batchers show how they grow.
    """
    sizes = []
    for n_timesteps in (1, 2):
        batcher = create(Candidate(0, smallest.n_envs, n_timesteps))
        with contextlib.closing(Session(batcher, None)):
            sizes.append(batcher.memory_report().total / smallest.n_envs)
    one, two = sizes  # bytes per environment, with one step and with two

    def size(candidate: Candidate) -> float:
        B = candidate.n_envs * max(1, candidate.n_processes)
        return B * (one + (two - one) * (candidate.n_timesteps - 1))

    return size


def worker_size(create: CreateBatcher, smallest: Candidate, device: torch.device) -> int:
    """Start the server of worker processes, and measure the bytes of a worker with the fewest environments."""
    with contextlib.closing(Session(create(smallest._replace(n_processes=1)), None)):
        with_worker = memory_in_use(device)
    return max(0, with_worker - memory_in_use(device))


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use on a GPU, or on the CPU by this process and its descendants.

    Memory that k processes share counts 1/k in each (Pss in Linux's smaps_rollup). Libraries, which all of them map,
    count once. Without Linux, the result on the CPU is 0.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    gc.collect()  # closed batchers may be part of reference cycles
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # this is not Linux
        return kilobytes(os.getpid(), "status")["RssFile"] * 1024 + _private_bytes(os.getpid())
    return 0


def memory_available(device: torch.device) -> int:
    """Return the bytes that may be in use: those in use by this process now, and the free ones."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    with contextlib.suppress(OSError):
        return kilobytes("meminfo")["MemAvailable"] * 1024 + memory_in_use(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _private_bytes(pid: int) -> int:
    """Return the bytes of a process and its descendants, without mapped files."""
    try:
        rollup = kilobytes(pid, "smaps_rollup")
        children = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # the process has just ended
        return 0
    own = 1024 * (rollup["Pss"] - rollup["Pss_File"])
    return own + sum(_private_bytes(int(child)) for child in " ".join(children).split())


def _noise(values: Sequence[float]) -> float:
    """Return the 95 % half-width of the median, relative to the median, from the median absolute deviation."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.96 * 1.2533 * spread / math.sqrt(len(values)) / middle
