"""Whole programs that use workers: how they end, what they leave behind, what they may define where."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from multiprocessing import spawn
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from batcher_fakes import PROMPT, first_batch, left_in_shared_memory, shared_memory_names, worker_processes
from fake_agents import RngAgent
from fake_envs import CountingEnv, create_counting_env

from rlstruct import DictTensor, WorkerError
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.workers.processes import quiet_start

HEAD = """
import os, signal, sys, time
import torch
from rlstruct import RL_Agent, DictTensor, VecEnv
from rlstruct.batchers import RL_Batcher
from batcher_fakes import forked
from fake_agents import RngAgent
from fake_envs import create_counting_env, create_slow_env

def make(seconds=0.02, n_processes=1, **settings):
    env_args = {"n_envs": 1, "auto_reset": True, "seconds": seconds}
    batcher = RL_Batcher(5, RngAgent, create_slow_env, env_args=env_args, n_processes=n_processes, seed=0, **settings)
    batcher.reset()
    return batcher

def collect(batcher):
    batcher.execute()
    return batcher.get()[0]

def tell(batcher):
    print(*batcher.stats().pids, flush=True)
"""


class Program:
    """A script that runs as a separate process group."""

    def __init__(self, folder: Path, body: str, *, guard: bool = True) -> None:
        body = textwrap.dedent(body)
        if guard:
            # A shell that runs the tests in the background lets all of them ignore Ctrl-C; a user's shell does not.
            heed = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            body = 'if __name__ == "__main__":\n' + textwrap.indent(heed + body, "    ")
        path = folder / "program.py"
        path.write_text(HEAD + body)
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def workers(self) -> list[psutil.Process]:
        """Read the line that `tell` prints: the workers, and then all other processes of the program."""
        assert self.process.stdout is not None
        workers = [psutil.Process(int(word)) for word in self.process.stdout.readline().split()]
        return [*workers, *set(psutil.Process(self.process.pid).children(recursive=True)).difference(workers)]

    def end(self, said: str | None = None) -> tuple[int, str, str]:
        out, err = self.process.communicate(said, timeout=60)
        return self.process.returncode, out, err


def gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PROMPT)
    # Where the init process of a container reaps no orphans they stay as zombies; no batcher can help that.
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive


def test_ctrl_c_while_workers_start_gives_one_traceback(tmp_path: Path) -> None:
    program = Program(tmp_path, "print(flush=True)\nmake(60.0, 2)")
    assert program.process.stdout is not None
    program.process.stdout.readline()
    time.sleep(0.5)  # they import torch now
    workers = psutil.Process(program.process.pid).children(recursive=True)
    start = time.monotonic()
    os.killpg(program.process.pid, signal.SIGINT)
    code, _, err = program.end()
    assert time.monotonic() - start < PROMPT
    gone(workers)
    assert len(workers) >= 2
    assert code in (-signal.SIGINT, 130)
    assert err.count("Traceback") == 1, err
    assert "leaked" not in err


def test_ctrl_c_gives_one_traceback(tmp_path: Path) -> None:
    # Stopped in get(), with no `with` and no close(): the hardest way out.
    program = Program(tmp_path, "batcher = make(60.0, 2)\nbatcher.execute()\ntell(batcher)\nbatcher.get()")
    workers = program.workers()
    time.sleep(0.3)
    start = time.monotonic()
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does it: to the whole group
    code, _, err = program.end()
    assert time.monotonic() - start < PROMPT
    gone(workers)
    assert code in (-signal.SIGINT, 130)
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt" in err
    assert "leaked" not in err


@pytest.mark.slow
def test_programs_that_forget_to_close(tmp_path: Path) -> None:
    # Both at once: what they wait for is mostly Python, which starts.
    endings = {
        "del batcher\nos.kill(workers[1], signal.SIGSTOP)\nsys.exit(7)": (7, 0),
        "raise ValueError('mine')": (1, 1),
    }
    programs = {}
    for number, ending in enumerate(endings):
        (tmp_path / str(number)).mkdir()
        body = """
            batcher, other = make(), make()
            for one in (batcher, other):
                collect(one)
                one.execute()
            workers = [*batcher.stats().pids, *other.stats().pids]
            print(*workers, flush=True)
            sys.stdin.readline()
        """
        programs[ending] = Program(tmp_path / str(number), textwrap.dedent(body) + ending)
    for ending, (code, tracebacks) in endings.items():
        workers = programs[ending].workers()
        start = time.monotonic()
        found, _, err = programs[ending].end("now\n")
        assert time.monotonic() - start < PROMPT, ending
        gone(workers)
        assert found == code, ending
        assert err.count("Traceback") == tracebacks, err
        assert bool(err) == bool(tracebacks), err


@pytest.mark.parametrize("whole_group", [False, True])
def test_killed_programs_leave_nothing(tmp_path: Path, whole_group: bool) -> None:
    before = shared_memory_names()
    program = Program(
        tmp_path, "batcher = make(60.0, 2)\nbatcher.update({})\nbatcher.execute()\ntell(batcher)\ntime.sleep(60)"
    )
    workers = program.workers()
    workers[0].suspend()  # a stopped worker cannot notice anything by itself
    if whole_group:
        os.killpg(program.process.pid, signal.SIGKILL)
    else:
        program.process.kill()
    gone(workers)
    program.end()
    assert not left_in_shared_memory(before)


@pytest.mark.slow
def test_a_missing_main_guard_is_explained_by_a_worker_once(tmp_path: Path) -> None:
    code, _, err = Program(tmp_path, "batcher = make()\ncollect(batcher)", guard=False).end()
    assert code == 1
    assert err.count("Traceback") == 1, err
    fix = 'Put the code that trains or creates a batcher under `if __name__ == "__main__":`'
    assert fix in "".join(err.splitlines()[-2:])


@pytest.mark.slow
def test_a_worker_that_still_imports_the_script_may_be_killed_and_is_not_waited_for(tmp_path: Path) -> None:
    program = """
        if __name__ != "__main__":
            time.sleep(60)
        else:
            first, second = (
                RL_Batcher(2, RngAgent, create_counting_env, env_args={"n_envs": 1}, n_processes=1) for _ in range(2)
            )
            os.kill(forked(first)[0], signal.SIGKILL)
            try:
                first.reset()
            except Exception as error:
                print(error)
            os.kill(forked(second)[0], signal.SIGSTOP)  # it comes no further
            start = time.monotonic()
            second.close()
            print(time.monotonic() - start)
    """
    code, out, err = Program(tmp_path, program, guard=False).end()
    assert (code, err) == (0, "")
    message, *_, seconds = out.splitlines()
    assert "was killed by SIGKILL while it was in its start, while Python imports your main script" in message
    assert float(seconds) < PROMPT


def test_a_main_script_that_is_no_file_is_not_imported_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)  # python - < program.py
    monkeypatch.setattr(main, "__spec__", None)
    assert "init_main_from_path" in spawn.get_preparation_data("worker")
    with quiet_start():
        assert "init_main_from_path" not in spawn.get_preparation_data("worker")
    assert main.__file__ == "<stdin>"


@pytest.mark.slow
def test_everything_may_be_defined_in_the_main_script_and_a_forked_child_harms_nobody(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
        import multiprocessing, warnings
        before = multiprocessing.get_start_method(allow_none=True)
        class Mine(Exception):
            pass
        class Agent(RngAgent):
            def __call__(self, *arguments):
                self.calls = getattr(self, "calls", 0) + 1
                if self.n_actions == 2 and self.calls > 6:
                    raise Mine("from a worker")
                return super().__call__(*arguments)
        namespace = {"Agent": Agent}
        exec("class Notebook(Agent):\\n    pass", namespace)  # as a notebook does it: no source file
        Notebook, bound = namespace["Notebook"], 2  # the namespace now has Python's builtins, too
        create_agent = lambda: Notebook(bound)
        with RL_Batcher(2, create_agent, lambda seed: create_slow_env(2, seed, seconds=0.0, auto_reset=True),
                        n_processes=1, seed=0) as batcher:
            batcher.reset()
            print(collect(batcher).n_elems(), flush=True)
            warnings.simplefilter("ignore")  # newer Pythons warn of fork
            pid = os.fork()
            if pid == 0:
                batcher.close()
                del batcher
                os._exit(0)
            os.waitpid(pid, 0)
            print(collect(batcher).n_elems(), collect(batcher).n_elems(), flush=True)
            try:
                collect(batcher)
            except Exception as error:
                print(type(error.__cause__) is Mine, flush=True)
        print(multiprocessing.get_start_method(allow_none=True) == before)
        """,
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    assert out.split() == ["2", "2", "2", "True", "True"]


