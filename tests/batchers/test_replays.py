"""A batch that is captured once and replayed: the same trajectories as single steps, and nothing frozen in silence."""

from __future__ import annotations

import gc
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor, RL_Agent, Trajectories, resolve_device
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    RandomAgent,
    RecurrentActorCritic,
    RecurrentAgent,
    StackingAgent,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.rollout_buffer import RolloutBuffer
from rlstruct.envs import GymEnv
from rlstruct.functional.random import randint, uniform
from rlstruct.profiling import profile, read
from rlstruct.sims import CartPole, make, names
from rlstruct.testing import forbid_host_sync

T, B = 12, 6
DEVICES = ["sim:1", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(resolve_device(request.param))


class Captures:
    """Counts captures on the simulated accelerator and on CUDA, and replays."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def counting(self, capture: Any) -> Any:
        def counted(work: Any) -> Any:
            replay = capture(work)
            self.captured += 1

            def counted() -> None:
                self.replayed += 1
                replay()

            return counted

        return counted


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    from rlstruct.engine import graph as graph_module

    counts = Captures()
    if simulated := sys.modules.get("rlstruct.testing.sim_device"):  # kept out of processes that work on CUDA
        monkeypatch.setattr(simulated, "capture", counts.counting(simulated.capture))
    monkeypatch.setattr(graph_module, "capture_cuda", counts.counting(graph_module.capture_cuda))
    return counts


def test_beside_a_captured_batch_there_is_no_slab_that_nothing_is_written_to(device: str, captures: Captures) -> None:
    agents = {"model": ActorCritic(4, 2), "device": device}
    env_args = {"name": "CartPole-v1", "n_envs": B, "device": device}
    others = [one for one in gc.get_objects() if type(one) is RolloutBuffer]  # tests before this one may have left some
    with RL_Batcher(T, ActorCriticAgent, make, agent_args=agents, env_args=env_args, seed=0, device=device) as batcher:
        batcher.reset()
        for n_captured in (0, 1, 1):
            batcher.execute()
            batcher.get()
            gc.collect()
            assert captures.captured == n_captured
            buffers = [one for one in gc.get_objects() if type(one) is RolloutBuffer]
            assert not [one for one in buffers if not any(one is other for other in others)]


class OneAtATime(CartPole):
    """Shows what an agent that stacks wants to see: [B, 1, 4]."""

    observation_space = spaces.Box(-np.inf, np.inf, (1, 4), np.float32)

    def observe(self, state: Any) -> Tensor:
        return super().observe(state).unsqueeze(1)


def create_env(device: str, seed: int, name: str = "CartPole-v1", auto_reset: bool = True) -> Any:
    if name == "one at a time":
        return OneAtATime(B, seed, device=device, auto_reset=auto_reset)
    return make(name, n_envs=B, seed=seed, device=device, auto_reset=auto_reset)


def actor_critic(device: str, kind: str = "perceptron") -> RL_Agent:
    torch.manual_seed(0)
    if kind == "recurrent":
        return RecurrentAgent(RecurrentActorCritic(4, 2), device=device)
    if kind == "stacking":
        settings = {"shape": (4, 4), "dtype": torch.float32, "device": device}
        return StackingAgent.create(ActorCritic(16, 2), create_agent=ActorCriticAgent, **settings)
    return ActorCriticAgent(ActorCritic(4, 2), device=device)


def batcher_on(device: str, create_agent: Any, graph: bool = True, **env_args: Any) -> RL_Batcher:
    return RL_Batcher(
        T,
        create_agent,
        create_env,
        agent_args={"device": device},
        env_args={"device": device, **env_args},
        seed=3,
        device=device,
        graph=graph,
    )


def next_batch(batcher: RL_Batcher, agent_info: DictTensor | None = None) -> Trajectories:
    batcher.execute(agent_info)
    batch = batcher.get()[0]
    assert batch is not None
    return batch


def same(one: Trajectories, other: Trajectories, tolerance: float = 1e-5) -> None:
    assert torch.equal(one.lengths.cpu(), other.lengths.cpu())
    for mine, yours in ((one.info, other.info), (one.steps, other.steps)):
        assert set(mine.keys()) == set(yours.keys())
        for key, value in mine.items():
            torch.testing.assert_close(
                value.cpu(), yours[key].cpu(), rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize(
    ("kind", "auto_reset", "name"),
    [
        ("perceptron", True, "CartPole-v1"),
        ("recurrent", True, "CartPole-v1"),
        ("perceptron", False, "CartPole-v1"),
        ("stacking", True, "one at a time"),
    ],
)
def test_replays_give_what_single_steps_give(
    device: str, captures: Captures, kind: str, auto_reset: bool, name: str
) -> None:
    def run(where: str, graph: bool) -> list[Trajectories]:
        settings = {"auto_reset": auto_reset, "name": name}
        with batcher_on(where, lambda device: actor_critic(device, kind), graph, **settings) as batcher:
            found = []
            for n_batches in (3, 2):  # the second reset meets a capture
                batcher.reset()
                found += [next_batch(batcher) for _ in range(n_batches)]
            return found

    replayed, stepped, on_cpu = run(device, True), run(device, False), run("cpu", True)
    assert (captures.captured, captures.replayed) == (1, 4)  # the first batch is taken step by step
    for one, other, third in zip(replayed, stepped, on_cpu, strict=True):
        same(one, other)
        same(one, third, 1e-3)  # a falling pole makes what a GPU rounds otherwise a hundred times larger in a second
    drawn = torch.cat([batch.steps["observation/rng"][:, 0].cpu() for batch in replayed])
    assert len(drawn.unique()) == drawn.numel()  # no replay draws again what another drew


def test_a_profile_and_the_statistics_see_captures_and_replays(
    device: str, captures: Captures, tmp_path: pathlib.Path
) -> None:
    with profile(tmp_path, window=600), batcher_on(device, actor_critic) as batcher:
        batcher.reset()
        for _ in range(4):
            next_batch(batcher)
        stats = batcher.stats()
    assert (captures.captured, captures.replayed) == (1, 3)
    (process,) = read(tmp_path).processes
    (seconds,) = stats.workers
    for name in ("graph", "agent", "environment", "copy"):
        assert process.inclusive(name, corrected=False) == pytest.approx(seconds[name], rel=0.01), name
    rows = {row.path: row.count for row in process.rows}
    assert rows["graph",] == 4  # three batches; the first of them once more, after its steps were captured
    assert rows["environment", "simulator"] == 2 * T  # one batch in single steps, one captured
    assert rows["agent",] == 2 * T + 3  # and its first state, its first answer, and a look at the first batch


@pytest.mark.parametrize("name", names())
def test_every_simulator_replays_what_single_steps_give(device: str, captures: Captures, name: str) -> None:
    space = make(name, n_envs=1).action_space

    def run(graph: bool) -> list[Trajectories]:
        def create_agent(device: str) -> RL_Agent:
            return RandomAgent(space, device=device)

        arguments = {"agent_args": {"device": device}, "env_args": {"device": device, "name": name}}
        with RL_Batcher(3, create_agent, create_env, **arguments, seed=3, device=device, graph=graph) as batcher:
            batcher.reset()
            return [next_batch(batcher) for _ in range(3)]

    for one, other in zip(run(True), run(False), strict=True):
        same(one, other)
    assert (captures.captured, captures.replayed) == (1, 2)


def test_what_was_handed_over_never_changes(device: str) -> None:
    with batcher_on(device, actor_critic) as batcher:
        batcher.reset()
        batches = [next_batch(batcher) for _ in range(3)]
        before = [{k: v.cpu().clone() for k, v in batch.steps.items()} for batch in batches]
        for batch in (next_batch(batcher), next_batch(batcher)):
            for value in batch.steps.values():
                value.zero_()  # the learner may write to its own batch
        after = next_batch(batcher)
    for batch, values in zip(batches, before, strict=True):
        for key, value in values.items():
            assert torch.equal(batch.steps[key].cpu(), value), key
    assert after.steps["observation/frame"].abs().sum() > 0


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_batch_that_is_not_copied_stays_until_the_next_one(device: str, auto_reset: bool) -> None:
    def collect(reuse: bool) -> list[Trajectories]:
        with batcher_on(device, actor_critic, auto_reset=auto_reset) as batcher:
            batches, clones = [], []
            for i in range(4):
                if i % 2 == 0:  # all episodes end within two batches
                    batcher.reset()
                batcher.execute()
                batches.append(batcher.get(reuse=reuse)[0])
                clones.append(batches[-1].clone())
        one, other = (batch.steps["observation/frame"] for batch in batches[2:])
        shared = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        # Episodes that have ended leave gaps in the rows, which only a copy can close.
        assert shared == (reuse and len(one) == len(other) == B)
        same(batches[0], clones[0], 0.0)  # collected step by step: it is the caller's own either way
        same(batches[3], clones[3], 0.0)
        return clones

    for one, other in zip(collect(reuse=True), collect(reuse=False), strict=True):
        same(one, other, 0.0)


class ScaleAgent(RL_Agent):
    """Shows its weight and its agent_info; how it stores new weights is a choice."""

    pure = True
    agent_info_on_device = True

    def __init__(self, device: str, in_place: bool = True) -> None:
        self.weight = torch.zeros((), device=device)
        self.in_place = in_place

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        drawn = randint(observation["rng"], 2)
        shown = {f"seen/{key}": value.clone() for key, value in agent_info.items()}
        return DictTensor({"action": drawn, "weight": self.weight.expand(drawn.shape).clone(), **shown}), state

    def update(self, info: Mapping[str, Tensor]) -> None:
        if self.in_place:
            self.weight.copy_(info["weight"])
        else:
            self.weight = info["weight"].to(self.weight.device).clone()


@pytest.mark.parametrize("in_place", [True, False])
def test_an_update_is_seen_by_the_next_replay(device: str, captures: Captures, in_place: bool) -> None:
    with batcher_on(device, lambda device: ScaleAgent(device, in_place)) as batcher:
        batcher.reset()
        for version in range(4):
            weight = torch.tensor(float(version))
            batcher.update({"weight": weight})
            weight.fill_(-1.0)  # the caller's own again
            batch = next_batch(batcher)
            assert batch.steps["action/weight"].unique().tolist() == [version]
            assert batch.info["policy_version"].unique().tolist() == [version + 1]
    # A tensor in another place needs another capture, after a batch of single steps.
    assert (captures.captured, captures.replayed) == ((1, 3) if in_place else (0, 0))


def test_agent_info_on_the_device_changes_without_a_new_capture(device: str, captures: Captures) -> None:
    with batcher_on(device, ScaleAgent) as batcher:
        batcher.reset(agent_info=DictTensor({"epsilon": torch.tensor([0.5])}))
        for epsilon in (None, 0.25, 0.125):
            info = None if epsilon is None else DictTensor({"epsilon": torch.tensor([epsilon])})
            batch = next_batch(batcher, info)
            assert batch.steps["action/seen/epsilon"].unique().tolist() == [epsilon or 0.5]
            assert batch.info["agent_info/epsilon"].unique().tolist() == [epsilon or 0.5]
    assert (captures.captured, captures.replayed) == (1, 2)


class HostInfoAgent(ScaleAgent):
    """Leaves agent_info on the CPU, and lets Python decide by it."""

    pure = True
    agent_info_on_device = False

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        drawn = randint(observation["rng"], 2)
        flag = "greedy" in agent_info
        return DictTensor({"action": torch.zeros_like(drawn) if flag else drawn}), state


def test_agent_info_on_the_cpu_is_never_frozen(
    device: str, captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with batcher_on(device, HostInfoAgent) as batcher:
        batcher.reset()
        for _ in range(3):
            assert next_batch(batcher).steps["action/action"].sum() > 0
        for _ in range(2):
            greedy = next_batch(batcher, DictTensor({"greedy": torch.ones(1)}))
            assert greedy.steps["action/action"].sum() == 0
        for _ in range(2):
            assert next_batch(batcher, DictTensor()).steps["action/action"].sum() > 0
    assert (captures.captured, captures.replayed) == (1, 4)
    assert [record.message for record in caplog.records if "agent_info_on_device = True" in record.message]


SCALE = 1.0


class GlobalAgent(ScaleAgent):
    """Reads a global, and does not promise anything."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        drawn = randint(observation["rng"], 2)
        return DictTensor({"action": drawn, "scale": torch.full(drawn.shape, SCALE, device=drawn.device)}), state


def test_an_agent_that_promises_nothing_is_never_frozen(
    device: str, captures: Captures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with batcher_on(device, GlobalAgent) as batcher:
        batcher.reset()
        for scale in (1.0, 1.0, 100.0):
            monkeypatch.setattr(sys.modules[__name__], "SCALE", scale)
            assert next_batch(batcher).steps["action/scale"].unique().tolist() == [scale]
    assert captures.captured == 0
    (record,) = [record for record in caplog.records if "could run as one graph" in record.message]
    assert "set `pure = True`" in record.message


class AskingAgent(ScaleAgent):
    pure = True

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        if bool((observation["frame"] > 1e9).any()):
            raise AssertionError("no frame is as large")
        return super().__call__(state, observation, agent_info)


class MovedInfoAgent(HostInfoAgent):
    pure = True

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        epsilon = torch.full((B,), 0.5).to(observation.device)
        return DictTensor({"action": (uniform(observation["rng"]) < epsilon).long()}), state


class HostNumberAgent(HostInfoAgent):
    """Waits for nothing, and yet every replay would copy what the host held during capture."""

    pure = True

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        epsilon = torch.full((B,), 0.5).to(observation.device, non_blocking=True)
        return DictTensor({"action": (uniform(observation["rng"]) < epsilon).long()}), state


class BelowAutogradAgent(HostInfoAgent):
    """The same where nothing takes ``.to`` apart into what it does."""

    pure = True

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            epsilon = torch.full((B,), 0.5).to(observation.device, non_blocking=True)
            return DictTensor({"action": (uniform(observation["rng"]) < epsilon).long()}), state


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AskingAgent, r"(_local_scalar_dense|aten\.).*test_replays\.py"),
        (MovedInfoAgent, r"_to_copy.*test_replays\.py"),
        (HostNumberAgent, r"_to_copy.*test_replays\.py:\d+: copying from cpu to (sim|cuda).* needs the host"),
        (BelowAutogradAgent, r"_to_copy.*test_replays\.py:\d+: copying from cpu to (sim|cuda).* needs the host"),
    ],
)
def test_what_would_freeze_is_named_once_and_steps_go_on(device: str, kind: Any, words: str) -> None:
    with batcher_on(device, kind) as batcher, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batcher.reset()
        frames = [next_batch(batcher).steps["observation/frame"].cpu() for _ in range(4)]
    (warning,) = caught
    assert "cannot be captured as one graph" in str(warning.message)
    assert re.search(words, str(warning.message)), str(warning.message)
    with batcher_on("cpu", kind) as batcher:
        batcher.reset()
        for frame in frames:
            expected = next_batch(batcher).steps["observation/frame"]
            torch.testing.assert_close(frame, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "name"), [("perceptron", "CartPole-v1"), ("stacking", "one at a time")])
