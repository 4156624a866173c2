"""Shares of a GPU, after GMI-DRL (USENIX ATC 2025): m processes against one at its best number of environments.

``serving``: each process owns simulators and a policy and collects. ``training``: PPO by m learners, each with its own
environments, or by m - 1 collectors and one trainer, apart from each other. A process answers on its standard output
how fast it was, for as many seconds as a line on its input says, and profiles them into a folder if the line names one:

    PYTHONPATH=benchmarks python -m papers.gpu_shares training DEVICE TASK LAYOUT PROCESSES SHARING ENVIRONMENTS
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common.ladder_rungs import synchronize
from common.reporting import Bars, Row, table
from common.resumable_run import Ladder, check_mps, use_in
from papers import atari

from rlstruct import RL_Agent, Trajectories, VecEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent, ConvolutionalActorCritic
from rlstruct.algos.ppo import PPOConfig, PPOLearner, train
from rlstruct.algos.training.loop import TrainingLoop
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import SharingError
from rlstruct.profiling import profile
from rlstruct.sharing import GpuSharing, Mode, Role, launch_roles
from rlstruct.sims import make

MODES: tuple[Mode, ...] = ("none", "mps", "mig")
WORDS: dict[Mode, str] = {"none": "", "mps": ", MPS", "mig": ", MIG"}
HIDDEN = (256, 128, 64)  # of most tasks of the paper
T = 32
N_WARM = 2  # batches before the clock starts: graphs are recorded in them
ROUNDS = 5
EACH, APART = "all in each", "apart"
PAPERS = {
    "serving": ("GMI-DRL over Isaac Gym: 2.08", 2.08),
    "training": ("GMI-DRL over NCCL, several GPUs: 1.69", 1.69),
}
EACH_OVER_APART = "speed of all in each process, over trainer apart"
PAPERS_LAYOUT = ("GMI-DRL: 3.88", 3.88)
BEST_FIRST: tuple[Mode, ...] = ("mps", "none", "mig")  # most is expected of the first
_FEW_SECONDS = 240.0  # of a run that measures a part of the list only
_USE_SECONDS = 10.0  # to profile the processes, and read that
Rate = Callable[..., float]  # collects or trains for so many seconds, and returns steps per second


@dataclass(frozen=True)
class Task:
    """Environments, and who acts and learns in them."""

    create_env: Callable[..., VecEnv]
    create_model: Callable[[], torch.nn.Module]
    create_agent: Callable[..., RL_Agent]
    needs: tuple[str, ...] = ()  # packages


def create_cart_poles(n_envs: int, seed: int, device: str) -> VecEnv:
    return make("CartPole-v1", n_envs, seed, auto_reset=True, device=device)


TASKS = {
    "CartPole-v1": Task(create_cart_poles, partial(ActorCritic, 4, 2, hidden=HIDDEN), ActorCriticAgent),
    "ALE/Pong-v5": Task(
        partial(atari.create_env, atari.OURS, "Pong"), partial(ConvolutionalActorCritic, (4, 84, 84), 6),
        atari.create_agent, ("warp", "ale_py"),
    ),
}  # fmt: skip


def answer(step: Callable[[], int], device: torch.device) -> None:
    """Take steps for as many seconds as each line of the input says, and print their rate; profile them if it says so.

    A profile shows all processes that answer: those that serve, and the first of those that train.
    """
    for _ in range(N_WARM):
        step()
    synchronize(device)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, _, folder = line.strip().partition(" ")
        with profile(folder, window=600.0) if folder else contextlib.nullcontext():
            step()  # a trainer may find batches that were collected while it waited for the line
            synchronize(device)
            begin, n_steps = time.perf_counter(), 0
            while time.perf_counter() - begin < float(seconds):
                n_steps += step()
                synchronize(device)
            rate = n_steps / (time.perf_counter() - begin)
        print("rate", rate, flush=True)


def create_batcher(task: Task, n_envs: int, device: str, seed: int = 0) -> RL_Batcher:
    arguments: dict[str, Any] = {"agent_args": {"model": task.create_model(), "device": device}, "seed": seed}
    arguments["env_args"] = {"n_envs": n_envs, "device": device}
    return RL_Batcher(T, task.create_agent, task.create_env, device=device, **arguments)


def configure(device: str, **settings: Any) -> PPOConfig:  # noqa: ANN401 - those of PPOConfig
    """Return the settings of PPO, which are the same in every layout."""
    places: dict[str, Any] = dict.fromkeys(("learner_device", "batcher_device", "evaluation_device"), device)
    # Without end, one learner would compile what several cannot.
    places |= dict.fromkeys(("compile_agent", "compile_update", "compile_simulator"), False)
    return PPOConfig(
        n_env_steps=10**15, n_timesteps=T, n_processes=0, evaluation_processes=0, evaluation_episodes=1,
        evaluation_interval=10**15, **places, **settings,
    )  # fmt: skip


def serve(task: Task, device: str, m: int, sharing: Mode, n_envs: int) -> None:
    """Collect in this process, which is one of m."""
    with create_batcher(task, n_envs // m, device) as batcher:
        batcher.reset()

        def step() -> int:
            batcher.execute()
            batcher.get()
            return n_envs // m * T

        answer(step, batcher.device)


def learn(task: Task, device: str, m: int, sharing: Mode, n_envs: int) -> None:
    """Train with this process as the first of m learners."""
    iterate = TrainingLoop.iterate

    def answering(loop: TrainingLoop) -> None:
        def step() -> int:
            before = loop.env_steps
            iterate(loop)
            return loop.env_steps - before

        answer(step, loop.learner.device)
        raise SystemExit  # the other learners end with this one

    TrainingLoop.iterate = answering  # type: ignore[method-assign]
    config = configure(device, n_envs=n_envs // m * m, n_learners=m, sharing=sharing)
    train(config, task.create_model, task.create_agent, task.create_env)


@dataclass
class Collector(Role):
    """Simulators and agents: sends a batch after each new set of weights."""

    task: Task
    n_envs: int

    def run(self) -> None:
        with create_batcher(self.task, self.n_envs, self.device, seed=self.index * self.n_envs) as batcher:
            batcher.reset()
            while True:
                batcher.update(self.receive("trainer"))
                batcher.execute()
                self.send(batcher.get()[0], "trainer")


@dataclass
class Trainer(Role):
    """Learns from the batches of all collectors together, while they collect the next ones."""

    task: Task
    n_envs: int

    def run(self) -> None:
        sys.stdin = open(f"/proc/{os.getppid()}/fd/0")  # noqa: SIM115 - multiprocessing has closed that of this process
        config = configure(self.device, n_envs=self.n_envs)
        learner = PPOLearner.create(self.task.create_model().to(self.device), self.task.create_agent, config)
        collectors = range(self.size("collector"))

        def publish() -> None:
            for index in collectors:
                self.send(learner.model.state_dict(), "collector", index)

        def step() -> int:
            batch = Trajectories.cat([self.receive("collector", index) for index in collectors])
            publish()
            learner.update(batch, 0.0)
            return self.n_envs * T

        publish()
        answer(step, learner.device)


def learn_apart(task: Task, device: str, m: int, sharing: Mode, n_envs: int) -> None:
    """Train in m processes of which one learns and the others collect."""
    n_each = n_envs // (m - 1)
    roles: dict[str, list[Role]] = {"collector": [Collector(task, n_each) for _ in range(m - 1)]}
    roles["trainer"] = [Trainer(task, n_each * (m - 1))]
    launch_roles(roles, device=device, sharing=sharing)


LAYOUTS = {"serving": {EACH: serve}, "training": {EACH: learn, APART: learn_apart}}


@contextlib.contextmanager
def opened(kind: str, where: Row, device: torch.device) -> Iterator[Rate]:
    """Start m processes that collect, or that learn together, and return what lets all run at once."""
    m, sharing = where["m"], where["sharing"]
    if sharing != "none" and device.type != "cuda":
        raise SharingError("there is no CUDA device")
    if sharing == "mps":
        check_mps(device)
    # A process that asks torch for a GPU can still get a share of it afterwards.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    with contextlib.ExitStack() as stack:
        environments: list[dict[str, str]] = [{}]
        if kind == "serving":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* CUDA contexts")  # that is what is measured
                shares = GpuSharing(device, m, sharing, where="experiments")
            stack.callback(shares.close)
            environments = [shares.environment(i) for i in range(m)]
        words = [kind, str(device), *(str(where[key]) for key in ("task", "layout", "m", "sharing", "N"))]
        started = []
        for environment in environments:
            process = subprocess.Popen(
                [sys.executable, "-m", "papers.gpu_shares", *words],
                env={**variables, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in started:
            _wait_for("ready", process)

        def rate(seconds: float, folder: str = "") -> float:
            for process in started:
                print(seconds, folder, file=process.stdin, flush=True)
            return sum(float(_wait_for("rate", process)) for process in started)

        yield rate


def _wait_for(word: str, process: subprocess.Popen[str]) -> str:
    """Return what follows a word at the start of a line, after whatever else is printed, such as Warp's messages."""
    for line in process.stdout or ():
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise RuntimeError(f"a process that shares the device ended with code {process.wait()}")


