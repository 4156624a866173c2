"""Is the profiler right, what does it cost, and what does it find? About twelve minutes on two cores. Layer 6.

    python benchmarks/profiler.py [--parts accuracy shares transitions] [--algorithms dqn] [--seconds 60]

- ``accuracy`` (ten minutes): REINFORCE, A2C, DQN and PPO on CartPole, in one process and two. Stretches with and
  without a profile take turns within one training. What a step takes in profiled ones, corrected, is divided by what
  it takes in the others, by the wall and in CPU seconds; the ratio should be 1.
- ``shares`` (half a minute): what an iteration of each algorithm consists of, as RL-Scope asked of other libraries, and
  how much of a GPU a small training uses.
- ``transitions`` (a minute, a C++ compiler's): how often Python calls torch, and CUDA, in a training iteration: eager,
  compiled, and as CUDA graphs.

Every row is written as it comes; rows of parts that are not measured again stay, if they are of the same commit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import tables
import torch
from _profile_accuracy import Episodic, Restarting, Stretches, compare
from _report import machine, result_path, write

from rlstruct import Trajectories
from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos import a2c, dqn, ppo, reinforce
from rlstruct.algos.training import run_training
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.profiling import operation, profile, read
from rlstruct.profiling.operations import SHARE
from rlstruct.sims import make

N_ENVS = 8
LEARNING = ("replay", "loss", "backward", "loss and backward", "optimiser", "replay buffer")


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


class Results:
    """The rows, written after each."""

    def __init__(self, parts: Sequence[str], *, dry: bool) -> None:
        """Keep those of other parts, of the same commit."""
        path = result_path("profiler")
        self._dry = dry
        found = json.loads(path.read_text())["rows"] if path.exists() and not dry else []
        self.rows: list[dict[str, Any]] = [row for row in found if row["part"] not in parts]

    def add(self, **row: Any) -> None:  # noqa: ANN401 - plain values
        """Add a row, and write all."""
        self.rows.append(row)
        if not self._dry:
            write("profiler", self.rows)


def train(
    name: str,
    n_processes: int,
    scale: float,
    create_evaluator: Callable[[torch.nn.Module], Any] | None = None,
    create_env: Any = None,  # noqa: ANN401 - a factory
    env_args: dict[str, Any] | None = None,
    **changes: Any,  # noqa: ANN401 - settings
) -> None:
    """Train for a fixed number of environment steps from a fixed seed."""
    module, kind, create_model, create_agent, usual_env, n_steps = TASKS[name]
    changes = {"n_env_steps": int(scale * n_steps), **changes} | ({"learning_starts": 200} if name == "dqn" else {})
    config = kind(
        n_envs=N_ENVS,
        n_processes=n_processes,
        evaluation_processes=0,
        evaluation_episodes=1,
        evaluation_step_limit=10_000,
        evaluation_interval=10**9,
        **changes,
    )
    factories = create_model, create_agent, create_env or usual_env
    run_training(module.Learner, config, *factories, env_args=env_args, create_evaluator=create_evaluator)


def profiled(name: str, n_processes: int, scale: float, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - settings
    """Train with a profile of the whole run, and return what it says of the iterations, in seconds."""
    folder = Path(tempfile.mkdtemp())
    try:
        with profile(folder, window=3600.0):
            train(name, n_processes, scale, **changes)
        report = read(folder)
        main, *workers = report.processes
        collecting = workers or [main]
        rows = [row for row in main.rows if "iteration" in row.path]

        def seconds(processes: list[Any], *names: str) -> float:
            """Corrected seconds of operations with all that is nested in them, the evaluation left out."""
            rows = [row for one in processes for row in one.rows if row.phase == "training"]
            return sum(float(row.corrected.sum()) for row in rows if set(names) & set(row.path))

        return {
            "corrected": main.inclusive("iteration"),
            **{one: seconds(collecting, one) for one in ("environment", "simulator", "agent", "copy")},
            "learning": seconds([main], *LEARNING),
            "operators": sum(float(row.corrected.reshape(2, 4).sum(0)[1]) for row in rows),
            "gpu_busy": report.gpus[0].busy if report.gpus else None,
        }
    finally:
        shutil.rmtree(folder)


def measure_accuracy(results: Results, names: Sequence[str], **how: float) -> None:
    """Compare stretches of trainings with and without a profile."""
    for name in names:
        for n_processes in (0, 1):

            def run(stretches: Stretches, board: Path, name: str = name, n_processes: int = n_processes) -> None:
                create_env = Episodic if name == "reinforce" else Restarting
                still = {"learning_rate": 0.0, "n_env_steps": 10**12}
                train(name, n_processes, 1.0, lambda _: stretches, create_env, {"board": board}, **still)

            row = compare(run, **how)
            results.add(part="accuracy", algorithm=name, processes=1 + n_processes, **row)
            print(tables.text("profile_accuracy", results.rows[-1:]), flush=True)


def measure_shares(results: Results, scale: float) -> None:
    """Say what an iteration of each algorithm consists of, in one process."""
    share = {}
    for device in ("cpu", *(["cuda:0"] if torch.cuda.is_available() else [])):
        for name in TASKS:
            train(name, 0, 0.1, learner_device=device)
            found = profiled(name, 0, scale, learner_device=device)
            shares = {one: found[one] / found["corrected"] for one in ("environment", "simulator", *_SHARES[1:])}
            results.add(part="shares", algorithm=name, learner=device, gpu_busy=found["gpu_busy"], **shares)
            share[device, name] = shares["environment"]
    for name in ("reinforce", "a2c", "ppo"):
        ratio = share["cpu", name] / share["cpu", "dqn"]
        results.add(part="simulation", algorithm=name, ratio=ratio)
    print(tables.text("profile_shares", results.rows))


def batcher(n_envs: int, **settings: Any) -> RL_Batcher:  # noqa: ANN401 - passed on
    """Return a batcher on CartPole that has warmed up."""
    settings = {"create_env": restarting, "n_timesteps": 32, **settings}
    create_env, device = settings.pop("create_env"), settings.get("device", "cpu")
    made = RL_Batcher(
        settings.pop("n_timesteps"),
        ActorCriticAgent,
        create_env,
        agent_args={"model": actor_critic(), "device": device},
        env_args={"n_envs": n_envs, **settings.pop("env_args", {})},
        seed=0,
        **settings,
    )
    made.reset()
    for _ in range(3):
        collect(made)
    return made


def collect(made: RL_Batcher) -> Trajectories:
    """Collect a batch."""
    made.execute()
    return made.get()[0]


def measure_transitions(results: Results) -> None:
    """Count how often Python calls torch, and CUDA, in an iteration of A2C: a batch and an update."""
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "eager": ({}, {}),
        "compiled": ({"compile_agent": True}, {"compile_update": True}),
    }
    if torch.cuda.is_available():
        on_gpu = {"create_env": partial(make, "CartPole-v1"), "device": "cuda:0", "env_args": {"device": "cuda:0"}}
        learner = {"learner_device": "cuda:0"}
        kinds["eager on CUDA"] = {**on_gpu, "graph": False}, {**learner, "graph": False}
        kinds["graph on CUDA"] = on_gpu, learner
    else:
        print("CUDA: not run, there is no CUDA device")
    for name, (settings, changes) in kinds.items():
        config = a2c.A2CConfig(n_env_steps=10**6, n_envs=N_ENVS, **changes)
        model = actor_critic().to(changes.get("learner_device", "cpu"))
        learner_of_kind = a2c.A2CLearner.create(model, ActorCriticAgent, config)
        folder = Path(tempfile.mkdtemp())
        with batcher(N_ENVS, n_timesteps=config.n_timesteps, **settings) as made:
            for _ in range(3):  # compiles, records
                learner_of_kind.update(collect(made), 0.0)
            with profile(folder, window=3600.0, operators=1.0):  # counts all of them
                for _ in range(10):
                    with operation("iteration"):
                        learner_of_kind.update(collect(made), 0.0)
            (main,) = read(folder).processes
        shutil.rmtree(folder)
        moves = sum(row.transitions for row in main.rows) / 10
        found = {"to_torch": float(moves[0, 1]), "to_cuda": float(moves[:, 3].sum())}
        print(f"{name}: an iteration goes {found['to_torch']:.0f} times to torch, {found['to_cuda']:.0f} times to CUDA")
        results.add(part="transitions", kind=name, n_timesteps=config.n_timesteps, n_envs=N_ENVS, **found)


_SHARES = ("environment", "agent", "copy", "learning")


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("accuracy", "shares", "transitions")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--algorithms", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the eight kinds of training")
    parser.add_argument("--stretch", type=float, default=0.25, help="seconds with or without a profile in turn")
    parser.add_argument("--operators", type=float, default=SHARE, help="share of a profile with torch's operators")
    parser.add_argument(
        "--steps", type=float, default=0.5, help="times the environment steps of a training of a second"
    )
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    print(json.dumps(machine()), flush=True)
    chosen = [*options.parts, *(["simulation"] if "shares" in options.parts else [])]
    results = Results(chosen, dry=options.dry)
    measures: dict[str, Callable[[], None]] = {
        "shares": partial(measure_shares, results, options.steps),
        "transitions": partial(measure_transitions, results),
        "accuracy": partial(
            measure_accuracy,
            results,
            options.algorithms,
            seconds=options.seconds,
            stretch=options.stretch,
            operators=options.operators,
        ),
    }
    for part, measure in measures.items():
        if part in options.parts:
            measure()
            print(f"{part}: done after {time.perf_counter() - begun:.0f} s", flush=True)
    if not options.dry:
        print(result_path("profiler"))


if __name__ == "__main__":
    main()
