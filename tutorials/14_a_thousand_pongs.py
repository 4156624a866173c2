"""Tutorial 14: a thousand Pongs in one process.

An Atari console is 628 bytes of memory and registers, 93 KiB of frames, and a kernel that steps it. A GPU therefore
plays thousands of games at once, and observations never leave it. On a CPU this tutorial plays 8 games; otherwise it is
the same. It needs the extras `warp` and `atari`, and reads the cartridge from your ale-py.
"""

import time
from functools import partial

import torch

from rlstruct import DictTensor
from rlstruct.agents import ActorCriticAgent, ConvolutionalActorCritic, StackingAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.atari import open_ale
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

torch.set_num_threads(1)
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
N = 1024 if DEVICE == "cuda:0" else 8


def create_env(n_envs, seed):
    """Create games of 40 steps that show single frames; the default is 27,000 steps, half an hour of play."""
    return make("ALE/Pong-v5", n_envs, seed, device=DEVICE, stack=1, time_limit=40)


def create_model():
    return ConvolutionalActorCritic((4, 84, 84), n_actions=6)


# The agent stacks the last four frames itself, so a batch holds each frame once, not four times.
create_agent = partial(StackingAgent.create, create_agent=ActorCriticAgent, shape=(4, 84, 84))

# 1. One VecEnv steps many games. Each starts after 1 to 30 no-op frames, and restarts automatically.
pongs = make("ALE/Pong-v5", n_envs=N, device=DEVICE)
observation, _ = pongs.reset()
print(f"{N} games show {list(observation['frame'].shape)}, {observation['frame'].dtype}: the last four frames in grey")
start = time.perf_counter()
for _ in range(20):
    action = torch.randint(pongs.action_space.n, (N,), device=DEVICE)
    _, (observation, _) = pongs.step(DictTensor({"action": action}))
print(f"{20 * N / (time.perf_counter() - start):,.0f} steps per second, of 4 frames each; without a network")
print(f"screen of game 3: {list(pongs.screen(3).shape)}\n")

# 2. The games equal ALE's. One that ale-py has started continues here, byte for byte, if no action is sticky.
exact = make("ALE/Pong-v5", n_envs=2, device=DEVICE, frame_skip=1, sticky=0.0)
exact.reset()
ale = open_ale("pong", seed=1)
exact.set_state(None, exact.state_of([ale, ale]))
for k in range(60):
    action = k % 6
    ale.act(exact.actions[action])
    exact.step(DictTensor({"action": torch.tensor([action, 0], device=DEVICE)}))
memory = exact.get_state().ram[:, :128].cpu().numpy()
print("after 60 frames the memory of game 0 is ALE's:", bool((memory[0] == ale.getRAM()).all()))
print("game 1, which pressed nothing, is somewhere else:", bool((memory[1] != ale.getRAM()).any()), "\n")
assert (memory[0] == ale.getRAM()).all()

# 3. A batcher collects from them as from any environment. The network sees four frames, a batch holds one per step.
agent_args, env_args = {"model": create_model().to(DEVICE)}, {"n_envs": N}
with RL_Batcher(8, create_agent, create_env, agent_args=agent_args, env_args=env_args, device=DEVICE) as batcher:
    batcher.reset()
    batcher.execute()
    trajectories, _ = batcher.get()
    frames = trajectories.steps["observation/frame"]
    print(f"a batch of frames: {list(frames.shape)}, {frames.nbytes / 2**20:.1f} MiB\n")

# 4. A2C with CuLE's batches: after every step it learns from the last four steps of one of four groups of games. Pong
#    takes millions of steps, on a GPU: docs/atari.md has the command. These few show how it runs.
config = A2CConfig(
    n_env_steps=24 * N,
    n_envs=N,
    n_timesteps=1,
    n_minibatches=4,
    window=4,
    vtrace=True,
    learning_rate=0.0005,
    reward_scale=1.0,
    evaluation_episodes=2,
    evaluation_processes=0,
    evaluation_timesteps=40,
    learner_device=DEVICE,
    batcher_device=DEVICE,
    evaluation_device=DEVICE,
)
result = train(config, create_model, create_agent, create_env)
print(f"{len(result.losses['loss'])} gradient steps in {result.env_steps} steps of {N} games")
assert len(result.losses["loss"]) == 24 - 3  # the first update comes after four steps
