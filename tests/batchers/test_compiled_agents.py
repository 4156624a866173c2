"""``RL_Batcher(compile_agent=True)`` collects what it collects without it. Warnings are errors, as everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batcher_fakes import (
    SumOfHistoryAgent,
    VersionAgent,
    create_cartpole,
    create_version_agent,
)

from rlstruct import DictTensor, RL_Agent, resolve_device
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    QAgent,
    QNetwork,
    RecurrentActorCritic,
    RecurrentAgent,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.core import Trajectories
from rlstruct.engine.purity import PurityError
from rlstruct.errors import WorkerError
from rlstruct.sims import make

pytestmark = pytest.mark.timeout(600)
AgentOutput = tuple[DictTensor, DictTensor]


def model(seed: int) -> ActorCritic:
    torch.manual_seed(seed)
    return ActorCritic(4, 2, hidden=(16,))


def batcher(create_agent: Callable[..., RL_Agent], compiled: bool, n_envs: int = 3, **settings: Any) -> RL_Batcher:
    made = RL_Batcher(
        12, create_agent, create_cartpole, env_args={"n_envs": n_envs}, seed=5, compile_agent=compiled, **settings
    )
    made.reset()
    return made


def collect(made: RL_Batcher) -> Trajectories:
    made.execute()
    trajectories, _ = made.get()
    assert trajectories is not None
    return trajectories


def assert_equal(found: Trajectories, expected: Trajectories) -> None:
    """Bit by bit, but for what the network says: that is fused, and so rounded otherwise."""
    assert found.info.keys() == expected.info.keys()
    assert list(found.steps.keys()) == list(expected.steps.keys())
    for key, value in [*expected.steps.items(), *expected.info.items()]:
        other = found.steps[key] if key in found.steps else found.info[key]
        rounds = key.startswith(("action/", "agent_state/")) and value.is_floating_point()
        torch.testing.assert_close(other, value, rtol=1e-4 if rounds else 0, atol=1e-5 if rounds else 0)


def test_a_compiled_agent_collects_the_same_and_takes_new_weights() -> None:
    agents = {"model": model(0)}
    compiled, eager = (batcher(ActorCriticAgent, yes, agent_args=agents) for yes in (True, False))
    with compiled, eager:
        assert_equal(collect(compiled), collect(eager))
        for made in (compiled, eager):
            made.update(model(1).state_dict())
        first, second = collect(compiled), collect(eager)
    assert_equal(first, second)
    spoken = model(1)(first.steps["observation/frame"].flatten(0, 1))[1]  # the oracle: the new network itself
    torch.testing.assert_close(first.steps["action/value"].flatten(), spoken.detach(), rtol=1e-4, atol=1e-5)


def test_weights_may_be_other_tensors_and_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionAgent, "pure", True)
    with batcher(create_version_agent, True) as compiled:
        collect(compiled)
        for weights in (torch.full((1,), 3.0), torch.full((1,), 4.0), torch.full((2,), 5.0)):
            compiled.update({"w": weights})
            steps = collect(compiled).steps
            assert bool((steps["action/lowest"] == weights[0]).all())
            assert bool((steps["action/size"] == weights.numel()).all())


class Stubborn(RL_Agent):
    """Promises to be pure, and does something in ``__call__`` that compiled code would freeze or cannot do."""

    pure = True

    def __init__(self, habit: str) -> None:
        self.habit = habit
        self.n_calls = 0
        self.seen = torch.zeros(3)
        self.mean = torch.zeros(4)

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None
    ) -> AgentOutput:
        frame = observation["frame"]
        shown = frame.sum(-1)
        if self.habit == "counts":
            self.n_calls += 1
            shown = shown + self.n_calls
        elif self.habit == "remembers":
            self.seen = self.seen + shown
            shown = self.seen
        elif self.habit == "averages in place":
            self.mean.mul_(0.9).add_(frame.mean(0))
            shown = shown + self.mean.sum()
        elif self.habit == "looks at a value" and float(frame[0, 0]) > 0.0:
            shown = -shown
        elif self.habit == "calls numpy":
            shown = torch.from_numpy(frame.numpy().sum(-1))
        return DictTensor({"action": torch.zeros(3, dtype=torch.int64), "shown": shown}), state


@pytest.mark.parametrize("habit", ["averages in place", "looks at a value", "calls numpy"])
def test_an_agent_that_cannot_be_compiled_acts_as_it_is_with_one_warning(habit: str) -> None:
    arguments = {"habit": habit}
    with (
        batcher(Stubborn, True, agent_args=arguments) as stubborn,
        batcher(Stubborn, False, agent_args=arguments) as it,
    ):
        with pytest.warns(UserWarning, match="cannot be compiled and runs eagerly") as caught:
            first = collect(stubborn)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert_equal(first, collect(it))
        assert_equal(collect(stubborn), collect(it))


@pytest.mark.parametrize("habit", ["counts", "remembers"])
def test_a_promise_that_is_seen_to_be_broken_is_an_error(habit: str) -> None:
    with batcher(Stubborn, True, agent_args={"habit": habit}) as stubborn:
        stubborn.execute()
        with pytest.raises(WorkerError, match="`pure = True` promises") as caught:
            stubborn.get()
    assert isinstance(caught.value.__cause__, PurityError)


def test_an_agent_that_changes_its_tensors_acts_as_often_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"habit": "averages in place"}
    with batcher(Stubborn, False, agent_args=arguments) as promising:
        found = [collect(promising) for _ in range(3)]
    monkeypatch.setattr(Stubborn, "pure", False)
    with batcher(Stubborn, False, agent_args=arguments) as honest:
        for trajectories in found:
            assert_equal(trajectories, collect(honest))


def test_an_agent_that_counts_has_broken_its_promise_without_a_compiler_too() -> None:
    with (
        batcher(Stubborn, False, agent_args={"habit": "counts"}) as stubborn,
        pytest.raises(WorkerError, match="`pure = True` promises"),
    ):
        collect(stubborn)


def collect_often(made: RL_Batcher) -> None:
    for _ in range(6):
        collect(made)


GAIN = 1.0


class Gained(RL_Agent):
    """Promises to be pure, and reads a global."""

    pure = True

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None
    ) -> AgentOutput:
        shown = observation["frame"].sum(-1) * GAIN
        return DictTensor({"action": torch.zeros_like(shown, dtype=torch.int64), "shown": shown}), state


@pytest.mark.parametrize("way", ["compiled", "graph"])
def test_a_promise_that_is_broken_between_two_batches_is_an_error(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstruct.batchers.collector.STEPS_BETWEEN_PROBES", 24)  # two batches
    device = resolve_device("cpu" if way == "compiled" else "sim:1")
    env_args = {"name": "CartPole-v1", "n_envs": 3, "device": device}
    with RL_Batcher(
        12, Gained, make, env_args=env_args, seed=5, device=device, compile_agent=way == "compiled"
    ) as made:
        made.reset()
        collect_often(made)
        monkeypatch.setattr(f"{__name__}.GAIN", 2.0)
        with pytest.raises(WorkerError, match="'shown' differs from the agent's eager result") as caught:
            collect_often(made)
    assert isinstance(caught.value.__cause__, PurityError)


def test_an_agent_that_promises_nothing_acts_as_it_is_with_one_warning() -> None:
    with batcher(create_version_agent, True) as made:
        with pytest.warns(UserWarning, match="set `pure = True` on its class") as caught:
            collect(made)
        assert len(caught) == 1
        made.update({"w": torch.full((1,), 3.0)})
        assert bool((collect(made).steps["action/lowest"] == 3.0).all())


def create_remembering() -> RL_Agent:
    SumOfHistoryAgent.pure = True  # in a separate worker
    return SumOfHistoryAgent()


def test_workers_warn_once_together() -> None:
    with batcher(create_remembering, True, n_processes=2) as compiled:
        with pytest.warns(UserWarning, match="it requires a history") as caught:
            collect(compiled)
        collect(compiled)
    assert len(caught) == 1


def test_without_a_compiler_the_agent_acts_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled there yet
    import torch._inductor.config

    agents = {"model": model(2)}
    compiled, eager = (batcher(ActorCriticAgent, yes, agent_args=agents) for yes in (True, False))
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}), compiled, eager:
        with pytest.warns(UserWarning, match="no-such-compiler"):
            found = collect(compiled)
        assert_equal(found, collect(eager))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("create_agent", "info"),
    [
        (lambda: RecurrentAgent(RecurrentActorCritic(4, 2, n_hidden=8)), None),
        (lambda: QAgent(QNetwork(4, 2, hidden=(16,))), DictTensor({"epsilon": torch.tensor([0.5])})),
        (lambda: ActorCriticAgent(model(0), stochastic=False), None),
    ],
)
def test_every_kind_of_agent(create_agent: Callable[[], RL_Agent], info: DictTensor | None) -> None:
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        with batcher(create_agent, compiled, agent_info=info, n_envs=9) as made:
            found.append([collect(made) for _ in range(2)])
    for one, other in zip(*found, strict=True):
        assert_equal(one, other)


@pytest.mark.exhaustive
def test_layouts_give_the_same() -> None:
    agents = {"model": model(0)}
    with batcher(ActorCriticAgent, True, n_envs=4, agent_args=agents) as here:
        one = [collect(here) for _ in range(2)]
    with batcher(ActorCriticAgent, True, n_envs=2, agent_args=agents, n_processes=2) as there:
        two = [collect(there) for _ in range(2)]
    for a, b in zip(one, two, strict=True):
        assert_equal(b, a)
