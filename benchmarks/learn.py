"""Learning benchmark: one task, seed after seed, all shown.

Run: ``python benchmarks/learn.py`` lists the tasks; ``python benchmarks/learn.py dqn_cartpole`` trains one;
``--seeds 0 1`` for some seeds, ``--jobs 2`` for two at a time (their seconds are then those of a busy machine),
``--set n_env_steps=10000`` for other settings. Nothing is selected: the final return is that of the network after the
last step, on 100 fresh episodes. A task whose settings have a ``target_return`` stops at the first evaluation that
reaches it; the final return then comes from 100 episodes that were not looked at before.
"""

from __future__ import annotations

import argparse
import ast
from typing import Any

import _learning
from _tasks import TASKS


def setting(words: str) -> tuple[str, Any]:
    """Turn ``name=value`` into a setting."""
    name, _, value = words.partition("=")
    return name, ast.literal_eval(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE", dest="settings")
    options = parser.parse_args()
    if options.task is None:
        for name, task in TASKS.items():
            print(f"{name:22} {task.about}, at least {task.asked() or 'nothing'}, {task.n_seeds} seeds")
    else:
        task = TASKS[options.task]
        _learning.run_task(options.task, task, options.seeds or task.seeds(), dict(options.settings), options.jobs)
