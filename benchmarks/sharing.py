"""Processes that share a GPU, and one process that owns it: Connect Four by tree search, samples per second.

    python benchmarks/sharing.py                        2, 7, 16 processes on a GPU; 1 and 2 without one
    python benchmarks/sharing.py --resume               go on where a run with the same commit was cut
    python benchmarks/sharing.py --quick --out DIR      a look whether it runs, under a minute

The workload of SURF's comparison of MPS and MIG: each process plays a game by MCTS with a small network, 500
inferences for each sample (a position with its visits). The processes search as such programs do, one inference at a
time (`common/plain_search.py`); compared with them is one process that searches in many games at once
(`rlstruct.search`). Every inference is counted. What shares a row was timed in turns, in one run: medians of five
rounds after a warm-up. Every row is written after its first round, and again after each; what cannot run says why.
Part ``tune`` is Algorithm 1 of GMI-DRL: the number of environments at which one learner trains fastest, then numbers
of such learners on the same GPU.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from common import reporting, resumable_run
from common.plain_search import PlainSearchAgent, SmallNet

from rlstruct import Trajectories
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.cli.tune_learners import rate_of, with_learners
from rlstruct.errors import SharingError
from rlstruct.profiling.operations import VARIABLE, start_if_requested, stop
from rlstruct.profiling.settings import settings
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.sharing import tune
from rlstruct.sims import ConnectFour, make

N_INFERENCES = 500  # for a sample
MAX_DEPTH = 16  # moves that a search looks ahead
MODES = ("none", "mps", "mig")
Collect = Callable[[], tuple[int, int]]  # takes samples; how many, and after how many inferences
Make = Callable[[], contextlib.AbstractContextManager[Collect]]
Maker = tuple[reporting.Row, Make]
create_model = partial(ActorCritic, 4, 2, hidden=(256, 128, 64))  # of most tasks of GMI-DRL


class Run(resumable_run.Run):
    """One run of the benchmark."""

    name = "sharing"

    def rate(self, makers: Sequence[Maker]) -> None:
        """Time what makers make, in turns; a row for each, also for those that cannot be made or that fail.

        An earlier run may have measured all of them. If it was cut, all are measured again.
        """
        broke = [row for row in self.rows if row.get("broke")]
        makers = [(row, make) for row, make in makers if not any(row.items() <= old.items() for old in broke)]
        if all(self.measured(**row) for row, _ in makers):
            return
        for row, _ in makers:
            self.rows = [old for old in self.rows if not row.items() <= old.items() or resumable_run.UNFINISHED in old]
        with contextlib.ExitStack() as open_ones:
            made: list[tuple[reporting.Row, Make, Collect, tuple[int, int], list[float]]] = []
            for row, make in makers:
                with self.caught(**row):  # whatever it is, the others are measured all the same
                    if time.perf_counter() > self.deadline:
                        raise SharingError(resumable_run.NO_TIME)
                    with self.limited(**row):
                        collect = open_ones.enter_context(make())
                        counts = collect()  # a warm-up: kernels are loaded, graphs recorded
                        collect()
                    made.append((row, make, collect, counts, []))
            for _, (row, _, collect, counts, seconds) in product(range(5), made):
                if not seconds or time.perf_counter() < self.deadline:
                    with self.limited(**row):
                        start = time.perf_counter()
                        collect()
                        seconds.append(time.perf_counter() - start)
                    self.add_unfinished(row, _found(counts, seconds))
        for row, make, _, counts, seconds in made:
            if len(seconds) < 5:
                continue
            written = self.add(**row, **_found(counts, seconds))
            with self.caught(part="use", **{name: value for name, value in row.items() if name != "part"}):
                written |= self.use(make)
                reporting.write(self.name, self.rows)

    def use(self, make: Make) -> reporting.Row:
        """NVML's utilisation of a GPU, and the share in which any process is busy there, from a separate profile."""
        if self.device.type != "cuda" or time.perf_counter() > self.deadline:
            return {}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            path = f"{folder}/profile"
            os.environ[VARIABLE] = settings(path, window=600.0)  # for the processes that start now
            stack.callback(os.environ.pop, VARIABLE)
            with make() as collect:
                collect()  # a warm-up
                start_if_requested()
                try:
                    end = time.perf_counter() + (0.5 if self.quick else 4.0)
                    while time.perf_counter() < end:
                        collect()
                finally:
                    stop()
            return resumable_run.use_in(path)


