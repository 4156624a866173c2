"""The ladder on one device, from SyncVectorEnv to a policy inside a kernel and a training.

    python benchmarks/gpu.py                       everything, at most 8 minutes a part
    python benchmarks/gpu.py --minutes 4 --out DIR --resume    go on where a run with the same commit was cut
    python benchmarks/gpu.py --quick --out DIR     a look whether it runs, under 20 seconds, also without a GPU
    python benchmarks/gpu.py --parts simulation policy --device cpu

Parts, in this order: ``first_launch`` (how long Warp takes until its first kernel has run), ``targets`` (what there are
targets for, in a few sizes), ``learning`` (PPO and PQN, 4,096 environments),
``policy`` (a 64-64 actor and critic in the loop), ``simulation`` (CartPole alone, N from
1 to 2^20), ``training`` (A2C on 4,096 environments until an evaluation of 100 episodes reaches 475), ``launches``
(kernels per step), ``trained`` (PPO's steps per second with each way to run an update), ``profiling`` (the profiler,
NVML and CUDA's events).

Timings are medians of interleaved repeats after a warm-up, compilation left out. Every row is written as it comes, so a
run that is cut keeps what it has; what is measured is not measured again. An exception costs the rung that raised it,
and so does a capture or a compiler that falls back. What cannot run here (CUDA, Warp) is left out, and the file says
so. Exit code 70: CUDA broke, or a rung hung; `--resume` goes on without that rung.
"""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ladder_rungs, reporting, resumable_run
from common.learning import learning_seconds

from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos import a2c
from rlstruct.algos.minibatches import EpochConfig
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.algos.pqn import PQNConfig, PQNLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.profiling import operation, profile, read
from rlstruct.sims import make

WAYS = {
    "eager": {"graph": False}, "graph": {"graph": True}, "compiled": {"graph": False, "compile_update": True},
    "compiled, graph": {"graph": True, "compile_update": True},
}  # fmt: skip
QUICK = {"n_timesteps": 8, "n_epochs": 1, "n_minibatches": 2}  # of PPO and PQN: short updates
SECONDS = 45  # for some ways at one size, compiling included
N_PROCESSES = 8  # in the part ``profiling``
FELL_BACK = ".* slower and with equal results"  # warnings of captures and compilers; a rung would have a wrong name
NO_CUDA, NO_NVML = "there is no CUDA device", "nvidia-ml-py is not installed: pip install nvidia-ml-py"
# One of several processes: kernels of 20 microseconds, between which the host sleeps.
SHORT_KERNELS = """
import sys, time, torch
from rlstruct.profiling import operation, profile
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda._sleep(1_000_000)
start.record()
torch.cuda._sleep(1_000_000)
end.record()
torch.cuda.synchronize()
cycles = int(20e-3 * 1_000_000 / start.elapsed_time(end))  # of 20 us; the events say milliseconds
with profile(sys.argv[1], window=600):
    end = time.perf_counter() + float(sys.argv[2])
    while time.perf_counter() < end:
        with operation("kernel"):
            torch.cuda._sleep(cycles)
            torch.cuda.synchronize()
        time.sleep(0.002)
"""


class Run(resumable_run.Ladder):
    """One run of the benchmark."""

    name = "gpu"


def first_launch(run: Run) -> None:
    """Measure the time until a kernel of Warp has run: its import, its compilation or its cache, the launch."""
    if run.measured("first_launch"):
        return
    start = time.perf_counter()
    for rung in run.made("first_launch", ladder_rungs.policy_rungs(64, run.device)[-1:], N=64):
        seconds = time.perf_counter() - start
        rung.run()
        run.add(part="first_launch", rung=rung.name, N=64, seconds=seconds)


def targets(run: Run) -> None:
    """Measure the parts with targets, most valuable first."""
    sizes = [64] if run.quick else [4096]
    on_gpu = run.device.type == "cuda" and not run.quick
    # In 2^20 environments the three ways, which stay in memory for their turns, take 7 GB each.
    policy(run, [1 << 18, *sizes, 1 << 20] if on_gpu else sizes)
    simulation(run, [*sizes, 64, 1 << 20] if on_gpu else sizes)


