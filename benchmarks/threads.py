"""Milliseconds of an iteration with one thread and with two, on two cores: ours, rejax's and sbx's, in turn.

Run: ``python benchmarks/threads.py``, on a machine with two cores and no other work; it needs the environments of
``learning_speed.py`` and ``sac_updates.py``. Everything is measured on the idle machine, and next to a process that
keeps one core busy, as a second training would: threads that wait for each other then lose most of their time. An
iteration is that of ``learning_speed.py``; of SAC 20 gradient steps with batches of 256; of DQN one step of 32
environments and 32 gradient steps with batches of 128.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import sac_updates
from common.contenders import Entry, compete
from common.reporting import write
from learning_speed import REJAX
from learning_speed import TASKS as ITERATIONS

TASKS = {name: ITERATIONS[name] for name in ("ppo Breakout-MinAtar", "ppo CartPole-v1", "pqn Breakout-MinAtar")}
TASKS["dqn CartPole-v1"] = {"n_envs": 32, "n_timesteps": 1}
TASKS["ppo CartPole-v1, 512-512"] = {"n_envs": 64, "n_timesteps": 32}  # 530,000 weights, and both threads by default


def entries(name: str, threads: int, options: argparse.Namespace) -> list[Entry]:
    """Return ours with so many threads, and the peer that has the algorithm on as many cores."""
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "CORES": str(threads)}
    ours = {**variables, "CORES": "2"}
    if name == "sac":
        return [
            Entry(name, "rlstruct_loops.py", sac_updates.TASK, ("sac_compiled",), variables=ours),
            Entry("sbx", "sbx_sac.py", sac_updates.TASK, ("steps",), options.sbx, variables),
        ]
    algorithm, environment, *units = name.replace(",", "").split()
    if units:
        ours, variables = ({**of, "UNITS": units[0].split("-")[0]} for of in (ours, variables))
    task = {**TASKS[name], "n_processes": 0, "environment": environment}
    return [
        Entry(name, "rlstruct_iterations.py", task, (algorithm, "iteration", "float32"), variables=ours),
        Entry("rejax", "rejax_iterations.py", task, (algorithm, "iteration"), options.rejax, variables),
    ]


@contextlib.contextmanager
def machine(busy: bool) -> Iterator[None]:
    """Keep one core busy in a with block, or none."""
    with contextlib.ExitStack() as ending:
        if busy:
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ending.callback(process.wait)
            ending.callback(process.kill)
        yield


def rows_of(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a task on the idle machine and on the busy one."""
    steps = 20 if name == "sac" else TASKS[name]["n_envs"] * TASKS[name]["n_timesteps"]
    for busy in (False, True):
        contenders = [one for threads in (1, 2) for one in entries(name, threads, options)]
        with machine(busy):
            results = compete(contenders, options.rounds, options.seconds)
        cells = [one.why or _spread([steps / rate * 1e3 for rate in one.rates]) for one in results]
        keys = "task", "machine", "one", "two", "peer", "peer_one", "peer_two"
        words = name, "busy" if busy else "idle", *cells[::2], contenders[1].name, *cells[1::2]
        yield dict(zip(keys, words, strict=True))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*TASKS, "sac"]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--rejax", default=REJAX, help="the interpreter that has rejax")
    parser.add_argument("--sbx", default=sac_updates.SBX, help="the interpreter that has sbx")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a turn takes")
    options = parser.parse_args()
    rows = []
    print("| task | machine | 1 thread, ms | 2 threads, ms | peer | 1 core, ms | 2 cores, ms |")
    print("|---|---|---|---|---|---|---|")
    for name in options.tasks:
        for row in rows_of(name, options):
            rows.append(row)
            print(f"| {' | '.join(row.values())} |", flush=True)
    write("threads", rows)


if __name__ == "__main__":
    main()
