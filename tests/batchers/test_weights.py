"""Weights travel through one buffer: never stale, never torn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batcher_fakes import create_cartpole, create_policy, create_version_agent, first_batch, next_batch
from fake_envs import create_counting_env

from rlstruct import DeviceEnv, DictTensor, RL_Agent, Trajectories
from rlstruct.agents import ActorCritic
from rlstruct.batchers import RL_Batcher

MILLION = 1_000_000


@pytest.fixture(scope="module", params=[0, 2])
def batcher(request: pytest.FixtureRequest) -> Iterator[RL_Batcher]:
    n = request.param
    with RL_Batcher(
        3, create_version_agent, create_counting_env, env_args={"n_envs": 2, "auto_reset": True}, n_processes=n, seed=0
    ) as batcher:
        batcher.update(weights(1, 10))  # before the first reset
        batcher.reset()
        yield batcher


def weights(value: float, size: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), value, dtype=torch.float32)}


def check(batch: Trajectories, value: float, size: int, version: int) -> None:
    steps = batch.steps
    for key, expected in (("lowest", value), ("highest", value), ("size", size)):
        assert (steps[f"action/{key}"] == expected).all(), key
    assert (batch.info["policy_version"] == version).all()


def test_the_next_execute_acts_with_the_last_update(batcher: RL_Batcher) -> None:
    version = batcher.policy_version
    check(next_batch(batcher), 1, 10, version)
    batcher.update(weights(2, 10))
    batcher.update(weights(3, 10))  # twice: the last one counts
    check(next_batch(batcher), 3, 10, version + 2)
    batcher.execute()
    batcher.update(weights(4, 10))  # during a batch: for the next one
    check(batcher.get()[0], 3, 10, version + 2)
    check(next_batch(batcher), 4, 10, version + 3)
    batcher.update(weights(5, 20))  # other shapes, larger and smaller
    check(next_batch(batcher), 5, 20, version + 4)
    batcher.update(weights(6, 5))
    check(next_batch(batcher), 6, 5, version + 5)
    check(next_batch(batcher), 6, 5, version + 5)  # and they stay
    batcher.update(weights(1, 10))
    next_batch(batcher)


def test_weights_that_come_with_a_checkpoint_act_also_if_their_version_is_the_one_of_now(batcher: RL_Batcher) -> None:
    batcher.update(weights(7, 10))
    state = batcher.state_dict()
    version = batcher.policy_version
    check(next_batch(batcher), 7, 10, version)
    batcher.load_state_dict(state, weights(8, 10))  # of another training that has come as far
    check(next_batch(batcher), 8, 10, version)
    batcher.update(weights(9, 10))
    check(next_batch(batcher), 9, 10, version + 1)
    batcher.load_state_dict(state, weights(8, 10))
    batcher.update(weights(10, 10))
    check(next_batch(batcher), 10, 10, version + 1)


class FirstState(RL_Agent):
    """Its state is a weight, which it shows."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"first": self.weight.repeat(B)})

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        action = {"action": torch.zeros_like(observation["last_action"]), "first": state["first"].clone()}
        return DictTensor(action), state

    def update(self, info: Any) -> None:
        self.weight = info["w"].clone()


@pytest.mark.parametrize("n_processes", [0, 1])
def test_first_states_are_made_with_the_last_update(n_processes: int) -> None:
    def first() -> float:
        return float(next_batch(batcher).steps["action/first"][0, 0])

    with RL_Batcher(
        2, FirstState, create_counting_env, env_args={"n_envs": 1, "auto_reset": True}, n_processes=n_processes, seed=0
    ) as batcher:
        for value in (1.0, 2.0):
            batcher.update(weights(value, 1))
            batcher.reset()
            batcher.update(weights(-1.0, 1))  # on the heels of the reset: not for that
            assert first() == value
        batcher.execute()
        batcher.update(weights(3.0, 1))
        batcher.get()
        batcher.reset()
        assert first() == 3


