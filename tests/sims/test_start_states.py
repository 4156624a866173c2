"""Start states are drawn for several episodes at once, and are those that each episode would draw by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor
from rlstruct.functional import random
from rlstruct.sims import TensorEnv


@dataclass(frozen=True)
class Drawn:
    number: Tensor  # [B] float
    left: Tensor  # [B] int64


class Short(TensorEnv[Drawn]):
    """Episodes of one to three steps that show what they drew at their start."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0.0, 1.0, (1,))
    n_drawn = 0

    def initial(self, key: Tensor) -> Drawn:
        self.n_drawn += 1
        return Drawn(random.uniform(key), random.randint(key, 3, stream=1))

    def transition(self, state: Drawn, action: Tensor, key: Tensor) -> tuple[Drawn, Tensor, Tensor]:
        return Drawn(state.number, state.left - 1), torch.ones_like(state.number), state.left == 0

    def observe(self, state: Drawn) -> Tensor:
        return state.number.unsqueeze(1)


def drawn_alone(env: Short) -> Tensor:
    """Return the draws that the running episodes would have made one by one, [B]."""
    carry = env.carry()
    return random.uniform(random.child_key(carry["env_key"], carry["episode"]))


def test_every_episode_begins_with_the_state_that_it_draws_alone() -> None:
    env = Short(4, seed=3)
    action = DictTensor({"action": torch.zeros(4, dtype=torch.int64)})
    env.reset()
    kept = None
    for t in range(120):
        if t % 37 == 20:
            env.reset()
        if t == 50:
            kept = env.carry()
        if t == 90 and kept is not None:
            env.set_carry(kept)
        _, (current, _) = env.step(action)
        assert torch.equal(current["frame"][:, 0], drawn_alone(env))
    assert env.carry()["episode"].min() > 30


def test_drawing_is_shared_by_many_steps() -> None:
    env = Short(4)
    env.reset()
    before = env.n_drawn
    for _ in range(32):
        env.step(DictTensor({"action": torch.zeros(4, dtype=torch.int64)}))
    assert 1 <= env.n_drawn - before <= 3


def test_an_agent_that_writes_over_what_it_was_shown_changes_no_state() -> None:
    class Shown(Short):
        def initial(self, key: Tensor) -> Drawn:
            return Drawn(random.uniform(key).unsqueeze(1), key)

        def transition(self, state: Drawn, action: Tensor, key: Tensor) -> tuple[Drawn, Tensor, Tensor]:
            return (
                Drawn(state.number.clone(), state.left),
                torch.ones_like(state.number[:, 0]),
                torch.zeros_like(state.left, dtype=torch.bool),
            )

        def observe(self, state: Drawn) -> Tensor:
            return state.number

    env = Shown(4)
    env.reset()
    expected = drawn_alone(env).unsqueeze(1)
    action = DictTensor({"action": torch.zeros(4, dtype=torch.int64)})
    for _ in range(3):
        (reached, _), (current, _) = env.step(action)
        for observation in (reached, current):
            assert torch.equal(observation["frame"], expected)
            assert torch.equal(observation["last_action"], torch.zeros(4, dtype=torch.int64))
            observation["frame"].fill_(float("nan"))
            observation["reward"].fill_(float("nan"))
            action["action"].fill_(1)
        action["action"].fill_(0)


def test_states_of_ones_own_in_between_leave_the_others_alone() -> None:
    env = Short(4, seed=1)
    action = DictTensor({"action": torch.zeros(4, dtype=torch.int64)})
    env.reset()
    for _ in range(5):
        env.step(action)
    env.set_state([1], Drawn(torch.tensor([0.5]), torch.tensor([2])))
    for _ in range(3):
        _, (current, _) = env.step(action)
    assert torch.equal(current["frame"][:, 0], drawn_alone(env))
