"""An agent may keep what it was shown: the memory of a batch is written again, what the agent keeps is not."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from batcher_fakes import next_batch

from rlstruct import DictTensor, RL_Agent, VecEnv, resolve_device
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.sims import CartPole

B = 4


class KeepsSecond(RL_Agent):
    """Keeps a view of the second observation in its state, for good, and shows it in every step.

    ``by`` makes the view: a numpy array tells torch nothing of the memory that it is a part of.
    """

    def __init__(self, device: torch.device, by: str) -> None:
        self.device, self.by, self.n = device, by, 0

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"kept": torch.zeros(B, 3, device=self.device)})

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        frame = torch.from_numpy(observation["frame"].numpy()) if self.by == "numpy" else observation["frame"]
        kept = frame[:, 1:] if self.n == 1 else state["kept"]
        self.n += 1
        action = torch.zeros(B, dtype=torch.int64, device=self.device)
        return DictTensor({"action": action, "kept": kept}), DictTensor({"kept": kept})


def create_gym(seed: int, device: torch.device) -> VecEnv:
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(B)], seed=seed)


def create_sim(seed: int, device: torch.device) -> VecEnv:
    return CartPole(B, seed, device=device)


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize(
    ("create_env", "device", "by"),
    [
        (create_gym, "cpu", "torch"),  # it writes its observations into the memory of the batch
        (create_gym, "cpu", "numpy"),
        (create_sim, "cpu", "torch"),
        (create_sim, "cpu", "numpy"),
        (create_sim, "sim:1", "torch"),
        pytest.param(create_sim, "cuda:0", "torch", marks=pytest.mark.gpu),
    ],
)
def test_a_state_that_is_a_view_of_an_observation_is_not_overwritten(
    create_env: Any, device: str, by: str, T: int
) -> None:
    where = {"device": resolve_device(device)}
    agent_args = {**where, "by": by}
    with RL_Batcher(
        T, KeepsSecond, create_env, agent_args=agent_args, env_args=where, seed=0, device=device
    ) as batcher:
        batcher.reset()
        batches = [next_batch(batcher).steps for _ in range(6)]
    seen, kept = (torch.cat([batch[key].cpu() for batch in batches], 1) for key in ("observation/frame", "action/kept"))
    expected = seen[:, 1:2, 1:].expand(-1, 6 * T - 1, -1)
    assert torch.equal(kept[:, 1:], expected)
