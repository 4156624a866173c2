"""Tutorial 10: four thousand environments in one process.

With a simulator written in tensors, one process steps thousands of environments, and the agent acts for all of them in
one forward pass. Nothing leaves the device, which is the GPU if there is one. The numbers below are small enough for a
laptop's CPU.
"""

import time

import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
N_STEPS = 8


def create_env(n_envs, seed):
    """Create CartPoles that equal gymnasium's, without processes or copies."""
    return make("CartPole-v1", n_envs, seed, device=DEVICE)


def create_model():
    return ActorCritic(n_inputs=4, n_actions=2, hidden=(64, 64)).to(DEVICE)


def collect(n_envs):
    """Collect batches of 8 steps from n environments; return steps per second."""
    agent_args, env_args = {"model": create_model()}, {"n_envs": n_envs}
    with RL_Batcher(
        N_STEPS, ActorCriticAgent, create_env, agent_args=agent_args, env_args=env_args, seed=0, device=DEVICE
    ) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()  # the first batch warms up
        start = time.perf_counter()
        for _ in range(2):
            batcher.execute()
            trajectories, _ = batcher.get()
        seconds = time.perf_counter() - start
    frames = trajectories.steps["observation/frame"]
    assert frames.shape == (n_envs, N_STEPS, 4)
    assert frames.device == torch.device(DEVICE)
    return 2 * n_envs * N_STEPS / seconds


if __name__ == "__main__":
    torch.set_num_threads(1)

    # 1. A step is a fixed number of calls. A call takes as long for one environment as for many, until the arithmetic
    #    takes longer than the call.
    speed = {n: collect(n) for n in (16, 256, 4096)}
    for n, steps_per_second in speed.items():
        print(f"{n:5} environments: {steps_per_second:12,.0f} steps per second, network included")
    assert speed[4096] > 3 * speed[16]

    # 2. The state of all environments is one dict of tensors. This is its size per environment.
    env = make("CartPole-v1", 4096, device=DEVICE)
    env.reset()
    print(f"{sum(tensor.nbytes for tensor in env.state_tensors().values()) / 4096:.0f} bytes per environment")

    # 3. Train with many environments and short batches: gradients from 1,024 x 8 steps allow a high learning rate.
    config = A2CConfig(
        n_env_steps=400_000,
        n_envs=1024,
        n_timesteps=N_STEPS,
        learning_rate=0.01,
        trace_decay=0.95,
        evaluation_processes=0,
        evaluation_episodes=32,
        batcher_device=DEVICE,
        learner_device=DEVICE,
    )
    start = time.perf_counter()
    result = train(config, create_model, ActorCriticAgent, create_env)
    seconds = time.perf_counter() - start
    print(f"mean return {result.before.mean_return:.0f} -> {result.after.mean_return:.0f} in {seconds:.0f} s")
    assert result.after.mean_return > 2 * result.before.mean_return

# Next: 11 measures where the time goes.
