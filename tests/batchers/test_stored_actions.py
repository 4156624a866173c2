"""A batch holds the action that the agent took, whatever an environment does with the tensor that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from batcher_fakes import next_batch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from rlstruct import DictTensor, RL_Agent, VecEnv, replay_agent, resolve_device
from rlstruct.adapters import TorchVectorEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf, GymVectorEnv
from rlstruct.functional.random import normal
from rlstruct.sims import TensorEnv
from rlstruct.vec_env import Observed, StepResult

B, T = 3, 4
BOX = spaces.Box(-1.0, 1.0, (2,))
pytestmark = pytest.mark.filterwarnings("ignore:.*ClipAction")  # these environments clip their actions themselves
ACCELERATORS = ["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class Wide(RL_Agent):
    """Draws actions of which most are outside [-1, 1], and stores them under a second name."""

    pure = True

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        action = 5.0 * normal(observation["rng"], (2,))
        return DictTensor({"action": action, "copy": action.clone()}), state


class Remembering(RL_Agent):
    """Keeps its action as its state, without a copy, and draws the next one around it."""

    pure = True

    def __init__(self, device: str) -> None:
        self.device = device

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"last": torch.zeros(B, 2, device=self.device)})

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        action = state["last"] + 5.0 * normal(observation["rng"], (2,))
        return DictTensor({"action": action}), DictTensor({"last": action})


class Clamping(VecEnv):
    """Clamps its action in place, as simulators on a GPU do, and shows the sum of the clamped actions so far."""

    auto_reset, restarts_take_steps = True, False
    observation_space, action_space = spaces.Box(-1e3, 1e3, (2,)), BOX

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sum = torch.zeros(B, 2, device=device)

    @property
    def device(self) -> torch.device:
        return self._device

    def n_envs(self) -> int:
        return B

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        self._sum = torch.zeros_like(self._sum)
        return self._show(torch.zeros_like(self._sum)), torch.ones(B, dtype=torch.bool, device=self._device)

    def step(self, action: DictTensor) -> StepResult:
        action["action"].clamp_(-1.0, 1.0)
        self._sum = self._sum + action["action"]
        answer = self._show(action["action"].clone()), torch.ones(B, dtype=torch.bool, device=self._device)
        return StepResult(answer, answer, restarted=False)

    def state_tensors(self) -> dict[str, Tensor]:
        return {"sum": self._sum}

    def set_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._sum = tensors["sum"]

    def _show(self, last_action: Tensor) -> DictTensor:
        no = torch.zeros(B, dtype=torch.bool, device=self._device)
        flags = dict.fromkeys(("terminated", "truncated", "done", "initial_state"), no)
        return DictTensor({"frame": self._sum, "reward": self._sum[:, 0], **flags, "last_action": last_action})


class ClampingSimulation:
    """The same with the methods that `TorchVectorEnv` wants."""

    num_envs = B
    single_observation_space, single_action_space = Clamping.observation_space, BOX

    def __init__(self, device: torch.device) -> None:
        self._no = torch.zeros(B, dtype=torch.bool, device=device)
        self._sum = torch.zeros(B, 2, device=device)

    def reset(self, seed: int | None = None) -> Any:
        return self._sum, {}

    def step(self, action: Tensor) -> Any:
        self._sum = self._sum + action.clamp_(-1.0, 1.0)
        return self._sum, self._sum[:, 0], self._no, self._no, {}

    def close(self) -> None:
        return


def create_env(adapted: bool, device: str, seed: int) -> VecEnv:
    place = resolve_device(device)
    if adapted:
        return TorchVectorEnv(ClampingSimulation(place), place, missing_final="previous")
    return Clamping(place)


def collect(n_batches: int, device: str, adapted: bool, **settings: Any) -> None:
    """Collect with an environment that clamps, and check that the agent's own actions are stored."""
    env_args = {"adapted": adapted, "device": device}
    with RL_Batcher(T, Wide, create_env, env_args=env_args, seed=0, device=device, **settings) as batcher:
        batcher.reset()
        for _ in range(n_batches):
            steps = next_batch(batcher).steps
            assert torch.equal(steps["action/action"], steps["action/copy"])
            clamped = steps["action/action"].clamp(-1.0, 1.0)
            assert not torch.equal(clamped, steps["action/action"])
            if adapted:
                assert torch.equal(steps["_observation/last_action"], steps["action/action"])
            before = steps["observation/frame"][:, :1]
            torch.testing.assert_close(steps["_observation/frame"], before + clamped.cumsum(1))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("device", ["cpu", *ACCELERATORS])
