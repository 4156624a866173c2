"""A stand-in for Windows: nothing that only POSIX has may be imported or used by what collects in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("tyro", "tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

# The packages of others and Python's own come first: on Windows they do without these names.
PROGRAM = """
import asyncio, multiprocessing.popen_spawn_posix, multiprocessing.shared_memory, os, platform, select, signal, socket
import subprocess, sys, tempfile, types
import cloudpickle, gymnasium.envs.classic_control, gymnasium.vector, matplotlib.pyplot, tqdm, tyro
import torch.distributed, torch.utils.tensorboard
torch.optim.Adam([torch.zeros(1)])  # imports more

def copied(module):
    twin = types.ModuleType(module.__name__)
    vars(twin).update(vars(module))
    return twin

subprocess.os, subprocess.signal = copied(os), copied(signal)  # it is Python's, and another one on Windows
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for module, names in {
    os: "memfd_create sched_getaffinity sched_setaffinity sched_getscheduler fork register_at_fork getpriority killpg"
    " setsid getuid pidfd_open statvfs mkfifo nice getpgrp uname sysconf WNOHANG fchmod",
    signal: "SIGKILL SIGCHLD SIGHUP SIGSTOP SIGUSR1 SIGQUIT SIGALRM pthread_sigmask setitimer",
    socket: "AF_UNIX SOCK_SEQPACKET send_fds recv_fds",
    select: "poll epoll",
}.items():
    for name in names.split():
        delattr(module, name)

import rlstruct, rlstruct.agents, rlstruct.algos, rlstruct.batchers, rlstruct.envs, rlstruct.policies, rlstruct.sims
from rlstruct.cli.main import COMMANDS, main

assert not [name for name in sys.modules if "fork_server" in name or "workers.local" in name]
for command in COMMANDS:
    assert main([command, "--help"]) == 0, command
train = ["train", "ppo", "--env", "CartPole-v1", "--n-env-steps", "512", "--n-timesteps", "64", "--no-progress"]
here = ["--n-processes", "0", "--evaluation-processes", "0"]
assert main([*train, *here]) == 0
assert main(["evaluate", os.path.join("runs", *os.listdir("runs")), "--episodes", "2"]) == 0
sys.platform = "win32"
assert main([*train, "--n-processes", "1"]) == 2
"""


@pytest.mark.slow
def test_windows_collects_trains_and_shows_help_without_workers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "RLSTRUCT_PORTABLE": "1"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rlstruct train: RL_Batcher: worker processes need Linux or macOS" in done.stderr
    assert "WSL" in done.stderr
