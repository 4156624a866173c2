"""An exported file does what the policy does, in a rollout, and one that does not is not kept."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from rollouts import check_exported, onnx_file
from torch import Tensor, nn
from trainings import PARTS, TASKS, Parts, PartsAgent, PartsNetwork

import rlstruct
from rlstruct import DictTensor, Policy
from rlstruct.agents import (
    MLP,
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalActorCritic,
    GaussianActorCritic,
    Normalised,
    QNetwork,
    RecurrentActorCritic,
)
from rlstruct.core import TensorSpec
from rlstruct.policies.exporting import compare, exported

FRAME = {"frame": TensorSpec((4,), torch.float32)}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in TASKS if name not in ("actor-critic", "recurrent")]
ONNX = ["onnx", "onnxscript", "onnxruntime"]


@pytest.mark.parametrize("name", ["actor-critic", "recurrent", *OTHERS])
def test_torch_export(name: str, tmp_path: Path) -> None:
    policy = rlstruct.load(TASKS[name].train(tmp_path), stochastic=False)
    file = tmp_path / "policy.pt2"
    assert rlstruct.export(policy, file) < 1e-5
    assert [one.name for one in tmp_path.glob("policy*")] == ["policy.pt2"]
    check_exported(torch.export.load(file).module(), policy)


def test_integers_are_sampled_within_the_bounds_of_their_space(tmp_path: Path) -> None:
    """A network with an embedding, whose checkpoint holds the bounds of what it sees."""
    with pytest.warns(UserWarning, match="PartsNetwork"):
        run = PARTS.train(tmp_path)
    factories: dict[str, Any] = {"create_model": PARTS.create_model, "create_agent": PARTS.create_agent}
    policy = rlstruct.load(run, **factories, stochastic=False)
    assert policy.bounds == {"frame/place": (0, 4), "frame/sight/far": (0, 1)}
    assert rlstruct.export(policy, tmp_path / "policy.pt2") < 1e-5

    network, agent, space = PartsNetwork(), PARTS.create_agent, Parts.observation_space
    by_space = Policy(network, agent, space)
    assert (by_space.specs, by_space.bounds) == (policy.specs, policy.bounds)
    assert rlstruct.export(by_space, tmp_path / "policy.pt2") < 1e-5
    with pytest.raises(RuntimeError, match=r"with integers from 0 to 9: index out of range.* env\.observation_space\)"):
        rlstruct.export(Policy(network, agent, policy.specs), tmp_path / "policy.pt2")


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(3, start=-1), {-1, 0, 1}),
        (spaces.Discrete(2, start=2**40), {2**40, 2**40 + 1}),
        (spaces.Box(0, 255, (), np.uint8), set(range(256))),
        (spaces.Box(-(2**63), 2**63 - 1, (), np.int64), set(range(-100, 156))),
    ],
    ids=str,
)
def test_sampled_integers(space: spaces.Space[Any], expected: set[int]) -> None:
    original = exported(Policy(nn.Linear(1, 2), ActorCriticAgent, space))
    drawn = original.sample(20_000, torch.Generator().manual_seed(0))["frame"]
    assert set(drawn.tolist()) == expected


def test_bounds_may_differ_within_a_part() -> None:
    original = exported(Policy(nn.Linear(1, 2), ActorCriticAgent, spaces.MultiDiscrete([2, 5], start=[7, 0])))
    drawn = original.sample(1000, torch.Generator().manual_seed(0))["frame"]
    assert [set(column.tolist()) for column in drawn.T] == [{7, 8}, {0, 1, 2, 3, 4}]


@pytest.mark.parametrize(
    "name", ["recurrent", *(pytest.param(name, marks=pytest.mark.slow) for name in ("actor-critic", "parts")), *OTHERS]
)
def test_onnx(name: str, tmp_path: Path) -> None:
    for package in ONNX:
        onnxruntime = pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[onnx]'")

    task = PARTS if name == "parts" else TASKS[name]
    factories: dict[str, Any] = {"create_model": task.create_model, "create_agent": task.create_agent}
    with pytest.warns(UserWarning, match="PartsNetwork") if name == "parts" else contextlib.nullcontext():
        run = task.train(tmp_path)
    policy = rlstruct.load(run, **(factories if name == "parts" else {}), stochastic=False)
    file = tmp_path / "policy.onnx"
    assert rlstruct.export(policy, file) < 1e-4
    check_exported(onnx_file(file), policy)
    inputs = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).get_inputs()
    assert {one.shape[0] for one in inputs} == {"batch"}


class Masked(nn.Module):
    """A policy of which every fourth frame allows no action."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ActorCritic(4, 2)

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = self.network(frame)
        return logits.masked_fill(frame[:, :2] > 0.0, -torch.inf), value


@pytest.mark.parametrize("name", ["policy.pt2", pytest.param("policy.onnx", marks=pytest.mark.slow)])
def test_masks_are_exported(name: str, tmp_path: Path) -> None:
    for package in ONNX if name.endswith("onnx") else ():
        pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[onnx]'")
    policy = Policy(Masked(), ActorCriticAgent, FRAME)
    assert rlstruct.export(policy, tmp_path / name) < 1e-4
    original = exported(policy)

    def unmasked(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**original(inputs), "action_logits": policy.model.network(inputs["frame"])[0]}

    with torch.no_grad(), pytest.raises(RuntimeError, match="'action_logits' differs in"):
        compare(original, unmasked)
    with torch.no_grad(), pytest.raises(RuntimeError, match="'action' differs in"):
        compare(original, lambda inputs: {**(found := original(inputs)), "action": 1 - found["action"]})


