"""Environments that launch work on CUDA's default stream, as simulators do, are ordered with torch's work."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from batcher_fakes import next_batch
from torch import Tensor

from rlstruct import DeviceEnv, DictTensor, RL_Agent
from rlstruct.adapters import TorchVectorEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.engine.streams import stream_on
from rlstruct.engine.torch_private import TorchDispatchMode
from rlstruct.sims import CartPole
from rlstruct.testing import count_host_syncs

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
STREAMS: list[tuple[str, int]] = []


def note(where: str) -> None:
    STREAMS.append((where, torch.cuda.current_stream().cuda_stream))


class Simulation:
    """Adds the action to its numbers, by work that takes its time on the default stream, as other libraries' may."""

    num_envs = 4
    single_observation_space = gym.spaces.Box(-1e9, 1e9, (2,))
    single_action_space = gym.spaces.Discrete(3)

    def __init__(self) -> None:
        note("make")
        self.numbers = torch.zeros(4, 2, device=DEVICE)
        self.no = torch.zeros(4, dtype=torch.bool, device=DEVICE)

    def reset(self, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        note("reset")
        self.numbers.zero_()
        return self.numbers, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        note("step")
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.cuda._sleep(2_000_000)
            self.numbers += action.unsqueeze(1)
        return self.numbers, self.numbers[:, 0].clone(), self.no, self.no, {"final_obs": self.numbers}

    def close(self) -> None:
        pass


class Counting(RL_Agent):
    """Takes action 1, and says what it saw, plus 1, after some time."""

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None
    ) -> tuple[DictTensor, DictTensor]:
        note("agent")
        torch.cuda._sleep(2_000_000)
        frame = observation["frame"] + 1.0
        return DictTensor({"action": torch.ones(4, dtype=torch.int64, device=DEVICE), "seen": frame}), state


def create_env(seed: int) -> TorchVectorEnv:
    return TorchVectorEnv(Simulation(), DEVICE)


@pytest.mark.parametrize("aside", [False, True])
def test_a_simulation_runs_on_the_default_stream(aside: bool) -> None:
    """Wherever the caller works: what comes out is what single-stream work gives."""
    STREAMS.clear()
    default = torch.cuda.default_stream()
    with (
        torch.cuda.stream(torch.cuda.Stream() if aside else default),
        RL_Batcher(5, Counting, create_env, device=DEVICE) as batcher,
    ):
        batcher.reset()
        for i in range(3):
            trajectories = next_batch(batcher)
            assert trajectories is not None
            steps = trajectories.steps
            expected = torch.arange(5.0) + 5 * i
            assert steps["observation/frame"][:, :, 0].cpu().tolist() == [expected.tolist()] * 4
            assert steps["action/seen"][:, :, 1].cpu().tolist() == [(expected + 1).tolist()] * 4
    assert {where for where, _ in STREAMS} == {"make", "reset", "step", "agent"}
    assert {stream for _, stream in STREAMS} == {default.cuda_stream}


def test_a_moved_environment_waits_for_its_actions_only() -> None:
    """Observations and masks travel in one copy from pinned memory, for which the host does not wait."""
    env = DeviceEnv(CartPole(4), DEVICE)
    first, running = env.reset()
    assert (first.device, running.device) == (torch.device(DEVICE),) * 2
    action = DictTensor({"action": torch.ones(4, dtype=torch.int64, device=DEVICE)})
    with count_host_syncs() as found:
        (seen, ran), (after, going_on) = env.step(action)
    assert [call.split(": ")[1] for call in found.calls] == [f"copying from {DEVICE} to cpu"]
    assert ran.tolist() == going_on.tolist() == [True] * 4
    assert seen["last_action"].tolist() == [1] * 4
    assert set(seen.keys()) == set(after.keys()) == set(first.keys())


class Crossings(TorchDispatchMode):
    """Counts the copies from the CPU to the GPU."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("_to_copy", "copy_"):
            source = args[0] if func.overloadpacket.__name__ == "_to_copy" else args[1]
            self.n += source.is_cpu and answer.is_cuda
        return answer


def test_weights_from_the_cpu_travel_as_one() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.float64), "c": torch.zeros(0)}
    weights["d"] = torch.ones(2, device=DEVICE)
    stream = stream_on(torch.device(DEVICE))
    with count_host_syncs() as found, Crossings() as crossings:
        taken = stream.from_caller(weights)
    assert found.calls == []
    assert crossings.n == 1
    for key, weight in weights.items():
        assert taken[key].is_cuda
        assert torch.equal(taken[key].cpu(), weight.cpu())
        assert taken[key].data_ptr() != weight.data_ptr() or weight.numel() == 0


class Watched(CartPole):
    def step(self, action: DictTensor) -> Any:
        note("step")
        return super().step(action)


def create_watched(n_envs: int, seed: int) -> Watched:
    return Watched(n_envs, seed, device=DEVICE)


def test_an_environment_of_tensors_alone_keeps_a_stream_of_its_own() -> None:
    STREAMS.clear()
    model = ActorCritic(4, 2, hidden=(8,)).to(DEVICE)
    agents = {"model": model, "device": DEVICE}
    with RL_Batcher(
        5, ActorCriticAgent, create_watched, agent_args=agents, env_args={"n_envs": 4}, device=DEVICE
    ) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()
    assert torch.cuda.default_stream().cuda_stream not in {stream for _, stream in STREAMS}
