"""Wrong arguments of a Policy are one clear TypeError."""

from __future__ import annotations

from typing import Any

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
        ((ActorCritic(4, 2), ActorCriticAgent(ActorCritic(4, 2)), SPECS), "create_agent is a ActorCriticAgent, expec"),
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