def test_an_onnx_file_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    policy = Policy(ActorCritic(4, 2), ActorCriticAgent, FRAME)
    with pytest.raises(ImportError, match=r"an .onnx file needs onnx.*pip install"):
        rlstruct.export(policy, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_is_read_without_the_library(tmp_path: Path) -> None:
    policy = Policy(ActorCritic(4, 2), ActorCriticAgent, FRAME)
    rlstruct.export(policy, tmp_path / "policy.pt2")
    frame = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    code = (
        "import sys, torch, numpy\nprogram = torch.export.load('policy.pt2').module()\n"
        f"frame = torch.tensor({frame.tolist()})\nprint(program({{'frame': frame}})['action'].tolist())\n"
        "assert 'rlstruct' not in sys.modules"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(policy.act(frame).tolist())


class Dishonest(ActorCriticAgent):
    """Adds a number that depends on how often it was asked: what was traced is not what comes next."""

    calls = 0

    def __call__(self, *given: Any) -> tuple[DictTensor, DictTensor]:
        action, state = super().__call__(*given)
        self.calls += 1
        return action + DictTensor({"calls": action["value"] + self.calls}), state


def test_a_file_that_differs_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "policy.pt2").write_text("of before")
    policy = Policy(ActorCritic(4, 2), Dishonest, FRAME)
    with pytest.raises(RuntimeError, match=r"'calls' differs in 1 of 1 numbers, by up to \d.*The file is not kept"):
        rlstruct.export(policy, tmp_path / "policy.pt2")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("policy.pt2", "of before")]


class Branching(ActorCriticAgent):
    """Looks at a value."""

    def __call__(self, state: DictTensor, observation: DictTensor, *others: Any) -> tuple[DictTensor, DictTensor]:
        if observation["frame"].sum() > 0:
            return super().__call__(state, observation.map(torch.neg), *others)
        return super().__call__(state, observation, *others)


def test_an_agent_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"export: Branching cannot be traced: .*without branches on values"):
        rlstruct.export(Policy(ActorCritic(4, 2), Branching, FRAME), tmp_path / "policy.pt2")
    with pytest.raises(ValueError, match=r"ends in '.pt', expected .pt2 or .onnx"):
        rlstruct.export(Policy(ActorCritic(4, 2), ActorCriticAgent, FRAME), tmp_path / "policy.pt")


def test_other_actions_count_unless_their_scores_are_equal() -> None:
    original = exported(Policy(ActorCritic(4, 2), ActorCriticAgent, FRAME))

    def other(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = original(inputs)
        return {**found, "action": 1 - found["action"]}

    with torch.no_grad(), pytest.raises(RuntimeError, match="'action' differs in 1 of 1 numbers"):
        compare(original, other)
    for weight in original.model.parameters():
        nn.init.zeros_(weight)
    with torch.no_grad():
        assert compare(original, other) == 0.0


def test_shapes_count() -> None:
    original = exported(Policy(ActorCritic(4, 2), ActorCriticAgent, FRAME))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"'value' is \[1, 1\] torch.float32 in the file, expected"):
        compare(original, lambda inputs: {**original(inputs), "value": original(inputs)["value"].unsqueeze(1)})


def test_the_agent_of_parts_is_not_one_of_ours() -> None:
    assert PartsAgent(PARTS.create_model()).creator() is PartsAgent


SCRIPTED = [
    (ActorCritic(4, 2), (torch.zeros(3, 4),)),
    (RecurrentActorCritic(4, 2), (torch.zeros(3, 4), torch.zeros(3, 64))),
    (GaussianActorCritic(4, 2), (torch.zeros(3, 4),)),
    (QNetwork(4, 2, duelling=True), (torch.zeros(3, 4),)),
    (Normalised(ActorCritic(4, 2), (4,)), (torch.zeros(3, 4),)),
    (ConvolutionalActorCritic((4, 12, 12), 3, layers=((4, 3, 1),)), (torch.zeros(3, 4, 12, 12, dtype=torch.uint8),)),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("network", "example"), SCRIPTED, ids=lambda one: type(one).__name__)
def test_torch_jit_traces_what_it_does_not_compile(network: nn.Module, example: tuple[Tensor, ...]) -> None:
    with pytest.raises(
        (RuntimeError, ValueError, torch.jit.frontend.NotSupportedError),
        match=r"Unknown type|variable number of arguments",
    ):
        torch.jit.script(network)
    traced = torch.jit.trace(network, example)
    seven = [torch.cat([one, one, one[:1]]) + 1 for one in example]
    for found, expected in zip(_tuple(traced(*seven)), _tuple(network(*seven)), strict=True):
        torch.testing.assert_close(found, expected)


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_jit_compiles_an_mlp() -> None:
    network = MLP(4, 2)
    torch.testing.assert_close(torch.jit.script(network)(torch.ones(3, 4)), network(torch.ones(3, 4)))
