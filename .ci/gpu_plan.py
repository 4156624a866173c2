"""The plan of `.ci/on_gpu.py`: which test files and benchmarks run in which command, and for how long.

Most valuable first: whether kernels, simulators, capture and collection are right, then how fast they are, then the
rest. Needs nothing but Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = {"tests/house/test_benchmarks_run.py"}  # the benchmarks themselves are run
ALONE = ("cuda_streams", "profiling", "sharing")
"""Words in the paths of test files that time the GPU, or divide it: nothing else may run on it meanwhile."""
_SELECTS = re.compile(r"mark\.gpu\b|\bdevice: torch\.device\b(?!\()")  # the second: the fixture of tests/conftest.py


@dataclass(frozen=True)
class Step:
    """A part of the plan: test files, or a benchmark.

    Attributes:
        name: as it is printed and written.
        command: of those into which the whole is divided; the first four are the most valuable.
        minutes: it takes at most, if its command has nine.
        tests: words in the paths of the test files, in the order in which they run; "" takes all that are left.
        benchmark: name of the script in benchmarks/; with one no tests are run.
        parts: of the benchmark, where it has parts.
    """

    name: str
    command: int
    minutes: float
    tests: tuple[str, ...] = ()
    benchmark: str = ""
    parts: tuple[str, ...] = ()


_FIRST = (
    "fused",
    "simulators",
    "cuda_capture",
    "replays",
    "collection",
    "streams",  # their order is to be seen on a GPU alone, as is what a wrong action does
    "wrong_actions",
    "stored",
    "random",
    "host_sync",
    "vec_env",
    "vector_env",
)
STEPS = (
    Step("first tests", 1, 4.0, tests=_FIRST),
    Step("tests alone", 1, 1.5, tests=ALONE),
    Step("targets", 1, 3.5, benchmark="gpu", parts=("first_launch", "targets")),
    Step("Atari's tests", 2, 2.0, tests=("atari",)),
    Step("Atari", 2, 2.5, benchmark="experiments", parts=("atari",)),
    Step("trained steps", 2, 2.0, benchmark="gpu", parts=("trained",)),
    Step("profiles", 2, 1.0, benchmark="gpu", parts=("profiling",)),
    Step("fusion", 2, 1.5, benchmark="experiments", parts=("fusion",)),
    Step("survey", 3, 2.5, benchmark="experiments", parts=("survey",)),
    Step("other tests", 3, 2.5, tests=("learning_on", "dqn", "replay_buffer", "")),
    Step(
        "ladder",
        3,
        1.5,
        benchmark="gpu",
        parts=("policy", "simulation", "training", "launches"),
    ),
    Step("sharing", 3, 1.5, benchmark="sharing"),
    Step("unfinished tests", 3, 1.0),
    Step("score in Pong", 4, 9.0, benchmark="experiments", parts=("atari_score",)),
    # From here on each experiment goes on to full size where the commands above have left it.
    Step("all of fusion", 5, 3.5, benchmark="experiments", parts=("fusion",)),
    Step("compilers", 5, 5.5, benchmark="experiments", parts=("compilers",)),
    Step("shares, serving", 6, 9.0, benchmark="experiments", parts=("serving",)),
    Step("shares, training", 7, 9.0, benchmark="experiments", parts=("training",)),
    Step("all of Atari", 8, 9.0, benchmark="experiments", parts=("atari",)),
    Step("Atari's starts", 9, 3.0, benchmark="experiments", parts=("atari_starts",)),
    Step("Atari's layout", 9, 6.0, benchmark="experiments", parts=("atari_layout",)),
    Step("all of survey", 10, 5.0, benchmark="experiments", parts=("survey",)),
    Step("tests of adapters", 10, 4.0, tests=("adapters",)),
    # Two trainings of some four minutes, or one with games on the CPU, which has eight.
    *(Step(f"scores, part {k}", 9 + k, 9.0, benchmark="experiments", parts=("atari_score",)) for k in (2, 3, 4)),
)
MINUTES = 9.0  # of a command
COMMANDS = tuple(dict.fromkeys(step.command for step in STEPS))


def test_files(root: Path) -> dict[str, list[str]]:
    """Give every test file that has tests for a GPU to the first step that names it, or else to that of all others.

    Args:
        root: of the repository.

    Returns:
        Name of the step to paths from the root, in the order in which they run.
    """
    files = [file for file in sorted((root / "tests").rglob("test_*.py")) if _SELECTS.search(file.read_text())]
    names = [str(file.relative_to(root)) for file in files]
    left = [name for name in names if name not in LEFT_OUT]
    found: dict[str, list[str]] = {}
    for step in sorted(STEPS, key=lambda step: "" in step.tests):
        order = {name: _place(step.tests, name) for name in left}
        chosen = sorted((place, name) for name, place in order.items() if place is not None)
        found[step.name] = [name for _, name in chosen]
        left = [name for name in left if order[name] is None]
    return found


def _place(words: Sequence[str], name: str) -> int | None:
    """Return which word names a file first; one that wants the GPU alone goes to a step of such files."""
    if alone([name]) and words != ALONE:
        return None
    return next((place for place, word in enumerate(words) if word in name), None)


def alone(names: Sequence[str]) -> list[str]:
    """Return the test files during which nothing else may run on the GPU."""
    return [name for name in names if any(word in name for word in ALONE)]


def together(names: Sequence[str]) -> list[str]:
    """Return the others."""
    return [name for name in names if not alone([name])]


def steps_of(command: int | None, numbers: Sequence[int]) -> list[Step]:
    """Return the steps of a command, or those with these numbers, or all if there are none."""
    if command is not None:
        return [step for step in STEPS if step.command == command]
    return [STEPS[number - 1] for number in sorted(numbers)] or list(STEPS)


def minutes_of(chosen: Sequence[Step], minutes: float) -> list[float]:
    """Divide the time of a command among its steps."""
    return [minutes * step.minutes / sum(one.minutes for one in chosen) for step in chosen]


def describe(root: Path, chosen: Sequence[Step], minutes: float) -> str:
    """Say what runs, in which order, and for how long at most."""
    files = test_files(root)
    lines = [
        f"{minutes:g} minutes at most; --command 1 to {COMMANDS[-1]} divide the whole into {MINUTES:g} minutes each.",
        "number step              minutes  command, minutes in it",
    ]
    for step, its in zip(chosen, minutes_of(chosen, minutes), strict=True):
        lines.append(f"{STEPS.index(step) + 1:6} {step.name:17} {its:7.1f}  {step.command}, {step.minutes:.1f}")
        if step.benchmark:
            lines.append(f"           benchmarks/{step.benchmark}.py {' '.join(step.parts)}".rstrip())
        lines += [f"           {name}{'  (alone)' if alone([name]) else ''}" for name in files[step.name]]
        if not step.benchmark and step != STEPS[0]:
            lines.append("           and what earlier steps did not finish")
    return "\n".join(lines)
