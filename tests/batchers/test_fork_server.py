"""Worker processes are forked from a server, and are in all else what a process started from nothing would be."""

from __future__ import annotations

import locale
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from batcher_fakes import worker_processes
from fake_agents import RngAgent
from fake_envs import CountingEnv

from rlstruct import WorkerError, WorkerTimeout
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.workers import fork_server
from rlstruct.batchers.workers.system import is_portable

pytestmark = pytest.mark.skipif(is_portable(), reason="portable workers have no server")
MIB = 2**20


class Room(CountingEnv):
    """Writes a line into a file for each process that creates it: what it finds there."""

    def __init__(self, seed: int, file: str, question: str) -> None:
        super().__init__(1, seed, auto_reset=True)
        modules = (locale, os, random, re, resource, signal, sys, threading, time, torch)
        names = {"np": np, **{module.__name__: module for module in modules}}
        with open(file, "a") as found:
            found.write(f"{eval(question, names)}\n")


def batcher(file: Path, question: str, n_processes: int = 1) -> RL_Batcher:
    env_args = {"file": str(file), "question": question}
    made = RL_Batcher(2, RngAgent, Room, env_args=env_args, n_processes=n_processes, seed=0)
    made.reset()
    batch(made)
    return made


def batch(made: RL_Batcher) -> None:
    made.execute()
    made.get()


def answers(folder: Path, question: str, n_processes: int = 1) -> list[str]:
    """Ask new workers."""
    file = folder / "answers"
    file.unlink(missing_ok=True)
    batcher(file, question, n_processes).close()
    return file.read_text().splitlines()


def test_what_has_changed_in_this_process_reaches_new_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = "os.environ.get('COLOUR'), sys.path[0], os.getcwd(), sys.argv, os.sched_getaffinity(0)"
    cores = os.sched_getaffinity(0)
    before = (None, sys.path[0], os.getcwd(), sys.argv, cores)
    assert answers(tmp_path, question) == [str(before)]
    with monkeypatch.context() as changed:
        changed.setenv("COLOUR", "grün")
        changed.syspath_prepend(str(tmp_path / "library"))
        changed.chdir(tmp_path)
        changed.setattr(sys, "argv", ["program", "--flag"])
        os.sched_setaffinity(0, {min(cores)})
        try:
            found = answers(tmp_path, question)
        finally:
            os.sched_setaffinity(0, cores)
    assert found == [str(("grün", str(tmp_path / "library"), str(tmp_path), ["program", "--flag"], {min(cores)}))]
    assert answers(tmp_path, question) == [str(before)]


@pytest.mark.slow
def test_what_python_reads_when_it_starts_reaches_new_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "held"
    question = "hash('word'), os.getppid()"  # the parent of a worker is its server
    with batcher(file, question) as held:
        before, server = eval(file.read_text())
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        found, new_server = eval(answers(tmp_path, question)[0])
        words = [sys.executable, "-c", "print(hash('word'))"]
        assert found == int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        assert found != before
        held.execute()  # its server stays as long as it does
        held.get()
    assert server != new_server
    assert not psutil.pid_exists(server)


def test_what_workers_print_goes_where_this_process_prints_now(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers(tmp_path, "os.write(1, b'from a worker') + os.write(2, b'its complaint')")
    assert capfd.readouterr() == ("from a worker", "its complaint")


def test_no_two_workers_draw_the_same(tmp_path: Path) -> None:
    drawn = [line.split() for line in answers(tmp_path, "np.random.rand(), random.random()", n_processes=3)]
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [3, 3]


def test_a_worker_has_no_descriptor_of_another(tmp_path: Path) -> None:
    question = "sum('socket' in os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')"
    question += " if os.path.islink(f'/proc/self/fd/{fd}'))"
    assert len(set(answers(tmp_path, question, n_processes=3))) == 1


def test_a_killed_server_is_replaced(tmp_path: Path) -> None:
    one = batcher(tmp_path / "one", "0")
    (worker,) = worker_processes()
    server = worker.parent()
    assert server is not None
    server.kill()
    psutil.wait_procs([worker], timeout=5.0)
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        one.execute()
    one.close()
    assert not worker_processes()
    assert answers(tmp_path, "1 + 1") == ["2"]


@pytest.mark.slow
def test_a_worker_is_there_at_once_with_little_to_itself_and_a_forked_child_has_its_own(tmp_path: Path) -> None:
    program = """
        import os, sys, warnings
        from pathlib import Path
        from rlstruct.batchers import RL_Batcher
        from fake_agents import RngAgent
        from fake_envs import create_counting_env
        from batcher_fakes import worker_processes

        if __name__ == "__main__":
            batchers = []
            for _ in range(2):
                env_args = {"n_envs": 2, "auto_reset": True}
                batcher = RL_Batcher(2, RngAgent, create_counting_env, env_args=env_args, n_processes=3, seed=0)
                batcher.reset()
                batcher.execute()
                batcher.get()
                batchers.append(batcher)
            for worker in worker_processes():
                print(sum(worker.cpu_times()[:2]), worker.memory_full_info().uss)
            for batcher in batchers:
                batcher.close()
            from test_fork_server import answers

            folder = Path(sys.argv[1])
            servers = answers(folder, "os.getppid()")
            warnings.simplefilter("ignore")  # newer Pythons warn of fork
            pid = os.fork()
            if pid == 0:
                os._exit(answers(folder, "os.getppid()") == servers)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(code, answers(folder, "os.getppid()") == servers)
    """
    *workers, forked = run(tmp_path, program).stdout.splitlines()
    seconds, private = np.loadtxt(workers).T
    assert len(seconds) == 6
    assert seconds.max() < 0.5  # importing torch alone takes longer
    assert private.max() < 20 * MIB
    assert forked == "0 True"


def test_a_server_that_hangs_delays_neither_errors_nor_statistics_nor_the_end(tmp_path: Path) -> None:
    one = batcher(tmp_path / "one", "os.getppid()")
    server = psutil.Process(int((tmp_path / "one").read_text()))
    server.suspend()
    try:
        start = time.monotonic()
        env_args = {"file": str(tmp_path / "two"), "question": "0"}
        two = RL_Batcher(2, RngAgent, Room, env_args=env_args, n_processes=2, seed=0, timeout=1.0)
        assert two.stats().pids == ()
        with pytest.raises(WorkerTimeout, match=r"worker 0 \(no process yet, .* no answer within 1 s") as caught:
            two.reset()
        assert caught.value.pid is None
        two.close()
        (pid,) = one.stats().pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=f"pid {pid}, .* was killed by SIGKILL"):
            batch(one)
        one.close()
        assert time.monotonic() - start < 8.0  # a second for the limit, and little for the rest
    finally:
        server.resume()
    assert answers(tmp_path, "1 + 1") == ["2"]


