"""Scripts in new processes that need not import torch, TorchInductor and gymnasium, which takes seconds of a core.

A server process, which is this file run as a script, has imported them and forks for each script. The script has its
process to itself, as ``__main__``, and its errors, warnings and exit code are those of ``python script.py``. Nothing
of rlstruct is imported in advance, so a script that forgets an import of ours fails here, too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from types import ModuleType, TracebackType

PRELOADED = (
    "gymnasium.envs.classic_control",
    "torch",
    *("torch._inductor.compile_fx", "torch._inductor.decomposition", "torch.fx.experimental.proxy_tensor"),
)


class WarmPython:
    """The server, which runs one script at a time and starts with the first one."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.communicate()  # closes its input, which ends it

    def run(self, script: pathlib.Path, folder: pathlib.Path, seconds: int) -> subprocess.CompletedProcess[str]:
        """Run a script in ``folder``, without a screen; after these seconds the system kills it (exit code -14)."""
        environment = {**os.environ, "MPLBACKEND": "Agg"}
        command = [sys.executable, str(script)]
        if sys.platform != "linux":  # elsewhere a process that has imported torch cannot be forked
            return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
        if self._server is None:
            server = [sys.executable, __file__]
            self._server = subprocess.Popen(
                server, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        with tempfile.TemporaryDirectory() as outputs:
            streams = [pathlib.Path(outputs, name) for name in ("stdout", "stderr")]
            request = [str(script), str(folder), seconds, *map(str, streams)]
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(command, code, *(stream.read_text() for stream in streams))


def serve() -> tuple[str, list[str]]:
    """Fork for every request; return in each new process, with the script and the files for what it prints."""
    for line in iter(sys.stdin.readline, ""):
        script, folder, seconds, *outputs = json.loads(line)
        if pid := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        signal.alarm(seconds)
        os.chdir(folder)
        return script, outputs
    raise SystemExit


def become(script: str, outputs: list[str]) -> None:
    """Run a script as ``python script`` does."""
    for stream, path in enumerate([os.devnull, *outputs]):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")  # both: for pickling
    main.__file__, sys.argv, sys.path[0] = script, [script], os.path.dirname(script)
    exec(compile(pathlib.Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    become(*serve())
