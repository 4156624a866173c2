"""The search for the fastest candidate; `measuring` does the probing.

It follows Algorithm 1 of GMI-DRL (USENIX ATC 2025), which keeps doubling the number of environments until the next
candidate would not fit into memory, or until speed grows by less than alpha times the growth of memory. Four things
differ: the first and the saturated candidate can win; memory is projected for the very first candidate, too; alpha
can come from the noise of the measurements; and every setting is climbed in turn, each time from the fastest
candidate so far, until no change pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlstruct.batchers.workers.placement import Mode

MIN_ALPHA, MAX_ALPHA = 0.02, 0.03
"""Bounds of an alpha that comes from the noise: a gain below 2 % for twice the memory is not worth it, and noise must
not hide a gain above 3 %."""


class Candidate(NamedTuple):
    """Settings to tune."""

    n_processes: int  # workers; 0 collects in this process
    n_envs: int  # of each process
    n_timesteps: int  # of one batch
    sharing: Mode = "none"  # how workers share a GPU

    def n_steps(self) -> int:
        """Return the number of steps in a batch, over all environments."""
        return max(1, self.n_processes) * self.n_envs * self.n_timesteps

    def arguments(self) -> dict[str, Any]:
        """Return these settings as arguments of RL_Batcher."""
        settings = {"n_timesteps": self.n_timesteps, "n_processes": self.n_processes, "sharing": self.sharing}
        return {**settings, "env_args": {"n_envs": self.n_envs}}

    def __str__(self) -> str:
        """Describe the candidate, as in ``2 x 64 environments x 32 steps``."""
        workers = f"{self.n_processes} x " if self.n_processes else ""
        shared = f", {self.sharing}" if self.sharing != "none" else ""
        environments = f"{self.n_envs} environment{'s' * (self.n_envs > 1)}"
        return f"{workers}{environments} x {self.n_timesteps} step{'s' * (self.n_timesteps > 1)}{shared}"


@dataclass(frozen=True)
class Space:
    """Values to choose from, in rising order. An exhaustive search would measure their whole grid."""

    n_processes: Sequence[int]
    n_envs: Sequence[int]
    n_timesteps: Sequence[int]
    sharing: Sequence[Mode] = ("none",)


class Measured(NamedTuple):
    """Result of a probe."""

    rate: float  # steps per second, median over the rounds
    ratio: float  # speed relative to the fastest candidate before, median over rounds side by side; 1 for the first
    noise: float  # 95 % half-width of the ratio, relative to it
    memory: int  # bytes in use, by all processes together


@dataclass
class Probe:
    """A candidate that the search considered."""

    candidate: Candidate
    projected: float  # bytes that it was expected to use, with everything else in use
    measured: Measured | None = None  # None if it was not started
    score: float = 0.0  # speed relative to the first probe, the product of measured ratios; 0 if it was not started
    why: str = ""  # why the climb continued or stopped here

    def explain(self, why: str) -> None:
        """Add a reason to ``why``."""
        self.why = f"{self.why}; {why}" if self.why else why


class TimeIsUp(Exception):
    """Raised instead of measuring, to end the search with the best candidate so far."""


class NotStarted(Exception):
    """Raised instead of measuring a candidate; the message says why."""


Measure = Callable[[Candidate, Candidate | None, float], Measured]
"""Measures a candidate against the fastest one so far (None for the first), given the projected bytes."""


def project_line(speeds: Mapping[int, float], n_envs: int) -> float:
    """Extrapolate memory as Algorithm 1 does, from the two nearest points: (e - e2) / (e2 - e1) * (m2 - m1) + m2.

    >>> project_line({128: 1000.0, 256: 1500.0}, 512)
    2500.0
    """
    e1, e2 = sorted(sorted(speeds, key=lambda e: abs(e - n_envs))[:2])
    return (n_envs - e2) / (e2 - e1) * (speeds[e2] - speeds[e1]) + speeds[e2]


@dataclass
class Climb:
    """A search that changes one setting at a time, always starting from the fastest candidate so far, ``best``."""

    space: Space
    measure: Measure  # or raises `NotStarted` or `TimeIsUp`
    size: Callable[[Candidate], float]  # bytes of a candidate's batches, which can be computed
    start: float = 0.0  # bytes in use before the search
    worker: float = 0.0  # bytes that a worker is assumed to use without environments, until one has been measured
    limit: float = float("inf")  # bytes that may be in use
    alpha: float | None = None  # see `rlstruct.sharing.tune`
    best: Probe | None = field(default=None, init=False)
    _probes: dict[Candidate, Probe] = field(default_factory=dict, init=False)

    @property
    def probes(self) -> list[Probe]:
        """All candidates that were considered, in order."""
        return list(self._probes.values())

    def run(self) -> Probe | None:
        """Search, and return the fastest candidate; None if none could be started."""
        climbed = set[tuple[str, Candidate]]()  # settings, each with the others, which stayed fixed
        try:
            self._begin()
            while self.best is not None:
                best = self.best.candidate
                lines = [(name, _change(best, name, 0)) for name in ("n_envs", "n_processes", "n_timesteps")]
                line = next((line for line in lines if line not in climbed), None)
                if line is None:
                    break
                climbed.add(line)
                self._climb(self.best, line[0])
        except TimeIsUp:
            if self._probes:
                self.probes[-1].explain("time is up")
        return self.best

    def _begin(self) -> None:
        """Probe the fewest environments with the middle number of steps, or with fewer steps if that does not fit."""
        space = self.space
        sharing = space.sharing[0] if space.n_processes[0] else "none"
        for steps in space.n_timesteps[: len(space.n_timesteps) // 2 + 1][::-1]:
            if probe := self._probe(Candidate(space.n_processes[0], space.n_envs[0], steps, sharing)):
                probe.explain("the search begins")
                return

    def _climb(self, start: Probe, name: str) -> None:
        """Increase a setting as long as that pays. If the first increase does not pay, decrease it in the same way."""
        values: Sequence[int] = getattr(self.space, name)
        at = values.index(getattr(start.candidate, name))
        for sharing in self.space.sharing if name == "n_processes" else [start.candidate.sharing]:
            for direction in (values[at + 1 :], values[:at][::-1]):
                last = start
                for value in direction:
                    probe = self._probe(_change(start.candidate._replace(sharing=sharing), name, value))
                    if probe is None or self._saturated(last, probe):
                        break
                    last = probe
                if last is not start:
                    break

    def projected(self, candidate: Candidate) -> float:
        """Project the bytes in use while a candidate runs: batches by arithmetic, the rest from measurements."""
        lines: dict[tuple[int, Mode], dict[int, float]] = {}  # bytes of each process, by workers, sharing, environments
        for probed, probe in self._probes.items():
            if probe.measured:
                bytes_ = probe.measured.memory - self.size(probed) - self.start
                line = lines.setdefault((probed.n_processes, probed.sharing), {})
                line[probed.n_envs] = bytes_ / max(1, probed.n_processes)
        own = lines.get((candidate.n_processes, candidate.sharing), {})
        if len(own) > 1:
            process = project_line(own, candidate.n_envs)
        else:  # an environment, and a process without environments, are assumed to take as much as elsewhere
            slopes = [project_line(line, 1) - project_line(line, 0) for line in lines.values() if len(line) > 1]
            environment = max([0.0, *slopes])
            others = [line for (k, _), line in lines.items() if bool(k) == bool(candidate.n_processes)]
            empty = [bytes_ - environment * n_envs for line in others for n_envs, bytes_ in line.items()]
            process = max(empty, default=self.worker if candidate.n_processes else 0.0)
            process += environment * candidate.n_envs
        return self.size(candidate) + self.start + max(1, candidate.n_processes) * process

    def _saturated(self, before: Probe, after: Probe) -> bool:
        """Return True if a change no longer pays: speed grew by less than alpha times the growth of memory."""
        smaller, larger = sorted((self.size(before.candidate), self.size(after.candidate)))
        gain = after.score / before.score - 1.0
        noise = after.measured.noise if after.measured else 0.0
        alpha = min(max(noise, MIN_ALPHA), MAX_ALPHA) if self.alpha is None else self.alpha
        least = alpha * (larger / smaller - 1.0)
        first_worker = after.candidate.n_processes > before.candidate.n_processes == 0  # two may be faster
        if first_worker or gain >= least:
            after.explain(f"{100 * gain:+.1f} %: go on")
            return False
        after.explain(f"saturated: {100 * gain:+.1f} %, less than {100 * least:.1f} %: stop")
        return True

    def _probe(self, candidate: Candidate) -> Probe | None:
        """Measure a candidate unless it has been measured before. Return None if it is not started."""
        if candidate not in self._probes:
            probe = Probe(candidate, self.projected(candidate))
            best = self.best
            try:
                if probe.projected > self.limit:
                    raise NotStarted(f"it would take {_size(probe.projected)}, {_size(self.limit)} is the limit")
                probe.measured = self.measure(candidate, best.candidate if best else None, probe.projected)
            except NotStarted as reason:
                probe.explain(f"not started: {reason}")
            else:
                probe.score = probe.measured.ratio * (best.score if best else 1.0)
                if best is None or probe.score > best.score:
                    self.best = probe
            self._probes[candidate] = probe
        probe = self._probes[candidate]
        return probe if probe.measured else None


def _change(candidate: Candidate, name: str, value: int) -> Candidate:
    """Return a candidate with another value of one setting. Without workers there is nothing to share."""
    changed = candidate._replace(**{name: value})  # type: ignore[arg-type]  # of a number
    return changed if changed.n_processes else changed._replace(sharing="none")


def _size(n: float) -> str:
    """Write a number of bytes.

    >>> _size(3 * 2**30)
    '3.00 GiB'
    """
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB"
