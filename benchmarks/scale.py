"""Environment steps per second of one learner and of two, of the same PPO: ``python benchmarks/scale.py``.

The trainings take turns. ``same`` shares the environments of one learner between two, ``double`` gives each learner as
many as the one has. Needs two idle cores, and takes some two minutes. Rows for GPUs are run where there is one: all
learners on the first GPU, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from _report import machine, verdict, write

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.ppo import PPOConfig, train
from rlstruct.algos.training import TrainingLoop
from rlstruct.sims import make

TARGET = 1.8
HIDDEN = (256, 256)
N_ENVS = 64
N_WARM = 2  # updates before the clock starts: code is compiled in them


def create_env(n_envs: int, seed: int, device: str = "cpu") -> Any:  # noqa: ANN401 - a simulator
    """Make the environments, where the batcher is."""
    return make("CartPole-v1", n_envs, seed, auto_reset=True, device=device)


def create_model() -> ActorCritic:
    """Make a network whose gradients are worth sharing."""
    return ActorCritic(4, 2, hidden=HIDDEN)


class Timed:
    """Notes when each update of a training in this process ends."""

    def __init__(self) -> None:
        """Wrap the loop's iteration."""
        self.ends: list[tuple[float, int]] = []
        iterate = TrainingLoop._iterate

        def timed(loop: TrainingLoop) -> None:
            iterate(loop)
            if loop.config.learner_device != "cpu":
                torch.cuda.synchronize()
            self.ends.append((time.perf_counter(), loop.env_steps))

        TrainingLoop._iterate = timed  # type: ignore[method-assign]

    def rate(self) -> float:
        """Return the environment steps per second of the last training, without its first updates."""
        (start, before), (end, after) = self.ends[N_WARM - 1], self.ends[-1]
        self.ends.clear()
        return (after - before) / (end - start)


def settings(n_learners: int, n_envs: int, n_updates: int, device: str) -> PPOConfig:
    """Return the settings of a training of so many updates."""
    places: dict[str, Any] = dict.fromkeys(("learner_device", "batcher_device", "evaluation_device"), device)
    return PPOConfig(
        n_env_steps=n_updates * n_envs * 128, n_envs=n_envs, n_learners=n_learners, evaluation_processes=0,
        evaluation_episodes=1, evaluation_interval=10**9, **places,
    )  # fmt: skip


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="trainings of each kind, at least 5")
    parser.add_argument("--updates", type=int, default=12, help="of each training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed, device = Timed(), "cuda:0" if torch.cuda.is_available() else "cpu"
    counts = (2,) if device == "cpu" else (2, 4)
    work = {"one": (1, N_ENVS)}
    work |= {f"same, {k} learners": (k, N_ENVS) for k in counts}
    work |= {f"double, {k} learners": (k, k * N_ENVS) for k in counts}
    rates: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(max(5, options.rounds)):
        for name, (k, n_envs) in work.items():
            train(settings(k, n_envs, options.updates + N_WARM, device), create_model, ActorCriticAgent, create_env)
            rates[name].append(timed.rate())
    print(machine())
    one = statistics.median(rates["one"])
    rows: list[dict[str, Any]] = []
    for name, found in rates.items():
        ratio = statistics.median(found) / one
        rows.append({"work": name, "device": device, "steps_per_s": statistics.median(found), "ratio": ratio})
        rows[-1]["rounds_steps_per_s"] = found
        told = verdict(ratio, TARGET) if name.endswith("2 learners") and device == "cpu" else ""
        print(f"{name:22}{rows[-1]['steps_per_s']:12,.0f} steps/s {ratio:6.2f} x one   {told}")
    why = {"NCCL between GPUs": "it takes two GPUs", "learners on one GPU under MPS": "it is not written"}
    why |= {} if device != "cpu" else {"learners on one GPU, in turns": "there is no CUDA device"}
    for name, reason in why.items():
        rows.append({"work": name, "not_run": reason})
        print(f"{name:30} not run: {reason}")
    print(f"written to {write('scale', rows)}")


if __name__ == "__main__":
    main()
