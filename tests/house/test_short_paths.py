"""The way of one batch is short: few functions lie between a call of the user and the result.

Counted are the distinct functions of rlstruct that this process calls in one steady turn of update, execute and get,
with an agent of the user's in CartPole-v1: all of them without worker processes, those of the parent with two.
Functions of torch, gymnasium, numpy and of this file do not count; a function that is called for every step counts
once; up to Python 3.11 a comprehension is a function, too.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType, FrameType

import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from torch import Tensor, nn

from checkers import ROOT
from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.functional.random import categorical

FOLDERS = tuple(f"{ROOT / name}/" for name in ("rlstruct", "agents", "batchers", "algos"))


class PerceptronAgent(RL_Agent):
    """Draws from the logits of a small network, as the first agent of a user would."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        action = categorical(self.model(observation["frame"]), observation["rng"])
        return DictTensor({"action": action}), state

    def initial_state(self, agent_info: DictTensor, n_elems: int) -> DictTensor:
        return DictTensor()

    def update(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights)


def create_envs(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([CartPoleEnv() for _ in range(n_envs)], seed)


def functions_of_one_batch(n_processes: int) -> Counter[str]:
    """Count by folder; the fourth batch of a batcher is steady."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    weights = PerceptronAgent().model.state_dict()
    with RL_Batcher(
        64, PerceptronAgent, create_envs, env_args={"n_envs": 4}, n_processes=n_processes, seed=0
    ) as batcher:
        batcher.reset()
        for i in range(4):
            sys.setprofile(note if i == 3 else None)
            try:
                batcher.update(weights)
                batcher.execute()
                batch, _ = batcher.get()
            finally:
                sys.setprofile(None)
    assert torch.equal(batch.info["policy_version"], torch.full((4 * max(1, n_processes),), 4))
    files = [code.co_filename for code in seen if code.co_filename.startswith(FOLDERS)]
    return Counter(file.removeprefix(f"{ROOT}/").partition("/")[0] for file in files)


@pytest.mark.parametrize(("n_processes", "most", "most_in_batchers"), [(0, 74, 30), (2, 38, 27)])
def test_one_batch_takes_few_functions(n_processes: int, most: int, most_in_batchers: int) -> None:
    found = functions_of_one_batch(n_processes)
    assert found["batchers"] <= most_in_batchers, found
    assert found.total() <= most, found
