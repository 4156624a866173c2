"""An action that does not exist is named, also where the environment would compute with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.action_range import ActionRange
from rlstruct.batchers.slab import Steps
from rlstruct.errors import WorkerError
from rlstruct.sims import make


class WrongAgent(RL_Agent):
    """Returns ``value`` in environment 2 in its third call, else 0."""

    def __init__(self, value: float) -> None:
        self.value, self.calls = value, 0

    def __call__(self, state: DictTensor, observation: Any, agent_info: Any, history: Any = None) -> Any:
        action = torch.zeros_like(observation["last_action"])
        self.calls += 1
        if self.calls == 3:
            action[2] = self.value
        return DictTensor({"action": action}), state


@pytest.mark.parametrize(("value", "n_processes"), [(2, 0), (-1, 0), (7, 1)])
def test_a_simulator_gets_no_action_beyond_its_last_one_unnoticed(value: int, n_processes: int) -> None:
    settings: dict[str, Any] = {"agent_args": {"value": value}, "env_args": {"name": "CartPole-v1", "n_envs": 4}}
    with RL_Batcher(8, WrongAgent, make, n_processes=n_processes, seed=0, **settings) as batcher:
        batcher.reset()
        batcher.execute()
        told = rf"environment 2, seed 2.*'action' of environment 2 in step 2 of the batch is {value}, .*Discrete\(2\)"
        with pytest.raises(WorkerError, match=told) as error:
            batcher.get()
    assert error.value.environment == 2


def test_actions_of_a_box_may_be_anything_but_nan() -> None:
    for value, expected in ((100.0, None), (math.nan, r"environment 2.* is \[nan\], expected an element of Box.*NaN")):
        settings: dict[str, Any] = {"agent_args": {"value": value}, "env_args": {"name": "Pendulum-v1", "n_envs": 4}}
        with RL_Batcher(8, WrongAgent, make, seed=0, **settings) as batcher:
            batcher.reset()
            batcher.execute()
            if expected is None:
                batcher.get()
            else:
                with pytest.raises(WorkerError, match=expected):
                    batcher.get()


def test_every_part_of_a_nested_space_has_its_range() -> None:
    space = spaces.Dict(
        a=spaces.MultiDiscrete([2, 3]), b=spaces.Tuple([spaces.Discrete(2, start=5), spaces.MultiBinary(2)])
    )
    good = {
        "action/action/a": torch.tensor([[[1, 2]]]),
        "action/action/b/0": torch.tensor([[6]]),
        "action/action/b/1": torch.tensor([[[0, 1]]], dtype=torch.int8),
        "running": torch.ones(1, 1, dtype=torch.bool),
    }
    ActionRange(space).check(Steps(good), 1)
    for key, wrong in (("a", [[[1, 3]]]), ("b/0", [[4]]), ("b/0", [[7]]), ("b/1", [[[2, 0]]])):
        bad = {**good, f"action/action/{key}": torch.tensor(wrong)}
        with pytest.raises(ValueError, match=f"action 'action/{key}' of environment 0 in step 0"):
            ActionRange(space).check(Steps(bad), 1)
        ActionRange(space).check(Steps({**bad, "running": torch.zeros(1, 1, dtype=torch.bool)}), 1)  # it idles
        ActionRange(space).check(Steps(bad), 0)  # no step was taken


def test_off_the_cpu_the_first_batch_is_looked_at() -> None:
    steps = {"action/action": torch.tensor([[3]]), "running": torch.ones(1, 1, dtype=torch.bool)}
    there = Steps({key: value.to("sim:1") for key, value in steps.items()})
    looking = ActionRange(spaces.Discrete(3))
    with pytest.raises(ValueError, match="action 'action' of environment 0"):
        looking.check(there, 1)
    looking.check(there, 1)
