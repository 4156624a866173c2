"""Impossible actions, frames and rewards are reported at every face that does not collect batches, on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torch import Tensor, nn

from rlstruct import DictTensor, RL_Agent, VecEnv, resolve_device, sims
from rlstruct.adapters import GymnasiumVectorEnv, TorchVectorEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import TensorSpec
from rlstruct.engine.validity import ActionCheck, unchecked
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.errors import BadValueError, ShapeMismatchError
from rlstruct.policies import Policy
from rlstruct.testing import forbid_host_sync

B = 3


class Silent(gymnasium.Env[Any, Any]):
    """Takes every action, and shows it."""

    observation_space = spaces.Box(-9, 9, (1,))

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.full(1, np.ravel(action)[0], np.float32), 0.0, False, False, {}


class Simulator:
    """Takes every action, shows it, and writes all results into the same memory."""

    num_envs = B
    single_observation_space = spaces.Box(-9, 9, (1,))

    def __init__(self, action_space: gymnasium.Space[Any], device: str) -> None:
        self.single_action_space = action_space
        self.frame, self.reward = torch.zeros(B, 1, device=device), torch.zeros(B, device=device)
        self.ends = torch.zeros(B, dtype=torch.bool, device=device)

    def reset(self, seed: int | None = None) -> Any:
        return self.frame.zero_(), {}

    def step(self, action: Tensor) -> Any:
        self.frame.copy_(action.view(B, 1))
        return self.frame, self.reward.add_(1), self.ends, self.ends, {"final_obs": self.frame}

    def close(self) -> None:
        pass


NUMBERS, TORQUE = spaces.Discrete(2), spaces.Box(-2, 2, (1,))


def simulator(continuous: bool, device: str) -> VecEnv:
    return sims.make("Pendulum-v1" if continuous else "CartPole-v1", B, device=device)


FACES: dict[str, Callable[[bool, str], VecEnv]] = {
    "simulator": simulator,
    "TorchVectorEnv": lambda continuous, device: TorchVectorEnv(
        Simulator(TORQUE if continuous else NUMBERS, device), device
    ),
}
ON_CPU: dict[str, Callable[[bool, str], VecEnv]] = {
    "GymEnv": lambda continuous, _: GymEnv([Silent(TORQUE if continuous else NUMBERS) for _ in range(B)]),
    "GymEnvInf": lambda continuous, _: GymEnvInf([Silent(TORQUE if continuous else NUMBERS) for _ in range(B)]),
}
CASES = [(False, 7), (False, -1), (True, float("nan"))]


def action_of(continuous: bool, value: float, device: str) -> DictTensor:
    action = torch.zeros((B, 1) if continuous else (B,), dtype=torch.float32 if continuous else torch.int64)
    action[1] = value
    return DictTensor({"action": action.to(device)})


@pytest.mark.parametrize(("continuous", "value"), CASES)
@pytest.mark.parametrize("name", [*FACES, *ON_CPU])
def test_on_the_cpu_the_step_raises(name: str, continuous: bool, value: float) -> None:
    env = (FACES | ON_CPU)[name](continuous, "cpu")
    env.reset()
    env.step(action_of(continuous, 1, "cpu"))
    with pytest.raises(BadValueError, match=rf"\.step: action 'action' of environment 1 is \[?{value}") as caught:
        env.step(action_of(continuous, value, "cpu"))
    assert caught.value.environment_index == 1


@pytest.mark.parametrize(("continuous", "value"), CASES)
@pytest.mark.parametrize("read", ["reset", "close"])
@pytest.mark.parametrize("name", FACES)
def test_on_an_accelerator_nothing_waits_and_the_next_reset_raises(
    name: str, continuous: bool, value: float, read: str
) -> None:
    env = FACES[name](continuous, "sim:1")
    env.reset()
    good, wrong = action_of(continuous, 1, "sim:1"), action_of(continuous, value, "sim:1")
    with forbid_host_sync():
        for action in (good, wrong, good):
            env.step(action)
    with pytest.raises(BadValueError, match=r"in an earlier step, action 'action' of some environment was not"):
        getattr(env, read)()
    env.reset()  # reported once


def test_rows_that_do_not_run_are_ignored() -> None:
    env = sims.make("CartPole-v1", B, auto_reset=False, time_limit=1)
    env.reset()
    env.step(action_of(False, 1, "cpu"))
    env.step(action_of(False, 7, "cpu"))


def test_a_box_without_bounds_is_checked_for_nan_only() -> None:
    env = GymEnv([Silent(spaces.Box(-np.inf, np.inf, (1,))) for _ in range(B)])
    env.reset()
    env.step(action_of(True, 1e30, "cpu"))
    with pytest.raises(BadValueError, match="environment 1 is"):
        env.step(action_of(True, float("nan"), "cpu"))


class NoNumber(sims.TensorEnv[DictTensor]):
    """Its frame is NaN from the second step on, in environment 2."""

    stochastic = False
    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-9, 9, (1,))

    def initial(self, key: Tensor) -> DictTensor:
        return DictTensor({"n": torch.zeros_like(key), "row": torch.arange(len(key), device=key.device) % B})

    def transition(self, state: DictTensor, action: Any, key: Tensor) -> Any:
        n = state["n"] + 1
        return DictTensor({"n": n, "row": state["row"]}), n.to(torch.float32), n < 0

    def observe(self, state: DictTensor) -> Tensor:
        bad = (state["n"] > 1) & (state["row"] == 2)
        return torch.where(bad, torch.nan, state["n"].to(torch.float32)).unsqueeze(1)


@pytest.mark.parametrize("wrap", ["plain", "gymnasium"])
def test_frames_that_are_nan_are_reported(wrap: str) -> None:
    def create(seed: int, device: str = "cpu") -> VecEnv:
        return NoNumber(B, seed, device=device)

    message = r"'frame' of environment 2 is NaN. Look for a division by zero"
    if wrap == "plain":
        env = create(0)
        env.reset()
        env.step(action_of(False, 1, "cpu"))
        with pytest.raises(BadValueError, match=message):
            env.step(action_of(False, 1, "cpu"))
    else:
        ours = GymnasiumVectorEnv(create)
        ours.reset()
        ours.step(np.zeros(B, np.int64))
        with pytest.raises(BadValueError, match=message):
            ours.step(np.zeros(B, np.int64))
    distant = create(0, "sim:1")
    distant.reset()
    distant.step(action_of(False, 1, "sim:1"))
    distant.step(action_of(False, 1, "sim:1"))
    with pytest.raises(BadValueError, match="in an earlier step, 'frame' of some environment was NaN"):
        distant.state_dict()


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_gymnasium_vector_env_reports_what_gymnasium_would(device: str) -> None:
    ours = GymnasiumVectorEnv(lambda seed: sims.make("CartPole-v1", B, seed, device=device))
    ours.reset()
    with pytest.raises(BadValueError, match=r"action 'action' of (some )?environment"):
        ours.step(np.array([0, 7, 1]))
    with pytest.raises(ShapeMismatchError, match=r"torch.float64 with numbers that torch.int64 cannot hold"):
        ours.step(np.array([0, 0.7, 1]))
    torque = GymnasiumVectorEnv(lambda seed: sims.make("Pendulum-v1", B, seed, device=device))
    torque.reset()
    with pytest.raises(BadValueError, match=r"action 'action' of (some )?environment"):
        torque.step(np.array([[0], [np.nan], [1]], np.float32))


def test_with_tensors_on_an_accelerator_a_gymnasium_vector_env_raises_at_the_next_reset() -> None:
    ours = GymnasiumVectorEnv(lambda seed: sims.make("CartPole-v1", B, seed, device="sim:1"), tensors=True)
    ours.reset()
    actions = torch.tensor([0, 7, 1], device="sim:1")
    with forbid_host_sync():
        ours.step(actions)
    with pytest.raises(BadValueError, match="in an earlier step, action 'action'"):
        ours.reset()


def policy_of(device: str = "cpu", model: nn.Module | None = None, **settings: Any) -> Policy:
    frame = {"frame": TensorSpec((4,), torch.float32)}
    return Policy(model or ActorCritic(4, 2), ActorCriticAgent, frame, device=device, **settings)


def spoilt() -> nn.Module:
    model = ActorCritic(4, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    return model


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_policy_without_any_legal_action_is_reported(device: str, stochastic: bool) -> None:
    model = ActorCritic(4, 2)
    with torch.no_grad():
        list(model.actor.parameters())[-1].fill_(-torch.inf)
    with pytest.raises(BadValueError, match=r"Policy\.act: the action is none of 0 to 1, or its scores are NaN"):
        policy_of(device, model, stochastic=stochastic).act(np.zeros((B, 4), np.float32))


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_policy_refuses_nan_and_reports_actions_that_do_not_exist(device: str, stochastic: bool) -> None:
    frames = np.zeros((B, 4), np.float32)
    frames[1, 2] = np.nan
    with pytest.raises(BadValueError, match=r"Policy\.act: the observation has NaN"):
        policy_of(device, stochastic=stochastic).act(frames)
    with pytest.raises(BadValueError, match=r"Policy\.act: the action is none of 0 to 1, or its scores are NaN"):
        policy_of(device, spoilt(), stochastic=stochastic).act(np.zeros((B, 4), np.float32))


def test_a_policy_on_an_accelerator_reports_tensors_at_the_next_reset() -> None:
    policy = policy_of("sim:1")
    frames = torch.zeros(B, 4, device="sim:1")
    policy.act(frames)
    policy.reset()
    with forbid_host_sync():
        policy.act(frames * torch.nan)
    with pytest.raises(BadValueError, match="the observation has NaN"):
        policy.reset()
    policy.act(frames)


class NanAtReset(Silent):
    """Begins with NaN."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(3))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.full(1, np.nan, np.float32), {}


