"""Half an hour on a machine with a GPU, in one command, with the Python that runs it; nothing is installed or fetched.

    make gpu                                            30 minutes, results into benchmarks/results/
    python3 .ci/on_gpu.py --minutes 10 --out build/gpu --site packages
    python3 .ci/on_gpu.py --quick --out build/look      whether everything starts, also without a GPU

The steps, in order; a step that ends early leaves its time to those that follow:

1. ``first tests``: recording, replays, learning, collection, random numbers. If these are wrong, speed means nothing.
2. ``targets``: Warp's first launch, then what the library has targets for, and the device's limits.
3. ``trained steps``: collecting and learning together, with each way to run an update.
4. ``other tests``: every other test marked ``gpu``.
5. ``ladder``: what single tricks bring, all sizes of the benchmark, a training, and last what is compiled for minutes.
6. ``sharing``: processes in turns, under MPS and in MIG instances, beside one process that searches in many games.

torch, numpy, gymnasium, cloudpickle, pytest and hypothesis must be there, or in the folder that ``--site`` names (as
`pip install --target` fills it); warp-lang too, or what needs it is left out. Every test file has processes of its own:
one that hangs, dies or breaks CUDA loses one test, and the rest of its file runs in a new process. Every result is
written as it comes, into files named by device and commit, so a run that is cut keeps what it has:
``gpu_tests-….json`` (every test with its outcome, seconds and what it said), ``gpu-….json``, ``gpu_train-….json`` and
``sharing-….json`` (what the benchmarks found), ``gpu_run-….json`` (what came of each step), and ``gpu_run-….log``.

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
        tests: words in the names of the test files; no word takes all files that are left.
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
    Step("other tests", 5 / 30),
    Step(
        "ladder",
        4 / 30,
        benchmark="gpu",
        parts=("tricks", "policy", "simulation", "training", "launches", "compiled"),
    ),
    Step("sharing", 4 / 30, benchmark="sharing"),
)


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
        self.path("gpu_run", "log").write_text("")
        share, good = 0.0, True
        for step in STEPS:
            share += step.share
            start = time.monotonic()
            print(f"== {step.name}, {max(0.0, self.left(share)):.0f} s", flush=True)
            came = self.benchmark(step, share) if step.benchmark else self.tests(step.tests, share)
            self.steps.append({"step": step.name, "seconds": round(time.monotonic() - start, 1)} | came)
            summary = {"benchmark": "gpu_run", "machine": self.here, "rows": self.steps}
            self.path("gpu_run").write_text(json.dumps(summary, indent=1) + "\n")
            good &= came.get("exit_code", 0) == 0 and set(came.get("tests", ())) <= {"passed", "skipped"}
        return good

    def tests(self, words: tuple[str, ...], share: float) -> Row:
        """Run test files, several at a time; returns how many tests had which outcome.

        Args:
            words: files whose name has one of them, in the order of the words; none: all that have not been run.
            share: of the whole time, when to stop.
        """
        names = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests").rglob("test_*.py"))]
        names = [
            name for name in names if name not in LEFT_OUT | self._taken and _SELECTS.search((ROOT / name).read_text())
        ]
        order = {name: next((i for i, word in enumerate(words) if word in Path(name).stem), None) for name in names}
        if words:
            names = sorted((name for name in names if order[name] is not None), key=lambda name: order[name] or 0)
        self._taken |= set(names)
        if self.options.tests:
            names = [name for name in names if any(word in name for word in self.options.tests)]
        names = names[:1] if self.options.quick else names
        before = len(self.rows)
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda name: self._file(ROOT / name, share), names))
        counts: Row = {}
        for row in self.rows[before:]:
            counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
        return {"tests": counts}

    def _file(self, file: Path, share: float) -> None:
        """Run one file, again and again until every test has begun and ended, or has shown that it does not end."""
        name = str(file.relative_to(ROOT))
        report = self.scratch / f"{name.replace('/', '-')}.jsonl"
        known: dict[str, Row] = {}
        for start in range(_MOST_STARTS):
            seconds = min(self.options.file_seconds, self.left(share))
            if seconds < 5:
                self._keep(name, [{"test": name, "outcome": "not run", "said": "the time is used up"}])
                return
            report.write_text("")
            code, log = self._pytest(file, report, list(known), seconds)
            rows = [json.loads(line) for line in report.read_text().splitlines()]
            new: dict[str, Row] = {}
            for row in rows:
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

    def _pytest(self, file: Path, report: Path, known: list[str], seconds: float) -> tuple[int | None, str]:
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
        for test in known:
            command += ["--deselect", test]
        folder = self.scratch / "cwd"
        folder.mkdir(exist_ok=True)
        environment = self.environment | {REPORT: str(report)}
        try:
            run = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                timeout=seconds,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            said = error.stdout or b""
            return None, said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        return run.returncode, run.stdout

    def _keep(self, name: str, rows: list[Row], log: str = "") -> None:
        with self._lock:
            self.rows += [{"file": name, **row} for row in rows]
            bad = [row for row in rows if row["outcome"] not in ("passed", "skipped")]
            print(f"{name}: {len(rows) - len(bad)} passed or skipped, {len(bad)} not", flush=True)
            for row in bad:
                print(f"  {row['outcome']}: {row['test']}\n{_last_lines(row['said'], 6)}", flush=True)
            found = {"benchmark": "gpu_tests", "machine": self.here, "rows": self.rows}
            self.path("gpu_tests").write_text(json.dumps(found, indent=1) + "\n")
            self._log(log)

    def _log(self, text: str) -> None:
        with self.path("gpu_run", "log").open("a") as file:
            file.write(text)

    def benchmark(self, step: Step, share: float) -> Row:
        """Run a benchmark, again where CUDA broke; returns the exit code, and ratios beside targets."""
        code: int | None = None
        for _ in range(3):
            seconds = self.left(share)
            if seconds < 15:
                break
            script = ROOT / "benchmarks" / f"{step.benchmark}.py"
            command = [sys.executable, str(script), "--out", str(self.options.out)]
            command += ["--resume", "--parts", *step.parts] if step.parts else []
            command += ["--minutes", f"{(seconds - 10) / 60:.2f}", *(["--quick"] if self.options.quick else [])]
            try:
                run = subprocess.run(
                    command,
                    env=self.environment,
                    timeout=seconds,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            except subprocess.TimeoutExpired as error:
                said = error.stdout or b""
                said = said.decode(errors="replace") if isinstance(said, bytes) else said
                self._log(f"\n== {step.name}: cut\n{said}")
                break
            self._log(f"\n== {step.name}: exit code {run.returncode}\n{run.stdout}")
            print(_last_lines(run.stdout, 12), flush=True)
            code = run.returncode
            if code != BROKEN:
                break
        path = self.path(step.benchmark)
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        return {
            "exit_code": code,
            "ratios": [row for row in rows if row.get("part") == "summary"],
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
    parser.add_argument("--test-seconds", type=int, default=120, help="longest time of one test")
    parser.add_argument("--file-seconds", type=int, default=240, help="longest time of one process of tests")
    parser.add_argument("--jobs", type=int, default=4, help="test files at a time")
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
