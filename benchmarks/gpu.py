"""The ladder on one device, from SyncVectorEnv to a policy inside a kernel, beside the device's limits.

    python benchmarks/gpu.py                       everything, at most 8 minutes on a GPU
    python benchmarks/gpu.py --minutes 4 --out DIR --resume    go on where a run with the same commit was cut
    python benchmarks/gpu.py --quick --out DIR     a look whether it runs, under 20 seconds, also without a GPU
    python benchmarks/gpu.py --parts simulation policy --device cpu

Parts, in this order: ``first_launch`` (how long Warp takes until its first kernel has run), ``targets`` (what there are
targets for, in a few sizes), ``sync`` (no hidden wait in a batch), ``limits`` (a copy and a multiply-add kernel),
``policy`` (a 64-64 actor and critic in the loop), ``simulation`` (CartPole alone, N from 1 to 2^20),
``training`` (A2C on 4,096 environments until an evaluation of 100 episodes reaches 475),
``tricks`` (loads of four numbers, writes grouped by dtype: with and without), ``launches`` (kernels per step),
``profiling`` (the profiler beside NVML and CUDA's events), ``compiled`` (what TorchInductor compiles for minutes
first).

Timings are medians of interleaved repeats after a warm-up, compilation left out. Every row is written as it comes, so a
run that is cut keeps what it has; what is measured is not measured again. An exception costs the rung that raised it.
What cannot run here (CUDA, Warp) is left out, and the file says so. Exit code 70: CUDA broke, or a rung hung;
`--resume` goes on without that rung.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _gpu_limits
import _gpu_run
import _gpu_rungs
import _gpu_summary
import _report
import torch
from _gpu_profiles import profiling as profiling  # a part, found by its name
from _gpu_rungs import MakeRung, Rung
from _learning import learning_seconds

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import a2c
from rlstruct.sims import make

PARTS = (
    "first_launch", "targets", "sync", "limits", "policy", "simulation", "training", "tricks", "launches",
    "profiling", "compiled",
)  # fmt: skip


class Run(_gpu_run.Run):
    """One run of the benchmark."""

    name = "gpu"

    def rate(self, part: str, n_envs: int, makers: Sequence[MakeRung]) -> None:
        """Measure rungs side by side, one row each; one that raises is a row of its own, and the others go on."""
        rungs = self.made(part, n_envs, makers)
        rounds: dict[str, list[float]] = {}
        while rungs and not rounds:
            calls = {rung.name: partial(_guarded, rung) for rung in rungs}
            try:
                with self.limited(part=part, N=n_envs):
                    rounds = _report.interleaved_rounds(calls, 5, 0.002 if self.quick else 0.08)
            except _RungError as failure:
                rungs.remove(failure.rung)
                self.failed(failure.error, part=part, rung=failure.rung.name, N=n_envs)
        for rung in rungs:
            seconds = statistics.median(rounds[rung.name])
            carry = {} if rung.env is None else rung.env.carry()
            self.add(
                part=part,
                rung=rung.name,
                N=n_envs,
                K=rung.steps,
                steps_per_second=n_envs * rung.steps / seconds,
                bytes_per_environment=sum(value.nbytes for value in carry.values()) / n_envs or None,
                rounds=rounds[rung.name],
            )

    def made(self, part: str, n_envs: int, makers: Sequence[MakeRung]) -> list[Rung]:
        """Make rungs and warm them up; one that raises is a row of its own."""
        if self.device.type == "cuda":
            gc.collect()  # the rungs before hold each other, and many gigabytes
            torch.cuda.empty_cache()
        rungs = []
        broke = {row.get("rung") for row in self.rows if row.get("broke")}
        for maker in makers:
            row = {"part": part, "rung": _name(maker), "N": n_envs}
            if row["rung"] not in broke:
                with self.caught(**row), self.limited(**row):
                    rung = maker()
                    rung.run()
                    rung.run()
                    rungs.append(rung)
        return rungs

    def best(self, part: str, rung: str, **where: int) -> float | None:
        """The highest rate of a rung in a part, or None."""
        found = [
            row["steps_per_second"]
            for row in self.rows
            if (row.get("part"), row.get("rung")) == (part, rung)
            and "steps_per_second" in row
            and all(row[key] == value for key, value in where.items())
        ]
        return max(found, default=None)


class _RungError(Exception):
    """A rung raised while it was timed."""

    def __init__(self, rung: Rung, error: Exception) -> None:
        super().__init__(rung.name)
        self.rung, self.error = rung, error


def _guarded(rung: Rung) -> None:
    try:
        rung.run()
    except Exception as error:
        raise _RungError(rung, error) from error


def first_launch(run: Run) -> None:
    """Measure the time until a kernel of Warp has run: its import, its compilation or its cache, the launch."""
    if run.measured("first_launch"):
        return
    start = time.perf_counter()
    for rung in run.made("first_launch", 64, _gpu_rungs.policy_rungs(64, run.device)[-1:]):
        seconds = time.perf_counter() - start
        rung.run()
        run.add(part="first_launch", rung=rung.name, N=64, seconds=seconds)


def targets(run: Run) -> None:
    """Measure the parts with targets, most valuable first."""
    sizes = [64] if run.quick else [4096]
    on_gpu = run.device.type == "cuda" and not run.quick
    policy(run, [1 << 18, *sizes] if on_gpu else sizes)
    simulation(run, [*sizes, 64, 1 << 20] if on_gpu else sizes)
    sync(run)


def simulation(run: Run, sizes: Sequence[int] = ()) -> None:
    """The simulation alone, for N from 1 to 2^20."""
    for n_envs in sizes or ([1, 64] if run.quick else [1 << n for n in range(0, 21, 2)]):
        if run.measured("simulation", N=n_envs):
            continue
        if not run.left(8, "simulation"):
            return
        run.rate("simulation", n_envs, _gpu_rungs.simulation_rungs(n_envs, run.device))
    if run.device.type == "cpu" and not sizes and not run.measured("simulation", rung="CUDA graph", N=None):
        run.add(part="simulation", rung="CUDA graph", left_out="there is no CUDA device")


def launches(run: Run) -> None:
    """Count the kernels of a step."""
    if run.measured("launches"):
        return
    for rung in run.made("launches", 4096, _gpu_rungs.our_rungs(4096, run.device)):
        with run.caught(part="launches", rung=rung.name, N=4096):
            counted = _gpu_limits.launches(rung, run.device)
            run.add(part="launches", rung=rung.name, N=4096, K=rung.steps, **counted)


def compiled(run: Run) -> None:
    """The simulation as TorchInductor compiles it, beside the eager one."""
    if run.quick:
        run.add(part="compiled", left_out="it compiles for half a minute")
        return
    for n_envs in (4096,) if run.device.type == "cpu" else (4096, 1 << 18):
        if not run.measured("compiled", N=n_envs) and run.left(60, "compiled"):
            run.rate("compiled", n_envs, _gpu_rungs.compiled_rungs(n_envs, run.device))


def policy(run: Run, sizes: Sequence[int] = ()) -> None:
    """Collection with the network in the loop."""
    every = [64] if run.quick else [64, 1024, 4096]
    on_cpu = run.device.type == "cpu"
    for n_envs in sizes or every + ([] if run.quick or on_cpu else [1 << 14, 1 << 16, 1 << 18, 1 << 20]):
        if run.measured("policy", N=n_envs):
            continue
        if not run.left(15, "policy"):
            return
        run.rate("policy", n_envs, _gpu_rungs.policy_rungs(n_envs, run.device))


def tricks(run: Run) -> None:
    """Measure two tricks that only a GPU can judge."""
    for n_envs in [64] if run.quick or run.device.type == "cpu" else [4096, 1 << 18]:
        if not run.measured("tricks", N=n_envs) and run.left(20, "tricks"):
            run.rate("tricks", n_envs, _gpu_rungs.trick_rungs(n_envs, run.device))


def limits(run: Run) -> None:
    """Measure the limits of the device."""
    if not run.measured("limits"):
        run.add(part="limits", **_gpu_limits.limits(run.device, run.quick))


def sync(run: Run) -> None:
    """A whole batch without a hidden wait."""
    if run.measured("sync"):
        return
    if run.device.type != "cuda":
        run.add(part="sync", left_out="there is no CUDA device")
        return
    for graph in (False, True):
        with run.caught(part="sync", graph=graph):
            run.add(part="sync", graph=graph, sync_debug_mode=_gpu_limits.sync_clean(run.device, graph), target="clean")


def training(run: Run) -> None:
    """A2C on 4,096 environments: seconds until 475, evaluations not counted."""
    if run.quick:
        run.add(part="training", left_out="it takes minutes: --quick leaves it out")
        return
    device = str(run.device)
    config = a2c.A2CConfig(
        n_env_steps=6_000_000,
        n_envs=4096,
        n_timesteps=8,
        learning_rate=0.01,
        trace_decay=0.95,
        whiten_advantages=True,
        evaluation_interval=100_000,
        evaluation_episodes=100,
        evaluation_processes=0,
        evaluation_timesteps=500,
        target_return=475.0,
        learner_device=device,
        batcher_device=device,
        evaluation_device=device,
    )
    for seed in range(3):
        if run.measured("training", seed=seed):
            continue
        if not run.left(60, "training"):
            return
        with run.caught(part="training", seed=seed):
            seeded = replace(config, seed=seed)
            create_env = partial(_simulator, run.device)
            result = a2c.train(seeded, partial(ActorCritic, 4, 2), ActorCriticAgent, create_env)
            reached = result.evaluations[-2].mean_return >= 475.0 if len(result.evaluations) > 1 else False
            seconds = learning_seconds(result)
            steps = result.env_steps
            run.add(part="training", seed=seed, N=4096, reached=reached, seconds=seconds, env_steps=steps)


def _simulator(device: torch.device, n_envs: int, seed: int) -> Any:  # noqa: ANN401 - a VecEnv
    return make("CartPole-v1", n_envs, seed, device=device)


def _name(maker: MakeRung) -> str:
    """Return the name of a rung that may not exist: the first text of its maker, or of the maker in that."""
    for value in maker.args if isinstance(maker, partial) else ():
        if isinstance(value, str | partial):
            return value if isinstance(value, str) else _name(value)
    return getattr(maker, "func", maker).__name__


def main() -> None:
    """Measure the parts, print, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget of the whole")
    parser.add_argument("--quick", action="store_true", help="few sizes, short repeats: does it run?")
    parser.add_argument("--out", type=Path, default=_report.RESULTS, help="folder of JSON and picture")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the same device and commit in --out")
    options = parser.parse_args()
    _report.RESULTS = options.out
    run = Run(torch.device(options.device), options.quick, time.perf_counter() + 60 * options.minutes)
    if options.resume:
        run.resume()
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    print(_report.machine())
    run.watch()
    for part in options.parts:
        with run.caught(part=part):
            globals()[part](run)
        run.silent = part != options.parts[-1]  # the run may be cut: the file has a summary after each part
        with run.caught(part="summary"):
            _gpu_summary.summary(run)
        run.silent = False
    with run.caught(part="picture"):
        _gpu_summary.draw(run)
    print(run.path)


if __name__ == "__main__":
    main()
