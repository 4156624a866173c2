"""Wrong arguments of a Policy are one clear TypeError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rlstruct
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.core import TensorSpec

SPECS = {"frame": TensorSpec((4,), torch.float32)}


class WithoutDevice(ActorCriticAgent):
    def __init__(self, model: Any) -> None:
        super().__init__(model, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((ActorCritic(4, 2), ActorCriticAgent), r"specs is missing, expected .* Pass env.observation_space, or {"),
        ((ActorCritic(4, 2), ActorCriticAgent, {"frame": (4,)}), r"specs is {'frame': \(4,\)}, expected the observ"),
        ((ActorCritic(4, 2), ActorCriticAgent, spaces.Text(3)), r"specs: space 'frame' is Text\(.* no fixed shape"),
        ((ActorCritic(4, 2), WithoutDevice, SPECS), "an unexpected keyword argument 'device'. Its parameters are"),
        ((ActorCritic(4, 2), ActorCriticAgent(ActorCritic(4, 2)), SPECS), "create_agent is an ActorCriticAgent, expec"),
        (
            (ActorCriticAgent, ActorCritic(4, 2), SPECS),
            "model is the class ActorCriticAgent, expected a torch.nn.Module",
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(TypeError, match=f"^Policy: .*{says}"):
        rlstruct.Policy(*arguments)


def test_the_space_of_an_environment_says_what_it_shows() -> None:
    policy = rlstruct.Policy(ActorCritic(4, 2), ActorCriticAgent, spaces.Box(-1, 1, (4,)))
    assert policy.specs == SPECS
    assert policy.act(torch.zeros(4)) in (0, 1)


def test_a_factory_may_drop_what_its_agent_does_not_need() -> None:
    policy = rlstruct.Policy(ActorCritic(4, 2), lambda model, **_: WithoutDevice(model), SPECS)
    assert policy.act(torch.zeros(4)) in (0, 1)


@pytest.mark.parametrize(
    ("space", "n_actions"), [(spaces.Discrete(3, start=5), 3), (spaces.MultiBinary(2), (2, 2)), (spaces.Discrete(3), 3)]
)
def test_a_checkpoint_without_a_description_acts_in_the_space_that_is_named(
    space: spaces.Space[Any], n_actions: Any, tmp_path: Path
) -> None:
    model = ActorCritic(4, n_actions)
    torch.save({"model": model.state_dict()}, tmp_path / "checkpoint.pt")
    made: dict[str, Any] = {"create_model": lambda: ActorCritic(4, n_actions), "create_agent": ActorCriticAgent}
    made["observation_space"] = spaces.Box(-1, 1, (4,))
    policy = rlstruct.load(tmp_path, **made, action_space=space)
    actions = policy.act(np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    assert all(action in space for action in actions)
    for wrong in (spaces.Box(-1, 1, (2,)), 3):
        with pytest.raises(TypeError, match=r"Policy: actions is .*, expected a Discrete.*Pass env.action_space"):
            rlstruct.load(tmp_path, **made, action_space=wrong)  # type: ignore[arg-type]


def test_an_episode_counts_once_it_has_begun() -> None:
    frames, drawn = torch.zeros(50, 4), []
    for resets in (0, 1, 2):
        policy = rlstruct.Policy(ActorCritic(4, 2).requires_grad_(False), ActorCriticAgent, SPECS, stochastic=True)
        for weight in policy.model.parameters():
            weight.zero_()
        for _ in range(resets):
            policy.reset()
        drawn.append([policy.act(frames), policy.act(frames)])
        policy.reset()
        assert not torch.equal(policy.act(frames), drawn[-1][0])
    assert all(torch.equal(one, other) for actions in drawn[1:] for one, other in zip(actions, drawn[0], strict=True))


def test_integers_that_torch_cannot_compare_are_read() -> None:
    policy = rlstruct.Policy(ActorCritic(4, 2), ActorCriticAgent, spaces.Box(0, 60_000, (4,), np.uint16))
    assert policy.act([1, 2, 3, 60_000]) in (0, 1)
    with pytest.raises(ValueError, match="expected numbers that fit into"):
        policy.act([1, 2, 3, -1])
