"""Kernels do what the eager backend does: the same trajectories and carries, in single steps or many.

A kernel of a user's is compared in docs/kernels.md, which is run as a test too.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.random import child_key, randint, uniform
from rlstruct.sims import TensorEnv, make
from rlstruct.testing import check_vec_env, forbid_host_sync

pytest.importorskip("warp", reason="needs the extra warp")

DISCRETE = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Breakout-MinAtar"]
NAMES = [*DISCRETE, "Pendulum-v1", "MountainCarContinuous-v0"]
MODES = pytest.mark.parametrize(
    "settings", [{}, {"auto_reset": False}, {"time_limit": 7}], ids=["auto", "episodic", "limit"]
)
# Fused arithmetic rounds otherwise, and some tens of steps let 1e-7 grow; all else is exact.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def poison() -> Iterator[None]:
    """New memory holds NaN and the largest numbers: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def plan_for(env: TensorEnv, n_steps: int) -> TemporalDictTensor:
    """Actions for all environments, [B, K]."""
    key = child_key(torch.arange(env.n_envs() * n_steps), 1)
    space: Any = env.action_space
    drawn = uniform(key, space.shape).mul_(3).sub_(1.5) if space.shape else randint(key, int(space.n))
    return TemporalDictTensor({"action": drawn.view(env.n_envs(), n_steps, *space.shape).to(env.device)})


def assert_same(got: DictTensor, expected: DictTensor, **tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for key in got.keys():
        exact = not tolerance or not got[key].is_floating_point()
        assert got[key].dtype == expected[key].dtype
        torch.testing.assert_close(got[key], expected[key], **({"rtol": 0, "atol": 0} if exact else tolerance), msg=key)


def assert_same_carry(got: TensorEnv, expected: TensorEnv, **tolerance: float) -> None:
    ours, theirs = got.carry(), expected.carry()
    assert ours.keys() == theirs.keys()
    ours = {key: value for key, value in ours.items() if not key.startswith("pool/")}
    assert_same(DictTensor(ours), DictTensor({key: theirs[key] for key in ours}), **tolerance)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"])  # a number, a vector, a picture
@MODES
def test_keeps_the_contract(name: str, settings: dict, device: str) -> None:
    args = {"backend": "warp", "device": device, **settings}
    check_vec_env(lambda seed, **more: make(name, 4, seed, **more), env_args=args, n_steps=20)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", NAMES)
@MODES
def test_trajectories_are_those_of_the_eager_backend(name: str, settings: dict, device: str) -> None:
    kernel, eager = (make(name, 64, seed=3, device=device, backend=b, **settings) for b in ("warp", "torch"))
    plan = plan_for(eager, 40)
    assert_same(kernel.reset()[0], eager.reset()[0])
    for t in range(plan.n_steps()):
        for got, expected in zip(*(env.step(plan.temporal_index(t)) for env in (kernel, eager)), strict=True):
            assert_same(got[0], expected[0], **CLOSE)
            assert torch.equal(got[1], expected[1])
    assert_same_carry(kernel, eager, **CLOSE)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("auto_reset", "way"), [(True, "plan"), (False, "plan"), (True, "repeat"), (True, "explore"), (False, "explore")]
)
def test_many_steps_in_one_launch_equal_single_ones(name: str, auto_reset: bool, way: str, device: str) -> None:
    settings = {"seed": 1, "auto_reset": auto_reset, "time_limit": 9, "device": device}
    one, many, eager = (make(name, 16, backend=b, **settings) for b in ("warp", "warp", "torch"))
    for env in (one, many, eager):
        env.reset()
    for k in (1, 7, 5):  # launches of several sizes, which begin anywhere in an episode
        plan = plan_for(eager, k)
        sent = {"plan": plan, "repeat": plan.temporal_index(0), "explore": None}[way]
        (reached, ran), (current, running) = many.rollout(sent, k)
        (expected, _), (after, also) = eager.rollout(sent, k)
        assert_same(DictTensor(dict(reached.items())), DictTensor(dict(expected.items())), **CLOSE)
        assert_same(DictTensor(dict(current.items())), DictTensor(dict(after.items())), **CLOSE)
        assert torch.equal(running, also)
        for t in range(k):
            action = DictTensor({"action": reached["last_action"][:, t]}) if way == "explore" else None
            action = action or (plan.temporal_index(t) if way == "plan" else plan.temporal_index(0))
            (seen, ran_one), (next_seen, running_one) = one.step(action)
            assert_same(reached.temporal_index(t), seen)
            assert_same(current.temporal_index(t), next_seen)
            assert torch.equal(ran[:, t], ran_one)
            assert torch.equal(running[:, t], running_one)
        assert_same_carry(many, one)
        eager.set_carry({**eager.carry(), **many.carry()})  # rounding shall not add up


