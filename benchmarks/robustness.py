"""Comparison of libraries under the same faults: the errors that they report, and the processes that they leave behind.

Run: ``make peers`` once, then ``python benchmarks/robustness.py``; it takes about a quarter of an hour, because some
libraries report nothing until the time is over. ``--faults`` and ``--libraries`` run a part of it: results add up at
one commit, and ``python benchmarks/tables.py`` writes them into ``docs/robustness.md``. Linux only. The program that
suffers is ``peers/faulty.py``, in its own process group.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import reporting
from common.contenders import PEERS, PEERS_PYTHON, Lines

if TYPE_CHECKING:  # imported where it is used, so that a benchmark's --help works without it
    import psutil

SHARED = Path("/dev/shm")
PATIENCE = 30.0
START_SECONDS = 300.0
FAULTS = {
    "kill": "SIGKILL to one worker", "exception": "`ValueError` in one environment's `step`",
    "stop": "SIGSTOP to one worker (a simulator that hangs)", "interrupt": "Ctrl-C (SIGINT to the whole process group)",
    "exit": "`sys.exit(7)` without closing", "error": "`ValueError` in the user's own loop",
    "forget": "`del` without closing, and the end of the script", "parent": "SIGKILL to the main process",
    "group": "SIGKILL to the whole process group",
}  # fmt: skip
COLUMNS = {
    "gymnasium": "gymnasium AsyncVectorEnv", "sb3": "stable-baselines3 SubprocVecEnv",
    "torchrl_parallel": "TorchRL ParallelEnv", "torchrl_collector": "TorchRL MultiSyncCollector",
    "rlstruct": "rlstruct RL_Batcher",
}  # fmt: skip
RAISING = ("kill", "exception", "stop")
ENDING = {"interrupt": -signal.SIGINT, "exit": 7, "error": 1, "forget": 0}  # the exit codes that are expected


@dataclass
class Outcome:
    """Outcome of a fault for one library."""

    cell: str  # as the table says it
    short: str  # the same in two or three words
    versions: dict[str, str] = field(default_factory=dict)  # of its packages


class Program:
    """A run of ``faulty.py``."""

    def __init__(self, python: str, library: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [python, str(PEERS / "faulty.py"), library, self.folder.name], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.printed = ""
        self._events = Lines(self.process)
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.printed += line

    def said(self) -> str:
        """All that it has printed on standard error; call it when it has ended."""
        self._errors.join(1.0)  # orphans may hold it open
        return self.printed

    def event(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Return the next event if it is the named one and comes in time."""
        try:
            event = self._events.next(seconds)
        except TimeoutError:
            return None
        return event if event and event["event"] == name else None

    def order(self, word: str) -> None:
        (Path(self.folder.name) / word).touch()

    def workers(self) -> list[psutil.Process]:
        """The processes that environments said they live in, by index."""
        import psutil

        files = sorted(Path(self.folder.name).glob("pid*"))
        while not all(file.read_text() for file in files):
            time.sleep(0.01)  # a file appears before its text
        return [psutil.Process(int(file.read_text())) for file in files]

    def family(self) -> list[psutil.Process]:
        """All processes of the program: workers, and what helps them."""
        import psutil

        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def end(self, family: list[psutil.Process]) -> None:
        for process in family:
            if process.is_running():
                process.kill()
        self.process.wait()
        self.folder.cleanup()


def break_one(python: str, library: str, fault: str) -> Outcome:
    """Do a fault to a library, and return what it tells, how long it takes and what it leaves behind."""
    import psutil

    if not Path(python).exists():
        return Outcome("not installed", "not installed")
    program = Program(python, library)
    family: list[psutil.Process] = [psutil.Process(program.process.pid)]
    try:
        ready = program.event("ready", START_SECONDS)
        if ready is None:
            if program.process.poll() is None:
                return Outcome(f"did not start within {START_SECONDS:.0f} s", "did not start")
            last = program.said().strip().splitlines() or ["it said nothing"]
            return Outcome(f"not installed, or failed to start: {last[-1][:120]}", "did not start")
        time.sleep(0.5)
        family, workers = program.family(), program.workers()
        shared = mapped(family)
        if fault in RAISING:
            outcome = watch(program, fault, workers, family)
        elif fault in ENDING:
            outcome = leave(program, fault, workers)
        else:
            outcome = abandon(program, fault == "group", workers)
        if left := unlinked(shared):
            outcome.cell += f"; **{spell(len(left), 'name')} left in /dev/shm**"
            outcome.short += f", {spell(len(left), 'name')} left"
        outcome.versions = ready["versions"]
        return outcome
    finally:
        program.end(family)


def watch(program: Program, fault: str, workers: list[psutil.Process], family: list[psutil.Process]) -> Outcome:
    """See what is raised, how long closing takes and which processes are left."""
    start = time.monotonic()
    if fault == "exception":
        program.order("raise")
    else:
        workers[2].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    raised = program.event("raised", PATIENCE)
    if raised is None:
        died = program.process.poll()
        words = f"silent for {PATIENCE:.0f} s" if died is None else f"main process died with code {died}"
        return Outcome(f"**{words}**", f"**{words}**")
    seconds = raised["at"] - start
    heard = f"`{raised['type']}` after {seconds:.2f} s: {quoted(raised['text'])}"
    if raised["cause"]:
        heard += f"; it came from {quoted(raised['cause'])}"
    short = f"reported in {seconds:.1f} s"
    if (closed := program.event("closed", PATIENCE)) is None:
        return Outcome(f"{heard}; **close() hangs, over {PATIENCE:.0f} s**", f"{short}, **close() hangs**")
    after = f"close() {closed['at'] - raised['at']:.2f} s"
    if closed["error"]:
        after, short = f"{after}, raises {quoted(closed['error'])}", f"{short}, **close() raises**"
    left = [child for child in family[1:] if child.is_running() and not _is_helper(child, workers)]
    n_alive = sum(alive(child) for child in left)
    if n_alive:
        words = f", **{spell(n_alive, 'process', 'processes')} left**"
        after, short = after + words, short + words
    if zombies := len(left) - n_alive:
        after += f", {spell(zombies, 'zombie')}"
    return Outcome(f"{heard}; {after}", short)