HERE = """(time.tzname, sys.stdout.encoding, locale.getlocale(), resource.getrlimit(resource.RLIMIT_NOFILE),
    os.getpriority(os.PRIO_PROCESS, 0), os.getpgrp(), signal.getsignal(signal.SIGHUP), sys.warnoptions,
    re.findall("(?:Umask|SigIgn|SigBlk).*", open("/proc/self/status").read()), sys.path, os.environ.get("BIG"))"""


@pytest.mark.slow
def test_a_worker_sees_what_a_spawned_process_sees_if_settings_have_changed_since(tmp_path: Path) -> None:
    program = """
        import locale, multiprocessing, os, re, resource, signal, sys, time
        from pathlib import Path
        from rlstruct.batchers.workers.processes import quiet_start
        import test_fork_server
        from test_fork_server import HERE, answers

        def ask(connection):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            connection.send(repr(eval(HERE)))

        def change():
            os.environ.update(TZ="Asia/Kathmandu", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
            os.environ["BIG"] = 200_000 * "x"
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
            os.nice(1)
            os.umask(0o057)
            os.setpgid(0, 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            sys.warnoptions.append("ignore::ResourceWarning")
            sys.path.extend(f"/nowhere/{i}/{'x' * 100}" for i in range(2000))

        if __name__ == "__main__":
            folder = Path(sys.argv[1])
            before = answers(folder, HERE)
            change()
            (after,) = answers(folder, HERE)
            ours, theirs = multiprocessing.Pipe()
            del os.environ["BIG"]  # no process can be started with it
            with quiet_start():
                process = multiprocessing.get_context("spawn").Process(target=ask, args=(theirs,))
                process.start()
            found = ours.recv()
            process.join()
            assert after.count("x" * 200_000) == 1
            assert after.replace(repr("x" * 200_000), "None") == found, (after[:1500], found[:1500])
            assert after not in before
    """
    run(tmp_path, program)


def test_every_setting_that_a_process_inherits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [fork_server.settings_of_new_processes()]

    def assert_noticed() -> None:
        now = fork_server.settings_of_new_processes()
        assert now not in seen
        seen.append(now)

    for variable in ("TZ", "LANG", "LC_NUMERIC", "OMP_SCHEDULE", "TORCHDYNAMO_EXTENDED_DEBUG_CPP", "PYTHONHASHSEED"):
        monkeypatch.setenv(variable, "7")
        assert_noticed()
    monkeypatch.setattr(sys, "warnoptions", ["ignore::ResourceWarning"])
    assert_noticed()
    umask, limits = os.umask(0o057), resource.getrlimit(resource.RLIMIT_CORE)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert_noticed()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert_noticed()
        resource.setrlimit(resource.RLIMIT_CORE, (0 if limits[0] else limits[1], limits[1]))
        assert limits[1] == 0 or fork_server.settings_of_new_processes() not in seen
    finally:
        os.umask(umask)
        signal.signal(signal.SIGHUP, ignored)
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    monkeypatch.setenv("COLOUR", "red")  # read whenever it is needed, so it is sent to every worker
    before = fork_server.settings_of_new_processes()
    monkeypatch.setenv("COLOUR", "blue")
    assert before == fork_server.settings_of_new_processes()


@pytest.mark.slow
def test_where_python_starts_with_a_thread_workers_start_from_nothing(tmp_path: Path) -> None:
    # As some debuggers and profilers do it; a forked process would lack the thread, and wait for ever for its locks.
    start = "threading.Thread(target=time.sleep, args=(1e6,), name='site', daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(f"import threading, time\n{start}\n")
    program = """
        import os, sys
        from pathlib import Path
        from test_fork_server import answers

        if __name__ == "__main__":
            os.environ["COLOUR"] = "red"
            print(answers(Path(sys.argv[1]), "os.environ['COLOUR'], 'site' in str(threading.enumerate())"))
    """
    assert run(tmp_path, program).stdout == f"{[str(('red', True))]}\n"


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words(folder, program), env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done


def words(folder: Path, program: str) -> list[str]:
    (folder / "program.py").write_text(textwrap.dedent(program))
    return [sys.executable, str(folder / "program.py"), str(folder)]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent), *sys.path])}
