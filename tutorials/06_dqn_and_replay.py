"""Tutorial 06: a replay buffer that keeps every observation once, DQN by hand on top of it, then from the library.

An off-policy algorithm learns from a replay buffer: batches go in, random steps come out, each with its true next
observation.
"""

import copy

import gymnasium
import torch

from rlstruct import DictTensor
from rlstruct.agents import QAgent, QNetwork
from rlstruct.algos.dqn import DQNConfig, train
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymVectorEnv
from rlstruct.functional.q_learning import double_q_value, q_loss, td_target


def create_env(n_envs, seed):
    # Environments that restart by themselves: every batch has n_envs rows of T steps, whatever ends in between.
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", n_envs, vectorization_mode="vector_entry_point"), seed)


def create_model():
    return QNetwork(n_inputs=4, n_actions=2, hidden=(64, 64), duelling=True)


def by_hand(n_batches):
    """Learn from a few batches and return the buffer and the last loss after each."""
    torch.manual_seed(0)
    model = create_model()
    target_model = copy.deepcopy(model)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.001)
    # A step of the return that is cut by the end of an episode, or by the end of the data, is shorter than n_step:
    # sample["discount"] says by how much, sample["terminated"] whether anything follows.
    buffer = ReplayBuffer(capacity=10_000, n_step=3, discount=0.99)
    agent_args, env_args, losses = {"model": model}, {"n_envs": 8}, []
    with RL_Batcher(16, QAgent, create_env, agent_args=agent_args, env_args=env_args, seed=0) as batcher:
        # Each environment has its own epsilon: it travels in agent_info.
        epsilon = DictTensor({"epsilon": torch.linspace(0.05, 0.4, 8)})
        batcher.reset(epsilon)
        for _ in range(n_batches):
            batcher.update(model.state_dict())
            batcher.execute(epsilon)
            trajectories, _ = batcher.get()  # [8, 16], going on where the last one stopped
            buffer.extend(trajectories)
            for _ in range(8):
                sample = buffer.sample(64)
                value = model(sample["observation/frame"]).gather(1, sample["action/action"].unsqueeze(1)).squeeze(1)
                with torch.no_grad():
                    reached = sample["_observation/frame"]  # also where the episode was cut off, or ended
                    following = double_q_value(model(reached), target_model(reached))
                    target = td_target(sample["reward"], sample["discount"], sample["terminated"], following)
                loss = q_loss(value, target, sample["weight"])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            target_model.load_state_dict(model.state_dict())
            losses.append(float(loss.detach()))
    return buffer, losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    buffer, losses = by_hand(20)
    # An observation is kept once, though it is what one step led to and what the next one starts from.
    n_bytes = buffer.columns["observation/frame"].nbytes
    print(f"{buffer.n_transitions()} steps in the buffer; it has {n_bytes} bytes for 10,000 observations")
    # Not a sign of how well it goes: the values grow with the returns, and their errors with them.
    print("loss:", [round(loss, 3) for loss in losses[::4]])
    # gymnasium's numpy CartPole takes an extra step to restart, which is no transition and is left out.
    assert 0.8 * 20 * 16 * 8 < buffer.n_transitions() < 20 * 16 * 8

    # The library's version adds devices, prioritised replay, schedules, worker processes, an evaluation that runs
    # during learning, and a run folder. This is a full training, cut short; benchmarks/learn.py has the rest.
    config = DQNConfig(
        n_env_steps=4_000,
        learning_starts=500,
        n_updates=24,
        average_rate=0.02,
        prioritised=True,
        evaluation_processes=0,
    )
    result = train(config, create_model, QAgent, create_env)
    print(f"evaluation before {result.before.mean_return:.0f}, after {result.after.mean_return:.0f}")
    assert result.after.mean_return > result.before.mean_return
