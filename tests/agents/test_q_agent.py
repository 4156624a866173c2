from __future__ import annotations

import pytest
import torch
from fake_envs import create_counting_env
from random_observations import observe

from rlstruct import DictTensor, RL_Agent, Trajectories, replay_agent
from rlstruct.agents import MLP, DuellingHead, QAgent, QNetwork
from rlstruct.batchers import RL_Batcher


def test_each_environment_explores_as_often_as_its_own_epsilon_says() -> None:
    B, model = 30_000, QNetwork(4, 3)
    agent, observation = QAgent(model), observe(B, 4)
    epsilon = torch.tensor([0.0, 0.25, 1.0]).repeat(B // 3)
    output, _ = agent(DictTensor(), observation, DictTensor({"epsilon": epsilon}))
    best = output["action_values"].argmax(1)
    greedy = (output["action"] == best).view(-1, 3).float().mean(0)
    # A random action of three is the best one in a third of all cases. Deviation: sqrt(p (1 - p) / 10,000) < 0.005.
    torch.testing.assert_close(greedy, torch.tensor([1.0, 0.75 + 0.25 / 3, 1 / 3]), rtol=0, atol=0.02)
    assert greedy[0].item() == 1.0
    drawn = torch.bincount(output["action"].view(-1, 3)[:, 2]) / (B / 3)
    torch.testing.assert_close(drawn, torch.full((3,), 1 / 3), rtol=0, atol=0.02)
    # Of those who explore, each action as often: small first numbers do not make small second ones.
    other = output["action"] != best
    among = (output["action"] - best).remainder(3).view(-1, 3)[:, 1][other.view(-1, 3)[:, 1]]
    assert (among == 1).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_without_epsilon_and_in_evaluation_it_is_greedy() -> None:
    model, observation = QNetwork(4, 3), observe(500, 4)
    always = DictTensor({"epsilon": torch.ones(500)})
    best = model(observation["frame"]).argmax(1)
    for agent, info in ((QAgent(model), DictTensor()), (QAgent(model, stochastic=False), always)):
        output, state = agent(DictTensor(), observation, info)
        assert torch.equal(output["action"], best)
        assert state.empty()


def test_epsilon_reaches_every_environment_through_a_batcher_and_a_replay_draws_the_same() -> None:
    agent_args = {"model": QNetwork(3, 2)}
    env_args = {"n_envs": 4, "auto_reset": True}
    with RL_Batcher(50, QAgent, create_counting_env, agent_args=agent_args, env_args=env_args, seed=0) as batcher:
        batcher.reset()
        batcher.execute(DictTensor({"epsilon": torch.tensor([0.0, 0.0, 1.0, 1.0])}))
        trajectories, _ = batcher.get()
    assert isinstance(trajectories, Trajectories)
    steps = trajectories.steps
    greedy = steps["action/action"] == steps["action/action_values"].argmax(2)
    assert greedy[:2].all()
    assert 0.3 < greedy[2:].float().mean().item() < 0.7
    agent: RL_Agent = QAgent(agent_args["model"])
    assert torch.equal(replay_agent(agent, trajectories)["action"], steps["action/action"])


@pytest.mark.parametrize("duelling", [True, False])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_networks_take_frames_of_any_dtype_and_rank(duelling: bool, orthogonal: bool) -> None:
    model = QNetwork(6, 3, hidden=(16, 8), duelling=duelling, orthogonal=orthogonal)
    frame = torch.randint(0, 2, (5, 2, 3))
    for dtype in (torch.uint8, torch.bool, torch.float64):
        torch.testing.assert_close(model(frame.to(dtype)), model(frame.float().flatten(1)))
    assert model(frame).shape == (5, 3)


def test_a_network_without_hidden_layers_names_one_that_works() -> None:
    with pytest.raises(ValueError, match=r"expected the width of at least one layer.*MLP\(3, 2, hidden=\(\)\)"):
        QNetwork(3, 2, hidden=())
    agent = QAgent(MLP(3, 2, hidden=()))
    assert agent(DictTensor(), observe(5, 3), DictTensor())[0]["action_values"].shape == (5, 2)


def test_a_duelling_head_learns_one_state_value_from_every_action() -> None:
    head = DuellingHead(4, 3, hidden=(8,))
    head(torch.randn(5, 4))[:, 0].sum().backward()
    last = list(head.value.parameters())[-1]
    torch.testing.assert_close(last.grad, torch.full_like(last, 5.0))
