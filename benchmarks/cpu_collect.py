"""Speed of collection on the CPU, compared with other libraries and with a bare loop.

Run: ``make peers`` once, then ``python benchmarks/cpu_collect.py --rlstructures PATH``, where PATH is a checkout of
facebookresearch/rlstructures at v0.2. ``--part`` takes some of the parts:

* ``throughput``: CartPole-v1, a 4-64-64-2 policy that draws its actions, T = 128, at 64 and at 8 environments; ours
  four times: the agent eager and compiled, each batch ordered when the previous one has been returned, and (queued)
  while the previous one is collected;
* ``slow``: environments of 1 ms per step, one step in ten 10 ms, 8 workers; a plain ``get()``, and one with the next
  batch queued; turns of 4 seconds at least;
* ``startup``: 2 and 16 workers to the first batch.

All of it takes about fifteen minutes on an idle machine. Contenders run in turns, each its own warm process with
one torch thread per process; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tables
from common import reporting
from common.contenders import HERE, PEERS_PYTHON, Entry, Result, compete

T = 128
# A batch takes a quarter of a second here. A turn begins and ends with a wait for all, which a training does not have.
SLOW_SECONDS = 4.0
EAGER, COMPILED = "rlstruct RL_Batcher", "rlstruct RL_Batcher, compile_agent=True"
OURS = {  # and the words for rlstruct_batcher.py
    EAGER: (), COMPILED: ("compiled",), f"{EAGER}, queued": ("queued",),
    f"{COMPILED}, queued": ("compiled", "queued"),
}  # fmt: skip
# The ratios that each row of another library has, and of which of ours.
RATIOS = dict(zip(("ratio", "compiled_ratio", "queued_ratio", "compiled_queued_ratio"), OURS, strict=True))


def entries(n_envs: int, n_processes: int, peers: str, rlstructures: str) -> list[Entry]:
    """Return everybody who takes part, with as many environments in as many processes."""
    task = {"n_envs": n_envs, "n_processes": n_processes, "n_timesteps": T}
    half = {**task, "n_envs": n_envs // n_processes, "n_processes": 1}
    theirs = {
        "TorchRL MultiSyncCollector": "torchrl", "SB3 collect_rollouts, SubprocVecEnv": "sb3_subproc",
        "SB3 collect_rollouts, DummyVecEnv": "sb3_dummy", "gymnasium SyncVectorEnv": "sync",
        "EnvPool (C++ environments)": "envpool",
    }  # fmt: skip
    return [
        *(Entry(name, "rlstruct_batcher.py", task, words) for name, words in OURS.items()),
        Entry("bare loop, 1 process, half of them", "collectors.py", half, ("bare",)),
        Entry(f"bare loop, {n_processes} processes", "collectors.py", task, ("bare",)),
        Entry("rlstructures v0.2", "rlstructures_v02.py", task, (), peers, {"RLSTRUCTURES": rlstructures}),
        *(Entry(name, "collectors.py", task, (word,), peers) for name, word in theirs.items()),
    ]


def throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare everybody, at each number of environments."""
    rows = []
    for n_envs in options.envs:
        results = compete(entries(n_envs, 2, options.peers, options.rlstructures), options.rounds, options.seconds)
        rates = {result.name: result.rate for result in results}
        rows += [row(result, rates, n_envs) for result in results]
    return rows


def row(result: Result, rates: dict[str, float | None], n_envs: int) -> dict[str, Any]:
    """Return a contender's measurements, and how many times as fast ours are."""
    ours = {key: None if result.name in OURS else rates[name] for key, name in RATIOS.items()}
    return {
        "name": result.name, "n_envs": n_envs, "rate": result.rate, "rates": result.rates,
        **{key: reporting.ratio(rate, result.rate) for key, rate in ours.items()},
        "why": result.why, "versions": result.versions, "reports": result.reports,
    }  # fmt: skip


