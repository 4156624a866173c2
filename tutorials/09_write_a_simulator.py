"""Tutorial 09: write a simulator in forty lines.

A simulator whose state is tensors steps thousands of environments in one call, on any device. You write the initial
state, the transition and the observation for B environments at once; the base class `TensorEnv` adds restarts, time
limits, final observations, random keys, states from outside and the contract of a VecEnv.
"""

from dataclasses import dataclass

import gymnasium
import torch

from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.functional.random import randint, uniform
from rlstruct.sims import TensorEnv
from rlstruct.testing import check_vec_env, forbid_host_sync

ROWS, COLUMNS = 10, 5


# The simulator: a fruit falls, drifting with the wind; a basket in the last row should be where it lands.
@dataclass(frozen=True)
class CatchState:
    fruit_x: torch.Tensor  # [B] int64, all three
    fruit_y: torch.Tensor
    basket: torch.Tensor


class Catch(TensorEnv[CatchState]):
    """Actions: 0 left, 1 stay, 2 right. Reward 1 for a fruit that is caught, -1 for one that is not."""

    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Box(0, max(ROWS, COLUMNS), (3,), "float32")

    def initial(self, key):  # key [n] int64: all randomness comes from it, so every device and batch draws the same
        x = randint(key, COLUMNS)  # [n]
        return CatchState(x, torch.zeros_like(x), torch.full_like(x, COLUMNS // 2))

    def transition(self, state, action, key):  # no .item(), no `if` on a tensor: torch.where, arithmetic, clamp
        wind = torch.where(uniform(key) < 0.1, randint(key, 3) - 1, 0)
        x = (state.fruit_x + wind).clamp(0, COLUMNS - 1)
        basket = (state.basket + action - 1).clamp(0, COLUMNS - 1)
        landed = state.fruit_y + 1 == ROWS - 1
        reward = torch.where(landed, torch.where(x == basket, 1.0, -1.0), 0.0)
        return CatchState(x, state.fruit_y + 1, basket), reward, landed

    def observe(self, state):
        return torch.stack([state.fruit_x, state.fruit_y, state.basket], dim=1).float()  # [B, 3]


class Follower(RL_Agent):
    """Moves the basket below the fruit."""

    def __call__(self, state, observation, agent_info, history=None):
        x, _, basket = observation["frame"].unbind(1)
        return DictTensor({"action": 1 + torch.sign(x - basket).long()}), state


def create_env(n_envs, seed):
    return Catch(n_envs, seed)


if __name__ == "__main__":
    torch.set_num_threads(1)

    # 1. The kit for environments finds what is wrong with one: dtypes, resets, seeds, idle rows, tensors that change.
    check_vec_env(lambda seed: Catch(4, seed))
    check_vec_env(lambda seed: Catch(4, seed, auto_reset=False, time_limit=5))
    print("Catch keeps the contract of a VecEnv")

    # 2. Nothing waits for the device: this is what makes it fast on a GPU, and can be found out without one.
    env = Catch(4)
    env.reset()
    with forbid_host_sync():
        env.step(DictTensor({"action": torch.tensor([0, 1, 2, 1])}))

    # 3. Begin from states of your own: here, the fruit one row above the ground, next to the basket and above it.
    ids, start = [0, 1], CatchState(torch.tensor([1, 2]), torch.tensor([ROWS - 2] * 2), torch.tensor([3, 2]))
    env.set_state(ids, start)
    (reached, _), (current, _) = env.step(DictTensor({"action": torch.ones(4, dtype=torch.int64)}))
    print("rewards", reached["reward"].tolist(), "restarted", current["initial_state"].tolist())
    assert reached["reward"][0] == -1.0
    assert reached["terminated"][:2].all()

    # 4. Environment 5 of seed 0 is environment 0 of seed 5: what it does depends neither on the batch nor on processes.
    eight, three = Catch(8, seed=0), Catch(3, seed=5)
    eight.reset()
    three.reset()
    for _ in range(30):
        (all_eight, _), _ = eight.step(DictTensor({"action": torch.ones(8, dtype=torch.int64)}))
        (last_three, _), _ = three.step(DictTensor({"action": torch.ones(3, dtype=torch.int64)}))
        assert torch.equal(all_eight["frame"][5:], last_three["frame"])

    # 5. It is a VecEnv: batchers, agents and algorithms take it as they take gymnasium's.
    with RL_Batcher(90, Follower, create_env, env_args={"n_envs": 500}, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    reward = trajectories.trajectories["_observation/reward"]
    ends = trajectories.trajectories["_observation/terminated"]
    caught = ((reward > 0).sum() / ends.sum()).item()
    print(f"{int(ends.sum())} fruits, {100 * caught:.0f} % caught; the others were blown away in their last step")
    assert ends.sum() == 500 * 90 // (ROWS - 1)
    assert 0.9 < caught < 1
