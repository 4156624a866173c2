"""Comparison of libraries under the same faults: the errors that they report, and the processes that they leave behind.

Run: ``make peers`` once, then ``python benchmarks/robustness.py``; it takes about a quarter of an hour, because some
libraries report nothing until the time is over. ``--faults`` and ``--libraries`` run a part of it: results add up at
one commit, and ``python benchmarks/tables.py`` writes them into ``docs/robustness.md``. Linux only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import _report
from _contenders import PEERS_PYTHON
from _faults import FAULTS, run

COLUMNS = {
    "gymnasium": "gymnasium AsyncVectorEnv", "sb3": "stable-baselines3 SubprocVecEnv",
    "torchrl_parallel": "TorchRL ParallelEnv", "torchrl_collector": "TorchRL MultiSyncCollector",
    "rlstruct": "rlstruct RL_Batcher",
}  # fmt: skip


def report(rows: list[_report.Row]) -> list[str]:
    """Return a table of all faults, and a section with the messages and times of each."""
    found = {(row["fault"], row["library"]): row for row in rows}
    versions = {f"{package} {number}" for row in rows for package, number in row["versions"].items()}
    loads = [row["load"] for row in rows]
    heads = [name.replace(" ", "<br>", 1) for name in COLUMNS.values()]

    def cells(fault: str, key: str) -> list[str]:
        return [found[fault, name][key] if (fault, name) in found else "not run" for name in COLUMNS]

    lines = [f"{', '.join(sorted(versions))}; load {min(loads):.0f} to {max(loads):.0f} (this benchmark included).", ""]
    summary = [[title, *cells(fault, "short")] for fault, title in FAULTS.items()]
    lines += _report.table(f"| {' | '.join(heads)}", summary, 1 + len(heads))
    for fault, title in FAULTS.items():
        messages = zip(COLUMNS.values(), cells(fault, "cell"), strict=True)
        lines += ["", f"## {title}", "", *_report.table("library | what happened", list(messages), 2)]
    return lines


def compare(peers: str, libraries: list[str], faults: list[str]) -> None:
    """Cause the faults in the libraries; what this commit has measured before stays."""
    rows = _report.written("robustness")
    for fault in faults:
        for library in libraries:
            outcome = run(sys.executable if library == "rlstruct" else peers, library, fault)
            print(f"{FAULTS[fault]} | {COLUMNS[library]} | {outcome.cell}", flush=True)
            rows = [row for row in rows if (row["fault"], row["library"]) != (fault, library)]
            rows.append({"library": library, "fault": fault, **vars(outcome), "load": os.getloadavg()[0]})
            _report.write("robustness", rows)
    print(f"Written: {_report.result_path('robustness')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=PEERS_PYTHON, help="the peers' interpreter")
    for name, known in (("--libraries", COLUMNS), ("--faults", FAULTS)):
        parser.add_argument(name, nargs="+", choices=[*known], default=[*known], help="some of them, the rest later")
    options = parser.parse_args()
    start = time.monotonic()
    compare(options.peers, options.libraries, options.faults)
    print(f"{(time.monotonic() - start) / 60:.0f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
