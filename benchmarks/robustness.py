"""The same faults, done to several libraries: what does each of them tell its user, and what does it leave behind?

Run: ``make peers`` once, then ``python benchmarks/robustness.py``; it takes about ten minutes, because some libraries
say nothing until the time is over, and writes ``docs/robustness.md``. ``--repetitions 20`` does every fault twenty
times to rlstruct, and fails unless it keeps its promises every time: an error within 1 s (a time limit: within 1 s of
it), closed within 2 s, nothing left behind. Linux only. The program under test is
``benchmarks/peers/faulty.py``, a process group of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _report
import psutil

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "robustness.md"
SHARED = Path("/dev/shm")
PATIENCE = 30.0
LIMIT = 10.0  # as faulty.py sets it
COLUMNS = {
    "gymnasium": "gymnasium AsyncVectorEnv",
    "sb3": "stable-baselines3 SubprocVecEnv",
    "torchrl_parallel": "TorchRL ParallelEnv",
    "torchrl_collector": "TorchRL MultiSyncCollector",
    "rlstruct": "rlstruct RL_Batcher",
}
FAULTS = {
    "kill": "SIGKILL to one worker",
    "exception": "`ValueError` in one environment's `step`",
    "stop": "SIGSTOP to one worker (a simulator that hangs)",
    "parent": "SIGKILL to the main process",
    "group": "SIGKILL to the whole process group",
}


@dataclass
class Outcome:
    """What happened to one library.

    Attributes:
        cell: as the table says it.
        facts: the same as numbers and strings, for the JSON file.
        versions: of its packages.
    """

    cell: str
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Program:
    """A run of ``faulty.py``."""

    def __init__(self, python: str, library: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [python, str(HERE / "peers" / "faulty.py"), library, self.folder.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.printed = ""
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._events.put(json.loads(line))
        self._events.put({"event": "ended"})

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.printed += line

    def event(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Return the next event if it is the named one and comes in time."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        return event if event["event"] == name else None

    def workers(self) -> list[psutil.Process]:
        """The processes that environments said they live in, by index."""
        files = sorted(Path(self.folder.name).glob("pid*"))
        return [psutil.Process(int(file.read_text())) for file in files]

    def family(self) -> list[psutil.Process]:
        """All processes of the program: workers, and what helps them."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def end(self, family: list[psutil.Process]) -> None:
        """Kill what is left."""
        for process in family:
            if process.is_running():
                process.kill()
        self.process.wait()
        self.folder.cleanup()


def run(python: str, library: str, fault: str) -> Outcome:
    """Do one fault to one library."""
    if not Path(python).exists():
        return Outcome("not installed")
    program = Program(python, library)
    family: list[psutil.Process] = [psutil.Process(program.process.pid)]
    try:
        ready = program.event("ready", 120.0)
        if ready is None:
            last = program.printed.strip().splitlines() or ["it said nothing"]
            return Outcome(f"not installed, or failed to start: {last[-1][:120]}")
        time.sleep(0.5)
        family, workers = program.family(), program.workers()
        shared = mapped(family)
        start = time.monotonic()
        if fault in ("kill", "stop"):
            workers[2].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        elif fault == "exception":
            (Path(program.folder.name) / "raise").touch()
        if fault in ("kill", "stop", "exception"):
            outcome = watch(program, start, workers, family)
        else:
            outcome = abandon(program, fault == "group", workers, shared)
        outcome.versions = ready["versions"]
        return outcome
    finally:
        program.end(family)


def watch(program: Program, start: float, workers: list[psutil.Process], family: list[psutil.Process]) -> Outcome:
    """See what is raised, how long closing takes and what is left."""
    raised = program.event("raised", PATIENCE)
    if raised is None:
        died = program.process.poll()
        words = f"silent for {PATIENCE:.0f} s" if died is None else f"main process died with code {died}"
        return Outcome(f"**{words}**", {"raised": None})
    seconds = raised["at"] - start
    told = f"`{raised['type']}` after {seconds:.2f} s: {quoted(raised['text'])}"
    if raised["cause"]:
        told += f"; it came from {quoted(raised['cause'])}"
    closed = program.event("closed", PATIENCE)
    if closed is None:
        after = f"**close() hangs, over {PATIENCE:.0f} s**"
    else:
        after = f"close() {closed['at'] - raised['at']:.2f} s"
        after += f", raises {quoted(closed['error'])}" if closed["error"] else ""
        helpers = [child for child in family[1:] if child not in workers and _is_tracker(child)]
        left = [child for child in family[1:] if child not in helpers and child.is_running()]
        zombies = [child for child in left if child.status() == psutil.STATUS_ZOMBIE]
        if len(left) > len(zombies):
            after += f", **{len(left) - len(zombies)} processes left**"
        if zombies:
            after += f", {len(zombies)} zombie{'s' if len(zombies) > 1 else ''}"
    facts = {
        "raised": raised,
        "seconds": seconds,
        "closed": closed,
        "left": after.count("left") + after.count("zombie"),
    }
    return Outcome(f"{told}; {after}", facts)


def abandon(program: Program, group: bool, workers: list[psutil.Process], shared: set[str]) -> Outcome:
    """Kill the main process, alone or with its group, and see what outlives it."""
    if group:
        os.killpg(program.process.pid, signal.SIGKILL)
    else:
        program.process.kill()
    counts = []
    for seconds in (1.0, 4.0):
        time.sleep(seconds)
        counts.append(sum(alive(worker) for worker in workers))
    left = sorted(name for name in shared if (SHARED / name).exists())
    for name in left:
        (SHARED / name).unlink(missing_ok=True)
    words = [] if group else [f"{counts[0]} of {len(workers)} workers alive after 1 s, {counts[1]} after 5 s"]
    words.append(f"{len(left)} names left in /dev/shm" if left else "nothing left in /dev/shm")
    text = "; ".join(words)
    return Outcome(f"**{text}**" if left or sum(counts) else text, {"alive": counts, "shared": left})


