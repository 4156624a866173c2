"""Tutorial 03: REINFORCE with a learned baseline, first by hand on one screen, then from the library.

The loop is the same for every on-policy algorithm: publish the weights, collect, replay with gradients, step.
"""

import gymnasium
import torch

from rlstruct import replay_agent
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.reinforce import ReinforceConfig, train
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv
from rlstruct.functional.categorical import entropy, log_probability
from rlstruct.functional.returns import reward_to_go
from rlstruct.functional.statistics import masked_mean, whiten


def create_env(n_envs, seed):
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_model():
    return ActorCritic(n_inputs=4, n_actions=2)


def by_hand(n_updates):
    """Train for a few updates and return the mean episode length of each."""
    torch.manual_seed(0)
    model = create_model()
    learner = ActorCriticAgent(model, copy_model=False)  # shares the model: gradients reach it
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    lengths = []
    # The batcher's agent has a copy of the model; update() sends it new weights. An ActorCriticAgent returns action,
    # action_logits, log_probability and value.
    agent_args, env_args = {"model": model}, {"n_envs": 16}
    with RL_Batcher(500, ActorCriticAgent, create_env, agent_args=agent_args, env_args=env_args, seed=0) as b:
        for _ in range(n_updates):
            b.update(model.state_dict())
            b.reset()
            b.execute()
            trajectories, _ = b.get()  # 16 whole episodes: [16, T]
            steps, mask = trajectories.steps, trajectories.mask()
            replayed = replay_agent(learner, trajectories)

            returns = reward_to_go(steps["_observation/reward"], mask, discount=0.99)
            advantage = whiten((returns - replayed["value"]).detach(), mask)
            log_prob = log_probability(replayed["action_logits"], steps["action/action"])
            loss = (
                masked_mean(-log_prob * advantage, mask)
                + masked_mean((replayed["value"] - returns).square(), mask)
                - 0.01 * masked_mean(entropy(replayed["action_logits"]), mask)
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            lengths.append(float(trajectories.lengths.float().mean()))
    return lengths


if __name__ == "__main__":
    torch.set_num_threads(1)
    lengths = by_hand(15)
    print("mean episode length, by hand:", [round(length) for length in lengths])
    assert sum(lengths[-3:]) > 1.5 * sum(lengths[:3])

    # The library's version adds devices, worker processes, an evaluation that runs during learning, and a run folder.
    # tutorials/train_cartpole.py is the full training; this is the same call with fewer steps. train calls
    # create_model(), create_agent(model, device=…, stochastic=…, copy_model=…) and create_env(n_envs=…, seed=…).
    config = ReinforceConfig(n_env_steps=6_000, n_envs=16, n_processes=0, evaluation_processes=0, evaluation_episodes=8)
    result = train(config, create_model, ActorCriticAgent, create_env)
    print(f"evaluation before {result.before.mean_return:.0f}, after {result.after.mean_return:.0f}")
    assert result.after.mean_return > result.before.mean_return
