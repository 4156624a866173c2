"""Tutorial 09: write a simulator in forty lines.

A simulator whose state is tensors steps thousands of environments in one call, on any device. You write the initial
state, the transition and the observation for B environments at once; the base class `TensorEnv` adds restarts, time
limits, final observations, random keys and `set_state`, and makes it a VecEnv.
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


# The simulator: a fruit falls and drifts with the wind; the agent moves a basket in the last row to catch it.
@dataclass(frozen=True)
class CatchState:
    fruit_x: torch.Tensor  # [B] int64, all three
    fruit_y: torch.Tensor
    basket: torch.Tensor


class Catch(TensorEnv[CatchState]):
    """Actions: 0 left, 1 stay, 2 right. Reward 1 for a caught fruit, -1 for a missed one."""

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

    # 1. check_vec_env tests the contract: dtypes, resets, seeds, idle rows, tensors that must not change.
    check_vec_env(lambda seed: Catch(4, seed))
    check_vec_env(lambda seed: Catch(4, seed, auto_reset=False, time_limit=5))
    print("Catch keeps the contract of a VecEnv")

    # 2. A step never waits for the device. That makes it fast on a GPU, and you can test it without one.
    env = Catch(4)
    env.reset()
    with forbid_host_sync():
        env.step(DictTensor({"action": torch.tensor([0, 1, 2, 1])}))

    # 3. Start from states of your choice: here the fruit is one row above the ground, and the basket below it only in
    #    environment 1.
    ids, start = [0, 1], CatchState(torch.tensor([1, 2]), torch.tensor([ROWS - 2] * 2), torch.tensor([3, 2]))
    env.set_state(ids, start)
    (reached, _), (current, _) = env.step(DictTensor({"action": torch.ones(4, dtype=torch.int64)}))
    print("rewards", reached["reward"].tolist(), "restarted", current["initial_state"].tolist())
    assert reached["reward"][0] == -1.0
    assert reached["terminated"][:2].all()

    # 4. Environment 5 of seed 0 equals environment 0 of seed 5: the size of the batch and the number of processes do
    #    not matter.
    eight, three = Catch(8, seed=0), Catch(3, seed=5)
    eight.reset()
    three.reset()
    for _ in range(30):
        (all_eight, _), _ = eight.step(DictTensor({"action": torch.ones(8, dtype=torch.int64)}))
        (last_three, _), _ = three.step(DictTensor({"action": torch.ones(3, dtype=torch.int64)}))
        assert torch.equal(all_eight["frame"][5:], last_three["frame"])

    # 5. It is a VecEnv, so batchers, agents and algorithms use it like an environment of gymnasium.
    with RL_Batcher(90, Follower, create_env, env_args={"n_envs": 500}, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    reward = trajectories.steps["_observation/reward"]
    ends = trajectories.steps["_observation/terminated"]
    caught = ((reward > 0).sum() / ends.sum()).item()
    print(f"{int(ends.sum())} fruits, {100 * caught:.0f} % caught; the others were blown away in their last step")
    assert ends.sum() == 500 * 90 // (ROWS - 1)
    assert 0.9 < caught < 1

# Next: 10; docs/kernels.md turns such a simulator into a kernel.
