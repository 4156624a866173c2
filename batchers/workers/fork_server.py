"""Server process that has imported torch, gymnasium and rlstruct, and from which worker processes are forked.

It never opens CUDA and has one thread, starts with the first worker and ends with its parent, however that ends. In all
but speed and memory a worker is like one of multiprocessing's start method "spawn": see docs/workers.md.
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
from rlstruct.profiling.recorder import VARIABLE

_NUMBER = struct.Struct("q")  # what the server says of a worker: its process id, and in the end its exit code
_FORK = b"f"
_MOST_DESCRIPTORS = 200
_LEAVING_SECONDS = 1.0
# What scripts that collect import, too, once torch is there: together a fifth of a second.
_IMPORTED = (
    "gymnasium.envs.classic_control",
    *("rlstruct.batchers.workers.local", "rlstruct.envs", "rlstruct.agents", "rlstruct.sims", "rlstruct.algos"),
)
# Read once, when Python starts or a library is loaded: the server must have been started with the same.
_READ_ONCE = (
    *("ATEN_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_"),
    *("OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_"),
)


def start_process(target: Callable[..., object], arguments: tuple[Any, ...], name: str) -> BaseProcess:
    """Start a process that calls ``target``, within `quiet_start`; it is killed when this process dies.

    It is not a daemon: daemons may not have children, and gymnasium's AsyncVectorEnv has some.
    """
    process: BaseProcess
    if getattr(sys, "frozen", False):  # the executable is the program itself: it does not run other code
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
    """The server as its parent sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.environment = _read_once()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = f"from {__name__} import serve; serve({theirs.fileno()}, {mortal_parent()})"
            environment = {name: value for name, value in os.environ.items() if name != VARIABLE}  # is not profiled
            self.process = subprocess.Popen(_command(code), env=environment, pass_fds=[theirs.fileno()])
        self._close = util.Finalize(self, _end, args=(self.control, self.process), exitpriority=50)  # after the pools

    def serves_us(self) -> bool:
        """Return True if it runs, and for this process: a forked child has a copy of this object."""
        return self.owner == os.getpid() and self.process.poll() is None

    def fork(self, descriptors: list[int]) -> None:
        """Ask for a worker with these descriptors. Hardly ever waits."""
        while True:
            try:
                socket.send_fds(self.control, [_FORK], descriptors)
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
            time.sleep(0.01)  # the system allows only so many under way; the server reads them once it has started


_server: _Server | None = None
_inherited: list[int] = []  # in a worker: the descriptors that its parent has sent along


def _running_server() -> _Server:
    """Return the server of this process, a new one if there is none that fits. Workers hold on to theirs."""
    global _server
    if _server is None or not _server.serves_us() or _server.environment != _read_once():
        _server = _Server()
    return _server


def _read_once() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_ONCE)}


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a server, with the workers that it still has."""
    control.close()
    try:
        process.wait(_LEAVING_SECONDS)
    except subprocess.TimeoutExpired:  # it imports, or is stopped
        process.kill()
        process.wait()


class _Forked:
    """A worker that the server forks, as `multiprocessing.Process` wants to see it.

    multiprocessing has a fork server, too: one for whatever a program forks from it, with the environment of its start;
    and it leaves a folder behind if the program is killed.
    """

    class DupFd:
        """Place of a descriptor among those that the worker gets."""

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
        data = os.memfd_create("rlstruct", os.MFD_CLOEXEC)  # a pipe would make us wait for the worker to read
        self.close = util.Finalize(self, _close, args=(self.sentinel, ours))
        try:
            with open(data, "wb", closefd=False) as file:
                file.write(pickled.getbuffer())
            os.lseek(data, 0, os.SEEK_SET)
            resource_tracker.ensure_running()
            tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
            self._server = _running_server()  # which ends once nothing holds on to it
            with open(os.devnull, "r+b", buffering=0) as null:  # a stream may be a file of this program
                streams = [fd if os.get_inheritable(fd) else null.fileno() for fd in range(3)]
                self._server.fork([status, data, alive, tracker, *streams, *self._descriptors])
        finally:
            _close(status, alive, data)

    def duplicate_for_child(self, fd: int) -> int:
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    @property
    def pid(self) -> int | None:
        """Process id; waits until the server has started and forked. None if it died before."""
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
        """Read what the server says next of the worker."""
        said = os.read(self.sentinel, _NUMBER.size)
        if not said:  # the server is gone; whatever it has forked was killed with it
            self.returncode = 1 if self._pid is None else -signal.SIGKILL
        elif self._pid is None:
            (self._pid,) = _NUMBER.unpack(said)
        else:
            (self.returncode,) = _NUMBER.unpack(said)

    def kill(self) -> None:
        if self.poll() is None and self._pid is None:  # the server, which still starts, will find the pipe closed
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
    """Fork workers as a socket asks until the parent ends; in a worker, become it. The kernel watches ``parent``."""
    if parent is not None:
        die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    open_standard_streams()
    server = os.getpid()
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the garbage collector would write to what workers share
    if descriptors := _fork_workers(socket.socket(fileno=control)):
        become_worker(descriptors, server)
    os._exit(0)


def become_worker(descriptors: list[int], server: int) -> None:
    """Take over what the parent has sent, as a process that it has started itself would, and run the worker."""
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
    numpy.random.seed()  # forked workers have the same state; Python itself sees to `random`, and torch is seeded
    sys.exit(spawn._main(data, alive))


def _fork_workers(control: socket.socket) -> list[int]:
    """Return in a worker, with its descriptors, or in the server at its end, with none."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    statuses: dict[int, int] = {}  # pipe on which the end of a worker is reported, by process id
    while True:
        if woken in wait([control, woken]):
            os.read(woken, 4096)
            while statuses and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if pipe := statuses.pop(ended[0], None):  # else it is a child of something that was imported
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
            os.kill(pid, signal.SIGKILL)  # it is not wanted any more


def _fork(descriptors: Sequence[int]) -> int | None:
    """Return the process id of a new worker, None in that worker."""
    if len(os.listdir("/proc/self/task")) == 1:
        return os.fork() or None
    # Something that this Python imports at its start has started a thread. A forked process would lack it, and would
    # wait for ever for a lock that it holds: the worker starts from nothing.
    code = f"from {__name__} import become_worker; become_worker({list(descriptors)}, {os.getpid()})"
    return util.spawnv_passfds(os.fsencode(spawn.get_executable()), _command(code), descriptors)


def _report(status: int, number: int) -> bool:
    """Return False if the parent has lost interest."""
    try:
        return os.write(status, _NUMBER.pack(number)) > 0
    except BrokenPipeError:
        return False


def _command(code: str) -> list[str]:
    """Return the command line of a Python that runs code, with the flags and the path of this one."""
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *flags, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
