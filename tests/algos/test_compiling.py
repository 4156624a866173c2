"""Decisions about compiled code: from the settings alone, kept by a resumed training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from rlstruct import DictTensor, RL_Agent
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.algos.dqn import DQNConfig
from rlstruct.algos.ppo import PPOConfig
from rlstruct.algos.reinforce import ReinforceConfig
from rlstruct.algos.training import compiling
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.engine.compiled import compiling_simulators
from rlstruct.errors import BadValueError
from rlstruct.sims import make

NAMES = "compile_agent", "compile_update", "compile_simulator"
LONG: dict[str, Any] = {"n_env_steps": 10_000_000, "n_envs": 64, "n_timesteps": 128, "n_processes": 0}


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "why_no_compiler", lambda: "")


def perceptron() -> RL_Agent:
    return ActorCriticAgent(ActorCritic(4, 2, hidden=(8,)))


class Impure(ActorCriticAgent):
    pure = False


class BySteps(RecurrentAgent):
    """Acts as its base class does, but does not say that its sequences are those of its steps."""

    pure = True

    def __call__(self, *given: Any, **named: Any) -> tuple[DictTensor, DictTensor]:
        return super().__call__(*given, **named)


def decided(
    config: TrainingConfig,
    stored: dict[str, Any] | None = None,
    create_agent: Callable[[], RL_Agent] = perceptron,
    fixed_shapes: bool = True,
) -> list[object]:
    chosen = compiling.with_decisions(config, stored or {}, create_agent, fixed_shapes=fixed_shapes)
    return [getattr(chosen, name) for name in NAMES]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PPOConfig(), [False, False, False]),
        (DQNConfig(n_env_steps=20_000), [False, False, False]),
        (PPOConfig(**LONG, n_minibatches=8), [True, True, True]),
        (PPOConfig(**{**LONG, "n_envs": 1024}), [False, False, False]),  # a tenth of the calls
        (PPOConfig(**{**LONG, "n_processes": 2, "n_envs": 8}), [False, True, False]),  # workers compile nothing
        (PPOConfig(**LONG, learner_device="meta"), [True, False, True]),
        (PPOConfig(**LONG, n_learners=2), [True, False, True]),
        (PPOConfig(**LONG, compile_agent=False, compile_update=True), [False, True, True]),
    ],
)
def test_what_saves_more_than_it_costs_is_compiled(config: TrainingConfig, expected: list[bool]) -> None:
    assert decided(config) == expected


def test_batches_of_changing_shapes_are_learned_from_eagerly() -> None:
    long = ReinforceConfig(**{**LONG, "n_envs": 1, "n_timesteps": 10})
    assert decided(long) == [True, True, True]
    assert decided(long, fixed_shapes=False) == [True, False, True]


def test_the_agent_has_a_say(caplog: pytest.LogCaptureFixture) -> None:
    def impure() -> RL_Agent:
        return Impure(ActorCritic(4, 2, hidden=(8,)))

    def recurrent() -> RL_Agent:
        return RecurrentAgent(RecurrentActorCritic(4, 2, n_hidden=8))

    def by_steps() -> RL_Agent:
        return BySteps(RecurrentActorCritic(4, 2, n_hidden=8))

    def refuse() -> RL_Agent:
        raise AssertionError

    assert decided(PPOConfig(**LONG, n_minibatches=8), create_agent=impure) == [False, False, True]
    assert decided(PPOConfig(), create_agent=refuse) == [False, False, False]
    with caplog.at_level(logging.INFO, "rlstruct"):
        assert decided(PPOConfig(**LONG, n_minibatches=8), create_agent=recurrent) == [True, True, True]
        assert decided(PPOConfig(**LONG, n_minibatches=8), create_agent=by_steps) == [True, True, True]
    assert "compile_update (saves about 55 s, costs 25)" in caplog.messages[0]
    # 128 steps take 230 seconds more to compile; an update then saves 15 times as much.
    assert "compile_update (saves about 805 s, costs 255)" in caplog.messages[1]


def test_minutes_of_compilation_that_somebody_asked_for_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    asked = PPOConfig(**LONG, n_minibatches=8, compile_update=True, compile_agent=False, compile_simulator=False)
    with caplog.at_level(logging.INFO, "rlstruct"):
        decided(asked, create_agent=lambda: RecurrentAgent(RecurrentActorCritic(4, 2, n_hidden=8)))
        decided(asked, create_agent=lambda: BySteps(RecurrentActorCritic(4, 2, n_hidden=8)))
        decided(asked, create_agent=lambda: BySteps(RecurrentActorCritic(4, 2, n_hidden=8)), fixed_shapes=False)
    (told,) = caplog.messages
    assert "every one of 128 time steps of an update, which takes about 255 s: BySteps is replayed" in told


def test_seconds_saved_are_calls_times_a_figure() -> None:
    config = PPOConfig(**LONG, n_epochs=4, n_minibatches=8)
    saved, n_calls = compiling.seconds_saved(config), 10_000_000 / 64
    assert saved["compile_agent"] == pytest.approx(n_calls * 200e-6)
    assert saved["compile_update"] == pytest.approx(n_calls / 128 * 32 * 1.4e-3)
    assert saved["compile_simulator"] == pytest.approx(n_calls * 250e-6)


def test_decisions_of_a_checkpoint_hold() -> None:
    stored = {"compile_agent": False, "compile_update": True, "compile_simulator": "auto"}
    assert decided(PPOConfig(**LONG), stored) == [False, True, True]
    assert decided(PPOConfig(), stored) == [False, True, False]
    assert decided(PPOConfig(compile_update=False), stored) == [False, False, False]  # who says so decides


def test_one_line_tells_what_is_compiled_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rlstruct"):
        decided(PPOConfig())
        assert not caplog.messages
        decided(PPOConfig(**LONG, compile_simulator=False))
        monkeypatch.setattr(compiling, "why_no_compiler", lambda: "there is no C++ compiler called g++")
        assert decided(PPOConfig(**LONG)) == [False, False, False]
    told, missing = caplog.messages
    assert told == (
        "run_training turns on compile_agent (saves about 31 s, costs 17), "
        "compile_update (saves about 27 s, costs 25). Pass False to leave one off."
    )
    assert "would turn on compile_agent" in missing
    assert missing.endswith("costs 15, if the environment is a TensorEnv), but there is no C++ compiler called g++.")


def test_a_simulator_is_compiled_in_a_training_that_decided_so() -> None:
    with compiling_simulators(True):
        assert make("CartPole-v1", 2).backend == "compile"
        assert make("CartPole-v1", 2, backend="torch").backend == "torch"
        with compiling_simulators(False):
            assert make("CartPole-v1", 2).backend == "torch"
    assert make("CartPole-v1", 2, backend="auto").backend == "torch"
    with pytest.raises(BadValueError, match="expected 'auto', 'torch', 'compile' or 'warp'"):
        make("CartPole-v1", 2, backend="numba")
    with pytest.raises(BadValueError, match="compile_agent is 'yes', expected 'auto', True or False"):
        PPOConfig(compile_agent="yes")  # type: ignore[arg-type]