def test_collecting_and_getting_wait_for_nothing(device: str, kind: str, name: str) -> None:
    with batcher_on(device, lambda device: actor_critic(device, kind), name=name) as batcher:
        batcher.reset()
        next_batch(batcher)
        next_batch(batcher)
        with forbid_host_sync():  # sets torch.cuda.set_sync_debug_mode("error") as well
            next_batch(batcher)


@pytest.mark.parametrize(("kind", "name"), [("perceptron", "CartPole-v1"), ("stacking", "one at a time")])
def test_single_steps_wait_for_nothing_and_copy_nothing(device: str, kind: str, name: str) -> None:
    with batcher_on(device, lambda device: actor_critic(device, kind), graph=False, name=name) as batcher:
        batcher.reset()
        first = next_batch(batcher)
        with forbid_host_sync():
            second = next_batch(batcher)
        frames = second.steps["observation/frame"]
        assert frames.transpose(0, 1).is_contiguous()  # the memory that the steps were written to, time first
        assert frames.untyped_storage().data_ptr() != first.steps["observation/frame"].untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", ["gymnasium", "simulator"])
def test_a_learner_that_writes_to_its_batch_changes_nothing_else(kind: str) -> None:
    def create(n_envs: int, seed: int) -> Any:
        if kind == "simulator":
            return make("CartPole-v1", n_envs=n_envs, seed=seed)
        return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)

    found = []
    for writes in (False, True):
        with RL_Batcher(8, ScaleAgent, create, agent_args={"device": "cpu"}, env_args={"n_envs": 8}, seed=0) as batcher:
            for i in range(4):
                if i % 2 == 0:  # in the second batch some begin to idle, and repeat their last observation
                    batcher.reset()
                batch = next_batch(batcher)
                found.append(batch.steps["observation/frame"].clone())
                for value in batch.steps.values() if writes else ():
                    value.zero_()
    assert all(torch.equal(one, other) for one, other in zip(found[:4], found[4:], strict=True))