@pytest.mark.parametrize("n_envs", [1, 3, 33])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_a_plan_is_followed_for_any_number_of_environments(name: str, n_envs: int, device: str) -> None:
    env = make(name, n_envs, backend="warp", device=device)
    env.reset()
    plan = plan_for(env, 8)
    (reached, _), _ = env.rollout(plan)
    assert torch.equal(reached["last_action"], plan["action"])


def transitions(name: str, device: str, n_envs: int, n_steps: int) -> None:
    """Single transitions from the states that random play visits, each from exactly the same state."""
    kernel, eager = (make(name, n_envs, seed=5, device=device, backend=b) for b in ("warp", "torch"))
    eager.reset()
    kernel.reset()
    flips = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(n_steps):
        kernel.set_carry(eager.carry())
        action = DictTensor({"action": eager.rollout(None, 1)[0][0]["last_action"][:, 0]})
        eager.set_carry(kernel.carry())
        ((got, _), _), ((expected, _), _) = kernel.step(action), eager.step(action)
        # A pole may fall on one side of the bound here and on the other there: rounding decides.
        same = got["terminated"] == expected["terminated"]
        flips += (~same).sum()
        exact = name == "Breakout-MinAtar"
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-5, "atol": 2e-5}
        for key in ("frame", "reward", "truncated", "last_action"):
            torch.testing.assert_close(got[key][same], expected[key][same], **tolerance, msg=key)
    assert flips <= (0 if name == "Breakout-MinAtar" else n_envs * n_steps // 20_000)


@pytest.mark.parametrize("name", NAMES)
def test_single_transitions_equal_the_eager_ones(name: str, device: str) -> None:
    transitions(name, device, n_envs=1024, n_steps=12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_transitions_equal_the_eager_ones(name: str, device: str) -> None:
    transitions(name, device, n_envs=1024, n_steps=600)  # past the time limits


@pytest.mark.parametrize("name", ["CartPole-v1", "Breakout-MinAtar"])
def test_states_from_outside_are_taken(name: str, device: str) -> None:
    kernel, eager = (make(name, 8, seed=2, device=device, backend=b, time_limit=5) for b in ("warp", "torch"))
    plan = plan_for(eager, 12)
    states = make(name, 3, seed=99)
    states.reset()
    states.rollout(plan_for(states, 4))
    recorded = states.get_state()
    for env in (kernel, eager):
        env.reset()
        env.step(plan.temporal_index(0))
        env.set_state([1, 4, 6], recorded)
    for t in range(1, 6):
        for got, expected in zip(kernel.step(plan.temporal_index(t)), eager.step(plan.temporal_index(t)), strict=True):
            assert_same(got[0], expected[0], **CLOSE)
    for env in (kernel, eager):
        env.set_start_states(recorded)  # a cache of three
    for t in range(6, 12):
        for got, expected in zip(kernel.step(plan.temporal_index(t)), eager.step(plan.temporal_index(t)), strict=True):
            assert_same(got[0], expected[0], **CLOSE)
    assert_same_carry(kernel, eager, **CLOSE)
    for field in dataclasses.fields(recorded):
        got, expected = (getattr(env.get_state([2, 3]), field.name) for env in (kernel, eager))
        torch.testing.assert_close(got, expected, **CLOSE)


def test_a_carry_goes_from_backend_to_backend_and_never_changes() -> None:
    kernel, eager = (make("Breakout-MinAtar", 32, seed=4, backend=b) for b in ("warp", "torch"))
    plan = plan_for(eager, 30)
    kernel.reset()
    kernel.rollout(plan)
    carry = kernel.carry()
    copies = {key: value.clone() for key, value in carry.items()}
    eager.reset()
    eager.set_carry(carry)
    for t in range(20):
        for got, expected in zip(kernel.step(plan.temporal_index(t)), eager.step(plan.temporal_index(t)), strict=True):
            assert_same(got[0], expected[0])
    kernel.set_carry(eager.carry())
    assert_same(kernel.step(plan.temporal_index(20))[1][0], eager.step(plan.temporal_index(20))[1][0])
    assert_same(DictTensor(carry), DictTensor(copies))


def test_a_carry_of_another_number_of_environments_is_refused() -> None:
    env, other = (make("CartPole-v1", n, backend="warp") for n in (3, 2))
    env.reset()
    other.reset()
    env.set_carry(other.carry())
    with pytest.raises(ShapeMismatchError, match="that of 2 environments, expected 3"):
        env.step(DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))


@pytest.mark.parametrize("auto_reset", [True, False])
def test_never_waits_for_the_device(auto_reset: bool, device: str) -> None:
    env = make("CartPole-v1", 8, backend="warp", device=device, auto_reset=auto_reset, time_limit=3)
    plan = plan_for(env, 6)
    env.reset()
    single = [plan.temporal_index(t) for t in range(6)]
    with forbid_host_sync():
        for action in single:
            env.step(action)
        env.rollout(plan)
        env.rollout(None, n_steps=4)


@pytest.mark.gpu
def test_a_cuda_graph_of_steps_goes_on_where_it_stopped() -> None:
    env, plain = (make("CartPole-v1", 256, seed=1, backend="warp", device="cuda:0") for _ in range(2))
    plan = plan_for(env, 16)
    single = [plan.temporal_index(t) for t in range(16)]
    stream = torch.cuda.Stream()
    env.reset()
    plain.reset()
    held = {key: value.clone() for key, value in env.carry().items()}

    def steps() -> torch.Tensor:
        env.set_carry(held)
        frames = torch.stack([env.step(action)[0][0]["frame"] for action in single])
        for key, value in env.carry().items():
            held[key].copy_(value)
        return frames

    begun = {key: value.clone() for key, value in held.items()}
    with torch.cuda.stream(stream):
        steps()
    stream.synchronize()
    for key, value in begun.items():
        held[key].copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        frames = steps()
    for _ in range(3):
        graph.replay()
        expected = torch.stack([plain.step(action)[0][0]["frame"] for action in single])
        assert torch.equal(frames, expected)


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES[1:])])
def test_kernels_compile_for_a_gpu_where_there_is_none(name: str, tmp_path: pathlib.Path) -> None:
    import warp

    launch = make(name, 2, backend="warp")._stepper._launch
    warp.compile_aot_module(launch.kernel.module, arch=90, module_dir=tmp_path, use_ptx=False)
    (code,) = tmp_path.glob("*.sm90.cubin")
    assert code.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "settings", "error", "words"),
    [
        ("ConnectFour-v0", {}, ValueError, "Override ConnectFour.kernel"),
        ("CartPole-v1", {"dtype": torch.float64}, ShapeMismatchError, "dtype=torch.float32"),
        ("CartPole-v1", {"device": "meta"}, ValueError, "meta"),
    ],
)
def test_what_kernels_cannot_do_is_said(name: str, settings: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(name, 2, backend="warp", **settings)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("rlstruct.sims.kernels")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "warp", None)
    with pytest.raises(ImportError, match=r"pip install 'warp-lang>="):
        make("CartPole-v1", 2, backend="warp")
