"""MujocoWarpEnv: a cart and pole on Warp's CPU, compared with MuJoCo itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor
from rlstruct.adapters import MujocoWarpEnv
from rlstruct.functional.random import uniform
from rlstruct.testing import check_vec_env

mujoco = pytest.importorskip("mujoco")
mujoco_warp = pytest.importorskip("mujoco_warp", exc_type=ImportError)
XML = """
<mujoco><option timestep="0.01"><flag contact="disable"/></option><worldbody>
  <body><joint name="slider" type="slide" axis="1 0 0"/><geom type="box" size="0.2 0.1 0.1" mass="1"/>
    <body><joint name="hinge" type="hinge" axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 0 0 1" size="0.05" mass="0.1"/></body></body></worldbody>
  <actuator><motor joint="slider" gear="10" ctrllimited="true" ctrlrange="-1 1"/></actuator></mujoco>
"""


class Balance:
    """Keeping the pole up: reward 1 for each step, the end where it leans by more than 0.2."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,))

    def start(self, key: Tensor, qpos: Tensor, qvel: Tensor) -> tuple[Tensor, Tensor]:
        noise = uniform(key, (4,)) * 0.1 - 0.05
        return qpos + noise[:, :2], qvel + noise[:, 2:]

    def observe(self, qpos: Tensor, qvel: Tensor) -> Tensor:
        return torch.cat([qpos, qvel], dim=1)

    def reward_and_terminated(self, qpos: Tensor, qvel: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(qpos[:, 0]), qpos[:, 1].abs() > 0.2


def make(n_envs: int = 4, seed: int = 0, device: str = "cpu") -> MujocoWarpEnv:
    return MujocoWarpEnv(mujoco.MjModel.from_xml_string(XML), Balance(), n_envs, seed, time_limit=40, device=device)


# The first step compiles MuJoCo's kernels, which takes minutes.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.exhaustive),
        pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
def test_worlds_move_as_mujocos_do_and_keep_the_contract(device: str) -> None:
    check_vec_env(make, n_steps=60, env_args={"device": device})
    env = make(device=device)
    env.reset()
    model = mujoco.MjModel.from_xml_string(XML)
    alone = mujoco.MjData(model)
    n_terminated = n_truncated = 0
    for t in range(120):
        state = env.state_dict()
        alone.qpos[:], alone.qvel[:] = state["qpos"][1].cpu().double().numpy(), state["qvel"][1].cpu().double().numpy()
        alone.ctrl[:] = math.sin(t)
        elapsed = state["elapsed"]
        mujoco.mj_step(model, alone)
        action = torch.full((4, 1), math.sin(t), device=device)
        (reached, _), (current, _) = env.step(DictTensor({"action": action}))
        expected = np.concatenate([alone.qpos, alone.qvel])
        np.testing.assert_allclose(reached["frame"][1].cpu().numpy(), expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(reached["terminated"], reached["frame"][:, 1].abs() > 0.2)
        assert torch.equal(reached["truncated"], (elapsed + 1 >= 40) & ~reached["terminated"])
        assert bool((current["frame"][reached["done"]].abs() <= 0.05).all()), "a new episode starts near the middle"
        n_terminated += int(reached["terminated"].sum())
        n_truncated += int(reached["truncated"].sum())
    assert n_terminated + n_truncated > 4


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_saved_worlds_go_on_and_actions_are_clipped() -> None:
    first, second = make(), make(seed=9)
    first.reset()
    push = DictTensor({"action": torch.ones(4, 1)})
    for _ in range(15):
        first.step(push)
    second.load_state_dict(first.state_dict())
    too_much = DictTensor({"action": torch.full((4, 1), 5.0)})
    for _ in range(30):
        (expected, _), _ = first.step(push)
        (reached, _), _ = second.step(too_much)
        assert torch.equal(reached["frame"], expected["frame"])
        assert torch.equal(reached["done"], expected["done"])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_wait_for_torchs_stream_and_torch_for_warp() -> None:
    plain, late = make(64, device="cuda:0"), make(64, device="cuda:0")
    plain.reset()
    late.reset()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for t in range(60):
        push = torch.full((64, 1), math.sin(t), device="cuda:0")
        (expected, _), _ = plain.step(DictTensor({"action": push}))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            action = torch.zeros(64, 1, device="cuda:0")
            torch.cuda._sleep(2_000_000)  # a millisecond: whoever does not wait for it reads zeros
            action.copy_(push)
            (reached, _), _ = late.step(DictTensor({"action": action}))
            frame = reached["frame"].cpu()
        assert torch.equal(frame, expected["frame"].cpu())


class Moving(Balance):
    """Pays the cart's speed, in the simulator's memory; every step ends an episode."""

    def start(self, key: Tensor, qpos: Tensor, qvel: Tensor) -> tuple[Tensor, Tensor]:
        return qpos.clone(), qvel + 5.0

    def reward_and_terminated(self, qpos: Tensor, qvel: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return qvel[:, 0], qvel[:, 0] > 0


def test_a_reward_is_of_the_state_before_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mujoco_warp, "step", lambda model, data: None)  # the worlds stand still
    env = MujocoWarpEnv(mujoco.MjModel.from_xml_string(XML), Moving(), 2)
    env.reset()
    env.load_state_dict({**env.state_dict(), "qvel": torch.full((2, 2), 3.0)})
    (reached, _), (current, _) = env.step(DictTensor({"action": torch.zeros(2, 1)}))
    assert reached["reward"].tolist() == [3.0, 3.0]
    assert current["frame"][:, 2].tolist() == [5.0, 5.0]


def test_mistakes_are_explained() -> None:
    model = mujoco.MjModel.from_xml_string(XML)
    with pytest.raises(RuntimeError, match=r"MujocoWarpEnv\.step: .*Call reset\(\) first"):
        make().step(DictTensor({"action": torch.zeros(4, 1)}))
    with pytest.raises(ValueError, match=r"'qpos' is .*expected .*Make the same worlds"):
        make().load_state_dict(make(1).state_dict())
    with pytest.raises(ValueError, match="frame_skip=0"):
        MujocoWarpEnv(model, Balance(), 2, frame_skip=0)