class PrintingEnv(CountingEnv):
    """Prints a line per step, in Python and past it, as libraries written in C do."""

    def step(self, action: DictTensor) -> Any:
        print("a line that must not land in a batch", flush=True)
        for fd in (0, 1, 2):
            with contextlib.suppress(OSError):
                os.write(fd, b"past Python\n")
        return super().step(action)


@pytest.mark.slow
def test_what_is_printed_where_standard_streams_are_closed_lands_in_no_batch(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        HEAD
        + textwrap.dedent("""
        from test_processes import PrintingEnv
        from fake_envs import CountingEnv

        def frames(create_env, n_processes):
            found = []
            env_args = {"n_envs": 4 // max(1, n_processes), "auto_reset": True}
            with RL_Batcher(8, RngAgent, create_env, env_args=env_args, n_processes=n_processes, seed=0) as batcher:
                batcher.reset()
                for _ in range(3):
                    steps = collect(batcher).steps
                    found += [steps[key].clone() for key in sorted(steps.keys())]
            return found

        if __name__ == "__main__":
            torch.save([frames(PrintingEnv, 2), frames(CountingEnv, 0)], sys.argv[1])
        """)
    )
    words = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, str(program), str(tmp_path / "found")]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr
    found, expected = torch.load(tmp_path / "found")
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def make(n_processes: int = 2) -> RL_Batcher:
    env_args = {"n_envs": 1, "auto_reset": True}
    return RL_Batcher(2, RngAgent, create_counting_env, env_args=env_args, n_processes=n_processes, seed=0)


