"""Thousands of Atari games on one device, after Dalton et al., "Accelerating RL through GPU Atari emulation" (CuLE).

``atari``: frames per second over the number of games, in CuLE's modes, with games of ours and of CPU engines.
``atari_starts``: a start in lockstep, and restarts. ``atari_layout``: how consoles lie in the memory of a GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common.ladder_rungs import Loop, MakeRung, Rung, synchronize
from common.reporting import Bars, Panels, Row, pivot, table

from rlstruct import DictTensor, VecEnv, sims
from rlstruct.agents import ActorCriticAgent, ConvolutionalActorCritic, StackingAgent
from rlstruct.algos.a2c import A2CConfig, A2CLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.device import usable_cores
from rlstruct.envs import GymVectorEnv
from rlstruct.profiling import profile, read
from rlstruct.vec_env import DeviceEnv

if TYPE_CHECKING:
    from common.resumable_run import Ladder

Sizes = Mapping[str, Sequence[Any]]
SKIP, T = 4, 5  # frames of a step; steps of a batch, as in CuLE's benchmark
OURS = "rlstruct"
DIVERGED = "speed of games that differ, over games in lockstep"
RESTARTED = "seconds of a step in which every game restarts, over a step without restarts"
CULE = {"emulation": (41_000, 155_000), "inference": (39_000, 125_000), "training": (26_000, 68_000)}
"""Lowest and highest raw frames per second that CuLE reports, with 4,096 games on a Titan V."""
create_agent = partial(StackingAgent.create, create_agent=ActorCriticAgent, shape=(4, 84, 84))


def create_env(engine: str, game: str, n_envs: int, device: str, seed: int = 0, limit: int | None = None) -> VecEnv:
    """Make games of ours, or of a CPU engine with a thread for each core that torch uses; one picture a step."""
    if engine == OURS:
        limits = {} if limit is None else {"time_limit": limit}
        return sims.make(f"ALE/{game}-v5", n_envs, seed, device=device, stack=1, **limits)
    frames, threads = SKIP * (limit or 27_000), usable_cores() if device != "cpu" else torch.get_num_threads()
    if engine == "EnvPool":
        import envpool

        vector: Any = envpool.make(
            f"{game}-v5", env_type="gymnasium", num_envs=n_envs, num_threads=threads, stack_num=1, seed=seed,
            use_fire_reset=False, repeat_action_probability=0.25, max_episode_steps=frames // SKIP,
        )  # fmt: skip
    else:
        from ale_py.vector_env import AtariVectorEnv

        from rlstruct.atari.ale_game import rom_ids

        vector = AtariVectorEnv(
            rom_ids()[game], n_envs, num_threads=threads, stack_num=1, use_fire_reset=False,
            repeat_action_probability=0.25, max_num_frames_per_episode=frames,
        )  # fmt: skip
    env = GymVectorEnv(vector, seed=seed)
    return env if device == "cpu" else DeviceEnv(env, device, "cpu")


def engines() -> list[str]:
    """List ours and the CPU engines that are installed."""
    return [OURS, "AtariVectorEnv", *(["EnvPool"] if importlib.util.find_spec("envpool") else [])]


def console_rung(name: str, game: str, n: int, device: torch.device) -> Rung:
    """Return frames without pictures: emulation alone."""
    from rlstruct.atari import open_ale, open_consoles
    from rlstruct.atari.ale_game import rom_ids

    consoles = open_consoles(rom_ids()[game], open_ale(rom_ids()[game], 0), n, device)
    actions = torch.randint(18, (SKIP, n), dtype=torch.int32, device=device)

    def run() -> None:
        for action in actions:
            consoles.run(action)
        synchronize(device)

    return Rung(name, run, 1)


def step_rung(name: str, engine: str, game: str, n: int, device: torch.device) -> Rung:
    """Return steps with random actions, each of which shows a picture."""
    env = create_env(engine, game, n, str(device))
    env.reset()

    def run() -> None:
        env.step(DictTensor({"action": torch.randint(int(env.action_space.n), (n,), device=device)}))
        synchronize(device)

    return Rung(name, run, 1)


def batch_rung(name: str, engine: str, game: str, n: int, device: torch.device, learns: bool) -> Rung:
    """Return batches of T steps with the network of Mnih et al. (2015), and an update of A2C on each if it learns."""
    config = A2CConfig(n_envs=n, n_timesteps=T, learner_device=str(device), batcher_device=str(device))
    n_actions = int(sims.make(f"ALE/{game}-v5", 1).action_space.n)
    torch.manual_seed(0)
    model = ConvolutionalActorCritic((4, 84, 84), n_actions).to(device)
    learner = A2CLearner.create(model, create_agent, config)
    batcher = RL_Batcher(
        T, create_agent, create_env, agent_args={"model": model, "copy_model": True, "device": device},
        env_args={"engine": engine, "game": game, "n_envs": n, "device": str(device)}, device=device, seed=0,
    )  # fmt: skip
    return Rung(name, Loop(batcher, device, learner if learns else None).iterate, T)


def gpu_use(rung: Rung, device: torch.device) -> Row:
    """Return NVML's utilisation, the shares of time and of multiprocessors in use, and the occupancy of kernels."""
    if device.type != "cuda":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with profile(folder, window=600.0):
            end = time.perf_counter() + 1.2
            while time.perf_counter() < end:
                rung.run()
        (use,) = read(folder).gpus
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kineto:
            rung.run()
        kineto.export_chrome_trace(trace := f"{folder}/trace.json")
        events = json.loads(Path(trace).read_text())["traceEvents"]
    kernels = [(one["dur"], one["args"].get("est. achieved occupancy %", 0)) for one in events
               if one.get("cat") == "kernel"]  # fmt: skip
    occupancy = sum(dur * percent for dur, percent in kernels) / (100 * sum(dur for dur, _ in kernels))
    return {"nvml": use.nvml, "busy": use.busy, "multiprocessors": use.weighted, "occupancy": occupancy}


