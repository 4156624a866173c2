"""Probes: a candidate collects or trains for a moment, in turn with the fastest so far; and the memory it takes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import cloudpickle
import torch
from torch import Tensor

from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.batchers.reports import kilobytes
from rlstruct.batchers.tuning.search import MIN_ALPHA, Candidate, Measured, NotStarted, TimeIsUp
from rlstruct.batchers.workers.fork_server import start_process
from rlstruct.batchers.workers.processes import WORKER_NAME, quiet_start
from rlstruct.core import Trajectories

Learn = Callable[[Trajectories], Mapping[str, Tensor] | None]
CreateBatcher = Callable[[Candidate], RL_Batcher]

_TURN = 0.05  # seconds of collecting, at least, before it is the other one's turn
_ROUNDS = 3, 20  # at least, and at most while the noise is too large
_ROUND_SECONDS = 1.5  # no more rounds than the least after this
_LONGEST_BATCH = 1.0, 1 / 40  # seconds, or this part of the whole search if that is more: a probe takes at least four


class Session:
    """One open batcher, warm, which takes ``bytes`` with its largest batch; ``learn`` gets every batch."""

    def __init__(self, batcher: RL_Batcher, learn: Learn | None) -> None:
        self._batcher, self._learn = batcher, learn
        self._fresh = True
        self.batch: Trajectories | None = None
        try:
            self._collect()
        except BaseException:
            batcher.close()
            raise
        self.bytes = 0

    def rate(self, seconds: float = _TURN) -> float:
        """Collect for so many seconds at least, and return the steps per second."""
        self.batch = None
        start, steps = time.perf_counter(), 0
        while True:
            steps += self._collect()
            if (spent := time.perf_counter() - start) >= seconds:
                return steps / spent

    def more_after_a_restart(self) -> int:
        """Return the bytes by which a batch in which environments restart is larger than the one that is held."""
        held = {} if self.batch is None else dict(self.batch.trajectories.items())
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held.values()}
        return max(0, self._batcher.memory_report().batch - sum(memory.values()))

    def close(self) -> None:
        """Close the batcher."""
        self.batch = None
        self._batcher.close()

    def _collect(self) -> int:
        """Collect a batch, learn from it, and return its steps."""
        batcher = self._batcher
        if self._fresh:
            batcher.reset()
        batcher.execute()
        self.batch, n_running = batcher.get()
        self._fresh = n_running < batcher.n_envs()  # episodes: begin anew, as a training does
        if self._learn is not None and (weights := self._learn(self.batch)) is not None:
            batcher.update(weights)
        return int(self.batch.lengths.sum())  # sync: once a batch, to count whole episodes and to wait for the device


class Prober:
    """Measurements of candidates, with at most two open batchers. See `tune` for the arguments, `Climb` for bytes."""

    def __init__(
        self,
        create: CreateBatcher,
        create_learner: Callable[[], Learn] | None,
        device: torch.device,
        *,
        factories: object = None,
        limit: float = float("inf"),
        seconds: float = float("inf"),
        show: Callable[[Candidate], None] = lambda candidate: None,
    ) -> None:
        self._create, self._create_learner, self._device, self._limit = create, create_learner, device, limit
        self._show = show
        self._longest = max(_LONGEST_BATCH[0], _LONGEST_BATCH[1] * seconds)
        self._deadline = time.perf_counter() + seconds
        self._opening = 0.0  # seconds that the last batcher took until its first batch
        self._open: dict[Candidate, Session] = {}
        self._rates: dict[Candidate, float] = {}
        self.worker = 0 if factories is None else _idle_worker(device, factories)
        self.start = memory_in_use(device)

    def __call__(self, candidate: Candidate, best: Candidate | None, projected: float) -> Measured:
        """Measure a candidate in turn with the fastest so far, round by round; see `Climb`."""
        turns = self._turn(candidate)
        if turns > self._longest:
            raise NotStarted(f"a batch would take {turns:.1f} s")
        turns += self._turn(best) if best else 0.0
        if self._rates and time.perf_counter() + self._opening + (_ROUNDS[0] + 1) * turns > self._deadline:
            raise TimeIsUp
        self._show(candidate)
        self.close(but=best)
        if sum(one.bytes for one in self._open.values()) + projected > self._limit:
            self.close()  # this one and the fastest would be too much together
        session = self._open[candidate] = self._opened(candidate)
        rival = self._open.get(best) if best else None
        rates, ratios, late = list[float](), list[float](), time.perf_counter() + _ROUND_SECONDS
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
        """Guess the seconds of a turn, from the fastest with as many workers."""
        alike = [rate for other, rate in self._rates.items() if other.n_processes == candidate.n_processes]
        return max(_TURN, candidate.n_steps() / max(alike)) if alike else _TURN

    def _opened(self, candidate: Candidate) -> Session:
        before, begin = memory_in_use(self._device), time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA contexts")  # what the probes are there to find out
            learn = self._create_learner() if self._create_learner else None
            session = Session(self._create(candidate), learn)
        self._opening = time.perf_counter() - begin
        session.bytes = memory_in_use(self._device) - before + session.more_after_a_restart()
        session.batch = None
        return session

    def close(self, but: Candidate | None = None) -> None:
        """Close the batchers that are open, except for one."""
        for candidate in [one for one in self._open if one != but]:
            self._open.pop(candidate).close()


def batch_size(create: CreateBatcher, smallest: Candidate) -> Callable[[Candidate], float]:
    """Return how many bytes the batches of a candidate take, from two small reports: they grow with B and T."""
    reports = []
    for n_timesteps in (1, 2):
        with create(Candidate(0, smallest.n_envs, n_timesteps)) as batcher:
            batcher.reset()
            batcher.execute()
            batcher.get()
            reports.append(batcher.memory_report().total / smallest.n_envs)
    for_step = reports[1] - reports[0]

    def size(candidate: Candidate) -> float:
        B = candidate.n_envs * max(1, candidate.n_processes)
        return B * (reports[0] + for_step * (candidate.n_timesteps - 1))

    return size


def _idle_worker(device: torch.device, factories: object) -> int:
    """Start the server of worker processes, and return the bytes that a worker without agent and environments takes."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, quiet_start():
            process = start_process(_idle, (theirs, cloudpickle.dumps(factories)), f"{WORKER_NAME}-idle")
        ours.recv(1)  # it has imported the main script, and what the factories come from
        taken = memory_in_use(device)
        process.kill()
        process.join()
        process.close()
    return max(0, taken - memory_in_use(device))


