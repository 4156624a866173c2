"""Instructions that a GPU's warps issue for a frame of Atari games, and frames per second to expect: a model.

    python benchmarks/atari_divergence.py [--games Breakout Pong] [--consoles 256] [--warm-up 100]

Without ``--games`` it writes its counts to results/, of which `tables.py` makes the table of docs/atari.md.

It needs a C compiler and no GPU. The kernels are compiled for an H100 (sm_90), and their PTX runs on the CPU for
consoles in mid-play, whose games differ. The result is compared with that of the kernels of the CPU, bit by bit. "One
console" is what a thread executes. For a warp there are two counts. "Slowest": the threads meet after every instruction
of the 6507, and the warp issues what its slowest thread executes. "Branches": they meet where the ways from a branch
meet, as the hardware arranges it.

Frames per second follow from the latter: a warp issues one instruction in `LATENCY` cycles, a multiprocessor at most
one per cycle in each of its four schedulers, and registers limit its warps. Half of the frames are drawn, as with the
usual frame skip of 4.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.reporting import Row, table, write

GAMES = ("Breakout", "Pong", "Seaquest", "SpaceInvaders")
MULTIPROCESSORS, SCHEDULERS, REGISTERS, CLOCK = 132, 4, 65536, 1.755e9  # of an H100
LATENCY = 10  # cycles from an instruction of a warp to its next: about 5 for arithmetic, 30 for memory in the cache
SIZES = (4096, 32768)
WIDTHS = (32, 16, 2)  # consoles in a warp; SIZES ask for 2 and 16
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Cost:
    """Instructions of one frame in one kernel."""

    thread: float  # mean over the threads that do something
    slowest: Mapping[str, float]  # mean over warps, by threads in a warp
    branches: Mapping[str, float]  # likewise
    threads: float  # for each console


class Emulator:
    """The kernels of a frame, as a GPU would run them."""

    def __init__(self, folder: Path) -> None:
        import warp as wp
        from common import ptx

        from rlstruct.atari import frame

        sys.path.append(str(ROOT / "tests"))
        from cubins import REGISTERS as COUNT
        from cubins import compiled

        needs = compiled(frame, folder)
        self.registers = {
            kernel: need[COUNT] for kernel in ("run_frame", "draw_frame") for name, need in needs.items()
            if name.startswith(kernel) and COUNT in need
        }  # fmt: skip
        wp.compile_aot_module(frame, arch=90, module_dir=folder, use_ptx=True)
        self.run = ptx.Kernel(frame.run_frame, folder, r"[<>] \(int32_t\)\(24999ll\)")
        self.draw = ptx.Kernel(frame.draw_frame, folder)
        self._ptx, self._wp = ptx, wp

    def frame(self, consoles: Any, actions: torch.Tensor, *, draw: bool) -> list[Cost]:  # noqa: ANN401
        """Count a frame in each kernel, and leave the consoles after it.

        Raises:
            ArithmeticError: they differ from those of the CPU's own kernels.
        """
        from rlstruct.atari.machine import place_consoles

        lasting = consoles.registers, consoles.ram, consoles._screens
        memory = tuple(one.clone() for one in lasting)
        n, everybody, board = len(actions), torch.ones_like(actions), consoles.board
        place = place_consoles(board, memory, puts_off=True)
        board.draw = int(draw)
        inputs = [place, board, self._wp.from_torch(actions), self._wp.from_torch(everybody), 1]
        costs = [self._cost(self.run, (n,), inputs, memory, WIDTHS)]
        if draw:
            shape = n, int(consoles.register("n_lines")[0])
            costs.append(self._cost(self.draw, shape, [place, board, self._wp.from_torch(everybody)], memory, (32,)))
        consoles.run(actions, draw=draw)
        if not all(torch.equal(one, other) for one, other in zip(lasting, memory, strict=True)):
            raise ArithmeticError(f"atari_divergence: {consoles.game}: the kernels of CPU and GPU differ.")
        return costs

    def _cost(
        self,
        kernel: Any,  # noqa: ANN401
        shape: tuple[int, ...],
        inputs: list[Any],
        memory: Sequence[torch.Tensor],
        widths: Sequence[int],
    ) -> Cost:
        """Count a kernel, which changes ``memory`` once."""
        kept = [one.clone() for one in memory]

        def again() -> None:
            for one, before in zip(memory, kept, strict=True):
                one.copy_(before)

        paid = {}
        for width in widths:
            again()
            paid[str(width)] = float(kernel.paid(shape, inputs, width).mean())
        again()
        passes = kernel.passes(shape, inputs)
        slowest = {str(width): float(self._ptx.slowest(passes, width).mean()) for width in widths}
        return Cost(passes[:, -1].sum() / math.prod(shape), slowest, paid, math.prod(shape) / shape[0])


def measure(emulator: Emulator, game: str, n: int, warm_up: int) -> Row:
    """Play a game, up to ``warm_up`` random actions for each console; count a frame not drawn, and one drawn."""
    from rlstruct import DictTensor, sims
    from rlstruct.atari import open_ale, open_consoles

    env = sims.make(f"ALE/{game}-v5", n, stack=1)
    env.reset(DictTensor({"initial_steps": torch.full((n,), warm_up)}))
    state, name = env.get_state(), env.game.name
    consoles = open_consoles(name, open_ale(name, 0), n)
    consoles.registers.copy_(state.registers)
    consoles.ram.copy_(state.ram)
    chosen = np.random.default_rng(0).choice(env.actions, (2, n)).astype(np.int32)
    costs = [
        [asdict(cost) for cost in emulator.frame(consoles, torch.from_numpy(actions), draw=draw)]
        for actions, draw in zip(chosen, (False, True), strict=True)
    ]
    return {
        "game": game, "consoles": n, "warm_up": warm_up, "registers": emulator.registers,
        "plain": costs[0], "drawn": costs[1],
    }  # fmt: skip


def threads_per_console(n: int, warps: int) -> int:
    """Return how many threads a console gets, of which one works, so that n consoles fill the GPU's resident warps."""
    return max(1, min(32, 2 ** int(math.log2(max(1.0, MULTIPROCESSORS * warps * 32 / n)))))


