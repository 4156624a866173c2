"""Trained steps per second of PPO on simulators of CartPole, collecting included, with each way to run an update.

    python benchmarks/gpu_train.py                       on a GPU: 4,096 to 2^18 environments, at most 5 minutes
    python benchmarks/gpu_train.py --device cpu          the CPU: compiled over eager, as CartPole's preset learns
    python benchmarks/gpu_train.py --quick --out DIR     a look whether it runs, also without a GPU

A 64-64 policy and critic, T = 32 steps, 4 epochs of 4 minibatches (on the CPU also the preset of CartPole-v1: 8
environments, T = 128). An iteration collects a batch, learns from it and publishes the weights; nothing is evaluated.
The ways take turns, on a GPU those that compile after the others; medians of 5 rounds after a warm-up, compiling left
out. The shares say where the time went, with a
wait for the device in between, and so are taken in iterations of their own. Every row is written as it comes; what
raises is a row that says so. Targets on one GPU: 1e6 at 4,096 environments, 1e7 at 65,536 or more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _report
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

WAYS = {
    "eager": {"graph": False},
    "graph": {"graph": True},
    "compiled": {"graph": False, "compile_update": True},
    "compiled, graph": {"graph": True, "compile_update": True},
}
TARGETS = {4096: 1e6, 1 << 16: 1e7, 1 << 18: 1e7}


class Loop:
    """Collects and learns, as a training does.

    Args:
        config: of PPO.
        backend: of the simulators.
    """

    def __init__(self, config: PPOConfig, backend: str) -> None:
        self.device = torch.device(config.learner_device)
        torch.manual_seed(0)
        self.learner = PPOLearner.create(ActorCritic(4, 2).to(self.device), ActorCriticAgent, config)
        self.batcher = RL_Batcher(
            config.n_timesteps,
            ActorCriticAgent,
            partial(make, "CartPole-v1", backend=backend, device=self.device),
            agent_args={"model": self.learner.model, "copy_model": True, "device": self.device},
            env_args={"n_envs": config.n_envs},
            device=self.device,
            seed=0,
            compile_agent=config.compile_update and self.device.type == "cpu",
        )
        self.batcher.reset()
        self.steps = config.n_envs * config.n_timesteps
        self.batch = self.collect()
        for _ in range(2):  # the first update runs as it is, the second is recorded
            self.learn()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def collect(self) -> Any:  # noqa: ANN401 - Trajectories
        self.batcher.execute()
        return self.batcher.get()[0]

    def learn(self) -> None:
        self.learner.update(self.batch, 0.0)
        self.batcher.update(self.learner.model.state_dict())

    def iterate(self) -> None:
        self.batch = self.collect()
        self.learn()
        self.wait()

    def collect_only(self) -> None:
        self.batch = self.collect()
        self.wait()

    def learn_only(self) -> None:
        self.learn()
        self.wait()


class Run:
    """Results so far, written after each row."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def add(self, **row: Any) -> None:  # noqa: ANN401 - plain values
        self.rows.append(row)
        _report.write("gpu_train", self.rows)
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()), flush=True)  # fmt: skip

    def measure(self, name: str, config: PPOConfig, ways: list[str], backend: str, seconds: float) -> None:
        """Let the ways take turns at one task, and write a row for each."""
        loops: dict[str, Loop] = {}
        for way in ways:
            with self.caught(task=name, way=way, backend=backend):
                loops[way] = Loop(dataclasses.replace(config, **WAYS[way]), backend)  # type: ignore[arg-type]
        calls: dict[str, Callable[[], object]] = {}
        for way, loop in loops.items():
            calls |= {way: loop.iterate, f"{way} C": loop.collect_only, f"{way} L": loop.learn_only}
        with self.caught(task=name, way=ways[-1], backend=backend):
            found = _report.interleaved(calls, 5, seconds)
            for way, loop in loops.items():
                rate, target = loop.steps / found[way], TARGETS.get(config.n_envs)
                self.add(
                    task=name, way=way, backend=backend, N=config.n_envs, T=config.n_timesteps, steps_per_second=rate,
                    collecting=found[f"{way} C"], learning=found[f"{way} L"],
                    **({} if "eager" not in found else {"update_over_eager": found["eager L"] / found[f"{way} L"],
                                                        "whole_over_eager": found["eager"] / found[way]}),
                    **({} if target is None or loop.device.type != "cuda" else {"met": _report.verdict(rate, target)}),
                )  # fmt: skip
        for loop in loops.values():
            loop.batcher.close()

    @contextlib.contextmanager
    def caught(self, **row: str) -> Iterator[None]:
        """Turn an exception inside into a row, so that what follows is measured all the same."""
        try:
            yield
        except Exception as error:
            traceback.print_exception(error)
            said = str(error).strip().splitlines() or [""]
            self.add(**row, left_out=f"{type(error).__name__}: {said[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="nothing is begun after this time")
    parser.add_argument("--backend", default="", help="of the simulators; by default torch, on a GPU warp too")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="ways to run an update")
    parser.add_argument("--quick", action="store_true", help="few environments, no compiling: does it run?")
    parser.add_argument("--out", type=Path, default=_report.RESULTS, help="folder of the JSON file")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the same device and commit in --out")
    options = parser.parse_args()
    _report.RESULTS, start = options.out, time.perf_counter()
    path, on_gpu = _report.result_path("gpu_train"), torch.device(options.device).type == "cuda"
    run = Run(json.loads(path.read_text())["rows"] if options.resume and path.exists() else [])
    if not on_gpu:
        torch.set_num_threads(1)
    print(_report.machine())
    common = PPOConfig(learner_device=options.device, n_timesteps=32, learning_rate=0.003)
    preset = PPOConfig(learner_device=options.device)
    tasks = {"preset": preset} if not on_gpu and not options.quick else {}
    sizes = [64] if options.quick else [4096, 1 << 16, 1 << 18] if on_gpu else [1024]
    tasks |= {f"{n:,} environments": dataclasses.replace(common, n_envs=n) for n in sizes}
    ways = options.ways or (["eager", "graph"] if options.quick else list(WAYS))
    turns = [[way for way in ways if on_gpu or "graph" not in way]]
    if on_gpu and not options.ways and not options.quick:
        turns = [["eager", "graph"], ["eager", "compiled", "compiled, graph"]]
    backends = [options.backend] if options.backend else ["torch", "warp"] if on_gpu else ["torch"]
    for ways, backend, (name, config) in itertools.product(turns, backends, tasks.items()):
        known = any((row["task"], row["backend"], row["way"]) == (name, backend, ways[-1]) for row in run.rows)
        if not known and time.perf_counter() - start < 60 * options.minutes:
            run.measure(name, config, ways, backend, 0.01 if options.quick else 0.25 if on_gpu else 0.5)
        gc.collect()
    if not run.rows:
        raise SystemExit("nothing was measured: more --minutes?")
    best = {row["task"]: max(r.get("steps_per_second", 0.0) for r in run.rows if r["task"] == row["task"])
            for row in run.rows}  # fmt: skip
    print(f"Best steps per second: {best}\n{path}")


if __name__ == "__main__":
    main()
