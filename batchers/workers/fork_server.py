"""Server process that has imported torch, gymnasium and rlstruct, and forks worker processes.

It starts with the first worker and ends with the program. Without it, each worker would spend seconds and 150 MiB on
importing torch. These promises are the reason why it is not multiprocessing's fork server:

| promise to users                          | kept by                        | multiprocessing's fork server     |
|-------------------------------------------|--------------------------------|-----------------------------------|
| The variables, cores and streams of now   | `_Forked` sends them           | as when the server started        |
| Settings that a process reads once        | `settings_of_new_processes`    | as when the server started        |
| ``__main__`` and `sys.path` as in "spawn" | `spawn._main`, `_command`      | imports ``__main__`` once for all |
| `sys.path` of any length                  | `_command` writes a file       | "Argument list too long"          |
| Starting, naming, ending without waiting  | `memfd`, `_Forked.wait`        | starting waits for the server     |
| Hundreds of workers at once               | `_Server.fork` tries again     | not needed, since it waits        |
| Workers may start processes               | `ForkedProcess`: no daemon    | the same                          |
| All are killed with the program           | `die_with`                     | only if they can read a pipe      |
| A killed program leaves no folder         | socket without a name          | leaves /tmp/pymp-…                |
| The rest of the program is not affected   | private `_server`, its `owner` | one for the whole program         |
| No lock of a thread is held in a worker   | `_fork` counts the threads     | forks nevertheless                |
| 15 to 20 MiB for a worker                 | `gc.freeze`                    | the collector copies memory       |
| No two workers draw the same              | `numpy.random.seed`            | equal numbers from NumPy          |
| Frozen programs                           | `system.start_process` spawns  | cannot start                      |
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import marshal
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import context, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy

from rlstruct.batchers.workers.processes import open_standard_streams
from rlstruct.batchers.workers.system import die_with, mortal_parent
from rlstruct.profiling.operations import VARIABLE

_MESSAGE = struct.Struct("qq")  # about a worker: its process id, and its exit code or _RUNNING
_RUNNING = 2**32
_FORK = b"f"
_MOST_DESCRIPTORS = 200
_NOTICING_SECONDS = 0.5  # in which a server that does not hang reports that a worker has ended
_LONGEST_VARIABLE = 30_000  # characters; Linux starts no process with a variable of more than 128 KiB
# Most scripts that collect import these as well. Once torch is loaded they take a fifth of a second.
_IMPORTED = (
    "gymnasium.envs.classic_control",
    *("rlstruct.batchers.workers.local", "rlstruct.envs", "rlstruct.agents", "rlstruct.sims", "rlstruct.algos"),
)
# Variables that are read once: by the C library, by Python when it starts, or by a module above while it is loaded.
_READ_ONCE = (
    *("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "TZ"),
    *("OPENSSL_", "PYTHON"),
    *("ACC_", "GFORTRAN_", "GOMP_", "GOTO_", "I_MPI_", "KMP_", "MPI_", "OMP", "OPENBLAS_"),
    *("ATEN_", "COMPILE_", "DNNL_", "FX_", "INTEL_", "KINETO_", "MKL", "NPY_", "NUMPY_", "NVPL_", "ONEDNN_"),
    *("PYTORCH_", "TORCHDYNAMO_", "TORCHEXPORT_", "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_"),
)
# Lines of /proc/thread-self/status that a new process inherits.
_STATUS = re.compile(
    r"^(?:Umask|[UG]id|Groups|NSpgid|NSsid|SigBlk|SigIgn|Cap\w+|NoNewPrivs|Seccomp\w*|THP_enabled|Mems_allowed):.*",
    re.MULTILINE,
)


class _Server:
    """The parent's connection to its server."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.settings = settings_of_new_processes()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {mortal_parent()})"
        environment = {name: value for name, value in os.environ.items() if len(value) < _LONGEST_VARIABLE}
        environment.pop(VARIABLE, None)  # not profiled
        with theirs, _command(code) as (command, file):
            self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno(), file])
        self._close = util.Finalize(self, _end, args=(self.control, self.process), exitpriority=50)  # after pools

    def fork(self, descriptors: list[int], seconds: float) -> None:
        """Request a worker with these descriptors. This waits only while hundreds of requests have not been read."""
        deadline = time.monotonic() + seconds
        while True:
            self.control.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                socket.send_fds(self.control, [_FORK], descriptors)
                return
            except OSError as error:  # too many descriptors in flight; the server reads them once it has started
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)


