"""Gradient steps of SAC in a second of CPU time: ours, and those of stable-baselines3 and sbx, in turn.

Run: ``make peers``, then ``python benchmarks/sac_updates.py``. All have one thread, and learn Pendulum-v1 with networks
of 256-256 units from batches of 256 random steps. sbx, which is JAX, needs a separate environment:
``python -m venv .venv-sbx && .venv-sbx/bin/pip install torch sbx-rl psutil``.
"""

import argparse
import statistics
from pathlib import Path

from common.contenders import PEERS_PYTHON, Entry, compete

SBX = str(Path(__file__).parents[1] / ".venv-sbx/bin/python")
TASK = {"n_envs": 4, "n_processes": 0, "n_timesteps": 1250, "environment": "Pendulum-v1"}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=PEERS_PYTHON, help="the interpreter that has stable-baselines3")
    parser.add_argument("--sbx", default=SBX, help="the interpreter that has sbx")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a turn takes")
    options = parser.parse_args()
    entries = [
        Entry("ours", "rlstruct_loops.py", TASK, ("sac",)),
        Entry("compiled", "rlstruct_loops.py", TASK, ("sac_compiled",)),
        Entry("bfloat16", "rlstruct_loops.py", TASK, ("sac_bfloat16",)),
        Entry("sbx", "sbx_sac.py", TASK, (), options.sbx, {"OMP_NUM_THREADS": "1", "CORES": "1"}),
        Entry("sb3", "collectors.py", TASK, ("sb3_sac",), options.peers),
    ]
    ours, *others = compete(entries, options.rounds, options.seconds)
    for result in (ours, *others):
        if result.why:
            print(f"{result.name:8} {result.why}")
            continue
        rates = [1 / seconds for seconds in result.cpus]
        ratio = statistics.median(theirs / own for own, theirs in zip(ours.cpus, result.cpus, strict=True))
        spread = f"{statistics.median(rates):6.0f} ({min(rates):.0f} to {max(rates):.0f})"
        print(f"{result.name:8} {spread} gradient steps/s; ours {ratio:.2f} x")