def slow(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare environments that sleep: ours, a barrier after every step, and no barrier at all.

    Without any barrier a worker would start its next step whenever the last one is over: all of its time would be
    environment time. The share is the environment seconds of the mean worker over those of the clock. Whole batches
    wait for the slowest of 8 sums of T steps, which leaves 84 % at best with one environment each, 92 % with four.
    With the next batch queued a worker waits only when it is a whole batch ahead of the slowest. What 8 workers compute
    on fewer cores is not environment time either: a compiled agent leaves less of that.
    """
    rows = []
    for each in (1, 4):
        task = {"n_envs": 8 * each, "n_processes": 8, "n_timesteps": T, "environment": "slow"}
        name = f"rlstruct, 8 workers x {each} environments"
        eager = [
            Entry(f"{name}, get()", "rlstruct_batcher.py", task),
            Entry(f"{name}, get() with the next batch queued", "rlstruct_batcher.py", task, ("queued",)),
        ]
        compiled = [
            Entry(f"{entry.name}, compiled agent", entry.script, task, (*entry.arguments, "compiled"))
            for entry in eager
        ]
        if each == 1:
            vector = "gymnasium AsyncVectorEnv, 8 environments"
            eager.append(Entry(vector, "collectors.py", task, ("async",), options.peers))
        # One group after the other: 60 processes at once are too many for 16 GB.
        seconds = max(options.seconds, SLOW_SECONDS)
        for result in [result for group in (eager, compiled) for result in compete(group, options.rounds, seconds)]:
            if result.rate is not None:  # a peer's share is of 1.9 ms per step as asked for, not as slept
                share = slow_share(result.reports) if result.reports else result.rate * 0.0019 / (8 * each)
                rows.append({"name": result.name, "rate": result.rate, "share": share})
    return rows


def slow_share(reports: list[dict[str, Any]]) -> float:
    """Return the environment seconds of the mean worker over those of the clock, the median round."""
    return float(statistics.median(report["phases"]["environment"] / report["seconds"] for report in reports))


STARTUP = """
import json, multiprocessing, sys, time
sys.path.insert(0, sys.argv[1])
import psutil
from rlstruct_batcher import Ours
from serve import Task

def first_batch(n_processes):
    start = time.perf_counter()
    ours = Ours(Task(4 * n_processes, n_processes, 128))
    ours.batcher.execute()
    ours.batcher.get()
    return ours, time.perf_counter() - start

if __name__ == "__main__":
    ours, first = first_batch(int(sys.argv[2]))
    pids = [process.pid for process in multiprocessing.active_children()]
    private = max(psutil.Process(pid).memory_full_info().uss for pid in pids)
    second, again = first_batch(4)
    print(json.dumps({"first": first, "second": again, "private": private}))
    second.batcher.close()
    ours.batcher.close()
"""


def startup(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a fresh interpreter to its first batch, and a second batcher's; and weigh a worker's own memory."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "startup.py"
        script.write_text(STARTUP)
        for k in (2, 16):
            words = [sys.executable, str(script), str(HERE / "peers"), str(k)]
            runs = [
                json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                for _ in range(max(5, options.rounds))
            ]
            rows.append({"workers": k, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}})
    return rows


PARTS = {"throughput": throughput, "slow": slow, "startup": startup}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 8], help="environments of the part throughput")
    parser.add_argument("--peers", default=PEERS_PYTHON, help="the peers' interpreter")
    parser.add_argument("--rlstructures", default="", help="path of a checkout of rlstructures v0.2")
    parser.add_argument("--rounds", type=int, default=7, help="fewer than 5 write nothing")
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long a turn takes")
    options = parser.parse_args()
    print(f"Machine: {reporting.machine()}", file=sys.stderr)
    for name in options.part:
        rows = PARTS[name](options)
        print(tables.text(name, rows))
        print(*(f"not run: {one['name']}: {one['why']}" for one in rows if one.get("why")), sep="\n")
        few = options.rounds < 5  # a look whether it runs: a median of so few says nothing
        print(
            "Not written: --rounds 5 at least." if few else f"Written: {reporting.write(f'cpu_collect_{name}', rows)}"
        )


if __name__ == "__main__":
    main()
