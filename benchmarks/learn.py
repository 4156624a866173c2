"""Learning benchmark: one task, seed after seed, all shown.

Run: ``python benchmarks/learn.py`` lists the tasks; ``python benchmarks/learn.py dqn_cartpole`` trains one;
``--seeds 0 1`` for some seeds, ``--jobs 2`` for two at a time (their seconds are then those of a busy machine),
``--set n_env_steps=10000`` for other settings. Nothing is selected: the final return is that of the network after the
last step, on 100 fresh episodes. A task whose settings have a ``target_return`` stops at the first evaluation that
reaches it; the final return then comes from 100 episodes that were not looked at before.

``--table classic`` trains every task of a table for as many steps as others have published, with four seeds, and
prints the table; what is written already is not trained again, and a training that was cut goes on. ``--only
ppo_cartpole`` trains some of its tasks.

Other libraries are trained with the same seeds and as many steps, on one task or on those of a table: with ``--peers
.venv-peers/bin/python`` SAC of stable-baselines3, with ``--cleanrl CHECKOUT``, too, SAC and PPO of CleanRL, all on
MuJoCo's tasks, see ``peers/mujoco_returns.py``; with ``--rejax PYTHON`` PPO, DQN and PQN of rejax on the games with
gymnax's rules, see ``peers/rejax_returns.py``.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from common import learning, published, reporting
from common.tasks import TASKS

from rlstruct.algos import ALGORITHMS
from rlstruct.algos.training.learning_curve import Curve, draw_panels

DOCS = Path(__file__).resolve().parents[1] / "docs"
PEERS = Path(__file__).parent / "peers"


def setting(words: str) -> tuple[str, Any]:
    """Turn ``name=value`` into a setting."""
    name, _, value = words.partition("=")
    return name, ast.literal_eval(value)


def draw_pages() -> None:
    """Draw the pictures of README.md and docs/algorithms/, every seed of each training, from the stored results."""
    from tables import load

    colours = [name.upper() for name in ALGORITHMS]  # in this order
    curves = {"REINFORCE": learning.curves_of(load("reinforce_cartpole")[0])}
    draw_panels({"REINFORCE on CartPole-v1": curves}, DOCS / "learning_curve.png", metric="return", ended=True)
    if found := load("connect_four_strength")[0]:
        whole = Curve(*zip(*found[0]["returns"], strict=True))
        picture = DOCS / "algorithms" / "alphazero.png"
        draw_panels({"AlphaZero on Connect Four": {"AlphaZero": [whole]}}, picture, metric="return against UCT-50")
    pages: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, task in TASKS.items():
        if rows := load(name)[0]:
            algorithm = name.partition("_")[0]
            pages[algorithm][task.about][algorithm.upper()] = learning.curves_of(rows)
    for table, entries in published.TABLES.items():
        for entry in entries:
            if rows := load(entry.name)[0]:
                task = TASKS[entry.task]
                algorithm = entry.task.partition("_")[0].upper()
                pages[f"published_{table}"][task.env or task.about][algorithm] = learning.curves_of(rows)
    for name, panels in pages.items():
        picture = DOCS / "algorithms" / f"{name}.png"
        draw_panels(panels, picture, metric="return", columns=3, ended=True, order=colours)
    for entry in published.TABLES["atari"]:
        if rows := load(entry.name)[0]:
            groups = {f"{TASKS[entry.task].about}, one core": learning.curves_over_minutes(rows)}
            picture = DOCS / "algorithms" / f"{entry.task}_minutes.png"
            draw_panels({"": groups}, picture, metric="return", ended=True, against="minutes of learning")


def train_table(name: str, only: list[str], seeds: list[int], options: argparse.Namespace) -> None:
    """Train what is missing of a table of `published.TABLES`, and print it."""
    from tables import published_table

    for entry in published.TABLES[name]:
        if only and entry.task not in only:
            continue
        task, trained = TASKS[entry.task], {row["seed"] for row in reporting.written(entry.name)}
        if missing := [seed for seed in seeds if seed not in trained]:
            learning.run_task(entry.name, task, missing, partial(published.measure, entry), jobs=options.jobs)
        train_peers(entry.name, entry.task, seeds, options)
    print("\n".join(published_table(name)))


def train_peers(name: str, task: str, seeds: list[int], options: argparse.Namespace) -> None:
    """Train the other libraries that have the task, as far as they are here, and write their results by this name."""
    interpreters = {
        "rejax": options.rejax,
        "sb3": options.peers,
        "sbx": options.sbx,
        "cleanrl": options.cleanrl and options.peers,
    }
    for library in published.peers_of(task):
        if interpreters[library]:
            script = PEERS / ("rejax_returns.py" if library == "rejax" else "mujoco_returns.py")
            words = [task.partition("_")[0], *([options.cleanrl] if library == "cleanrl" else [])]
            learning.run_peer(name, TASKS[task], seeds, (interpreters[library], script, library), words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE", dest="settings")
    parser.add_argument(
        "--table", choices=list(published.TABLES), help="train the tasks of a table of published returns"
    )
    parser.add_argument("--only", nargs="+", default=[], choices=list(TASKS), metavar="TASK", help="some of its tasks")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of the other libraries (`make peers`)")
    parser.add_argument("--cleanrl", metavar="FOLDER", help="checkout of CleanRL")
    parser.add_argument("--sbx", metavar="PYTHON", help="interpreter that has sbx")
    parser.add_argument("--rejax", metavar="PYTHON", help="interpreter that has rejax")
    parser.add_argument("--draw", action="store_true", help="only draw the pictures of README and docs from results/")
    options = parser.parse_args()
    if options.draw:
        draw_pages()
    elif options.table:
        train_table(options.table, options.only, options.seeds or [*published.SEEDS], options)
    elif options.task is None:
        for name, task in TASKS.items():
            print(f"{name:22} {task.about}, at least {task.asked() or 'nothing'}, {task.n_seeds} seeds")
    else:
        task = TASKS[options.task]
        seeds = options.seeds or task.seeds()
        measure = partial(learning.measure, task, dict(options.settings))
        learning.run_task(options.task, task, seeds, measure, jobs=options.jobs)
        train_peers(options.task, options.task, seeds, options)
