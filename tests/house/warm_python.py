"""Runs scripts in copies of one process that has imported torch and the library, which takes longer than most scripts.

The process is forked for each script, so no script sees what another one did.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import Any


class WarmPython:
    """A process that waits for scripts; it ends with the last reference to its standard input."""

    def __init__(self) -> None:
        environment = {**os.environ, "MPLBACKEND": "Agg"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: pathlib.Path, folder: pathlib.Path, seconds: int = 300) -> subprocess.CompletedProcess[str]:
        """Run a script as ``python script`` in a folder does, with an empty standard input.

        A script that takes more seconds ends by SIGALRM.
        """
        with tempfile.TemporaryDirectory() as place:
            said = [os.path.join(place, name) for name in ("output", "errors")]
            print(json.dumps([str(script), str(folder), *said, seconds]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()  # type: ignore[union-attr]
            if not answer:
                raise RuntimeError(f"the process that runs scripts ended with code {self._process.wait()}")
            output, errors = (pathlib.Path(one).read_text() for one in said)
        return subprocess.CompletedProcess([str(script)], int(answer), output, errors)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(60)
        self._process.stdout.close()  # type: ignore[union-attr]


def play(script: str, folder: str, output: str, errors: str, seconds: int) -> int:
    """Run a script in this process, which has no other task; return its exit code."""
    sys.stdin.close()
    for number, path in enumerate((os.devnull, output, errors)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0)  # noqa: SIM115 - as long as the process
    os.chdir(folder)
    sys.argv, sys.path[0] = [script], os.path.dirname(script)
    signal.alarm(seconds)
    code: Any = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    return code if isinstance(code, int) else int(code is not None)


def serve() -> None:
    """Fork for each line of the input, and print the exit code of the copy, or minus its signal."""
    import gymnasium  # noqa: F401
    import torch._dynamo  # noqa: F401 - every optimiser imports it

    import rlstruct

    for name in dir(rlstruct):
        getattr(rlstruct, name)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            sys.exit(play(*json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
