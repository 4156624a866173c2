"""Tutorial 06: a replay buffer that stores each observation once, DQN by hand, then DQN from the library.

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
    # These environments restart by themselves. This vector environment spends a step on it, which is dropped: rows have
    # up to T real steps, see trajectories.lengths.
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", n_envs, vectorization_mode="vector_entry_point"), seed)


def create_model():
    return QNetwork(n_inputs=4, n_actions=2, hidden=(64, 64), duelling=True)


def by_hand(n_batches):
    """Learn from a few batches; return the buffer and the last loss of each batch."""
    torch.manual_seed(0)
    model = create_model()
    target_model = copy.deepcopy(model)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.001)
    # A return has fewer than n_step rewards if the episode or the stored data end earlier: sample["discount"] is the
    # discount over the steps that it has, and sample["terminated"] says if the episode terminated in them.
    buffer = ReplayBuffer(capacity=10_000, n_step=3, discount=0.99)
    agent_args, env_args, losses = {"model": model}, {"n_envs": 8}, []
    with RL_Batcher(16, QAgent, create_env, agent_args=agent_args, env_args=env_args, seed=0) as batcher:
        # Each environment has its own epsilon, passed in agent_info.
        epsilon = DictTensor({"epsilon": torch.linspace(0.05, 0.4, 8)})
        batcher.reset(epsilon)
        for _ in range(n_batches):
            batcher.update(model.state_dict())
            batcher.execute(epsilon)
            trajectories, _ = batcher.get()  # [8, 16], continues the last batch
            buffer.extend(trajectories)
            for _ in range(8):
                sample = buffer.sample(64)
                value = model(sample["observation/frame"]).gather(1, sample["action/action"].unsqueeze(1)).squeeze(1)
                with torch.no_grad():
                    reached = sample["_observation/frame"]  # the true one, also at the end of an episode
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
    # Each observation is stored once, although it is the result of one step and the start of the next.
    n_bytes = buffer.columns["observation/frame"].nbytes
    print(f"{buffer.n_transitions()} steps in the buffer; it has {n_bytes} bytes for 10,000 observations")
    # The loss does not show progress: the values grow with the returns, and so do their errors.
    print("loss:", [round(loss, 3) for loss in losses[::4]])
    # gymnasium's numpy CartPole takes an extra step to restart. It is not a transition, and is not stored.
    assert 0.8 * 20 * 16 * 8 < buffer.n_transitions() < 20 * 16 * 8

    # The library's version adds devices, prioritised replay, schedules, worker processes, an evaluation that runs
    # during learning, and a run folder. This training is short; benchmarks/learn.py runs full ones.
    config = DQNConfig(
        n_env_steps=4_000,
        learning_starts=500,
        learning_rate=0.002,
        n_updates=24,
        target_update_rate=0.02,
        average_rate=0.02,
        prioritised=True,
        evaluation_processes=0,
    )
    result = train(config, create_model, QAgent, create_env)
    print(f"evaluation before {result.before.mean_return:.0f}, after {result.after.mean_return:.0f}")
    assert result.after.mean_return > result.before.mean_return
