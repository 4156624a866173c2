"""Overhead of a step over the environment's: random actions, 64 CartPoles per worker; and the cost of stats().

Run: ``make peers`` once, then ``python benchmarks/overhead.py``, about two minutes on an idle machine. Contenders run
in turns, each a warm process of its own (``cpu_collect.py`` does the same with a policy). Two bare loops side by side
show what the machine has to give: its cores may share something.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import _report
import gymnasium
from _contenders import Entry, Result, compete
from gymnasium.spaces import Discrete

from rlstruct.agents import RandomAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.progress import Phase, Progress
from rlstruct.envs import GymEnvInf
from rlstruct.vec_env import VecEnv

ROOT = Path(__file__).parent.parent
N_ENVS, T = 64, 128
PHASES_OF_A_STEP = 3  # agent, environment, copy
# What the list of users' pains asks for.
OVERHEAD_US, SHARE, OVER_TORCHRL, SUM_ERROR, STATS_SHARE = 10.0, 0.8, 10.0, 0.05, 0.01


def entry(name: str, script: str, n_processes: int, **settings: Any) -> Entry:  # noqa: ANN401
    task = {"n_envs": N_ENVS * n_processes, "n_processes": n_processes, "n_timesteps": T}
    return Entry(f"{name}, {n_processes} x {N_ENVS}", script, task, ("random",), **settings)


def collection(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours beside a bare loop, in one process and in two, and beside TorchRL."""
    entries = [entry("bare loop", "bare_loop.py", n) for n in (1, 2)]
    entries += [entry("rlstruct RL_Batcher", "rlstruct_batcher.py", n) for n in (1, 2)]
    peer = entry("TorchRL MultiSyncCollector", "torchrl_collectors.py", 2, python=options.peers, requires="torchrl")
    results = compete([*entries, peer], options.rounds, options.seconds)
    print(f"\nCartPole-v1, random actions, T = {T}, {options.rounds} rounds\n")
    print("| | environment steps/s | CPU µs per step |\n|---|---:|---:|")
    for result in results:
        words = f"{result.rate:,.0f} | {(result.cpu or 0.0) * 1e6:.1f}" if result.rate else f"{result.why} |"
        print(f"| {result.name} | {words} |")
    rows: list[dict[str, Any]] = [
        {"name": result.name, "rate": result.rate, "rates": result.rates, "cpu": result.cpu, "why": result.why}
        for result in results
    ]
    return rows + judged(*results)


def judged(bare: Result, two_bare: Result, one: Result, two: Result, torchrl: Result) -> list[dict[str, Any]]:
    """Compare the rates with the targets."""
    rows: list[dict[str, Any]] = []

    def say(name: str, value: float, target: float | None, at_most: bool = False) -> None:
        words = "" if target is None else f", {_report.verdict(value, target, at_most=at_most)}"
        print(f"{name}: {value:.2f}{words}")
        rows.append({"name": name, "value": value, "target": target})

    print()
    if bare.rate and one.rate:
        say("µs per step over the bare loop, one worker", 1e6 / one.rate - 1e6 / bare.rate, OVERHEAD_US, True)
    if bare.cpu and one.cpu:
        say("CPU µs per step over the bare loop, one worker", (one.cpu - bare.cpu) * 1e6, None)
    if bare.rate and two_bare.rate and two.rate:
        say("share of 2 x the bare loop", two.rate / (2 * bare.rate), SHARE)
        say("share of two bare loops side by side", two.rate / two_bare.rate, None)
    if torchrl.rate and two.rate:
        say("times TorchRL", two.rate / torchrl.rate, OVER_TORCHRL)
    return rows


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def statistics(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check that the seconds of stats() add up to the clock's, and measure the cost of keeping them."""
    settings: dict[str, Any] = {"agent_args": {"action_space": Discrete(2)}, "env_args": {"n_envs": N_ENVS}}
    with RL_Batcher(T, RandomAgent, create_env, n_processes=2, seed=0, **settings) as batcher:
        batcher.reset()
        moments, sums = [], []
        n_batches = 0
        while not moments or moments[-1] - moments[0] < max(2.0, options.seconds):
            batcher.execute()
            batcher.get()
            moments.append(time.perf_counter())
            sums.append([sum(worker.values()) for worker in batcher.stats().workers])
            n_batches += 1
    clock = moments[-1] - moments[0]
    error = max(abs(last - first - clock) / clock for first, last in zip(sums[0], sums[-1], strict=True))
    seconds_per_step = clock / ((n_batches - 1) * T)
    share = PHASES_OF_A_STEP * seconds_of_a_phase() / seconds_per_step
    print(f"\nstats() of 2 workers over {clock:.1f} s: its seconds differ from the clock's by at most {error:.2%}, "
          f"{_report.verdict(error, SUM_ERROR, at_most=True)}; keeping them takes {share:.2%} of a step of {N_ENVS} "
          f"environments, {_report.verdict(share, STATS_SHARE, at_most=True)}")  # fmt: skip
    return [{"name": "stats", "clock": clock, "error": error, "share": share}]


def seconds_of_a_phase(n: int = 100_000) -> float:
    """Return the CPU time of entering a phase."""
    import torch

    progress = Progress(torch.zeros(8, dtype=torch.int64))
    start = time.process_time()
    for _ in range(n):
        progress.enter(Phase.AGENT)
    return (time.process_time() - start) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="the peers' interpreter")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long a turn takes")
    options = parser.parse_args()
    print(f"Written: {_report.write('overhead', statistics(options) + collection(options))}")


if __name__ == "__main__":
    main()
