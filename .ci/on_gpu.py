"""Run the GPU tests and benchmarks: two hours in all, or the most valuable half hour. Installs and fetches nothing.

    make gpu ARGS=--dry-run                    print the plan with minutes; also without a GPU
    make gpu                                   run all of it, two hours; results go to build/gpu/
    python3 .ci/on_gpu.py --quick              check that every step starts; also without a GPU

If a command may take 10 minutes at most, run the plan as fourteen commands of 9 minutes. Each continues with the
results that earlier ones left in build/gpu. ``--commit`` names the code if there is no git. Commands 1 to 3 are the
most valuable half hour, and 4 measures Atari's time to a score; 5 to 13 bring the experiments to full size, and 14
compares ways to share a GPU, in any order:

    python3 .ci/on_gpu.py --command 1 --commit abc1234        then 2 to 14

`.ci/gpu_plan.py` lists the steps. A step that ends early leaves its time to the next ones. Test files that measure
time on the GPU run alone. A test file that runs out of time continues in the next test step, even in a later command;
a skipped file (because a package is missing, for example) is tried again in the next command.

torch and numpy must be installed; gymnasium and cloudpickle too, or be in the folder that ``--site`` names
(build/packages, into which the archives of `.ci/pack_site.py` in build/site are unpacked). Without pytest or
hypothesis only the benchmarks run; without warp-lang or ale-py, tests that need them are skipped, and benchmarks leave
out what needs them. On a borrowed machine only paths that git ignores, like these, are sure to survive between
commands. Every test file runs in its own process: if a test hangs, dies or breaks CUDA, only that test is lost, and
the rest of its file runs in a new process. Benchmarks continue in the same way. Results are written as they arrive, to
files named by device and commit: ``gpu_tests-….json`` (each test with its outcome, seconds and output),
``gpu-….json``, ``experiments-….json`` and ``sharing-….json`` (benchmarks), ``gpu_run-….json`` (the outcome of each
step) and ``gpu_run-….log``. Every two seconds they are copied to ``--copy`` (by default, the folder that the
environment variable OUT names, if it is set), so a killed command loses nothing.

Exit code 0: all tests passed, and all benchmarks finished.
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
from pathlib import Path
from typing import Any

import gpu_folders
import gpu_plan
from gpu_plan import STEPS, Step

ROOT = Path(__file__).resolve().parent.parent
REPORT = "RLSTRUCT_ON_GPU_REPORT"  # variable that names the file in which the plugin half of this script records
BROKEN = 70  # exit code: CUDA is unusable from here on
_NEEDED = ["torch", "numpy", "gymnasium", "cloudpickle"]  # to start any step
_FOR_TESTS = ["pytest", "hypothesis"]  # to start a test file
_FOR_SOME = ["warp", "ale_py"]  # for parts of tests and benchmarks, which leave them out
_USED = [*_FOR_TESTS, *_FOR_SOME, "pytest_timeout", "triton"]
_MOST_STARTS = 6  # processes per file
Row = dict[str, Any]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Deselect the tests that ended in an earlier process."""
    known = {row["test"] for row in _rows(Path(os.environ[REPORT]))}
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test begins; it may never end."""
    _note({"test": nodeid, "outcome": "began", "at": time.time()})


def pytest_runtest_logreport(report: Any) -> None:  # noqa: ANN401 - pytest's own type
    """Record the outcome of a test; exit once CUDA is broken, because every later test would fail."""
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
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last line may be incomplete


class Session:
    """One run of this script.

    Args:
        options: options of the command line.
        scratch: folder for temporary files.
    """

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        """Make one package of the folders of the repository, as an installation does."""
        self.options, self.scratch = options, scratch
        self.started = time.monotonic()
        self.rows: list[Row] = []
        self.steps: list[Row] = []
        self.unfinished: list[str] = []  # test files that a step has started, or should have
        self._files = gpu_plan.test_files(ROOT)
        self._lock = threading.Lock()
        if options.site:
            gpu_folders.unpack(options.archives, options.site)
        package = scratch / "path" / "rlstruct"
        package.mkdir(parents=True)
        for source in [*(ROOT / "rlstruct").iterdir(), *(ROOT / name for name in ("agents", "batchers", "algos"))]:
            (package / source.name).symlink_to(source)
        ours = [package.parent, ROOT / ".ci", ROOT / "benchmarks"]
        paths = [*ours, *([options.site.resolve()] if options.site else [])]
        commit = {"RLSTRUCT_COMMIT": options.commit} if options.commit else {}
        self.environment = (
            os.environ
            | {
                "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "PYTHONUNBUFFERED": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "CI": "true",
                "JAX_PLATFORMS": "",  # the GPU, if JAX is built for it
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other processes need that memory
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # this machine's plugins are not ours
                "WARP_CACHE_PATH": str(options.cache.resolve() / "warp"),  # compiled once and kept for the next command
                "TORCHINDUCTOR_CACHE_DIR": str(options.cache.resolve() / "inductor"),
            }
            | commit
        )
        self.here = self._machine()
        self.chosen = gpu_plan.steps_of(options.command, options.steps)
        if options.resume:
            self._resume()

    def _resume(self) -> None:
        """Continue where earlier commands ended; skipped files run again, because their packages may be there now."""
        found = [row for row in self._read("gpu_tests")["rows"] if "::" in row["test"] or row["outcome"] == "skipped"]
        self.rows = [row for row in found if row["outcome"] != "skipped"]
        skipped = (row["file"] for row in found if row["outcome"] == "skipped")
        self.unfinished = list(dict.fromkeys([*self._read("gpu_tests").get("unfinished", []), *skipped]))
        names = {step.name for step in self.chosen}
        self.steps = [row for row in self._read("gpu_run")["rows"] if row["step"] not in names]

    def _read(self, name: str) -> Row:
        """Read a result file of this device and commit; a missing file has no rows."""
        path = self.path(name)
        return json.loads(path.read_text()) if path.exists() else {"rows": []}  # type: ignore[no-any-return]

    def _write(self, name: str, rows: list[Row], **more: object) -> None:
        """Replace a result file atomically."""
        new = self.path(name, "new")
        new.write_text(json.dumps({"benchmark": name, "machine": self.here, **more, "rows": rows}, indent=1) + "\n")
        new.replace(self.path(name))

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the time is used up."""
        return self.started + 60 * self.options.minutes * share - time.monotonic()

    def path(self, name: str, ending: str = "json") -> Path:
        """Return the path of a result file of this device and commit."""
        device = str(self.here["device"]).lower().replace(" ", "-")
        path: Path = self.options.out / f"{name}-{device}-{self.here['commit']}.{ending}"
        return path

    def _machine(self) -> Row:
        """Describe the machine as the benchmarks do, and list missing packages, in a fresh process."""
        code = (
            "import json, sys, importlib.util as u\n"
            f"missing = [name for name in {[*_NEEDED, *_USED]} if u.find_spec(name) is None]\n"
            f"needed = [name for name in missing if name in {_NEEDED}]\n"
            "if needed: print(json.dumps({'needed': needed})); sys.exit()\n"
            "from common import reporting\n"
            "print(json.dumps(reporting.machine() | {'missing': missing}))"
        )
        run = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"torch cannot be imported here:\n{run.stderr}")
        found: Row = json.loads(run.stdout.splitlines()[-1])
        archives = f"the archives of .ci/pack_site.py into {self.options.archives}"
        remedy = f"install it for {sys.executable}, or put {archives}."
        if "needed" in found:
            raise SystemExit(f"on_gpu.py: {', '.join(found['needed'])} not found: {remedy}")
        for names, lost in ((_FOR_TESTS, "no test runs"), (_FOR_SOME, "what needs it is left out")):
            if missing := [name for name in names if name in found["missing"]]:
                print(f"on_gpu.py: {', '.join(missing)} not found, so {lost}: {remedy}", file=sys.stderr, flush=True)
        return found

    def run(self) -> bool:
        """Run the steps in order; each may use the time that earlier ones left. Return True if all passed."""
        if not self.options.resume:
            self.path("gpu_run", "log").write_text("")
        share, good = 0.0, True
        for step, part in zip(self.chosen, gpu_plan.minutes_of(self.chosen, 1.0), strict=True):
            share += part
            start = time.monotonic()
            print(f"== {step.name}, {max(0.0, self.left(share)):.0f} s", flush=True)
            try:
                came = self.benchmark(step, share) if step.benchmark else self.tests(step, share)
            except Exception as error:  # an error in one step must not stop the others
                came = {"exit_code": -1, "error": f"{type(error).__name__}: {error}"}
                print(traceback.format_exc(), flush=True)
            self.steps.append({"step": step.name, "seconds": round(time.monotonic() - start, 1)} | came)
            self._write("gpu_run", self.steps)
            good &= came.get("exit_code", 0) == 0
        return good and not self.unfinished and {row["outcome"] for row in self.rows} <= {"passed", "skipped"}

    def tests(self, step: Step, share: float) -> Row:
        """Run test files, several at a time, until this share of the time; return the number of tests per outcome.

        Files that earlier steps did not finish come last.
        """
        own = self._files[step.name]
        names = [*own, *(name for name in self.unfinished if name not in own)]
        if self.options.tests:
            names = [name for name in names if any(word in name for word in self.options.tests)]
        names = names[:1] if self.options.quick else names
        self.unfinished += [name for name in names if name not in self.unfinished]
        for part in ([name for name in names if (name in own) is mine] for mine in (True, False)):
            with ThreadPoolExecutor(self.options.jobs) as pool:
                list(pool.map(lambda name: self._finish(name, share), gpu_plan.together(part)))
            for name in gpu_plan.alone(part):
                self._finish(name, share)
        counts: Row = {}
        for row in self.rows:
            if row["file"] in names:
                counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
        return {"tests": counts}

    def _finish(self, name: str, share: float) -> None:
        """Run one file, and remember it if it did not finish."""
        with self._lock:  # drop earlier rows about the file as a whole
            self.rows = [row for row in self.rows if row["file"] != name or "::" in row["test"]]
        ended = self._file(ROOT / name, share)
        with self._lock:
            if ended:
                self.unfinished.remove(name)
            self._write("gpu_tests", self.rows, unfinished=self.unfinished)

    def _file(self, file: Path, share: float) -> bool:
        """Run one file in one process after another until each of its tests has ended or been lost.

        Returns:
            True if that is so, False if the time was used up first.
        """
        name = str(file.relative_to(ROOT))
        if missing := [package for package in _FOR_TESTS if package in self.here["missing"]]:
            self._keep(name, [{"test": name, "outcome": "not run", "said": f"{', '.join(missing)} not found"}])
            return False
        report = self.scratch / f"{name.replace('/', '-')}.jsonl"
        known: dict[str, Row] = {row["test"]: row for row in self.rows if row["file"] == name}
        for start in range(_MOST_STARTS):
            seconds = min(self.options.file_seconds, self.left(share))
            if seconds < 5:
                break
            report.write_text("".join(json.dumps({"test": test}) + "\n" for test in known))
            code, log = self._pytest(file, report, seconds)
            new = self._outcomes(report, len(known), code, log)
            began = bool(new)
            if not began and code is None:  # cut off while it was imported
                break
            if not began and code != 0 and not (code == 5 and known):
                outcome = "skipped" if code == 5 else "error"  # 5: everything is skipped or deselected
                new[name] = {"test": name, "outcome": outcome, "said": log[-3000:]}
            known |= new
            self._keep(name, list(new.values()), f"\n== {name}, start {start + 1}, exit code {code}\n{log}")
            ended = all(row["outcome"] != "lost" for row in new.values())
            if not began or (ended and code in (0, 1, 5)):  # a file that fails before its first test would fail again
                return True
        self._keep(name, [{"test": name, "outcome": "not run", "said": "no time left"}])
        return False

    def _outcomes(self, report: Path, n_known: int, code: int | None, log: str) -> dict[str, Row]:
        """Read the tests that a process recorded; a test that ran out of the step's time has no outcome yet."""
        new: dict[str, Row] = {}
        for row in _rows(report)[n_known:]:
            if new.get(row["test"], row)["outcome"] not in (
                "failed",
                "error",
            ):  # a failure stands, whatever its teardown reports
                new[row["test"]] = row
        for test, row in list(new.items()):
            if row["outcome"] != "began":
                continue
            if code is None and time.time() - row["at"] < self.options.test_seconds:
                del new[test]
            else:
                row |= {"outcome": "lost", "said": f"the process ended here, with {code}:\n{log[-3000:]}"}
        return new

    def _pytest(self, file: Path, report: Path, seconds: float) -> tuple[int | None, str]:
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", str(file), "-m", "gpu and not exhaustive"]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        command += ["-p", "no:cacheprovider", "-p", "on_gpu", "-v", "--tb=short", "--no-header"]
        for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"):
            command += ["-W", f"default::{kind}"]  # packages here may be newer than the pinned ones
        if "pytest_timeout" not in self.here["missing"]:  # its thread ends a process that waits in C code for the GPU
            command += ["-p", "pytest_timeout", "--timeout-method=thread", f"--timeout={self.options.test_seconds}"]
        else:
            command += ["-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]
        return self.call(command, {REPORT: str(report)}, seconds)

    def call(self, command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
        """Run a program; return its exit code (None if it ran out of time) and its output."""
        folder = self.scratch / "cwd"
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=self.scratch) as said:  # a pipe would wait for the program's children
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
            for row in [row for row in bad if row["outcome"] != "not run"]:
                print(f"  {row['outcome']}: {row['test']}\n{_last_lines(row['said'], 6)}", flush=True)
            self._write("gpu_tests", self.rows, unfinished=self.unfinished)
            self._log(log)

    def _log(self, text: str) -> None:
        with self.path("gpu_run", "log").open("a") as file:
            file.write(text)

    def benchmark(self, step: Step, share: float) -> Row:
        """Run a benchmark, again if CUDA broke or a signal ended it; return its exit code and ratios with targets."""
        code: int | None = None
        self.path(step.benchmark, "now").unlink(missing_ok=True)  # of a command that was cut, and did not die
        for _ in range(_MOST_STARTS):
            seconds = self.left(share)
            if seconds < 15:
                break
            script = ROOT / "benchmarks" / f"{step.benchmark}.py"
            command = [sys.executable, str(script), "--out", str(self.options.out)]
            command += ["--resume", "--parts", *step.parts]
            command += ["--minutes", f"{(seconds - 10) / 60:.2f}", *(["--quick"] if self.options.quick else [])]
            code, said = self.call(command, {}, seconds)
            self._log(f"\n== {step.name}: {'cut' if code is None else f'exit code {code}'}\n{said}")
            print(_last_lines(said, 12), flush=True)
            if code is None or (code >= 0 and code != BROKEN):
                break
        rows = self._read(step.benchmark)["rows"]
        return {
            "exit_code": code,
            "ratios": [row for row in rows if row.get("part") == "summary"],
            "left_out": [row for row in rows if "left_out" in row],
        }


def _last_lines(text: str, n: int) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-n:])


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = ROOT / "build"
    parser.add_argument("--out", type=Path, default=build / "gpu", help="folder for all results")
    parser.add_argument("--copy", type=Path, default=os.environ.get("OUT"), help="folder to which results are copied")
    parser.add_argument("--minutes", type=float, help="minutes for everything; 9 per command by default")
    parser.add_argument(
        "--tests", nargs="+", default=[], help="run only test files whose path contains one of these words"
    )
    numbers = range(1, len(STEPS) + 1)
    parser.add_argument(
        "--steps", nargs="+", type=int, choices=numbers, metavar="N", default=[], help="run only these steps"
    )
    parser.add_argument(
        "--command",
        type=int,
        choices=gpu_plan.COMMANDS,
        metavar="N",
        help="run only the steps of this command, and --resume",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the results in the folder, and do not repeat its tests"
    )
    parser.add_argument("--test-seconds", type=int, default=120, help="time limit of one test")
    parser.add_argument("--file-seconds", type=int, default=240, help="time limit of one process that runs tests")
    jobs = max(1, min(6, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="number of test files at a time")
    parser.add_argument("--site", type=Path, default=build / "packages", help="folder with further packages")
    parser.add_argument(
        "--archives", type=Path, default=build / "site", help="folder with the archives that are unpacked into --site"
    )
    parser.add_argument("--cache", type=Path, default=build / "gpu-cache", help="folder for compiled code")
    parser.add_argument("--commit", default="", help="name of the code if there is no git")
    parser.add_argument("--quick", action="store_true", help="only check that every step starts")
    parser.add_argument("--dry-run", action="store_true", help="only print the plan with minutes")
    options = parser.parse_args(words)
    options.out, options.resume = options.out.resolve(), options.resume or options.command is not None
    commands = {step.command for step in gpu_plan.steps_of(options.command, options.steps)}
    options.minutes = options.minutes or gpu_plan.MINUTES * len(commands)
    return options


def main() -> int:
    """Run the steps and print a summary."""
    options = parse()
    if options.dry_run:
        chosen = gpu_plan.steps_of(options.command, options.steps)
        print(gpu_plan.describe(ROOT, chosen, options.minutes))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        session = Session(options, Path(scratch))
        print(json.dumps(session.here), flush=True)
        ending = session.path("gpu_run").stem.removeprefix("gpu_run")
        with gpu_folders.Copies(options.out, options.copy, ending):
            good = session.run()
        for step in session.steps:
            print(f"{step['step']}: {step['seconds']:.0f} s, {step.get('tests', step.get('exit_code'))}")
        for row in {row["ratio"]: row for step in session.steps for row in step.get("ratios", [])}.values():
            print(f"{row['ratio']}: {row['value']}, target {row['target']}, met: {row.get('met')}")
        print(*[f"unfinished: {name}" for name in session.unfinished], session.path("gpu_run"), sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
