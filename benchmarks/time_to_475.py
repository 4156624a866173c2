"""CartPole-v1 beside stable-baselines3: seconds until an evaluation over 100 episodes reaches 475.

Run: ``python benchmarks/time_to_475.py`` after ``make peers``; about a quarter of an hour, half of it with ``--jobs 2``
on two idle cores. Both sides step the same environments, ``gymnasium.make("CartPole-v1")`` one after the other, as many
as their settings say; 1,024 of our simulators are other environments, and have rows apart. Each training has a process
of its own with one thread; the contenders take turns, seed by seed. Start-up is not counted, and nobody's clock runs
during evaluations. stable-baselines3 trains with the settings that rl-baselines3-zoo publishes for CartPole-v1, ours
with those of benchmarks/_tasks.py. A training that never reaches 475 counts with all its time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _report
import torch
from _learning import learning_seconds
from _tasks import TASKS

HERE = Path(__file__).parent
TARGET = 475.0
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"


@dataclass(frozen=True)
class Contender:
    """One line of the table: who, on what, evaluated how.

    Attributes:
        name: as the table says it.
        algorithm: ``a2c`` or ``dqn``.
        task: one of ours in `_tasks.TASKS`; None for stable-baselines3.
        kind: how the policy is evaluated, with actions that are ``drawn`` or ``greedy``.
        apart: whether its environments are others, so that it is not compared.
    """

    name: str
    algorithm: str
    task: str | None
    kind: str
    apart: bool = False


CONTENDERS = (
    Contender("stable-baselines3 A2C", "a2c", None, "drawn"),
    Contender("rlstruct A2C", "a2c", "a2c_cartpole_python", "drawn"),
    Contender("stable-baselines3 A2C", "a2c", None, "greedy"),
    Contender("rlstruct A2C", "a2c", "a2c_cartpole_python", "greedy"),
    Contender("stable-baselines3 DQN", "dqn", None, "greedy"),
    Contender("rlstruct DQN", "dqn", "dqn_cartpole_python", "greedy"),
    Contender("rlstruct A2C, 1,024 simulators", "a2c", "a2c_cartpole_1024", "drawn", apart=True),
    Contender("rlstruct A2C, 1,024 simulators", "a2c", "a2c_cartpole_1024", "greedy", apart=True),
)


def train_ours(task: str, kind: str, seed: int) -> dict[str, Any]:
    """Train with one of our tasks in this process; returns what ``peers/sb3_training.py`` writes."""
    torch.set_num_threads(1)
    settings = {"target_return": TARGET, "evaluation_stochastic": kind == "drawn"}
    result = TASKS[task].train(seed=seed, **settings)
    seconds = learning_seconds(result)
    last = result.evaluations[-2]  # the one behind it is played after the end
    reached = {kind: {"seconds": seconds, "env_steps": last.env_steps}} if last.mean_return >= TARGET else {}
    returns = {one.env_steps: round(one.mean_return, 1) for one in result.evaluations[:-1]}
    return {"seconds": seconds, "env_steps": result.env_steps, "reached": reached, "returns": {kind: returns}}


def measure(seeds: Sequence[int], python: Path, contenders: Sequence[Contender], jobs: int) -> list[dict[str, Any]]:
    """Let everybody train with every seed, in turns; returns one row for each contender and seed."""
    turns = [(contender, seed) for seed in seeds for contender in contenders]
    commands = [_command(contender, seed, python) for contender, seed in turns]
    once = list(dict.fromkeys(commands))  # one training of theirs is evaluated in both ways
    with ThreadPoolExecutor(jobs) as pool:
        answers = dict(zip(once, pool.map(_ask, once), strict=True))
    return [_row(*turn, answers[command]) for turn, command in zip(turns, commands, strict=True)]


def _command(contender: Contender, seed: int, python: Path) -> tuple[str, ...]:
    if contender.task is None:
        return str(python), str(HERE / "peers" / "sb3_training.py"), contender.algorithm, str(seed)
    return sys.executable, __file__, "--one", contender.task, contender.kind, str(seed)


def _row(contender: Contender, seed: int, answer: dict[str, Any]) -> dict[str, Any]:
    reached = answer["reached"].get(contender.kind)
    return {
        "name": contender.name,
        "evaluation": contender.kind,
        "seed": seed,
        "reached": reached is not None,
        "seconds": round((reached or answer)["seconds"], 2),
        "env_steps": (reached or answer)["env_steps"],
        "returns": answer["returns"][contender.kind],
        "versions": answer.get("versions", {}),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the seconds of all seeds, and their ratio to stable-baselines3's where the environments are the same."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"| trained by | judged | {' | '.join(f'seed {seed}' for seed in seeds)} | mean s | ours / theirs |",
        f"|---|---|{'---:|' * (len(seeds) + 2)}",
    ]
    theirs = 0.0
    for contender in CONTENDERS:
        own = [row for row in rows if (row["name"], row["evaluation"]) == (contender.name, contender.kind)]
        if not own:
            continue
        mean = statistics.fmean(row["seconds"] for row in own)
        theirs = mean if contender.task is None else theirs
        ratio = "" if contender.apart or contender.task is None else f"{mean / theirs:.2f}"
        cells = " | ".join(_words(row) for row in sorted(own, key=lambda row: row["seed"]))
        lines.append(f"| {contender.name} | {contender.kind} | {cells} | {mean:.1f} | {ratio} |")
    return "\n".join(lines)


def _words(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.1f}" + ("" if row["reached"] else " (never)")


def _ask(command: tuple[str, ...]) -> dict[str, Any]:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    print(f"done: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--peers", type=Path, default=PEERS, help="interpreter that has stable-baselines3")
    parser.add_argument("--algorithms", nargs="+", default=["a2c", "dqn"])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, at most one for each idle core")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "KIND", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train_ours(options.one[0], options.one[1], int(options.one[2]))))
        return
    if not options.peers.exists():
        raise SystemExit(f"{options.peers} does not exist: run make peers, or name another one with --peers.")
    contenders = [one for one in CONTENDERS if one.algorithm in options.algorithms]
    rows = measure(options.seeds, options.peers, contenders, options.jobs)
    print(table(rows))
    print(f"\nMachine: {_report.machine()}\nWritten: {_report.write('time_to_475', rows)}")


if __name__ == "__main__":
    main()