class ThreadAgent(RngAgent):
    """Says what its process is like."""

    def __call__(self, *arguments: Any) -> Any:
        action, state = super().__call__(*arguments)
        like = action["action"]
        action.set("threads", torch.full_like(like, torch.get_num_threads()))
        action.set("cuda", torch.full_like(like, int(torch.cuda.is_initialized())))
        action.set("omp", torch.full_like(like, int(os.environ["OMP_NUM_THREADS"])))
        return action, state


def test_workers_have_one_thread_and_the_parent_keeps_its_own() -> None:
    threads, environment = torch.get_num_threads(), dict(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    env_args = {"n_envs": 1, "auto_reset": True}
    with RL_Batcher(1, ThreadAgent, create_counting_env, env_args=env_args, n_processes=2, seed=0) as batcher:
        steps = first_batch(batcher).steps
    assert steps["action/threads"].flatten().tolist() == [1, 1]
    assert steps["action/cuda"].flatten().tolist() == [0, 0]
    assert steps["action/omp"].flatten().tolist() == [1, 1]
    assert (torch.get_num_threads(), dict(os.environ)) == (threads, environment)
    assert signal.getsignal(signal.SIGINT) is handler


def held() -> tuple[int, int, int, set[str]]:
    gc.collect()
    me = psutil.Process()
    return me.num_fds(), threading.active_count(), len(worker_processes()), shared_memory_names()


def cycle(n: int) -> None:
    with make(1) as batcher:  # the workers' server and the resource tracker of multiprocessing start once and stay
        first_batch(batcher)
    del batcher
    before = held()
    for i in range(n):
        batcher = make(1)
        if i % 3:
            batcher.reset()
            batcher.execute()
        if i % 3 == 2:
            batcher.get()
        if i % 2:
            batcher.close()
        del batcher
    end = time.monotonic() + PROMPT
    while held() != before and time.monotonic() < end:
        time.sleep(0.01)  # the server kills workers that it had not yet forked when they were given up
    assert held() == before


def test_nothing_leaks_over_a_few_cycles() -> None:
    cycle(3)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_nothing_leaks_over_two_hundred_cycles() -> None:
    cycle(200)


class LeavingEnv(CountingEnv):
    """Its steps take half a minute, and at the end of its process it leaves a note, as libraries do at exit."""

    def __init__(self, seed: int, folder: str, seconds: float) -> None:
        super().__init__(1, seed, auto_reset=True)
        self.seconds = seconds
        atexit.register((Path(folder) / f"exit{seed}").touch)
        weakref.finalize(self, (Path(folder) / f"finalized{seed}").touch)

    def step(self, action: DictTensor) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


def test_closing_honours_what_runs_at_exit_and_waits_for_no_slow_step(tmp_path: Path) -> None:
    def create_env(seed: int) -> LeavingEnv:
        return LeavingEnv(seed, str(tmp_path), 60.0 * seed)

    batcher = RL_Batcher(2, RngAgent, create_env, n_processes=2, seed=0)
    batcher.reset()
    batcher.execute()
    time.sleep(0.2)
    start = time.monotonic()
    batcher.close()
    assert time.monotonic() - start < PROMPT
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "exit0",
        "finalized0",
    ]  # number 1 was killed in its step