def measure(kind: str, run: Ladder, sizes: Mapping[str, Sequence[int]]) -> None:
    """Find one process's best number of environments in each task; then time m of them in turns with that process.

    A run of few minutes takes the first number instead: what sharing gains is worth more than the best one.
    """
    seconds = 0.05 if run.quick else 1.0
    few = not run.quick and run.deadline - time.perf_counter() <= _FEW_SECONDS
    tasks = []
    for task in (task for task in TASKS if task in sizes):
        if missing := [name for name in TASKS[task].needs if importlib.util.find_spec(name) is None]:
            run.add(part=kind, task=task, left_out=f"{missing[0]} is not installed")
        else:
            tasks.append(task)
    alone: Row = {"layout": EACH, "m": 1, "sharing": "none"}
    singles = [{"task": task, **alone, "N": n} for task in tasks for n in sizes[task]]
    for where in run.todo(kind, 25, [] if few else singles):
        compare(kind, run, where, seconds, None)
    best = {task: _best(run.rows, kind, task) or (sizes[task][0] if few else None) for task in tasks}
    with contextlib.ExitStack() as stack:
        references: dict[str, Rate | None] = {}
        for where in run.todo(kind, 30, places(kind, sizes["m"], best, few=run.quick)):
            if (task := where["task"]) not in references:
                references[task] = None
                reference = {"task": task, **alone, "N": best[task]}
                with run.caught(part=kind, **reference), run.limited(part=kind, **reference):
                    references[task] = stack.enter_context(opened(kind, reference, run.device))
            if references[task] is not None:
                compare(kind, run, where, seconds, references[task])


