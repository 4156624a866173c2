"""The same faults, done to several libraries: what does each of them tell its user, and what does it leave behind?

Run: ``make peers`` once, then ``python benchmarks/robustness.py``; it takes about a quarter of an hour, because some
libraries say nothing until the time is over, and writes ``docs/robustness.md``. ``--repetitions 20`` does every fault
twenty times to rlstruct, and fails unless it keeps its promises every time:

* a worker that is killed, raises or hangs: an error that names worker, process, environments, seed and step within 1 s
  (a time limit: within 1 s of it), closed within 2 s, no process left, not even a zombie;
* Ctrl-C, ``sys.exit``, an exception, ``del`` without closing: gone within 3 s with its own exit code, one traceback or
  none, no word about leaked semaphores, no worker left;
* the main process or the whole group killed: no worker alive after 1 s;
* and never a name left in /dev/shm.

Linux only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

import _report
from _faults import ENDING, FAULTS, PATIENCE, Outcome, closing_seconds, promises_kept, run

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "robustness.md"
COLUMNS = {
    "gymnasium": "gymnasium AsyncVectorEnv",
    "sb3": "stable-baselines3 SubprocVecEnv",
    "torchrl_parallel": "TorchRL ParallelEnv",
    "torchrl_collector": "TorchRL MultiSyncCollector",
    "rlstruct": "rlstruct RL_Batcher",
}


def repeat(faults: list[str], n: int) -> bool:
    """Do each fault to rlstruct n times, and say how often the promises were kept; return whether it was always.

    After each fault the results are written, beside those of the other faults at this commit: it may be done in pieces.
    """
    path = _report.result_path("robustness_repetitions")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for fault in faults:
        kept, seconds, closing, loads = 0, [], [], []
        for _ in range(n):
            outcome = run(sys.executable, "rlstruct", fault)
            good = bool(outcome.facts) and promises_kept(fault, outcome.facts)
            kept += good
            seconds.append(outcome.facts.get("seconds", 0.0))
            closing.append(closing_seconds(outcome.facts))
            loads.append(os.getloadavg()[0])
            if not good:
                print(f"{FAULTS[fault]}: {outcome.cell}; load {loads[-1]:.1f}", flush=True)
                if fault in ENDING:
                    print(f"the same without any worker: {run(sys.executable, 'no_workers', fault).cell}", flush=True)
        rows = [row for row in rows if row["fault"] != fault]
        rows.append({"fault": fault, "kept": kept, "of": n, "seconds": seconds, "closing": closing, "loads": loads})
        _report.write("robustness_repetitions", rows)
        told = f"; at most {max(seconds):.2f} s, closed in at most {max(closing):.2f} s" if any(seconds) else ""
        print(f"{FAULTS[fault]}: {kept} of {n}{told}; load up to {max(loads):.1f}", flush=True)
    print(f"Written: {path}")
    return all(row["kept"] == row["of"] for row in rows)


def document(outcomes: dict[tuple[str, str], Outcome], loads: list[float]) -> str:
    """Write the page."""
    machine = _report.machine()
    versions = {library: outcomes[library, "kill"].versions for library in COLUMNS}
    named = [f"{package} {number}" for library in COLUMNS for package, number in versions[library].items()]
    names = [name.split(" ") for name in COLUMNS.values()]
    lines = [
        "# What happens when something breaks",
        "",
        "The same faults, done to four libraries with four worker processes each, while they step environments of",
        "1 ms. A time limit of 10 s is set wherever a library has one; whoever says nothing is watched for "
        f"{PATIENCE:.0f} s.",
        "",
        f"{datetime.date.today().isoformat()}, Linux, Python {machine['python']}, {', '.join(sorted(set(named)))}, "
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
        lines.append(f"| {title} | " + " | ".join(outcomes[library, fault].short for library in COLUMNS) + " |")
    lines.append("")
    for fault, title in FAULTS.items():
        lines += [f"## {title}", "", "| library | what happened |", "|---|---|"]
        lines += [f"| {name} | {outcomes[library, fault].cell} |" for library, name in COLUMNS.items()]
        lines.append("")
    lines += [
        "`make soak` does such things to rlstruct at random moments for ten minutes, and compares every row with a",
        "count in plain Python (`tests/batchers/soak.py` says which seeds were run, and what came of it).",
        "",
        "This page is written by `benchmarks/robustness.py`.",
        "",
    ]
    return "\n".join(lines)


def compare(peers: str, libraries: list[str], faults: list[str]) -> None:
    """Do the faults to the libraries; with all of both, write the page."""
    outcomes, rows, loads = {}, [], [os.getloadavg()[0]]
    for fault in faults:
        for library in libraries:
            outcome = run(sys.executable if library == "rlstruct" else peers, library, fault)
            outcomes[library, fault] = outcome
            loads.append(os.getloadavg()[0])
            rows.append({"library": library, "fault": fault, "versions": outcome.versions, **outcome.facts})
            print(f"{FAULTS[fault]} | {COLUMNS[library]} | {outcome.cell}", flush=True)
    if len(outcomes) == len(COLUMNS) * len(FAULTS):
        DOCUMENT.write_text(document(outcomes, loads))
        print(f"Written: {DOCUMENT}, {_report.write('robustness', rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=str(HERE.parent / ".venv-peers/bin/python"), help="the peers' interpreter")
    parser.add_argument("--libraries", nargs="+", choices=[*COLUMNS], default=[*COLUMNS], help="some of them: no page")
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS], default=[*FAULTS], help="some of them: no page")
    parser.add_argument("--repetitions", type=int, default=0, help="of each fault, to rlstruct alone: no page")
    options = parser.parse_args()
    start = time.monotonic()
    if options.repetitions:
        good = repeat(options.faults, options.repetitions)
    else:
        good = True
        compare(options.peers, options.libraries, options.faults)
    print(f"{(time.monotonic() - start) / 60:.0f} minutes", file=sys.stderr)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
