"""Atari on a GPU: thousands of consoles on the device. Writes ``results/gpu_atari-….json`` after each row.

    python benchmarks/gpu_atari.py                       everything, at most 8 minutes
    python benchmarks/gpu_atari.py --minutes 3 --out DIR --resume    go on where a run with the same commit was cut
    python benchmarks/gpu_atari.py --quick --out DIR     a look whether it runs, also without a GPU

Parts, each of which can be asked for alone with ``--parts``:

- ``modes``: CuLE's modes for 1 to 32,768 consoles: frames without drawing, steps with observations, with the network of
  Mnih et al. (2015), in frames and steps per second, and the memory of a console; the sizes with targets come first;
- ``restarts``: restarts out of the cache in every step, against episodes that never end;
- ``resets``: what a restart out of the cache takes, against the frames that ALE begins a game with, played anew;
- ``start``: a lock-step start, all in one state, against the same consoles 1,000 steps later: what divergence costs;
- ``layout``: threads in a block by consoles in a warp; whether a console's memory lies in one piece (1) or next to
  that of the others, byte by byte (B); whether the registers of neighbours lie side by side, or 512 bytes apart.

``--device cpu`` runs all of it on small numbers, to see that it works. Targets on an H100: 113,654 steps per second
with observations at 4,096 consoles, then a million frames per second. What cannot run here is left out, and the file
says so. Exit code 70: CUDA broke, or something hung; `--resume` goes on without it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import _gpu_run
import _report
import torch

SKIP = 4
BY_VALUE = (4096, 32768, 1024, 16384, 8192, 512, 128, 32, 1)  # numbers of consoles
SECONDS = 20  # that a part of a size may take, its compilation aside


class Run(_gpu_run.Run):
    """One run of the benchmark.

    Attributes:
        game: gymnasium's name.
        sizes: numbers of consoles.
        repeats: of each timing.
    """

    name = "gpu_atari"
    longest = 200.0
    game = "Pong"
    sizes: tuple[int, ...] = ()
    repeats = 9

    def due(self, part: str, **where: object) -> bool:
        """Return True if a part is not measured yet and there is time for it."""
        return not self.measured(part, game=self.game, **where) and self.left(SECONDS, part)


class Games:
    """Consoles of one game, with an environment around them.

    Args:
        game: gymnasium's name.
        n: how many.
        device: where.
        settings: of the environment.
    """

    def __init__(self, game: str, n: int, device: str, **settings: Any) -> None:  # noqa: ANN401 - passed on
        """Make them, all at the start of the game."""
        from rlstruct import sims
        from rlstruct.agents import ConvolutionalTrunk

        self.n, self.device = n, device
        self.env = sims.make(f"ALE/{game}-v5", n_envs=n, device=device, **settings)
        self.env.reset()
        self.network = ConvolutionalTrunk((4, 84, 84)).to(device)
        self.actions = int(self.env.action_space.n)

    def step(self) -> torch.Tensor:
        """Take one step with random actions."""
        from rlstruct import DictTensor

        _, (seen, _) = self.env.step(DictTensor({"action": torch.randint(self.actions, (self.n,), device=self.device)}))
        return seen["frame"]

    @torch.no_grad()
    def infer(self) -> torch.Tensor:
        """Take one step, and let the network see it."""
        return self.network(self.step())


def median_seconds(run: Run, call: Callable[[], object], divisor: int = 1) -> float:
    """Time a call."""
    wait = torch.cuda.synchronize if run.device.type == "cuda" else (lambda: None)
    taken = []
    for _ in range(repeats := max(1, run.repeats // divisor)):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[repeats // 2]


def modes(run: Run) -> None:
    """CuLE's modes; see the header."""
    for n in run.sizes:
        row = {"part": "modes", "game": run.game, "n": n}
        if run.due("modes", n=n):
            with run.caught(**row), run.limited(**row):
                measure_modes(run, n, row)


def measure_modes(run: Run, n: int, row: _report.Row) -> None:
    """Measure all modes of one size, and write them together."""
    from rlstruct.sims.atari import open_ale, open_consoles
    from rlstruct.sims.atari.ale_game import rom_ids

    device, on_gpu = str(run.device), run.device.type == "cuda"
    consoles = open_consoles(rom_ids()[run.game], open_ale(rom_ids()[run.game], 0), n, device)
    nothing = torch.zeros(n, dtype=torch.int32, device=device)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    games = Games(run.game, n, device)
    for call in (games.step, games.infer):
        call()
    memory = (torch.cuda.memory_allocated() - before if on_gpu else 0) / n
    consoles.run(nothing)
    emulation = median_seconds(run, lambda: consoles.run(nothing))
    found = {
        mode: n / median_seconds(run, call) for mode, call in (("drawing", games.step), ("inference", games.infer))
    }
    run.add(**row, mode="emulation", frames_per_second=n / emulation)
    for mode, speed in found.items():
        rates = {"steps_per_second": speed, "frames_per_second": SKIP * speed}
        run.add(**row, mode=mode, **rates, bytes_of_a_console=memory)


def start(run: Run) -> None:
    """A lock-step start against later; see the header."""
    n = min(4096, max(run.sizes))
    row = {"part": "start", "game": run.game, "n": n}
    if not run.due("start", n=n):
        return
    with run.caught(**row), run.limited(**row):
        games = Games(run.game, n, str(run.device), noop_max=0)
        games.step()
        games.env.reset()
        first = median_seconds(run, games.step)
        for _ in range(1000 if run.device.type == "cuda" else 10):
            games.step()
        later = median_seconds(run, games.step)
        run.add(**row, first=n / first, later=n / later, later_over_first=first / later)


