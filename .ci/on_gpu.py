"""All that needs a CUDA device, in one command, with the Python that runs it; nothing is installed or fetched.

    python3 .ci/on_gpu.py --out build/gpu                      the tests marked gpu, then benchmarks/gpu.py
    python3 .ci/on_gpu.py --parts benchmark --minutes 9 --out build/gpu --site packages

torch, numpy, gymnasium, cloudpickle, pytest and hypothesis must be there, or in the folder that `--site` names (as
`pip install --target` fills it); warp-lang too, or what needs it is left out. Every test file has processes of its own:
one that hangs, dies or breaks CUDA loses one test, and the rest of its file is run in a new process. What is found is
written as it is found, so a run that is cut leaves what it has: ``tests.json`` (every test with its outcome, seconds
and what it said), ``tests.log``, ``gpu-….json`` of the benchmark, ``benchmark.log``, and ``summary.json``.

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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = "RLSTRUCT_ON_GPU_REPORT"  # where the part of this file that pytest loads writes
BROKEN = 70  # exit code: CUDA answers to nothing from here on
# What matters most comes first.
FIRST = ("test_cuda_recording", "test_lanes", "test_replays", "test_all_simulators", "test_warp", "test_policy_rollout")
LEFT_OUT = {"tests/house/test_benchmarks_run.py"}  # the benchmark itself is run
_SELECTS = re.compile(r"mark\.gpu\b|\bdevice: torch\.device\b")  # the second: the fixture of tests/conftest.py
_MOST_STARTS = 6  # of one file
Row = dict[str, Any]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins: whether it ends is another matter."""
    _note({"test": nodeid, "outcome": "began"})


