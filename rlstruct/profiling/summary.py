"""Summary of a profile in one sentence: the bottleneck and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlstruct.profiling.breakdown import SIMULATOR, Process, Row
from rlstruct.profiling.gpu import GpuUse
from rlstruct.profiling.overhead import WAIT
from rlstruct.profiling.overlap import Floats

WORDS = ("Python", "torch's operators", "the simulator", "calls of CUDA")
"""Names of `rlstruct.profiling.breakdown.REGIONS` in a sentence."""
_SMALLER = "smaller observations, such as uint8 frames, or longer batches (n_timesteps)"
_LEARNING = "a larger batch for each call, or a smaller network"
ADVICE = {
    "environment": "more workers (n_processes; `rlstruct tune` finds how many), or a simulator of rlstruct.sims",
    "agent": (
        "more environments for each call of the agent (n_envs; `rlstruct tune` finds how many), or compile_agent=True"
    ),
    **dict.fromkeys(("copy", "assembly"), _SMALLER),
    "wait": "overlap=True, so that learning and collecting happen at the same time",
    **dict.fromkeys(("replay", "loss", "loss and backward", "gradient step"), _LEARNING),
    "backward": f"{_LEARNING}; a large one belongs on a GPU (learner_device)",
    "optimiser": "fewer and larger gradient steps",
    "replay buffer": "fewer and larger batches, or a replay buffer on the learner's device (replay_device)",
    "weights": "rarer updates: longer batches (n_timesteps)",
    "evaluation": "rarer evaluations (evaluation_interval), or a separate process for them (evaluation_processes=1)",
    "search": "more games for each search, or fewer simulations",
    "graph": "more environments: the GPU works on a whole batch at a time",
    "checkpoint": "rarer checkpoints (checkpoint_interval)",
    "reset": "environments that restart by themselves",
    "start": "a longer run, of which the start is a smaller part",
}
_THINGS = {
    *("environment", "agent", "optimiser", "replay buffer", "evaluation", "search", "assembly", "host"),
    *("loss", "loss and backward", "gradient step"),
}
_OUTSIDE = "outside of all operations"
_OWN = "operations within it, `with rlstruct.profiling.operation(...)`, to see what takes so long"


def main_process(processes: Sequence[Process]) -> Process:
    """Return the process that spends most time in operations; one that a batcher started only if no other has any."""
    mains = [one for one in processes if one.name == "main" and any(row.path for row in one.rows)] or list(processes)
    return max(mains, key=lambda one: sum(row.corrected.sum() for row in one.rows if row.path))


def sentence_of(processes: Sequence[Process], gpus: Sequence[GpuUse]) -> str:
    """Name the bottleneck of a run and a remedy to try."""
    main = main_process(processes)
    phase = _phase_of(main)
    rows = [row for row in main.rows if row.phase == phase]
    looped = [row for row in rows if "iteration" in row.path]
    name, share, words = _most(looped or [row for row in rows if row.path] or rows)
    text = f"{share} of {'an iteration' if looped else f'the time in {phase!r}'} is "
    text += "waiting for workers" if name == WAIT else words
    if name == WAIT:
        others = [row for one in processes if one is not main for row in one.rows if row.phase == phase]
        if working := [row for row in others if row.path and row.path[-1] not in (WAIT, "start")]:
            name, share, words = _most(working)
            text += f", and {share} of their work is {words}"
    text += f": try {ADVICE.get(name, _OWN)}."
    for use in gpus:
        if use.pid == main.pid:
            reason = max(use.idle, key=lambda one: use.idle[one])
            return (
                f"{text} cuda:{use.device} is busy {100 * use.busy:.0f} % of the time, {100 * use.weighted:.1f} % if "
                f"weighted by multiprocessors, and waits for {_called(reason)} most of the rest."
            )
    return text


def _phase_of(process: Process) -> str:
    """Return the phase with the most time in operations; evaluation only if hardly anything else was recorded."""
    sums: dict[str, float] = {}
    for row in process.rows:
        weight = 1.0 if row.path else 1e-6
        sums[row.phase] = sums.get(row.phase, 0.0) + weight * float(row.corrected.sum())
    little = 0.01 * sum(sums.values())
    return max(sums, key=lambda name: (name != "evaluation" and sums[name] > little, sums[name]), default="")


def _most(rows: Iterable[Row]) -> tuple[str, str, str]:
    """Return the longest operation: its name, its share, and a phrase that names it and its largest region."""
    sums: dict[str, Floats] = {}
    for row in rows:
        # A simulator counts as its environment; the name of an iteration says nothing about the work in it.
        name = "environment" if row.path[-1:] == (SIMULATOR,) else (*row.path[-1:], _OUTSIDE)[0]
        name = f"{_OUTSIDE} in it" if name == "iteration" else name
        sums[name] = sums.get(name, 0.0) + row.corrected.reshape(2, -1).sum(0)
    name = max(sums, key=lambda one: float(sums[one].sum()))
    share = sums[name].sum() / (sum(one.sum() for one in sums.values()) or 1.0)
    return name, f"{100 * share:.0f} %", f"{_called(name)}, mostly in {WORDS[int(sums[name].argmax())]}"


def _called(name: str) -> str:
    return f"the {name}" if name in _THINGS else name