def measure_atari(run: Ladder, sizes: Sizes) -> None:
    """Measure all modes and engines side by side, for each game and number of games."""
    every = itertools.product(sizes["game"], sizes["N"])
    for where in run.todo("atari", 20, ({"N": n, "game": game} for game, n in every)):
        n, game = where.values()
        rungs: list[MakeRung] = [partial(console_rung, f"{OURS}: emulation", game, n, run.device)]
        for engine in engines() if n in sizes["CPU engines"] else [OURS]:
            rungs.append(partial(step_rung, f"{engine}: pictures", engine, game, n, run.device))
            for mode, learns in (("inference", False), ("training", True)):
                rungs.append(partial(batch_rung, f"{engine}: {mode}", engine, game, n, run.device, learns))
        run.rate("atari", rungs, look=partial(gpu_use, device=run.device), **where)


def atari_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate thousand frames per second by engine and mode, and number of games; and how a GPU was used."""
    measured = [row for row in rows if "steps_per_second" in row]
    lines: list[str] = []
    for game in dict.fromkeys(row["game"] for row in measured):
        own = [row for row in measured if row["game"] == game]
        lines += [*pivot(f"{game}: thousand frames/s", own, "games", _cell), ""]
    if any("nvml" in row for row in measured):
        lines.append("In brackets: occupancy of the kernels, multiprocessors in use, NVML's utilisation.")
    return lines


def _cell(row: Row) -> str:
    shares = [row.get(key) for key in ("occupancy", "multiprocessors", "nvml")]
    said = " (" + ", ".join("?" if share is None else f"{share:.0%}" for share in shares) + ")" if "nvml" in row else ""
    return f"{SKIP * row['steps_per_second'] / 1000:.3g}{said}"


def atari_lines(rows: Sequence[Row]) -> Panels:
    """Return frames per second over the number of games: a panel for each mode, a line for each engine and game.

    A band shows CuLE's numbers.
    """
    panels = Panels("games", "frames per second")
    for row in rows:
        if "steps_per_second" in row:
            engine, _, mode = row["rung"].partition(": ")
            panels.add(mode, f"{engine}, {row['game']}", row["N"], SKIP * row["steps_per_second"])
    for mode in panels:
        if mode in CULE:
            panels.add_band(mode, "CuLE, 4,096 games on a Titan V", *CULE[mode])
    return panels


def starts_rung(name: str, n: int, device: torch.device, **how: Any) -> Rung:  # noqa: ANN401
    """Return 16 steps of a Pong: at once after a common start, or long after it, or with restarts in every step."""
    from rlstruct.atari import Atari

    later, limit = how.get("later", 0), how.get("limit", "default")
    env = Atari("Pong", n, device=device, noop_max=0, time_limit=limit, stack=1)
    env.reset()
    begun = env.get_state()

    def steps(number: int) -> None:
        for _ in range(number):
            env.step(DictTensor({"action": torch.randint(6, (n,), device=device)}))

    steps(later)

    def run() -> None:
        if not later and limit != 1:
            env.set_state(None, begun)
        steps(16)
        synchronize(device)

    return Rung(name, run, 16)


def measure_starts(run: Ladder, sizes: Sizes) -> None:
    """Measure lockstep and divergence; restarts from the cache; a beginning played frame by frame."""
    for where in run.todo("atari_starts", 30, ({"N": n} for n in sizes["N"])):
        n = where["N"]
        rungs = [
            partial(starts_rung, "in lockstep", n, run.device),
            partial(starts_rung, "later", n, run.device, later=sizes["later"][0]),
            partial(starts_rung, "restart in every step", n, run.device, limit=1),
            partial(console_rung, "emulation", "Pong", n, run.device),
        ]
        run.rate("atari_starts", rungs, **where)


def _starts(rows: Sequence[Row]) -> list[tuple[int, float, float, float]]:
    rates = {(row["rung"], row["N"]): row["steps_per_second"] for row in rows if "steps_per_second" in row}
    found = []
    for n in sorted({n for _, n in rates}):
        lockstep, later, restarts, frames = (
            n / rates.get((name, n), float("nan"))
            for name in ("in lockstep", "later", "restart in every step", "emulation")
        )
        # ALE begins a game with 60 frames of nothing, 4 of the switch RESET, and up to 30 more.
        found.append((n, lockstep / later, restarts / later, 94 / SKIP * frames / restarts))
    return found


def starts_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate what divergence and restarts cost."""
    body = [[f"{n:,}", *(f"{value:.2f}" for value in values)] for n, *values in _starts(rows)]
    head = "games | speed later, over lockstep | seconds with a restart in each step, over none | "
    return table(head + "94 frames of a beginning, over a step with a restart", body, 0)