def _idle(end: socket.socket, factories: bytes) -> None:
    cloudpickle.loads(factories)
    end.send(b" ")
    end.recv(1)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that are in use on a GPU, or on the CPU by this process and those that it has started.

    Memory that k processes share counts 1/k in each (Pss of Linux's smaps_rollup), and libraries, which all of them
    map, count once; elsewhere this is 0.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    gc.collect()  # what closed batchers have left in cycles
    with contextlib.suppress(OSError, AttributeError):  # not glibc: it gives back what is free by itself, or not
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # this is not Linux
        return kilobytes(os.getpid(), "status")["RssFile"] * 1024 + _taken(os.getpid())
    return 0


def memory_there_is(device: torch.device) -> int:
    """Return the bytes that may be taken: all that are free now, and what this process has already."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    with contextlib.suppress(OSError):
        return kilobytes("meminfo")["MemAvailable"] * 1024 + memory_in_use(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _taken(pid: int) -> int:
    """Return the bytes of a process and all that it has started, but for those of mapped files."""
    try:
        rollup = kilobytes(pid, "smaps_rollup")
        children = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended meanwhile
        return 0
    return 1024 * (rollup["Pss"] - rollup["Pss_File"]) + sum(_taken(int(child)) for child in " ".join(children).split())


def _noise(values: Sequence[float]) -> float:
    """Return the 95 % half-width of the median, as a share of it, by the median deviation."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.96 * 1.2533 * spread / math.sqrt(len(values)) / middle
