"""Long-lived contenders of a benchmark, each in its own process, that run in turns.

Everybody is started and warmed up before the first round, and every round gives each of them one turn, so that a slow
moment of the machine hits all of them and start-up is not counted. See ``peers/serve.py`` for the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
PEERS = HERE / "peers"
PEERS_PYTHON = str(HERE.parent / ".venv-peers/bin/python")
START_SECONDS = TURN_SECONDS = 300.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Entry:
    """One line of a table."""

    name: str  # as the table says it
    script: str  # file in ``peers``
    task: dict[str, Any]  # n_envs, n_processes, n_timesteps, and environment unless it is CartPole
    arguments: tuple[str, ...] = ()  # further words of its command line
    python: str = sys.executable  # interpreter
    variables: dict[str, str] = field(default_factory=dict)  # of its environment


@dataclass
class Result:
    """Measurements of an entry."""

    name: str
    rates: list[float] = field(default_factory=list)  # environment steps per second in each round
    cpus: list[float] = field(default_factory=list)  # CPU seconds of all its processes per environment step
    why: str = ""  # it did not run
    versions: dict[str, str] = field(default_factory=dict)  # of its packages
    reports: list[dict[str, Any]] = field(default_factory=list)  # about itself, and the seconds, after each round

    @property
    def rate(self) -> float | None:
        """The median of the rates; None if it did not run."""
        return statistics.median(self.rates) if self.rates and not self.why else None


class Failure(Exception):
    """A contender did not answer."""


class Lines:
    """Lines of JSON that a process prints, read in a thread so that waiting for one has a time limit."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Return the next line, None if the process has ended; raise TimeoutError if there is none in time."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer in {seconds:.0f} s") from None
        found: dict[str, Any] | None = json.loads(line) if line else None
        return found


class Player:
    """A running contender."""

    def __init__(self, entry: Entry) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the player
        variables = {**os.environ, **ONE_THREAD, **entry.variables}
        self.process = subprocess.Popen(
            [entry.python, str(PEERS / entry.script), json.dumps(entry.task), *entry.arguments], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors, text=True, env=variables,
        )  # fmt: skip
        self._lines = Lines(self.process)
        self.batches = 1
        try:
            self.versions: dict[str, str] = self._answer(START_SECONDS)["ready"]
        except Failure:
            self.process.kill()
            raise

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            answer = self._lines.next(seconds)
        except TimeoutError as error:
            raise Failure(str(error)) from None
        if answer is None:
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines() or ["without a word"]
            raise Failure(f"ended: {said[-1][:200]}")
        return answer

    def turn(self) -> dict[str, Any]:
        """Collect, and return seconds, CPU seconds of all processes, steps, and the contender's report."""
        if self.process.stdin is None or self.process.poll() is not None:
            raise Failure("ended")
        before = self._cpu_seconds()
        print(json.dumps({"batches": self.batches}), file=self.process.stdin, flush=True)
        answer = self._answer(TURN_SECONDS)
        return {**answer, "cpu": self._cpu_seconds() - before}

    def _cpu_seconds(self) -> float:
        import psutil  # here, so that a benchmark's --help works without it

        process = psutil.Process(self.process.pid)
        seconds = 0.0
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                times = one.cpu_times()
                ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
                seconds += ended + (_exact(one.pid) or times.user + times.system)
        return seconds

    def warm_up(self, seconds: float) -> None:
        """Run until nothing is new, and choose how many batches fill a turn."""
        self.turn()
        taken = self.turn()["seconds"]
        self.batches = max(1, round(seconds / taken))

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


def compete(entries: Sequence[Entry], rounds: int, seconds: float) -> list[Result]:
    """Run all entries in interleaved rounds."""
    results = [Result(entry.name) for entry in entries]
    players: dict[int, Player] = {}
    try:
        for index, entry in enumerate(entries):
            if why := missing(entry):
                results[index].why = why
                continue
            with _noting(results[index], players, index):
                players[index] = Player(entry)
                results[index].versions = players[index].versions
                players[index].warm_up(seconds)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for index in list(players):
                with _noting(results[index], players, index):
                    answer = players[index].turn()
                    results[index].rates.append(answer["steps"] / answer["seconds"])
                    results[index].cpus.append(answer["cpu"] / answer["steps"])
                    if "report" in answer:
                        results[index].reports.append({**answer["report"], "seconds": answer["seconds"]})
    finally:
        for player in players.values():
            player.close()
    return results


def _exact(pid: int) -> float:
    """CPU seconds of a process to the nanosecond: its clock, see clock_getcpuclockid(3); psutil counts in 10 ms."""
    return time.clock_gettime((~pid << 3) | 2) if sys.platform == "linux" else 0.0


def missing(entry: Entry) -> str:
    """Return why an entry cannot run here, "" if it can."""
    if not Path(entry.python).exists():
        return "not installed (make peers)"
    if "RLSTRUCTURES" in entry.variables and not Path(entry.variables["RLSTRUCTURES"], "rlstructures").is_dir():
        return "not installed (--rlstructures PATH)"
    return ""


@contextlib.contextmanager
def _noting(result: Result, players: dict[int, Player], index: int) -> Iterator[None]:
    """Write a failure into the result, and end the player."""
    try:
        yield
    except Failure as failure:
        result.why = f"failed: {failure}"
        if player := players.pop(index, None):
            player.process.kill()
            player.close()
