"""An action that does not exist is named, also where the environment would compute with it."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from batcher_fakes import first_batch, refused
from fake_agents import FixedAgent, RngAgent
from fake_envs import create_counting_env
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from random_env import RandomEnv

from rlstruct import DictTensor, RL_Agent
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.batchers.validation import BatchValidator
from rlstruct.engine.streams import AsyncRead
from rlstruct.envs import GymVectorEnv
from rlstruct.functional.random import categorical
from rlstruct.sims import make
from rlstruct.testing import forbid_host_sync
from rlstruct.vec_env import EnvWrapper

CART_POLES = {"name": "CartPole-v1", "n_envs": 4}


class WrongAgent(RL_Agent):
    """Returns ``value`` in environment 2 in its third call, else 0."""

    def __init__(self, value: float) -> None:
        self.value, self.calls = value, 0

    def __call__(self, state: DictTensor, observation: Any, agent_info: Any, history: Any = None) -> Any:
        action = torch.zeros_like(observation["last_action"])
        self.calls += 1
        if self.calls == 3:
            action[2] = self.value
        return DictTensor({"action": action}), state


@pytest.mark.parametrize(("value", "n_processes"), [(2, 0), (-1, 0), (7, 1)])
def test_a_simulator_gets_no_action_beyond_its_last_one_unnoticed(value: int, n_processes: int) -> None:
    text = rf"environment 2, seed 2.*'action' of environment 2 in step 2 of the batch is {value}, .*Discrete\(2\)"
    error = refused(text, WrongAgent, make, agent_args={"value": value}, env_args=CART_POLES, n_processes=n_processes)
    assert (error.environment, error.step) == (2, 2)


def test_actions_of_a_box_may_be_anything_but_nan() -> None:
    env_args = {"name": "Pendulum-v1", "n_envs": 4}
    with RL_Batcher(8, WrongAgent, make, agent_args={"value": 100.0}, env_args=env_args) as batcher:
        first_batch(batcher)
    words = r"environment 2.* is \[nan\], expected an element of Box.*NaN"
    refused(words, WrongAgent, make, agent_args={"value": math.nan}, env_args=env_args)


def test_every_part_of_a_nested_space_has_its_range() -> None:
    space = spaces.Dict(
        a=spaces.MultiDiscrete([2, 3]), b=spaces.Tuple([spaces.Discrete(2, start=5), spaces.MultiBinary(2)])
    )
    good = {
        "action/action/a": torch.tensor([[[1, 2]]]),
        "action/action/b/0": torch.tensor([[6]]),
        "action/action/b/1": torch.tensor([[[0, 1]]], dtype=torch.int8),
        "running": torch.ones(1, 1, dtype=torch.bool),
    }
    BatchValidator(space).check(Rollout(good), 1)
    outputs, start = "one output per action", "begin with 5: batchers add that to the indices"
    for key, wrong, fix in (
        ("a", [[[1, 3]]], outputs), ("b/0", [[4]], start), ("b/0", [[7]], start), ("b/1", [[[2, 0]]], outputs)
    ):  # fmt: skip
        bad = {**good, f"action/action/{key}": torch.tensor(wrong)}
        with pytest.raises(ValueError, match=f"action 'action/{key}' of environment 0 in step 0.*{fix}"):
            BatchValidator(space).check(Rollout(bad), 1)
        BatchValidator(space).check(Rollout({**bad, "running": torch.zeros(1, 1, dtype=torch.bool)}), 1)  # it idles
        BatchValidator(space).check(Rollout(bad), 0)  # no step was taken


def test_off_the_cpu_later_batches_are_told_when_the_device_is_through_with_them() -> None:
    good, bad = (
        Rollout(
            {
                "action/action": torch.tensor([[0, action]]).to("sim:1"),
                "running": torch.ones(1, 2, dtype=torch.bool).to("sim:1"),
            }
        )
        for action in (2, 3)
    )
    looking = BatchValidator(spaces.Discrete(3))
    with pytest.raises(ValueError, match="action 'action' of environment 1 in step 0 of the batch is 3"):
        BatchValidator(spaces.Discrete(3)).check(bad, 1)  # a first batch is checked at once
    looking.check(good, 1)
    with forbid_host_sync():
        looking.check(good, 1)
        with pytest.raises(ValueError, match="action 'action' of environment 1 in step 0 of the batch is out of range"):
            looking.check(bad, 1)


def frames_of(stream: list[float], reached: list[float]) -> Rollout:
    """Two steps of one environment on an accelerator, which restarts after the first."""
    tensors = {"stream/frame": torch.tensor(stream).view(3, 1), "reached/frame": torch.tensor(reached).view(2, 1)}
    tensors["running"] = torch.ones(2, 1, dtype=torch.bool)
    return Rollout({name: tensor.to("sim:1") for name, tensor in tensors.items()})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("stream", "reached", "after"),
    [([0.0, math.nan, 1.0], [0.0, 1.0], 0), ([0.0, 0.0, 1.0], [0.0, math.nan], 1), ([math.nan, 0, 0], [0, 0], -1)],
)
def test_off_the_cpu_nan_is_found_before_a_restart_and_after_it(
    stream: list[float], reached: list[float], after: int, first: bool
) -> None:
    looking = BatchValidator(spaces.Discrete(3))
    if not first:
        looking.check(frames_of([0.0, 1.0, 2.0], [1.0, 2.0]), 2)
    where = "at the beginning of the batch" if after < 0 else f"after step {after}"
    with pytest.raises(ValueError, match=f"'observation/frame' of environment 0 is NaN {where}"):
        looking.check(frames_of(stream, reached), 2)


def test_on_the_cpu_only_rows_of_environments_that_restarted_are_looked_at() -> None:
    """Other rows of ``reached`` were never written: here they are NaN."""
    looking, nan = BatchValidator(spaces.Discrete(3)), math.nan
    tensors = {"stream/frame": torch.zeros(3, 2), "reached/frame": torch.tensor([[nan, 5.0], [nan, nan]])}
    tensors |= {"running": torch.ones(2, 2, dtype=torch.bool), "restarted": torch.tensor([[False, True], [False] * 2])}
    looking.check(Rollout(tensors), 2)
    tensors["restarted"][1, 1] = True
    looking.check(Rollout(tensors), 1)  # step 1 is one of an older batch
    with pytest.raises(ValueError, match="'observation/frame' of environment 1 is NaN after step 1"):
        looking.check(Rollout(tensors), 2)


class Slow(AsyncRead):
    """A device that is through with its work only when it is waited for."""

    def read(self) -> None:
        return None


def test_what_is_wrong_in_the_last_batch_is_logged_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlstruct.batchers.validation.AsyncRead", Slow)
    agent = ActorCriticAgent(ActorCritic(4, 2), device="sim:1")
    env_args = {**CART_POLES, "device": "sim:1"}
    with RL_Batcher(8, lambda: agent, make, env_args=env_args, seed=0, device="sim:1", graph=False) as batcher:
        batcher.reset()
        for n in range(3):
            if n == 2:
                batcher.update({key: weight * math.nan for key, weight in agent.model.state_dict().items()})
            batcher.execute()
            batcher.get()
        assert not caplog.records
    assert "logits that are NaN" in caplog.text
    assert caplog.text.count("out of range") == 1


class BadEnv(RandomEnv):
    """Shows NaN in environment 1 after step 2: in its frame, or in its reward."""

    def __init__(self, key: str, seed: int) -> None:
        super().__init__(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), 3, seed)
        self.key, self.t = key, 0

    def step(self, action: DictTensor) -> Any:
        (reached, ran), (current, running) = super().step(action)
        self.t += 1
        if self.t == 3:
            values = reached[self.key].clone()
            values[1] = math.nan
            reached, current = (DictTensor({**dict(d.items()), self.key: values}) for d in (reached, current))
        return (reached, ran), (current, running)


class NanAtFirst(gymnasium.Env[Any, Any]):
    """Begins its second episode with NaN; episodes take two steps."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        return np.full(2, math.nan if self.episode == 2 else 0.0, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(2, np.float32), 0.0, self.t == 2, False, {}