_server: _Server | None = None
_inherited: list[int] = []  # in a worker: descriptors from its parent


def _running_server() -> _Server:
    """Return this process's server, or a new one if none fits. Workers keep a reference to their own."""
    global _server
    # It may belong to the process that this one was forked from.
    runs = _server is not None and _server.owner == os.getpid() and _server.process.poll() is None
    if _server is None or not runs or _server.settings != settings_of_new_processes():
        _server = _Server()
    return _server


def settings_of_new_processes() -> tuple[object, ...]:
    """Return whatever a process inherits or reads when it starts, and could not change or read again if it were forked.

    Environment variables that are read later, cores and the current directory are not included: a forked process gets
    them from its parent.
    """
    own = Path("/proc/thread-self")
    status = _STATUS.findall((own / "status").read_text())
    for number, line in enumerate(status):
        name, _, value = line.partition(":")
        if name == "SigIgn":  # all workers ignore Ctrl-C, and this process only while it starts them
            status[number] = int(value, 16) & ~(1 << signal.SIGINT - 1)
    return (
        {name: value for name, value in os.environ.items() if name.startswith(_READ_ONCE)},
        _interpreter(),
        status,
        [(own / name).read_text() for name in ("limits", "oom_score_adj", "cgroup")],
        (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        [os.isatty(stream) for stream in range(3)],  # Python then writes each line at once
    )


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _close_all(descriptors: list[int]) -> None:
    _close(*descriptors)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended; None if its parent has read it."""
    try:
        *_, status = Path(f"/proc/{pid}/stat").read_text().split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(status))


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Kill a server, and with it its remaining workers."""
    control.close()
    process.kill()
    process.wait()


class _Forked:
    """A worker forked by the server, with the interface that `multiprocessing.Process` expects of its ``_popen``."""

    class DupFd:
        """Index of a descriptor among those sent to the worker."""

        def __init__(self, place: int) -> None:
            self._place = place

        def detach(self) -> int:
            return _inherited[self._place]

    def __init__(self, process: ForkedProcess) -> None:
        util._flush_std_streams()  # type: ignore[attr-defined]
        self._pid: int | None = None
        self._pidfd: int | None = None  # readable once the worker has ended, even if the server has not noticed
        self.returncode: int | None = None
        self._descriptors: list[int] = []
        prepared, pickled = spawn.get_preparation_data(process.name), io.BytesIO()
        pickle.dump((dict(os.environ), os.sched_getaffinity(0)), pickled)
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(prepared, pickled)
            reduction.dump(process, pickled)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, status = os.pipe()
        alive, ours = os.pipe()
        data = os.memfd_create("rlstruct", os.MFD_CLOEXEC)  # writing to a pipe would wait for the worker
        self._open = [self.sentinel, ours]
        self.close = util.Finalize(self, _close_all, args=(self._open,))
        try:
            with open(data, "wb", closefd=False) as file:
                file.write(pickled.getbuffer())
            os.lseek(data, 0, os.SEEK_SET)
            resource_tracker.ensure_running()
            tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
            self._server = _running_server()  # the reference keeps it running
            with open(os.devnull, "r+b", buffering=0) as null:  # for streams that are not to be inherited
                streams = [fd if os.get_inheritable(fd) else null.fileno() for fd in range(3)]
                self._server.fork([status, data, alive, tracker, *streams, *self._descriptors], process.seconds)
        finally:
            _close(status, alive, data)

    def duplicate_for_child(self, fd: int) -> int:
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    @property
    def pid(self) -> int | None:
        """Process id; None until the server has forked."""
        if self._pid is None:
            self.poll()
        return self._pid

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            sources = [self.sentinel] if self._pidfd is None else [self.sentinel, self._pidfd]
            ready = wait(sources, None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                return None
            if self.sentinel in ready or wait([self.sentinel], _NOTICING_SECONDS):
                self._read()
            elif self._pid is not None:  # the server hangs
                self.returncode, self._pidfd = _exit_code(self._pid), None
        return self.returncode

    def _read(self) -> None:
        """Read the next message about the worker."""
        message = os.read(self.sentinel, _MESSAGE.size)
        if not message:  # the server is gone, and its workers were killed with it
            self.returncode = 1 if self._pid is None else -signal.SIGKILL
            return
        pid, code = _MESSAGE.unpack(message)
        if self._pid is None:
            self._pid = pid
            with contextlib.suppress(OSError):  # it has already ended
                self._pidfd = os.pidfd_open(pid)
                self._open.append(self._pidfd)
        self.returncode = None if code == _RUNNING else code

    def kill(self) -> None:
        if self.poll() is None and self._pid is None:  # the server, which is still starting, will find the pipe closed
            self.close()
            self.returncode = -signal.SIGKILL
        elif self.returncode is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._pid, signal.SIGKILL)


class ForkedProcess(context.SpawnProcess):
    """A process that the server forks; started within ``seconds``."""

    seconds: float

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: ANN401 - typed as one of multiprocessing's own
        return _Forked(process_obj)


def serve(control: int, parent: int | None) -> None:
    """Fork a worker for every request on a socket, until the parent ends.

    Args:
        control: file descriptor of the socket.
        parent: see `mortal_parent`.
    """
    if parent is not None:
        die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides what to do
    open_standard_streams()
    server = os.getpid()
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # keeps the garbage collector from writing to memory that workers share
    if descriptors := _fork_workers(socket.socket(fileno=control)):
        become_worker(descriptors, server)
    os._exit(0)


def become_worker(descriptors: list[int], server: int) -> None:
    """Set up this process as if the parent had spawned it, and run the worker."""
    die_with(server)
    data, alive, tracker, *others = descriptors
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    for standard, stream in enumerate(others[:3]):
        os.dup2(stream, standard)
        os.close(stream)
    _inherited.extend(others[3:])
    with open(data, "rb", closefd=False) as file:
        environment, cores = pickle.load(file)
        os.lseek(data, file.tell(), os.SEEK_SET)
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    numpy.random.seed()  # forked workers share its state; Python reseeds `random`, and the worker seeds torch
    sys.exit(spawn._main(data, alive))


def _fork_workers(control: socket.socket) -> list[int]:
    """Fork workers. Return in each worker, with its descriptors, and in the server when the parent ends, with none."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    statuses: dict[int, int] = {}  # pipe for messages about a worker, by process id
    while True:
        if woken in wait([control, woken]):
            os.read(woken, 4096)
            while statuses and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if pipe := statuses.pop(ended[0], None):  # otherwise an imported module has started this child
                    _report(pipe, ended[0], os.waitstatus_to_exitcode(ended[1]))
                    os.close(pipe)
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return []
        status = descriptors.pop(0)
        pid = _fork(descriptors)
        if pid is None:
            _report(status, os.getpid())  # again, since an answer of this worker may overtake the server's message
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, handler)
            _close(status, woken, wake, *statuses.values())
            control.close()
            return descriptors
        _close(*descriptors)
        statuses[pid] = status
        if not _report(status, pid):
            os.kill(pid, signal.SIGKILL)


def _fork(descriptors: Sequence[int]) -> int | None:
    """Return the process id of a new worker, None in that worker."""
    if len(os.listdir("/proc/self/task")) == 1:
        return os.fork() or None
    # A module that this Python imports at startup has started a thread. A forked process would lack it, and could wait
    # forever for a lock that the thread holds. So spawn the worker.
    code = f"from {__name__} import become_worker; become_worker({list(descriptors)}, {os.getpid()})"
    with _command(code) as (command, file):
        return util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, [*descriptors, file])


def _report(status: int, pid: int, code: int = _RUNNING) -> bool:
    """Send the parent a message about a worker. Return False if the parent has closed the pipe."""
    try:
        return os.write(status, _MESSAGE.pack(pid, code)) > 0
    except BrokenPipeError:
        return False


def _interpreter() -> list[str]:
    """Return the beginning of a command line: this Python and its flags."""
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *flags]


@contextlib.contextmanager
def _command(code: str) -> Iterator[tuple[list[str], int]]:
    """Return a command line that runs code in this Python, and the descriptor of a file for it: the module search path.

    Linux limits each argument to 128 KiB, which a search path can exceed.
    """
    with open(os.memfd_create("rlstruct-path"), "w+b") as file:
        marshal.dump([entry for entry in sys.path if isinstance(entry, str)], file)
        file.seek(0)
        read = f"import marshal, sys\nwith open({file.fileno()}, 'rb') as file: sys.path[:] = marshal.load(file)\n"
        yield [*_interpreter(), "-c", read + code], file.fileno()
