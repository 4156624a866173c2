"""Server process that has imported torch, gymnasium and rlstruct, and forks worker processes.

It never opens CUDA and has a single thread. It starts with the first worker, and ends when its parent ends for any
reason. Except for speed and memory, a worker behaves as under multiprocessing's start method "spawn"; see
docs/workers.md.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import context, get_context, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy

from rlstruct.batchers.workers.processes import die_with, mortal_parent, open_standard_streams
from rlstruct.profiling.operations import VARIABLE

_NUMBER = struct.Struct("q")  # a message about a worker: first its process id, later its exit code
_FORK = b"f"
_MOST_DESCRIPTORS = 200
_LEAVING_SECONDS = 1.0
# Most scripts that collect import these as well. Once torch is loaded they take a fifth of a second.
_IMPORTED = (
    "gymnasium.envs.classic_control",
    *("rlstruct.batchers.workers.local", "rlstruct.envs", "rlstruct.agents", "rlstruct.sims", "rlstruct.algos"),
)
# Variables that are read once, when Python starts or a library is loaded. The server must have started with the same.
_READ_ONCE = (
    *("ATEN_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_"),
    *("OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_"),
)


def start_process(target: Callable[..., object], arguments: tuple[Any, ...], name: str) -> BaseProcess:
    """Start a process that calls ``target`` and is killed when this process ends. Call this within `quiet_start`.

    The process is not a daemon, because daemons may not have children, which gymnasium's AsyncVectorEnv needs.
    """
    process: BaseProcess
    if getattr(sys, "frozen", False):  # the executable is the program, and cannot run the server's code
        arguments = (mortal_parent(), target, arguments)
        process = get_context("spawn").Process(target=_call, args=arguments, name=name)
    else:
        process = _ForkedProcess(target=target, args=arguments, name=name)
    process.start()
    return process


def _call(parent: int | None, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if parent is not None:
        die_with(parent)
    target(*arguments)


class _Server:
    """The parent's connection to its server."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.environment = _read_once()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = f"from {__name__} import serve; serve({theirs.fileno()}, {mortal_parent()})"
            environment = {name: value for name, value in os.environ.items() if name != VARIABLE}  # not profiled
            self.process = subprocess.Popen(_command(code), env=environment, pass_fds=[theirs.fileno()])
        self._close = util.Finalize(self, _end, args=(self.control, self.process), exitpriority=50)  # after pools

    def fork(self, descriptors: list[int]) -> None:
        """Ask for a worker with these descriptors. This hardly ever waits."""
        while True:
            try:
                socket.send_fds(self.control, [_FORK], descriptors)
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
            time.sleep(0.01)  # too many descriptors in flight; the server reads them once it has started


_server: _Server | None = None
_inherited: list[int] = []  # in a worker: descriptors from its parent


def _running_server() -> _Server:
    """Return this process's server, or a new one if none fits. Workers keep a reference to their own."""
    global _server
    # It may belong to the process that this one was forked from.
    runs = _server is not None and _server.owner == os.getpid() and _server.process.poll() is None
    if _server is None or not runs or _server.environment != _read_once():
        _server = _Server()
    return _server


def _read_once() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_ONCE)}


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a server and its remaining workers."""
    control.close()
    try:
        process.wait(_LEAVING_SECONDS)
    except subprocess.TimeoutExpired:  # busy with imports, or stopped
        process.kill()
        process.wait()


class _Forked:
    """A worker forked by the server, with the interface that `multiprocessing.Process` expects of its ``_popen``.

    multiprocessing's own fork server is shared with the rest of the program, keeps the environment variables of its
    start, and leaves a folder behind if the program is killed.
    """

    class DupFd:
        """Index of a descriptor among those sent to the worker."""

        def __init__(self, place: int) -> None:
            self._place = place

        def detach(self) -> int:
            return _inherited[self._place]

    def __init__(self, process: BaseProcess) -> None:
        util._flush_std_streams()  # type: ignore[attr-defined]
        self._pid: int | None = None
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
        self.close = util.Finalize(self, _close, args=(self.sentinel, ours))
        try:
            with open(data, "wb", closefd=False) as file:
                file.write(pickled.getbuffer())
            os.lseek(data, 0, os.SEEK_SET)
            resource_tracker.ensure_running()
            tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
            self._server = _running_server()  # the reference keeps it running
            with open(os.devnull, "r+b", buffering=0) as null:  # for streams that are not to be inherited
                streams = [fd if os.get_inheritable(fd) else null.fileno() for fd in range(3)]
                self._server.fork([status, data, alive, tracker, *streams, *self._descriptors])
        finally:
            _close(status, alive, data)

    def duplicate_for_child(self, fd: int) -> int:
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    @property
    def pid(self) -> int | None:
        """Process id; waits until the server has forked. None if the server ended before that."""
        while self._pid is None and self.returncode is None:
            self._read()
        return self._pid

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            if not wait([self.sentinel], None if end is None else max(0.0, end - time.monotonic())):
                return None
            self._read()
        return self.returncode

    def _read(self) -> None:
        """Read the server's next message about the worker."""
        message = os.read(self.sentinel, _NUMBER.size)
        if not message:  # the server is gone, and its workers were killed with it
            self.returncode = 1 if self._pid is None else -signal.SIGKILL
        elif self._pid is None:
            (self._pid,) = _NUMBER.unpack(message)
        else:
            (self.returncode,) = _NUMBER.unpack(message)

    def kill(self) -> None:
        if self.poll() is None and self._pid is None:  # the server, which is still starting, will find the pipe closed
            self.close()
            self.returncode = -signal.SIGKILL
        elif self.returncode is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._pid, signal.SIGKILL)


class _ForkedProcess(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: ANN401 - typed as one of multiprocessing's own
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
                    _report(pipe, os.waitstatus_to_exitcode(ended[1]))
                    os.close(pipe)
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return []
        status = descriptors.pop(0)
        pid = _fork(descriptors)
        if pid is None:
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
    return util.spawnv_passfds(os.fsencode(spawn.get_executable()), _command(code), descriptors)


def _report(status: int, number: int) -> bool:
    """Send the parent a message about a worker. Return False if the parent has closed the pipe."""
    try:
        return os.write(status, _NUMBER.pack(number)) > 0
    except BrokenPipeError:
        return False


def _command(code: str) -> list[str]:
    """Return a command line that runs code in this Python, with its flags and its module search path."""
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *flags, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