def starts_bars(rows: Sequence[Row]) -> Bars:
    """Return the speed after divergence and the cost of restarts, by number of games, with what CuLE reports."""
    bars = Bars()
    for n, *values, _ in _starts(rows):
        for title, value in zip((DIVERGED, RESTARTED), values, strict=True):
            if math.isfinite(value):  # a part that failed has no rate
                bars.add(title, f"{n:,} games", "", value)
    bars.add_paper(DIVERGED, "CuLE: at least 0.70", 0.7)
    return bars


def layout_rung(name: str, n: int, device: torch.device, threads: int, apart: int, interleaved: bool) -> Rung:
    """Return frames with some threads in a block, a console on every so many of them, and its memory in one piece."""
    from rlstruct.atari import machine, open_ale, open_consoles

    consoles = open_consoles("pong", open_ale("pong", 0), n, device)
    if interleaved:  # byte by byte with that of the others
        consoles.ram = consoles.ram.t().contiguous().t()
    plan = torch.randint(18, (60, n), dtype=torch.int32, device=device)
    for actions in plan:  # so that they differ
        consoles.run(actions)

    def run() -> None:
        usual = machine.BLOCK, machine.THREADS_PER_CONSOLE
        try:
            machine.BLOCK, machine.THREADS_PER_CONSOLE = threads, apart
            for actions in plan[:SKIP]:
                consoles.run(actions)
        finally:
            machine.BLOCK, machine.THREADS_PER_CONSOLE = usual
        synchronize(device)

    return Rung(name, run, 1)


def measure_layout(run: Ladder, sizes: Sizes) -> None:
    """Measure the layouts of a block side by side, one size of block after the other; on a CPU a single layout."""
    places = ({"N": n, "game": "Pong", "threads": t} for t, n in itertools.product(sizes["threads"], sizes["N"]))
    for where in run.todo("atari_layout", 20, places):
        n, threads = where["N"], where["threads"]
        shapes = itertools.product(sizes["apart"], (False, True))
        rungs = [
            partial(layout_rung, f"{threads} threads, {32 // apart} consoles a warp, {'bytes' if mixed else 'pieces'}",
                    n, run.device, threads, apart, mixed)
            for apart, mixed in shapes
        ]  # fmt: skip
        run.rate("atari_layout", rungs, **where)


def layout_bars(rows: Sequence[Row]) -> Bars:
    """Return frames per second by layout, in a panel for each number of games."""
    bars = Bars("thousand frames per second")
    for row in rows:
        if "steps_per_second" in row:
            bars.add(f"{row['game']}, {row['N']:,} games", row["rung"], "", SKIP * row["steps_per_second"] / 1000)
    return bars
