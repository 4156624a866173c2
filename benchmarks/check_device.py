"""Cost of RL_Agent_CheckDevice: its share of one step of 8 CartPole environments. Layer 5.

One step is the call of a 4-64-64-2 policy and the step of eight CartPole environments. The wrapper's cost is taken
alone: an agent that does nothing, with and without the wrapper, so that no noise of the step hides it. Run
``python benchmarks/check_device.py``; the criterion is a share below 2 %.
"""

from __future__ import annotations

import statistics

import torch
from _report import interleaved_rounds, write
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.envs import GymEnvInf
from rlstruct.functional.random import categorical
from rlstruct.rl_agent import RL_Agent, RL_Agent_CheckDevice

N_ENVS = 8
REPEATS = 11
CRITERION = 0.02
Answer = tuple[DictTensor, DictTensor]


class Policy(RL_Agent):
    """A 4-64-64-2 network."""

    pure = True

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> Answer:
        logits = self.model(observation["frame"])
        return DictTensor({"action": categorical(logits, observation["rng"])}), DictTensor()


class Idle(RL_Agent):
    """Returns what it was given at birth."""

    def __init__(self, action: DictTensor, state: DictTensor) -> None:
        self.answer = (action, state)

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> Answer:
        return self.answer


def main() -> None:
    """Measure, print and write the shares of all rounds' median."""
    torch.set_num_threads(1)
    env = GymEnvInf([CartPoleEnv() for _ in range(N_ENVS)], 0)
    first, _ = env.reset()
    observation = first + DictTensor({"rng": torch.arange(N_ENVS)})
    empty, info = DictTensor(), DictTensor({"epsilon": torch.zeros(N_ENVS)})
    # The state, too, is checked: none of the five structures is empty here.
    state = DictTensor({"h": torch.zeros(N_ENVS, 64)})
    policy, idle = Policy(), Idle(DictTensor({"action": torch.zeros(N_ENVS, dtype=torch.int64)}), state)
    watched = RL_Agent_CheckDevice(idle, "cpu")
    watched_policy = RL_Agent_CheckDevice(policy, "cpu")

    with torch.no_grad():
        rounds = interleaved_rounds(
            {
                "step": lambda: env.step(policy(empty, observation, empty)[0]),
                "watched step": lambda: env.step(watched_policy(empty, observation, empty)[0]),
                "idle": lambda: idle(state, observation, info),
                "watched idle": lambda: watched(state, observation, info),
            },
            repeats=REPEATS,
            seconds=0.1,
        )
    seconds = {name: statistics.median(values) for name, values in rounds.items()}
    pairs = zip(rounds["step"], rounds["idle"], rounds["watched idle"], strict=True)
    share = statistics.median((with_check - without) / step for step, without, with_check in pairs)
    for name, value in seconds.items():
        print(f"check_device.{name.replace(' ', '_')}_us {value * 1e6:.2f}")
    print(f"check_device.share_of_a_step {share:.4%} (criterion: below {CRITERION:.0%})")
    row = {f"{name.replace(' ', '_')}_us": value * 1e6 for name, value in seconds.items()}
    path = write("check_device", [{**row, "share": share, "criterion": CRITERION, "n_envs": N_ENVS}])
    print(f"written to {path}")
    env.close()
    if share >= CRITERION:
        raise SystemExit(f"the check costs {share:.2%} of a step, criterion: below {CRITERION:.0%}")


if __name__ == "__main__":
    main()
