"""`rlstruct devices`: the machine's devices, and the recommended device of each part of a training."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from rlstruct.cli.messages import UserError, plural, say
from rlstruct.device import device_count, processor, usable_cores

_GIB = 2**30


def run(arguments: Sequence[str]) -> None:
    """Print the report; there are no ``arguments``."""
    if arguments and arguments[0] in ("-h", "--help"):
        say("usage: rlstruct devices\n\nShow the CPUs and GPUs of this machine, and where each part should run.")
        return
    if arguments:
        raise UserError(f"expected no arguments, got {' '.join(arguments)!r}.")
    for line in report(usable_cores(), torch.get_num_threads(), find_gpus()):
        say(line)


def report(n_cpus: int, n_threads: int, gpus: Sequence[str]) -> list[str]:
    """Describe the machine and the layout that fits it; ``gpus`` is the result of `find_gpus`."""
    try:
        size = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB of memory"
    except (ValueError, OSError, AttributeError):  # not on every system
        size = ""
    lines = [f"cpu      {plural(n_cpus, 'core')} ({processor()}){size}; PyTorch uses {plural(n_threads, 'thread')}"]
    lines += gpus
    lines += ["", "How processes can share a GPU:", *(f"  {line}" for line in sharing_modes())] if gpus else []
    if not gpus:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        lines.append(f"no GPU   torch {torch.__version__} was built for {build} and sees none")
    lines += [f"{device_type:<8} seen by torch" for device_type in ("mps", "xpu") if device_count(device_type)]
    return [*lines, "", "Where each part should run:", *layout(n_cpus, len(gpus))]


def sharing_modes() -> list[str]:
    """Describe the modes in which processes can share a GPU."""
    from rlstruct.sharing import describe  # takes a second to import, and is of use only on a machine with a GPU

    return describe()


def layout(n_cpus: int, n_gpus: int) -> list[str]:
    """Recommend where environments, agent and learner live, with the options of `rlstruct train`."""
    learner = " --learner-device cuda:0" if n_gpus else ""
    # One process per GPU does everything; "cuda" gives each learner its own GPU.
    device, learners = ("cuda", f" --learners {n_gpus}") if n_gpus > 1 else ("cuda:0", "")
    workers = f"--n-processes {max(1, n_cpus - 1)}"
    layouts = {
        "cheap environments (CartPole), small networks: all in one process on the CPU": "--n-processes 0",
        "slow environments: worker processes on the CPU": f"{workers}{learner}",
        "the same, learning at the same time (a2c, dqn, sac, alphazero)": f"{workers} --overlap{learner}",
    }
    if n_gpus:
        layouts |= {
            "images (Atari): environments on the CPU, agent and learner on the GPU, bytes cross": (
                "--n-processes 0 --batcher-device cuda:0 --learner-device cuda:0 --evaluation-device cuda:0"
            ),
            # The replay buffers of the other algorithms would have to be larger, too.
            "bundled simulators: everything on the GPU, nothing crosses to the host (a2c, ppo, reinforce)": (
                f"--simulator torch --n-envs {4096 * n_gpus} --batcher-device {device} --learner-device {device} "
                f"--evaluation-processes 0 --evaluation-device {device}{learners}"
            ),
        }
    else:
        compiled = "bundled simulators: thousands of environments in one process, compiled"
        layouts[compiled] = "--simulator compile --n-envs 1024"
    layouts["how many workers and environments: measure on this machine"] = "rlstruct tune ppo --env CartPole-v1"
    return [line for what, options in layouts.items() for line in (f"  {what}", f"      {options}")]


def find_gpus() -> list[str]:
    """Describe each CUDA device: its model, memory and free memory."""
    lines = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        try:
            free = f", {torch.cuda.mem_get_info(i)[0] / _GIB:.1f} GiB free"
        except RuntimeError:  # the device is full, or in exclusive mode
            free = ""
        lines.append(f"cuda:{i}   {gpu.name}, {gpu.total_memory / _GIB:.1f} GiB{free}")
    return lines
