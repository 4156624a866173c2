"""Tutorial 04: move to a GPU, and test the move on a machine without one.

If an agent runs on device d, its state, observations and actions are on d; `agent_info` and `env_info` stay on the
CPU. Data crosses devices in three places only: DeviceEnv, the batcher's get(), and the learner's one `.to`.

`rlstruct.testing.sim_device` adds devices named sim:0, sim:1, …: they compute on the CPU but, like a GPU, refuse to
mix with any other device. If there is a GPU, this script uses it instead.
"""

import gymnasium
import torch
from torch import nn

import rlstruct.testing.sim_device  # noqa: F401 - makes the devices sim:0, sim:1, … known
from rlstruct import DeviceEnv, DictTensor, RL_Agent, RL_Agent_CheckDevice, replay_agent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.errors import WorkerError
from rlstruct.functional.random import categorical
from rlstruct.testing import forbid_host_sync

DEVICE = "cuda:0" if torch.cuda.is_available() else "sim:1"
LEARNER = "cuda:0" if torch.cuda.is_available() else "sim:0"


# --- An agent with two mistakes --------------------------------------------------------------------
# Both go unnoticed on the CPU; only a second device reveals them.
class Agent(RL_Agent):
    def __init__(self, device):
        self.device = device
        self.model = nn.Linear(4, 2).to(device)

    def initial_state(self, agent_info, B):
        return DictTensor({"step": torch.zeros(B)})  # mistake 1: without device= this is on the CPU

    def __call__(self, state, observation, agent_info, history=None):
        logits = self.model(observation["frame"])
        if logits.max().item() > 1e6:  # mistake 2: .item() waits for the GPU, at every step
            logits = logits * 0
        action = categorical(logits, observation["rng"])
        return DictTensor({"action": action, "logits": logits}), DictTensor({"step": state["step"] + 1})


# --- Fixed, one at a time --------------------------------------------------------------------------
class StateOnTheDevice(Agent):
    def initial_state(self, agent_info, B):
        return DictTensor({"step": torch.zeros(B, device=self.device)})


class WaitsForNothing(StateOnTheDevice):
    def __call__(self, state, observation, agent_info, history=None):
        logits = self.model(observation["frame"])
        logits = torch.where(logits.amax() > 1e6, 0.0, logits)  # decided on the device
        action = categorical(logits, observation["rng"])
        return DictTensor({"action": action, "logits": logits}), DictTensor({"step": state["step"] + 1})


# --- Collect with each of them ---------------------------------------------------------------------
def create_env(n_envs, seed):
    env = GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)  # steps on the CPU
    return DeviceEnv(env, to_device=DEVICE)  # its tensors are on the device


def collect(kind):
    def create_agent():
        torch.manual_seed(0)
        # In development only: names every misplaced tensor, and raises at hidden waits for the device.
        return RL_Agent_CheckDevice(kind(DEVICE), DEVICE, host_syncs=forbid_host_sync)

    # n_processes=0, the default, collects in this process. On a GPU this is fastest: many environments cost as much as
    # few, batches stay on the GPU, and simulators run as one CUDA graph. Workers would copy batches through the CPU.
    with RL_Batcher(16, create_agent, create_env, env_args={"n_envs": 8}, seed=0, device=DEVICE) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


for kind in (Agent, StateOnTheDevice):
    try:
        collect(kind)
    except WorkerError as error:  # its cause is a DeviceMismatchError, then a HostSyncError
        print(f"{kind.__name__}: {type(error.__cause__).__name__}: {error.__cause__}")
    else:
        raise SystemExit(f"{kind.__name__} should have failed")

trajectories = collect(WaitsForNothing)
print("without mistakes, the batch is on", trajectories.device)

# The learner lives on a third device: one .to() moves the batch there.
learner = WaitsForNothing(LEARNER)
replayed = replay_agent(learner, trajectories.to(LEARNER))
loss = replayed["logits"].square().mean()
loss.backward()
print("the gradient is on", learner.model.weight.grad.device)

# Next: 05; docs/devices.md says which batcher suits your machine.