@pytest.mark.parametrize(
    "env", [GymEnvInf([NanAtReset()]), GymVectorEnv(SyncVectorEnv([NanAtReset]))], ids=["list", "vector"]
)
def test_nan_in_a_first_frame_is_reported_by_reset(env: VecEnv) -> None:
    with pytest.raises(ValueError, match="'frame' of environment 0 is NaN"):
        env.reset()


class Counted(RL_Agent):
    """Always takes action 1."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        return DictTensor({"action": torch.ones_like(observation["rng"])}), state


def test_collection_does_not_check_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []  # dimensions of actions: [B] of a step, [T, B] of a batch
    for name in ("all_right", "wrong"):
        check = getattr(ActionCheck, name)

        def noted(self: ActionCheck, key: str, values: Tensor, check: Any = check) -> Any:
            checked.append(values.dim())
            return check(self, key, values)

        monkeypatch.setattr(ActionCheck, name, noted)
    for device in ("cpu", "sim:1"):
        settings = {"name": "CartPole-v1", "n_envs": B, "device": device}
        with RL_Batcher(4, Counted, sims.make, env_args=settings, seed=0, device=resolve_device(device)) as batcher:
            batcher.reset()
            batcher.execute()
            batcher.get()
    assert checked == [2, 2]
    env = sims.make("CartPole-v1", B)
    with unchecked():
        env.reset()
        env.step(action_of(False, 7, "cpu"))
    assert checked == [2, 2]
