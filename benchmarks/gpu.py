"""The ladder on one device, from SyncVectorEnv to a policy inside a kernel and a training.

    python benchmarks/gpu.py                       everything, at most 8 minutes a part
    python benchmarks/gpu.py --minutes 4 --out DIR --resume    go on where a run with the same commit was cut
    python benchmarks/gpu.py --quick --out DIR     a look whether it runs, under 20 seconds, also without a GPU
    python benchmarks/gpu.py --parts simulation policy --device cpu

Parts, in this order: ``first_launch`` (how long Warp takes until its first kernel has run), ``targets`` (what there are
targets for, in a few sizes), ``policy`` (a 64-64 actor and critic in the loop), ``simulation`` (CartPole alone, N from
1 to 2^20), ``training`` (A2C on 4,096 environments until an evaluation of 100 episodes reaches 475), ``launches``
(kernels per step), ``trained`` (PPO's steps per second with each way to run an update), ``profiling`` (the profiler,
NVML and CUDA's events).

Timings are medians of interleaved repeats after a warm-up, compilation left out. Every row is written as it comes, so a
run that is cut keeps what it has; what is measured is not measured again. An exception costs the rung that raised it.
What cannot run here (CUDA, Warp) is left out, and the file says so. Exit code 70: CUDA broke, or a rung hung;
`--resume` goes on without that rung.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import _gpu_run
import _gpu_rungs
import _report
import torch
from _gpu_profiles import profiling
from _learning import learning_seconds

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import a2c
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

WAYS = {
    "eager": {"graph": False}, "graph": {"graph": True}, "compiled": {"graph": False, "compile_update": True},
    "compiled, graph": {"graph": True, "compile_update": True},
}  # fmt: skip
SECONDS = 45  # for some ways at one size, compiling included


class Run(_gpu_run.Ladder):
    """One run of the benchmark."""

    name = "gpu"


def first_launch(run: Run) -> None:
    """Measure the time until a kernel of Warp has run: its import, its compilation or its cache, the launch."""
    if run.measured("first_launch"):
        return
    start = time.perf_counter()
    for rung in run.made("first_launch", _gpu_rungs.policy_rungs(64, run.device)[-1:], N=64):
        seconds = time.perf_counter() - start
        rung.run()
        run.add(part="first_launch", rung=rung.name, N=64, seconds=seconds)


def targets(run: Run) -> None:
    """Measure the parts with targets, most valuable first."""
    sizes = [64] if run.quick else [4096]
    on_gpu = run.device.type == "cuda" and not run.quick
    policy(run, [1 << 18, *sizes] if on_gpu else sizes)
    simulation(run, [*sizes, 64, 1 << 20] if on_gpu else sizes)


def simulation(run: Run, sizes: Sequence[int] = ()) -> None:
    every = sizes or ([1, 64] if run.quick else [1 << n for n in range(0, 21, 2)])
    for where in run.todo("simulation", 8, ({"N": n} for n in every)):
        run.rate("simulation", _gpu_rungs.simulation_rungs(where["N"], run.device), **where)
    if run.device.type == "cpu" and not sizes and not run.measured("simulation", rung="CUDA graph", N=None):
        run.add(part="simulation", rung="CUDA graph", left_out="there is no CUDA device")


def launches(run: Run) -> None:
    if run.measured("launches"):
        return
    for rung in run.made("launches", _gpu_rungs.our_rungs(4096, run.device), N=4096):
        with run.caught(part="launches", rung=rung.name, N=4096):
            counts = counted(rung, run.device)
            run.add(part="launches", rung=rung.name, N=4096, steps=rung.steps, **counts)


def policy(run: Run, sizes: Sequence[int] = ()) -> None:
    every = [64] if run.quick else [64, 1024, 4096]
    every += [] if run.quick or run.device.type == "cpu" else [1 << 14, 1 << 16, 1 << 18, 1 << 20]
    for where in run.todo("policy", 15, ({"N": n} for n in sizes or every)):
        run.rate("policy", _gpu_rungs.policy_rungs(where["N"], run.device), **where)


def training(run: Run) -> None:
    """A2C on 4,096 environments: seconds until 475, evaluations not counted."""
    if run.quick:
        run.add(part="training", left_out="it takes minutes: --quick leaves it out")
        return
    device = str(run.device)
    config = a2c.A2CConfig(
        n_env_steps=6_000_000, n_envs=4096, n_timesteps=8, learning_rate=0.01, trace_decay=0.95, whiten_advantages=True,
        evaluation_interval=100_000, evaluation_episodes=100, evaluation_processes=0, evaluation_timesteps=500,
        target_return=475.0, learner_device=device, batcher_device=device, evaluation_device=device,
    )  # fmt: skip
    for where in run.todo("training", 60, ({"seed": seed} for seed in range(3))):
        with run.caught(part="training", **where):
            seeded = replace(config, **where)
            create_env = partial(_gpu_rungs.create_simulator, device=run.device, backend="torch")
            result = a2c.train(seeded, partial(ActorCritic, 4, 2), ActorCriticAgent, create_env)
            reached = result.evaluations[-2].mean_return >= 475.0 if len(result.evaluations) > 1 else False
            seconds = learning_seconds(result)
            steps = result.env_steps
            run.add(part="training", **where, N=4096, reached=reached, seconds=seconds, env_steps=steps)


def ppo_loop(config: PPOConfig, backend: str) -> _gpu_rungs.Loop:
    """Return a training loop without evaluations: collect, learn, publish the weights."""
    device = torch.device(config.learner_device)
    torch.manual_seed(0)
    learner = PPOLearner.create(ActorCritic(4, 2).to(device), ActorCriticAgent, config)
    batcher = RL_Batcher(
        config.n_timesteps, ActorCriticAgent, partial(make, "CartPole-v1", backend=backend, device=device),
        agent_args={"model": learner.model, "copy_model": True, "device": device},
        env_args={"n_envs": config.n_envs}, device=device, seed=0,
        compile_agent=config.compile_update and device.type == "cpu",
    )  # fmt: skip
    loop = _gpu_rungs.Loop(batcher, device, learner)
    for _ in range(2):  # the first update runs eagerly, the second is recorded
        loop.iterate()
    return loop


def trained(run: Run) -> None:
    """Measure PPO with each way to run an update, in turns; on a GPU those that compile after the others.

    Policy and critic have 64-64 units, batches 32 steps, updates 4 epochs of 4 minibatches; on the CPU there is also
    CartPole's preset (8 environments, T = 128). Collecting and learning alone are timed in further iterations.
    """
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
                loops = {way: ppo_loop(replace(config, **WAYS[way]), backend) for way in ways}
                rungs = [
                    partial(_gpu_rungs.Rung, f"{way}{what}", call, config.n_timesteps)
                    for way, loop in loops.items()
                    for what, call in (("", loop.iterate), (", collecting", loop.collect), (", learning", loop.learn))
                ]
                run.rate(makers=rungs, **row)
                for loop in loops.values():
                    loop.batcher.close()


def counted(rung: _gpu_rungs.Rung, device: torch.device) -> dict[str, float]:
    """Count per step: operators that Python calls, launches of the host, kernels of the device (CUDA only)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    rung.run()
    with torch.profiler.profile(activities=activities) as profile:
        rung.run()
    host, kernels = (
        [event for event in profile.events() if event.device_type == kind]
        for kind in (torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA)
    )
    called = sum(event.cpu_parent is None and event.name.startswith("aten::") for event in host)
    found = {"operators_per_step": called / rung.steps}
    if device.type == "cuda":
        launched = sum("LaunchKernel" in event.name or "GraphLaunch" in event.name for event in host)
        found |= {"launches_per_step": launched / rung.steps, "kernels_per_step": len(kernels) / rung.steps}
    return found