@pytest.mark.parametrize(("mode", "step"), [("NextStep", 2), ("SameStep", 1), ("Disabled", 1)])
def test_nan_in_the_first_frame_of_an_episode_is_named_in_every_autoreset_mode(mode: str, step: int) -> None:
    def create_env(seed: int) -> GymVectorEnv:
        return GymVectorEnv(SyncVectorEnv([NanAtFirst] * 2, autoreset_mode=mode), seed)

    error = refused(f"'observation/frame' of environment 0 is NaN after step {step}", FixedAgent, create_env)
    assert error.step == step


@pytest.mark.parametrize(("key", "n_processes"), [("frame", 0), ("reward", 0), ("reward", 1)])
def test_nan_is_named_with_its_key_environment_and_step(key: str, n_processes: int) -> None:
    words = f"'observation/{key}' of environment 1 is NaN after step 2"
    error = refused(words, WrongAgent, BadEnv, agent_args={"value": 0}, env_args={"key": key}, n_processes=n_processes)
    assert (error.environment, error.step) == (1, 2)


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_logits_that_are_nan_are_told(device: str) -> None:
    torch.manual_seed(0)
    agent = ActorCriticAgent(ActorCritic(4, 2), device=device)
    for parameter in agent.model.parameters():
        parameter.data.fill_(math.nan)
    words = r"is 2, expected an element of Discrete\(2\).*logits that are NaN"
    refused(words, lambda: agent, make, env_args={**CART_POLES, "device": device}, device=device)