def _best(rows: Sequence[Row], kind: str, task: str) -> int | None:
    """Return the number of environments with which one process is fastest; None if none was measured."""
    alone = [row for row in rows if row["part"] == kind and row.get("task") == task and row.get("m") == 1]
    measured = [(row["steps_per_second"], row["N"]) for row in alone if "steps_per_second" in row]
    return max(measured)[1] if measured else None


def places(kind: str, numbers: Sequence[int], best: Mapping[str, int | None], *, few: bool) -> Iterator[Row]:
    """Yield what is compared with one process: as many environments together; with the first number also in each."""
    each = [(m, 1) for m in numbers]
    if not few:
        each.insert(1, (numbers[0], numbers[0]))
    for (m, times), task, layout, sharing in product(each, best, LAYOUTS[kind], BEST_FIRST):
        if (n_envs := best[task]) is not None:
            yield {"task": task, "layout": layout, "m": m, "sharing": sharing, "N": n_envs * times}


def compare(kind: str, run: Ladder, where: Row, seconds: float, reference: Rate | None) -> None:
    """Add a row about processes, in turns with the reference; on a GPU also how much of it they use."""
    row: Row = {"part": kind, **where}
    with run.caught(**row), run.limited(**row), opened(kind, where, run.device) as rate:
        pairs: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            pairs.append((reference(seconds) if reference else 0.0, rate(seconds)))
            measured: Row = {"steps_per_second": statistics.median(ours for _, ours in pairs), "rounds": pairs}
            measured["ratio"] = statistics.median(ours / theirs for theirs, ours in pairs) if reference else None
            run.add_unfinished(row, measured)
        if run.device.type == "cuda":
            if time.perf_counter() + _USE_SECONDS > run.deadline:
                return
            with run.caught(**row, look=True):
                measured |= _use(rate)
        run.add(**row, **measured)