def _found(counts: tuple[int, int], seconds: Sequence[float]) -> reporting.Row:
    samples, inferences = counts
    return {
        "samples_per_second": samples / statistics.median(seconds),
        "inferences_per_sample": inferences / samples,
        "load": os.getloadavg()[0],  # beyond the cores, the machine had other things to do
        "rounds": [samples / each for each in seconds],
    }


@contextlib.contextmanager
def processes(run: Run, n: int, sharing: str) -> Iterator[Collect]:
    """Processes with one game each."""
    if sharing != "none" and run.device.type != "cuda":
        raise SharingError("there is no CUDA device")
    if sharing == "mps":
        resumable_run.check_mps(run.device)
    cores = len(os.sched_getaffinity(0))
    if run.device.type == "cpu" and n > cores:
        raise SharingError(f"{n} processes would wait for each other on {cores} cores")
    n_simulations = _n_simulations(run)
    with warnings.catch_warnings(), contextlib.ExitStack() as end:
        warnings.filterwarnings("ignore", "RL_Batcher: .* CUDA contexts")  # that is what is measured
        searching = {"n_simulations": n_simulations, "max_depth": MAX_DEPTH}
        batcher = RL_Batcher(
            1, PlainSearchAgent, _game, agent_args={"model": SmallNet(), "device": str(run.device), **searching},
            env_args={"n_envs": 1, "device": str(run.device)}, n_processes=n, seed=0, device=run.device,
            sharing=sharing,  # type: ignore[arg-type]
        )  # fmt: skip
        end.enter_context(batcher)
        batcher.reset()
        yield partial(_batch, batcher, n_simulations + 1)


@contextlib.contextmanager
def one_process(run: Run, n_games: int, n_simulations: int) -> Iterator[Collect]:
    """One process that searches in all games at once; on CUDA in a graph."""
    config = SearchConfig(method="puct", n_simulations=n_simulations, max_depth=MAX_DEPTH)
    searching = {"model": SmallNet(), "create_simulator": ConnectFour, "config": config, "device": str(run.device)}
    with RL_Batcher(
        1, SearchAgent, _game, agent_args=searching,
        env_args={"n_envs": n_games, "device": str(run.device)}, seed=0, device=run.device,
    ) as batcher:  # fmt: skip
        batcher.reset()
        yield partial(_batch, batcher, n_simulations + 1)


def _batch(batcher: RL_Batcher, n_inferences: int) -> tuple[int, int]:
    """Collect a batch; count its samples and inferences."""
    batcher.execute()
    trajectories, _ = batcher.get()
    steps = trajectories.transitions()
    if "action/n_inferences" in steps.keys():
        counted = steps["action/n_inferences"]
    else:  # the root's visits, and the root itself
        counted = steps["action/action_visits"].sum(-1) + 1
    if not bool((counted == n_inferences).all()):  # also waits for the GPU
        raise RuntimeError(f"got {counted.unique().tolist()} inferences for a sample, expected {n_inferences}")
    return steps.n_elems(), int(counted.sum())


def _game(n_envs: int, seed: int, device: str) -> ConnectFour:
    return ConnectFour(n_envs, seed, device=device)


def _n_simulations(run: Run) -> int:
    """Of a sample, whose first inference is for the root."""
    return (20 if run.quick else N_INFERENCES) - 1


def table(run: Run) -> None:
    """SURF's table, with a fourth column."""
    on_gpu = run.device.type == "cuda"
    numbers = (2, 1) if run.quick else (16, 7, 2) if on_gpu else (2, 1, 7, 16)  # targets first
    n_games = 8 if run.quick else 4096 if on_gpu else 256
    n_simulations = _n_simulations(run)
    for n in numbers:
        makers = [
            ({"part": "table", "processes": n, "sharing": mode, "games": n}, partial(processes, run, n, mode))
            for mode in MODES
        ]
        timed = on_gpu or n <= len(os.sched_getaffinity(0))  # otherwise there is nothing to be timed in turns with
        if timed:
            row = {"part": "table", "processes": 1, "sharing": "batched", "games": n_games, "against": n}
            makers.append((row, partial(one_process, run, n_games, n_simulations)))
        run.rate(makers)


