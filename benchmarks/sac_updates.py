"""Gradient steps of SAC in a second of CPU time: ours, and those of stable-baselines3 and sbx, in turn.

Run: ``make peers``, then ``python benchmarks/sac_updates.py``. All have one thread, and learn Pendulum-v1 with networks
of 256-256 units from batches of 256 random steps. The matrix products of a gradient step are timed alone as well, in
turn with the steps: ours as compiled code makes them, sbx's in one jitted call. sbx, which is JAX, needs a separate
environment: ``python -m venv .venv-sbx && .venv-sbx/bin/pip install torch sbx-rl psutil``.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from common.contenders import PEERS_PYTHON, Entry, Result, compete
from common.reporting import Row, write

SBX = str(Path(__file__).parents[1] / ".venv-sbx/bin/python")
TASK = {"n_envs": 4, "n_processes": 0, "n_timesteps": 1250, "environment": "Pendulum-v1"}
ONE_CORE = {"OMP_NUM_THREADS": "1", "CORES": "1"}


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def row_of(steps: Result, products: Result | None, sbx: Result) -> Row:
    """Return a row of the table, with its cells as words; ``products`` alone, if they were timed."""
    row = {"name": steps.name, "rate": steps.why, "ms": "", "products": "", "share": "", "ratio": ""}
    if not steps.cpus:
        return row
    row |= {"rate": spread([1 / cpu for cpu in steps.cpus], 0), "ms": spread([1e3 * cpu for cpu in steps.cpus], 2)}
    if products is not None:
        row["products"] = products.why or spread([1e3 * cpu for cpu in products.cpus], 2)
        shares = [alone / step for alone, step in zip(products.cpus, steps.cpus, strict=False)]
        row["share"] = f"{statistics.median(shares):.0%}" if shares else ""
    ratios = [theirs / own for own, theirs in zip(steps.cpus, sbx.cpus, strict=False)]
    row["ratio"] = spread(ratios, 2) if ratios and steps is not sbx else ""
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=PEERS_PYTHON, help="the interpreter that has stable-baselines3")
    parser.add_argument("--sbx", default=SBX, help="the interpreter that has sbx")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a turn takes")
    options = parser.parse_args()
    entries = [
        Entry("rlstruct, eager", "rlstruct_loops.py", TASK, ("sac",)),
        Entry("rlstruct, compiled", "rlstruct_loops.py", TASK, ("sac_compiled",)),
        Entry("rlstruct, compiled, bfloat16", "rlstruct_loops.py", TASK, ("sac_bfloat16",)),
        Entry("sbx", "sbx_sac.py", TASK, ("steps",), options.sbx, ONE_CORE),
        Entry("stable-baselines3", "collectors.py", TASK, ("sb3_sac",), options.peers),
        Entry("products", "rlstruct_sac_products.py", TASK, ("float32",)),
        Entry("products in bfloat16", "rlstruct_sac_products.py", TASK, ("bfloat16",)),
        Entry("sbx's products", "sbx_sac.py", TASK, ("products",), options.sbx, ONE_CORE),
    ]
    eager, compiled, bfloat16, sbx, sb3, *products = compete(entries, options.rounds, options.seconds)
    ours, ours_bfloat16, theirs = products
    pairs = (eager, None), (compiled, ours), (bfloat16, ours_bfloat16), (sbx, theirs), (sb3, None)
    rows = [row_of(steps, its_products, sbx) for steps, its_products in pairs]
    print("| | gradient steps/s | ms of CPU time | products alone, ms | share of a step | times as fast as sbx |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
    write("sac_updates", [row for row in rows if row["ms"]])  # those that are installed


if __name__ == "__main__":
    main()
