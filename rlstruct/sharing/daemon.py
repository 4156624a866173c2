"""mps: a private MPS daemon for one GPU, for the duration of a block.

Without MPS, processes on a GPU take turns: while a kernel of one process runs, however small, the others' kernels wait.
Under MPS their kernels run concurrently.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rlstruct.batchers.workers.placement import PERCENTAGE
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadValueError, SharingError, warn_user
from rlstruct.options import Range
from rlstruct.sharing import supervisor

PROGRAM = "nvidia-cuda-mps-control"
MOST_CLIENTS = 48
"""Maximum number of client processes of a daemon; 60 from CUDA 13.1 on."""

_logger = logging.getLogger("rlstruct.sharing")
_running: dict[str, Daemon] = {}  # by GPU
_lock = threading.RLock()
_FIX = "Read its output, or let processes take turns: sharing='none'."
_ASK_SECONDS = 5.0
_END_SECONDS = 30.0  # longer than the supervisor needs


class Daemon:
    """Private MPS daemon, created by `mps`, which documents the arguments.

    Attributes:
        gpu: UUID of its GPU.
        folder: folder of its pipes and logs, private to this user; deleted when the daemon ends.
        limits: thread_percentage and memory_limit.
        users: number of blocks that use the daemon.
    """

    def __init__(self, gpu: str, thread_percentage: float | None, memory_limit: int | None, seconds: float) -> None:
        self.gpu, self.limits, self.users = gpu, (thread_percentage, memory_limit), 0
        if problem := why_unavailable():
            raise SharingError(f"mps: {problem}")
        self._pid = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="rlstruct-mps-"))  # mode 0700: clients have the same user
        for name in ("pipe", "log"):
            (self.folder / name).mkdir()
        others = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        self._environment = others | self.environment(thread_percentage)
        if memory_limit is not None:
            self._environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory_limit // 2**20}M"
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, PROGRAM, str(self.folder), str(self._pid)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C does not reach it
            text=True,
        )
        try:
            self._begin(seconds)
        except BaseException:
            self.end(quiet=True)
            raise

    def environment(self, thread_percentage: float | None = None) -> dict[str, str]:
        """Return the environment variables that make a new process a client.

        It sees the GPU as ``cuda:0``, and no other. ``thread_percentage`` may set a lower limit than the daemon's.
        """
        return {
            "CUDA_VISIBLE_DEVICES": self.gpu,  # a UUID, because an index would count the GPUs that the daemon sees
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            **limited_to(thread_percentage),
        }

    def alive(self) -> bool:
        """Return True unless the daemon has ended by itself."""
        return self._supervisor.poll() is None

    def ask(self, command: str, seconds: float = _ASK_SECONDS) -> str:
        """Send a command to ``nvidia-cuda-mps-control`` and return the answer, or "" if it fails or takes too long."""
        try:
            run = subprocess.run(
                [PROGRAM],
                input=f"{command}\n",
                env=self._environment,
                timeout=max(0.1, seconds),
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ""
        return run.stdout.strip() if run.returncode == 0 else ""

    def end(self, *, quiet: bool = False) -> str:
        """End the daemon and its servers within seconds, and return its last output. A forked child does nothing.

        Unless ``quiet``, warn if the daemon had ended by itself.
        """
        if os.getpid() != self._pid or self._supervisor.stdin is None or self._supervisor.stdin.closed:
            return ""
        try:
            # A forked child may hold the pipe open.
            output, _ = self._supervisor.communicate("end\n", timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            output, _ = self._supervisor.communicate()
        if self._supervisor.returncode and not quiet:
            warn_user(
                f"mps: the daemon of {self.gpu} had ended by itself; clients that started after that took turns on the "
                f"GPU. Its output:\n{output}"
            )
        return output

    def _begin(self, seconds: float) -> None:
        """Wait until the daemon answers and its server runs, since CUDA would wait for the server without limit."""
        deadline = time.monotonic() + seconds

        def wait(command: str, good: Callable[[str], bool]) -> str:
            while not good(answer := self.ask(command, min(_ASK_SECONDS, deadline - time.monotonic()))):
                why = "" if self.alive() else "ended at once"
                if not why and time.monotonic() >= deadline:
                    why = f"was not ready within {seconds:g} s: {command!r} was answered by {answer!r}"
                if why:
                    output = self.end(quiet=True)
                    raise SharingError(f"mps: the daemon for {self.gpu} {why}. {_FIX} Its output:\n{output}")
                time.sleep(0.02)
            return answer

        wait("get_default_active_thread_percentage", lambda answer: answer[:1].isdigit())
        self.ask(f"start_server -uid {os.getuid()}", deadline - time.monotonic())
        server = wait("get_server_list", str.isdigit)
        wait(f"get_server_status {server}", lambda answer: "ACTIVE" in answer)
        _logger.info("mps: daemon in %s serves %s", self.folder, self.gpu)


@contextlib.contextmanager
def mps(
    device: DeviceLike = "cuda:0",
    *,
    thread_percentage: float | None = None,
    memory_limit: int | None = None,
    seconds: float = 20.0,
) -> Iterator[Daemon]:
    """Let processes that start in this block use a GPU concurrently, instead of taking turns.

    A private MPS daemon runs until the block ends, or this process crashes. `RL_Batcher(sharing="mps")` starts one, or
    uses that of a surrounding block. Other processes become clients through their environment variables::

        with mps() as daemon:
            subprocess.run(command, env=os.environ | daemon.environment(thread_percentage=25))

    This process does not become a client; its work takes turns with theirs. A second block for the same GPU shares the
    daemon.

    Args:
        device: the GPU; a device of torch, or a UUID such as ``"GPU-8a6e…"``.
        thread_percentage: maximum share of the GPU's threads for one client; more than 0, at most 100.
        memory_limit: maximum GPU memory for one client.  bytes, at least 2**20
        seconds: time to wait for the daemon's first answer.

    Raises:
        SharingError: MPS is not installed, or the daemon does not start; the message contains its output.
        ValueError: there is no such GPU, a limit is out of range, or the running daemon has other limits.
    """
    gpu = gpu_of(device)
    PERCENTAGE.check("mps", "thread_percentage", thread_percentage)
    Range(at_least=2**20, or_none=True).check("mps", "memory_limit", memory_limit)
    limits = (thread_percentage, memory_limit)
    with _lock:
        daemon = _running.get(gpu)
        if daemon is None:
            daemon = _running[gpu] = Daemon(gpu, thread_percentage, memory_limit, seconds)
        elif not daemon.alive():
            raise SharingError(f"mps: the daemon for {gpu} has ended by itself. Leave the block that started it first.")
        elif limits not in ((None, None), daemon.limits):
            raise BadValueError(
                f"mps: (thread_percentage, memory_limit) is {limits}, but a block of this process has a daemon for "
                f"{gpu} with {daemon.limits}. Pass the same, or none."
            )
        daemon.users += 1
    try:
        yield daemon
    finally:
        with _lock:
            daemon.users -= 1
            if not daemon.users:
                del _running[gpu]
                daemon.end()


def gpu_of(device: DeviceLike) -> str:
    """Return the UUID of a GPU, given as a device of torch or as a UUID."""
    if isinstance(device, str) and device.startswith(("GPU-", "MIG-")):
        return device
    resolved = resolve_device(device)
    if resolved.type != "cuda":
        raise BadValueError(f"mps: the device is {resolved}, expected a CUDA device. MPS shares no other devices.")
    return f"GPU-{torch.cuda.get_device_properties(resolved).uuid}"


def limited_to(thread_percentage: float | None) -> dict[str, str]:
    """Return the environment variable that limits a client's threads."""
    return {} if thread_percentage is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{thread_percentage:g}"}


def why_unavailable() -> str:
    """Return the reason why MPS is unavailable, or "" if its program is installed."""
    if shutil.which(PROGRAM):
        return ""
    return (
        f"there is no program {PROGRAM} on the PATH. It comes with NVIDIA's driver for Linux (in Debian and Ubuntu, "
        "package nvidia-compute-utils): install that, or pass sharing='none'."
    )
