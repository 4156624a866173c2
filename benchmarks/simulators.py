"""Microseconds that a step of a MinAtar game or of Connect Four takes: eager, compiled, and gymnax's games, in turn.

Run: ``python benchmarks/simulators.py``. All have one thread and take action 0. A step of ours includes the checks of
its actions, frames and rewards; gymnax's is one jitted call. gymnax has neither Seaquest nor Connect Four, and needs a
separate environment:
``python -m venv .venv-gymnax && .venv-gymnax/bin/pip install gymnax torch``.
"""

import argparse
import statistics
from pathlib import Path

from common.contenders import Entry, compete
from common.reporting import Row, write

GYMNAX = str(Path(__file__).parents[1] / ".venv-gymnax/bin/python")
IN_GYMNAX = "Breakout", "Asterix", "SpaceInvaders", "Freeway"
GAMES = *IN_GYMNAX, "Seaquest", "ConnectFour"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=GAMES)
    parser.add_argument("--n-envs", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--gymnax", default=GYMNAX, help="the interpreter that has gymnax and torch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long a turn takes")
    options = parser.parse_args()
    print("| CPU µs per environment and step | environments | eager | compiled | gymnax |\n|---|---:|---:|---:|---:|")
    rows: list[Row] = []
    for game in options.games:
        for n_envs in options.n_envs:
            environment = "ConnectFour-v0" if game == "ConnectFour" else f"{game}-MinAtar"
            ours = {"n_envs": n_envs, "n_processes": 0, "n_timesteps": 16, "environment": environment}
            entries = [
                Entry("eager", "rlstruct_loops.py", ours, ("steps",)),
                Entry("compiled", "rlstruct_loops.py", ours, ("compiled_steps",)),
            ]
            if game in IN_GYMNAX and Path(options.gymnax).exists():
                entries.append(Entry("gymnax", "gymnax_steps.py", ours, (), options.gymnax))
            cells: list[str] = []
            for result in compete(entries, options.rounds, options.seconds):
                times = [seconds * 1e6 / (16 * n_envs) for seconds in result.cpus]
                ran = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})" if times else ""
                cells.append(result.why or ran)
            cells += ["not installed" if game in IN_GYMNAX else "has none"] * (3 - len(cells))
            print(f"| {game} | {n_envs} | {' | '.join(cells)} |", flush=True)
            rows.append(
                {"game": game, "n_envs": n_envs} | dict(zip(("eager", "compiled", "gymnax"), cells, strict=True))
            )
    write("simulators", rows)
