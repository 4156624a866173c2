"""RL-Scope's survey (Gleeson et al., MLSys 2021), here: where trainings of several kinds spend their time.

Each training, with its preset or the defaults, warms up, is timed for some seconds, and is then profiled for as long.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from common.reporting import Bars, Row, calls_in, seconds_of, table

from rlstruct.algos import Callback
from rlstruct.algos.training.callbacks import TrainingContext
from rlstruct.algos.training.presets import PRESETS
from rlstruct.cli.agents import algorithm_of, prepare, with_stacks
from rlstruct.cli.tasks import Task
from rlstruct.profiling import Report, operation, phase, profile, read
from rlstruct.profiling.breakdown import Row as ProfileRow
from rlstruct.profiling.overhead import WAIT

if TYPE_CHECKING:
    from common.resumable_run import Ladder

WARM = 3  # iterations before the clock runs: they compile, capture and fill buffers
CARTPOLE = "CartPole-v1"
LEARNING = {"replay", "loss", "backward", "loss and backward", "gradient step", "optimiser", "replay buffer"}
KINDS = {"environment": "simulation", "simulator": "simulation", "reset": "simulation", "agent": "inference",
         "search": "inference", "graph": "inference"}  # fmt: skip
PARTS = ("simulation", "inference", "learning", "other")


@dataclass(frozen=True)
class Work:
    """A training of the survey; `needs` names the package of its simulator, `mode` how it executes."""

    algorithm: str
    env: str = CARTPOLE
    needs: str = ""
    mode: str = "eager"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in tables."""
        mode = "" if self.mode == "eager" else f", {self.mode}"
        workers = self.settings.get("n_processes", 0)
        return f"{self.algorithm.upper()}, {self.env}{mode}" + (f", {workers} workers" if workers else "")


SMALL = {"n_timesteps": 8}  # an iteration with convolutions takes seconds on a CPU
ALGORITHMS = [Work(name) for name in ("reinforce", "a2c", "ppo", "dqn")]
CONTINUOUS = [Work(name, "Pendulum-v1") for name in ("a2c", "ppo", "sac")]
SIMULATORS = [
    Work("ppo", "LunarLander-v3", "Box2D"),
    *(Work(name, "HalfCheetah-v5", "mujoco") for name in ("ppo", "sac")),
    Work("ppo", "ALE/Pong-v5", "ale_py", settings=SMALL),
]
PAIRED = [*ALGORITHMS, *CONTINUOUS, *SIMULATORS]
OFF_POLICY = ("dqn", "sac")
MODES = [Work("a2c", mode="compiled", settings={"compile_agent": True, "compile_update": True})]
ON_CUDA = [Work("a2c", mode=f"simulator, {mode}", settings={"graph": mode == "graph"}) for mode in ("eager", "graph")]


def works(*, cuda: bool, workers: Iterable[int], quick: bool) -> list[Work]:
    """List the trainings; on a GPU, where time may run out, first those that RL-Scope's findings compare."""
    play: dict[str, Any] = {
        "n_timesteps": 4, "n_updates": 20, "learning_starts": 1, "n_simulations": 16, "evaluation_simulations": 2,
        **({"opponent": "random"} if quick else {}),  # the others search, which takes most of the time
    }  # fmt: skip
    games = [Work("alphazero", "ConnectFour-v0", settings={**play, "n_processes": k}) for k in workers]
    if quick:
        return [Work("a2c"), *games]
    if not cuda:
        return [*ALGORITHMS, *CONTINUOUS, *SIMULATORS, *MODES, *games]
    first = [*ALGORITHMS[1::2], *ON_CUDA, games[0], SIMULATORS[-1], *SIMULATORS[1:3], *MODES]
    return first + [work for work in (*ALGORITHMS, *CONTINUOUS, *SIMULATORS, *games) if work not in first]