def summary(run: Run) -> None:
    """Compute ratios, and compare them with their targets."""

    def rate(part: str, *rungs: str, **where: int) -> float | None:
        return max(((run.best(part, rung=rung, **where) or 0.0) for rung in rungs), default=0.0) or None

    graph = [
        _report.ratio(rate("simulation", "CUDA graph", N=n), rate("simulation", "torch eager", N=n))
        for n in (64, 256, 1024, 4096)
    ]
    fused, recorded = (rate("policy", rung, N=4096) for rung in ("Warp fused policy", "torch, batcher's CUDA graph"))
    one_by_one, vectorised = rate("simulation", "SyncVectorEnv"), rate("simulation", "torch eager", "CUDA graph")
    trained_at = {n: rate("trained", *WAYS, N=n) for n in (4096, 1 << 16, 1 << 18)}
    run.summarise(
        [
            ("graph over eager, N <= 4096", min(filter(None, graph), default=None), 4.0),
            ("policy as one kernel over one graph, N = 4096", _report.ratio(fused, recorded), 1.1),
            ("vectorised (best N) over SyncVectorEnv (best N)", _report.ratio(vectorised, one_by_one), 1000.0),
            ("policy in the loop, steps per second", run.best("policy"), 1e8),
            ("trained steps per second, 4,096 environments", trained_at.pop(4096), 1e6),
            ("trained steps per second, 65,536 or more", max(filter(None, trained_at.values()), default=None), 1e7),
        ]
    )


PARTS: dict[str, Callable[[Run], None]] = {
    "first_launch": first_launch, "targets": targets, "policy": policy, "simulation": simulation,
    "training": training, "launches": launches, "trained": trained, "profiling": profiling,
}  # fmt: skip


def main() -> None:
    options = _gpu_run.parser(__doc__, PARTS).parse_args()
    run = _gpu_run.begin(Run, options)
    _gpu_run.measure(run, {name: PARTS[name] for name in options.parts}, summary)


if __name__ == "__main__":
    main()