def restarts(run: Run) -> None:
    """Restarts in every step against none; see the header."""
    n = max(run.sizes)
    for limit in (1, None):
        row = {"part": "restarts", "game": run.game, "n": n, "time_limit": limit}
        if run.due("restarts", n=n, time_limit=limit):
            with run.caught(**row), run.limited(**row):
                games = Games(run.game, n, str(run.device), time_limit=limit)
                games.step()
                run.add(**row, steps_per_second=n / median_seconds(run, games.step))


def resets(run: Run) -> None:
    """All consoles begin anew: out of the cache, and frame by frame; see the header."""
    from rlstruct.sims.atari import open_ale, open_consoles
    from rlstruct.sims.atari.ale_game import rom_ids

    n, device = max(run.sizes), str(run.device)
    row = {"part": "resets", "game": run.game, "n": n}
    if not run.due("resets", n=n):
        return
    frames = 60 + 4 + 30  # of nothing, of the switch RESET, and the most no-ops
    with run.caught(**row), run.limited(**row):
        games = Games(run.game, n, device)
        keys = torch.arange(n, device=device)
        consoles = open_consoles(rom_ids()[run.game], open_ale(rom_ids()[run.game], 0), n, device)
        nothing = torch.zeros(n, dtype=torch.int32, device=device)

        def anew() -> None:
            for _ in range(frames):
                consoles.run(nothing)

        games.env.initial(keys), consoles.run(nothing)
        cached = median_seconds(run, lambda: games.env.initial(keys))
        full = median_seconds(run, anew, 3)
        run.add(**row, cached_seconds=cached, full_seconds=full, full_over_cached=full / cached)


def layout(run: Run) -> None:
    """Threads in a block, consoles in a warp, stride of memory; see the header."""
    if run.quick:
        run.add(part="layout", left_out="160 rows: --quick leaves it out")
        return
    sizes = sorted(run.sizes)
    for n, stride, apart in itertools.product((sizes[-1], sizes[(len(sizes) - 1) // 2]), ("1", "B"), (None, 512)):
        row = {"part": "layout", "game": run.game, "n": n, "stride": stride, "apart": apart}
        if run.due("layout", n=n, stride=stride, apart=apart):
            with run.caught(**row), run.limited(**row):
                measure_layouts(run, n, row)


def measure_layouts(run: Run, n: int, row: _report.Row) -> None:
    """Measure one way to lay memory out, with all numbers of threads."""
    from rlstruct.sims.atari import FIELDS, machine, open_ale, open_consoles
    from rlstruct.sims.atari.ale_game import rom_ids

    device = str(run.device)
    consoles = open_consoles(rom_ids()[run.game], open_ale(rom_ids()[run.game], 0), n, device)
    if row["stride"] == "B":
        consoles.ram = consoles.ram.t().contiguous().t()
    if row["apart"]:
        wide = torch.zeros(n, row["apart"] // 4, dtype=torch.int32, device=device)
        consoles.registers = wide[:, : len(FIELDS)].copy_(consoles.registers)
    plan = torch.randint(18, (60, n), dtype=torch.int32, device=device)
    for actions in plan if run.device.type == "cuda" else plan[:2]:  # so that they differ
        consoles.run(actions)
    usual = machine.BLOCK, machine.APART
    found = []
    try:
        for machine.BLOCK, machine.APART in itertools.product((32, 64, 128, 256), (1, 2, 4, 8, 32)):
            seconds = median_seconds(run, lambda: consoles.run(plan[0]))
            found.append((machine.BLOCK, 32 // machine.APART, n / seconds))
    finally:
        machine.BLOCK, machine.APART = usual
    for threads, together, rate in found:
        between = 4 * consoles.registers.stride(0)
        shape = {"threads": threads, "consoles_in_a_warp": together, "bytes_between_registers": between}
        run.add(**row, **shape, frames_per_second=rate)


def summary(run: Run) -> None:
    """The two targets."""
    run.rows = [row for row in run.rows if row["part"] != "summary"]
    for name, n, rate, target in (
        ("Atari with observations, 4,096 consoles, steps per second", 4096, "steps_per_second", 113_654),
        ("Atari with observations, frames per second", None, "frames_per_second", 1e6),
    ):
        rows = [row for row in run.rows if row.get("mode") == "drawing" and n in (None, row["n"])]
        value = max((row[rate] for row in rows), default=None)
        met: Any = "not measured" if value is None else value >= target
        run.add(part="summary", ratio=name, value=value, target=target, met=met)


PARTS = {"modes": modes, "restarts": restarts, "resets": resets, "start": start, "layout": layout}


def main() -> None:
    """Run the parts, and write after each row."""
    parser = _gpu_run.parser(__doc__, PARTS)
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--sizes", nargs="+", type=int, help="numbers of consoles; by default 1 to 32,768 on a GPU")
    parser.add_argument("--repeats", type=int, help="of each timing, of which the median counts; 9 by default")
    options = parser.parse_args()
    run = _gpu_run.begin(Run, options)
    run.game, run.repeats = options.game, options.repeats or (1 if options.quick else 9)
    small = run.device.type == "cpu" or run.quick
    run.sizes = tuple(options.sizes or ([1, 4] if small else BY_VALUE))
    _gpu_run.measure(run, {name: PARTS[name] for name in options.parts}, summary)


if __name__ == "__main__":
    main()
