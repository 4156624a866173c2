"""Trained steps per second of PPO on simulators of CartPole: the part ``trained`` of benchmarks/gpu.py.

A 64-64 policy and critic, T = 32 steps, 4 epochs of 4 minibatches; on the CPU also CartPole's preset (8 environments,
T = 128). An iteration collects a batch, learns from it and publishes the weights; nothing is evaluated. Collecting and
learning alone are timed in further iterations, with a wait for the device in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import _report
import torch
from _gpu_rungs import synchronize

from rlstruct import Trajectories
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

if TYPE_CHECKING:
    from gpu import Run

WAYS = {
    "eager": {"graph": False}, "graph": {"graph": True}, "compiled": {"graph": False, "compile_update": True},
    "compiled, graph": {"graph": True, "compile_update": True},
}  # fmt: skip
SECONDS = 45  # for some ways at one size, compiling included


class Loop:
    """A training loop without evaluations: collect, learn, publish the weights."""

    def __init__(self, config: PPOConfig, backend: str) -> None:
        self.device = torch.device(config.learner_device)
        torch.manual_seed(0)
        self.learner = PPOLearner.create(ActorCritic(4, 2).to(self.device), ActorCriticAgent, config)
        self.batcher = RL_Batcher(
            config.n_timesteps, ActorCriticAgent, partial(make, "CartPole-v1", backend=backend, device=self.device),
            agent_args={"model": self.learner.model, "copy_model": True, "device": self.device},
            env_args={"n_envs": config.n_envs}, device=self.device, seed=0,
            compile_agent=config.compile_update and self.device.type == "cpu",
        )  # fmt: skip
        self.batcher.reset()
        self.steps = config.n_envs * config.n_timesteps
        for _ in range(2):  # the first update runs eagerly, the second is recorded
            self.batch = self.collect()
            self.learn()

    def collect(self) -> Trajectories:
        self.batcher.execute()
        self.batch = self.batcher.get()[0]
        synchronize(self.device)
        return self.batch

    def learn(self) -> None:
        self.learner.update(self.batch, 0.0)
        self.batcher.update(self.learner.model.state_dict())
        synchronize(self.device)

    def iterate(self) -> None:
        self.collect()
        self.learn()


def trained(run: Run) -> None:
    """Measure each way to run an update, in turns; on a GPU those that compile after the others."""
    device, on_gpu = str(run.device), run.device.type == "cuda"
    common = PPOConfig(learner_device=device, n_timesteps=32, learning_rate=0.003)
    sizes = [64] if run.quick else [4096, 1 << 16, 1 << 18] if on_gpu else [1024]
    tasks = {f"{n:,} environments": replace(common, n_envs=n) for n in sizes}
    if not on_gpu and not run.quick:
        tasks["preset"] = PPOConfig(learner_device=device)
    turns = [["eager", "graph"], ["eager", "compiled", "compiled, graph"]] if on_gpu else [["eager", "compiled"]]
    if run.quick:
        turns = [turns[0][: 1 + on_gpu]]
    for ways, backend, (task, config) in itertools.product(turns, ("torch", "warp")[: 1 + on_gpu], tasks.items()):
        row = {"part": "trained", "task": task, "backend": backend, "N": config.n_envs}
        if not run.measured(**row, rung=ways[-1]) and run.left(SECONDS, "trained"):
            with run.caught(**row, rung=ways[-1]):
                measure(run, ways, config, row)


def measure(run: Run, ways: Sequence[str], config: PPOConfig, row: _report.Row) -> None:
    """Time some ways side by side, and write a row for each."""
    loops = {way: Loop(replace(config, **WAYS[way]), row["backend"]) for way in ways}
    calls: dict[str, Callable[[], object]] = {}
    for way, loop in loops.items():
        calls |= {way: loop.iterate, f"{way} C": loop.collect, f"{way} L": loop.learn}
    found = _report.interleaved(calls, 5, 0.01 if run.quick else 0.25)
    for way, loop in loops.items():
        times = {"collecting": found[f"{way} C"], "learning": found[f"{way} L"]}
        times["update_over_eager"] = found["eager L"] / found[f"{way} L"]
        run.add(**row, rung=way, steps_per_second=loop.steps / found[way], **times)
        loop.batcher.close()