class SlowlyClosedEnv(LeavingEnv):
    """Writes a file for some time when it is closed; it has opened a process, a semaphore and shared memory."""

    def __init__(self, seed: int, folder: str, seconds: float, fails: bool = False) -> None:
        super().__init__(seed, folder, 0.0)
        self.folder, self.closing_seconds, self.fails = Path(folder), seconds, fails
        method = multiprocessing.get_context("spawn")
        self.lock = method.Lock()
        self.memory = SharedMemory(create=True, size=1000)
        self.child = subprocess.Popen(["sleep", "300"])
        names = [f"sem.{self.lock._semlock.name[1:]}", self.memory.name]  # type: ignore[attr-defined]
        (self.folder / f"held{seed}").write_text("\n".join([str(self.child.pid), *names]))

    def step(self, action: DictTensor) -> Any:
        if self.fails:
            raise ValueError("no road")
        return super().step(action)

    def close(self) -> None:
        (self.folder / "closing").touch()
        time.sleep(self.closing_seconds)
        (self.folder / "closed").touch()
        self.child.kill()
        self.child.wait()
        self.memory.close()
        self.memory.unlink()


def leftovers(folder: Path) -> list[str]:
    found = []
    for file in folder.glob("held*"):
        pid, *names = file.read_text().splitlines()
        found += [name for name in names if Path("/dev/shm", name).exists()]
        found += [pid] if psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie" else []
    return found


def assert_nothing_left(folder: Path) -> None:
    end = time.monotonic() + PROMPT
    while leftovers(folder):
        assert time.monotonic() < end, leftovers(folder)
        time.sleep(0.01)  # a killed process takes a moment to be gone


@pytest.mark.parametrize("fails", [False, True])
def test_an_environment_may_take_its_time_to_close(tmp_path: Path, fails: bool) -> None:
    env_args = {"folder": str(tmp_path), "seconds": 2.5, "fails": fails}
    with RL_Batcher(2, RngAgent, SlowlyClosedEnv, env_args=env_args, n_processes=1, seed=0) as batcher:
        batcher.reset()
        assert len(leftovers(tmp_path)) == 3
        if fails:
            batcher.execute()
            with pytest.raises(WorkerError, match="no road"):
                batcher.get()
    assert (tmp_path / "closed").exists()
    assert (tmp_path / "exit0").exists()
    assert_nothing_left(tmp_path)


def test_a_worker_that_takes_too_long_to_close_is_killed_with_a_warning_and_all_that_it_has_opened(
    tmp_path: Path,
) -> None:
    env_args = {"folder": str(tmp_path), "seconds": 60.0}
    batcher = RL_Batcher(2, RngAgent, SlowlyClosedEnv, env_args=env_args, n_processes=1, seed=0, close_timeout=2.0)
    batcher.reset()
    assert len(leftovers(tmp_path)) == 3
    start = time.monotonic()
    with pytest.warns(UserWarning, match=r"killed worker 0 \(pid \d+, .* seed 0\), because closing .* close_timeout"):
        batcher.close()
    assert 2.0 <= time.monotonic() - start < 2.0 + PROMPT
    assert (tmp_path / "closing").exists()
    assert_nothing_left(tmp_path)
    assert not worker_processes()


def test_a_worker_is_restarted_after_its_old_environment_has_closed(tmp_path: Path) -> None:
    env_args = {"folder": str(tmp_path), "seconds": 1.5, "fails": True}
    settings = {"n_processes": 1, "seed": 0, "on_worker_error": "restart", "max_restarts": 1}
    with RL_Batcher(2, RngAgent, SlowlyClosedEnv, env_args=env_args, **settings) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(WorkerError, match="no road"):
            batcher.get()
        assert len(batcher.lost_episodes) == 1
        assert (tmp_path / "closed").exists()
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_environments_that_close(tmp_path: Path) -> None:
    program = f"""
        from test_processes import SlowlyClosedEnv
        env_args = {{"folder": {str(tmp_path)!r}, "seconds": 60.0}}
        with RL_Batcher(2, RngAgent, SlowlyClosedEnv, env_args=env_args, n_processes=1, close_timeout=50.0) as batcher:
            batcher.reset()
            tell(batcher)
            time.sleep(60)
    """
    running = Program(tmp_path, program)
    workers = running.workers()
    os.killpg(running.process.pid, signal.SIGINT)
    end = time.monotonic() + PROMPT
    while not (tmp_path / "closing").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    start = time.monotonic()
    os.killpg(running.process.pid, signal.SIGINT)
    running.end()
    assert time.monotonic() - start < PROMPT
    gone(workers)
    assert_nothing_left(tmp_path)
