"""A compiled agent and simulator, as one function, collect what both collect apart. Slow: a compiler runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlstruct import DictTensor, RL_Agent
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalTrunk,
    GaussianActorCritic,
    GaussianAgent,
    QAgent,
    QNetwork,
    RecurrentActorCritic,
    RecurrentAgent,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.core import Trajectories
from rlstruct.errors import WorkerError
from rlstruct.sims import Breakout, make

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
B, T = 9, 21

CASES: dict[str, tuple[str, dict[str, Any], Callable[[], RL_Agent]]] = {
    "floats": ("Pendulum-v1", {"time_limit": 6}, lambda: GaussianAgent(GaussianActorCritic(3, 1))),
    "agent_info": ("CartPole-v1", {}, lambda: QAgent(QNetwork(4, 2, hidden=(8,)))),
    "masks, integers and a memory of images": (
        "Breakout-MinAtar",
        {"time_limit": 8},
        lambda: RecurrentAgent(
            RecurrentActorCritic(ConvolutionalTrunk((10, 10, 4), channels_last=True, n_features=16), 3, n_hidden=8)
        ),
    ),
    "memory": ("CartPole-v1", {"time_limit": 5}, lambda: RecurrentAgent(RecurrentActorCritic(4, 2))),
}


def batcher(name: str, compiled: bool, **settings: Any) -> RL_Batcher:
    env, options, create = CASES[name]
    torch.manual_seed(1)
    agent = create()
    backend = "compile" if compiled else "torch"
    return RL_Batcher(
        T,
        lambda: copy.deepcopy(agent),
        lambda seed: make(env, B, seed=seed, backend=backend, **options),  # type: ignore[arg-type]
        seed=4,
        compile_agent=compiled,
        **settings,
    )


def info(name: str, epsilon: float) -> DictTensor | None:
    return DictTensor({"epsilon": torch.full((B,), epsilon)}) if name == "agent_info" else None


def collect(made: RL_Batcher, agent_info: DictTensor | None = None) -> Trajectories:
    made.execute(agent_info)
    batch, _ = made.get()
    assert batch is not None
    return batch


def close(found: Trajectories, expected: Trajectories) -> None:
    """Compare batches up to the rounding of networks and floats."""
    assert list(found.steps.keys()) == list(expected.steps.keys())
    for key, value in [*expected.steps.items(), *expected.info.items()]:
        got = {**dict(found.steps.items()), **dict(found.info.items())}[key]
        assert (got.dtype, got.stride()) == (value.dtype, value.stride()), key
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_eager_steps(name: str) -> None:
    with batcher(name, compiled=True) as fast, batcher(name, compiled=False) as plain:
        for made in (fast, plain):
            made.reset(agent_info=info(name, 0.5))
        for n in range(3):
            changed = info(name, 0.1 * n)
            found, expected = collect(fast, changed), collect(plain, changed)
            close(found, expected)
            kept = found.clone()
            if n == 1:
                weights = {key: value * 0.5 for key, value in CASES[name][2]().model.state_dict().items()}
                for made in (fast, plain):
                    made.update(weights)
        assert fast.stats().executors == ("compiled",)
        saved = fast.state_dict()
        expected = collect(fast, changed)
        close(kept, found)  # no later batch changes an earlier one
        if name == "memory":  # a second batcher goes on where the first one was
            with batcher(name, compiled=True) as second:
                second.load_state_dict(saved)
                second.update(weights)
                continued = collect(second, changed)
                for key, value in expected.steps.items():
                    assert torch.equal(continued.steps[key], value), key


def test_workers_fill_their_two_buffers() -> None:
    name = "floats"
    with batcher(name, compiled=True, n_processes=1) as fast, batcher(name, compiled=False, n_processes=1) as plain:
        for made in (fast, plain):
            made.reset()
        for _ in range(3):
            close(collect(fast), collect(plain))
        assert fast.stats().executors == ("compiled",)


class Writing(ActorCriticAgent):
    pure = True

    def __call__(self, state: Any, observation: DictTensor, *given: Any) -> Any:
        observation["reward"].add_(1.0)
        return super().__call__(state, observation, *given)


class Untraceable(ActorCriticAgent):
    pure = True

    def __call__(self, state: Any, observation: DictTensor, *given: Any) -> Any:
        observation["reward"].sum().item()
        return super().__call__(state, observation, *given)


class Missing(ActorCriticAgent):
    pure = True

    def __call__(self, *given: Any) -> Any:
        action, state = super().__call__(*given)
        chosen = {key: value + 7 if key == "action" else value for key, value in action.items()}
        return DictTensor(chosen), state


def in_cartpole(kind: type[ActorCriticAgent]) -> RL_Batcher:
    made = RL_Batcher(
        T,
        lambda: kind(ActorCritic(4, 2)),
        lambda seed: make("CartPole-v1", B, seed=seed, backend="compile"),
        seed=0,
        compile_agent=True,
    )
    made.reset()
    return made


def test_an_agent_that_writes_to_its_observation_is_refused() -> None:
    with in_cartpole(Writing) as made, pytest.raises(WorkerError, match="it modified observation 'reward' in place"):
        collect(made)


def test_an_agent_that_cannot_be_compiled_acts_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    with in_cartpole(Untraceable) as made:
        for _ in range(2):
            assert collect(made).steps.lengths.tolist() == [T] * B
        assert made.stats().executors == ("eager",)


def test_actions_that_do_not_exist_are_found() -> None:
    with in_cartpole(Missing) as made, pytest.raises(WorkerError, match="action 'action' of environment 0 in step 0"):
        collect(made)


def test_a_simulator_whose_step_is_overridden_steps_by_itself() -> None:
    class Counted(Breakout):
        n = 0

        def step(self, action: DictTensor) -> Any:
            self.n += 1
            return super().step(action)

    made: list[Counted] = []

    def create(seed: int) -> Counted:
        made.append(Counted(B, seed, backend="compile"))
        return made[0]

    agent = ActorCriticAgent(ActorCritic(400, 3))
    with RL_Batcher(T, lambda: agent, create, seed=0, compile_agent=True) as batcher:
        batcher.reset()
        collect(batcher)
        assert made[0].n == T
