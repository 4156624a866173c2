"""An agent replayed over its own trajectories says what it said then, also across restarts inside the slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

from rlstruct import RL_Agent, Trajectories, replay_agent, replay_agent_stateless
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    GaussianActorCritic,
    GaussianAgent,
    RecurrentActorCritic,
    RecurrentAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf

KINDS: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "feed-forward": (ActorCriticAgent, lambda: ActorCritic(4, 2), "CartPole-v1"),
    "recurrent": (RecurrentAgent, lambda: RecurrentActorCritic(4, 2, n_hidden=16), "CartPole-v1"),
    "gaussian": (GaussianAgent, lambda: GaussianActorCritic(3, 1), "Pendulum-v1"),
    "recurrent gaussian": (
        RecurrentGaussianAgent,
        lambda: RecurrentGaussianActorCritic(3, 1, n_hidden=8),
        "Pendulum-v1",
    ),
}


def make_model(kind: str) -> Any:
    torch.manual_seed(1)
    return KINDS[kind][1]()


def make_agent(kind: str, model: Any, **arguments: Any) -> RL_Agent:
    return KINDS[kind][0](model, **arguments)


def create_env(n_envs: int, seed: int, kind: str, auto_reset: bool) -> GymEnv | GymEnvInf:
    envs = [gymnasium.make(KINDS[kind][2], max_episode_steps=12 if auto_reset else 500) for _ in range(n_envs)]
    if "gaussian" in kind:
        envs = [gymnasium.wrappers.ClipAction(env) for env in envs]
    return (GymEnvInf if auto_reset else GymEnv)(envs, seed=seed)


def collect(kind: str, model: Any, *, auto_reset: bool, batches: int = 1) -> Trajectories:
    with RL_Batcher(
        40, make_agent, create_env, agent_args={"kind": kind, "model": model},
        env_args={"n_envs": 4, "kind": kind, "auto_reset": auto_reset}, seed=5,
    ) as batcher:  # fmt: skip
        batcher.reset()
        for _ in range(batches):
            batcher.execute()
            trajectories, _ = batcher.get()
    assert trajectories is not None
    return trajectories


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_reproduces_log_probabilities_across_restarts(kind: str, batches: int) -> None:
    model = make_model(kind)
    trajectories = collect(kind, model, auto_reset=True, batches=batches)
    steps = trajectories.steps
    restarts = steps["observation/initial_state"][:, 1:].sum(dim=1)
    assert (restarts >= 3).all()  # a slot of 40 steps, episodes of 12 at most
    with torch.no_grad():
        replayed = replay_agent(make_agent(kind, model), trajectories)
    assert torch.equal(replayed["action"], steps["action/action"])
    for key in replayed.keys():
        torch.testing.assert_close(replayed[key], steps[f"action/{key}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["feed-forward", "recurrent"])
def test_replay_reproduces_whole_episodes(kind: str) -> None:
    model = make_model(kind)
    trajectories = collect(kind, model, auto_reset=False)
    mask = trajectories.mask()
    assert not mask.all()  # CartPole's random episodes differ in length
    with torch.no_grad():
        replayed = replay_agent(make_agent(kind, model), trajectories)
    stored = trajectories.steps["action/log_probability"]
    torch.testing.assert_close(replayed["log_probability"][mask], stored[mask], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["feed-forward", "recurrent"])
def test_a_replay_with_other_weights_judges_the_actions_taken(kind: str) -> None:
    model = make_model(kind)
    trajectories = collect(kind, model, auto_reset=True)
    with torch.no_grad():
        model.actor.layers[-1].bias.add_(torch.tensor([0.0, 3.0]))  # which would draw others
        replayed = replay_agent(make_agent(kind, model), trajectories)
    taken = trajectories.steps["action/action"]
    assert torch.equal(replayed["action"], taken)
    expected = torch.distributions.Categorical(logits=replayed["action_logits"]).log_prob(taken)
    torch.testing.assert_close(replayed["log_probability"], expected)


def test_a_recurrent_agent_that_forgot_its_restarts_would_be_caught() -> None:
    model = make_model("recurrent")
    trajectories = collect("recurrent", model, auto_reset=True)
    steps = trajectories.steps
    steps.set("observation/initial_state", torch.zeros_like(steps["observation/initial_state"]))
    with torch.no_grad():
        replayed = replay_agent(make_agent("recurrent", model), trajectories)
    difference = (replayed["log_probability"] - steps["action/log_probability"]).abs().max()
    assert difference.item() > 1e-4


def test_one_call_and_step_by_step_agree_with_gradients() -> None:
    model = make_model("feed-forward")
    trajectories = collect("feed-forward", model, auto_reset=True)
    agent = make_agent("feed-forward", model, copy_model=False)
    gradients = []
    for replayed in (
        replay_agent_stateless(agent, trajectories)["log_probability"],
        torch.stack([agent.call_replay(trajectories, t, None)[0]["log_probability"] for t in range(40)], dim=1),
    ):
        model.zero_grad()
        replayed.sum().backward()
        gradients.append([weight.grad.clone() for weight in model.actor.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
