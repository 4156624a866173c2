"""Milliseconds of an iteration (collect a batch, learn from it) in one process with its simulator: ours and rejax's.

Run: ``python benchmarks/learning_speed.py``. Everything runs in one process, on one core or two, with the same sizes of
batches, minibatches and networks; ours is compiled, rejax's is one jitted call. ``--parts`` prints where the time of an
iteration goes. rejax needs a separate environment:
``python -m venv .venv-rejax && .venv-rejax/bin/pip install rejax "gymnax<1" torch psutil``.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from common.contenders import Entry, compete
from common.reporting import write
from peers.iterations import GAMES

REJAX = str(Path(__file__).parents[1] / ".venv-rejax/bin/python")
TASKS: dict[str, dict[str, Any]] = {
    "ppo Breakout-MinAtar": {"n_envs": 64, "n_timesteps": 128},
    "ppo CartPole-v1": {"n_envs": 1024, "n_timesteps": 32},
    **{f"pqn {game}-MinAtar": {"n_envs": 128, "n_timesteps": 32} for game in GAMES},
}
PARTS = "iteration", "collect", "simulator", "advantages", "minibatches", "products"
CELLS = "task", "cores", "part", "ours", "theirs", "ratio"


def entries(name: str, part: str, cores: int, options: argparse.Namespace) -> list[Entry]:
    algorithm, environment = name.split()
    task = {**TASKS[name], "n_processes": 0, "environment": environment}
    variables = {"OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": str(cores), "CORES": str(cores)}
    arguments = algorithm, part, options.precision
    ours = Entry("rlstruct", "rlstruct_iterations.py", task, arguments, variables=variables)
    if part in ("minibatches", "products"):  # parts of one jitted call
        return [ours]
    return [ours, Entry("rejax", "rejax_iterations.py", task, (algorithm, part), options.rejax, variables)]


def measured(name: str, part: str, cores: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run both in turn; return a row of a table: medians and ranges of milliseconds, and of the ratio in a turn."""
    n_steps = TASKS[name]["n_envs"] * TASKS[name]["n_timesteps"]
    results = compete(entries(name, part, cores, options), options.rounds, options.seconds)
    cells = [
        result.why or spread([n_steps / rate * 1e3 for rate in result.rates], 0 if part == "iteration" else 1)
        for result in results
    ]
    row = {"task": name, "cores": cores, "part": part, "ours": cells[0], "theirs": "", "ratio": ""}
    ran = all(result.rates for result in results)
    row["medians"] = [n_steps / statistics.median(result.rates) * 1e3 for result in results] if ran else []
    if len(results) == 2:
        row["theirs"] = cells[1]
        pairs = list(zip(*(result.rates for result in results), strict=False))
        row["ratio"] = spread([ours / theirs for ours, theirs in pairs], 2) if pairs else ""
    return row


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return two further parts of a task: the agent's in `collect`, and what of an iteration no other part takes."""
    medians = {row["part"]: row["medians"] for row in rows}
    agent = [whole - part for whole, part in zip(medians["collect"], medians["simulator"], strict=True)]
    rest = medians["iteration"][0] - sum(
        medians[part][0] for part in ("collect", "advantages", "minibatches", "products")
    )
    kept = {"task": rows[0]["task"], "cores": 1, "ratio": ""}
    return [
        {**kept, "part": "agent", "ours": f"{agent[0]:.1f}", "theirs": f"{agent[1]:.1f}"},
        {**kept, "part": "everything else", "ours": f"{rest:.1f}", "theirs": ""},
    ]


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--parts", action="store_true", help="the parts of an iteration on one core")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="of our learner")
    parser.add_argument("--rejax", default=REJAX, help="the interpreter that has rejax")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a turn takes")
    options = parser.parse_args()
    rows = []
    print("| task | cores | part | rlstruct, ms | rejax, ms | rejax / rlstruct |\n|---|---:|---|---:|---:|---:|")
    for name in options.tasks:
        for cores in [1] if options.parts else options.cores:
            for part in PARTS if options.parts else PARTS[:1]:
                rows.append(row := measured(name, part, cores, options))
                print(f"| {' | '.join(str(row[cell]) for cell in CELLS)} |", flush=True)
        if options.parts and all(row["medians"] for row in rows[-len(PARTS) :]):
            rows += differences(rows[-len(PARTS) :])
    name = "learning_parts" if options.parts else "learning_speed"
    write(name if options.precision == "float32" else f"{name}_{options.precision}", rows)


if __name__ == "__main__":
    main()
