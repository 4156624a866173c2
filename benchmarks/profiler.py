"""Is the profiler right, what does it cost, and what does it find? Less than eight minutes on two cores. Layer 6.

    python benchmarks/profiler.py [--parts accuracy off transitions] [--repeats 5] [--steps 1.0]

- ``accuracy``: REINFORCE, A2C, DQN and PPO on CartPole, in one process and in two, trained with and without a profile
  in turn, from the same seed, so that both do the same. The seconds of the iterations that the profile reports,
  corrected, should be those of a run without. The costs are calibrated by short reruns of a training in one process,
  and used for both. The same profiles say which share of an iteration the environment takes.
- ``off``: what an operation costs while nobody profiles, as a share of a step.
- ``transitions``: how often Python calls torch in a step of collecting: eager, compiled, and as a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
from _report import interleaved, machine, result_path, verdict, write

from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos import a2c, dqn, ppo, reinforce
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.profiling import Costs, calibrate, operation, profile, read
from rlstruct.sims import make

N_ENVS = 8
LEARNING = ("replay", "loss", "backward", "optimiser", "replay buffer")


def restarting(n_envs: int, seed: int) -> GymEnvInf:
    """Environments for all algorithms but REINFORCE."""
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def episodic(n_envs: int, seed: int) -> GymEnv:
    """Environments that stand still at the end of an episode."""
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def actor_critic() -> ActorCritic:
    """The network of the on-policy algorithms."""
    return ActorCritic(n_inputs=4, n_actions=2)


def q_network() -> QNetwork:
    """The network of DQN."""
    return QNetwork(n_inputs=4, n_actions=2)


# Environment steps for about a second on an idle machine.
TASKS: dict[str, tuple[Any, Any, Callable[[], torch.nn.Module], Any, Any, int]] = {
    "reinforce": (reinforce, reinforce.ReinforceConfig, actor_critic, ActorCriticAgent, episodic, 24_000),
    "a2c": (a2c, a2c.A2CConfig, actor_critic, ActorCriticAgent, restarting, 24_000),
    "dqn": (dqn, dqn.DQNConfig, q_network, QAgent, restarting, 3_000),
    "ppo": (ppo, ppo.PPOConfig, actor_critic, ActorCriticAgent, restarting, 10_000),
}


def train(name: str, n_processes: int, scale: float) -> float:
    """Train, and return the seconds of the loop."""
    module, kind, create_model, create_agent, create_env, n_steps = TASKS[name]
    config = kind(
        n_env_steps=int(scale * n_steps),
        n_envs=N_ENVS,
        n_processes=n_processes,
        evaluation_processes=0,
        evaluation_episodes=1,
        evaluation_step_limit=10_000,
        evaluation_interval=10**9,
    )
    seconds: float = module.train(config, create_model, create_agent, create_env).seconds
    return seconds


def profiled(name: str, n_processes: int, scale: float, costs: Costs) -> dict[str, float]:
    """Train with a profile of the whole run, and return what it says of the iterations, in seconds."""
    folder = Path(tempfile.mkdtemp())
    try:
        with profile(folder, window=3600.0):
            wall = train(name, n_processes, scale)
        main, *workers = read(folder, costs).processes
        collecting = workers or [main]
        rows = [row for row in main.rows if "iteration" in row.path]

        def seconds(processes: list[Any], *names: str) -> float:
            """Corrected seconds of operations with all that is nested in them, the evaluation left out."""
            rows = [row for one in processes for row in one.rows if row.phase == "training"]
            return sum(float(row.corrected.sum()) for row in rows if set(names) & set(row.path))

        return {
            "wall": wall,
            "measured": main.inclusive("iteration", corrected=False),
            "corrected": main.inclusive("iteration"),
            **{name: seconds(collecting, name) for name in ("environment", "simulator", "agent", "copy")},
            "learning": seconds([main], *LEARNING),
            "operators": sum(float(row.corrected.reshape(2, 4).sum(0)[1]) for row in rows),
        }
    finally:
        shutil.rmtree(folder)


def measure_accuracy(repeats: int, scale: float) -> list[dict[str, Any]]:
    """Compare trainings with and without a profile."""
    rows = []
    for name in TASKS:
        train(name, 0, 0.1)  # DQN learns from its 1,000th step on
        costs = calibrate(5, lambda name=name: train(name, 0, 0.4 if name == "dqn" else 0.1))  # type: ignore[misc]
        each = f"an operation {1e6 * costs.operation:.2f} us, an operator {1e6 * costs.operator:.2f} us"
        print(f"{name}: noting {each}", flush=True)
        for n_processes in (0, 1):
            train(name, n_processes, 0.1)
            plain, found = [], []
            for _ in range(repeats):
                plain.append(train(name, n_processes, scale))
                found.append(profiled(name, n_processes, scale, costs))
            median = {key: statistics.median(one[key] for one in found) for key in found[0]}
            clean = statistics.median(plain)
            bias, raw = median["corrected"] / clean - 1.0, median["measured"] / clean - 1.0
            print(
                f"{name:9} {1 + n_processes} process(es): {clean:.3f} s without a profile; "
                f"measured {100 * raw:+.1f} %, corrected {100 * bias:+.1f} % "
                f"({verdict(abs(bias), 0.05, at_most=True)}, "
                f"{'closer' if abs(bias) < abs(raw) else 'NOT closer'}); environment "
                f"{100 * median['environment'] / median['corrected']:.0f} % of an iteration, of which gymnasium "
                f"{100 * median['simulator'] / median['corrected']:.0f} %",
                flush=True,
            )
            rows.append(
                {
                    **{"part": "accuracy", "algorithm": name, "processes": 1 + n_processes, "repeats": repeats},
                    **{"plain_seconds": plain, "plain": clean, "bias": bias, "uncorrected_bias": raw, **median},
                }
            )
    return rows


def measure_off() -> list[dict[str, Any]]:
    """Time operations that nobody listens to, beside a step of collecting."""

    def many() -> None:
        for _ in range(1000):
            with operation("nothing"):
                pass

    def empty() -> None:
        for _ in range(1000):
            pass

    times = interleaved({"operation": many, "nothing": empty})
    each = (times["operation"] - times["nothing"]) / 1000
    rows = []
    for n_envs in (1, N_ENVS):
        with batcher(n_envs) as collecting:
            step = interleaved({"step": lambda made=collecting: collect(made)}, seconds=0.2)["step"] / 32
        share = each / step  # of the operations in a step one is no clock that ran before: that of the simulator
        print(
            f"{n_envs} environments: {1e9 * each:.0f} ns an operation, {verdict(share, 0.01, at_most=True)} of a step"
        )
        rows.append({"part": "off", "n_envs": n_envs, "operation": each, "step": step, "share": share})
    return rows


def batcher(n_envs: int, **settings: Any) -> RL_Batcher:  # noqa: ANN401 - passed on
    """Return a batcher on CartPole that has warmed up."""
    settings = {"create_env": restarting, **settings}
    create_env = settings.pop("create_env")
    made = RL_Batcher(
        32,
        ActorCriticAgent,
        create_env,
        agent_args={"model": actor_critic(), "device": settings.get("device", "cpu")},
        env_args={"n_envs": n_envs, **settings.pop("env_args", {})},
        seed=0,
        **settings,
    )
    made.reset()
    for _ in range(3):
        collect(made)
    return made


def collect(made: RL_Batcher) -> None:
    """Collect a batch."""
    made.execute()
    made.get()


def measure_transitions() -> list[dict[str, Any]]:
    """Count how often Python calls torch, and CUDA, in a step."""
    cuda = torch.cuda.is_available()
    kinds: dict[str, dict[str, Any]] = {
        "eager": {},
        "compiled": {"compile_agent": True},
    }
    if cuda:
        on_gpu = {"create_env": lambda **given: make("CartPole-v1", **given), "device": "cuda:0"}
        on_gpu["env_args"] = {"device": "cuda:0"}
        kinds |= {"eager on CUDA": {**on_gpu, "graph": False}, "graph on CUDA": on_gpu}
    else:
        print("CUDA graph: not run, there is no CUDA device")
    rows = []
    for name, settings in kinds.items():
        folder = Path(tempfile.mkdtemp())
        with batcher(N_ENVS, **settings) as made:
            with profile(folder, window=3600.0):
                for _ in range(10):
                    collect(made)
            (main,) = read(folder, Costs()).processes
        shutil.rmtree(folder)
        moves = sum(row.transitions for row in main.rows) / 320
        print(f"{name}: {moves[0, 1]:.1f} times from Python to torch in a step, {moves[:, 3].sum():.1f} times to CUDA")
        rows.append({"part": "transitions", "kind": name, "to_torch": moves[0, 1], "to_cuda": float(moves[:, 3].sum())})
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the shares of an iteration in one process, and the bias with and without correction."""
    import matplotlib.pyplot as plt

    accuracy = [row for row in rows if row["part"] == "accuracy"]
    alone = [row for row in accuracy if row["processes"] == 1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    bottom = [0.0] * len(alone)
    for name, color in zip(
        ("environment", "agent", "copy", "learning"), ("#55a868", "#4c72b0", "#8172b3", "#dd8452"), strict=True
    ):
        shares = [100 * row[name] / row["corrected"] for row in alone]
        left.bar([row["algorithm"] for row in alone], shares, bottom=bottom, label=name, color=color)
        bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
    left.set_ylabel("% of an iteration")
    left.set_title("Where the time goes, one process", fontsize=10)
    left.legend(fontsize=8)
    names = [f"{row['algorithm']}\n{row['processes']}" for row in accuracy]
    places = range(len(names))
    right.bar(
        [p - 0.2 for p in places],
        [100 * row["uncorrected_bias"] for row in accuracy],
        0.4,
        label="measured",
        color="#c8c8c8",
    )
    right.bar(
        [p + 0.2 for p in places], [100 * row["bias"] for row in accuracy], 0.4, label="corrected", color="#4c72b0"
    )
    right.axhspan(-5, 5, color="#55a868", alpha=0.2)
    right.set_xticks(list(places), names, fontsize=8)
    right.set_ylabel("% more than without a profile")
    right.set_title("One and two processes; the band is 5 %", fontsize=10)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("accuracy", "off", "transitions")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=float, default=1.0, help="times the environment steps of a training")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    print(json.dumps(machine()), flush=True)
    rows: list[dict[str, Any]] = []
    if "accuracy" in options.parts:
        rows += measure_accuracy(options.repeats, options.steps)
    if "off" in options.parts:
        rows += measure_off()
    if "transitions" in options.parts:
        rows += measure_transitions()
    print(f"{time.perf_counter() - begun:.0f} s")
    if not options.dry:
        print(write("profiler", rows))
        if "accuracy" in options.parts:
            draw(rows, result_path("profiler").with_suffix(".png"))


if __name__ == "__main__":
    main()
