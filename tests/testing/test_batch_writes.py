"""forbid_batch_writes: every way to write to a batch is found, and reading, learning and copying are free."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_agents import RngAgent
from fake_envs import create_counting_env

from rlstruct import DictTensor, Trajectories, replay_agent
from rlstruct.batchers import RL_Batcher
from rlstruct.testing import BatchWriteError, forbid_batch_writes, forbid_host_sync


def collect(device: str = "cpu", n_processes: int = 0, auto_reset: bool = False) -> Trajectories:
    env_args = {"n_envs": 3, "auto_reset": auto_reset, "device": device if n_processes == 0 else "cpu"}
    with RL_Batcher(
        5, RngAgent, create_counting_env, env_args=env_args, n_processes=n_processes, seed=0, device=device
    ) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "a view": lambda x: x[0].add_(1),
    "an item": lambda x: x.__setitem__((0, 0), 1),
    "a mask": lambda x: x.__setitem__(x > 0, 0),
    "out": lambda x: torch.add(x, 1, out=x),
    "copy_": lambda x: x.copy_(x + 1),
    "a list": lambda x: torch._foreach_add_([torch.zeros(2), x], 1),
    "inference": lambda x: torch.inference_mode()(lambda: x.clamp_(0, 1))(),
    "no change": lambda x: x.mul_(1),
}


@pytest.mark.parametrize("how", WRITES)
def test_operators_that_write_are_found_where_they_are_called(how: str) -> None:
    batch = collect()
    before = batch.clone()
    where = rf"{re.escape(__file__)}:\d+: .*'observation/frame'"
    with pytest.raises(BatchWriteError, match=where), forbid_batch_writes(batch):
        WRITES[how](batch.steps["observation/frame"])
    for key in batch.steps.keys():
        assert torch.equal(batch.steps[key], before.steps[key]), key  # raised before it wrote


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_both_observations_are_named_where_they_are_one_tensor(device: str) -> None:
    batch = collect(device)
    both = "div_ writes to 'observation/reward' and '_observation/reward', one memory, of the batch"
    with pytest.raises(BatchWriteError, match=both), forbid_batch_writes(batch):
        batch.steps["observation/reward"].div_(2)


@pytest.mark.parametrize("n_processes", [0, 1])
def test_info_and_lengths_are_watched_too(n_processes: int) -> None:
    batch = collect(n_processes=n_processes)
    with pytest.raises(BatchWriteError, match="'step' of the batch"), forbid_batch_writes(batch):
        batch.info["step"].add_(1)
    with pytest.raises(BatchWriteError, match="'lengths' of the batch"), forbid_batch_writes(batch):
        batch.lengths.zero_()


def test_writes_past_torch_are_found_at_the_end() -> None:
    batch = collect()
    frame = batch.steps["_observation/frame"].numpy()
    with (
        pytest.raises(BatchWriteError, match=r"_observation/frame'.* changed.*numpy views"),
        forbid_batch_writes(batch),
    ):
        frame += 1


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_reading_learning_and_writing_elsewhere_are_free(device: str) -> None:
    batch = collect(device, auto_reset=True)
    frame = batch.steps["observation/frame"]
    weight = torch.zeros(frame.shape[-1], device=device, requires_grad=True)
    optimiser = torch.optim.Adam([weight])
    with forbid_batch_writes(batch):
        other = frame.clone().float().mul_(2)
        other[0] = 1
        (other @ weight).mean().backward()
        optimiser.step()
        replay_agent(RngAgent(), batch)
        with torch.inference_mode(), forbid_host_sync():
            frame.float().mul_(2)
    frame.mul_(2)  # outside nothing is watched


def test_other_structures_are_watched_and_numbers_that_are_nan_stay_equal() -> None:
    one, other = DictTensor({"x": torch.full((2,), torch.nan)}), DictTensor({"y": torch.zeros(2, 0)})
    with forbid_batch_writes(one, other):
        one["x"].add(1)
    with pytest.raises(BatchWriteError, match="'x' of the batch"), forbid_batch_writes(other, one):
        one["x"].zero_()