class Stretches(Callback):
    """Times iterations after a warm-up, then profiles as many seconds; workers record from their start.

    Attributes:
        timed: seconds, environment steps and iterations of the timed stretch; None before its end.
    """

    def __init__(self, seconds: float, folder: str, profiles: contextlib.ExitStack | None) -> None:
        self._seconds, self._folder, self._profiles = seconds, folder, profiles
        self._since: tuple[float, int, int] | None = None
        self.timed: tuple[float, int, int] | None = None
        self._is_profiling = False

    def on_update(self, context: TrainingContext) -> None:
        """Go on to the next stretch when this one is over."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter(), context.env_steps, context.updates
        if self._since is None:
            self._since = now if context.updates >= WARM else None
        elif now[0] - self._since[0] >= self._seconds and now[2] - self._since[2] >= WARM:
            self.timed = self.timed or (now[0] - self._since[0], now[1] - self._since[1], now[2] - self._since[2])
            if self._profiles is None or self._is_profiling:
                if self._profiles is not None:
                    self._profiles.close()  # before the last evaluation
                context.stop("the survey has seen enough")
                return
            self._is_profiling = True
            self._profiles.enter_context(profile(self._folder, window=3600.0))
            self._profiles.enter_context(phase("training"))
            self._since = (time.perf_counter(), *now[1:])


def configured(work: Work, device: torch.device) -> tuple[Any, Any, Any]:
    """Return the settings of a training, its agent and its environment."""
    algorithm = algorithm_of(work.algorithm)
    simulated = "torch" if work.mode.startswith("simulator") else None
    task = Task(env=work.env, simulator=simulated)
    preset = PRESETS.get((work.algorithm, work.env))
    factory, choice = prepare(work.algorithm, task)
    config = with_stacks(preset.config if preset else algorithm.learner.settings(), factory.stack)
    changes = {
        "n_env_steps": 10**9, "n_processes": 0, "evaluation_processes": 0, "evaluation_episodes": 2,
        "evaluation_step_limit": 10_000, "evaluation_interval": 10**9, "target_return": None,
        "learner_device": str(device), "learning_starts": 200,
        **dict.fromkeys(("compile_agent", "compile_update", "compile_simulator"), False),  # which a mode may turn on
    }  # fmt: skip
    if simulated or (device.type == "cuda" and work.algorithm == "alphazero"):
        changes["batcher_device"] = str(device)
    known = {one.name for one in fields(config)}
    changes = {name: value for name, value in changes.items() if name in known}
    return replace(config, **{**changes, **work.settings}), choice, factory


def train(work: Work, seconds: float, device: torch.device) -> Row:
    """Time a training, profile it, and return what it consists of."""
    config, choice, factory = configured(work, device)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as profiles:
        if config.n_processes:
            profiles.enter_context(profile(folder, window=3600.0))
        seen = Stretches(seconds, folder, None if config.n_processes else profiles)
        algorithm_of(work.algorithm)(config, choice.create_model, choice.create_agent, factory, callbacks=[seen])
        profiles.close()
        taken, n_steps, n_iterations = seen.timed or (float("nan"), 0, 1)
        return {
            "envs": config.n_envs, "timesteps": config.n_timesteps, "steps_per_second": n_steps / taken,
            "seconds": taken / n_iterations, **broken_down(read(folder)),
        }  # fmt: skip


def supervised(seconds: float, device: torch.device) -> Row:
    """Train the network of A2C on CartPole with its batch size, from labels in memory: no simulator, no inference."""
    config, choice, _ = configured(Work("a2c"), device)
    model, n = choice.create_model().to(device), config.n_envs * config.n_timesteps
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    frames = torch.randn(1 << 16, 4, device=device)

    def iterate() -> None:
        with operation("iteration"):
            with operation("replay buffer"):
                seen = frames[torch.randint(len(frames), (n,), device=device)]
            with operation("loss"):
                logits, value = model(seen)
                loss = torch.nn.functional.cross_entropy(logits, (seen[:, 0] > 0).long()) + value.square().mean()
            with operation("backward"):
                optimiser.zero_grad()
                loss.backward()
            with operation("optimiser"):
                optimiser.step()

    count = max(WARM, calls_in(iterate, seconds))
    begun = time.perf_counter()
    seconds_of(iterate, count)
    frames.sum().item()  # waits for the device
    taken = (time.perf_counter() - begun) / count
    with tempfile.TemporaryDirectory() as folder:
        with profile(folder, window=3600.0), phase("training"):
            seconds_of(iterate, count)
        found = {"steps_per_second": n / taken, "seconds": taken, **broken_down(read(folder))}
    return {"envs": config.n_envs, "timesteps": config.n_timesteps, **found}


def by_kind(rows: Sequence[ProfileRow]) -> dict[str, float]:
    """Return the shares of the kinds of operations in some work."""
    kinds = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        known = "learning" if LEARNING & set(row.path) else None
        inner = (KINDS[name] for name in reversed(row.path) if name in KINDS)
        kinds[known or next(inner, "other")] += float(row.corrected.sum())
    total = sum(kinds.values())
    return {name: seconds / total for name, seconds in kinds.items()}


def broken_down(report: Report) -> Row:
    """Return shares of the work of all processes, by kind of operation and by region, and the use of the GPU."""
    rows = [row for one in report.processes for row in one.rows if row.phase == "training" and row.path]
    rows = [row for row in rows if not {WAIT, "evaluation"} & set(row.path)]
    regions = sum(row.corrected.reshape(2, 4).sum(0) for row in rows)
    n_iterations = max(1, sum(row.count for row in rows if row.path[-1] == "iteration"))
    moves = sum(row.transitions for row in rows) / n_iterations
    uses = report.shared or report.gpus
    return {
        **by_kind(rows), "python": float(regions[0] / regions.sum()),
        "to_torch": float(moves[0, 1]), "to_cuda": float(moves[:, 3].sum()), "busy": uses[0].busy if uses else None,
        "busiest": report.shared[0].busiest if report.shared else None, "nvml": uses[0].nvml if uses else None,
    }  # fmt: skip


def measure_survey(run: Ladder, sizes: Mapping[str, Sequence[int]]) -> None:
    """Measure each training, and the supervised one."""
    seconds = sizes["ms"][0] / 1e3
    if not run.measured("survey", work="supervised"):
        with run.caught(part="survey", work="supervised"), run.limited(part="survey", work="supervised"):
            run.add(part="survey", work="supervised", **supervised(seconds, run.device))
    every = {
        work.name: work for work in works(cuda=run.device.type == "cuda", workers=sizes["workers"], quick=run.quick)
    }
    for where in run.todo("survey", 10 + 4 * seconds, ({"work": name} for name in every)):
        work = every[where["work"]]
        if work.needs and importlib.util.find_spec(work.needs) is None:
            run.add(part="survey", work=work.name, left_out=f"{work.needs} is not installed")
            continue
        with run.caught(part="survey", work=work.name), run.limited(part="survey", work=work.name):
            run.add(part="survey", work=work.name, mode=work.mode, **train(work, seconds, run.device))


def survey_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate the shares of each training."""
    cells = []
    for row in (row for row in rows if "seconds" in row):
        shares = [f"{100 * row[name]:.0f} %" for name in (*PARTS, "python")]
        gpu = ["" if row[name] is None else f"{100 * row[name]:.1f} %" for name in ("busy", "busiest", "nvml")]
        size = f"{row['envs']} x {row['timesteps']}"
        rates = [f"{row['steps_per_second']:,.0f}", f"{1e3 * row['seconds']:.3g}"]
        cells.append([row["work"], size, *rates, *shares, f"{row['to_torch']:,.0f}", *gpu])
    head = (
        "training | environments x steps | steps/s | ms an iteration | simulation | inference | learning | other | "
        "in Python | calls of torch an iteration | GPU busy | busiest process | NVML"
    )
    why = [f"{row['work']}: {row['left_out']}." for row in rows if "left_out" in row and "work" in row]
    return [*table(head, cells), "", *why]


def survey_bars(rows: Sequence[Row]) -> Bars:
    """Return where each training spends its time, and on-policy over off-policy shares of simulation per simulator."""
    bars, ratio = Bars(), "share of simulation of an on-policy algorithm, over an off-policy one"
    measured = {row["work"]: row for row in rows if "seconds" in row}
    for work, row in measured.items():
        for part in PARTS:
            bars.add("share of the work of all processes", work, part, row[part])
    shares = {work.name: measured[work.name]["simulation"] for work in PAIRED if work.name in measured}
    for on, off in product(PAIRED, repeat=2):
        names = on.name, off.name
        if (
            on.env == off.env
            and on.algorithm not in OFF_POLICY
            and off.algorithm in OFF_POLICY
            and shares.keys() >= {*names}
        ):
            label = f"{on.algorithm.upper()} over {off.algorithm.upper()}, {on.env}"
            bars.add(ratio, label, "", shares[on.name] / shares[off.name])
    if ratio in bars:
        bars.add_paper(ratio, "RL-Scope: at least 3.5", 3.5)
    return bars
