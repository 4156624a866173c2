"""The plan of `.ci/on_gpu.py`: test files and benchmarks, with their commands and minutes.

The most valuable steps come first: correctness of kernels, simulators, capture and collection; then their speed; then
the rest. Needs only Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = {"tests/house/test_benchmarks_run.py"}  # the plan runs the benchmarks themselves
ALONE = ("cuda_streams", "profiler", "sharing")
"""Words in the paths of test files that need the GPU to themselves, because they measure time on it or divide it."""
_SELECTS = re.compile(r"mark\.gpu\b|\bdevice: torch\.device\b(?!\()")  # the second is the fixture of conftest.py


@dataclass(frozen=True)
class Step:
    """A part of the plan: test files, or a benchmark.

    Attributes:
        name: name in the output and in the results.
        command: number of the command that runs it; the first four commands are the most valuable.
        minutes: time limit, if its command has nine minutes.
        tests: words in the paths of the test files, in the order in which they run; "" stands for all other files.
        benchmark: name of a script in benchmarks/, which runs instead of tests.
        parts: parts of the benchmark to run.
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
    "streams",  # only a GPU shows the order of streams and the effect of a wrong action
    "wrong_actions",
    "stored",
    "random",
    "host_sync",
    "vec_env",
    "vector_env",
)
STEPS = (
    Step("first tests", 1, 2.5, tests=_FIRST),
    Step("targets", 1, 2.0, benchmark="gpu", parts=("first_launch", "targets")),
    Step("PPO and PQN", 1, 1.0, benchmark="gpu", parts=("learning",)),
    Step("Atari's layout", 1, 1.5, benchmark="experiments", parts=("atari_layout",)),
    Step("a row of sharing", 1, 1.0, benchmark="experiments", parts=("serving",)),
    Step("tests alone", 1, 1.0, tests=ALONE),
    Step("Atari's tests", 2, 2.0, tests=("atari",)),
    Step("Atari", 2, 2.5, benchmark="experiments", parts=("atari",)),
    Step("trained steps", 2, 2.0, benchmark="gpu", parts=("trained",)),
    Step("profiles", 2, 1.0, benchmark="gpu", parts=("profiling",)),
    Step("fusion", 2, 1.5, benchmark="experiments", parts=("fusion",)),
    Step("serving", 3, 1.5, benchmark="experiments", parts=("serving",)),
    Step("training", 3, 1.5, benchmark="experiments", parts=("training",)),
    Step("survey", 3, 1.5, benchmark="experiments", parts=("survey",)),
    Step("other tests", 3, 2.5, tests=("learning_on", "dqn", "replay_buffer", "")),
    Step(
        "ladder",
        3,
        1.5,
        benchmark="gpu",
        parts=("policy", "simulation", "training", "launches"),
    ),
    Step("unfinished tests", 3, 0.5),
    Step("score in Pong", 4, 9.0, benchmark="experiments", parts=("atari_score",)),
    # These continue the experiments above to full size.
    Step("all of fusion", 5, 3.5, benchmark="experiments", parts=("fusion",)),
    Step("compilers", 5, 5.5, benchmark="experiments", parts=("compilers",)),
    Step("shares, serving", 6, 9.0, benchmark="experiments", parts=("serving",)),
    Step("shares, training", 7, 9.0, benchmark="experiments", parts=("training",)),
    Step("all of Atari", 8, 9.0, benchmark="experiments", parts=("atari",)),
    Step("Atari's starts", 9, 1.5, benchmark="experiments", parts=("atari_starts",)),
    Step("all of Atari's layout", 9, 2.5, benchmark="experiments", parts=("atari_layout",)),
    Step("sums of gradients", 9, 1.0, benchmark="experiments", parts=("sums",)),
    Step("Algorithm 1", 9, 4.0, benchmark="sharing", parts=("tune",)),
    Step("all of survey", 10, 5.0, benchmark="experiments", parts=("survey",)),
    Step("tests of adapters", 10, 4.0, tests=("adapters",)),
    # Two trainings of about four minutes each, or one with games on the CPU, of eight.
    *(Step(f"scores, part {k}", 9 + k, 9.0, benchmark="experiments", parts=("atari_score",)) for k in (2, 3, 4)),
    Step("sharing", 14, 9.0, benchmark="sharing", parts=("table", "simulations")),
)
MINUTES = 9.0  # of a command
COMMANDS = tuple(dict.fromkeys(step.command for step in STEPS))


def test_files(root: Path) -> dict[str, list[str]]:
    """Assign every file with GPU tests to the first step that names it, or else to the step of all other files.

    Args:
        root: folder of the repository.

    Returns:
        Maps the name of a step to its files, relative to ``root``, in the order in which they run.
    """
    every = sorted((root / "tests").rglob("test_*.py"))
    files = [file for file in every if _SELECTS.search(file.read_text())]
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
    """Return the index of the first word in the path; a file that needs the GPU to itself matches only ``ALONE``."""
    if alone([name]) and words != ALONE:
        return None
    return next((place for place, word in enumerate(words) if word in name), None)


def alone(names: Sequence[str]) -> list[str]:
    """Return the test files that need the GPU to themselves."""
    return [name for name in names if any(word in name for word in ALONE)]


def together(names: Sequence[str]) -> list[str]:
    """Return the test files that may share the GPU."""
    return [name for name in names if not alone([name])]


def steps_of(command: int | None, numbers: Sequence[int]) -> list[Step]:
    """Return the steps of a command, or those with these numbers; all steps if there are no numbers."""
    if command is not None:
        return [step for step in STEPS if step.command == command]
    return [STEPS[number - 1] for number in sorted(numbers)] or list(STEPS)


def minutes_of(chosen: Sequence[Step], minutes: float) -> list[float]:
    """Divide the minutes among the steps, in proportion to their limits."""
    return [minutes * step.minutes / sum(one.minutes for one in chosen) for step in chosen]


def describe(root: Path, chosen: Sequence[Step], minutes: float) -> str:
    """Return the plan as text, with the minutes of each step."""
    files = test_files(root)
    lines = [
        f"{minutes:g} minutes at most; --command 1 to {COMMANDS[-1]} run parts of {MINUTES:g} minutes.",
        "number step                  minutes  command, minutes in it",
    ]
    for step, its in zip(chosen, minutes_of(chosen, minutes), strict=True):
        lines.append(f"{STEPS.index(step) + 1:6} {step.name:21} {its:7.1f}  {step.command}, {step.minutes:.1f}")
        if step.benchmark:
            lines.append(f"           benchmarks/{step.benchmark}.py {' '.join(step.parts)}".rstrip())
        lines += [f"           {name}{'  (alone)' if alone([name]) else ''}" for name in files[step.name]]
        if not step.benchmark and step != STEPS[0]:
            lines.append("           and files that earlier steps did not finish")
    return "\n".join(lines)