class VanishingAgent(WrongAgent):
    """Forgets ``logits`` in its third call."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: Any, history: Any = None) -> Any:
        action, state = super().__call__(state, observation, agent_info)
        return action if self.calls == 3 else action + DictTensor({"logits": torch.zeros(4, 2)}), state


def test_an_output_that_vanishes_is_named() -> None:
    words = r"agent: action 'logits' is missing, expected \[4, 2\] torch.float32"
    refused(words, VanishingAgent, make, agent_args={"value": 0}, env_args=CART_POLES)


class OtherOutputs(WrongAgent):
    """Returns something else in its fifth call, which a copy into the batch would repeat, round or lose in silence."""

    def __init__(self, value: int, change: str) -> None:
        super().__init__(value)
        self.change = change

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: Any, history: Any = None) -> Any:
        action, state = super().__call__(state, observation, agent_info)
        outputs = {**dict(action.items()), "logits": torch.zeros(4, 2), "choice": torch.zeros(4, dtype=torch.int64)}
        if self.calls == 5:
            outputs |= {
                "shape": {"logits": torch.zeros(4, 1)},
                "dtype": {"choice": torch.full((4,), 0.5)},
                "key": {"extra": torch.zeros(4)},
            }[self.change]
        return DictTensor(outputs), state


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("shape", r"'logits' is \[4, 1\] torch.float32, expected \[4, 2\] torch.float32"),
        ("dtype", r"'choice' is \[4\] torch.float32, expected \[4\] torch.int64"),
        ("key", r"'extra' is \[4\] torch.float32, expected no such key"),
    ],
)
def test_an_output_that_changes_within_a_batch_is_named(change: str, found: str) -> None:
    refused(found, OtherOutputs, make, agent_args={"value": 0, "change": change}, env_args=CART_POLES)


class OtherFinals(EnvWrapper):
    """Shows final observations of one number, which would be repeated in the batch."""

    def step(self, action: DictTensor) -> Any:
        (reached, ran), current = self.env.step(action)
        frame = reached["frame"][:, :1] if reached["done"].any() else reached["frame"]
        return (DictTensor({**dict(reached.items()), "frame": frame}), ran), current


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_final_observation_of_another_shape_is_named(device: str) -> None:
    def create(seed: int) -> OtherFinals:
        return OtherFinals(create_counting_env(2, seed, auto_reset=True, device=device))

    refused(r"observation 'frame' is \[2, 1\] torch.int64, expected \[2, 3\]", RngAgent, create, device=device)


class LateKey(EnvWrapper):
    """Shows a key more in each step than after a reset: the agent would see it, and the trajectories would not."""

    def step(self, action: DictTensor) -> Any:
        (reached, ran), (current, running) = self.env.step(action)
        return (reached, ran), (current + DictTensor({"speed": torch.zeros(2)}), running)


def test_a_key_that_only_steps_show_is_named() -> None:
    words = r"observation 'speed' is \[2\] torch.float32, expected no such key"
    refused(words, RngAgent, lambda seed: LateKey(create_counting_env(2, seed)))


class FollowingAgent(WrongAgent):
    """Draws from logits that are its frame: NaN in the frame makes its next action one that does not exist."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: Any, history: Any = None) -> Any:
        return DictTensor({"action": categorical(observation["frame"][:, :2], observation["rng"])}), state


def test_nan_in_a_frame_is_told_before_the_action_that_it_leads_to() -> None:
    words = "'observation/frame' of environment 1 is NaN after step 2"
    refused(words, FollowingAgent, BadEnv, agent_args={"value": 0}, env_args={"key": "frame"})
