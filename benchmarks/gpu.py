"""The ladder on one device, from SyncVectorEnv to a policy inside a kernel, beside the device's limits. Layer 5.

    python benchmarks/gpu.py                       everything, at most 8 minutes on a GPU
    python benchmarks/gpu.py --minutes 4 --out DIR --resume    go on where a run with the same commit was cut
    python benchmarks/gpu.py --quick --out DIR     a look whether it runs, under 20 seconds, also without a GPU
    python benchmarks/gpu.py --parts simulation fused --device cpu

Parts: ``targets`` (what there are targets for: a few sizes of the parts below, and ``sync``), ``sync`` (no hidden wait
in a batch), ``limits`` (a copy and a multiply-add kernel), ``training`` (A2C on 4,096 environments until an evaluation
of 100 episodes reaches 475), ``policy`` (a 64-64 actor and critic in the loop), ``simulation`` (CartPole alone, N from
1 to 2^20), ``fused`` (K from 1 to 256 steps in a launch). Timings are medians of interleaved repeats after a warm-up,
compilation left out. The most valuable rows come first and each is written as it comes, so a run that is cut short
leaves what it has; sizes that are measured are not measured again. What cannot run here (CUDA, Warp) is left out, and
the file says so. Exit code 70: CUDA broke; `--resume` goes on behind the rung that broke it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import _gpu_limits
import _gpu_rungs
import _report
import torch
from _gpu_rungs import MakeRung, Rung
from _learning import learning_seconds

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import a2c
from rlstruct.sims import make

PARTS = ("targets", "sync", "limits", "training", "policy", "simulation", "fused")
BROKEN = 70  # exit code
NO_TIME = "the time budget is used up"
Row = dict[str, Any]


@dataclass
class Run:
    """One run of the benchmark: what it may use, and what it has found.

    Attributes:
        device: under test.
        quick: only look whether everything runs.
        deadline: when to stop, of time.perf_counter.
        rows: found so far, written after each.
        path: of the JSON file.
        silent: write rows without showing them.
    """

    device: torch.device
    quick: bool
    deadline: float
    rows: list[Row] = field(default_factory=list)
    path: Path = Path()
    silent: bool = False

    def add(self, **row: Any) -> Row:  # noqa: ANN401 - plain values
        """Print a row, and write all."""
        self.rows.append(row)
        self.path = _report.write("gpu", self.rows)
        if not self.silent:
            print("  ".join(f"{key} {_words(value)}" for key, value in row.items() if key != "rounds"), flush=True)
        return row

    def measured(self, part: str, n_envs: int, k: int | None = None) -> bool:
        """Whether the rungs of a size have their rows, also those that failed."""
        return any(
            row.get("part") == part and row.get("N") == n_envs and (k is None or row.get("K") in (k, None))
            for row in self.rows
        )

    def left(self, seconds: float, what: str) -> bool:
        """Whether there is time for something; says so where there is not."""
        if time.perf_counter() + seconds < self.deadline:
            return True
        self.add(part=what, left_out=NO_TIME)
        return False

    def rate(self, part: str, n_envs: int, makers: Sequence[MakeRung]) -> None:
        """Measure rungs side by side, one row each."""
        rungs = self.made(part, n_envs, makers)
        rounds = _report.interleaved_rounds({rung.name: rung.run for rung in rungs}, 5, 0.002 if self.quick else 0.08)
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
        """Make rungs and warm them up; one that fails is a row of its own, and the others go on."""
        rungs = []
        if self.device.type == "cuda":
            gc.collect()  # the rungs before hold each other, and many gigabytes
            torch.cuda.empty_cache()
        for maker in makers:
            try:
                rung = maker()
                rung.run()
                rung.run()
            except Exception as error:  # whatever it is: the others shall be measured all the same
                self.failed(error, part=part, rung=_name(maker), N=n_envs)
            else:
                rungs.append(rung)
        return rungs

    def failed(self, error: Exception, **row: Any) -> None:  # noqa: ANN401 - plain values
        """Write down what could not be measured; end the program if CUDA answers to nothing from here on.

        Raises:
            SystemExit: it does not.
        """
        said = str(error).strip().splitlines() or [""]
        self.add(**row, left_out=f"{type(error).__name__}: {said[0]}")
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                raise SystemExit(BROKEN) from error

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


def targets(run: Run) -> None:
    """What there are targets for, most valuable first."""
    sizes = [64] if run.quick else [4096]
    on_gpu = run.device.type == "cuda" and not run.quick
    policy(run, [1 << 18, *sizes] if on_gpu else sizes)
    simulation(run, [*sizes, 64, 1 << 20] if on_gpu else sizes)
    sync(run)


def simulation(run: Run, sizes: Sequence[int] = ()) -> None:
    """The simulation alone, for N from 1 to 2^20, and how many kernels a step is."""
    on_cpu = run.device.type == "cpu"
    every = [1, 64] if run.quick else [1 << n for n in range(0, 21, 2)]
    compiled_at = () if run.quick else (4096,) if on_cpu else (64, 4096, 1 << 20)
    for n_envs in sizes or every:
        if run.measured("simulation", n_envs):
            continue
        if not run.left(60 if n_envs in compiled_at else 8, "simulation"):
            return
        k = min(64, max(1, (1 << (20 if on_cpu else 26)) // n_envs))
        run.rate("simulation", n_envs, _gpu_rungs.simulation_rungs(n_envs, run.device, n_envs in compiled_at, k))
    if sizes:
        return
    if run.quick:
        run.add(part="simulation", rung="torch.compile", left_out="it compiles for half a minute")
    if not run.measured("launches", 4096):
        for rung in run.made("launches", 4096, _gpu_rungs.our_rungs(4096, run.device, 64)):
            counted = _gpu_limits.launches(rung, run.device)
            run.add(part="launches", rung=rung.name, N=4096, K=rung.steps, **counted)
    if on_cpu:
        run.add(part="simulation", rung="CUDA graph", left_out="there is no CUDA device")


def fused(run: Run) -> None:
    """K steps in one launch."""
    for n_envs in [64] if run.quick else [4096, 1 << 16, 1 << 20]:
        for k in [1, 8] if run.quick else [1, 2, 4, 8, 16, 32, 64, 128, 256]:
            too_much = n_envs * k > (1 << (21 if run.device.type == "cpu" else 26))
            if not too_much and not run.measured("fused", n_envs, k) and run.left(2, "fused"):
                run.rate("fused", n_envs, [partial(_gpu_rungs.fused_rung, n_envs, run.device, k)])


def policy(run: Run, sizes: Sequence[int] = ()) -> None:
    """Collection with the network in the loop."""
    every = [64] if run.quick else [64, 1024, 4096]
    on_cpu = run.device.type == "cpu"
    for n_envs in sizes or every + ([] if run.quick or on_cpu else [1 << 14, 1 << 16, 1 << 18, 1 << 20]):
        if run.measured("policy", n_envs):
            continue
        if not run.left(15, "policy"):
            return
        run.rate("policy", n_envs, _gpu_rungs.policy_rungs(n_envs, run.device))


def limits(run: Run) -> None:
    """What the device can do at most."""
    if any(row.get("part") == "limits" for row in run.rows):
        return
    run.add(part="limits", **_gpu_limits.limits(run.device, run.quick))


def sync(run: Run) -> None:
    """A whole batch without a hidden wait."""
    if any(row.get("part") == "sync" for row in run.rows):
        return
    if run.device.type != "cuda":
        run.add(part="sync", left_out="there is no CUDA device")
        return
    for graph in (False, True):
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
        if any(row.get("part") == "training" and row.get("seed") == seed for row in run.rows):
            continue
        if not run.left(60, "training"):
            return
        result = a2c.train(
            replace(config, seed=seed), partial(ActorCritic, 4, 2), ActorCriticAgent, partial(_simulator, run.device)
        )
        reached = result.evaluations[-2].mean_return >= 475.0 if len(result.evaluations) > 1 else False
        run.add(
            part="training",
            seed=seed,
            N=4096,
            reached=reached,
            seconds=learning_seconds(result),
            env_steps=result.env_steps,
        )


def _simulator(device: torch.device, n_envs: int, seed: int) -> Any:  # noqa: ANN401 - a VecEnv
    return make("CartPole-v1", n_envs, seed, device=device)


def summary(run: Run) -> None:
    """Ratios beside their targets, and shares of the limits."""
    run.rows = [row for row in run.rows if row["part"] != "summary"]
    small = {n for n in (64, 256, 1024, 4096) if run.best("simulation", "torch eager", N=n)}
    graph = [
        _ratio(run.best("simulation", "CUDA graph", N=n), run.best("simulation", "torch eager", N=n)) for n in small
    ]
    ours = ("torch eager", "torch.compile", "CUDA graph", "Warp in CUDA graph", "Warp one step", "Warp fused")
    vectorised = max((run.best("simulation", name) or 0.0 for name in ours[:-1]), default=0.0)
    fastest = max(run.best("fused", "Warp fused") or 0.0, run.best("simulation", "Warp fused") or 0.0) or None
    deciding = max(
        (row["steps_per_second"] for row in run.rows if row["part"] == "policy" and "steps_per_second" in row),
        default=None,
    )
    n = 64 if run.quick else 4096
    rows = {
        "graph over eager, N <= 4096": (min((g for g in graph if g), default=None), 4.0),
        "Warp fused over Warp one step, N = 4096": (
            _ratio(run.best("simulation", "Warp fused", N=n), run.best("simulation", "Warp one step", N=n)), 5.0),
        "vectorised (best N) over SyncVectorEnv (best N)": (
            _ratio(vectorised or None, run.best("simulation", "SyncVectorEnv")), 1000.0),
        "policy in the loop, steps per second": (deciding, 1e8),
    }  # fmt: skip
    for name, (value, target) in rows.items():
        met = "not measured" if value is None else value >= target
        run.add(part="summary", ratio=name, value=value, target=target, met=met)
    waits = [row["sync_debug_mode"] for row in run.rows if row.get("part") == "sync" and "graph" in row]
    clean = "not measured" if len(waits) < 2 else waits == ["clean", "clean"]
    run.add(
        part="summary", ratio="sync_debug_mode('error') through execute()", value=str(waits), target="clean", met=clean
    )
    bound = next((row for row in run.rows if row.get("part") == "limits"), None)
    if bound is not None and fastest and "bytes_per_second" in bound:
        share = fastest * _gpu_limits.BYTES_PER_FUSED_STEP / bound["bytes_per_second"]
        run.add(part="summary", ratio="Warp fused: share of the copy's bandwidth", value=share, target=None)
    decided = run.best("policy", "Warp fused policy")
    if bound is not None and decided and "flops_per_second" in bound:
        share = decided * _gpu_limits.FLOPS_PER_DECISION / bound["flops_per_second"]
        run.add(part="summary", ratio="Warp fused policy: share of the multiply-adds", value=share, target=None)


def draw(run: Run) -> None:
    """Draw rates over N, one panel for each part."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed (extra train)")
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, part in zip(panels, ("simulation", "policy"), strict=True):
        rows = [row for row in run.rows if row.get("part") == part and "steps_per_second" in row]
        for name in dict.fromkeys(row["rung"] for row in rows):
            points = [(row["N"], row["steps_per_second"]) for row in rows if row["rung"] == name]
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set_title({"simulation": "CartPole alone", "policy": "with a 64-64 policy in the loop"}[part])
        axes.set_xlabel(f"environments, {_report.machine()['device']}")
        if rows:
            axes.legend(fontsize=7)
    panels[0].set_ylabel("steps per second")
    figure.tight_layout()
    figure.savefig(run.path.with_suffix(".png"), dpi=120)
    plt.close(figure)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _name(maker: MakeRung) -> str:
    """Say which rung could not be made."""
    if not isinstance(maker, partial):
        return repr(maker)
    words = [value for value in (*maker.args, *maker.keywords.values()) if isinstance(value, str)]
    return " ".join([maker.func.__name__, *words])


def _words(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    if options.resume and _report.result_path("gpu").exists():
        found = json.loads(_report.result_path("gpu").read_text())["rows"]
        run.rows = [row for row in found if row["part"] != "summary" and row.get("left_out") != NO_TIME]
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    print(_report.machine())
    for part in options.parts:
        try:
            globals()[part](run)
        except Exception as error:  # the parts that follow shall be measured all the same
            run.failed(error, part=part)
        run.silent = part != options.parts[-1]  # the run may be cut: the file has a summary after each part
        summary(run)
        run.silent = False
    draw(run)
    print(run.path)


if __name__ == "__main__":
    main()
