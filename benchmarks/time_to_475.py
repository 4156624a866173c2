"""CartPole-v1 compared with CleanRL and stable-baselines3: seconds until an evaluation over 100 episodes reaches 475.

Run: ``python benchmarks/time_to_475.py --cleanrl PATH`` after ``make peers``, where PATH is a checkout of
vwxyzjn/cleanrl. On an idle core ``--algorithms ppo`` takes about 15 minutes and all of them half an hour; on two, with
``--jobs 2``, half of that. Both sides step the same environments, ``gymnasium.make("CartPole-v1")`` one after the
other, as many as their settings say; 1,024 of our simulators are other environments, and have rows apart. Each training
has its own process with one thread; the contenders take turns, seed by seed, and rows are written as they come.
Start-up is not counted, compiling (with what Inductor's cache on disk holds) has its own column, and no
clock runs during evaluations, of which all contenders of an algorithm have as many. CleanRL trains with the settings
that its script has, stable-baselines3 with those that rl-baselines3-zoo publishes for CartPole-v1, ours with those of
benchmarks/common/tasks.py. A training that does not reach 475 counts with all its time; CleanRL's, which is stopped
after 200,000 steps, so counts with less than it needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import reporting
from common.contenders import PEERS_PYTHON
from common.learning import learning_seconds
from common.tasks import TASKS

from rlstruct.algos import a2c, dqn, ppo
from rlstruct.engine.compiled import Compiled

HERE = Path(__file__).parent
TARGET = 475.0


@dataclass(frozen=True)
class Contender:
    """One line of the table: who, on what, evaluated how."""

    name: str  # as the table says it
    algorithm: str  # ``a2c``, ``dqn`` or ``ppo``
    task: str | None  # one of ours in `common.tasks.TASKS`; None for peers
    kind: str  # how the policy is evaluated, with actions that are ``sampled`` or ``greedy``
    apart: bool = False  # its environments are others, so that it is not compared
    compiled: bool = False  # TorchInductor compiles agent and update


CLEANRL = "CleanRL PPO"
CONTENDERS = (
    Contender(CLEANRL, "ppo", None, "sampled"),
    Contender("stable-baselines3 PPO", "ppo", None, "sampled"),
    Contender("rlstruct PPO", "ppo", "ppo_cartpole_python", "sampled"),
    Contender("rlstruct PPO, compiled", "ppo", "ppo_cartpole_python", "sampled", compiled=True),
    Contender("rlstruct PPO, 1,024 simulators", "ppo", "ppo_cartpole_1024", "sampled", apart=True),
    Contender("stable-baselines3 A2C", "a2c", None, "sampled"),
    Contender("rlstruct A2C", "a2c", "a2c_cartpole_python", "sampled"),
    Contender("rlstruct A2C, compiled", "a2c", "a2c_cartpole_python", "sampled", compiled=True),
    Contender("stable-baselines3 A2C", "a2c", None, "greedy"),
    Contender("rlstruct A2C", "a2c", "a2c_cartpole_python", "greedy"),
    Contender("stable-baselines3 DQN", "dqn", None, "greedy"),
    Contender("rlstruct DQN", "dqn", "dqn_cartpole_python", "greedy"),
    Contender("rlstruct DQN, compiled", "dqn", "dqn_cartpole_python", "greedy", compiled=True),
    Contender("rlstruct A2C, 1,024 simulators", "a2c", "a2c_cartpole_1024", "sampled", apart=True),
    Contender("rlstruct A2C, 1,024 simulators", "a2c", "a2c_cartpole_1024", "greedy", apart=True),
)


class Stopwatch:
    """Adds up the seconds of calls of a method of a class."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, inner = 0.0, getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def train_ours(task: str, kind: str, seed: int, compiled: bool) -> dict[str, Any]:
    """Train with one of our tasks in this process; returns what ``peers/training.py`` writes."""
    torch.set_num_threads(1)
    algorithm = {"ppo": ppo, "a2c": a2c, "dqn": dqn}[task.split("_")[0]]
    learning, compiling = Stopwatch(algorithm.Learner, "update"), Stopwatch(Compiled, "prepare")
    settings: dict[str, Any] = {"target_return": TARGET, "evaluation_stochastic": kind == "sampled"}
    result = TASKS[task].train(seed=seed, compile_agent=compiled, compile_update=compiled, **settings)
    seconds = learning_seconds(result) - compiling.seconds
    last = result.evaluations[-2]  # the one behind it is played after the end
    reached = {kind: {"seconds": seconds, "env_steps": last.env_steps}} if last.mean_return >= TARGET else {}
    returns = {one.env_steps: round(one.mean_return, 1) for one in result.evaluations[:-1]}
    return {
        "seconds": seconds, "learning": learning.seconds, "compiling": compiling.seconds,
        "env_steps": result.env_steps, "reached": reached, "returns": {kind: returns},
    }  # fmt: skip


