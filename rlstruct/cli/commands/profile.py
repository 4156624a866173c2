"""`rlstruct profile`: run a command, and report where its time goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from rlstruct.cli.messages import UserError, say

_USAGE = """usage: rlstruct profile [--out FOLDER] [--window SECONDS] COMMAND ...
       rlstruct profile --diff FOLDER FOLDER

Run a command and report where all its processes spend their time: in Python, in
torch's operators, in the simulator or in CUDA. COMMAND is a command of rlstruct
(train ppo --env CartPole-v1), any Python script (my_training.py --seed 1), or
another program that imports rlstruct. Comments "# operation: inference" name
parts of a script; calls of torch, gymnasium, stable-baselines3, sbx, TorchRL,
and the parts of CleanRL's scripts are named without. The folder receives a
table as JSON, a trace for https://ui.perfetto.dev and a picture.

  --out FOLDER      folder of the profile; by default runs/profile-<time>
  --window SECONDS  length of a recorded window, 1 by default. One begins at
                    the start, with the first entry of each operation, and
                    whenever the elapsed time has tripled. A number larger
                    than the run records all of it.
  --diff A B        list the operations that became slower or faster from
                    profile A to profile B, beyond noise"""


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct profile`` with these arguments. The exit status is the command's.

    Raises:
        UserError: the arguments are invalid, or the command recorded nothing.
        SystemExit: the command failed.
        KeyboardInterrupt: Ctrl-C, after the recording so far has been reported.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        say(_USAGE)
        return
    options, command = _parse(list(arguments))
    # Imported here, because they import torch, which is not needed to report mistakes.
    from rlstruct.profiling.operations import VARIABLE
    from rlstruct.profiling.report import differences, read, save
    from rlstruct.profiling.settings import settings

    if "diff" in options:
        try:
            before, after = (read(folder) for folder in command)
        except FileNotFoundError as error:
            raise UserError(str(error)) from None
        for line in differences(before, after):
            say(textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False))
        return
    program = _program(command)  # before the folder is made
    folder = Path(options.get("out", f"runs/profile-{time.strftime('%Y%m%d-%H%M%S')}"))
    try:
        window = float(text := options.get("window", "1"))
    except ValueError:
        raise UserError(f"--window {text}: expected a number of seconds, at least 0.001.") from None
    try:
        variable = settings(folder, window=window)
    except (ValueError, FileExistsError) as error:
        raise UserError(str(error).removeprefix("profile: ")) from None
    process, status = subprocess.Popen(program, env={**os.environ, VARIABLE: variable}), None
    while status is None:
        with contextlib.suppress(KeyboardInterrupt):  # the command receives Ctrl-C, too, and writes its recording
            status = process.wait()
    try:
        report = read(folder)
    except FileNotFoundError as error:
        raise UserError(f"{error} The command ended with status {status}.") from None
    say(f"\n{report}\n")
    for file in save(report, folder):
        say(str(file))
    if status == -2 or status == 130:
        raise KeyboardInterrupt
    if status:
        raise SystemExit(status)


def _parse(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate the options from the command that follows them."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--diff":
            if len(words) != 2:
                raise UserError(f"--diff needs the folders of two profiles, got {len(words)}.")
            return {"diff": ""}, words
        if word not in ("--out", "--window") or not words:
            raise UserError(f"{word}: expected --out FOLDER, --window SECONDS or --diff A B before the command.")
        options[word[2:]] = words.pop(0)
    if not words:
        raise UserError("name the command to profile: rlstruct profile train a2c --env CartPole-v1")
    return options, words


def _program(words: list[str]) -> list[str]:
    """Return the program to start: a command of rlstruct, a script, or another program."""
    from rlstruct.cli.main import COMMANDS

    if words[0] in COMMANDS:
        return [sys.executable, "-m", "rlstruct", *words]
    if words[0].endswith(".py"):
        if not Path(words[0]).exists():
            raise UserError(f"there is no file {words[0]}.")
        return [sys.executable, "-m", "rlstruct.profiling.script", *words]
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]!r} is neither a command of rlstruct, nor a script, nor a program.")
    return words
