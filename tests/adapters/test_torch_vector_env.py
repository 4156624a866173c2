"""TorchVectorEnv: the very tensors of the simulation, true final observations, and what happens without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_agents import RngAgent
from gymnasium import spaces

from rlstruct import DictTensor, resolve_device
from rlstruct.adapters import TorchVectorEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import BadTypeError, ShapeMismatchError
from rlstruct.testing import check_vec_env, forbid_host_sync

B = 4


class Counters:
    """An Isaac-like simulation: counts steps, ends after 3 + row, restarts within the step, returns fresh tensors."""

    num_envs = B

    def __init__(self, device: str, final: str | None = "final_obs", nested: bool = False) -> None:
        self.device, self.final, self.nested = torch.device(device), final, nested
        box = spaces.Box(-1.0, 100.0, (2,))
        self.single_observation_space = spaces.Dict({"policy": box}) if nested else box
        self.single_action_space = spaces.Discrete(2)
        self.lengths = torch.arange(3, 3 + B, device=self.device)
        self.shown: list[torch.Tensor] = []

    def _show(self) -> Any:
        shown = torch.stack([self.count, self.lengths], 1).float()
        self.shown.append(shown)
        return {"policy": shown} if self.nested else shown

    def reset(self, seed: int | None = None) -> Any:
        self.count = torch.zeros(B, dtype=torch.int64, device=self.device)
        return self._show(), {}

    def step(self, action: torch.Tensor) -> Any:
        self.count = self.count + 1
        final = self._show()
        done = self.count >= self.lengths
        reward = self.count.to(torch.float64)
        self.count = torch.where(done, 0, self.count)
        info = {} if self.final is None else {self.final: final}
        return self._show(), reward, done & (self.lengths % 2 == 0), done & (self.lengths % 2 == 1), info

    def close(self) -> None:
        self.shown.clear()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim:1", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_the_contract_holds(device: str, nested: bool) -> None:
    device = str(resolve_device(device))
    check_vec_env(TorchVectorEnv(Counters(device, "final_observation", nested), device), n_steps=30)


def test_observations_are_copies_of_the_simulations_tensors_and_nothing_waits() -> None:
    vec = Counters("sim:1")
    env = TorchVectorEnv(vec, "sim:1")
    first, _ = env.reset()
    assert first["frame"].data_ptr() != vec.shown[-1].data_ptr()
    action = DictTensor({"action": torch.zeros(B, dtype=torch.int64, device="sim:1")})
    for _ in range(7):
        with forbid_host_sync():
            (reached, _), (current, _) = env.step(action)
        assert current["frame"].data_ptr() != vec.shown[-1].data_ptr()
        assert torch.equal(current["frame"].cpu(), vec.shown[-1].cpu())
        done = reached["done"].cpu()
        # The final observation shows the length that was reached; where nothing ended both agree.
        assert torch.equal(reached["frame"].cpu()[done, 0], reached["frame"].cpu()[done, 1])
        assert torch.equal(reached["frame"].cpu()[~done], current["frame"].cpu()[~done])
        assert (current["frame"].cpu()[done, 0] == 0).all()


def test_an_action_that_is_no_dict_tensor_or_lacks_its_key_is_refused() -> None:
    env = TorchVectorEnv(Counters("cpu"), "cpu")
    env.reset()
    with pytest.raises(TypeError, match=r"TorchVectorEnv\.step: the action is a Tensor, expected a DictTensor"):
        env.step(torch.zeros(B, dtype=torch.int64))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"TorchVectorEnv\.step: the action has no key 'action', only \['act'\]"):
        env.step(DictTensor({"act": torch.zeros(B, dtype=torch.int64)}))


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"TorchVectorEnv\.step: there is nothing to step\. Call reset\(\) first"):
        TorchVectorEnv(Counters("cpu"), "cpu").step(DictTensor({"action": torch.zeros(B, dtype=torch.int64)}))


@pytest.mark.parametrize(("i", "name"), [(1, "reward"), (2, "terminated"), (3, "truncated")])
def test_rewards_and_flags_in_columns_are_refused(i: int, name: str) -> None:
    class Columns(Counters):
        def step(self, action: torch.Tensor) -> Any:
            answer = list(super().step(action))
            answer[i] = answer[i].unsqueeze(1)
            return answer

    env = TorchVectorEnv(Columns("cpu"), "cpu")
    env.reset()
    with pytest.raises(ShapeMismatchError, match=rf"TorchVectorEnv\.step: '{name}' is \[4, 1\] .*expected \[4\]"):
        env.step(DictTensor({"action": torch.zeros(B, dtype=torch.int64)}))


@pytest.mark.parametrize("shape", [(B, 1), (B + 1,)])
def test_actions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    env = TorchVectorEnv(Counters("cpu"), "cpu")
    env.reset()
    with pytest.raises(ShapeMismatchError, match=rf"the action 'action' is \[{str(shape)[1:2]}.*\], expected \[4\]"):
        env.step(DictTensor({"action": torch.zeros(shape, dtype=torch.int64)}))


def test_observations_of_another_shape_than_their_space_are_refused() -> None:
    vec = Counters("cpu")
    vec.single_observation_space = spaces.Box(-1.0, 100.0, (3,))
    with pytest.raises(ShapeMismatchError, match=r"observation 'frame' is \[4, 2\], expected \[4, 3\]"):
        TorchVectorEnv(vec, "cpu").reset()


@pytest.mark.parametrize(
    ("i", "name"),
    [(0, "observation 'frame'"), (1, "step: 'reward'"), (2, "step: 'terminated'"), (3, "step: 'truncated'")],
)
def test_arrays_of_numpy_are_refused(i: int, name: str) -> None:
    class Arrays(Counters):
        def step(self, action: torch.Tensor) -> Any:
            answer = list(super().step(action))
            answer[i] = answer[i].numpy()
            return answer

    env = TorchVectorEnv(Arrays("cpu"), "cpu")
    env.reset()
    with pytest.raises(BadTypeError, match=rf"TorchVectorEnv: {name} is a ndarray, expected a tensor on cpu"):
        env.step(DictTensor({"action": torch.zeros(B, dtype=torch.int64)}))


class Clamping(Counters):
    """Clamps the actions where they stand, as many simulators on GPUs do, and pays their sum."""

    def __init__(self, device: str, nested: bool = False) -> None:
        super().__init__(device)
        box = spaces.Box(-1.0, 1.0, (2,))
        self.single_action_space = spaces.Dict({"motors": box}) if nested else box

    def step(self, action: Any) -> Any:
        motors = action["motors"] if isinstance(action, dict) else action
        motors.clamp_(-1, 1)
        observation, _, terminated, truncated, info = super().step(motors)
        return observation, motors.sum(1), terminated, truncated, info


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_simulation_may_change_its_action_in_place(device: str, nested: bool) -> None:
    key = "action/motors" if nested else "action"
    env = TorchVectorEnv(Clamping(device, nested), device)
    env.reset()
    action = DictTensor({key: torch.full((B, 2), 3.0, device=device)})
    (reached, _), (current, _) = env.step(action)
    assert (action[key] == 3).all()
    assert (reached[f"last_{key}"] == 3).all()
    assert (current[f"last_{key}"] == 3).all()
    assert (reached["reward"] == 2).all()  # the simulation used what it had clamped


def test_final_observations_of_the_ended_rows_alone_are_refused() -> None:
    class EndedRows(Counters):
        def step(self, action: torch.Tensor) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, {"final_obs": info["final_obs"][:1]}

    env = TorchVectorEnv(EndedRows("cpu"), "cpu")
    env.reset()
    with pytest.raises(ShapeMismatchError, match=r"final observation 'frame' is \[1, 2\], expected \[4, 2\]"):
        env.step(DictTensor({"action": torch.zeros(B, dtype=torch.int64)}))


def test_a_lost_final_observation_is_refused_or_replaced_by_the_one_before() -> None:
    action = DictTensor({"action": torch.zeros(B, dtype=torch.int64)})
    env = TorchVectorEnv(Counters("cpu", None), "cpu")
    env.reset()
    for _ in range(2):
        env.step(action)
    with pytest.raises(RuntimeError, match=r"an episode of Counters ended, and the info has no final.*missing_final="):
        env.step(action)
    env = TorchVectorEnv(Counters("cpu", None), "cpu", missing_final="previous")
    env.reset()
    for _ in range(3):
        (reached, _), (current, _) = env.step(action)
    assert reached["frame"][0].tolist() == [2.0, 3.0]
    assert current["frame"][0].tolist() == [0.0, 3.0]


def test_the_first_observation_is_kept_when_the_simulation_writes_over_it() -> None:
    class Reusing(Counters):
        """Shows the count and how often it has shown something, always in the same memory."""

        n_shown = 0
        buffer = torch.zeros(B, 2)

        def _show(self) -> Any:
            self.n_shown += 1
            return self.buffer.copy_(torch.stack([self.count, torch.full((B,), self.n_shown)], 1))

    vec = Reusing("cpu", None)
    vec.lengths = torch.arange(1, 1 + B)
    env = TorchVectorEnv(vec, "cpu", missing_final="previous")
    env.reset()
    (reached, _), _ = env.step(DictTensor({"action": torch.zeros(B, dtype=torch.int64)}))
    # Row 0 ended: it shows the first observation, number 1. The step made two more, and the others show the last.
    assert reached["frame"].tolist() == [[0, 1], [1, 3], [1, 3], [1, 3]]


def test_a_batch_holds_true_final_observations() -> None:
    with RL_Batcher(
        9, RngAgent, lambda seed: TorchVectorEnv(Counters("sim:1"), "sim:1"), seed=0, device="sim:1"
    ) as batcher:
        batcher.reset()
        batcher.execute()
        with forbid_host_sync():
            batch = batcher.get()[0]
    frames = batch.steps["_observation/frame"].cpu()[:, :, 0]
    assert frames[0].tolist() == [1, 2, 3] * 3
    assert frames[1].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1]
