"""Shares of a GPU, after GMI-DRL (USENIX ATC 2025): m processes against one at its best number of environments.

``serving``: each process owns CartPoles and a policy and collects. ``training``: PPO by m learners, each with its own
environments. A process answers on its standard output how fast it was, for as long as a line on its input says:

    PYTHONPATH=benchmarks python -m papers.gpu_shares serving N DEVICE
    PYTHONPATH=benchmarks python -m papers.gpu_shares training N DEVICE LEARNERS SHARING
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common.ladder_rungs import synchronize
from common.reporting import Bars, Row, table
from common.resumable_run import Ladder, use_in

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.ppo import PPOConfig, train
from rlstruct.algos.training.loop import TrainingLoop
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import SharingError
from rlstruct.profiling.settings import VARIABLE, settings
from rlstruct.sharing import GpuSharing, Mode
from rlstruct.sims import make

MODES: tuple[Mode, ...] = ("none", "mps", "mig")
WORDS: dict[Mode, str] = {"none": "", "mps": ", MPS", "mig": ", MIG"}
HIDDEN = (256, 128, 64)  # of most tasks of the paper
T = 32
N_WARM = 2  # batches before the clock starts: graphs are recorded in them
ROUNDS = 5
PAPERS = {
    "serving": ("GMI-DRL over Isaac Gym: 2.08", 2.08),
    "training": ("GMI-DRL over NCCL, several GPUs: 1.69", 1.69),
}
BEST_FIRST: tuple[Mode, ...] = ("mps", "none", "mig")  # most is expected of the first
_FEW_SECONDS = 240.0  # of a run that measures a part of the list only
_USE_SECONDS = 25.0  # to start the processes once more, and profile them
Rate = Callable[[float], float]  # collects or trains for so many seconds, and returns steps per second


create_env = partial(make, "CartPole-v1", auto_reset=True)
create_model = partial(ActorCritic, 4, 2, hidden=HIDDEN)


def answer(step: Callable[[], int], device: torch.device) -> None:
    """Take steps for as many seconds as each line of the input says, and print their rate."""
    for _ in range(N_WARM):
        step()
    synchronize(device)
    print("ready", flush=True)
    for line in sys.stdin:
        begin, n_steps = time.perf_counter(), 0
        while time.perf_counter() - begin < float(line):
            n_steps += step()
            synchronize(device)
        print(n_steps / (time.perf_counter() - begin), flush=True)


def serve(n_envs: int, device: str) -> None:
    """Collect in this process."""
    arguments: dict[str, Any] = {"agent_args": {"model": create_model(), "device": device}, "seed": 0}
    arguments["env_args"] = {"n_envs": n_envs, "device": device}
    with RL_Batcher(T, ActorCriticAgent, create_env, device=device, **arguments) as batcher:
        batcher.reset()

        def step() -> int:
            batcher.execute()
            batcher.get()
            return n_envs * T

        answer(step, batcher.device)


def learn(n_envs: int, device: str, n_learners: int, sharing: Mode) -> None:
    """Train with this process as the first learner; ``n_envs`` is that of each."""
    iterate = TrainingLoop.iterate

    def answering(loop: TrainingLoop) -> None:
        def step() -> int:
            before = loop.env_steps
            iterate(loop)
            return loop.env_steps - before

        answer(step, loop.learner.device)
        raise SystemExit  # the other learners end with this one

    TrainingLoop.iterate = answering  # type: ignore[method-assign]
    places: dict[str, Any] = dict.fromkeys(("learner_device", "batcher_device", "evaluation_device"), device)
    # Without end, one learner would compile what several cannot.
    places |= dict.fromkeys(("compile_agent", "compile_update", "compile_simulator"), False)
    config = PPOConfig(
        n_env_steps=10**15, n_envs=n_envs * n_learners, n_timesteps=T, n_processes=0, n_learners=n_learners,
        sharing=sharing, evaluation_processes=0, evaluation_episodes=1, evaluation_interval=10**15, **places,
    )  # fmt: skip
    train(config, create_model, ActorCriticAgent, create_env)


@contextlib.contextmanager
def opened(
    kind: str, m: int, sharing: Mode, n_envs: int, device: torch.device, variables: Mapping[str, str]
) -> Iterator[Rate]:
    """Start m processes that collect, or that learn together, and return what lets all run at once."""
    if sharing != "none" and device.type != "cuda":
        raise SharingError("there is no CUDA device")
    words = [kind, str(n_envs), str(device)]
    # A process that asks torch for a GPU can still get a share of it afterwards.
    variables = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    with contextlib.ExitStack() as stack:
        environments: list[dict[str, str]] = [{}]
        if kind == "training":
            words += [str(m), sharing]
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* CUDA contexts")  # that is what is measured
                shares = GpuSharing(device, m, sharing, where="experiments")
            stack.callback(shares.close)
            environments = [shares.environment(i) for i in range(m)]
        started = []
        for environment in environments:
            process = subprocess.Popen(
                [sys.executable, "-m", "papers.gpu_shares", *words],
                env={**variables, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in started:
            while _line(process) != "ready":
                pass

        def rate(seconds: float) -> float:
            for process in started:
                print(seconds, file=process.stdin, flush=True)
            return sum(float(_line(process)) for process in started)

        yield rate


def _line(process: subprocess.Popen[str]) -> str:
    if process.stdout is None or not (line := process.stdout.readline()):
        raise RuntimeError(f"a process that shares the device ended with code {process.wait()}")
    return line.strip()


def measure(kind: str, run: Ladder, sizes: Mapping[str, Sequence[int]]) -> None:
    """Find one process's best number of environments; then time m of them in turns with that process."""
    seconds = 0.05 if run.quick else 1.0
    # A run of few minutes compares with the first size: what sharing gains is worth more than the best size.
    n_sizes = len(sizes["N"]) if run.quick or run.deadline - time.perf_counter() > _FEW_SECONDS else 1
    for where in run.todo(kind, 25, ({"m": 1, "sharing": "none", "N": n} for n in sizes["N"][:n_sizes])):
        compare(kind, run, where, seconds, None)
    single = [row for row in run.rows if row["part"] == kind and row.get("m") == 1 and "steps_per_second" in row]
    if not single:
        return
    best = int(max(single, key=lambda row: row["steps_per_second"])["N"])
    with opened(kind, 1, "none", best, run.device, {}) as reference:
        # As many environments together as the one process has; for the first m also as many in each.
        numbers = [(m, best if run.quick else max(1, best // m)) for m in sizes["m"]]
        if not run.quick:
            numbers.insert(1, (sizes["m"][0], best))
        every = ({"m": m, "sharing": sharing, "N": n} for (m, n), sharing in product(numbers, BEST_FIRST))
        for where in run.todo(kind, 30, every):
            compare(kind, run, where, seconds, reference)


def compare(kind: str, run: Ladder, where: Row, seconds: float, reference: Rate | None) -> None:
    """Add a row about processes, in turns with the reference; on a GPU also how much of it they use."""
    row: Row = {"part": kind, **where}
    place = where["m"], where["sharing"], where["N"], run.device
    try:
        with run.limited(**row), opened(kind, *place, {}) as rate:
            pairs: list[tuple[float, float]] = []
            for _ in range(ROUNDS):
                pairs.append((reference(seconds) if reference else 0.0, rate(seconds)))
                found: Row = {"steps_per_second": statistics.median(ours for _, ours in pairs), "rounds": pairs}
                found["ratio"] = statistics.median(ours / theirs for theirs, ours in pairs) if reference else None
                run.add_unfinished(row, found)
        if run.device.type == "cuda":
            if time.perf_counter() + _USE_SECONDS > run.deadline:
                return
            with run.limited(**row):
                found |= _use(kind, *place)
    except Exception as error:  # whatever it is, the others are measured all the same
        run.failed(error, **row)
    else:
        run.add(**row, **found)


def _use(kind: str, m: int, sharing: Mode, n_envs: int, device: torch.device) -> Row:
    """Return NVML's utilisation of the GPU, and the share in which any of the processes is busy there."""
    with tempfile.TemporaryDirectory() as folder:
        profiled = {VARIABLE: settings(Path(folder) / "profile")}
        with opened(kind, m, sharing, n_envs, device, profiled) as rate:
            rate(4.0)
        return use_in(Path(folder) / "profile")


def tabulate(kind: str, rows: Sequence[Row]) -> list[str]:
    """Tabulate steps per second by number of processes and how they share, against one at its best."""
    own = [row for row in rows if row["part"] == kind]
    measured = [row for row in own if "steps_per_second" in row]
    measured.sort(key=lambda row: (row["m"], MODES.index(row["sharing"]), row["N"]))
    best = max((row["steps_per_second"] for row in measured if row["m"] == 1), default=0.0)
    lines = []
    for row in measured:
        ratio = row["ratio"] or row["steps_per_second"] / best
        shares = ["" if row.get(name) is None else f"{100 * row[name]:.0f} %" for name in ("nvml", "busy")]
        words = [row["m"], row["sharing"], f"{row['N']:,}", f"{row['steps_per_second']:,.0f}", f"{ratio:.2f}"]
        lines.append([*words, *shares])
    head = "processes | sharing | environments of each | steps per second | times one at its best | NVML | GPU busy"
    why = {(row["sharing"], row["left_out"]): None for row in own if "left_out" in row and "sharing" in row}
    return [*table(head, lines, 2), "", *(f"{sharing}: {said}." for sharing, said in why)]


def bars(kind: str, rows: Sequence[Row]) -> Bars:
    """Return the speed of each number of processes, over one at its best, with what GMI-DRL reports."""
    drawn, title = Bars(), f"{kind}: speed of all processes, over one at its best"
    for row in sorted(rows, key=lambda row: (row.get("m", 0), row.get("N", 0))):
        if row.get("ratio"):
            drawn.add(title, f"{row['m']} x {row['N']:,} environments{WORDS[row['sharing']]}", "", row["ratio"])
    drawn.add_paper(title, *PAPERS[kind])
    return drawn


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, kind, n_envs, device, *more = sys.argv
    if kind == "serving":
        serve(int(n_envs), device)
    else:
        learn(int(n_envs), device, int(more[0]), more[1])  # type: ignore[arg-type]
