"""Collection with a policy in the loop, one process, one CPU thread: our CartPole beside gymnasium's.

    python benchmarks/policy_in_loop.py [--n-envs 1024] [--steps 64] [--rounds 7] [--sizes 64 1024 16384 262144]

Every row acts with the same network (4-64-64-2) and draws its actions. Target at 1,024 environments: RL_Batcher over
our simulator at least 1.5x the same loop, RL_Batcher with the same settings, over gymnasium's numpy CartPoleVectorEnv;
once as it is, once with ``compile_agent=True`` on both sides. The row "by hand" is what a user would write without a
library: it stores the same tensors and nothing else. The time that the network takes is the same in all rows, and
bounds every ratio: row "network alone". Times are those of the CPU.

Then the cost of collection for several numbers of environments, with the bytes that one environment takes: it shall
grow no faster than their number. Once as it is, once after `rlstruct.device.keep_freed_memory`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import _report
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import nn

from rlstruct import DictTensor, RL_Agent, VecEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.device import keep_freed_memory
from rlstruct.envs import GymVectorEnv
from rlstruct.functional.random import categorical
from rlstruct.sims import make

EAGER, COMPILED = "eager agent", "compiled agent"
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class Policy(RL_Agent):
    """A perceptron that draws its actions."""

    pure = True

    def __init__(self, activation: str) -> None:
        """Make the network."""
        kind = ACTIVATIONS[activation]
        self.model = nn.Sequential(nn.Linear(4, 64), kind(), nn.Linear(64, 64), kind(), nn.Linear(64, 2))

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Act."""
        logits = self.model(observation["frame"])
        return DictTensor({"action": categorical(logits, observation["rng"]), "logits": logits}), state


def create_gymnasium(n_envs: int, seed: int) -> VecEnv:
    """Gymnasium's own vectorised CartPole."""
    return GymVectorEnv(CartPoleVectorEnv(n_envs), seed)


def create_ours(n_envs: int, seed: int, backend: str) -> VecEnv:
    """Our CartPole."""
    return make("CartPole-v1", n_envs, seed=seed, backend=backend)


def collecting(
    create: Callable[..., VecEnv], activation: str, n_steps: int, compile_agent: bool, **env_args: object
) -> Callable[[], object]:
    """One batch, from execute to get."""
    batcher = RL_Batcher(
        n_steps,
        Policy,
        create,
        agent_args={"activation": activation},
        env_args=env_args,
        seed=0,
        device="cpu",
        compile_agent=compile_agent,
    )
    batcher.reset()

    def run() -> object:
        batcher.execute()
        return batcher.get()

    run()
    run.batcher = batcher  # type: ignore[attr-defined]
    return run


def by_hand(n_envs: int, activation: str, n_steps: int) -> Callable[[], object]:
    """The loop without a library."""
    env, model = CartPoleVectorEnv(n_envs), Policy(activation).model
    shown = torch.from_numpy(env.reset(seed=0)[0])

    @torch.no_grad()
    def run() -> object:
        nonlocal shown
        frames = torch.empty((n_steps + 1, n_envs, 4), device="cpu")
        rewards = torch.empty((n_steps, n_envs), device="cpu")
        ends = torch.empty((2, n_steps, n_envs), dtype=torch.bool, device="cpu")
        actions = torch.empty((n_steps, n_envs), dtype=torch.int64, device="cpu")
        all_logits = torch.empty((n_steps, n_envs, 2), device="cpu")
        frames[0] = shown
        for t in range(n_steps):
            all_logits[t] = logits = model(shown)
            actions[t] = action = torch.distributions.Categorical(logits=logits, validate_args=False).sample()
            frame, reward, terminated, truncated, _ = env.step(action.numpy())
            shown = torch.from_numpy(frame)
            frames[t + 1], rewards[t] = shown, torch.from_numpy(reward)
            ends[0, t], ends[1, t] = torch.from_numpy(terminated), torch.from_numpy(truncated)
        return frames, rewards, ends, actions, all_logits

    return run


