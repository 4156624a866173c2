"""Steps per second of CartPole alone, on one CPU thread: gymnasium's numpy version and ours, two ways. Layer 5.

    python benchmarks/sims.py [--n-envs 1024] [--rounds 7] [--sizes 64 1024 16384 262144]

Each callable takes eight steps of all environments with actions that are given. Targets at 1,024 environments: eager at
least 1x gymnasium's CartPoleVectorEnv, compiled at least 3x eager; and the cost of the eager step grows no faster than
the number of environments.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import _report
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from rlstruct.core import DictTensor
from rlstruct.sims import make

K = 8


def gymnasium_steps(n_envs: int) -> Callable[[], object]:
    """Eight steps of gymnasium's own vectorised CartPole."""
    env = CartPoleVectorEnv(n_envs)
    env.reset(seed=0)
    actions = torch.randint(0, 2, (K, n_envs), device="cpu").numpy()
    return lambda: [env.step(action) for action in actions]


def our_steps(n_envs: int, backend: str) -> Callable[[], object]:
    """Eight single steps of ours."""
    env = make("CartPole-v1", n_envs, backend=backend)
    env.reset()
    actions = [DictTensor({"action": torch.randint(0, 2, (n_envs,), device="cpu")}) for _ in range(K)]
    return lambda: [env.step(action) for action in actions]


def bytes_per_environment(n_envs: int) -> float:
    """Memory of the simulation itself, for one environment."""
    env = make("CartPole-v1", n_envs)
    env.reset()
    env.step(DictTensor({"action": torch.zeros(n_envs, dtype=torch.int64, device="cpu")}))
    return sum(value.nbytes for value in env.carry().values()) / n_envs


def ladder(n_envs: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all ways side by side: one row each, with its ratio to what its target names."""
    calls = {
        "gymnasium": gymnasium_steps(n_envs),
        "eager": our_steps(n_envs, "torch"),
        "compiled": our_steps(n_envs, "compile"),
    }
    times = _report.interleaved_rounds(
        calls, rounds, 0.2, time.process_time
    )  # one thread: other processes do not count
    targets = {"eager": ("gymnasium", 1.0), "compiled": ("eager", 3.0)}
    rows = []
    for name, seconds in times.items():
        base, target = targets.get(name, ("eager", None))
        ratio = statistics.median(a / b for a, b in zip(times[base], seconds, strict=True))
        rate = K * n_envs / statistics.median(seconds)
        row = {"row": name, "N": n_envs, "steps_per_second": rate, "ratio": ratio, "to": base, "target": target}
        cost = f"{rate / 1e6:8.2f} M steps/s  {1e9 / rate:7.1f} ns per environment and step"
        print(f"{name:18} N {n_envs:7} {cost}  {ratio:6.2f} x {base}   target {target or '-'}")
        rows.append(row)
    return rows


def growth(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Measure the eager step for several numbers of environments."""
    times = _report.interleaved({str(n): our_steps(n, "torch") for n in sizes}, rounds, 0.2, time.process_time)
    rows = []
    for n in sizes:
        cost, memory = times[str(n)] / K / n, bytes_per_environment(n)
        print(f"eager N {n:7}  {cost * 1e9:8.1f} ns per environment and step   {memory:.0f} bytes per environment")
        rows.append({"row": "eager", "N": n, "seconds_per_environment_step": cost, "bytes_per_environment": memory})
    return rows


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the ladder."""
    if (plt := _report.pyplot()) is None:
        return
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.barh([row["row"] for row in rows], [row["steps_per_second"] / 1e6 for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"million steps per second, CartPole alone, N = {rows[0]['N']}, one CPU thread")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-envs", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 1024, 16384, 262144])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(_report.machine())
    rows = ladder(arguments.n_envs, arguments.rounds)
    path = _report.write("sims", rows + growth(arguments.sizes, arguments.rounds))
    draw(rows, str(path.with_suffix(".png")))
    print(path)


if __name__ == "__main__":
    main()
