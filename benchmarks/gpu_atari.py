"""Atari on a GPU: thousands of consoles on the device. Writes ``results/gpu_atari-….json`` after each row.

``python benchmarks/gpu_atari.py`` has these parts, each of which can be asked for alone with ``--parts``:

- ``modes``: CuLE's modes for 1 to 32,768 consoles: frames without drawing, steps with observations, with the network of
  Mnih et al. (2015), in frames and steps per second, and the memory of a console;
- ``start``: a lock-step start, all in one state, against the same consoles 1,000 steps later: what divergence costs;
- ``restarts``: restarts out of the cache in every step, against episodes that never end;
- ``block``: threads in a block.

``--device cpu`` runs all of it on small numbers, to see that it works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _report import write

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

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Time a call.

        Args:
            call: works on the device.
            repeats: how often; the median counts.

        Returns:
            Its seconds.
        """
        taken = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - start)
        return sorted(taken)[repeats // 2]

    def wait(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


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
        emulation = games.seconds(lambda run=consoles.run, a=nothing: run(a), repeats)
        yield {"part": "modes", "n": n, "mode": "emulation", "frames_per_second": n / emulation}
        for mode, call in (("drawing", games.step), ("inference", games.infer)):
            speed = n / games.seconds(call, repeats)
            row = {"part": "modes", "n": n, "mode": mode, "steps_per_second": speed, "frames_per_second": SKIP * speed}
            yield {**row, "bytes_of_a_console": memory}


def start(game: str, device: str, sizes: list[int], repeats: int) -> Iterator[Row]:
    """A lock-step start against later; see the header."""
    n = sizes[-1]
    games = Games(game, n, device, noop_max=0)
    games.step()
    games.env.reset()
    first = games.seconds(games.step, repeats)
    for _ in range(1000 if device != "cpu" else 10):
        games.step()
    later = games.seconds(games.step, repeats)
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
            "steps_per_second": n / games.seconds(games.step, repeats),
        }


def block(game: str, device: str, sizes: list[int], repeats: int) -> Iterator[Row]:
    """Threads in a block; see the header."""
    from rlstruct.sims.atari import machine

    usual = machine.BLOCK
    for n in (sizes[-1], sizes[len(sizes) // 2]):
        for machine.BLOCK in (32, 64, 128, 256):
            games = Games(game, n, device)
            games.step()
            speed = n / games.seconds(games.step, repeats)
            yield {"part": "block", "n": n, "threads": machine.BLOCK, "steps_per_second": speed}
    machine.BLOCK = usual


PARTS = {"modes": modes, "start": start, "restarts": restarts, "block": block}


def main() -> None:
    """Run the parts, and write after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--sizes", nargs="*", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    small = arguments.device == "cpu"
    sizes = arguments.sizes or ([1, 4] if small else [1, 32, 128, 512, 1024, 4096, 8192, 16384, 32768])
    rows: list[Row] = []
    for part in arguments.parts:
        for row in PARTS[part](arguments.game, arguments.device, sizes, arguments.repeats):
            rows.append(row)
            print(row, flush=True)
            if not small:
                write("gpu_atari", rows)


if __name__ == "__main__":
    main()