def pytest_runtest_logreport(report: Any) -> None:  # noqa: ANN401 - pytest's own type
    """Write how a test ended; leave the process where CUDA has broken down, since all that follows would fail."""
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
        scratch: a folder for caches and for the package.
    """

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        """Let the folders of the repository be one package, as an installation would."""
        self.options, self.scratch = options, scratch
        self.deadline = time.monotonic() + 60 * options.minutes
        self.rows: list[Row] = []
        self._lock = threading.Lock()
        package = scratch / "path" / "rlstruct"
        package.mkdir(parents=True)
        for source in [*(ROOT / "rlstruct").iterdir(), *(ROOT / name for name in ("agents", "batchers", "algos"))]:
            (package / source.name).symlink_to(source)
        paths = [str(package.parent), str(ROOT / ".ci"), *([str(options.site.resolve())] if options.site else [])]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "CI": "true",
            "JAX_PLATFORMS": "cpu",  # where JAX is installed it would take most of the GPU's memory
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # this machine's plugins are not ours
            "WARP_CACHE_PATH": str(scratch / "warp"),
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
            "RLSTRUCT_COMMIT": options.commit,
        }

    def left(self) -> float:
        """Seconds until the end."""
        return self.deadline - time.monotonic()

    def machine(self) -> Row:
        """Describe Python, torch and the GPU, in a process of their own."""
        code = (
            "import json, platform, importlib.util as u, torch\n"
            "names = 'numpy gymnasium cloudpickle pytest pytest_timeout hypothesis warp triton'.split()\n"
            "gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None\n"
            "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, 'gpu': gpu,"
            " 'missing': [n for n in names if u.find_spec(n) is None]}))"
        )
        run = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"torch does not start here:\n{run.stderr}")
        found: Row = json.loads(run.stdout.splitlines()[-1])
        return found

    def tests(self, until: float, has_timeout: bool) -> Row:
        """Run the tests, several files at a time.

        Args:
            until: of time.monotonic.
            has_timeout: whether pytest-timeout is there.
        """
        files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if _SELECTS.search(file.read_text())]
        files = [file for file in files if str(file.relative_to(ROOT)) not in LEFT_OUT]
        files.sort(key=lambda file: FIRST.index(file.stem) if file.stem in FIRST else len(FIRST))
        if self.options.tests:
            files = [file for file in files if any(word in str(file) for word in self.options.tests)]
        (self.options.out / "tests.log").write_text("")
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda file: self._file(file, until, has_timeout), files))
        counts: Row = {}
        for row in self.rows:
            counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
        return counts

    def _file(self, file: Path, until: float, has_timeout: bool) -> None:
        """Run one file, again and again until every test has begun and ended, or has shown that it does not."""
        name = str(file.relative_to(ROOT))
        report = self.scratch / f"{file.stem}.jsonl"
        known: dict[str, Row] = {}
        for start in range(_MOST_STARTS):
            seconds = min(self.options.file_seconds, until - time.monotonic())
            if seconds < 5:
                self._keep(name, [{"test": name, "outcome": "not run", "said": "the time is used up"}])
                return
            report.write_text("")
            code, log = self._pytest(file, report, list(known), seconds, has_timeout)
            rows = [json.loads(line) for line in report.read_text().splitlines()]
            new: dict[str, Row] = {}
            for row in rows:
                if new.get(row["test"], row)["outcome"] not in ("failed", "error"):  # a failure outlives its teardown
                    new[row["test"]] = row
            for row in new.values():
                if row["outcome"] == "began":
                    row |= {"outcome": "lost", "said": f"the process ended here, with {code}:\n{log[-3000:]}"}
            if not new and code not in (0, 5):  # 5: no test was selected
                new[name] = {"test": name, "outcome": "error", "said": log[-3000:]}
            known |= new
            self._keep(name, list(new.values()), f"\n== {name}, start {start + 1}, exit code {code}\n{log}")
            ended = all(row["outcome"] != "lost" for row in new.values())
            if not new or (ended and code in (0, 1, 5)):
                return

    def _pytest(
        self, file: Path, report: Path, known: list[str], seconds: float, has_timeout: bool
    ) -> tuple[int | None, str]:
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", str(file), "-m", "gpu and not exhaustive"]
        command += [
            "-c",
            str(ROOT / "pyproject.toml"),
            "--rootdir",
            str(ROOT),
            "-p",
            "no:cacheprovider",
            "-p",
            "on_gpu",
        ]
        command += ["-v", "--tb=short", "--no-header"]
        for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"):
            command += ["-W", f"default::{kind}"]  # the packages of this machine may be newer than those we pin
        if has_timeout:  # the thread ends a process whose main thread waits in C code for the GPU
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
            (self.options.out / "tests.json").write_text(json.dumps(self.rows, indent=1) + "\n")
            with (self.options.out / "tests.log").open("a") as file:
                file.write(log)

    def benchmark(self) -> Row:
        """Run benchmarks/gpu.py for what time is left, again where CUDA broke."""
        code: int | None = None
        with (self.options.out / "benchmark.log").open("w") as log:
            for _ in range(3):
                minutes = (self.left() - 15) / 60
                if minutes <= 0:
                    break
                command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--resume", "--out", self.options.out]
                command += ["--minutes", f"{minutes:.2f}", *(["--quick"] if self.options.quick else [])]
                try:
                    run = subprocess.run(
                        command, env=self.environment, timeout=max(5, self.left()), stdout=log, stderr=subprocess.STDOUT
                    )
                except subprocess.TimeoutExpired:
                    code = None
                    break
                code = run.returncode
                if code != BROKEN:
                    break
        files = sorted(self.options.out.glob("gpu-*.json"), key=lambda file: file.stat().st_mtime)
        rows = json.loads(files[-1].read_text())["rows"] if files else []
        return {
            "exit_code": code,
            "file": files[-1].name if files else None,
            "ratios": [row for row in rows if row["part"] == "summary"],
            "left_out": [row for row in rows if "left_out" in row],
        }


def _last_lines(text: str, n: int) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-n:])


def main() -> int:
    """Do the parts, and say what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of what is found")
    parser.add_argument("--parts", nargs="+", choices=("tests", "benchmark"), default=["tests", "benchmark"])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--tests", nargs="+", default=[], help="only test files whose path holds one of these words")
    parser.add_argument("--test-seconds", type=int, default=60, help="longest time of one test")
    parser.add_argument("--file-seconds", type=int, default=180, help="longest time of one process of tests")
    parser.add_argument("--jobs", type=int, default=4, help="test files at a time")
    parser.add_argument("--site", type=Path, help="folder of further packages")
    parser.add_argument("--commit", default="unknown", help="what to call the code, where there is no git")
    parser.add_argument("--quick", action="store_true", help="benchmark: only look whether it runs")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        session = Session(options, Path(scratch))
        found: Row = {"machine": session.machine()}
        print(json.dumps(found["machine"]), flush=True)
        share = 0.5 if "benchmark" in options.parts else 0.97
        if "tests" in options.parts:
            until = time.monotonic() + session.left() * share
            found["tests"] = session.tests(until, "pytest_timeout" not in found["machine"]["missing"])
        if "benchmark" in options.parts:
            found["benchmark"] = session.benchmark()
        (options.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"tests: {found.get('tests', 'not asked for')}")
        for row in found.get("benchmark", {}).get("ratios", []):
            print(f"{row['ratio']}: {row['value']}, target {row['target']}, met: {row.get('met')}")
    good = set(found.get("tests", {})) <= {"passed", "skipped"}
    return 0 if good and found.get("benchmark", {"exit_code": 0})["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