def resident(registers: int) -> int:
    """Return how many warps a multiprocessor holds, with so many registers for each thread."""
    return SCHEDULERS * min(16, REGISTERS // SCHEDULERS // (-(-registers // 8) * 8 * 32))


def seconds(cost: float, n_warps: float, warps: int) -> float:
    """Return how long a kernel takes whose warps issue ``cost`` instructions each."""
    by_latency = cost * LATENCY * max(1.0, n_warps / (MULTIPROCESSORS * warps))
    by_issue = cost * n_warps / (MULTIPROCESSORS * SCHEDULERS)
    return max(by_latency, by_issue) / CLOCK


def frames_per_second(row: Row, n: int, apart: int | None = None) -> float:
    """Return what n consoles reach; ``apart`` is the number of threads for each of them, None for the best."""
    registers: Mapping[str, int] = row["registers"]
    warps = resident(registers["run_frame"])
    apart = threads_per_console(n, warps) if apart is None else apart
    total = 0.0
    for frame in ("plain", "drawn"):
        run, *lines = row[frame]
        width = min((width for width in WIDTHS if width >= 32 // apart), default=32)
        total += seconds(run["branches"][str(width)], n * apart / 32, warps) / 2
        for cost in lines:
            total += seconds(cost["branches"]["32"], n * cost["threads"] / 32, resident(registers["draw_frame"])) / 2
    return n / total


def millions(row: Row, key: str, width: int | None = None) -> str:
    """Tabulate millions of instructions, of a frame that is not drawn and one that is."""
    counts = [row[frame][0][key] for frame in ("plain", "drawn")]
    return ", ".join(f"{(one if width is None else one[str(width)]) / 1e6:.2f}" for one in counts)


def page_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate "branches" and frames per second for the page, with a column for each game."""
    body = [["a console alone", *(millions(row, "thread") for row in rows)]]
    body += [[f"{width} consoles in a warp", *(millions(row, "branches", width) for row in rows)] for width in WIDTHS]
    body += [
        [f"thousand frames/s, {n:,} consoles", *(f"{frames_per_second(row, n) / 1e3:,.0f}" for row in rows)]
        for n in SIZES
    ]
    head = " | ".join(row["game"] for row in rows)
    return table(f"million instructions of a warp per frame (not drawn, drawn) | {head}", body)


def tables(rows: Sequence[Row]) -> list[str]:
    """Tabulate instructions, and frames per second."""
    body = []
    for row in rows:
        alone = [row[frame][0]["thread"] / 1e6 for frame in ("plain", "drawn")]
        paid = [row[frame][0]["branches"]["32"] / 1e8 for frame in ("plain", "drawn")]
        body.append([
            row["game"], millions(row, "thread"),
            *(millions(row, key, width) for width in WIDTHS for key in ("slowest", "branches")),
            ", ".join(f"{one / all_:.0f} %" for one, all_ in zip(alone, paid, strict=True)),
        ])  # fmt: skip
    head = "millions (not drawn, drawn) | one console"
    head += "".join(f" | {width} in a warp: slowest | branches" for width in WIDTHS) + " | useful lanes of 32"
    lines = [*table(head, body, 1), ""]
    body = [
        [row["game"], *(f"{frames_per_second(row, n, apart) / 1e3:,.0f}" for apart in (1, None) for n in SIZES)]
        for row in rows
    ]
    head = "thousand frames/s | " + " | ".join(
        f"{n:,} consoles{what}" for what in (", one a thread", "") for n in SIZES
    )
    return [*lines, *table(head, body, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", nargs="+", default=None, help="only these, not written")
    parser.add_argument("--consoles", type=int, default=256)
    parser.add_argument(
        "--warm-up", type=int, default=100, help="each console has played 0 to this many steps of 4 frames"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        emulator = Emulator(Path(folder))
        print(f"registers: {emulator.registers}", flush=True)
        rows: list[Row] = []
        for game in arguments.games or GAMES:
            rows.append(measure(emulator, game, arguments.consoles, arguments.warm_up))
            print(f"{game}: the kernels of CPU and GPU do the same", flush=True)
            if arguments.games is None:
                write("atari_divergence", rows)
    print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()