def simulation(run: Run, sizes: Sequence[int] = ()) -> None:
    every = sizes or ([1, 64] if run.quick else [1 << n for n in range(0, 21, 2)])
    for where in run.todo("simulation", 8, ({"N": n} for n in every)):
        run.rate("simulation", ladder_rungs.simulation_rungs(where["N"], run.device), **where)
    if run.device.type == "cpu" and not sizes and not run.measured("simulation", rung="CUDA graph", N=None):
        run.add(part="simulation", rung="CUDA graph", left_out="there is no CUDA device")


def launches(run: Run) -> None:
    if run.measured("launches"):
        return
    for rung in run.made("launches", ladder_rungs.our_rungs(4096, run.device), N=4096):
        row = {"part": "launches", "rung": rung.name, "N": 4096}
        with run.caught(**row), run.limited(**row):
            counts = counted(rung, run.device)
            run.add(**row, steps=rung.steps, **counts)


def policy(run: Run, sizes: Sequence[int] = ()) -> None:
    every = [64] if run.quick else [64, 1024, 4096]
    every += [] if run.quick or run.device.type == "cpu" else [1 << 14, 1 << 16, 1 << 18, 1 << 20]
    for where in run.todo("policy", 15, ({"N": n} for n in sizes or every)):
        run.rate("policy", ladder_rungs.policy_rungs(where["N"], run.device), **where)


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
        with run.caught(part="training", **where), run.noted(part="training", **where):
            seeded = replace(config, **where)
            create_env = partial(ladder_rungs.create_simulator, device=run.device, backend="torch")
            result = a2c.train(seeded, partial(ActorCritic, 4, 2), ActorCriticAgent, create_env)
            reached = result.evaluations[-2].mean_return >= 475.0 if len(result.evaluations) > 1 else False
            seconds = learning_seconds(result)
            steps = result.env_steps
            run.add(part="training", **where, N=4096, reached=reached, seconds=seconds, env_steps=steps)


def training_loop(config: EpochConfig, backend: str) -> ladder_rungs.Loop:
    """Return a training loop of PPO or PQN without evaluations: collect, learn, publish the weights."""
    device = torch.device(config.learner_device)
    torch.manual_seed(0)
    model, agent, learner_class = (
        (QNetwork(4, 2, layer_norm=True), QAgent, PQNLearner)
        if isinstance(config, PQNConfig)
        else (ActorCritic(4, 2), ActorCriticAgent, PPOLearner)
    )
    learner = learner_class.create(model.to(device), agent, config)
    batcher = RL_Batcher(
        config.n_timesteps, agent, partial(make, "CartPole-v1", backend=backend, device=device),
        agent_args={"model": learner.model, "copy_model": True, "device": device},
        env_args={"n_envs": config.n_envs}, device=device, seed=0,
        compile_agent=config.compile_update is True and device.type == "cpu",
    )  # fmt: skip
    return ladder_rungs.Loop(batcher, device, learner)


def rate_training(run: Run, configs: Mapping[str, EpochConfig], backend: str, **row: Any) -> None:  # noqa: ANN401
    """Measure iterations of trainings side by side, and further ones that only collect or only learn.

    Args:
        run: gets the rows.
        configs: of the trainings, by name.
        backend: of the simulator.
        row: part and place.
    """
    loops: dict[str, ladder_rungs.Loop] = {}

    def make_rung(name: str) -> ladder_rungs.Rung:
        loops[name] = training_loop(configs[name], backend)
        return ladder_rungs.Rung(name, loops[name].iterate, configs[name].n_timesteps)

    made = run.made(makers=[partial(make_rung, name) for name in configs], **row)  # the second update is recorded
    rungs = [
        partial(ladder_rungs.Rung, f"{rung.name}{what}", call, rung.steps)
        for rung in made
        for loop in [loops[rung.name]]
        for what, call in (("", loop.iterate), (", collecting", loop.collect), (", learning", loop.learn))
    ]
    run.rate(makers=rungs, **row)
    for loop in loops.values():
        loop.batcher.close()


