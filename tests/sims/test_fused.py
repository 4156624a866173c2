"""The network in the kernel is the agent's network: RL_Batcher collects the same with it as step by step."""

from __future__ import annotations

import importlib
import logging
import pathlib
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlstruct.agents import MLP, ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import Trajectories
from rlstruct.errors import ShapeMismatchError, WorkerError
from rlstruct.functional.categorical import log_probability
from rlstruct.functional.random import categorical
from rlstruct.rl_agent import RL_Agent_CheckDevice
from rlstruct.sims import CartPole, TensorEnv, make
from rlstruct.testing import forbid_host_sync

pytest.importorskip("warp", reason="needs the extra warp")
T, B = 24, 64


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def decided(n_inputs: int = 4, n_actions: int = 2, seed: int = 3, **settings: Any) -> ActorCritic:
    """A policy that is far from uniform, so that logits matter."""
    torch.manual_seed(seed)
    model = ActorCritic(n_inputs, n_actions, **settings)
    with torch.no_grad():
        for parameter in model.actor.parameters():
            parameter.normal_(0, 0.4)
    return model


def batcher_of(model: nn.Module, device: str = "cpu", *, graph: bool = True, **settings: Any) -> RL_Batcher:
    env_args = {"name": "CartPole-v1", "n_envs": B, "backend": "warp", "time_limit": 20, "device": device}
    env_args |= settings.pop("env_args", {})
    return RL_Batcher(
        T,
        settings.pop("create_agent", ActorCriticAgent),
        settings.pop("create_env", make),
        agent_args={"model": model, "device": device, **settings.pop("agent_args", {})},
        env_args=env_args,
        seed=5,
        device=device,
        graph=graph,
        **settings,
    )


def is_fused(batcher: RL_Batcher) -> bool:
    return batcher.stats().executors == ("kernel",)


def batch_of(batcher: RL_Batcher) -> Trajectories:
    batcher.execute()
    batch, _ = batcher.get()
    assert batch is not None
    return batch


def assert_same(got: Trajectories, expected: Trajectories) -> None:
    """Rounding flips a draw that lies within 1e-7 of a threshold, and changes all that follows in its row."""
    assert got.steps.keys() == expected.steps.keys()
    assert got.info.keys() == expected.info.keys()
    for key in got.info.keys():
        assert torch.equal(got.info[key], expected.info[key]), key
    same = (got.steps["action/action"] == expected.steps["action/action"]).all(1)  # [B]
    assert same.float().mean() > 0.98
    for key in got.steps.keys():
        a, b = got.steps[key][same], expected.steps[key][same]
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=key)


