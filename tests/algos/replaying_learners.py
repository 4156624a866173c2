"""Learners that learn from a replay buffer, and the same batches for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from resume_tasks import (
    DISTRIBUTIONAL,
    create_distributional_network,
    create_network,
    create_pendulum,
    create_sim,
    create_soft_network,
)
from torch import nn

from rlstruct import Trajectories, agents
from rlstruct.agents import ActorCriticAgent
from rlstruct.algos import GradientLearner, dqn, sac
from rlstruct.batchers import RL_Batcher

REPLAYING = ["dqn", "dqn, double, prioritised", "sac", "sac, distributional"]
SMALL: dict[str, Any] = {"n_timesteps": 6, "n_envs": 4, "n_env_steps": 1000, "replay_capacity": 200}
SMALL |= {"learning_starts": 1, "n_updates": 3, "batch_size": 8}


def replaying(kind: str, device: str, graph: bool, **changes: Any) -> GradientLearner:
    """A learner that learns from a replay buffer."""
    torch.manual_seed(3)
    settings = {**SMALL, "learner_device": device, "graph": graph, **changes}
    if kind.startswith("sac"):
        soft, more = create_soft_network(), {}
        if "distributional" in kind:
            soft, more = create_distributional_network(), DISTRIBUTIONAL
        config = sac.SACConfig(**settings, **more)
        return sac.SACLearner.create(soft.to(device), agents.SquashedGaussianAgent, config)
    prioritised, double = "prioritised" in kind, "double" in kind
    settings |= {"prioritised": prioritised, "double": double, "target_update_interval": 2 if prioritised else 1}
    model = agents.QNetwork(4, 2, hidden=(8,)).to(device)
    return dqn.DQNLearner.create(model, agents.QAgent, dqn.DQNConfig(**settings))


def learn_once(learner: Any) -> dict[str, torch.Tensor]:
    """Take one gradient step on what the buffer holds, outside of an update."""
    minibatch = next(iter(learner.minibatches(None)))
    terms: dict[str, torch.Tensor] = learner.after_step(minibatch, learner.gradient_step(minibatch))
    return terms


def batches_for(kind: str, n_batches: int) -> list[Trajectories]:
    """Collect batches on the CPU."""
    torch.manual_seed(3)
    if kind.startswith("sac"):
        return collect_batches(agents.SquashedGaussianAgent, create_soft_network(), create_pendulum, n_batches)
    return collect_batches(ActorCriticAgent, create_network(), create_sim, n_batches)


def collect_batches(create_agent: Any, model: nn.Module, create_env: Any, n_batches: int) -> list[Trajectories]:
    """Collect batches of an agent on the CPU."""
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
    others = ("target_critics",) if kind.startswith("sac") else ("target_model", "online_model")
    check_captured_steps(partial(replaying, kind, device), batches_for(kind, 4), others)


def check_captured_steps(
    create_learner: Callable[[bool], GradientLearner], batches: Sequence[Trajectories], others: Sequence[str] = ()
) -> None:
    """Compare gradient steps of a learner with those of one captured graph; ``others`` are networks besides model."""
    plain, graph = (create_learner(graph) for graph in (False, True))
    for i, batch in enumerate(batches):
        one, other = (learner.update(batch, (i + 1) / 10) for learner in (plain, graph))
        assert {name: term.item() for name, term in one.items()} == {name: term.item() for name, term in other.items()}
    assert graph.policy_version == plain.policy_version == 12
    state, expected, first = (learner.state_dict() for learner in (graph, plain, create_learner(False)))
    for name in ("model", *others):
        weights: Any = expected[name]
        for key, weight in weights.items():
            assert torch.equal(weight, state[name][key]), (name, key)  # type: ignore[index]
            assert not torch.equal(weight, first[name][key]), (name, key)  # type: ignore[index]