def learning(run: Run) -> None:
    """Measure PPO and PQN with learning in 4,096 environments, as graphs on a GPU: the first numbers of a training."""
    device = str(run.device)
    sizes: dict[str, Any] = {"n_envs": 64, **QUICK} if run.quick else {"n_envs": 4096, "n_timesteps": 32}
    configs = {"PPO": PPOConfig(learner_device=device, **sizes), "PQN": PQNConfig(learner_device=device, **sizes)}
    for where in run.todo("learning", 20, ({"task": name} for name in configs)):
        task = where["task"]
        rate_training(run, {task: configs[task]}, "torch", part="learning", task=task, N=configs[task].n_envs)


def trained(run: Run) -> None:
    """Measure PPO with each way to run an update, in turns; on a GPU those that compile after the others.

    Policy and critic have 64-64 units, batches 32 steps, updates 4 epochs of 4 minibatches; on the CPU there is also
    CartPole's preset (8 environments, T = 128). Collecting and learning alone are timed in further iterations.
    """
    device, on_gpu = str(run.device), run.device.type == "cuda"
    common = PPOConfig(learner_device=device, n_timesteps=32, learning_rate=0.003)
    sizes = [64] if run.quick else [4096, 1 << 16, 1 << 18] if on_gpu else [1024]
    tasks = {f"{n:,} environments": replace(common, n_envs=n, **(QUICK if run.quick else {})) for n in sizes}
    if not on_gpu and not run.quick:
        tasks["preset"] = PPOConfig(learner_device=device)
    turns = [["eager", "graph"], ["eager", "compiled", "compiled, graph"]] if on_gpu else [["eager", "compiled"]]
    if run.quick:
        turns = [turns[0][: 1 + on_gpu]]
    for ways, backend, (task, config) in itertools.product(turns, ("torch", "warp")[: 1 + on_gpu], tasks.items()):
        row = {"part": "trained", "task": task, "backend": backend, "N": config.n_envs}
        if not run.measured(**row, rung=ways[-1]) and run.left(SECONDS, "trained"):
            rate_training(run, {way: replace(config, **WAYS[way]) for way in ways}, **row)


def counted(rung: ladder_rungs.Rung, device: torch.device) -> dict[str, float]:
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


def profiling(run: Run) -> None:
    """Compare the profiler with NVML and CUDA's events: utilisation, busy share, SM-weighted share, kernels."""
    for name, measure in WORK.items():
        if run.measured("profiling", work=name):
            continue
        needs_nvml = measure is not _matrices
        if run.device.type != "cuda":
            run.add(part="profiling", work=name, left_out=NO_CUDA)
        elif needs_nvml and importlib.util.find_spec("pynvml") is None:
            run.add(part="profiling", work=name, left_out=NO_NVML)
        elif run.left(35 if measure is _short_kernels else 10, "profiling"):
            with run.caught(part="profiling", work=name), run.limited(part="profiling", work=name):
                run.add(part="profiling", work=name, **measure(run))


def _one_block(run: Run) -> dict[str, Any]:
    """A block of one thread, always busy: NVML calls that a full GPU."""
    seconds = 1.0 if run.quick else 4.0
    with tempfile.TemporaryDirectory() as folder:
        _keep_one_block_busy(run.device, 2.0)  # the driver's periods reach back
        with profile(folder, window=600.0), operation("busy"):
            _keep_one_block_busy(run.device, seconds)
        (use,) = read(folder).gpus
    found = {"nvml": use.nvml, "busy": use.busy, "weighted": use.weighted}
    met = use.nvml is not None and use.nvml >= 0.95 and use.weighted <= 0.01
    return {**found, "target": "NVML >= 0.95, weighted <= 0.01", "met": met}


def _keep_one_block_busy(device: torch.device, seconds: float) -> None:
    end = time.perf_counter() + seconds
    with torch.cuda.device(device):
        while time.perf_counter() < end:
            for _ in range(20):
                torch.cuda._sleep(10_000_000)  # clock cycles: some 6 ms
            torch.cuda.synchronize()


