"""Atari on a GPU: thousands of consoles on the device. Writes ``results/gpu_atari-….json`` after each row.

``python benchmarks/gpu_atari.py`` has these parts, each of which can be asked for alone with ``--parts``:

- ``modes``: CuLE's modes for 1 to 32,768 consoles: frames without drawing, steps with observations, with the network of
  Mnih et al. (2015), in frames and steps per second, and the memory of a console;
- ``start``: a lock-step start, all in one state, against the same consoles 1,000 steps later: what divergence costs;
- ``restarts``: restarts out of the cache in every step, against episodes that never end;
- ``resets``: what a restart out of the cache takes, against the frames that ALE begins a game with, played anew;
- ``layout``: threads in a block by consoles in a warp; whether a console's memory lies in one piece (1) or beside
  that of the others, byte by byte (B); whether the registers of neighbours lie side by side, or 512 bytes apart.

``--device cpu`` runs all of it on small numbers, to see that it works. Targets on an H100: 113,654 steps per second
with observations at 4,096 consoles, then a million frames per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _report import RESULTS, machine, result_path

SKIP = 4
Row = dict[str, object]


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
        """Take one step with random actions.

        Returns:
            What is seen.  [B, 4, 84, 84] uint8
        """
        from rlstruct import DictTensor

        _, (seen, _) = self.env.step(DictTensor({"action": torch.randint(self.actions, (self.n,), device=self.device)}))
        return seen["frame"]

    @torch.no_grad()
    def infer(self) -> torch.Tensor:
        """Take one step, and let the network see it.

        Returns:
            Its features.  [B, 512] float32
        """
        return self.network(self.step())


def median_seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Time a call.

    Args:
        call: works on the device.
        device: for which it waits.
        repeats: how often; the median counts.

    Returns:
        Its seconds.
    """
    wait = torch.cuda.synchronize if device != "cpu" else (lambda: None)
    taken = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[repeats // 2]


def modes(game: str, device: str, sizes: list[int], repeats: int) -> Iterator[Row]:
    """CuLE's modes; see the header."""
    from rlstruct.sims.atari.ale_game import rom_ids
    from rlstruct.sims.atari.compare import open_ale, open_consoles

    for n in sizes:
        consoles = open_consoles(rom_ids()[game], open_ale(rom_ids()[game], 0), n, device)
        nothing = torch.zeros(n, dtype=torch.int32, device=device)
        before = torch.cuda.memory_allocated() if device != "cpu" else 0
        games = Games(game, n, device)
        for call in (games.step, games.infer):
            call()
        memory = (torch.cuda.memory_allocated() - before if device != "cpu" else 0) / n
        consoles.run(nothing)
        emulation = median_seconds(lambda run=consoles.run, a=nothing: run(a), device, repeats)
        yield {"part": "modes", "n": n, "mode": "emulation", "frames_per_second": n / emulation}
        for mode, call in (("drawing", games.step), ("inference", games.infer)):
            speed = n / median_seconds(call, device, repeats)
            row = {"part": "modes", "n": n, "mode": mode, "steps_per_second": speed, "frames_per_second": SKIP * speed}
            yield {**row, "bytes_of_a_console": memory}


def start(game: str, device: str, sizes: list[int], repeats: int) -> Iterator[Row]:
    """A lock-step start against later; see the header."""
    n = sizes[-1]
    games = Games(game, n, device, noop_max=0)
    games.step()
    games.env.reset()
    first = median_seconds(games.step, device, repeats)
    for _ in range(1000 if device != "cpu" else 10):
        games.step()
    later = median_seconds(games.step, device, repeats)
    yield {"part": "start", "n": n, "first": n / first, "later": n / later, "ratio": first / later}


def restarts(game: str, device: str, sizes: list[int], repeats: int) -> Iterator[Row]:
    """Restarts in every step against none; see the header."""
    n = sizes[-1]
    for limit in (1, None):
        games = Games(game, n, device, time_limit=limit)
        games.step()
        yield {
            "part": "restarts",
            "n": n,
            "time_limit": limit,
            "steps_per_second": n / median_seconds(games.step, device, repeats),
        }


def resets(game: str, device: str, sizes: list[int], repeats: int) -> Iterator[Row]:
    """All consoles begin anew: out of the cache, and frame by frame; see the header."""
    from rlstruct.sims.atari.ale_game import rom_ids
    from rlstruct.sims.atari.compare import open_ale, open_consoles

    n = sizes[-1]
    games = Games(game, n, device)
    keys = torch.arange(n, device=device)
    consoles = open_consoles(rom_ids()[game], open_ale(rom_ids()[game], 0), n, device)
    nothing = torch.zeros(n, dtype=torch.int32, device=device)
    frames = 60 + 4 + 30  # of nothing, of the switch RESET, and the most no-ops

    def anew() -> None:
        for _ in range(frames):
            consoles.run(nothing)

    games.env.initial(keys), consoles.run(nothing)
    cached = median_seconds(lambda: games.env.initial(keys), device, repeats)
    full = median_seconds(anew, device, max(1, repeats // 3))
    yield {"part": "resets", "n": n, "cached_seconds": cached, "full_seconds": full, "ratio": full / cached}


def layout(game: str, device: str, sizes: list[int], repeats: int) -> Iterator[Row]:
    """Threads in a block, consoles in a warp, stride of memory; see the header."""
    from rlstruct.sims.atari import FIELDS, machine
    from rlstruct.sims.atari.ale_game import rom_ids
    from rlstruct.sims.atari.compare import open_ale, open_consoles

    usual = machine.BLOCK, machine.APART
    ale = open_ale(rom_ids()[game], 0)
    for n, stride, apart in itertools.product((sizes[-1], sizes[len(sizes) // 2]), ("1", "B"), (None, 512)):
        consoles = open_consoles(rom_ids()[game], ale, n, device)
        if stride == "B":
            consoles.ram = consoles.ram.t().contiguous().t()
        if apart:
            wide = torch.zeros(n, apart // 4, dtype=torch.int32, device=device)
            consoles.registers = wide[:, : len(FIELDS)].copy_(consoles.registers)
        plan = torch.randint(18, (60, n), dtype=torch.int32, device=device)
        for actions in plan if device != "cpu" else plan[:2]:  # so that they differ
            consoles.run(actions)
        for machine.BLOCK, machine.APART in itertools.product((32, 64, 128, 256), (1, 2, 4, 8, 32)):
            seconds = median_seconds(lambda run=consoles.run, actions=plan[0]: run(actions), device, repeats)
            row = {"part": "layout", "n": n, "threads": machine.BLOCK, "consoles_in_a_warp": 32 // machine.APART}
            row |= {"stride": stride, "bytes_between_registers": 4 * consoles.registers.stride(0)}
            yield {**row, "frames_per_second": n / seconds}
    machine.BLOCK, machine.APART = usual


PARTS = {"modes": modes, "start": start, "restarts": restarts, "resets": resets, "layout": layout}


def main() -> None:
    """Run the parts, and write after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--sizes", nargs="*", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    arguments = parser.parse_args()
    small = arguments.device == "cpu"
    sizes = arguments.sizes or ([1, 4] if small else [1, 32, 128, 512, 1024, 4096, 8192, 16384, 32768])
    rows: list[Row] = []
    file = "gpu_atari-small.json" if small else result_path("gpu_atari").name
    for part in arguments.parts:
        for row in PARTS[part](arguments.game, arguments.device, sizes, arguments.repeats):
            rows.append(row)
            print(row, flush=True)
            report = {"benchmark": "gpu_atari", "machine": machine(), "rows": rows}
            (arguments.out / file).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
