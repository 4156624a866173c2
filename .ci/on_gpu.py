"""Half an hour on a machine with a GPU, in one command, with the Python that runs it; nothing is installed or fetched.

    make gpu                                            30 minutes, results into benchmarks/results/
    python3 .ci/on_gpu.py --minutes 10 --out build/gpu --site packages
    python3 .ci/on_gpu.py --quick --out build/look      whether everything starts, also without a GPU

Where a command may take 10 minutes only, the half hour is three commands, and each keeps what is in the folder
(``--commit`` says what git would; `.ci/pack_site.py` says how ``packages`` is carried there):

    python3 .ci/on_gpu.py --steps 1 2 --minutes 9 --resume --out build/gpu --site packages --commit abc1234
    python3 .ci/on_gpu.py --steps 3 4 --minutes 9 --resume --out build/gpu --site packages --commit abc1234
    python3 .ci/on_gpu.py --steps 5 6 --minutes 8 --resume --out build/gpu --site packages --commit abc1234

The steps, in order; a step that ends early leaves its time to those that follow:

1. ``first tests``: recording, replays, learning, collection, random numbers. If these are wrong, speed means nothing.
2. ``targets``: Warp's first launch, then what the library has targets for, and the device's limits.
3. ``trained steps``: collecting and learning together, with each way to run an update.
4. ``other tests``: every other test marked ``gpu``, those of kernels and simulators first.
5. ``ladder``: what single tricks bring, all sizes of the benchmark, a training, and last what is compiled for minutes.
6. ``sharing``: processes in turns, under MPS and in MIG instances, beside one process that searches in many games.

torch, numpy, gymnasium, cloudpickle, pytest and hypothesis must be there, or in the folder that ``--site`` names (as
`pip install --target` fills it); warp-lang too, or what needs it is left out. Every test file has processes of its own:
one that hangs, dies or breaks CUDA loses one test, and the rest of its file runs in a new process. The ladder likewise
goes on without the rung that hung or broke CUDA. Every result is written as it comes, into files named by device and
commit, so a run that is cut keeps what it has: ``gpu_tests-….json`` (every test with its outcome, seconds and what it
said), ``gpu-….json``, ``gpu_train-….json`` and ``sharing-….json`` (what the benchmarks found), ``gpu_run-….json`` (what
came of each step), and ``gpu_run-….log``.

Exit code 0: every test passed and the benchmark ran to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = "RLSTRUCT_ON_GPU_REPORT"  # names the file that the half of this script inside pytest writes
BROKEN = 70  # exit code: CUDA answers nothing from here on
LEFT_OUT = {"tests/house/test_benchmarks_run.py"}  # the benchmark itself is run
_SELECTS = re.compile(r"mark\.gpu\b|\bdevice: torch\.device\b")  # the second: the fixture of tests/conftest.py
_MOST_STARTS = 6  # of one file
Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A share of the half hour: test files, or a benchmark.

    Attributes:
        name: as it is printed and written.
        share: of the whole time.
        tests: words in the names of the test files, in the order in which they run; "" takes all that are left.
        benchmark: name of the script in benchmarks/; with one no tests are run.
        parts: of the benchmark, where it has parts.
    """

    name: str
    share: float
    tests: tuple[str, ...] = ()
    benchmark: str = ""
    parts: tuple[str, ...] = ()


STEPS = (
    Step("first tests", 5 / 30, tests=("recording", "graph", "replays", "lanes", "learning", "collection", "random")),
    Step("targets", 9 / 30, benchmark="gpu", parts=("first_launch", "targets", "sync", "limits")),
    Step("trained steps", 3 / 30, benchmark="gpu_train"),
    Step("other tests", 5 / 30, tests=("fused", "simulators", "atari", "dqn", "replay_buffer", "")),
    Step(
        "ladder",
        4 / 30,
        benchmark="gpu",
        parts=("tricks", "policy", "simulation", "training", "launches", "compiled"),
    ),
    Step("sharing", 4 / 30, benchmark="sharing"),
)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what has ended in an earlier process."""
    known = {row["test"] for row in _rows(Path(os.environ[REPORT]))}
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins; it may never end."""
    _note({"test": nodeid, "outcome": "began"})


