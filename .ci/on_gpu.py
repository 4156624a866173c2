"""Two hours on a machine with a GPU, or the best half hour of them; nothing is installed or fetched.

    make gpu ARGS=--dry-run                    what runs, in which order, with minutes; also without a GPU
    make gpu                                   two hours, results into build/gpu/
    python3 .ci/on_gpu.py --quick              whether everything starts, also without a GPU

Where a command may take 10 minutes only, the whole is thirteen commands of 9, each of which goes on with what those
before it have left in build/gpu (``--commit`` says what git would, where there is no git). In half an hour 1 to 3 have
what is most valuable, 4 has Atari's time to a score; 5 to 13 take the experiments to their full size, in any order:

    python3 .ci/on_gpu.py --command 1 --commit abc1234        and so on with 2 to 13

`.ci/gpu_plan.py` lists the steps; a step that ends early leaves its time to those that follow. Test files that time the
GPU have it to themselves. A test file whose time is used up goes on in the next step of tests, also in another command;
one that was skipped, for want of a package say, is tried again in the next command.

torch, numpy, gymnasium, cloudpickle, pytest and hypothesis must be there, or in the folder that ``--site`` names
(build/packages, into which the archives of `.ci/pack_site.py` in build/site are unpacked); warp-lang and ale-py too, or
what needs them is left out. On a borrowed machine only paths that git ignores, as all of these, are sure to survive
between commands. Every test file has its own processes: one that hangs, dies or breaks CUDA loses one test, and the
rest of its file runs in a new process. The benchmarks likewise go on without what hung or broke CUDA. Every result is
written as it comes, into files named by device and commit: ``gpu_tests-….json`` (every test with its outcome, seconds
and what it said), ``gpu-….json``, ``experiments-….json`` and ``sharing-….json`` (what the
benchmarks found), ``gpu_run-….json`` (what came of each step), and ``gpu_run-….log``. They are copied to ``--copy`` (by
default the folder named by the environment variable OUT, if it is set) every two seconds, so a command that is killed
loses nothing.

Exit code 0: every test passed and the benchmarks ran to their end.
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
REPORT = "RLSTRUCT_ON_GPU_REPORT"  # names the file that the half of this script inside pytest writes
BROKEN = 70  # exit code: CUDA answers nothing from here on
_MOST_STARTS = 6  # of one file
Row = dict[str, Any]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what has ended in an earlier process."""
    known = {row["test"] for row in _rows(Path(os.environ[REPORT]))}
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins; it may never end."""
    _note({"test": nodeid, "outcome": "began", "at": time.time()})


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
        self.unfinished: list[str] = []  # test files that a step has begun, or would have
        self._files = gpu_plan.test_files(ROOT)
        self._lock = threading.Lock()
        if options.site:
            gpu_folders.unpack(options.archives, options.site)
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
                "JAX_PLATFORMS": "",  # the GPU, where JAX is installed for it; others need most of its memory
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # this machine's plugins are not ours
                "WARP_CACHE_PATH": str(options.cache.resolve() / "warp"),  # compiled once, kept for the next call
                "TORCHINDUCTOR_CACHE_DIR": str(options.cache.resolve() / "inductor"),
            }
            | commit
        )
        self.here = self._machine()
        self.chosen = gpu_plan.steps_of(options.command, options.steps)
        if options.resume:
            self._resume()

    def _resume(self) -> None:
        """Go on where earlier commands have ended; what they skipped may have its packages now."""
        found = [row for row in self._read("gpu_tests")["rows"] if "::" in row["test"] or row["outcome"] == "skipped"]
        self.rows = [row for row in found if row["outcome"] != "skipped"]
        skipped = (row["file"] for row in found if row["outcome"] == "skipped")
        self.unfinished = list(dict.fromkeys([*self._read("gpu_tests").get("unfinished", []), *skipped]))
        names = {step.name for step in self.chosen}
        self.steps = [row for row in self._read("gpu_run")["rows"] if row["step"] not in names]

    def _read(self, name: str) -> Row:
        """Return a result file of this device and commit, without rows if there is none."""
        path = self.path(name)
        return json.loads(path.read_text()) if path.exists() else {"rows": []}  # type: ignore[no-any-return]

    def _write(self, name: str, rows: list[Row], **more: object) -> None:
        """Write a result file, which is whole at any time."""
        new = self.path(name, "new")
        new.write_text(json.dumps({"benchmark": name, "machine": self.here, **more, "rows": rows}, indent=1) + "\n")
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
        """Describe the machine as the benchmarks do, and the packages that are missing, in a fresh process."""
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
        share, good = 0.0, True
        for step, part in zip(self.chosen, gpu_plan.minutes_of(self.chosen, 1.0), strict=True):
            share += part
            start = time.monotonic()
            print(f"== {step.name}, {max(0.0, self.left(share)):.0f} s", flush=True)
            try:
                came = self.benchmark(step, share) if step.benchmark else self.tests(step, share)
            except Exception as error:  # whatever it is, the other steps have their time
                came = {"exit_code": -1, "error": f"{type(error).__name__}: {error}"}
                print(traceback.format_exc(), flush=True)
            self.steps.append({"step": step.name, "seconds": round(time.monotonic() - start, 1)} | came)
            self._write("gpu_run", self.steps)
            good &= came.get("exit_code", 0) == 0
        return good and not self.unfinished and {row["outcome"] for row in self.rows} <= {"passed", "skipped"}

    def tests(self, step: Step, share: float) -> Row:
        """Run test files, several at a time, until this share of the time; returns how many tests had which outcome.

        Those that earlier steps did not finish come after those of this step.
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
        """Run one file, and remember whether it is finished."""
        with self._lock:  # what was said of the file as a whole does not hold any more
            self.rows = [row for row in self.rows if row["file"] != name or "::" in row["test"]]
        ended = self._file(ROOT / name, share)
        with self._lock:
            if ended:
                self.unfinished.remove(name)
            self._write("gpu_tests", self.rows, unfinished=self.unfinished)

    def _file(self, file: Path, share: float) -> bool:
        """Run one file, again and again until every test has begun and ended, or has shown that it does not end.

        Returns:
            Whether that is so; else the time was used up before.
        """
        name = str(file.relative_to(ROOT))
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
            if not began and code is None:  # while it was imported
                break
            if not began and code != 0 and not (code == 5 and known):
                outcome = "skipped" if code == 5 else "error"  # 5: all is skipped, or nothing is selected
                new[name] = {"test": name, "outcome": outcome, "said": log[-3000:]}
            known |= new
            self._keep(name, list(new.values()), f"\n== {name}, start {start + 1}, exit code {code}\n{log}")
            ended = all(row["outcome"] != "lost" for row in new.values())
            if not began or (ended and code in (0, 1, 5)):  # a file that fails before its first test fails again
                return True
        self._keep(name, [{"test": name, "outcome": "not run", "said": "the time is used up"}])
        return False

    def _outcomes(self, report: Path, n_known: int, code: int | None, log: str) -> dict[str, Row]:
        """Read what a process says of its tests; one in which the time was used up has no outcome yet."""
        new: dict[str, Row] = {}
        for row in _rows(report)[n_known:]:
            if new.get(row["test"], row)["outcome"] not in ("failed", "error"):  # a failure outlives its teardown
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
            for row in [row for row in bad if row["outcome"] != "not run"]:
                print(f"  {row['outcome']}: {row['test']}\n{_last_lines(row['said'], 6)}", flush=True)
            self._write("gpu_tests", self.rows, unfinished=self.unfinished)
            self._log(log)

    def _log(self, text: str) -> None:
        with self.path("gpu_run", "log").open("a") as file:
            file.write(text)

    def benchmark(self, step: Step, share: float) -> Row:
        """Run a benchmark, again where it hung or CUDA broke; returns the exit code, and ratios with targets."""
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
    parser.add_argument("--out", type=Path, default=build / "gpu", help="folder of all results")
    parser.add_argument("--copy", type=Path, default=os.environ.get("OUT"), help="folder to which they are copied")
    parser.add_argument("--minutes", type=float, help="for everything; 9 for each command by default")
    parser.add_argument("--tests", nargs="+", default=[], help="only test files whose path has one of these words")
    numbers = range(1, len(STEPS) + 1)
    parser.add_argument("--steps", nargs="+", type=int, choices=numbers, default=[], help="only these, by number")
    parser.add_argument("--command", type=int, choices=gpu_plan.COMMANDS, help="only its steps, and --resume")
    parser.add_argument("--resume", action="store_true", help="keep what is in the folder, and do not repeat its tests")
    parser.add_argument("--test-seconds", type=int, default=120, help="longest time of one test")
    parser.add_argument("--file-seconds", type=int, default=240, help="longest time of one process of tests")
    jobs = max(1, min(6, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="test files at a time")
    parser.add_argument("--site", type=Path, default=build / "packages", help="folder of further packages")
    parser.add_argument("--archives", type=Path, default=build / "site", help="folder of what is unpacked into --site")
    parser.add_argument("--cache", type=Path, default=build / "gpu-cache", help="folder of compiled code")
    parser.add_argument("--commit", default="", help="what to call the code, where there is no git")
    parser.add_argument("--quick", action="store_true", help="only look whether everything starts")
    parser.add_argument("--dry-run", action="store_true", help="only say what would run, and for how long")
    options = parser.parse_args(words)
    options.out, options.resume = options.out.resolve(), options.resume or options.command is not None
    commands = {step.command for step in gpu_plan.steps_of(options.command, options.steps)}
    options.minutes = options.minutes or gpu_plan.MINUTES * len(commands)
    return options


def main() -> int:
    """Take the steps, and say what came of them."""
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
