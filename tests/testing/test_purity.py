"""check_agent finds what an agent that promises to be pure depends on, at any depth, and names it."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any, Final

import gymnasium
import pytest
import torch
from gymnasium import spaces
from random_env import RandomEnv
from torch import Tensor, nn

from rlstruct import DictTensor, RL_Agent
from rlstruct.agents import QAgent
from rlstruct.testing import ConformanceError, check_agent

FRAME, TWO = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
SCALE = 1.0
FIXED: Final = 1.0


class Deep:
    """A chain of objects."""

    def __init__(self, depth: int) -> None:
        self.next: Any = Deep(depth - 1) if depth else None
        self.scale = 1.0


class Scaled(nn.Module):
    """A module of the user's, with a number and a tensor besides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.scale = 2.0
        self.offset = torch.zeros(1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, frame: Tensor) -> Tensor:
        return (self.linear(frame - self.mean) * self.scale + self.offset).squeeze(-1)


def scale_of_a_function() -> float:
    return SCALE


class Reader(RL_Agent):
    """Promises to be pure, and reads something."""

    pure = True
    habit: Final[str]
    threshold = 0.5

    def __init__(self, habit: str) -> None:
        self.habit = habit
        self.deep = Deep(15)
        self.options = types.SimpleNamespace(scales=[{"x": (1.0, 2.0)}])
        self.flag, self.word, self.count = True, "up", 3
        self.tensor = torch.ones(1)
        self.model = Scaled()
        self.function = lambda frame, scale=1.0: frame * scale
        closed = 1.0
        self.closure = lambda frame: frame * closed
        self.calls = 0

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: Any, history: Any = None) -> Any:
        frame = observation["frame"]
        shown = frame.sum(-1)
        if (habit := self.habit) == "global":
            shown = shown * SCALE
        elif habit == "global of a function":
            shown = shown * scale_of_a_function()
        elif habit == "depth":
            deep = self.deep
            while deep.next is not None:
                deep = deep.next
            shown = shown * deep.scale
        elif habit == "container":
            shown = shown * self.options.scales[0]["x"][1]
        elif habit == "flag":
            shown = shown if self.flag else -shown
        elif habit == "word":
            shown = shown if self.word == "up" else -shown
        elif habit == "class attribute":
            shown = shown * self.threshold
        elif habit == "tensor":
            shown = shown * self.tensor
        elif habit == "module":
            shown = self.model(frame)
        elif habit == "closure":
            shown = self.closure(shown)
        elif habit == "counts":
            self.calls += 1
        elif habit == "final":
            shown = shown * FIXED
        return DictTensor({"action": torch.zeros_like(observation["last_action"]), "shown": shown}), state


def check(agent: RL_Agent, **settings: Any) -> None:
    check_agent(agent, RandomEnv(FRAME, TWO), n_steps=3, executors=False, **settings)


@pytest.mark.parametrize(
    ("habit", "found"),
    [
        ("global", "the global SCALE of module .*test_purity"),
        ("global of a function", "the global SCALE of module .*test_purity"),
        ("depth", "Reader" + r"\.deep" + r"\.next" * 15 + r"\.scale"),
        ("container", r"Reader\.options\.scales\[0\]\['x'\]\[1\]"),
        ("flag", r"Reader\.flag.* typing\.Final: `stochastic: Final\[bool\]`"),
        ("word", r"Reader\.word"),
        ("class attribute", r"Reader\.threshold"),
        ("tensor", r"Reader\.tensor"),
        ("module", r"Reader\.model\.(scale|offset)"),
        ("closure", "'closed' of the closure of"),
        ("counts", r"Reader\.calls, which it changes while it acts"),
    ],
)
def test_what_an_agent_depends_on_is_named(habit: str, found: str) -> None:
    before = SCALE
    with pytest.raises(ConformanceError, match=found):
        check(Reader(habit))
    assert before == SCALE  # put back


@pytest.mark.parametrize("habit", ["global", "flag"])
def test_nothing_but_changing_a_value_shows_that_an_agent_reads_it(habit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `check_pure`, equal calls and all executors agree, although a graph would keep the old value."""
    monkeypatch.setattr("rlstruct.testing.agent_conformance.check_pure", lambda *_: None)
    check_agent(Reader(habit), RandomEnv(FRAME, TWO, device="sim:1"), n_steps=3)


class DeclaredReader(Reader):
    """The same, declared."""

    pure = True
    habit: Final[str]
    threshold: Final = 0.5
    tensor: Final[Tensor]
    options: Final[Any]
    flag: Final[bool]


@pytest.mark.parametrize("habit", ["nothing", "final", "container", "flag", "tensor"])
def test_what_is_declared_final_is_allowed(habit: str) -> None:
    check(DeclaredReader(habit))


@pytest.mark.parametrize(("folder", "examined"), [("", True), ("site-packages", False), ("dist-packages", False)])
def test_packages_are_not_examined_wherever_they_are_installed(
    folder: str, examined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    module = f"scales_in_{folder.partition('-')[0] or 'a_project'}"
    (tmp_path / folder / f"{module}.py").write_text("SCALE = 1.0\ndef scaled(frame):\n    return SCALE * frame\n")
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    agent = Reader("closure")
    agent.closure = importlib.import_module(module).scaled
    if examined:
        with pytest.raises(ConformanceError, match=f"the global SCALE of module {module}"):
            check(agent)
    else:
        check(agent)


def test_an_agent_that_promises_nothing_may_read_anything() -> None:
    agent = Reader("global")
    agent.pure = False
    check(agent)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4)])
def test_an_agent_left_in_train_mode_is_told_so(layer: nn.Module) -> None:
    agent = QAgent(nn.Sequential(layer, nn.Linear(4, 2)))
    with pytest.raises(ConformanceError, match=r"in train mode.*Call model\.eval\(\)"):
        check(agent)
    agent.model.eval()
    check(agent)


class Drawing(RL_Agent):
    """Draws from torch's generator."""

    pure = True

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: Any, history: Any = None) -> Any:
        action = torch.zeros_like(observation["last_action"])
        return DictTensor({"action": action, "shown": torch.rand(len(action))}), state


def test_torchs_generator_is_no_argument() -> None:
    with pytest.raises(ConformanceError, match="another output for the same arguments"):
        check(Drawing(), draws_from_rng=False)
    drawing = Drawing()
    drawing.pure = False
    check(drawing, draws_from_rng=False)


def test_a_gymnasium_environment_of_the_agents_is_left_alone() -> None:
    agent = Reader("nothing")
    agent.env = gymnasium.make("CartPole-v1")  # type: ignore[attr-defined]
    check(agent)
