"""Tutorial 02: train your own agent with your own loss, then write one with a memory.

An agent is a class with `__call__(state, observation, agent_info, history)`: it acts for B environments at once, and
the caller keeps its state between calls. An environment is any gymnasium environment, or your own VecEnv. You compute
the loss from the trajectories that a batcher returns.
"""

import gymnasium
import torch
from torch import nn

from rlstruct import DictTensor, RL_Agent, masked_dicttensor, replay_agent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.functional.random import categorical
from rlstruct.testing import check_agent, check_vec_env


# --- An agent and a loss ----------------------------------------------------------------------------------------------
class LinearAgent(RL_Agent):
    """A linear policy with 10 parameters."""

    pure = True  # depends only on its weights and its arguments

    def __init__(self):
        self.model = nn.Linear(4, 2)

    def __call__(self, state, observation, agent_info, history=None):
        logits = self.model(observation["frame"])  # [B, 2]
        # Drawing from observation["rng"] makes the agent reproducible, however many processes there are.
        return DictTensor({"action": categorical(logits, observation["rng"]), "logits": logits}), state

    def update(self, info):  # receives what you pass to batcher.update(...)
        self.model.load_state_dict(info)


def policy_gradient(learner, trajectories):
    """Return the loss of REINFORCE, with the mean return over all steps as baseline."""
    steps, mask = trajectories.steps, trajectories.mask()  # [B, T, ...], [B, T]
    replayed = replay_agent(learner, trajectories)  # the same outputs, now with gradients
    log_prob = replayed["logits"].log_softmax(-1).gather(-1, steps["action/action"].unsqueeze(-1)).squeeze(-1)
    reward = steps["_observation/reward"] * mask
    returns = reward.flip(1).cumsum(1).flip(1)  # [B, T]: the sum of the rewards still to come
    advantage = returns - (returns * mask).sum() / mask.sum()
    return -(log_prob * advantage * mask).sum() / mask.sum()


def train(n_updates):
    """Train the linear agent and return the mean length of the episodes of each batch."""
    torch.manual_seed(0)
    learner = LinearAgent()
    optimiser = torch.optim.Adam(learner.model.parameters(), lr=0.05)
    lengths = []
    # 200: the most steps of a batch. Without n_processes this process collects.
    with RL_Batcher(200, LinearAgent, create_episodic, env_args={"n_envs": 16}, seed=0) as batcher:
        for _ in range(n_updates):
            batcher.update(learner.model.state_dict())  # weights for the next batch
            batcher.reset()  # new episodes
            batcher.execute()  # begins a batch
            trajectories, _ = batcher.get()  # waits for it; the second value counts episodes that have not ended
            optimiser.zero_grad()
            policy_gradient(learner, trajectories).backward()
            optimiser.step()
            lengths.append(float(trajectories.lengths.float().mean()))
    return lengths


# --- An agent with a memory -------------------------------------------------------------------------------------------
class GRUAgent(RL_Agent):
    """A recurrent policy for discrete actions."""

    pure = True

    def __init__(self):
        self.cell = nn.GRUCell(4, 16)
        self.head = nn.Linear(16, 2)

    def initial_state(self, agent_info, B):
        return DictTensor({"hidden": torch.zeros(B, 16, device=self.head.weight.device)})

    def __call__(self, state, observation, agent_info, history=None):
        # An episode may begin inside a batch. `initial_state` marks these rows, and their memory restarts.
        start = self.initial_state(agent_info, state.n_elems())
        state = masked_dicttensor(state, start, observation["initial_state"])
        hidden = self.cell(observation["frame"], state["hidden"])
        logits = self.head(hidden)
        action = categorical(logits, observation["rng"])
        return DictTensor({"action": action, "logits": logits}), DictTensor({"hidden": hidden})

    def update(self, info):
        self.cell.load_state_dict({k.removeprefix("cell."): v for k, v in info.items() if k.startswith("cell.")})
        self.head.load_state_dict({k.removeprefix("head."): v for k, v in info.items() if k.startswith("head.")})


# --- Two ways to run gymnasium environments ---------------------------------------------------------------------------
# Each process calls these factories itself; the batcher passes `seed`.
def create_episodic(n_envs, seed):
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_endless(n_envs, seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_agent():
    torch.manual_seed(0)
    return GRUAgent()


# The guard is needed because every worker process imports this file.
if __name__ == "__main__":
    torch.set_num_threads(1)
    lengths = train(n_updates=25)
    print(f"episodes of the linear agent: {lengths[0]:.0f} steps before, {lengths[-1]:.0f} after 25 updates")
    assert lengths[-1] > 2 * lengths[0]

    # Run these checks on every new agent and environment: they name what is wrong, and how to fix it.
    env = create_endless(n_envs=4, seed=0)
    check_vec_env(create_endless, env_args={"n_envs": 4})
    check_agent(create_agent(), env)
    print("agent and environment keep their contracts")

    # Whole episodes: rows are padded, and `lengths` has each row's number of real steps.
    with RL_Batcher(500, create_agent, create_episodic, env_args={"n_envs": 4}, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, n_still_running = batcher.get()
    print("episode lengths:", trajectories.lengths.tolist(), "still running:", n_still_running)

    # Endless collection in two processes: each batch has 32 steps of all 2 x 4 environments; episodes restart in it.
    with RL_Batcher(32, create_agent, create_endless, env_args={"n_envs": 4}, n_processes=2, seed=0) as batcher:
        batcher.reset()
        for _ in range(3):
            batcher.execute()
            trajectories, _ = batcher.get()
        print(batcher.stats())
    steps = trajectories.steps
    print("frames:", list(steps["observation/frame"].shape), "ends:", int(steps["_observation/done"].sum()))

    # The learner recomputes the same outputs with gradients. They are exact, even after a restart inside a row, because
    # the batch holds the agent's state and the random keys.
    learner = create_agent()
    replayed = replay_agent(learner, trajectories)
    assert torch.allclose(replayed["logits"], steps["action/logits"], atol=1e-6)
    assert torch.equal(replayed["action"], steps["action/action"])
    assert replayed["logits"].requires_grad
    print("the replay repeats every action")

# Next: 03 adds a baseline; docs/your_own.md has the rules for agents.
