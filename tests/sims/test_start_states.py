"""Start states are drawn for several steps at once, and are those that each episode would draw by itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor
from rlstruct.functional import random
from rlstruct.sims import TensorEnv, simulation


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
    carry = env.state_tensors()
    return random.uniform(random.child_key(carry["env_key"], carry["episode"]))


@pytest.mark.parametrize("most_rows", [1 << 20, 12, 1])
def test_every_episode_begins_with_the_state_that_it_draws_alone(
    most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "MOST_ROWS", most_rows)
    env = Short(4, seed=3)
    action = DictTensor({"action": torch.zeros(4, dtype=torch.int64)})
    env.reset()
    kept = None
    for t in range(120):
        if t % 37 == 20:
            env.reset()
        if t == 50:
            kept = env.state_tensors()
        if t == 90 and kept is not None:
            env.set_state_tensors(kept)
        _, (current, _) = env.step(action)
        assert torch.equal(current["frame"][:, 0], drawn_alone(env))
    assert env.state_tensors()["episode"].min() > 30


def test_drawing_is_shared_by_sixteen_steps() -> None:
    env = Short(4)
    env.reset()
    before = env.n_drawn
    for _ in range(32):
        env.step(DictTensor({"action": torch.zeros(4, dtype=torch.int64)}))
    assert env.n_drawn - before == 2


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


def test_a_mask_is_no_list_of_environments() -> None:
    env = Short(4)
    env.reset()
    for ids in (torch.tensor([True, False, False, True]), [True, False], torch.tensor([0.0, 1.0]), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"Short.get_state: ids is torch.*expected the numbers of environments"):
            env.get_state(ids)
    with pytest.raises(ValueError, match=r"Short.set_state: ids is torch.bool \[4\]"):
        env.set_state(torch.tensor([True, False, False, True]), Drawn(torch.tensor([0.5]), torch.tensor([2])))
    assert env.get_state([]).left.shape == (0,)