def test_an_environment_that_clamps_its_action_in_place_leaves_the_batch_alone(device: str, adapted: bool) -> None:
    collect(3, str(resolve_device(device)), adapted, graph=False)


@pytest.mark.parametrize("adapted", [False, True])
def test_so_it_is_with_worker_processes(adapted: bool) -> None:
    collect(2, "cpu", adapted, n_processes=1)


@pytest.mark.parametrize("device", ACCELERATORS)
def test_so_it_is_in_a_captured_graph(device: str) -> None:
    collect(4, str(resolve_device(device)), adapted=False)


@pytest.mark.slow
def test_so_it_is_with_a_compiled_agent() -> None:
    collect(3, "cpu", adapted=False, compile_agent=True)


HOW = [("steps", "cpu"), ("worker", "cpu"), ("compiled", "cpu"), ("graph", "sim:0")]


@pytest.mark.parametrize(("how", "device"), [*HOW, pytest.param("graph", "cuda:0", marks=pytest.mark.gpu)])
def test_an_agent_that_keeps_its_action_keeps_the_one_that_it_took(how: str, device: str) -> None:
    device = str(resolve_device(device))
    settings = {"n_processes": int(how == "worker"), "graph": how == "graph", "compile_agent": how == "compiled"}
    env_args, agent_args = {"adapted": False, "device": device}, {"device": device}
    with RL_Batcher(
        T, Remembering, create_env, env_args=env_args, agent_args=agent_args, seed=0, device=device, **settings
    ) as batcher:
        batcher.reset()
        for _ in range(4):
            batch = next_batch(batcher)
            assert bool((batch.steps["action/action"].abs() > 1.0).any())
            replayed = replay_agent(Remembering(device), batch)
            torch.testing.assert_close(replayed["action"], batch.steps["action/action"])


class Clipping(gymnasium.Env[Any, Any]):
    """Clips its action in place, with numpy."""

    observation_space, action_space = Clamping.observation_space, BOX

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.clip(action, -1.0, 1.0, out=action), 0.0, False, False, {}


class Unbounded(TensorEnv[DictTensor]):
    """Shows the sum of its actions, which are not clamped."""

    stochastic = False
    observation_space, action_space = Clamping.observation_space, spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def initial(self, key: Tensor) -> DictTensor:
        return DictTensor({"sum": torch.zeros(len(key), 2)})

    def transition(self, state: DictTensor, action: Tensor, key: Tensor) -> Any:
        moved = state["sum"] + action
        return DictTensor({"sum": moved}), moved[:, 0], moved[:, 0] < 0

    def observe(self, state: DictTensor) -> Tensor:
        return state["sum"]


KINDS: dict[str, Callable[[], VecEnv]] = {
    "environments": lambda: GymEnvInf([Clipping() for _ in range(B)], seed=0),
    "vector environment": lambda: GymVectorEnv(SyncVectorEnv([Clipping] * B), seed=0),
    "simulator": lambda: Unbounded(B),
    "episodes of a simulator": lambda: Unbounded(B, auto_reset=False),
    "tensors": lambda: create_env(adapted=True, device="cpu", seed=0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_actions_and_observations_share_no_memory(kind: str) -> None:
    env = KINDS[kind]()
    env.reset()
    action = torch.full((B, 2), 3.0)
    (reached, _), (current, _) = env.step(DictTensor({"action": action}))
    assert bool((action == 3.0).all())
    action.fill_(7.0)  # by an agent that writes all its actions to one tensor
    for observation in (reached, current):
        assert bool((observation["last_action"] == 3.0).all())
    env.close()