def leave(program: Program, fault: str, workers: list[psutil.Process]) -> Outcome:
    """End the program in one of the ways in which users end theirs, and see how it goes."""
    start = time.monotonic()
    if fault == "interrupt":
        os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does it
    else:
        program.order(fault)
    try:
        code = program.process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return Outcome(f"**does not end within {PATIENCE:.0f} s**", "**never ends**")
    seconds = time.monotonic() - start
    said = program.said()
    tracebacks = spell(said.count("Traceback (most recent call last)"), "traceback")
    words = f"ended after {seconds:.2f} s with exit code {code} and {tracebacks}"
    words += ", says that something leaked" if "leaked" in said else ""
    short = f"{seconds:.1f} s, {tracebacks}"
    if code != ENDING[fault]:
        words, short = f"{words}, **expected exit code {ENDING[fault]}**", f"{short}, **exit code {code}**"
    if n_alive := sum(alive(worker) for worker in workers):
        words += f"; **{n_alive} of {len(workers)} workers alive**"
        short += f", **{spell(n_alive, 'worker')} left**"
    return Outcome(words, short)


def abandon(program: Program, group: bool, workers: list[psutil.Process]) -> Outcome:
    """Kill the main process, alone or with its group, and see what outlives it."""
    if group:
        os.killpg(program.process.pid, signal.SIGKILL)
    else:
        program.process.kill()
    counts = []
    for seconds in (1.0, 4.0):
        time.sleep(seconds)
        counts.append(sum(alive(worker) for worker in workers))
        if not counts[-1]:
            break
    times = [f"{count} after {at} s" for count, at in zip(counts, (1, 5), strict=False)]
    words = f"of {len(workers)} workers alive: {', '.join(times)}"
    short = f"**{spell(counts[0], 'worker')} alive after 1 s**" if counts[0] else "none alive after 1 s"
    return Outcome(f"**{words}**" if counts[0] else words, short)


def mapped(family: list[psutil.Process]) -> set[str]:
    """Names in /dev/shm that these processes hold; others may use the folder at the same time."""
    names: set[str] = set()
    for process in family:
        paths = [region.path for region in process.memory_maps(grouped=True)]
        paths += [os.path.realpath(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        names |= {path.removeprefix(f"{SHARED}/") for path in paths if path.startswith(f"{SHARED}/")}
    return {name for name in names if not name.endswith(" (deleted)")}


def unlinked(names: set[str]) -> list[str]:
    """Remove these names from /dev/shm, and return those that were still there."""
    left = sorted(name for name in names if (SHARED / name).exists())
    for name in left:
        (SHARED / name).unlink(missing_ok=True)
    return left


def alive(process: psutil.Process) -> bool:
    """Return True if the process still runs; a zombie does not."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_helper(process: psutil.Process, workers: list[psutil.Process]) -> bool:
    """Python's resource tracker and fork server, and ours, live as long as the main process does."""
    import psutil

    try:
        words = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    return process not in workers and any(name in words for name in ("resource_tracker", "forkserver", "fork_server"))


def quoted(text: str) -> str:
    """A message's first line, short enough for a table."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    short = first if len(first) <= 130 else f"{first[:127]}..."
    return f"`{short.replace('|', '/').replace('`', chr(39))}`" if short else "an empty message"


def spell(n: int, one: str, many: str = "") -> str:
    return f"{n} {one}" if n == 1 else f"{n} {many or f'{one}s'}"


def report(rows: list[reporting.Row]) -> list[str]:
    """Return a table of all faults, and a section with the messages and times of each."""
    found = {(row["fault"], row["library"]): row for row in rows}
    versions = {f"{package} {number}" for row in rows for package, number in row["versions"].items()}
    loads = [row["load"] for row in rows]
    heads = [name.replace(" ", "<br>", 1) for name in COLUMNS.values()]

    def cells(fault: str, key: str) -> list[str]:
        return [found[fault, name][key] if (fault, name) in found else "not run" for name in COLUMNS]

    lines = [f"{', '.join(sorted(versions))}; load {min(loads):.0f} to {max(loads):.0f} (this benchmark included).", ""]
    summary = [[title, *cells(fault, "short")] for fault, title in FAULTS.items()]
    lines += reporting.table(f"| {' | '.join(heads)}", summary, 1 + len(heads))
    for fault, title in FAULTS.items():
        messages = zip(COLUMNS.values(), cells(fault, "cell"), strict=True)
        lines += ["", f"## {title}", "", *reporting.table("library | what happened", list(messages), 2)]
    return lines


def compare(peers: str, libraries: list[str], faults: list[str]) -> None:
    """Cause the faults in the libraries; what this commit has measured before stays."""
    rows = reporting.written("robustness")
    for fault in faults:
        for library in libraries:
            outcome = break_one(sys.executable if library == "rlstruct" else peers, library, fault)
            print(f"{FAULTS[fault]} | {COLUMNS[library]} | {outcome.cell}", flush=True)
            rows = [row for row in rows if (row["fault"], row["library"]) != (fault, library)]
            rows.append({"library": library, "fault": fault, **vars(outcome), "load": os.getloadavg()[0]})
            reporting.write("robustness", rows)
    print(f"Written: {reporting.result_path('robustness')}")


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
