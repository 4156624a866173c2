"""What it costs to measure: short reruns of one workload, with one feature on at a time."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rlstruct.profiling.breakdown import Costs
from rlstruct.profiling.events import load
from rlstruct.profiling.recording import operation, profile

Work = Callable[[], None]
_N_STEPS, _N_OPERATIONS = 60, 4000
_LONG = 0.1  # seconds of work at a time
OWN_NETWORK = "a small network of rlstruct's own, not of your program"


def calibrate(repeats: int = 7, work: Work | None = None, *, name: str = "the work that was given") -> Costs:
    """Measure what it costs to note one event, as RL-Scope's delta calibration does (section 3.5 of its paper).

    Each feature is switched on alone, in turn with a run without any; the difference of the fastest rounds, divided by
    the number of events, is the cost. Takes about two seconds; only the time of this thread counts, so that a busy
    machine does little harm. A cost that comes out negative is 0 and is named in ``unsure``.

    Args:
        repeats: how many rounds.
        work: what to run for the cost of torch's operators, in this thread, again and again for a tenth of a second; by
            default a small network acts and learns. What an operator costs depends on its kind: iterations of the
            training that is profiled are more exact.
        name: of the work, for the report.

    Returns:
        The costs. That of CUDA's API is 0 where there is no GPU.

    Raises:
        ValueError: fewer than 3 repeats.
    """
    if repeats < 3:
        raise ValueError(f"calibrate: repeats is {repeats}, expected at least 3, so that one of them is undisturbed.")
    operations = _delta(_enter_operations, repeats, operators=False)
    operators = _delta(_long(work) if work else _learn("cpu"), repeats, operators=True, operations=max(0.0, operations))
    cuda = _delta_of_cuda(_learn("cuda:0"), repeats) if torch.cuda.is_available() else 0.0
    found = {"operation": operations, "operator": operators, "cuda": cuda}
    unsure = tuple(kind for kind, cost in found.items() if cost < 0.0)
    measured = {kind: max(0.0, cost) for kind, cost in found.items()}
    return Costs(**measured, unsure=unsure, work=name if work else OWN_NETWORK)


def _delta(work: Work, repeats: int, *, operators: bool, operations: float = 0.0) -> float:
    """Seconds that an operator of torch adds to the work, or else an operation, whose cost is 0 or known."""
    plain: list[float] = []
    noted: list[float] = []
    spans = events = 0
    for _ in range(repeats):
        plain.append(_second_run(work))
        with tempfile.TemporaryDirectory() as folder:
            with profile(folder, window=3600.0, operators=operators):
                noted.append(_second_run(work))
            if not events and not spans:  # the others are the same
                (found,) = load(Path(folder))
                spans, events = len(found.spans.starts) // 2, len(found.host.starts) // 2
    # Of each the fastest: whatever else the machine does only adds.
    return (min(noted) - min(plain) - operations * spans) / max(1, events if operators else spans)


def _delta_of_cuda(work: Work, repeats: int) -> float:
    """Seconds that a call of CUDA's API takes longer while CUPTI watches it."""
    work()
    taken: dict[bool, list[float]] = {False: [], True: []}
    count = 1
    kinds = {False: [torch.profiler.ProfilerActivity.CPU], True: list(torch.profiler.supported_activities())}  # type: ignore[no-untyped-call]
    for _ in range(repeats):
        for watched, activities in kinds.items():
            with torch.profiler.profile(activities=activities) as seen:
                work()
                taken[watched].append(_seconds(work))
            if watched:
                count = sum(event.count for event in seen.key_averages() if event.key.startswith("cuda")) // 2
    return (statistics.median(taken[True]) - statistics.median(taken[False])) / max(1, count)


def _long(work: Work) -> Work:
    """Repeat work until it takes long enough to be measured."""
    work()
    count = math.ceil(_LONG / max(1e-6, _seconds(work)))

    def again() -> None:
        for _ in range(count):
            work()

    return again


def _second_run(work: Work) -> float:
    """Time the second of two runs: the first one waits for memory, and for caches that reading a profile has filled."""
    work()
    return _seconds(work)


def _seconds(work: Work) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _enter_operations() -> None:
    number = torch.zeros(8, device="cpu")
    for _ in range(_N_OPERATIONS):
        with operation("calibration"):
            number.add_(1.0)


def _learn(device: str) -> Work:
    """A network of the usual size that acts twice, and then learns."""
    with torch.random.fork_rng(devices=[]):
        network = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    frame = torch.ones(64, 4, device=device)

    def work() -> None:
        for _ in range(_N_STEPS):
            with torch.no_grad():
                for _ in range(2):
                    network(frame).softmax(-1).cumsum(-1).gt(0.5).sum(-1)
            loss = network(frame).log_softmax(-1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return work
