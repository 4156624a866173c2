"""Environment steps per second of recurrent PPO compared with CleanRL's, collecting and learning, on one core.

Run: ``CLEANRL=PATH python benchmarks/recurrent_ppo.py``, where PATH is a checkout of vwxyzjn/cleanrl. Both train on the
same environments of gymnasium, with the same numbers of steps, minibatches and epochs, a layer of 128 below a recurrent
cell of 128, and one thread. Ours is a gated recurrent unit (GRU). CleanRL's code runs with torch's GRU in place of its
LSTM, and with the LSTM.
"""

import argparse
import os
import statistics
from typing import Any

from common.contenders import Entry, Result, compete

CONTENDERS = {
    "rlstruct, eager": ("rlstruct_recurrent.py", "eager"),
    "rlstruct, compiled": ("rlstruct_recurrent.py", "compiled"),
    "CleanRL, GRU": ("cleanrl_recurrent.py", "GRU"),
    "CleanRL, LSTM": ("cleanrl_recurrent.py", "LSTM"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--n-timesteps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="about how long a turn takes")
    options = parser.parse_args()
    if "CLEANRL" not in os.environ:
        parser.error("CLEANRL names no checkout of vwxyzjn/cleanrl: run git clone, and set it to that folder.")
    task: dict[str, Any] = {
        "n_envs": options.n_envs, "n_processes": 0, "n_timesteps": options.n_timesteps,
        "environment": options.environment,
    }  # fmt: skip
    entries = [Entry(name, script, task, (word,)) for name, (script, word) in CONTENDERS.items()]
    results = compete(entries, options.rounds, options.seconds)
    print("| | steps per CPU second | per second | times CleanRL's GRU | its LSTM |\n|---|---:|---:|---:|---:|")
    for result in results:
        if result.rate is None:
            print(f"| {result.name} | {result.why} | | | |")
            continue
        rates = [1 / seconds for seconds in result.cpus]
        cells = [f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})", f"{result.rate:,.0f}"]
        cells += [times(result, other) for other in results[2:]]
        print(f"| {result.name} | {' | '.join(cells)} |")


def times(one: Result, other: Result) -> str:
    """Return how many times as many steps one contender takes in a second of CPU: a ratio of medians."""
    return f"{statistics.median(other.cpus) / statistics.median(one.cpus):.2f}" if other.rate else ""


if __name__ == "__main__":
    main()
