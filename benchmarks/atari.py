"""Atari on the CPU: our consoles on one core, with ale-py, ale-py's AtariVectorEnv and EnvPool, in one run.

``python benchmarks/atari.py`` takes less than four minutes on a quiet machine, and writes its results as it goes;
``python benchmarks/tables.py`` makes the table of speeds in ``docs/atari.md`` from them. Frames are raw frames of the
console, four to a step; every contender has one thread, with the same game and random actions, and what counts is the
time of the processor. "frames" are single ones (ale-py always draws), "steps" make observations of 84 x 84, "inference"
lets the network of Mnih et al. (2015) act on them. "cold" is the time to compile our kernels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from _report import interleaved, write

SKIP = 4
Step = Callable[[], object]


def ours(game: str, n: int) -> tuple[Step, Step, Step]:
    """Return our consoles as a frame that is not drawn, a frame that is, and a step of the environment."""
    from rlstruct import DictTensor, sims
    from rlstruct.sims.atari import Consoles, open_ale, open_consoles
    from rlstruct.sims.atari.ale_game import load_game, rom_ids

    name = rom_ids()[game]
    consoles: Consoles = open_consoles(name, open_ale(name, 0), n)
    legal = torch.tensor(load_game(name).actions, dtype=torch.int32)
    env = sims.make(f"ALE/{game}-v5", n_envs=n, sticky=0.0)
    env.reset()
    actions = env.action_space.n

    def frame(*, draw: bool = False) -> None:
        consoles.run(legal[torch.randint(len(legal), (n,))], draw=draw)

    def step() -> torch.Tensor:
        _, (seen, _) = env.step(DictTensor({"action": torch.randint(actions, (n,))}))
        return seen["frame"]

    return frame, lambda: frame(draw=True), step


def ale_py_steps(game: str) -> tuple[Step, Step]:
    """Return one ALE as a frame, which it draws, and gymnasium's preprocessing around another as a step."""
    import ale_py
    import gymnasium

    from rlstruct.sims.atari import open_ale
    from rlstruct.sims.atari.ale_game import rom_ids

    gymnasium.register_envs(ale_py)
    ale = open_ale(rom_ids()[game], 0)
    legal = [action.value for action in ale.getMinimalActionSet()]
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)
    env.reset(seed=0)
    rng = np.random.default_rng(0)

    def frame() -> None:
        ale.act(legal[rng.integers(len(legal))])
        if ale.game_over():
            ale.reset_game()

    def step() -> np.ndarray:
        seen, _, terminated, truncated, _ = env.step(rng.integers(len(legal)))
        return env.reset()[0] if terminated or truncated else seen

    return frame, step


def vector_steps(game: str, n: int) -> dict[str, Step]:
    """Make the vectorised contenders that are installed, on one thread."""
    from ale_py.vector_env import AtariVectorEnv

    from rlstruct.sims.atari.ale_game import rom_ids

    rng, steps = np.random.default_rng(0), {}
    vector = AtariVectorEnv(rom_ids()[game], n, num_threads=1, use_fire_reset=False)
    vector.reset(seed=0)
    steps["AtariVectorEnv"] = lambda: vector.step(rng.integers(vector.single_action_space.n, size=n))[0]
    try:
        import envpool
    except ImportError:
        return steps
    pool = envpool.make(
        f"{game}-v5", env_type="gymnasium", num_envs=n, num_threads=1, stack_num=4, use_fire_reset=False
    )
    pool.reset()
    steps["EnvPool"] = lambda: pool.step(rng.integers(pool.action_space.n, size=n).astype(np.int32))[0]
    return steps


def with_network(step: Step, n: int) -> Step:
    """Let a network act on what a step shows."""
    from rlstruct.agents import ConvolutionalTrunk

    network = ConvolutionalTrunk((4, 84, 84))

    @torch.no_grad()
    def both() -> torch.Tensor:
        return network(torch.as_tensor(np.asarray(step())).view(n, 4, 84, 84))

    return both


def cold_seconds() -> float:
    """Compile all kernels into an empty cache, in a fresh process."""
    program = "from rlstruct import sims, DictTensor; import torch; e = sims.make('ALE/Pong-v5', n_envs=1); e.reset(); "
    program += "e.step(DictTensor({'action': torch.zeros(1, dtype=torch.int64)}))"
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            env={**os.environ, "WARP_CACHE_PATH": cache},
            capture_output=True,
        )
        return time.perf_counter() - start


def main() -> None:
    """Time everything, and write the JSON after each game."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", nargs="*", default=["Pong", "Breakout", "Seaquest"])
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one contender in one round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n = arguments.n_envs
    rows: list[dict[str, object]] = [{"what": "cold", "seconds": cold_seconds()}]
    print(f"cold: {rows[0]['seconds']:.1f} s", flush=True)
    for game in arguments.games:
        frame, drawn, step = ours(game, n)
        ale_frame, ale_step = ale_py_steps(game)
        vectors = vector_steps(game, n)
        calls = {"frames: ours, not drawn": frame, "frames: ours": drawn, "frames: ale-py": ale_frame}
        calls |= {"steps: ours": step, "steps: ale-py, gymnasium": ale_step}
        calls |= {f"steps: {name}": s for name, s in vectors.items()}
        calls |= {"inference: ours": with_network(step, n)}
        calls |= {f"inference: {name}": with_network(s, n) for name, s in vectors.items()}
        frames = {"frames: ours, not drawn": n, "frames: ours": n, "frames: ale-py": 1}
        frames["steps: ale-py, gymnasium"] = SKIP
        seconds = interleaved(calls, repeats=arguments.repeats, seconds=arguments.seconds, clock=time.process_time)
        speeds = {name: frames.get(name, n * SKIP) / s for name, s in seconds.items()}
        for name, speed in speeds.items():
            base = speeds["frames: ale-py" if name.startswith("frames") else "steps: ale-py, gymnasium"]
            row = {"game": game, "n_envs": n, "what": name, "frames_per_second": speed, "beside_ale_py": speed / base}
            rows.append(row)
            print(f"{game:10} {name:28} {speed:10,.0f} frames/s  {speed / base:5.2f} of ale-py", flush=True)
        write("atari", rows)


if __name__ == "__main__":
    main()
