"""Learners that learn from a replay buffer, and the same batches for all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from resume_tasks import create_network, create_pendulum, create_sim, create_soft_network
from torch import nn

from rlstruct import Trajectories, agents
from rlstruct.agents import ActorCriticAgent
from rlstruct.algos import GradientLearner, alphazero, dqn, sac
from rlstruct.batchers import RL_Batcher
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.sims import ConnectFour

REPLAYING = ["dqn", "dqn, double, prioritised", "sac", "alphazero"]


def replaying(kind: str, device: str, graph: bool, **changes: Any) -> GradientLearner:
    """A learner that learns from a replay buffer."""
    torch.manual_seed(3)
    settings: dict[str, Any] = {"n_timesteps": 6, "n_envs": 4, "n_env_steps": 1000, "replay_capacity": 200}
    settings |= {
        "learning_starts": 1,
        "n_updates": 3,
        "batch_size": 8,
        "learner_device": device,
        "graph": graph,
        **changes,
    }
    if kind == "alphazero":
        config = alphazero.AlphaZeroConfig(**settings, max_gradient_norm=0.5)
        model = create_game_network().to(device)
        return alphazero.AlphaZeroLearner.create(model, partial(SearchAgent, create_simulator=ConnectFour), config)
    if kind == "sac":
        soft = create_soft_network().to(device)
        return sac.SACLearner.create(soft, agents.SquashedGaussianAgent, sac.SACConfig(**settings))
    prioritised, double = "prioritised" in kind, "double" in kind
    settings |= {"prioritised": prioritised, "double": double, "target_update_interval": 2 if prioritised else 1}
    model = agents.QNetwork(4, 2, hidden=(8,)).to(device)
    return dqn.DQNLearner.create(model, agents.QAgent, dqn.DQNConfig(**settings))


def create_game_network() -> nn.Module:
    return agents.ConvolutionalActorCritic((2, 6, 7), 7, n_features=8, layers=((4, 3, 1),))


def batches_for(kind: str, n_batches: int) -> list[Trajectories]:
    """Collect batches on the CPU."""
    torch.manual_seed(3)
    if kind == "alphazero":
        search = SearchConfig(n_simulations=2, max_depth=2)
        create_agent: Any = partial(SearchAgent, create_simulator=ConnectFour, config=search)
        model, create_env = create_game_network(), ConnectFour
    elif kind == "sac":
        create_agent, model, create_env = agents.SquashedGaussianAgent, create_soft_network(), create_pendulum
    else:
        create_agent, model, create_env = ActorCriticAgent, create_network(), create_sim
    args, env_args = {"model": model}, {"n_envs": 4}
    with RL_Batcher(6, create_agent, create_env, agent_args=args, env_args=env_args, seed=1) as batcher:
        batcher.reset()
        batches = []
        for _ in range(n_batches):
            batcher.execute()
            batches.append(batcher.get()[0])
    return batches


def check_captured_gradient_steps(kind: str, device: str) -> None:
    """Compare gradient steps with those of one captured graph, bit by bit."""
    plain, graph = (replaying(kind, device, graph) for graph in (False, True))
    for i, batch in enumerate(batches_for(kind, 4)):
        one, other = (learner.update(batch, (i + 1) / 10) for learner in (plain, graph))
        assert {name: term.item() for name, term in one.items()} == {name: term.item() for name, term in other.items()}
    assert graph.policy_version == plain.policy_version == 12
    state, expected, first = (learner.state_dict() for learner in (graph, plain, replaying(kind, device, False)))
    others = {"alphazero": (), "sac": ("target_critics",)}.get(kind, ("target_model", "online_model"))
    for name in ("model", *others):
        weights: Any = expected[name]
        for key, weight in weights.items():
            assert torch.equal(weight, state[name][key]), (name, key)  # type: ignore[index]
            assert not torch.equal(weight, first[name][key]), (name, key)  # type: ignore[index]
