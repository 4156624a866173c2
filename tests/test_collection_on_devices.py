"""Collection, replay and random numbers off the CPU: on the simulated accelerator, and on a GPU where there is one."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from fake_envs import create_counting_env

from rlstruct import DeviceEnv, RL_Agent, RL_Agent_CheckDevice, Trajectories, VecEnv, replay_agent, resolve_device
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.functional import random
from rlstruct.testing import count_host_syncs, forbid_host_sync


@pytest.fixture(params=["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> str:
    return str(resolve_device(request.param))


def create_cartpole(n_envs: int, seed: int, auto_reset: bool, device: str) -> VecEnv:
    kind = GymEnvInf if auto_reset else GymEnv
    return DeviceEnv(kind([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed), device)


def create_agent(device: str, recurrent: bool = False) -> RL_Agent:
    torch.manual_seed(0)
    if recurrent:
        return RL_Agent_CheckDevice(RecurrentAgent(RecurrentActorCritic(4, 2), device=device), device)
    return RL_Agent_CheckDevice(ActorCriticAgent(ActorCritic(4, 2), device=device), device)


def collect(device: str, *, n_processes: int = 0, auto_reset: bool = True, recurrent: bool = False) -> Trajectories:
    with RL_Batcher(
        32,
        create_agent,
        create_cartpole,
        agent_args={"device": device, "recurrent": recurrent},
        env_args={"n_envs": 8, "auto_reset": auto_reset, "device": device},
        n_processes=n_processes,
        seed=3,
        device=device,
    ) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()
        batcher.reset()  # the second batch meets the memory of the first
        batcher.execute()
        return batcher.get()[0]


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("n_processes", [0, 1])
def test_accelerator_and_cpu_collect_the_same(accelerator: str, n_processes: int, auto_reset: bool) -> None:
    here = collect("cpu", auto_reset=auto_reset)
    there = collect(accelerator, n_processes=n_processes, auto_reset=auto_reset)
    assert there.device == torch.device(accelerator)
    assert torch.equal(there.lengths.cpu(), here.lengths)
    for key, value in here.steps.items():
        torch.testing.assert_close(there.steps[key].cpu(), value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recurrent", [False, True])
def test_replay_reproduces_log_probabilities(accelerator: str, recurrent: bool) -> None:
    trajectories = collect(accelerator, recurrent=recurrent)
    learner = create_agent(accelerator, recurrent)
    stored = trajectories.steps["action/log_probability"]
    replayed = replay_agent(learner, trajectories)["log_probability"]
    torch.testing.assert_close(replayed, stored, rtol=1e-5, atol=1e-5)
    replayed.sum().backward()


def test_random_numbers_are_equal_everywhere(accelerator: str) -> None:
    keys = random.step_keys(torch.arange(64), 0, torch.arange(16)).flatten()
    assert torch.equal(random.uniform(keys.to(accelerator), (3,)).cpu(), random.uniform(keys, (3,)))
    assert torch.equal(random.randint(keys.to(accelerator), 17).cpu(), random.randint(keys, 17))
    torch.testing.assert_close(random.normal(keys.to(accelerator)).cpu(), random.normal(keys), rtol=1e-5, atol=1e-5)


def test_collection_on_a_device_environment_waits_for_the_device_once_a_batch(accelerator: str) -> None:
    with RL_Batcher(
        64,
        create_counting_agent,
        create_counting_env,
        env_args={"n_envs": 256, "auto_reset": True, "device": accelerator},
        seed=0,
        device=accelerator,
    ) as batcher:
        batcher.reset()
        batcher.execute()  # allocates
        batcher.get()
        with forbid_host_sync():  # sets torch.cuda.set_sync_debug_mode("error") as well
            batcher.execute()
        with count_host_syncs() as waits:
            batcher.get()
    assert waits.count <= 1  # per batch, whatever B and T: did a vector environment skip steps?


class CountingAgent(RL_Agent):
    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        return DictTensor({"action": random.randint(observation["rng"], 2)}), state


def create_counting_agent() -> RL_Agent:
    return CountingAgent()


@pytest.mark.gpu
def test_a_cpu_worker_opens_no_cuda_context() -> None:
    torch.zeros(1, device="cuda:0")  # the parent has one
    with RL_Batcher(
        4, create_counting_agent, create_counting_env, env_args={"n_envs": 2, "auto_reset": True}, n_processes=2, seed=0
    ) as batcher:
        batcher.reset()  # would warn, and warnings are errors in the tests
        batcher.execute()
        assert batcher.get()[0].device == torch.device("cpu")
