"""Entry point of the command line: the first word chooses a command."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

from rlstruct.cli.messages import LOG, UserError, complain, nearest, out_of_memory, refused, require, say
from rlstruct.errors import Explained

# All but profile, explain, envs and devices need the extra "train".
COMMANDS = {
    "train": "train an agent: rlstruct train a2c --env CartPole-v1",
    "evaluate": "play whole episodes with a trained agent: rlstruct evaluate RUN --video out.gif",
    "export": "write a trained policy for other programs: rlstruct export RUN --onnx",
    "plot": "draw the learning curves of runs, seeds together: rlstruct plot RUN [RUN ...]",
    "play": "film random actions, or the agent of a run: rlstruct play Breakout-MinAtar",
    "tune": "find the fastest number of workers and environments: rlstruct tune ppo --env CartPole-v1",
    "profile": "run a command and show where its time goes: rlstruct profile train ppo --env CartPole-v1",
    "explain": "explain an error, offline: rlstruct explain WorkerError",
    "envs": "list the environments that you can train on here: rlstruct envs cart",
    "devices": "show the CPUs and GPUs of this machine, and which layout suits them",
}

INTERRUPTED = 130  # the shell's convention: 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status: 0, 2 for a mistake of the user, 130 after Ctrl-C.

    Args:
        arguments: the words after the program's name; None for those of this process, which Ctrl-C then ends here.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        say(_help())
        return 0
    if words[0] == "--version":
        from rlstruct import __version__

        say(f"rlstruct {__version__}")
        return 0
    command, *rest = words
    log = LOG.set(None)
    try:
        if command not in COMMANDS:
            raise UserError(f"there is no command {command!r}, only {', '.join(COMMANDS)}.{nearest(command, COMMANDS)}")
        if command not in ("devices", "envs", "explain", "profile"):
            require("train", "tyro", "tqdm", "tensorboard", "matplotlib", "PIL", what=f"rlstruct {command}")
        with _leaving_at_once(command):
            module = importlib.import_module(f"rlstruct.cli.commands.{command}")
        with _short_warnings(command):
            module.run(rest)
    except (UserError, Explained) as error:
        name = f"rlstruct {command}" if command in COMMANDS else "rlstruct"
        hint = f"To read more: rlstruct explain {error.topic}\n" if isinstance(error, Explained) else ""
        remote = getattr(error, "remote_traceback", "")  # traceback of the user's code, unless it is in the message
        trace = "" if remote in str(error) else f"\n{remote}"
        complain(f"{name}: {error}\n{trace}{hint}")
        return 2
    except BrokenPipeError:
        say()  # ends the command if the reader of its help has gone, as ``| head``
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        if not (said := refused(error) if isinstance(error, OSError) else out_of_memory(error)):
            raise
        complain(f"rlstruct {command}: {said}\n")
        return 2
    except KeyboardInterrupt as stop:
        complain(_interrupted(command, str(stop)))
        if arguments is None:  # exit without torch's teardown, which takes seconds on a busy machine
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except SystemExit as leaving:  # raised by the option parser, which has printed the reason
        return leaving.code if isinstance(leaving.code, int) else 2
    finally:
        LOG.reset(log)
    return 0


@contextlib.contextmanager
def _short_warnings(command: str) -> Iterator[None]:
    """Show each warning as one line, with its location unless it is in this library."""

    def show(
        message: Warning | str, category: object, filename: str, lineno: int, file: object = None, line: object = None
    ) -> None:
        names = [name for name in list(sys.modules) if f"{name}.".startswith(("__main__.", "rlstruct."))]
        ours = {getattr(sys.modules.get(name), "__file__", None) for name in names}
        place = "" if filename in ours or filename.startswith("<") else f" ({filename}:{lineno})"
        complain(f"rlstruct {command}: warning: {' '.join(str(message).split())}{place}\n")

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before


@contextlib.contextmanager
def _leaving_at_once(command: str) -> Iterator[None]:
    """Let Ctrl-C end the process while torch is imported.

    There is nothing to clean up yet, and an exception during the import may surface as another one or break a module.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # called from Python, or with the signal ignored: leave it unchanged
        return

    def leave(signum: int, frame: object) -> None:
        os.write(2, _interrupted(command).encode())
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(command: str, why: str = "") -> str:
    return f"\nrlstruct {command}: {why or 'interrupted.'}\n"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: rlstruct COMMAND [OPTIONS]", "", "Train and inspect agents. COMMAND is one of", ""]
    for name, text in COMMANDS.items():
        what, _, example = text.partition(": ")
        lines.append(f"  {name:<{width}}  {what}")
        lines += [f"  {'':<{width}}    {example}"] if example else []
    return "\n".join([*lines, "", "rlstruct COMMAND --help shows its options."])
