"""Comparison of libraries under the same faults: the errors that they report, and the processes that they leave behind.

Run: ``make peers`` once, then ``python benchmarks/robustness.py``; it takes about a quarter of an hour, because some
libraries report nothing until the time is over, and writes ``docs/robustness.md``. ``--faults`` and ``--libraries``
run a part of it: results add up at one commit. Linux only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import _report
from _contenders import PEERS_PYTHON
from _faults import FAULTS, PATIENCE, run

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "robustness.md"
COLUMNS = {
    "gymnasium": "gymnasium AsyncVectorEnv", "sb3": "stable-baselines3 SubprocVecEnv",
    "torchrl_parallel": "TorchRL ParallelEnv", "torchrl_collector": "TorchRL MultiSyncCollector",
    "rlstruct": "rlstruct RL_Batcher",
}  # fmt: skip


def document(rows: list[dict[str, Any]]) -> str:
    machine = _report.machine()
    found = {(row["library"], row["fault"]): row for row in rows}
    versions = {f"{package} {number}" for row in rows for package, number in row["versions"].items()}
    loads = [row["load"] for row in rows]
    names = [name.split(" ") for name in COLUMNS.values()]
    lines = [
        "# What happens when something breaks",
        "",
        "We cause the same faults in four libraries, each with four worker processes whose environments take 1 ms",
        "per step. Libraries that have a time limit get one of 10 s. If a library reports nothing, we wait for "
        f"{PATIENCE:.0f} s.",
        "",
        f"{datetime.date.today().isoformat()}, Linux, Python {machine['python']}, {', '.join(sorted(versions))}, "
        f"rlstruct at commit {machine['commit']}, {machine['cores']} cores, load {min(loads):.0f} to {max(loads):.0f} "
        "(this benchmark included). These are results of one run; to repeat it:",
        "",
        "```",
        "make peers",
        ".venv/bin/python benchmarks/robustness.py",
        "```",
        "",
        "This table is a summary; the messages and times of each library follow.",
        "",
        "| | " + " | ".join(f"{library}<br>{' '.join(kind)}" for library, *kind in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for fault, title in FAULTS.items():
        lines.append(f"| {title} | " + " | ".join(found[library, fault]["short"] for library in COLUMNS) + " |")
    lines.append("")
    for fault, title in FAULTS.items():
        lines += [f"## {title}", "", "| library | what happened |", "|---|---|"]
        lines += [f"| {name} | {found[library, fault]['cell']} |" for library, name in COLUMNS.items()]
        lines.append("")
    lines += [
        "`make soak` causes such faults in rlstruct at random moments for ten minutes, and compares every row with a",
        "count in plain Python (`tests/batchers/soak.py` lists the seeds that were run, and the results).", "",
        "`benchmarks/robustness.py` writes this page.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def compare(peers: str, libraries: list[str], faults: list[str]) -> None:
    """Cause the faults in the libraries; write the page once this commit has a result of every pair."""
    path = _report.result_path("robustness")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    for fault in faults:
        for library in libraries:
            outcome = run(sys.executable if library == "rlstruct" else peers, library, fault)
            print(f"{FAULTS[fault]} | {COLUMNS[library]} | {outcome.cell}", flush=True)
            rows = [row for row in rows if (row["fault"], row["library"]) != (fault, library)]
            rows.append({"library": library, "fault": fault, **vars(outcome), "load": os.getloadavg()[0]})
            _report.write("robustness", rows)
    if len(rows) == len(COLUMNS) * len(FAULTS):
        DOCUMENT.write_text(document(rows))
        print(f"Written: {DOCUMENT}, {_report.result_path('robustness')}")


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
