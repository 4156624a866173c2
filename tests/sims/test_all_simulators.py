"""Requirements on every simulator of the registry: the contract, no host sync, one trajectory whatever the set-up."""

from __future__ import annotations

import io

import gymnasium
import pytest
import torch

from rlstruct import resolve_device
from rlstruct.agents import RandomAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.functional.random import randint, step_keys, uniform
from rlstruct.sims import TensorEnv, make, names
from rlstruct.testing import check_vec_env, forbid_host_sync

NAMES = [name for name in names() if name != "CartPole-v0"]  # that is CartPole-v1 with another limit


def actions(env: TensorEnv, n_steps: int, first: int = 0) -> TemporalDictTensor:
    """The same actions for environment ``first + b`` in every batch, [B, T]."""
    seeds = torch.arange(first, first + env.n_envs(), device=env.device)
    keys = step_keys(seeds, 9, torch.arange(n_steps, device=env.device)).t().contiguous()  # [B, T]
    space, flat = env.action_space, keys.flatten()
    if space.shape:
        low, high = float(space.low[0]), float(space.high[0])
        drawn = uniform(flat).mul(high - low).add(low).view(*keys.shape, *space.shape)
    else:
        drawn = randint(flat, int(space.n)).view(keys.shape)
    return TemporalDictTensor({"action": drawn})


def run(env: TensorEnv, plan: TemporalDictTensor) -> list[tuple[DictTensor, torch.Tensor]]:
    """Everything that the environment shows, step by step."""
    return [env.reset(), *run_on(env, plan)]


def run_on(env: TensorEnv, plan: TemporalDictTensor) -> list[tuple[DictTensor, torch.Tensor]]:
    """The same, without a reset."""
    return [shown for t in range(plan.n_steps()) for shown in env.step(plan.temporal_index(t))]


def assert_same(got, expected, rows: slice = slice(None), **tolerance: float) -> None:
    for (a, ran), (b, also) in zip(got, expected, strict=True):
        assert torch.equal(ran, also[rows])
        assert a.keys() == b.keys()
        for key in a.keys():
            if tolerance and a[key].is_floating_point():
                torch.testing.assert_close(a[key], b[key][rows], **tolerance)
            else:
                assert torch.equal(a[key], b[key][rows]), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"auto_reset": False}, {"time_limit": 7}], ids=["auto", "episodic", "limit"])
def test_keeps_the_contract(name: str, settings: dict) -> None:
    check_vec_env(lambda seed, **more: make(name, 4, seed, **more), env_args=settings, n_steps=25)


@pytest.mark.parametrize("name", NAMES)
def test_keeps_the_contract_on_a_strict_device(name: str) -> None:
    check_vec_env(lambda seed: make(name, 3, seed, device="sim:1", time_limit=6), n_steps=10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("auto_reset", [True, False])
def test_never_waits_for_the_device(name: str, auto_reset: bool) -> None:
    for device in ("cpu", "sim:1"):
        env = make(name, 3, device=device, auto_reset=auto_reset, time_limit=4)
        env.reset()
        plan = actions(env, 6)
        single = [plan.temporal_index(t) for t in range(6)]
        with forbid_host_sync():
            for action in single:
                env.step(action)


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_does_the_same_in_any_batch_and_on_any_device(name: str) -> None:
    whole = make(name, 12, seed=5, time_limit=20)
    plan = actions(whole, 30)
    expected = run(whole, plan)
    for first, n in ((0, 12), (0, 4), (4, 8)):
        some = make(name, n, seed=5 + first, time_limit=20)
        # Vectorised sine and cosine may round the last few rows of a batch differently from the others.
        assert_same(run(some, actions(some, 30, first)), expected, slice(first, first + n), rtol=1e-3, atol=1e-3)
    away = make(name, 12, seed=5, time_limit=20, device="sim:1")
    seen = [(a.to("cpu"), mask.to("cpu")) for a, mask in run(away, plan.to("sim:1"))]
    assert_same(seen, expected)


@pytest.mark.parametrize("name", NAMES)
def test_goes_on_from_a_saved_state_bit_by_bit_on_any_device(name: str) -> None:
    first = make(name, 5, seed=3, time_limit=9)
    plan = actions(first, 24)
    run(first, plan.temporal_slice(0, 7))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    others = [make(name, 5, seed=77, time_limit=9, device=device) for device in ("cpu", "sim:1")]
    for other in others:
        other.load_state_dict(state)
    for t in range(7, 24):
        expected = first.step(plan.temporal_index(t))
        for other in others:
            found = other.step(plan.temporal_index(t).to(other.device))
            assert_same([(a.to("cpu"), mask.to("cpu")) for a, mask in found], expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("n_envs", [1, 3, 33])
def test_what_was_saved_after_reset_is_loaded_after_steps(name: str, auto_reset: bool, n_envs: int) -> None:
    """Also saved before the first reset; the same actions give the same again."""
    env, other = (make(name, n_envs, auto_reset=auto_reset, time_limit=4, seed=7) for _ in range(2))
    plan = actions(env, 6)
    new = env.state_dict()
    env.reset()
    saved = env.state_dict()
    first = run_on(env, plan)
    other.reset()
    other.step(plan.temporal_index(0))
    for one in (env, other):
        one.load_state_dict(saved)
        assert_same(run_on(one, plan), first)
        one.load_state_dict(new)
        assert_same(run(one, plan)[1:], first)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_does_what_the_cpu_does(name: str) -> None:
    check_vec_env(lambda seed: make(name, 4, seed, device="cuda:0", time_limit=7), n_steps=20)
    here, there = (make(name, 64, seed=5, device=device, time_limit=50) for device in ("cpu", "cuda:0"))
    plan = actions(here, 60)
    on_gpu = plan.to("cuda:0")
    # Sine and cosine round otherwise; a double pendulum makes a million of it in a minute, so each step begins alike.
    here.reset()
    there.reset()
    for t in range(60):
        there.set_state_tensors({key: value.to("cuda:0") for key, value in here.state_tensors().items()})
        seen = [(a.to("cpu"), mask.cpu()) for a, mask in there.step(on_gpu.temporal_index(t))]
        assert_same(seen, here.step(plan.temporal_index(t)), rtol=1e-4, atol=1e-4)
    one_by_one = [on_gpu.temporal_index(t) for t in range(8)]
    with forbid_host_sync():
        for action in one_by_one:
            there.step(action)


def create_random_agent(space: gymnasium.Space, device: str) -> RandomAgent:
    return RandomAgent(space, device=device)


@pytest.mark.parametrize("device", ["sim:1", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_every_simulator_is_one_graph(name: str, device: str) -> None:
    agent_args = {"space": make(name, 1).action_space, "device": device}
    env_args = {"name": name, "n_envs": 2, "device": device, "time_limit": 5}
    with RL_Batcher(
        3, create_random_agent, make, agent_args=agent_args, env_args=env_args, seed=0, device=resolve_device(device)
    ) as batcher:
        batcher.reset()
        for _ in range(3):
            batcher.execute()  # a batch that cannot be captured warns, and warnings are errors in the tests
            batcher.get()
        assert batcher.stats().executors == ("graph",)
