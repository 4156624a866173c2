"""DeviceEnv: every tensor moves, nothing else changes. The meta device stands for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from fake_envs import CountingEnv

from rlstruct import sims
from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.testing import check_vec_env
from rlstruct.vec_env import DeviceEnv, VecEnv

CPU, META = torch.device("cpu"), torch.device("meta")


class OnMeta(VecEnv):
    """Two environments on the meta device, of which nothing but the place can be said."""

    auto_reset = True
    device = META

    def __init__(self) -> None:
        self.action_space = self.observation_space = None
        self.closed = 0

    def n_envs(self) -> int:
        return 2

    def reset(self, env_info=None):
        self.env_info = env_info
        running = torch.ones(2, dtype=torch.bool, device=META)
        return DictTensor({"frame": torch.zeros(2, 3, device=META)}), running

    def step(self, action):
        self.action = action
        return self.reset(), self.reset()

    def close(self) -> None:
        self.closed += 1


def gym(kind: type[GymEnv], n: int) -> GymEnv:
    return kind([gymnasium.make("CartPole-v1") for _ in range(n)])


ENVIRONMENTS: dict[str, Callable[[], VecEnv]] = {
    "a simulator": lambda: sims.make("CartPole-v1", 2),
    "GymEnv": lambda: gym(GymEnv, 2),
    "GymEnvInf": lambda: gym(GymEnvInf, 2),
    "GymVectorEnv": lambda: GymVectorEnv(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")),
    "DeviceEnv": lambda: DeviceEnv(CountingEnv(2), "cpu"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize(
    ("action", "got"),
    [
        (torch.ones(2, dtype=torch.int64), r"a Tensor, expected a DictTensor\. Pass DictTensor\({'action': …}\)"),
        ({"action": torch.ones(2)}, r"a dict, expected a DictTensor\. Pass DictTensor\({'action': …}\)"),
        (1, "an int, expected a DictTensor"),
    ],
)
def test_an_action_that_is_no_dict_tensor_is_told(name: str, action: Any, got: str) -> None:
    env = ENVIRONMENTS[name]()
    env.reset()
    with pytest.raises(TypeError, match=rf"Env\w*\.step: the action is {got}|CartPole\.step: the action is {got}"):
        env.step(action)
    env.step(DictTensor({"action": torch.ones(2, dtype=torch.int64)}))  # nothing happened: it can go on
    env.close()


def test_a_simulator_names_itself_when_an_action_lacks_its_key() -> None:
    env = sims.make("CartPole-v1", 2)
    env.reset()
    with pytest.raises(KeyError, match=r"CartPole\.step: the action has no key 'action', only \['act'\]"):
        env.step(DictTensor({"act": torch.ones(2, dtype=torch.int64)}))


def test_device_env_leaves_an_empty_action_to_the_environment() -> None:
    env = DeviceEnv(gym(GymEnv, 2), "cpu")
    env.reset()
    with pytest.raises(ShapeMismatchError, match=r"GymEnv\.step: the action has no key 'action'"):
        env.step(DictTensor())
    env.close()


def test_reset_moves_every_key_and_the_mask() -> None:
    observation, running = DeviceEnv(CountingEnv(3), "meta").reset()
    assert {value.device for value in observation.values()} == {META}
    assert set(observation.keys()) == set(CountingEnv(3).reset()[0].keys())
    assert (running.device, running.dtype, list(running.shape)) == (META, torch.bool, [3])


def test_step_brings_the_action_home_and_moves_the_answer() -> None:
    env = OnMeta()
    moved = DeviceEnv(env, "meta")
    moved.reset()
    (reached, ran), (current, running) = moved.step(DictTensor({"action": torch.zeros(2, device=META)}))
    assert env.action.device == META
    assert {reached.device, current.device, ran.device, running.device} == {META}


def test_without_a_restart_one_observation_is_moved() -> None:
    env = CountingEnv(2, lengths=(2,), auto_reset=True)
    moved = DeviceEnv(env, "cpu")
    moved.reset()
    action = DictTensor({"action": torch.zeros(2, dtype=torch.int64)})
    first = moved.step(action)
    assert first.restarted is False
    assert first.current[0] is first.reached[0]
    second = moved.step(action)  # every second step ends all episodes
    (reached, _), (current, _) = second
    assert second.restarted is True
    assert reached["done"].all()
    assert current["initial_state"].all()


def test_a_plain_pair_may_have_restarted() -> None:
    env = OnMeta()
    answer = DeviceEnv(env, "meta").step(DictTensor({"action": torch.zeros(2, device=META)}))
    assert answer.restarted is True  # OnMeta says nothing, so that both observations are moved
    assert answer.current[0] is not answer.reached[0]


def test_an_action_elsewhere_is_refused() -> None:
    moved = DeviceEnv(CountingEnv(3), "meta")
    moved.reset()
    message = r"DeviceEnv\.step: action 'action' is on cpu, expected meta\. Create it with device='meta'"
    with pytest.raises(DeviceMismatchError, match=message):
        moved.step(DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))


def test_from_device_must_be_where_the_environment_is() -> None:
    with pytest.raises(DeviceMismatchError, match=r"from_device is meta, but CountingEnv is on cpu.*from_device='cpu'"):
        DeviceEnv(CountingEnv(2), "cpu", from_device="meta")
    assert DeviceEnv(CountingEnv(2), "meta", from_device="cpu:0").device == META


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="Devices here: cpu"):
        DeviceEnv(CountingEnv(2), "gpu")


def test_env_info_stays_on_the_cpu() -> None:
    env = OnMeta()
    moved = DeviceEnv(env, "meta")
    env_info = DictTensor({"length": torch.ones(2, dtype=torch.int64)})
    moved.reset(env_info)
    assert env.env_info is env_info
    with pytest.raises(DeviceMismatchError, match=r"DeviceEnv\.reset: env_info 'length' is on meta.*cpu"):
        moved.reset(env_info.to("meta"))
    for empty in (None, DictTensor()):
        moved.reset(empty)


def test_the_rest_is_that_of_the_wrapped_environment() -> None:
    env = OnMeta()
    moved = DeviceEnv(env, "meta")
    assert (moved.n_envs(), moved.auto_reset, moved.device) == (2, True, META)
    moved.close()
    assert env.closed == 1
    counting = CountingEnv(2)
    wrapped = DeviceEnv(counting, "cpu")
    assert (wrapped.action_space, wrapped.observation_space) == (counting.action_space, counting.observation_space)


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize(("home", "elsewhere"), [("cpu", "sim:1"), ("sim:1", "cpu"), ("sim:1", "sim:2")])
def test_a_moved_environment_keeps_the_contract(home: str, elsewhere: str, auto_reset: bool) -> None:
    def create(seed: int) -> DeviceEnv:
        return DeviceEnv(CountingEnv(3, seed, auto_reset=auto_reset, device=home), elsewhere, from_device=home)

    check_vec_env(create, n_steps=20)


@pytest.mark.gpu
@pytest.mark.parametrize(("home", "elsewhere"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_moved_environment_keeps_the_contract_on_a_gpu(home: str, elsewhere: str) -> None:
    def create(seed: int) -> DeviceEnv:
        return DeviceEnv(CountingEnv(3, seed, auto_reset=True, device=home), elsewhere)

    check_vec_env(create, n_steps=20)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (gymnasium.make("CartPole-v1"), "a TimeLimit, expected a VecEnv. Wrap gymnasium environments: GymEnv"),
        (CountingEnv, "the class CountingEnv, expected a VecEnv. Create one: CountingEnv"),
        ("cpu", "a str, expected a VecEnv"),
    ],
)
def test_only_a_vec_env_can_be_moved(env: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"DeviceEnv: env is {words}"):
        DeviceEnv(env, "cpu")