def _short_kernels(run: Run) -> dict[str, Any]:
    """Many processes that hardly use the GPU, which takes turns: the true share is the sum of theirs."""
    seconds = "2" if run.quick else "6"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "short_kernels.py"
        script.write_text(SHORT_KERNELS)
        folders = [Path(folder) / str(i) for i in range(N_PROCESSES)]
        started = [subprocess.Popen([sys.executable, str(script), str(one), seconds]) for one in folders]
        status = [process.wait() for process in started]
        if any(status):
            raise RuntimeError(f"processes of short kernels ended with {status}")
        uses = [use for one in folders for use in read(one).gpus]
    nvml = max((use.nvml for use in uses if use.nvml is not None), default=0.0)
    busy, of_one = sum(use.busy for use in uses), max(use.busy for use in uses)
    found = {"processes": N_PROCESSES, "nvml": nvml, "busy": busy, "busiest_process": of_one}
    return {**found, "ratio": nvml / busy, "target": "NVML >= 3 times busy", "met": nvml >= 3.0 * busy}


def _matrices(run: Run) -> dict[str, Any]:
    """Kernels one after the other without gaps: their sum is the time between two events."""
    size, count = (512, 50) if run.quick else (4096, 200)
    left = torch.randn(size, size, device=run.device)
    torch.mm(left, left)
    torch.cuda.synchronize(run.device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with tempfile.TemporaryDirectory() as folder:
        with profile(folder, window=600.0), operation("matrices"):
            start.record()
            for _ in range(count):
                torch.mm(left, left)
            end.record()
            torch.cuda.synchronize(run.device)
        (use,) = read(folder).gpus
    ratio = use.kernels / (1e-3 * start.elapsed_time(end))
    return {"kernels": use.kernels, "ratio": ratio, "target": "0.95 to 1.05", "met": abs(ratio - 1.0) <= 0.05}


WORK = {"one busy block": _one_block, "8 processes of 20 us kernels": _short_kernels, "matrices": _matrices}
"""Measurements, as functions of a run; tests/profiling/test_profiler_on_a_gpu.py takes them too."""


def summary(run: Run) -> None:
    """Compute ratios, and compare them with their targets."""

    def rate(part: str, *rungs: str, **where: int) -> float | None:
        return max(((run.best(part, rung=rung, **where) or 0.0) for rung in rungs), default=0.0) or None

    graph = [
        reporting.ratio(rate("simulation", "CUDA graph", N=n), rate("simulation", "torch eager", N=n))
        for n in (64, 256, 1024, 4096)
    ]
    fused, recorded = (rate("policy", rung, N=4096) for rung in ("Warp fused policy", "torch, batcher's CUDA graph"))
    one_by_one, vectorised = rate("simulation", "SyncVectorEnv"), rate("simulation", "torch eager", "CUDA graph")
    trained_at = {n: rate("trained", *WAYS, N=n) for n in (4096, 1 << 16, 1 << 18)}
    run.summarise(
        [
            ("graph over eager, N <= 4096", min(filter(None, graph), default=None), 4.0),
            ("policy as one kernel over one graph, N = 4096", reporting.ratio(fused, recorded), 1.1),
            ("vectorised (best N) over SyncVectorEnv (best N)", reporting.ratio(vectorised, one_by_one), 1000.0),
            ("policy in the loop, steps per second", run.best("policy"), 1e8),
            ("trained steps per second, 4,096 environments", trained_at.pop(4096), 1e6),
            ("trained steps per second, 65,536 or more", max(filter(None, trained_at.values()), default=None), 1e7),
        ]
    )


PARTS: dict[str, Callable[[Run], None]] = {
    "first_launch": first_launch, "targets": targets, "learning": learning, "policy": policy, "simulation": simulation,
    "training": training, "launches": launches, "trained": trained, "profiling": profiling,
}  # fmt: skip


def main() -> None:
    options = resumable_run.parser(__doc__, PARTS).parse_args()
    warnings.filterwarnings("error", FELL_BACK)
    run = resumable_run.begin(Run, options)
    resumable_run.measure(run, {name: PARTS[name] for name in options.parts}, summary)


if __name__ == "__main__":
    main()
