"""Whole programs that use workers: how they end, what they leave behind, what they may define where."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from batcher_fakes import limit

from rlstruct.batchers import RL_Batcher
from rlstruct.testing.fake_agents import RngAgent
from rlstruct.testing.fake_envs import create_counting_env

HEAD = """
import os, signal, sys, time
import torch
from rlstruct import RL_Agent, DictTensor, VecEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.testing.fake_agents import RngAgent
from rlstruct.testing.fake_envs import create_counting_env, create_slow_env

def make(seconds=0.02, **settings):
    env_args = {"n_envs": 1, "auto_reset": True, "seconds": seconds}
    batcher = RL_Batcher(5, RngAgent, create_slow_env, env_args=env_args, n_processes=2, seed=0, **settings)
    batcher.reset()
    return batcher

def collect(batcher):
    batcher.execute()
    return batcher.get()[0]

def tell(batcher):
    print(*[worker.pid for worker in batcher._backend._workers], flush=True)
"""


class Program:
    """A script that runs as a process group of its own."""

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
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def workers(self) -> list[psutil.Process]:
        """Read the line that `tell` prints."""
        assert self.process.stdout is not None
        return [psutil.Process(int(word)) for word in self.process.stdout.readline().split()]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def gone(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=limit(seconds))
    # Where the init process of a container reaps no orphans they stay as zombies; no batcher can help that.
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive


def shared_memory_names() -> set[str]:
    """Names in /dev/shm, semaphores excepted: the batchers use none, other programs of this machine may."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.")}


def test_ctrl_c_gives_one_traceback(tmp_path: Path) -> None:
    # Stopped in get(), with no `with` and no close(): the hardest way out.
    program = Program(tmp_path, "batcher = make(seconds=10.0)\nbatcher.execute()\ntell(batcher)\nbatcher.get()")
    workers = program.workers()
    time.sleep(0.3)
    start = time.monotonic()
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does it: to the whole group
    code, _, err = program.end()
    assert time.monotonic() - start < limit(3.0)
    gone(workers, 1.0)
    assert code in (-signal.SIGINT, 130)
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt" in err
    assert "leaked" not in err


@pytest.mark.parametrize(
    ("ending", "code", "tracebacks"),
    [
        ("sys.exit(7)", 7, 0),
        ("raise ValueError('mine')", 1, 1),
        ("del batcher", 0, 0),
        ("os.kill(workers[0], signal.SIGSTOP)", 0, 0),
    ],
)
def test_programs_that_forget_to_close(tmp_path: Path, ending: str, code: int, tracebacks: int) -> None:
    program = Program(
        tmp_path,
        f"""
        batcher = make()
        collect(batcher)
        batcher.execute()
        workers = [worker.pid for worker in batcher._backend._workers]
        tell(batcher)
        {ending}
        """,
    )
    workers = program.workers()
    start = time.monotonic()
    found, _, err = program.end()
    assert time.monotonic() - start < limit(3.0)
    gone(workers, 1.0)
    assert found == code
    assert err.count("Traceback") == tracebacks, err
    assert bool(err) == bool(tracebacks), err


@pytest.mark.parametrize("whole_group", [False, True])
def test_killed_programs_leave_nothing(tmp_path: Path, whole_group: bool) -> None:
    before = shared_memory_names()
    program = Program(
        tmp_path, "batcher = make(seconds=5.0)\nbatcher.update({})\nbatcher.execute()\ntell(batcher)\ntime.sleep(60)"
    )
    workers = program.workers()
    workers[0].suspend()  # a stopped worker cannot notice anything by itself
    if whole_group:
        os.killpg(program.process.pid, signal.SIGKILL)
    else:
        program.process.kill()
    gone(workers, 1.0)
    program.end()
    assert shared_memory_names() <= before


def test_a_missing_main_guard_is_explained_once(tmp_path: Path) -> None:
    start = time.monotonic()
    code, _, err = Program(tmp_path, "batcher = make()\ncollect(batcher)", guard=False).end()
    assert code == 1
    assert err.count("Traceback") == 1, err
    assert 'Put the code that creates the batcher under `if __name__ == "__main__":`' in err.splitlines()[-1]
    print(f"explained after {time.monotonic() - start:.1f} s")


def test_everything_may_be_defined_in_the_main_script(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
        import multiprocessing
        before = multiprocessing.get_start_method(allow_none=True)
        class Mine(Exception):
            pass
        class Agent(RngAgent):
            def __call__(self, *arguments):
                if self.n_actions == 3:
                    raise Mine("from a worker")
                return super().__call__(*arguments)
        namespace = {"RngAgent": RngAgent}
        exec("class Notebook(RngAgent):\\n    pass", namespace)  # as a notebook does it: no source file
        bound = 4
        for create in (lambda: Agent(bound), namespace["Notebook"], lambda: Agent(3)):
            with RL_Batcher(2, create, lambda seed: create_counting_env(2, seed), n_processes=1, seed=0) as batcher:
                batcher.reset()
                try:
                    print(collect(batcher).n_elems(), flush=True)
                except Exception as error:
                    print(type(error.__cause__) is Mine, flush=True)
        print(multiprocessing.get_start_method(allow_none=True) == before)
        """,
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    assert out.split() == ["2", "2", "True", "True"]


def test_a_forked_child_harms_nobody(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
        import warnings
        warnings.simplefilter("ignore")  # newer Pythons warn of fork
        batcher = make()
        collect(batcher)
        pid = os.fork()
        if pid == 0:
            batcher.close()
            del batcher
            os._exit(0)
        os.waitpid(pid, 0)
        print(collect(batcher).n_elems())
        batcher.close()
        """,
    )
    assert program.end() == (0, "2\n", "")


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
        batcher.reset()
        batcher.execute()
        steps = batcher.get()[0].trajectories
    assert steps["action/threads"].flatten().tolist() == [1, 1]
    assert steps["action/cuda"].flatten().tolist() == [0, 0]
    assert steps["action/omp"].flatten().tolist() == [1, 1]
    assert (torch.get_num_threads(), dict(os.environ)) == (threads, environment)
    assert signal.getsignal(signal.SIGINT) is handler


def held() -> tuple[int, int, int, set[str]]:
    gc.collect()
    me = psutil.Process()
    children = [child for child in me.children() if "resource_tracker" not in " ".join(child.cmdline())]
    return me.num_fds(), threading.active_count(), len(children), shared_memory_names()


def cycle(n: int) -> None:
    make(1).close()  # the resource tracker of multiprocessing starts once and stays
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
    assert held() == before


def test_nothing_leaks_over_a_few_cycles() -> None:
    cycle(6)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_nothing_leaks_over_two_hundred_cycles() -> None:
    cycle(200)


def test_a_closed_batcher_ends_slow_environments(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        """
        batcher = make(seconds=30.0)
        batcher.execute()
        time.sleep(0.2)
        start = time.monotonic()
        batcher.close()
        print(time.monotonic() - start)
        """,
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    assert float(out) < limit(2.0)
