"""Tutorial 04: moving to a GPU, and checking it where there is none.

On device d, an agent's state, observations, actions and new state are on d; settings (`agent_info`, `env_info`) stay on
the CPU. Data crosses devices in three places only: DeviceEnv, the batcher's hand-over, and the learner's one `.to`.

`rlstruct.testing.sim_device` adds devices named sim:0, sim:1, …: they compute on the CPU and refuse, as a GPU does, to
mix with any other device. Replace "sim:1" by "cuda:0" below, and everything runs there.
"""

import gymnasium
import torch
from torch import nn

import rlstruct.testing.sim_device  # noqa: F401 - makes the devices sim:0, sim:1, … known
from rlstruct import DeviceEnv, DeviceMismatchError, DictTensor, RL_Agent, RL_Agent_CheckDevice, replay_agent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.functional.random import categorical
from rlstruct.testing import HostSyncError, forbid_host_sync

DEVICE = "cuda:0" if torch.cuda.is_available() else "sim:1"
LEARNER = "cuda:0" if torch.cuda.is_available() else "sim:0"


class Agent(RL_Agent):
    """A policy with two mistakes that only a second device brings to light."""

    def __init__(self, device, forgetful=False, impatient=False):
        self.device, self.forgetful, self.impatient = device, forgetful, impatient
        self.model = nn.Linear(4, 2).to(device)

    def initial_state(self, agent_info, B):
        # Mistake 1: torch.zeros without device= is on the CPU, and works until there is a GPU.
        return DictTensor({"step": torch.zeros(B) if self.forgetful else torch.zeros(B, device=self.device)})

    def __call__(self, state, observation, agent_info, history=None):
        logits = self.model(observation["frame"])
        if self.impatient and logits.max().item() > 1e6:  # Mistake 2: .item() waits for the GPU, at every step
            logits = logits * 0
        action = categorical(logits, observation["rng"])
        return DictTensor({"action": action, "logits": logits}), DictTensor({"step": state["step"] + 1})


def create_agent(**mistakes):
    torch.manual_seed(0)
    agent = Agent(DEVICE, **mistakes)
    # In development only: names every misplaced tensor, and fails on hidden waits for the device.
    return RL_Agent_CheckDevice(agent, DEVICE, host_syncs=forbid_host_sync)


def create_env(n_envs, seed):
    env = GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)  # steps on the CPU
    return DeviceEnv(env, to_device=DEVICE)  # and appears on the device


def collect(**mistakes):
    # n_processes=0: one process for the device. More processes would share one GPU in turns.
    with RL_Batcher(
        16, create_agent, create_env, agent_args=mistakes, env_args={"n_envs": 8}, seed=0, device=DEVICE
    ) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


def the_error(**mistakes):
    """Return what the batcher raises, and what the agent raised in it."""
    try:
        collect(**mistakes)
    except RuntimeError as error:
        return error, error.__cause__
    raise SystemExit("this should have failed")


_, cause = the_error(forgetful=True)
assert isinstance(cause, DeviceMismatchError)
print("mistake 1:", cause)

_, cause = the_error(impatient=True)
assert isinstance(cause, HostSyncError)
print("mistake 2:", cause)

trajectories = collect()
print("without mistakes, the batch is on", trajectories.device)

# The learner lives on a third device: one .to() moves the batch there.
learner = Agent(LEARNER)
replayed = replay_agent(learner, trajectories.to(LEARNER))
loss = replayed["logits"].square().mean()
loss.backward()
print("the gradient is on", learner.model.weight.grad.device)
