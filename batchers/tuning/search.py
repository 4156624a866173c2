"""The search for the fastest candidate, apart from all measuring.

Algorithm 1 of GMI-DRL (USENIX ATC 2025) profiles one more doubling of the environments until memory would not suffice,
or until speed grows by less than alpha times what memory grows by. Changed: the first candidate and the one that
saturates can win, the very first one is projected too, alpha may come from the noise of the measurements, and all
settings are climbed in turn, each from the fastest candidate so far, until none of them pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlstruct.sharing import Mode

MIN_ALPHA, MAX_ALPHA = 0.02, 0.03
"""Alpha where it is measured, at least and at most: less than 2 % for twice the memory is no gain, and noise must not
hide one of more than 3 %."""


class Candidate(NamedTuple):
    """Settings to tune."""

    n_processes: int  # workers; 0 collects in this process
    n_envs: int  # of each
    n_timesteps: int  # of one batch
    sharing: Mode = "none"  # how workers share a GPU

    def n_steps(self) -> int:
        """Count the steps of a whole batch, all environments together."""
        return max(1, self.n_processes) * self.n_envs * self.n_timesteps

    def arguments(self) -> dict[str, Any]:
        """Return those of RL_Batcher that it settles."""
        settings = {"n_timesteps": self.n_timesteps, "n_processes": self.n_processes, "sharing": self.sharing}
        return {**settings, "env_args": {"n_envs": self.n_envs}}

    def __str__(self) -> str:
        """Name it, as ``2 x 64 environments x 32 steps``."""
        where = f"{self.n_processes} x " if self.n_processes else ""
        shared = f", {self.sharing}" if self.sharing != "none" else ""
        return f"{where}{self.n_envs} environments x {self.n_timesteps} steps{shared}"


@dataclass(frozen=True)
class Space:
    """The values to choose from, each in rising order; the grid of them is what an exhaustive search would measure."""

    n_processes: Sequence[int]
    n_envs: Sequence[int]
    n_timesteps: Sequence[int]
    sharing: Sequence[Mode] = ("none",)


class Measured(NamedTuple):
    """Result of a probe."""

    rate: float  # steps per second, the median of its rounds
    ratio: float  # over that of the fastest candidate until then, the median of rounds side by side; 1 if none
    noise: float  # 95 % half-width of the ratio, as a share of it
    memory: int  # bytes that it took in all


@dataclass(frozen=True)
class Probe:
    """A candidate that was considered."""

    candidate: Candidate
    projected: float  # bytes that it was expected to take in all
    measured: Measured | None  # None if it was not started
    score: float  # its speed as a multiple of the first probe's, put together from ratios; 0 if it was not started
    why: str  # what followed from it: why the climb went on or stopped


class TimeIsUp(Exception):
    """Raised instead of measuring: the search ends with what it has."""


class NotStarted(Exception):
    """Raised instead of measuring: the candidate is not worth it, for this reason."""


Measure = Callable[[Candidate, Candidate | None, float], Measured]
"""Measures a candidate in turn with the fastest one so far (None for the first); the number is the projected bytes."""


def project_line(known: Mapping[int, float], n_envs: int) -> float:
    """Project memory as Algorithm 1, from the nearest two that are known: (e - e2) / (e2 - e1) * (m2 - m1) + m2.

    >>> project_line({128: 1000.0, 256: 1500.0}, 512)
    2500.0
    """
    e1, e2 = sorted(sorted(known, key=lambda e: abs(e - n_envs))[:2])
    return (n_envs - e2) / (e2 - e1) * (known[e2] - known[e1]) + known[e2]


class Climb:
    """A climb along one setting at a time, from the fastest candidate that is known, ``best``.

    ``measure`` raises `NotStarted` or `TimeIsUp`. ``size`` is the bytes of a candidate's batches, by arithmetic,
    ``start`` those that this process takes before, ``worker`` those that a worker is thought to take until one was
    measured, and ``limit`` those that all may take.
    """

    def __init__(
        self,
        space: Space,
        measure: Measure,
        size: Callable[[Candidate], float],
        start: float = 0.0,
        worker: float = 0.0,
        *,
        limit: float = float("inf"),
        alpha: float | None = None,
    ) -> None:
        self.space, self.limit, self.alpha = space, limit, alpha
        self.best: Probe | None = None
        self._measure, self._size, self._start, self._worker = measure, size, start, worker
        self._seen: dict[Candidate, Probe] = {}
        self._climbed: set[tuple[Candidate, str]] = set()  # lines: a candidate with 0 for the setting that varies

    @property
    def probes(self) -> list[Probe]:
        """All that was considered, in that order."""
        return list(self._seen.values())

    def run(self) -> Probe | None:
        """Search, and return the fastest candidate; None if not a single one could be started."""
        try:
            self._begin()
            while self.best is not None and (name := self._next_setting(self.best.candidate)):
                self._climb(self.best, name)
        except TimeIsUp:
            if self._seen:
                self._say(self.probes[-1], "time is up")
        return self.best

    def _begin(self) -> None:
        """Start with the fewest environments, and the middle number of steps, or fewer if that is too much."""
        space, steps = self.space, self.space.n_timesteps
        for few in steps[: len(steps) // 2 + 1][::-1]:
            sharing = space.sharing[0] if space.n_processes[0] else "none"
            if probe := self._probe(Candidate(space.n_processes[0], space.n_envs[0], few, sharing)):
                self._say(probe, "the search begins")
                return

    def _next_setting(self, best: Candidate) -> str:
        """Return a setting along which the fastest candidate was not climbed; "" if there is none."""
        for name in ("n_envs", "n_processes", "n_timesteps"):
            line = _other(best, name, 0), name
            if line not in self._climbed:
                self._climbed.add(line)
                return name
        return ""

    def _climb(self, start: Probe, name: str) -> None:
        """Go up along a setting until that pays no more, or down if it does not pay at all."""
        values: Sequence[int] = getattr(self.space, name)
        at = values.index(getattr(start.candidate, name))
        for sharing in self.space.sharing if name == "n_processes" else [start.candidate.sharing]:
            for following in (values[at + 1 :], values[:at][::-1]):
                last = start
                for value in following:
                    probe = self._probe(_other(start.candidate._replace(sharing=sharing), name, value))
                    if probe is None or self._saturated(last, probe):
                        break
                    last = probe
                if last is not start:
                    break

    def projected(self, candidate: Candidate) -> float:
        """Return the bytes that a candidate is expected to take in all, by arithmetic and from what was measured."""
        k, n_envs = candidate.n_processes, candidate.n_envs
        lines: dict[tuple[int, Mode], dict[int, float]] = {}  # by workers and sharing, the newest last
        for c, one in self._seen.items():
            if one.measured:
                lines.setdefault((c.n_processes, c.sharing), {})[c.n_envs] = one.measured.memory - self._size(c)
        line = lines.get((k, candidate.sharing), {})
        if len(line) > 1:
            return self._size(candidate) + project_line(line, n_envs)
        each = 0.0  # environment
        for (workers, _), one_line in lines.items():
            low, high = min(one_line), max(one_line)
            each = max(each, (one_line[high] - one_line[low]) / max(1, high - low) / max(1, workers))
        processes: list[tuple[int, float]] = []  # bytes that each of so many takes without environments
        for (workers, _), one_line in lines.items():
            for e, bytes_ in one_line.items():
                processes.append((workers, (bytes_ - self._start) / max(1, workers) - each * e))
        here = max([0.0, *(more for workers, more in processes if not workers)])
        worker = max((more for workers, more in processes if workers), default=self._worker + here)
        return self._size(candidate) + self._start + max(1, k) * ((worker if k else here) + each * n_envs)

    def _saturated(self, before: Probe, after: Probe) -> bool:
        """Return True, and report it, if a step no longer pays: gain in speed against alpha times growth of memory."""
        sizes = sorted((self._size(before.candidate), self._size(after.candidate)))
        growth, gain = sizes[1] / sizes[0] - 1.0, after.score / before.score - 1.0
        noise = after.measured.noise if after.measured else 0.0
        least = growth * (min(max(noise, MIN_ALPHA), MAX_ALPHA) if self.alpha is None else self.alpha)
        first_worker = after.candidate.n_processes > before.candidate.n_processes == 0  # two may be faster
        if first_worker or gain >= least:
            self._say(after, f"{100 * gain:+.1f} %: go on")
            return False
        self._say(after, f"saturated: {100 * gain:+.1f} %, less than {100 * least:.1f} %: stop")
        return True

    def _say(self, probe: Probe, why: str) -> None:
        known = self._seen[probe.candidate]
        self._seen[probe.candidate] = replace(known, why=f"{known.why}; {why}" if known.why else why)

    def _probe(self, candidate: Candidate) -> Probe | None:
        """Measure a candidate, once; None if it is not started."""
        if candidate not in self._seen:
            projected, best = self.projected(candidate), self.best
            probe = Probe(candidate, projected, None, 0.0, "")
            try:
                if projected > self.limit:
                    raise NotStarted(f"it would take {_size(projected)}, {_size(self.limit)} is the limit")
                measured = self._measure(candidate, best.candidate if best else None, projected)
            except NotStarted as reason:
                probe = replace(probe, why=f"not started: {reason}")
            else:
                probe = replace(probe, measured=measured, score=measured.ratio * (best.score if best else 1.0))
                if best is None or probe.score > best.score:
                    self.best = probe
            self._seen[candidate] = probe
        probe = self._seen[candidate]
        return probe if probe.measured else None


def _other(candidate: Candidate, name: str, value: int) -> Candidate:
    """Return a candidate with another value of one setting; without workers nothing is shared."""
    found = candidate._replace(**{name: value})  # type: ignore[arg-type]  # of a number
    return found if found.n_processes else found._replace(sharing="none")


def _size(n: float) -> str:
    """Write bytes.

    >>> _size(3 * 2**30)
    '3.00 GiB'
    """
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB"
