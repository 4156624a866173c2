"""A fake nvidia-cuda-mps-control: a script for the PATH that answers as the real one, and writes down its orders.

FAKE_MPS_FOLDER: where ``orders.jsonl`` goes. FAKE_MPS_FAULT: ``dies`` (the daemon ends at once), ``mute`` (it answers
nothing), ``no_server`` (its server never becomes active), ``stubborn`` (neither ``quit`` nor SIGTERM ends it).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = r"""#!{python} -IS
import json, os, signal, socket, subprocess, sys, time
pipe, fault = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ.get("FAKE_MPS_FAULT", "")
variables = {{k: v for k, v in os.environ.items() if k.startswith("CUDA_")}}

def tell(**what):
    with open(os.environ["FAKE_MPS_FOLDER"] + "/orders.jsonl", "a") as file:
        file.write(json.dumps(what | {{"pid": os.getpid(), "environment": variables}}) + "\n")

def serve(sleeper):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(pipe + "/control")
    listener.listen()
    server = None
    while True:
        connection, _ = listener.accept()
        command = connection.recv(1000).decode().strip()
        tell(command=command)
        answer = ""
        if fault == "mute":
            time.sleep(1000)
        if command == "get_default_active_thread_percentage":
            answer = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100.0")
        if command.startswith("start_server"):
            server = subprocess.Popen(sleeper, start_new_session=True)  # a separate session, as the real one has
            tell(server=server.pid)
        if command == "get_server_list" and server:
            answer = str(server.pid)
        if command.startswith("get_server_status"):
            answer = "INITIALIZING" if fault == "no_server" else "ACTIVE"
        if command.startswith("quit") and fault != "stubborn":
            if server:
                server.kill()
                server.wait()
            connection.close()
            return
        connection.sendall(answer.encode())
        connection.close()

if sys.argv[1:] == ["-f"]:
    tell(daemon=os.getpid())
    print("fake daemon", flush=True)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "dies":
        sys.exit("no device is there")
    serve([sys.executable, "-IS", "-c", "import time; time.sleep(1000)"])
else:
    control = socket.socket(socket.AF_UNIX)
    try:
        control.connect(pipe + "/control")
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    control.sendall(sys.stdin.readline().encode())
    sys.stdout.write(control.recv(1000).decode() + "\n")
"""


class FakeMps:
    """The fake on the PATH, and its orders."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it first on the PATH; daemons put their folders into ``folder`` too."""
        self.folder, self._monkeypatch = folder, monkeypatch
        (folder / "bin").mkdir()
        (folder / "tmp").mkdir()
        script = folder / "bin" / "nvidia-cuda-mps-control"
        script.write_text(SCRIPT.format(python=sys.executable))
        script.chmod(0o755)
        for name, value in {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "FAKE_MPS_FOLDER": str(folder),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))

    def fault(self, name: str) -> None:
        """Let daemons that start from here on have a fault."""
        self._monkeypatch.setenv("FAKE_MPS_FAULT", name)

    def orders(self, key: str) -> list[Any]:
        """Return the values written under a key, in order."""
        path = self.folder / "orders.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line[key] for line in lines if key in line]

    def environment(self) -> dict[str, str]:
        """CUDA variables of the newest daemon."""
        lines = [json.loads(line) for line in (self.folder / "orders.jsonl").read_text().splitlines()]
        found: dict[str, str] = next(line["environment"] for line in reversed(lines) if "daemon" in line)
        return found

    def left(self) -> list[str]:
        """Processes and folders of daemons that are still there."""
        pids = self.orders("daemon") + self.orders("server")
        return [str(pid) for pid in pids if is_alive(pid)] + [
            str(path) for path in (self.folder / "tmp").glob("rlstruct-*")
        ]

    def assert_nothing_left(self, seconds: float = 10.0) -> None:
        """Fail unless all is gone within a time."""
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.left() == []


def is_alive(pid: int) -> bool:
    """Return True if a process exists, zombies included."""
    return Path(f"/proc/{pid}").exists()