def measure(
    seeds: Sequence[int], python: Path, cleanrl: Path | None, contenders: Sequence[Contender], jobs: int
) -> list[dict[str, Any]]:
    """Let everybody train with every seed, in turns; returns one row for each contender and seed.

    They are written as they come, next to what the file of this commit says about other contenders and seeds.
    """
    turns = [(contender, seed) for seed in seeds for contender in contenders]
    commands = [_command(contender, seed, python, cleanrl) for contender, seed in turns]
    once = list(dict.fromkeys(commands))  # one training of theirs is evaluated in both ways
    answers: dict[tuple[str, ...], dict[str, Any]] = {}
    measured = {(one.name, one.kind, seed) for one, seed in turns}
    before = reporting.written("time_to_475")
    others = [row for row in before if (row["name"], row["evaluation"], row["seed"]) not in measured]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for command, answer in zip(once, pool.map(_ask, once), strict=True):
            answers[command] = answer
            rows = [_row(*turn, answers[key]) for turn, key in zip(turns, commands, strict=True) if key in answers]
            reporting.write("time_to_475", [*others, *rows])
    return [*others, *rows]


def _command(contender: Contender, seed: int, python: Path, cleanrl: Path | None) -> tuple[str, ...]:
    if contender.task is None:
        who = ("cleanrl", str(seed), str(cleanrl)) if contender.name == CLEANRL else (contender.algorithm, str(seed))
        return str(python), str(HERE / "peers" / "training.py"), *who
    how = "compiled" if contender.compiled else "eager"
    return sys.executable, __file__, "--one", contender.task, contender.kind, str(seed), how


def _row(contender: Contender, seed: int, answer: dict[str, Any]) -> dict[str, Any]:
    reached = answer["reached"].get(contender.kind)
    return {
        "name": contender.name, "evaluation": contender.kind, "seed": seed, "reached": reached is not None,
        "seconds": round((reached or answer)["seconds"], 2), "env_steps": (reached or answer)["env_steps"],
        "compiling": round(answer.get("compiling", 0.0), 1),
        "steps_per_second": round(answer["env_steps"] / answer["seconds"]),
        "share_learning": round(answer["learning"] / answer["seconds"], 3),
        "returns": answer["returns"][contender.kind], "versions": answer.get("versions", {}),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the seconds of all seeds, and how many times as long peers take where the environments are the same."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"| trained by | judged | {' | '.join(f'seed {seed}' for seed in seeds)} | mean s | theirs / ours "
        "| compiling s | steps/s | of it learning |",
        f"|---|---|{'---:|' * (len(seeds) + 1)}---|{'---:|' * 3}",
    ]
    peers: dict[str, dict[str, float]] = {}  # by algorithm and kind: their name, their mean
    for contender in CONTENDERS:
        own = [row for row in rows if (row["name"], row["evaluation"]) == (contender.name, contender.kind)]
        if not own:
            continue
        mean = statistics.fmean(row["seconds"] for row in own)
        theirs = peers.setdefault(f"{contender.algorithm} {contender.kind}", {})
        whole = mean + statistics.fmean(row.get("compiling", 0.0) for row in own)
        also = {
            name: f" ({seconds / whole:.2f} with compiling)" if whole > mean else "" for name, seconds in theirs.items()
        }
        ratio = ", ".join(f"{seconds / mean:.2f} {name}{also[name]}" for name, seconds in theirs.items())
        if contender.task is None:
            theirs[contender.name.split()[0]] = mean
        ratio = "" if contender.apart or contender.task is None else ratio
        found = {row["seed"]: f"{row['seconds']:.1f}{'' if row['reached'] else ' (not reached)'}" for row in own}
        speed, learning = (statistics.fmean(row[key] for row in own) for key in ("steps_per_second", "share_learning"))
        compiling = max(row["compiling"] for row in own)
        cells = [found.get(seed, "not run") for seed in seeds]
        # An update that is compiled is compared meanwhile: its seconds are not only learning.
        cells += [f"{mean:.1f}", ratio, f"{compiling:.1f}", f"{speed:,.0f}", "" if compiling else f"{learning:.0%}"]
        lines.append(f"| {contender.name} | {contender.kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ask(command: tuple[str, ...]) -> dict[str, Any]:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    print(f"done: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(200, 205)))
    parser.add_argument("--peers", type=Path, default=Path(PEERS_PYTHON), help="interpreter that has stable-baselines3")
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "a2c", "dqn"])
    parser.add_argument("--cleanrl", type=Path, help="checkout of vwxyzjn/cleanrl; without one it is left out")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, at most one for each idle core")
    parser.add_argument("--one", nargs=4, metavar=("TASK", "KIND", "SEED", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task, kind, seed, how = options.one
        print(json.dumps(train_ours(task, kind, int(seed), how == "compiled")))
        return
    if not options.peers.exists():
        raise SystemExit(f"{options.peers} does not exist: run make peers, or name another one with --peers.")
    contenders = [one for one in CONTENDERS if one.algorithm in options.algorithms]
    has_cleanrl = bool(options.cleanrl) and (options.cleanrl / "cleanrl" / "ppo.py").exists()
    contenders = [one for one in contenders if has_cleanrl or one.name != CLEANRL]
    rows = measure(options.seeds, options.peers, options.cleanrl, contenders, options.jobs)
    print(table(rows))
    print(f"\nMachine: {reporting.machine()}\nWritten: {reporting.write('time_to_475', rows)}")


if __name__ == "__main__":
    main()