def network_alone(n_envs: int, activation: str, n_steps: int) -> Callable[[], object]:
    """Measure the part that no simulator can remove: the network and the draws."""
    agent = Policy(activation)
    frame, rng = torch.randn(n_envs, 4, device="cpu"), torch.randint(1 << 62, (n_envs,), device="cpu")
    seen, none = DictTensor({"frame": frame, "rng": rng}), DictTensor()

    @torch.no_grad()
    def run() -> object:
        return [agent(none, seen, none) for _ in range(n_steps)]

    return run


def compare(n_envs: int, n_steps: int, rounds: int, activation: str, backends: list[str]) -> list[dict[str, Any]]:
    """Measure all ways side by side."""
    calls = {"by hand, gymnasium": by_hand(n_envs, activation, n_steps)}
    for agent in (EAGER, COMPILED):
        settings: dict[str, Any] = {"compile_agent": agent == COMPILED, "n_envs": n_envs}
        calls[f"gymnasium, {agent}"] = collecting(create_gymnasium, activation, n_steps, **settings)
        for backend in backends:
            ours = collecting(create_ours, activation, n_steps, **settings, backend=backend)
            calls[f"ours {backend}, {agent}"] = ours
    calls["network alone"] = network_alone(n_envs, activation, n_steps)
    times = _report.interleaved_rounds(calls, rounds, 0.2, clock=time.process_time)
    rows = []
    for name, seconds in times.items():
        base = f"gymnasium, {COMPILED if COMPILED in name else EAGER}"
        ratio = statistics.median(a / b for a, b in zip(times[base], seconds, strict=True))
        target = 1.5 if "ours" in name else None
        rate = n_steps * n_envs / statistics.median(seconds)
        print(f"{activation} {name:28} N {n_envs} {rate / 1e6:7.2f} M steps/s {ratio:6.2f} x {base}  target {target}")
        rows.append(
            {
                "row": name,
                "activation": activation,
                "N": n_envs,
                "T": n_steps,
                "steps_per_second": rate,
                "ratio": ratio,
                "to": base,
                "target": target,
            }
        )
    return rows


def growth(sizes: list[int], rounds: int, n_steps: int, name: str) -> list[dict[str, Any]]:
    """Measure collection for several numbers of environments."""
    calls = {str(n): collecting(create_ours, "tanh", n_steps, False, n_envs=n, backend="torch") for n in sizes}
    times = _report.interleaved(calls, rounds, 0.2, clock=time.process_time)
    rows = []
    for n in sizes:
        cost = times[str(n)] / n_steps / n
        memory = calls[str(n)].batcher.memory_report().total / n / n_steps  # type: ignore[attr-defined]
        simulation = sum(v.nbytes for v in _simulation(n).values()) / n
        print(
            f"{name} N {n:7} {cost * 1e9:8.1f} ns per environment and step; bytes per environment: "
            f"{simulation:.0f} of the simulation, {memory:.0f} for each step of a batch"
        )
        rows.append(
            {
                "row": name,
                "N": n,
                "seconds_per_environment_step": cost,
                "bytes_per_environment": simulation,
                "bytes_per_environment_step": memory,
            }
        )
    return rows


def _simulation(n_envs: int) -> dict[str, torch.Tensor]:
    env = make("CartPole-v1", n_envs)
    env.reset()
    env.step(DictTensor({"action": torch.zeros(n_envs, dtype=torch.int64, device="cpu")}))
    return env.carry()


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-envs", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backends", nargs="*", default=["torch", "compile"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 1024, 16384, 262144])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(_report.machine())
    rows: list[dict[str, Any]] = []
    for activation in ACTIVATIONS:
        rows += compare(arguments.n_envs, arguments.steps, arguments.rounds, activation, arguments.backends)
    rows += growth(arguments.sizes, arguments.rounds, 8, "collection")
    if keep_freed_memory():
        rows += growth(arguments.sizes, arguments.rounds, 8, "collection, freed memory kept")
    print(_report.write("policy_in_loop", rows))


if __name__ == "__main__":
    main()