def check_decisions(batch: Trajectories, model: nn.Module) -> None:
    """Return the network's outputs for the frames that were seen, step by step, so that no divergence adds up."""
    steps = {key: value.flatten(0, 1) for key, value in batch.steps.items()}
    with torch.no_grad():
        logits, value = model(steps["observation/frame"])
    taken = steps["action/action"]
    torch.testing.assert_close(steps["action/action_logits"], logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(steps["action/log_probability"], log_probability(logits, taken), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(steps["action/value"], value, rtol=1e-4, atol=1e-4)
    assert (categorical(logits, steps["observation/rng"]) == taken).float().mean() > 0.999


@pytest.mark.parametrize("stochastic", [True, False])
def test_trajectories_are_those_of_single_steps(stochastic: bool, device: str) -> None:
    """Through resets, episodes that go on in the next batch, and new weights."""
    model, other = decided(), decided(seed=4)
    args = {"agent_args": {"stochastic": stochastic}}
    with batcher_of(model, device, **args) as fused, batcher_of(model, device, graph=False, **args) as single:
        for number in range(4):
            for batcher in (fused, single):
                if number in (0, 2):
                    batcher.reset()
                if number == 3:
                    batcher.update(other.state_dict())
            got, expected = batch_of(fused), batch_of(single)
            assert_same(got, expected)
            assert bool((got.info["policy_version"] == (number == 3)).all())
            ends = got.steps["_observation/done"].sum()
            assert ends > B // 2
        assert is_fused(fused)
        assert not is_fused(single)


def test_a_saved_state_goes_on_in_either_way(device: str) -> None:
    model = decided()
    with batcher_of(model, device) as fused, batcher_of(model, device, graph=False) as single:
        for batcher in (fused, single):
            batcher.reset()
            batch_of(batcher)
        saved = fused.state_dict()
        expected = batch_of(fused)
        for batcher in (fused, single):
            assert batcher.load_state_dict(saved)
            assert_same(batch_of(batcher), expected)


def test_a_batch_is_its_readers_own(device: str) -> None:
    model = decided()
    with batcher_of(model, device) as fused, batcher_of(model, device) as twin:
        for batcher in (fused, twin):
            batcher.reset()
        first = batch_of(fused)
        batch_of(twin)
        kept = first.steps.clone()
        second, expected = batch_of(fused), batch_of(twin)
        assert all(torch.equal(first.steps[key], kept[key]) for key in kept.keys())
        for value in second.steps.map(lambda tensor: tensor).values():
            value.zero_()
        assert_same(batch_of(fused), batch_of(twin))
        assert expected.steps["observation/frame"].any()


def test_a_rollout_waits_for_nothing(device: str) -> None:
    env, agent = make("CartPole-v1", 8, device=device, backend="warp"), ActorCriticAgent(decided().to(device))
    seen = dict(env.reset()[0].items())
    rollout = env.fused_rollout(agent.perceptron(), 4)
    keys = torch.zeros(5, 8, dtype=torch.int64, device=device)
    rollout(seen, keys, agent.perceptron())  # is compiled
    with forbid_host_sync():
        rollout(seen, keys, agent.perceptron())


def test_weights_are_read_anew(device: str) -> None:
    """Also those of a model that is shared and changed in place, or gets other layers."""
    model = decided().to(device)

    def create_agent(model: nn.Module, device: str, seed: int | None = None) -> ActorCriticAgent:
        return ActorCriticAgent(shared, device=device, copy_model=False)

    shared = model
    with batcher_of(model, device, create_agent=create_agent) as batcher:
        batcher.reset()
        check_decisions(batch_of(batcher), model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not batch_of(batcher).steps["action/action_logits"].any()
        model.actor = MLP(4, 2, hidden=(8,)).to(device)
        model.critic = MLP(4, 1, hidden=(8,)).to(device)
        check_decisions(batch_of(batcher), model)
        assert is_fused(batcher)


@pytest.mark.parametrize(
    ("name", "hidden", "activation"),
    [
        ("CartPole-v1", (30,), nn.Tanh),
        ("CartPole-v1", (30, 30), nn.ReLU),
        pytest.param("Acrobot-v1", (64, 64), nn.ReLU, marks=pytest.mark.exhaustive),
        pytest.param("MountainCar-v0", (8, 8, 8), nn.Tanh, marks=pytest.mark.exhaustive),
    ],
)
def test_other_games_and_networks(name: str, hidden: tuple[int, ...], activation: type[nn.Module], device: str) -> None:
    env = make(name, 1)
    n_inputs, n_actions = env.observation_space.shape[0], int(env.action_space.n)
    model = decided(n_inputs, n_actions, hidden=hidden)
    model.actor = MLP(n_inputs, n_actions, hidden=hidden, activation=activation)
    model.critic = MLP(n_inputs, 1, hidden=hidden, activation=activation)
    with batcher_of(model, device, env_args={"name": name}) as batcher:
        batcher.reset()
        for _ in range(2):
            check_decisions(batch_of(batcher), model.to(device))
        assert is_fused(batcher)


def test_the_kernel_multiplies_in_float32_only(caplog: pytest.LogCaptureFixture) -> None:
    """With TF32 products elsewhere, the kernel's actions would not be those of the network that learns."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with caplog.at_level(logging.INFO, "rlstruct"), batcher_of(decided()) as batcher:
            batcher.reset()
            batch_of(batcher)
            assert not is_fused(batcher)
            torch.set_float32_matmul_precision(before)
            batch_of(batcher)
            assert is_fused(batcher)
    finally:
        torch.set_float32_matmul_precision(before)
    assert "could run as one kernel, but torch.set_float32_matmul_precision" in caplog.text


class Loud(ActorCriticAgent):
    """Another agent, which promises purity too."""

    pure = True

    def choose(self, policy: Any, value: Any, observation: Any) -> Any:
        return super().choose(policy * 2, value, observation)


class Checked(CartPole):
    """Somebody looks at every step."""

    n_steps = 0

    def step(self, action: Any) -> Any:
        Checked.n_steps += 1
        return super().step(action)


def create_checked(model: nn.Module, device: str) -> RL_Agent_CheckDevice:
    return RL_Agent_CheckDevice(ActorCriticAgent(model, device=device), device)


def create_hooked(model: nn.Module, device: str) -> ActorCriticAgent:
    agent = ActorCriticAgent(model, device=device)
    agent.model.actor.register_forward_hook(lambda module, given, answer: answer * 3)
    return agent


def tripled(module: nn.Module, given: Any, answer: Any = None) -> Any:
    """A hook on all modules, of either kind, that changes what a linear layer gets or gives."""
    if type(module) is not nn.Linear:
        return None
    return (given[0] * 3,) if answer is None else answer * 3


@pytest.mark.parametrize("kind", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_on_all_modules_are_called(kind: str) -> None:
    with batcher_of(decided()) as batcher, batcher_of(decided(), graph=False) as single:
        for one in (batcher, single):
            one.reset()
        hook = getattr(torch.nn.modules.module, kind)(tripled)
        try:
            got, expected = batch_of(batcher), batch_of(single)
        finally:
            hook.remove()
        for key in expected.steps.keys():
            assert torch.equal(got.steps[key], expected.steps[key]), key
        assert not is_fused(batcher)
        batch_of(batcher)
        assert is_fused(batcher)


def create_checked_env(name: str, seed: int, **settings: Any) -> CartPole:
    return Checked(seed=seed, **settings)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (decided(hidden=(8, 16)), {}),
        (decided(hidden=()), {}),
        (decided().double(), {}),
        (decided(), {"create_agent": Loud}),
        (decided(), {"create_agent": create_checked}),
        (decided(), {"create_agent": create_hooked}),
        (decided(), {"create_env": create_checked_env}),
        (decided(), {"env_args": {"backend": "torch"}}),
        (decided(), {"env_args": {"auto_reset": False}}),
        (decided(), {"n_processes": 1}),
    ],
)
def test_whatever_does_not_fit_is_collected_step_by_step(model: nn.Module, settings: dict[str, Any]) -> None:
    with batcher_of(model, **settings) as batcher, batcher_of(model, graph=False, **settings) as single:
        for _ in range(2):
            for one in (batcher, single):
                one.reset()
            got, expected = batch_of(batcher), batch_of(single)
            for key in expected.steps.keys():
                assert torch.equal(got.steps[key], expected.steps[key]), key
        assert settings.get("n_processes") or not is_fused(batcher)


def test_wide_layers_are_refused_on_cuda_with_the_memory_that_they_would_reserve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048)  # an H100
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    env = make("CartPole-v1", 4, backend="warp")
    monkeypatch.setattr(type(env), "device", torch.device("cuda:0"))
    perceptron = ActorCriticAgent(decided(hidden=(256, 256))).perceptron()
    assert perceptron is not None
    with caplog.at_level(logging.INFO, "rlstruct.sims.kernels.fused"):
        assert env.fused_rollout(perceptron, 4) is None
    assert "width 256" in caplog.text
    assert "cuda:0 would reserve 0.83 GB" in caplog.text


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


def test_a_carry_of_another_number_of_environments_is_refused() -> None:
    made: list[TensorEnv] = []

    def create_env(**settings: Any) -> TensorEnv:
        made.append(make(**settings))
        return made[-1]

    with batcher_of(decided(), create_env=create_env) as batcher:
        batcher.reset()
        batch_of(batcher)
        other = make("CartPole-v1", 2)
        other.reset()
        made[-1].set_state_tensors(other.state_tensors())
        with pytest.raises(WorkerError, match="expected 4 fields") as caught:
            batch_of(batcher)
    assert isinstance(caught.value.__cause__, ShapeMismatchError)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("rlstruct.sims.kernels")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "warp", None)
    with pytest.raises(ImportError, match=r"pip install 'warp-lang>="):
        make("CartPole-v1", 2, backend="warp")


@pytest.mark.slow  # a compiler
def test_every_thread_loads_four_weights_at_once_and_spills_none(tmp_path: pathlib.Path) -> None:
    """Compiled for a GPU, where there need not be one."""
    import warp

    env, agent = make("CartPole-v1", 4, backend="warp"), ActorCriticAgent(decided())
    module = env.fused_rollout(agent.perceptron(), 3).launch.kernel.module
    warp.compile_aot_module(module, arch=90, module_dir=tmp_path / "ptx", use_ptx=True)
    (ptx,) = (tmp_path / "ptx").glob("*.ptx")
    code = ptx.read_text()
    wide, narrow = (len(re.findall(rf"ld\.global(?:\.nc)?{kind}", code)) for kind in (r"\.v4\.f32", r"\.f32"))
    assert wide >= 4, "weights are loaded by four: biases and weights of hidden layers and of the outputs"
    assert narrow <= 16, "only states are loaded one by one"


# Game, its actions, width and number of hidden layers: registers of a thread, of 255, and bytes of its stack.
KERNELS = {
    ("cart_pole", 2, 64, 2): (154, 256), ("cart_pole", 2, 32, 1): (84, 32), ("cart_pole", 2, 128, 2): (72, 1536),
    ("acrobot", 3, 64, 2): (182, 256), ("mountain_car", 3, 64, 2): (182, 288),
}  # fmt: skip


def test_the_kernel_of_every_game_is_looked_at() -> None:
    files = pathlib.Path(importlib.import_module("rlstruct.sims").__path__[0]).glob("*_kernel.py")
    assert {file.stem.removesuffix("_kernel") for file in files} == {name for name, *_ in KERNELS}


@pytest.mark.slow  # a compiler
@pytest.mark.parametrize("variant", KERNELS, ids=lambda variant: "-".join(map(str, variant)))
def test_a_thread_takes_no_more_registers_and_stack_than_it_did(variant: Any, tmp_path: pathlib.Path) -> None:
    from cubins import LOCAL_BYTES, REGISTERS, compiled

    from rlstruct.sims.kernels.advance import make_advance
    from rlstruct.sims.kernels.perceptron import make_perceptron

    name, *sizes = variant
    game = importlib.import_module(f"rlstruct.sims.{name}_kernel").KERNEL
    module = make_advance(game, *make_perceptron(game, *sizes, "Tanh")).module
    (needs,) = (need for need in compiled(module, tmp_path).values() if REGISTERS in need)
    most_registers, most_bytes = KERNELS[variant]
    assert 16 < needs[REGISTERS] <= most_registers
    assert needs[LOCAL_BYTES] <= most_bytes, "the stack holds more than the activations of a layer: registers spill"
