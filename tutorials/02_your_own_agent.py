"""Tutorial 02: your own agent, in your own environment, collected by a batcher.

An agent is a class with `__call__(state, observation, agent_info, history)`: it acts for B environments at once and
keeps its state outside of itself. An environment is any gymnasium environment, or a VecEnv of your own.
"""

import gymnasium
import torch
from torch import nn

from rlstruct import DictTensor, RL_Agent, masked_dicttensor, replay_agent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.functional.random import categorical
from rlstruct.testing import check_agent, check_vec_env


# --- An agent with a memory -------------------------------------------------------------------------------------------
class GRUAgent(RL_Agent):
    """A recurrent policy for discrete actions."""

    pure = True

    def __init__(self):
        self.cell = nn.GRUCell(4, 16)
        self.head = nn.Linear(16, 2)

    def initial_state(self, agent_info, B):
        return DictTensor({"hidden": torch.zeros(B, 16)})

    def __call__(self, state, observation, agent_info, history=None):
        # A new episode may begin inside a batch: `initial_state` says where, and the memory restarts there.
        start = self.initial_state(agent_info, state.n_elems())
        state = masked_dicttensor(state, start, observation["initial_state"])
        hidden = self.cell(observation["frame"], state["hidden"])
        logits = self.head(hidden)
        # Drawing from observation["rng"] makes the agent reproducible, however many processes there are.
        action = categorical(logits, observation["rng"])
        return DictTensor({"action": action, "logits": logits}), DictTensor({"hidden": hidden})

    def update(self, info):
        self.cell.load_state_dict({k.removeprefix("cell."): v for k, v in info.items() if k.startswith("cell.")})
        self.head.load_state_dict({k.removeprefix("head."): v for k, v in info.items() if k.startswith("head.")})


# --- Two ways to run gymnasium environments ---------------------------------------------------------------------------
# Factories are called in the process that uses them. `seed` is given by the batcher.
def create_episodic(n_envs, seed):
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_endless(n_envs, seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_agent():
    torch.manual_seed(0)
    return GRUAgent()


# The guard is there because every worker process imports this file.
if __name__ == "__main__":
    # Before anything else: do they keep the contracts? These checks name what is wrong, and how to mend it.
    env = create_endless(n_envs=4, seed=0)
    check_vec_env(create_endless, env_args={"n_envs": 4})
    check_agent(create_agent(), env)
    print("agent and environment keep their contracts")

    # Whole episodes: rows are padded, `lengths` says how far they go.
    with RL_Batcher(500, create_agent, create_episodic, env_args={"n_envs": 4}, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, n_still_running = batcher.get()
    print("episode lengths:", trajectories.lengths.tolist(), "still running:", n_still_running)

    # Endless collection in two processes: always 32 steps of all 2 x 4 environments; episodes restart on the way.
    with RL_Batcher(32, create_agent, create_endless, env_args={"n_envs": 4}, n_processes=2, seed=0) as batcher:
        batcher.reset()
        for _ in range(3):
            batcher.execute()
            trajectories, _ = batcher.get()
        print(batcher.stats())
    steps = trajectories.trajectories
    print("frames:", list(steps["observation/frame"].shape), "ends:", int(steps["_observation/done"].sum()))

    # A learner recomputes the same outputs with gradients. The stored state and the stored random keys make it exact,
    # restarts inside the rows included.
    learner = create_agent()
    replayed = replay_agent(learner, trajectories)
    assert torch.allclose(replayed["logits"], steps["action/logits"], atol=1e-6)
    assert torch.equal(replayed["action"], steps["action/action"])
    assert replayed["logits"].requires_grad
    print("the replay repeats every action")
