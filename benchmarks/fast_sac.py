"""Environment steps and CPU seconds that SAC takes to a return: 4 environments, 1,024, and 1,024 without each option.

Run: ``python benchmarks/fast_sac.py``; ``--seeds 100 101`` for other seeds, ``--only "1,024"`` for rows whose name
contains these words. Simulators of torch, one thread. The target is the mean return of 100 episodes with the mean
actions; the seconds are those of collecting and learning, without the evaluations. Rows of other runs at this commit
are kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from common import reporting
from common.reporting import Row

from rlstruct import sims
from rlstruct.agents import SoftActorCritic, SquashedGaussianAgent
from rlstruct.algos import Callback, sac
from rlstruct.algos.training.callbacks import TrainingContext
from rlstruct.algos.training.presets import PRESETS, Preset
from rlstruct.engine.mixed_precision import why_not_bfloat16

PLAIN, FAST = "4 environments", "1,024 environments"
TASKS: dict[str, tuple[tuple[Any, ...], float]] = {  # sizes of the network, and the return asked for
    "Pendulum-v1": ((3, (-2.0,), (2.0,)), -200.0),
    "MountainCarContinuous-v0": ((2, (-1.0,), (1.0,)), 90.0),
}


class CpuSeconds(Callback):
    """CPU time of collecting and learning."""

    seconds = mark = 0.0

    def on_start(self, context: TrainingContext) -> None:
        self.mark = time.process_time()

    def on_update(self, context: TrainingContext) -> None:
        self.seconds += time.process_time() - self.mark
        self.mark = time.process_time()

    def on_evaluation(self, context: TrainingContext) -> None:
        self.mark = time.process_time()


def variants(env: str) -> dict[str, Preset]:
    """Return presets by name: SAC with 4 environments, the recipe, and the recipe with one option changed."""
    plain, fast = PRESETS["sac", env], PRESETS["sac", f"{env}-1024"]
    if env != "Pendulum-v1":
        return {
            PLAIN: plain,
            FAST: fast,
            "… with new noise at every step": changed(fast, hold_noise=False),
        }
    batches = "n_env_steps", "n_envs", "n_timesteps", "n_updates", "batch_size", "replay_capacity", "learning_starts"
    mean_return = {name: value for name, value in fast.network.items() if name not in ("n_atoms", "value_range")}
    fast = changed(fast, evaluation_interval=2_048)
    found = {
        PLAIN: changed(plain, n_env_steps=30_000, evaluation_interval=512),
        "4 environments with the options of 1,024": changed(
            fast, **{name: getattr(plain.config, name) for name in batches}, evaluation_interval=512
        ),
        FAST: fast,
        "… but the other settings of 4 environments": changed(
            plain, evaluation_interval=2_048, **{name: getattr(fast.config, name) for name in batches}
        ),
        "… without layer norm": Preset(fast.config, {**fast.network, "layer_norm": False}),
        "… critics of the mean return": Preset(fast.config, mean_return),
        "… the lower of two critics": changed(fast, critic_reduction="min"),
        "… returns of one step": changed(fast, n_step=1),
        "… without weight decay": changed(fast, weight_decay=0.0),
        "… half as many gradient steps": changed(fast, n_updates=fast.config.n_updates // 2),
        "… and twice as many samples in each": changed(
            fast, n_updates=fast.config.n_updates // 2, batch_size=2 * fast.config.batch_size
        ),
    }
    if not why_not_bfloat16(torch.device("cpu")):
        found["… in bfloat16"] = changed(fast, precision="bfloat16")
    return found


def changed(preset: Preset, **settings: Any) -> Preset:  # noqa: ANN401 - those of a configuration
    """Return a preset with other settings."""
    return Preset(replace(preset.config, **settings), preset.network)


def measure(env: str, name: str, preset: Preset, seed: int) -> Row:
    """Train until an evaluation reaches the target."""
    sizes, target = TASKS[env]
    clock = CpuSeconds()
    config = replace(preset.config, seed=seed, threads=1, target_return=target, evaluation_episodes=100)
    create_model: Callable[[], Any] = partial(SoftActorCritic, *sizes, **preset.network)
    found = sac.train(config, create_model, SquashedGaussianAgent, partial(sims.make, env), callbacks=[clock])
    reached = [one.env_steps for one in found.evaluations if one.mean_return >= target]
    return {
        "env": env, "name": name, "seed": seed, "target": target, "steps": reached[0] if reached else None,
        "env_steps": found.env_steps, "cpu_seconds": round(clock.seconds, 1),
        "final_return": round(found.after.mean_return, 1),
    }  # fmt: skip


def table(rows: list[Row]) -> list[str]:
    """Return a line for each task and variant: all seeds."""
    lines = []
    for (env, name), group in groupby(rows, key=lambda row: (row["env"], row["name"])):
        some = list(group)
        steps = ["never" if row["steps"] is None else f"{row['steps'] / 1000:.0f}k" for row in some]
        seconds = [f"{row['cpu_seconds']:.1f}" for row in some]
        middle = f"{statistics.median(row['cpu_seconds'] for row in some):.1f}"
        median = middle if "never" in steps else f"**{middle}**"
        returns = [f"{row['final_return']:.0f}" for row in some]
        seeds = ", ".join(str(row["seed"]) for row in some)
        lines.append([env, name, seeds, ", ".join(steps), f"{median} ({', '.join(seconds)})", ", ".join(returns)])
    head = "task | SAC with | seeds | environment steps to the target | CPU seconds: median (seeds) | return after it"
    return reporting.table(head, lines, 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202])
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    order = {(env, name): (i, j) for i, env in enumerate(TASKS) for j, name in enumerate(variants(env))}
    known = {(row["env"], row["name"], row["seed"]): row for row in reporting.written("fast_sac")}
    for env in TASKS:
        for seed in options.seeds:  # every variant in turn, so that a busy machine is busy for all
            for name, preset in variants(env).items():
                if options.only in name:
                    known[env, name, seed] = measure(env, name, preset, seed)
                    print(known[env, name, seed], flush=True)
                    done = sorted(known.values(), key=lambda row: (order[row["env"], row["name"]], row["seed"]))
                    reporting.write("fast_sac", done)
    print("\n".join(table(reporting.written("fast_sac"))))
