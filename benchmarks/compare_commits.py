"""The same loops with the working tree and with another commit, in turn, in CPU time.

    python benchmarks/compare_commits.py COMMIT [--loops collect update] [--only "4 in"] [--starts 3] [--rounds 5]

Run it before a change to a loop lands. Both packages are copied into a temporary folder; each loop runs in its own
process for each of them, and for a bare loop where there is one, and these take turns. All start several times, because
the same code can take 3 % longer in one process than in another. CPU time counts all processes of a side, so other
programs cost precision and no truth. The table shows medians over all rounds with their intervals of 95 %; "now /
COMMIT" below 1 is faster. The share of a bare loop is its CPU time over ours.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import reporting
from common.contenders import Entry, Result, compete

ROOT = Path(__file__).parent.parent
FOLDERS = ("rlstruct", "agents", "batchers", "algos")


@dataclass(frozen=True)
class Loop:
    """One line of the table."""

    group: str  # what ``--loops`` calls it
    name: str  # as the table says it
    unit: str  # what the microseconds are for
    n_envs: int  # in all processes together
    n_timesteps: int = 128
    n_processes: int = 0
    words: tuple[str, ...] = ()  # further ones of the command line of the script
    script: str = "rlstruct_loops.py"  # in ``peers``
    environment: str = "CartPole-v1"

    @property
    def collects(self) -> bool:
        """Return True if a bare loop does the same."""
        return self.script == "rlstruct_batcher.py"

    def entry(self, name: str, package: Path) -> Entry:
        """Return the contender that runs this loop with a package."""
        return Entry(name, self.script, self.task(), self.words, variables={"PYTHONPATH": str(package)})

    def task(self) -> dict[str, object]:
        sizes = {"n_envs": self.n_envs, "n_processes": self.n_processes, "n_timesteps": self.n_timesteps}
        return {**sizes, "environment": self.environment}

    def microseconds(self, seconds: float) -> float:
        """Turn the seconds of a step of a contender into microseconds per unit: here all environments step at once."""
        return 1e6 * seconds * (self.n_envs if self.collects else 1)


def collection(name: str, n_envs: int, n_processes: int, *words: str) -> Loop:
    """A loop over gymnasium's CartPole."""
    counted = "this process" if n_processes == 0 else f"{n_processes} processes"
    return Loop("collect", f"{name}, {n_envs} in {counted}", "step", n_envs, 128, n_processes, words,
                script="rlstruct_batcher.py")  # fmt: skip


LOOPS = (
    collection("eager", 32, 0), collection("eager", 4, 0), collection("eager", 64, 2), collection("eager", 8, 2),
    collection("compiled", 32, 0, "compiled"), collection("compiled, queued", 64, 2, "compiled", "queued"),
    Loop("simulate", "CartPole with a policy, 1,024", "batch", 1024, 32, words=("simulator",)),
    Loop("simulate", "Breakout alone, 256", "16 steps", 256, 16, words=("steps",), environment="Breakout-MinAtar"),
    Loop("update", "A2C", "update", 16, 64, words=("a2c",)), Loop("update", "PPO", "update", 8, 128, words=("ppo",)),
    Loop("update", "DQN", "update", 8, 16, words=("dqn",)),
    Loop("replay", "replay_agent with gradients", "batch", 16, 64, words=("replay",)),
    Loop("structures", "DictTensor", "100 turns", 64, 8, words=("dict_tensors",)),
    Loop("structures", "Trajectories", "100 turns", 64, 8, words=("trajectories",)),
    Loop("import", "all names, with torch", "process", 1, words=("imports",)),
)  # fmt: skip


def package_of(commit: str, folder: Path) -> Path:
    """Copy the package of a commit, or of the working tree if it is empty, to where Python imports it as installed."""
    if commit:
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, *FOLDERS], capture_output=True, check=False)
        if packed.returncode:
            sys.exit(f"compare_commits.py: git knows no commit {commit!r} here: {packed.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    else:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FOLDERS[1:]:
        shutil.move(folder / name, folder / "rlstruct" / name)
    return folder


def measure(loop: Loop, before: Path, now: Path, starts: int, rounds: int, seconds: float) -> list[Result]:
    """Run a loop with both packages in turn, and a bare loop where there is one: CPU seconds of each round."""
    entries = [loop.entry("before", before), loop.entry("now", now)]
    if loop.collects:
        task = {**loop.task(), "n_processes": max(1, loop.n_processes)}
        entries.append(Entry("bare loop", "collectors.py", task, ("bare",)))
    results = compete(entries, rounds, seconds)
    for _ in range(starts - 1):
        for result, more in zip(results, compete(entries, rounds, seconds), strict=True):
            result.cpus += more.cpus
            result.why = result.why or more.why
    return results


def row(loop: Loop, results: Sequence[Result]) -> str:
    failed = [f"{result.name}: {result.why}" for result in results if result.why]
    if failed:
        return f"| {loop.name} | {'; '.join(failed)} | | | | |"
    before, now = (result.cpus for result in results[:2])
    words = [spell([loop.microseconds(value) for value in cpus]) for cpus in (before, now)]
    words.append(spell([new / old for old, new in zip(before, now, strict=True)], 3))
    for ours in (before, now):
        shares = [bare / own for result in results[2:] for bare, own in zip(result.cpus, ours, strict=True)]
        words.append(spell(shares, 2) if shares else "")
    return f"| {loop.name}, per {loop.unit} | {' | '.join(words)} |"


def spell(values: Sequence[float], digits: int | None = None) -> str:
    low, high = reporting.interval(values)
    if digits is None:
        digits = 1 if statistics.median(values) < 1000 else 0
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def main() -> None:
    groups = list(dict.fromkeys(loop.group for loop in LOOPS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare with: anything that git understands")
    parser.add_argument("--now", default="", help="a commit in the place of the working tree")
    parser.add_argument("--loops", nargs="+", choices=groups, default=groups)
    parser.add_argument("--only", nargs="+", default=[""], help="only loops with one of these words in their names")
    parser.add_argument("--starts", type=int, default=3, help="how often all processes start anew")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each process")
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a turn takes")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        before = package_of(options.commit, Path(folder, "before"))
        now = package_of(options.now, Path(folder, "now"))
        print(reporting.machine())
        print(f"| CPU µs | {options.commit} | {options.now or 'now'} | now / {options.commit} | share of a bare loop: "
              f"{options.commit} | now |\n|---|---:|---:|---:|---:|---:|")  # fmt: skip
        for loop in LOOPS:
            if loop.group in options.loops and any(word in loop.name for word in options.only):
                results = measure(loop, before, now, options.starts, options.rounds, options.seconds)
                print(row(loop, results), flush=True)


if __name__ == "__main__":
    main()