def pytest_runtest_logreport(report: Any) -> None:  # noqa: ANN401 - pytest's own type
    """Write how a test ended; leave the process once CUDA is broken, since everything after it would fail."""
    said = report.longreprtext if report.failed else str(report.longrepr or "")
    if report.when == "call" or not report.passed:
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        _note({"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 3), "said": said[-4000:]})
    if report.failed and re.search(r"device-side assert|illegal memory access|unspecified launch failure", said):
        os._exit(BROKEN)


def _note(row: Row) -> None:
    with open(os.environ[REPORT], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _rows(report: Path) -> list[Row]:
    lines = report.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be cut


class Session:
    """One run of this script.

    Args:
        options: from the command line.
        scratch: a folder for what is needed while it runs.
    """

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        """Let the folders of the repository be one package, as an installation would."""
        self.options, self.scratch = options, scratch
        self.started = time.monotonic()
        self.rows: list[Row] = []
        self.steps: list[Row] = []
        self._taken: set[str] = set()
        self._lock = threading.Lock()
        package = scratch / "path" / "rlstruct"
        package.mkdir(parents=True)
        for source in [*(ROOT / "rlstruct").iterdir(), *(ROOT / name for name in ("agents", "batchers", "algos"))]:
            (package / source.name).symlink_to(source)
        paths = [package.parent, ROOT / ".ci", ROOT / "benchmarks", *([options.site.resolve()] if options.site else [])]
        commit = {"RLSTRUCT_COMMIT": options.commit} if options.commit else {}
        self.environment = (
            os.environ
            | {
                "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "PYTHONUNBUFFERED": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "CI": "true",
                "JAX_PLATFORMS": "cpu",  # where JAX is installed it would take most of the GPU's memory
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # this machine's plugins are not ours
                "WARP_CACHE_PATH": str(options.cache.resolve() / "warp"),  # compiled once, kept for the next call
                "TORCHINDUCTOR_CACHE_DIR": str(options.cache.resolve() / "inductor"),
            }
            | commit
        )
        self.here = self._machine()
        self.chosen = [STEPS[number - 1] for number in options.steps or range(1, len(STEPS) + 1)]
        if options.resume:
            self.rows = [row for row in self._read("gpu_tests") if "::" in row["test"]]  # else the file did not begin
            names = {step.name for step in self.chosen}
            self.steps = [row for row in self._read("gpu_run") if row["step"] not in names]

    def _read(self, name: str) -> list[Row]:
        """Return the rows of a result file of this device and commit, none if there is no file."""
        path = self.path(name)
        rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
        return rows

    def _write(self, name: str, rows: list[Row]) -> None:
        """Write a result file, which is whole at any time."""
        new = self.path(name, "new")
        new.write_text(json.dumps({"benchmark": name, "machine": self.here, "rows": rows}, indent=1) + "\n")
        new.replace(self.path(name))

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is used up."""
        return self.started + 60 * self.options.minutes * share - time.monotonic()

    def path(self, name: str, ending: str = "json") -> Path:
        """A result file of this device and commit."""
        device = str(self.here["device"]).lower().replace(" ", "-")
        path: Path = self.options.out / f"{name}-{device}-{self.here['commit']}.{ending}"
        return path

    def _machine(self) -> Row:
        """Describe the machine as the benchmarks do, and the packages that are missing, in a process of its own."""
        code = (
            "import json, importlib.util as u, _report\n"
            "names = 'numpy gymnasium cloudpickle pytest pytest_timeout hypothesis warp triton'.split()\n"
            "print(json.dumps(_report.machine() | {'missing': [n for n in names if u.find_spec(n) is None]}))"
        )
        run = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"torch does not start here:\n{run.stderr}")
        found: Row = json.loads(run.stdout.splitlines()[-1])
        return found

    def run(self) -> bool:
        """Take the steps in order, each for its share and what those before it left; returns whether all is well."""
        if not self.options.resume:
            self.path("gpu_run", "log").write_text("")
        share, good, whole = 0.0, True, sum(step.share for step in self.chosen)
        for step in STEPS:
            if step not in self.chosen:
                self._files(step)
                continue
            share += step.share / whole
            start = time.monotonic()
            print(f"== {step.name}, {max(0.0, self.left(share)):.0f} s", flush=True)
            try:
                came = self.benchmark(step, share) if step.benchmark else self.tests(step, share)
            except Exception as error:  # whatever it is, the other steps have their time
                came = {"exit_code": -1, "error": f"{type(error).__name__}: {error}"}
                print(traceback.format_exc(), flush=True)
            self.steps.append({"step": step.name, "seconds": round(time.monotonic() - start, 1)} | came)
            self._write("gpu_run", self.steps)
            good &= came.get("exit_code", 0) == 0 and set(came.get("tests", ())) <= {"passed", "skipped"}
        return good

    def _files(self, step: Step) -> list[str]:
        """Take the test files of a step that no step before it has taken, in the order of its words."""
        found: list[tuple[int, str]] = []
        for file in sorted((ROOT / "tests").rglob("test_*.py")):
            name = str(file.relative_to(ROOT))
            order = next((i for i, word in enumerate(step.tests) if word in file.stem), None)
            if order is not None and name not in LEFT_OUT | self._taken and _SELECTS.search(file.read_text()):
                found.append((order, name))
        names = [name for _, name in sorted(found)]
        self._taken |= set(names)
        return names

    def tests(self, step: Step, share: float) -> Row:
        """Run test files, several at a time, until this share of the time; returns how many tests had which outcome."""
        names = self._files(step)
        if self.options.tests:
            names = [name for name in names if any(word in name for word in self.options.tests)]
        names = names[:1] if self.options.quick else names
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda name: self._file(ROOT / name, share), names))
        counts: Row = {}
        for row in self.rows:
            if row["file"] in names:
                counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
        return {"tests": counts}

    def _file(self, file: Path, share: float) -> None:
        """Run one file, again and again until every test has begun and ended, or has shown that it does not end."""
        name = str(file.relative_to(ROOT))
        report = self.scratch / f"{name.replace('/', '-')}.jsonl"
        known: dict[str, Row] = {row["test"]: row for row in self.rows if row["file"] == name}
        for start in range(_MOST_STARTS):
            seconds = min(self.options.file_seconds, self.left(share))
            if seconds < 5:
                self._keep(name, [{"test": name, "outcome": "not run", "said": "the time is used up"}])
                return
            report.write_text("".join(json.dumps({"test": test}) + "\n" for test in known))
            code, log = self._pytest(file, report, seconds)
            new: dict[str, Row] = {}
            for row in _rows(report)[len(known) :]:
                if new.get(row["test"], row)["outcome"] not in ("failed", "error"):  # a failure outlives its teardown
                    new[row["test"]] = row
            for row in new.values():
                if row["outcome"] == "began":
                    row |= {"outcome": "lost", "said": f"the process ended here, with {code}:\n{log[-3000:]}"}
            began = bool(new)
            if not began and code not in (0, 5):  # 5: no test was selected
                new[name] = {"test": name, "outcome": "error", "said": log[-3000:]}
            known |= new
            self._keep(name, list(new.values()), f"\n== {name}, start {start + 1}, exit code {code}\n{log}")
            ended = all(row["outcome"] != "lost" for row in new.values())
            if not began or (ended and code in (0, 1, 5)):  # a file that fails before its first test fails again
                return

    def _pytest(self, file: Path, report: Path, seconds: float) -> tuple[int | None, str]:
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", str(file), "-m", "gpu and not exhaustive"]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        command += ["-p", "no:cacheprovider", "-p", "on_gpu", "-v", "--tb=short", "--no-header"]
        for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"):
            command += ["-W", f"default::{kind}"]  # the packages of this machine may be newer than those we pin
        if (
            "pytest_timeout" not in self.here["missing"]
        ):  # the thread ends a process whose main thread waits in C code for the GPU
            command += ["-p", "pytest_timeout", "--timeout-method=thread", f"--timeout={self.options.test_seconds}"]
        else:
            command += ["-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]
        return self._call(command, {REPORT: str(report)}, seconds)

    def _call(self, command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
        """Run a program; returns its exit code, None if its time was up, and what it said."""
        folder = self.scratch / "cwd"
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=self.scratch) as said:  # a pipe would wait for all that the program has started
            try:
                code: int | None = subprocess.run(
                    command,
                    cwd=folder,
                    env=self.environment | environment,
                    timeout=seconds,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
            said.seek(0)
            return code, said.read().decode(errors="replace")

    def _keep(self, name: str, rows: list[Row], log: str = "") -> None:
        with self._lock:
            self.rows += [{"file": name, **row} for row in rows]
            bad = [row for row in rows if row["outcome"] not in ("passed", "skipped")]
            print(f"{name}: {len(rows) - len(bad)} passed or skipped, {len(bad)} not", flush=True)
            for row in bad:
                print(f"  {row['outcome']}: {row['test']}\n{_last_lines(row['said'], 6)}", flush=True)
            self._write("gpu_tests", self.rows)
            self._log(log)

    def _log(self, text: str) -> None:
        with self.path("gpu_run", "log").open("a") as file:
            file.write(text)

    def benchmark(self, step: Step, share: float) -> Row:
        """Run a benchmark, again where it hung or CUDA broke; returns the exit code, and ratios beside targets."""
        code: int | None = None
        for _ in range(_MOST_STARTS):
            seconds = self.left(share)
            if seconds < 15:
                break
            script = ROOT / "benchmarks" / f"{step.benchmark}.py"
            command = [sys.executable, str(script), "--out", str(self.options.out)]
            command += ["--resume"] if step.parts or (self.options.resume and step.benchmark != "sharing") else []
            command += ["--parts", *step.parts] if step.parts else []
            command += ["--minutes", f"{(seconds - 10) / 60:.2f}", *(["--quick"] if self.options.quick else [])]
            code, said = self._call(command, {}, seconds)
            self._log(f"\n== {step.name}: {'cut' if code is None else f'exit code {code}'}\n{said}")
            print(_last_lines(said, 12), flush=True)
            if code != BROKEN:
                break
        rows = self._read(step.benchmark)
        return {
            "exit_code": code,
            "ratios": [row for row in rows if "ratio" in row],
            "left_out": [row for row in rows if "left_out" in row],
        }


def _last_lines(text: str, n: int) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-n:])


def main() -> int:
    """Take the steps, and say what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of all results")
    parser.add_argument("--minutes", type=float, default=30.0, help="for everything")
    parser.add_argument("--tests", nargs="+", default=[], help="only test files whose path has one of these words")
    numbers = range(1, len(STEPS) + 1)
    parser.add_argument("--steps", nargs="+", type=int, choices=numbers, default=[], help="only these, by number")
    parser.add_argument("--resume", action="store_true", help="keep what is in the folder, and do not repeat its tests")
    parser.add_argument("--test-seconds", type=int, default=120, help="longest time of one test")
    parser.add_argument("--file-seconds", type=int, default=240, help="longest time of one process of tests")
    jobs = max(1, min(6, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="test files at a time")
    parser.add_argument("--site", type=Path, help="folder of further packages")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "gpu-cache", help="folder of compiled code")
    parser.add_argument("--commit", default="", help="what to call the code, where there is no git")
    parser.add_argument("--quick", action="store_true", help="only look whether everything starts")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        session = Session(options, Path(scratch))
        print(json.dumps(session.here), flush=True)
        good = session.run()
        for step in session.steps:
            print(f"{step['step']}: {step['seconds']:.0f} s, {step.get('tests', step.get('exit_code'))}")
        for row in [row for step in session.steps[-2:] for row in step.get("ratios", [])]:
            print(f"{row['ratio']}: {row['value']}, target {row['target']}, met: {row.get('met')}")
        print(session.path("gpu_run"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