def simulations(run: Run) -> None:
    """Simulations per second at 128 simulations for each move."""
    on_gpu = run.device.type == "cuda"
    n = 16 if run.quick else 128
    for n_games in (8,) if run.quick else (1024, 4096, 16384) if on_gpu else (256,):
        row = {"part": "simulations", "games": n_games, "simulations": n}
        run.rate([(row, partial(one_process, run, n_games, n))])


def algorithm_1(run: Run) -> None:
    """Algorithm 1 of GMI-DRL: the fastest environments of one learner, then numbers of such learners on one GPU."""
    on_gpu, device = run.device.type == "cuda", str(run.device)
    config = PPOConfig(learner_device=device, batcher_device=device, n_processes=0, n_timesteps=32, n_minibatches=4)
    create_env = partial(make, "CartPole-v1", device=device, auto_reset=True)
    searched = {"part": "tune", "searched": "environments of one learner"}
    if not run.measured(**searched):
        sizes = (8, 16) if run.quick else tuple(1 << n for n in range(8, 17)) if on_gpu else (16, 64, 256)
        with run.caught(**searched):
            answer = tune(
                ActorCriticAgent, create_env, agent_args={"model": create_model(), "device": device}, device=device,
                env_args={}, n_processes=(0,), n_envs=sizes, n_timesteps=(config.n_timesteps,),
                seconds=2.0 if run.quick else 40.0, create_learner=partial(create_learn, config),
            )  # fmt: skip
            run.add(**searched, n_envs=answer.best.n_envs, seconds=answer.seconds)
    fastest = next((row for row in run.rows if row["part"] == "tune" and "n_envs" in row), None)
    if fastest is None:
        return
    config = replace(config, n_envs=fastest["n_envs"])
    places = [{"learners": n, "sharing": mode} for n, mode in product((2, 4, 8), ("mps", "none"))] if on_gpu else []
    for where in run.todo("tune", 15, [{"learners": 1, "sharing": "none"}, *places]):
        with run.caught(part="tune", **where), run.limited(part="tune", **where):
            if where["sharing"] == "mps":
                resumable_run.check_mps(run.device)
            trained = with_learners(config, where["learners"], where["sharing"])
            factories = create_model, ActorCriticAgent, create_env
            rate = rate_of("ppo", factories, 0.5 if run.quick else 5.0, trained)
            run.add(part="tune", **where, N=config.n_envs, steps_per_second=rate)


def create_learn(config: PPOConfig) -> Callable[[Trajectories], dict[str, torch.Tensor]]:
    """Return a function that learns from a batch and returns the new weights."""
    learner = PPOLearner.create(create_model().to(config.learner_device), ActorCriticAgent, config)

    def learn(batch: Trajectories) -> dict[str, torch.Tensor]:
        learner.update(batch, 0.5)
        return learner.model.state_dict()

    return learn


def summary(run: Run) -> None:
    """Compute ratios and compare them with their targets; of rows that were timed in turns."""
    rate = partial(run.best, unit="samples_per_second")
    ratios: list[tuple[str, float | None, float | None]] = []
    for n in sorted({16, *(row["against"] for row in run.rows if "against" in row)}):
        batched = rate("table", processes=1, against=n)
        none, mps = (rate("table", sharing=mode, processes=n) for mode in ("none", "mps"))
        ratios += [
            (f"one batched process over {n} under MPS", reporting.ratio(batched, mps), 1.0 if n == 16 else None),
            (f"one batched process over {n} in turns", reporting.ratio(batched, none), None),
            (f"{n} under MPS over {n} in turns", reporting.ratio(mps, none), 2.0 if n == 16 else None),
        ]
    at_128 = rate("simulations", simulations=128)
    train = partial(run.best, "tune")
    for n in (2, 4, 8):
        over_one = reporting.ratio(train(learners=n, sharing="mps"), train(learners=1))
        ratios.append((f"training by {n} learners under MPS over one learner", over_one, None))
    run.summarise([*ratios, ("simulations per second, 128 for each move", at_128 and 128 * at_128, 1e6)])


PARTS: dict[str, Callable[[Run], None]] = {"simulations": simulations, "table": table, "tune": algorithm_1}


def main() -> None:
    options = resumable_run.parser(__doc__, PARTS).parse_args()
    run = resumable_run.begin(Run, options)
    torch.set_num_threads(1)
    resumable_run.measure(run, {name: PARTS[name] for name in options.parts}, summary)


if __name__ == "__main__":
    main()
