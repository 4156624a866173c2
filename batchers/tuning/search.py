"""The search for the fastest candidate, apart from all measuring.

Algorithm 1 of GMI-DRL (USENIX ATC 2025) profiles one more doubling of the environments until memory would not suffice,
or until speed grows by less than alpha times what memory grows by. Changed: the first candidate and the one that
saturates can win, the very first one is projected too, alpha may come from the noise of the measurements, a climb
begins where the last one ended instead of at the smallest number, the other settings are climbed in turn until none of
them pays, and what has been much slower once is not tried again with other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import NamedTuple

from rlstruct.sharing import Mode

MIN_ALPHA, MAX_ALPHA = 0.02, 0.03
"""Alpha where it is measured, at least and at most: less than 2 % for twice the memory is no gain, and noise must not
hide one of more than 3 %."""


_MUCH = 0.8  # of the speed: with less than that a line is not climbed, and a step not tried again


class Candidate(NamedTuple):
    """Settings to tune."""

    n_processes: int  # workers; 0 collects in this process
    n_envs: int  # of each
    n_timesteps: int  # of one batch
    sharing: Mode = "none"  # how workers share a GPU

    def n_steps(self) -> int:
        """Count the steps of a whole batch, all environments together."""
        return max(1, self.n_processes) * self.n_envs * self.n_timesteps

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

    def __len__(self) -> int:
        """Count the candidates; without workers nothing is shared."""
        with_workers = sum(k > 0 for k in self.n_processes) * len(self.sharing)
        return (with_workers + (0 in self.n_processes)) * len(self.n_envs) * len(self.n_timesteps)


class Measured(NamedTuple):
    """Result of a probe.

    Attributes:
        rate: steps per second, the median of its rounds.
        ratio: the rate over that of the fastest candidate until then, the median of rounds side by side; 1 if none.
        noise: 95 % half-width of the ratio, as a share of it.
        memory: bytes that it took in all.
    """

    rate: float
    ratio: float
    noise: float
    memory: int


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

    Args:
        space: the values to choose from.
        measure: measures a candidate.
        size: bytes of its batches, by arithmetic.
        start: bytes that this process takes before.
        worker: bytes that a worker is thought to take before one was measured; None for as much as this process.
        limit: see ``memory_limit`` of `tune`.
        alpha: see `tune`.
        refuse: a reason not to start a candidate, "" for none.
    """

    def __init__(
        self,
        space: Space,
        measure: Measure,
        *,
        size: Callable[[Candidate], float],
        start: float = 0.0,
        worker: float | None = None,
        limit: float | None = None,
        alpha: float | None = None,
        refuse: Callable[[Candidate], str] = lambda candidate: "",
    ) -> None:
        self.space, self.limit, self.alpha = space, limit, alpha
        self.best: Probe | None = None
        self._measure, self._size, self._refuse = measure, size, refuse
        self._start, self._worker = start, start if worker is None else worker
        self._seen: dict[Candidate, Probe] = {}
        self._climbed: set[tuple[Candidate, str]] = set()  # lines: a candidate with 0 for the setting that varies

    @property
    def probes(self) -> list[Probe]:
        """All that was considered, in that order."""
        return list(self._seen.values())

    def run(self) -> Probe | None:
        """Search, and return the fastest candidate; None if not a single one could be started."""
        try:
            self._run()
        except TimeIsUp:
            if self._seen:
                self._say(self.probes[-1], "time is up")
        return self.best

    def _run(self) -> None:
        steps = self.space.n_timesteps
        for few in steps[: len(steps) // 2 + 1][::-1]:  # the middle, or fewer if that is too much
            self._climb_envs(few)
            if self.best is not None:
                break
        names = "n_timesteps", "n_envs", "n_processes"
        for name in cycle(names):
            if self.best is None or all(self._line(self.best.candidate, one) in self._climbed for one in names):
                break
            if self._line(self.best.candidate, name) not in self._climbed:
                self._climb(self.best.candidate, name)

    def _climb_envs(self, n_timesteps: int) -> None:
        """Climb the environments of each number of workers, as long as more workers are faster."""
        for sharing in self.space.sharing:
            before: Probe | None = None
            for k in self.space.n_processes:
                if k == 0 and sharing != self.space.sharing[0]:
                    continue
                n_envs = before.candidate.n_envs if before else self.space.n_envs[0]
                found = self._climb(Candidate(k, n_envs, n_timesteps, sharing if k else "none"), "n_envs")
                if found is None:
                    break
                if before and before.candidate.n_processes and self._saturated(before, found):
                    self._say(found, f"no more workers: {k} are not faster than {before.candidate.n_processes}")
                    break
                before = found

    def projected(self, candidate: Candidate) -> float:
        """Return the bytes that a candidate is expected to take in all.

        The batches follow from arithmetic; the rest, processes and environments, from what was measured so far. Before
        any worker was measured, one is thought to grow by what this process has grown by when it collected itself.
        """
        rest = {c: one.measured.memory - self._size(c) for c, one in self._seen.items() if one.measured}
        lines: dict[tuple[int, Mode], dict[int, float]] = {}  # by workers and sharing, the newest last
        for c, bytes_ in rest.items():
            lines.setdefault((c.n_processes, c.sharing), {})[c.n_envs] = bytes_
        line = lines.get((candidate.n_processes, candidate.sharing), {})
        if len(line) > 1:
            return self._size(candidate) + project_line(line, candidate.n_envs)
        for_each = 0.0  # environment
        for (k, _), one in lines.items():
            low, high = min(one), max(one)
            for_each = max(for_each, (one[high] - one[low]) / max(1, high - low) / max(1, k))
        if line:
            n_envs, bytes_ = next(iter(line.items()))
            grown = for_each * max(1, candidate.n_processes) * (candidate.n_envs - n_envs)
            return self._size(candidate) + bytes_ + grown
        each = {c: (b - self._start) / max(1, c.n_processes) - for_each * c.n_envs for c, b in rest.items()}
        here = max(0.0, *(more for c, more in each.items() if not c.n_processes), 0.0)
        worker = max((more for c, more in each.items() if c.n_processes), default=self._worker + here)
        more = for_each * candidate.n_envs * max(1, candidate.n_processes)
        return self._size(candidate) + self._start + worker * candidate.n_processes + more

    def _line(self, candidate: Candidate, name: str) -> tuple[Candidate, str]:
        """Name all candidates that differ from this one in a setting alone."""
        return self._other(candidate, name, 0), name

    def _other(self, candidate: Candidate, name: str, value: int) -> Candidate:
        """Return a candidate with another value of one setting; without workers nothing is shared."""
        found = candidate._replace(**{name: value})  # type: ignore[arg-type]  # of a number
        if not found.n_processes:
            return found._replace(sharing="none")
        return found if candidate.n_processes else found._replace(sharing=self.space.sharing[0])

    def _climb(self, start: Candidate, name: str) -> Probe | None:
        """Go up along a setting until that pays no more, else down; return the fastest of this climb."""
        values: Sequence[int] = getattr(self.space, name)
        at = values.index(getattr(start, name))
        here = self._probe(start)
        found = [here] if here else []
        if here and not self._seen[start].why:
            self._say(here, f"a climb of {name} begins")
        if here and self.best and here.score < _MUCH * self.best.score:
            self._say(here, f"much slower than {self.best.candidate}: stop")
            return here
        self._climbed.add(self._line(start, name))
        for direction in (1, -1) if here else (-1,):
            last, moved = here, False
            for value in values[at + 1 :] if direction > 0 else values[:at][::-1]:
                if last is not None and self._was_much_slower(last.candidate, name, value):
                    break
                following = self._probe(self._other(start, name, value))
                if following is None:
                    if direction > 0:
                        break
                    continue  # still too much: a smaller one may do
                found.append(following)
                if last is not None and self._saturated(last, following):
                    break
                last, moved = following, last is not None
            if moved:
                break
        return max(found, key=lambda one: one.score, default=None)

    def _was_much_slower(self, here: Candidate, name: str, value: int) -> bool:
        """Return True if the same step of a setting was much slower with other settings. Workers are always tried."""
        for one in self._seen.values():
            there = self._seen.get(one.candidate._replace(**{name: value}))  # type: ignore[arg-type]  # of a number
            same = name != "n_processes" and getattr(one.candidate, name) == getattr(here, name)
            if same and there and there.measured and there.score < _MUCH * one.score:
                self._say(self._seen[here], f"{name} {value} was much slower with other settings: stop")
                return True
        return False

    def _saturated(self, before: Probe, after: Probe) -> bool:
        """Return True, and report it, if a step no longer pays: gain in speed against alpha times growth of memory."""
        sizes = sorted((self._size(before.candidate), self._size(after.candidate)))
        growth, gain = sizes[1] / sizes[0] - 1.0, after.score / before.score - 1.0
        noise = after.measured.noise if after.measured else 0.0
        least = growth * (min(max(noise, MIN_ALPHA), MAX_ALPHA) if self.alpha is None else self.alpha)
        if gain < least:
            self._say(after, f"saturated: {100 * gain:+.1f} %, less than {100 * least:.1f} %: stop")
        else:
            self._say(after, f"{100 * gain:+.1f} %: go on")
        return gain < least

    def _say(self, probe: Probe, why: str) -> None:
        known = self._seen[probe.candidate]
        self._seen[probe.candidate] = replace(known, why=f"{known.why}; {why}" if known.why else why)

    def _probe(self, candidate: Candidate) -> Probe | None:
        """Measure a candidate, once; None if it is not started."""
        if candidate not in self._seen:
            projected = self.projected(candidate)
            why = self._refuse(candidate)
            if self.limit is not None and projected > self.limit:
                why = f"not started: it would take {_size(projected)}, {_size(self.limit)} is the limit"
            if why:
                self._seen[candidate] = Probe(candidate, projected, None, 0.0, why)
            else:
                measured = self._measure(candidate, self.best.candidate if self.best else None, projected)
                score = measured.ratio * (self.best.score if self.best else 1.0)
                probe = self._seen[candidate] = Probe(candidate, projected, measured, score, "")
                if self.best is None or score > self.best.score:
                    self.best = probe
        probe = self._seen[candidate]
        return probe if probe.measured else None


def _size(n: float) -> str:
    """Write bytes.

    >>> _size(3 * 2**30)
    '3.00 GiB'
    """
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB"
