"""Misplaced tensors are named where a batch begins. What devices collect: tests/test_collection_on_devices.py."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from batcher_fakes import next_batch
from fake_agents import RngAgent, StatefulAgent
from fake_envs import create_counting_env

from rlstruct import (
    DeviceEnv,
    DeviceMismatchError,
    DictTensor,
    RL_Agent,
    RL_Agent_CheckDevice,
    ShapeMismatchError,
    WorkerError,
)
from rlstruct.batchers import RL_Batcher, collect_episodes
from rlstruct.batchers.arguments import warn_of_copies
from rlstruct.sims import make as make_simulator


class ElsewhereAgent(RngAgent):
    """Returns its action on another device."""

    def __init__(self, elsewhere: str) -> None:
        super().__init__()
        self.elsewhere = elsewhere

    def __call__(self, *arguments: Any) -> Any:
        action, state = super().__call__(*arguments)
        return action.to(self.elsewhere), state


class HalfAgent(RngAgent):
    """Forgets half of the environments."""

    def __call__(self, *arguments: Any) -> Any:
        action, state = super().__call__(*arguments)
        return action.slice(0, 1), state


class FickleAgent(RngAgent):
    """Changes a dtype from the second batch on."""

    def __call__(self, *arguments: Any) -> Any:
        action, state = super().__call__(*arguments)
        self.n_calls = getattr(self, "n_calls", 0) + 1
        if self.n_calls > 3:
            action.set("drawn", action["drawn"].double())
        return action, state


def test_workers_on_an_accelerator_are_advised_once_to_be_one_process() -> None:
    def make(n_processes: int, device: str) -> None:
        env_args = {"n_envs": 2, "device": device}
        RL_Batcher(
            3, RngAgent, create_moved_env, env_args=env_args, seed=0, device=device, n_processes=n_processes
        ).close()

    warn_of_copies.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(0, "sim:1")
        make(1, "cpu")
        assert not caught
        make(1, "sim:1")
        make(1, "sim:1")
    (warning,) = caught
    assert "worker processes on sim:1 act without CUDA graph or kernel" in str(warning.message)
    assert "Use one process for all environments, n_processes=0" in str(warning.message)
    assert warning.filename == __file__


def create_moved_env(n_envs: int, seed: int, device: str) -> DeviceEnv:
    return DeviceEnv(create_counting_env(n_envs, seed, auto_reset=True), device)


def collect(create_agent: Any, device: str, env_device: str, **agent_args: Any) -> None:
    env_args = {"n_envs": 2, "device": env_device}
    with RL_Batcher(
        3, create_agent, create_moved_env, agent_args=agent_args, env_args=env_args, seed=0, device=device
    ) as batcher:
        batcher.reset()
        for _ in range(2):
            batcher.execute()
            batcher.get()


@pytest.mark.parametrize(
    ("create_agent", "device", "env_device", "agent_args", "words"),
    [
        (RngAgent, "sim:1", "cpu", {}, r"DeviceEnv is on cpu, expected sim:1.* Return DeviceEnv\(env, 'sim:1'\)"),
        (StatefulAgent, "sim:1", "sim:1", {}, r"agent.initial_state: state 'steps' is on cpu, expected sim:1"),
        (ElsewhereAgent, "cpu", "cpu", {"elsewhere": "sim:1"}, r"agent: action 'action' is on sim:1, expected cpu"),
    ],
)
def test_misplaced_tensors(
    create_agent: Any, device: str, env_device: str, agent_args: dict[str, Any], words: str
) -> None:
    with pytest.raises(WorkerError, match=words) as caught:
        collect(create_agent, device, env_device, **agent_args)
    assert isinstance(caught.value.__cause__, DeviceMismatchError)


def test_misshapen_tensors() -> None:
    with pytest.raises(WorkerError, match=r"agent: action 'action' is \[1\] .*expected \[2, ...\]") as caught:
        collect(HalfAgent, "cpu", "cpu")
    assert isinstance(caught.value.__cause__, ShapeMismatchError)
    words = r"agent: action 'drawn' is \[2\] torch.float64, expected \[2\] torch.float32"
    with pytest.raises(WorkerError, match=words):
        collect(FickleAgent, "cpu", "cpu")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_everything_appears_on_the_batchers_device(n_processes: int) -> None:
    env_args = {"n_envs": 2, "device": "sim:1"}
    agent_args = {"device": "sim:1"}
    with RL_Batcher(
        5,
        StatefulAgent,
        create_moved_env,
        agent_args=agent_args,
        env_args=env_args,
        n_processes=n_processes,
        seed=0,
        device="sim:1",
    ) as batcher:
        batcher.reset(agent_info=DictTensor({"start": torch.tensor([4])}))
        batch = next_batch(batcher)
        assert batch.device == torch.device("sim:1")
        assert batch.info["agent_info/start"].cpu().tolist() == [4, 4]
        assert batch.info["agent_state/steps"].cpu().tolist() == [4, 4]
        # Environment 0 lives 3 steps, then 1, then 4; every episode starts from 4.
        assert batch.steps["action/steps"].cpu()[0].tolist() == [4, 5, 6, 4, 4]
        if not n_processes:
            # After 5 steps and a reset: episodes 3 and 4 of environment 0, episode 3 of environment 1.
            assert collect_episodes(batcher, 3).lengths.cpu().tolist() == [2, 6, 6]


class Scaling(torch.nn.Module):
    """Multiplies frames by a constant that is no buffer, or by one of the agent."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        if keeps:
            self.scale = torch.ones(4, device="cpu")

    def forward(self, frame: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = self.linear(frame * (self.scale if scale is None else scale))
        return output


@pytest.mark.parametrize(("of_agent", "name"), [(True, "constants.scale"), (False, "model.scale")])
@pytest.mark.parametrize("watched", [False, True])
def test_a_constant_left_on_the_cpu_is_no_weight(of_agent: bool, name: str, watched: bool) -> None:
    class Left(RL_Agent):
        def __init__(self) -> None:
            self.model = Scaling(keeps=not of_agent).to("sim:1")
            self.constants = {"scale": torch.ones(4, device="cpu")} if of_agent else {}

        def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any) -> Any:
            logits = self.model(observation["frame"], self.constants.get("scale"))
            return DictTensor({"action": logits.argmax(1)}), state

    def create_agent() -> RL_Agent:
        return RL_Agent_CheckDevice(Left(), "sim:1") if watched else Left()

    env_args = {"name": "CartPole-v1", "n_envs": 2, "device": "sim:1"}
    with RL_Batcher(2, create_agent, make_simulator, env_args=env_args, device="sim:1", seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        words = (
            rf"Left's tensor attribute '{name}' is on cpu, .*register_buffer of the agent's network, and move that with"
        )
        with pytest.raises(WorkerError, match=words):
            batcher.get()


def test_a_network_left_on_the_cpu_is_named_with_its_weight() -> None:
    class Left(RL_Agent):
        def __init__(self) -> None:
            self.model = torch.nn.Linear(4, 2)

        def __call__(
            self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
        ) -> Any:
            return DictTensor({"action": self.model(observation["frame"]).argmax(1)}), state

    with RL_Batcher(
        2,
        Left,
        make_simulator,
        env_args={"name": "CartPole-v1", "n_envs": 2, "device": "sim:1"},
        device="sim:1",
        seed=0,
    ) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(
            WorkerError, match=r"Left's weight 'model.weight' is on cpu, and its observation on sim:1\. Move"
        ):
            batcher.get()