def mapped(family: list[psutil.Process]) -> set[str]:
    """Names in /dev/shm that these processes hold; others may use the folder at the same time."""
    names: set[str] = set()
    for process in family:
        paths = [region.path for region in process.memory_maps(grouped=True)]
        paths += [os.path.realpath(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        names |= {path.removeprefix(f"{SHARED}/") for path in paths if path.startswith(f"{SHARED}/")}
    return {name for name in names if not name.endswith(" (deleted)")}


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    """Python's own resource tracker and fork server live as long as the main process does."""
    try:
        words = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    return "resource_tracker" in words or "forkserver" in words


def quoted(text: str) -> str:
    """A message's first line, short enough for a table."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    short = first if len(first) <= 130 else f"{first[:127]}..."
    return f"`{short.replace('|', '/').replace('`', chr(39))}`" if short else "an empty message"


def within(fault: str, facts: dict[str, Any]) -> tuple[bool, list[float]]:
    """Whether what rlstruct did keeps its promises, and the seconds that it took: to raise, and to close."""
    if fault in ("parent", "group"):
        return not any(facts["alive"]) and not facts["shared"], []
    if facts["raised"] is None or facts["closed"] is None:
        return False, []
    seconds = [facts["seconds"], facts["closed"]["at"] - facts["raised"]["at"]]
    earliest, latest = (LIMIT, LIMIT + 1.0) if fault == "stop" else (0.0, 1.0)
    kept = earliest <= seconds[0] < latest and seconds[1] < 2.0 and not facts["closed"]["error"] and not facts["left"]
    return kept, seconds


def repeat(faults: list[str], n: int) -> bool:
    """Do each fault to rlstruct n times, and say how often the promises were kept; return whether it was always."""
    rows = []
    for fault in faults:
        kept, longest = 0, [0.0, 0.0]
        for _ in range(n):
            outcome = run(sys.executable, "rlstruct", fault)
            good, seconds = within(fault, outcome.facts) if outcome.facts else (False, [])
            kept += good
            longest = [max(pair) for pair in zip(longest, seconds, strict=True)] if seconds else longest
            if not good:
                print(f"{FAULTS[fault]}: {outcome.cell}", flush=True)
        rows.append({"fault": fault, "kept": kept, "of": n, "longest_raise": longest[0], "longest_close": longest[1]})
        told = f"; raised in at most {longest[0]:.2f} s, closed in at most {longest[1]:.2f} s" if any(longest) else ""
        print(f"{FAULTS[fault]}: {kept} of {n}{told}", flush=True)
    print(f"Written: {_report.write('robustness_repetitions', rows)}")
    return all(row["kept"] == n for row in rows)


def document(outcomes: dict[tuple[str, str], Outcome]) -> str:
    """Write the table."""
    versions = {library: outcomes[library, "kill"].versions for library in COLUMNS}
    commit = _report.machine()["commit"]
    named = [f"{package} {number}" for library in COLUMNS for package, number in versions[library].items()]
    lines = [
        "# What happens when something breaks",
        "",
        "The same faults, done to four libraries with four worker processes each, while they step environments of",
        "1 ms. A time limit of 10 s is set wherever a library has one; whoever says nothing is watched for "
        f"{PATIENCE:.0f} s.",
        "",
        f"{datetime.date.today().isoformat()}, Linux, Python {_report.machine()['python']}, "
        f"{', '.join(sorted(set(named)))}, rlstruct at commit {commit}, "
        f"{_report.machine()['cores']} cores, load {os.getloadavg()[0]:.0f}. One run; run it yourself:",
        "",
        "```",
        "make peers",
        ".venv/bin/python benchmarks/robustness.py",
        "```",
        "",
    ]
    for fault, title in FAULTS.items():
        lines += [f"## {title}", "", "| library | what happened |", "|---|---|"]
        lines += [f"| {name} | {outcomes[library, fault].cell} |" for library, name in COLUMNS.items()]
        lines.append("")
    lines += ["This page is written by `benchmarks/robustness.py`.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=str(HERE.parent / ".venv-peers/bin/python"), help="the peers' interpreter")
    parser.add_argument("--libraries", nargs="+", choices=[*COLUMNS], default=[*COLUMNS], help="some of them: no page")
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS], default=[*FAULTS], help="some of them: no page")
    parser.add_argument("--repetitions", type=int, default=0, help="of each fault, to rlstruct alone: no page")
    options = parser.parse_args()
    if options.repetitions:
        sys.exit(0 if repeat(options.faults, options.repetitions) else 1)
    outcomes, rows = {}, []
    for fault in options.faults:
        for library in options.libraries:
            outcome = run(sys.executable if library == "rlstruct" else options.peers, library, fault)
            outcomes[library, fault] = outcome
            rows.append({"library": library, "fault": fault, "versions": outcome.versions, **outcome.facts})
            print(f"{FAULTS[fault]} | {COLUMNS[library]} | {outcome.cell}", flush=True)
    if len(outcomes) == len(COLUMNS) * len(FAULTS):
        DOCUMENT.write_text(document(outcomes))
        print(f"Written: {DOCUMENT}, {_report.write('robustness', rows)}")


if __name__ == "__main__":
    main()
