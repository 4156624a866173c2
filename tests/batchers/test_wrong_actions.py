"""Actions that do not exist, and logits that are NaN, are reported on every device, and the device works on.

On CUDA an index out of range fails every later call of the process: no message, no evidence, no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor, RL_Agent, resolve_device
from rlstruct.agents import ConvolutionalActorCritic, QAgent, QNetwork
from rlstruct.agents.actor_critic import ActorCriticAgent
from rlstruct.algos import dqn
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import WorkerError
from rlstruct.functional.categorical import log_probability, log_probability_and_entropy
from rlstruct.sims import TensorEnv, make


@pytest.fixture(params=["cpu", "sim:1", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return resolve_device(request.param)


@pytest.fixture(params=["sim:1", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    return resolve_device(request.param)


class Tables(TensorEnv[DictTensor]):
    """Looks its rewards up by the action, in two ways; the parts of its action have different ranges."""

    stochastic = False
    action_space = spaces.Dict(one=spaces.Discrete(3, start=2), many=spaces.MultiDiscrete([2, 4]))
    observation_space = spaces.Box(-9, 9, (1,))

    def initial(self, key: Tensor) -> DictTensor:
        return DictTensor({"n": torch.zeros_like(key)})

    def transition(self, state: DictTensor, action: dict[str, Tensor], key: Tensor) -> Any:
        table = torch.arange(5, dtype=torch.float32, device=self.device)
        reward = (
            table[action["one"]] + table[:2][action["many"][:, 0]] + table[:4].index_select(0, action["many"][:, 1])
        )
        return DictTensor({"n": state["n"] + 1}), reward, state["n"] < 0

    def observe(self, state: DictTensor) -> Tensor:
        return state["n"].to(torch.float32).unsqueeze(1)


class Wrong(RL_Agent):
    """Takes existing actions, but for one part of them in one environment from the second batch on."""

    def __init__(self, key: str, row: tuple[int, ...], value: int, device: torch.device) -> None:
        self.key, self.row, self.value, self.device, self.n = key, row, value, device, 0

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None
    ) -> tuple[DictTensor, DictTensor]:
        self.n += 1
        one = torch.full((4,), 2, device=self.device)
        action = {"action/one": one, "action/many": torch.zeros(4, 2, dtype=torch.int64, device=self.device)}
        if self.n > 3:
            action[self.key][self.row] = self.value
        return DictTensor(action), state


def collect(batcher: RL_Batcher, n: int = 6) -> None:
    for _ in range(n):
        batcher.execute()
        batcher.get()


@pytest.mark.parametrize(
    ("key", "row", "value"),
    [("action/one", (2,), 5), ("action/one", (2,), 1), ("action/many", (2, 0), 2), ("action/many", (2, 1), -9)],
)
def test_an_action_that_does_not_exist_is_reported(
    key: str, row: tuple[int, ...], value: int, device: torch.device
) -> None:
    arguments = {"key": key, "row": row, "value": value, "device": device}
    env_args = {"n_envs": 4, "device": device}
    with RL_Batcher(3, Wrong, Tables, agent_args=arguments, env_args=env_args, device=device) as batcher:
        batcher.reset()
        with pytest.raises(WorkerError, match=f"action {key!r} of environment 2 in step 0 of the batch is"):
            collect(batcher)
    assert torch.ones(3, device=device).sum().item() == 3.0


@pytest.mark.parametrize("graph", [True, False])
def test_logits_that_are_nan_are_reported_and_the_weights_can_be_saved(
    graph: bool, device: torch.device, tmp_path: Path
) -> None:
    env_args = {"name": "Breakout-MinAtar", "n_envs": 4, "device": device}
    env = make("Breakout-MinAtar", 1)
    model = ConvolutionalActorCritic(env.observation_space.shape, int(env.action_space.n)).to(device)
    agents = {"model": model, "device": device}
    with RL_Batcher(
        3, ActorCriticAgent, make, agent_args=agents, env_args=env_args, device=device, graph=graph, seed=0
    ) as batcher:
        batcher.reset()
        collect(batcher, 3)
        batcher.update({name: weight * torch.nan for name, weight in model.state_dict().items()})
        with pytest.raises(WorkerError, match=r"action .action. of environment 0 in step 0 .*logits that are NaN"):
            collect(batcher)
    torch.save(model.state_dict(), tmp_path / "evidence.pt")
    evidence: Mapping[str, Tensor] = torch.load(tmp_path / "evidence.pt", map_location="cpu")
    assert all(bool(weight.isfinite().all()) for weight in evidence.values())


def test_a_learner_meets_a_wrong_action_before_it_is_reported(accelerator: torch.device) -> None:
    """Off the CPU a batch is learned from before its check is read."""
    logits, action = torch.full((2, 3), torch.nan, device=accelerator), torch.tensor([3, 1], device=accelerator)
    assert bool(log_probability(logits, action).isnan().all().cpu())
    assert bool(log_probability_and_entropy(logits, action)[0].isnan().all().cpu())
    agent = QAgent(QNetwork(4, 3, hidden=(8,)), device=accelerator)
    frame = torch.ones(2, 4, device=accelerator)
    seen = {"frame": frame, "rng": torch.arange(2, device=accelerator)}
    ones = torch.ones(2, device=accelerator)
    rest = {"reward": ones, "discount": ones, "weight": ones, "terminated": ones.bool(), "action/action": action}
    batch = DictTensor(
        {f"{part}/{key}": value for part in ("observation", "_observation") for key, value in seen.items()} | rest
    )
    terms = dqn.losses(agent, agent, batch, dqn.DQNConfig())
    assert bool(terms["loss"].isfinite().cpu())