def _use(rate: Rate) -> Row:
    """Return NVML's utilisation of the GPU, and the share in which any process that answers is busy there."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(path := f"{folder}/profile", window=600.0):  # in this process for NVML, which workers do not ask
            rate(4.0, path)
        return use_in(path)


def tabulate(kind: str, rows: Sequence[Row]) -> list[str]:
    """Tabulate steps per second by task, number of processes, layout and how they share, against one at its best."""
    own = [row for row in rows if row["part"] == kind]
    measured = [row for row in own if "steps_per_second" in row]
    tasks = list(TASKS)
    measured.sort(key=lambda row: (tasks.index(row["task"]), row["m"], MODES.index(row["sharing"]), row["N"]))
    best: dict[str, float] = {}
    for row in measured:
        if row["m"] == 1:
            best[row["task"]] = max(best.get(row["task"], 0.0), row["steps_per_second"])
    lines = []
    for row in measured:
        ratio = row["ratio"] or row["steps_per_second"] / best[row["task"]]
        shares = ["" if row.get(key) is None else f"{100 * row[key]:.0f} %" for key in ("nvml", "busy")]
        words = [row["task"], row["layout"] if row["m"] > 1 else "", row["sharing"], row["m"]]
        lines.append([*words, f"{row['N']:,}", f"{row['steps_per_second']:,.0f}", f"{ratio:.2f}", *shares])
    head = "task | layout | sharing | processes | environments | steps/s | times one at its best | NVML | GPU busy"
    why = {(row["sharing"], row["left_out"]): None for row in own if "left_out" in row and "sharing" in row}
    shown = [*table(head, lines, 3), "", *(f"{sharing}: {said}." for sharing, said in why)]
    compared = [f"- {row['task']}, {name(row)}: {ratio:.2f}" for row, ratio in each_over_apart(own)]
    return [*shown, "", f"{EACH_OVER_APART} ({PAPERS_LAYOUT[0]}):", "", *compared] if compared else shown


def each_over_apart(rows: Iterable[Row]) -> list[tuple[Row, float]]:
    """Return how much faster all processes are in the first layout than in the second, with a row of each pair."""

    def place(row: Row) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("task", "m", "sharing", "N"))

    found = [row for row in rows if row.get("ratio")]
    apart = {place(row): row["ratio"] for row in found if row["layout"] == APART}
    return [(row, row["ratio"] / apart[place(row)]) for row in found if row["layout"] == EACH and place(row) in apart]


def name(row: Row) -> str:
    return f"{row['m']} processes{WORDS[row['sharing']]}, {row['N']:,} environments"


def bars(kind: str, rows: Sequence[Row]) -> Bars:
    """Return the speed of each number of processes, over one at its best, with what GMI-DRL reports."""
    drawn = Bars()
    for row in sorted(rows, key=lambda row: (row.get("m", 0), row.get("N", 0))):
        if row.get("ratio"):
            title = f"{kind}, {row['task']}: speed of all processes, over one at its best"
            layout = f", {row['layout']}" if len(LAYOUTS[kind]) > 1 else ""
            drawn.add(title, name(row) + layout, "", row["ratio"])
            drawn.add_paper(title, *PAPERS[kind])
    for row, ratio in each_over_apart(rows):
        drawn.add(EACH_OVER_APART, f"{row['task']}, {name(row)}", "", ratio)
        drawn.add_paper(EACH_OVER_APART, *PAPERS_LAYOUT)
    return drawn


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, kind, device, task, layout, m, sharing, n_envs = sys.argv
    LAYOUTS[kind][layout](TASKS[task], device, int(m), sharing, int(n_envs))  # type: ignore[arg-type]
