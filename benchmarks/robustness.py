"""The same faults, done to several libraries: what does each of them tell its user, and what does it leave behind?

Run: ``make peers`` once, then ``python benchmarks/robustness.py``; it takes about a quarter of an hour, because some
libraries say nothing until the time is over, and writes ``docs/robustness.md``. It may be done in pieces, with
``--faults`` and ``--libraries``: results add up at one commit. Linux only.
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


def keep(name: str, row: dict[str, Any]) -> None:
    """Add a result to those of the other faults and libraries at this commit: all may be done in pieces."""
    mine = row["fault"], row.get("library")
    others = [other for other in kept_rows(name) if (other["fault"], other.get("library")) != mine]
    _report.write(name, [*others, row])


def kept_rows(name: str) -> list[dict[str, Any]]:
    """Return the results written at this commit."""
    path = _report.result_path(name)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def document(rows: list[dict[str, Any]]) -> str:
    machine = _report.machine()
    found = {(row["library"], row["fault"]): row for row in rows}
    versions = {f"{package} {number}" for row in rows for package, number in row["versions"].items()}
    loads = [row["load"] for row in rows]
    names = [name.split(" ") for name in COLUMNS.values()]
    lines = [
        "# What happens when something breaks",
        "",
        "The same faults, done to four libraries with four worker processes each, while they step environments of",
        "1 ms. A time limit of 10 s is set wherever a library has one; whoever says nothing is watched for "
        f"{PATIENCE:.0f} s.",
        "",
        f"{datetime.date.today().isoformat()}, Linux, Python {machine['python']}, {', '.join(sorted(versions))}, "
        f"rlstruct at commit {machine['commit']}, {machine['cores']} cores, load {min(loads):.0f} to {max(loads):.0f} "
        "(this benchmark included). One run; run it yourself:",
        "",
        "```",
        "make peers",
        ".venv/bin/python benchmarks/robustness.py",
        "```",
        "",
        "In short; what each of them said follows.",
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
        "`make soak` does such things to rlstruct at random moments for ten minutes, and compares every row with a",
        "count in plain Python (`tests/batchers/soak.py` says which seeds were run, and what came of it).", "",
        "This page is written by `benchmarks/robustness.py`.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def compare(peers: str, libraries: list[str], faults: list[str]) -> None:
    """Do the faults to the libraries; write the page as soon as all of both have been done at this commit."""
    for fault in faults:
        for library in libraries:
            outcome = run(sys.executable if library == "rlstruct" else peers, library, fault)
            print(f"{FAULTS[fault]} | {COLUMNS[library]} | {outcome.cell}", flush=True)
            row = {"library": library, "fault": fault, **vars(outcome), "load": os.getloadavg()[0]}
            keep("robustness", row)
    rows = kept_rows("robustness")
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