class SharedModelAgent(RL_Agent):
    """Acts with the models that it gets, and keeps no copies."""

    def __init__(self, model: torch.nn.Linear, models: dict[str, Any], scale: torch.Tensor) -> None:
        self.model, self.scale = model, scale
        self.tied = models["again"][0].weight is model.weight

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        like = observation["last_action"]
        shown = self.model(torch.ones(len(like), 1)).squeeze(1) * self.scale
        return DictTensor(
            {"action": torch.zeros_like(like), "shown": shown, "tied": like.new_full(like.shape, self.tied)}
        ), state

    def update(self, info: Any) -> None:
        self.model.load_state_dict(info)


@pytest.mark.parametrize("n_processes", [0, 1])
def test_a_model_in_agent_args_is_the_agents_own(n_processes: int) -> None:
    model, scale = torch.nn.Linear(1, 1, bias=False), torch.ones((), requires_grad=True) * 1.0
    torch.nn.init.constant_(model.weight, 3.0)
    with RL_Batcher(
        2,
        SharedModelAgent,
        create_counting_env,
        agent_args={"model": model, "models": {"again": [model]}, "scale": scale.detach() if n_processes else scale},
        env_args={"n_envs": 2, "auto_reset": True},
        n_processes=n_processes,
        seed=0,
    ) as batcher:
        batcher.reset()
        for version, expected in ((0, 3.0), (0, 3.0), (1, 5.0)):
            batch = next_batch(batcher)
            assert (batch.steps["action/shown"] == expected).all()
            assert (batch.info["policy_version"] == version).all()
            assert batch.steps["action/tied"].all()  # what two arguments share, their copies share
            if version == 0 and model.weight.item() == 5.0:
                batcher.update(model.state_dict())
            torch.nn.init.constant_(model.weight, 5.0)  # as an optimiser does it: the batcher does not see it


def test_weights_are_read_before_update_returns(batcher: RL_Batcher) -> None:
    sent = weights(8, 1000)
    batcher.update(sent)
    sent["w"].fill_(-1)
    check(next_batch(batcher), 8, 1000, batcher.policy_version)
    batcher.execute()
    sent["w"].fill_(9)
    batcher.update(sent)
    sent["w"].fill_(-1)
    batcher.get()
    check(next_batch(batcher), 9, 1000, batcher.policy_version)


def test_a_million_weights_are_never_torn(batcher: RL_Batcher) -> None:
    for i in range(30):
        batcher.update(weights(float(i), MILLION))
        if i % 3 == 0:
            batcher.update(weights(i + 0.5, MILLION))
        batcher.execute()
        if i % 2:
            batcher.update(weights(-1.0, MILLION))
        check(batcher.get()[0], i if i % 3 else i + 0.5, MILLION, batcher.policy_version - i % 2)


def create_policy_on(device: str) -> RL_Agent:
    agent = create_policy(recurrent=False)
    agent.model.to(device)
    return agent


def create_cartpole_on(n_envs: int, seed: int, device: str) -> DeviceEnv:
    return DeviceEnv(create_cartpole(n_envs, seed), device)


@pytest.mark.parametrize(("n_processes", "device"), [(2, "cpu"), (0, "cpu"), (0, "sim:1")])
def test_zeroed_weights_reach_every_network(n_processes: int, device: str) -> None:
    with RL_Batcher(
        5,
        create_policy_on,
        create_cartpole_on,
        agent_args={"device": device},
        env_args={"n_envs": 2 // max(1, n_processes), "device": device},
        n_processes=n_processes,
        device=device,
        seed=0,
    ) as batcher:
        state = ActorCritic(4, 2).state_dict()
        batcher.update({key: torch.zeros_like(value).requires_grad_() for key, value in state.items()})
        batch = first_batch(batcher).to("cpu")
        assert not batch.steps["action/value"].any()
        torch.testing.assert_close(batch.steps["action/log_probability"], torch.full((2, 5), 0.5).log())
        assert batch.info["policy_version"].tolist() == [1, 1]
