"""Rules that hold for the trainings and settings of several algorithms, each as one table."""

from __future__ import annotations

import pydoc
from typing import Any

import pytest
import torch
from resume_tasks import train

from rlstruct.algos import ALGORITHMS, A2CConfig, DQNConfig, PPOConfig, PQNConfig, ReinforceConfig, SACConfig

ALL = pytest.mark.parametrize("name", ["reinforce", "a2c", "ppo", "dqn", "pqn", "pqn, recurrent", "sac"])


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_help_of_an_algorithm_tells_how_to_call_it(name: str) -> None:
    said = pydoc.plain(pydoc.render_doc(ALGORITHMS[name]))
    assert "train(config, create_model, create_agent, create_env, *, env_args=None, run=None, callbacks=())" in said
    assert f"Settings: {ALGORITHMS[name].learner.settings.__name__}." in said
    assert "create_env: returns the environments, called as ``create_env(n_envs=…, seed=…, **env_args)``." in said


@ALL
def test_the_same_seed_gives_the_same_training_and_leaves_torchs_generator_alone(name: str) -> None:
    state = torch.get_rng_state()
    first, second, other = (train(name, None, n_env_steps=400, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.losses == second.losses
    assert first.losses != other.losses
    assert [one.returns for one in first.evaluations] == [one.returns for one in second.evaluations]


@ALL
@pytest.mark.filterwarnings("ignore:.*learning_starts is 150, and the training ends")
def test_a_target_that_the_first_evaluation_just_reaches_ends_the_training(name: str) -> None:
    target = train(name, None, n_env_steps=1).before.mean_return
    result = train(name, None, target_return=target)
    assert (result.env_steps, result.losses) == (0, {})


@pytest.mark.parametrize(("name", "changes"), [("reinforce", {}), ("a2c", {"overlap": True}), ("dqn", {}), ("pqn", {})])
def test_worker_processes_give_the_losses_of_this_process(name: str, changes: dict[str, Any]) -> None:
    alone = train(name, None, n_env_steps=400, **changes)
    shared = train(name, None, n_env_steps=400, n_envs=2, n_processes=2, evaluation_processes=1, **changes)
    assert shared.before.returns == alone.before.returns
    assert shared.env_steps == alone.env_steps
    assert shared.losses.keys() == alone.losses.keys()
    # Rows of a forward pass are rounded with their neighbours, which differ between 1 x 4 and 2 x 2 environments. DQN
    # chooses from replayed steps by what was rounded: only the sizes of its losses agree.
    for term, numbers in alone.losses.items():
        expected = pytest.approx(numbers, rel=1e-4, abs=1e-4)
        assert len(shared.losses[term]) == len(numbers) if name == "dqn" else shared.losses[term] == expected, term


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            ReinforceConfig,
            {"evaluation_episodes": 10, "evaluation_processes": 3},
            "evaluation_episodes is 10, expected a multiple of .*3",
        ),
        (A2CConfig, {"n_updates": 2}, "n_updates is 2, expected 1, or vtrace = True"),
        (A2CConfig, {"n_minibatches": 2}, "n_minibatches is 2, expected 1, or vtrace = True"),
        (
            A2CConfig,
            {"n_minibatches": 7, "vtrace": True, "n_envs": 2, "n_processes": 3},
            "n_minibatches is 7, expected at most one for each of 6 environments",
        ),
        (A2CConfig, {"window": 4}, "window is 4, expected at least 1 with vtrace = True, or None"),
        (
            A2CConfig,
            {"n_minibatches": 3, "vtrace": True, "n_envs": 8, "window": 4},
            "n_minibatches is 3, expected a divisor of 8 environments, for the window",
        ),
        (
            PPOConfig,
            {"n_minibatches": 61, "n_timesteps": 10, "n_envs": 6},
            "n_minibatches is 61, expected at most one for each of 60",
        ),
        (
            PQNConfig,
            {"n_minibatches": 61, "n_timesteps": 10, "n_envs": 6},
            "n_minibatches is 61, expected at most one for each of 60",
        ),
        (DQNConfig, {"replay_capacity": 263}, "replay_capacity is 263, expected at least 264: 16 steps of 8 environ"),
        (
            DQNConfig,
            {"replay_capacity": 983, "n_processes": 3, "n_stack": 9},
            "replay_capacity is 983, expected at least 984",
        ),
        (
            SACConfig,
            {"replay_capacity": 67, "n_timesteps": 8, "n_envs": 4},
            "replay_capacity is 67, expected at least 68: 8 steps of 4 environments",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_named(kind: Any, changes: dict[str, Any], message: str) -> None:
    """`tests/test_options.py` checks the bounds of each setting alone."""
    with pytest.raises(ValueError, match=f"{kind.__name__}: {message}"):
        kind(**changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (A2CConfig, {"n_minibatches": 6, "vtrace": True, "n_envs": 2, "n_processes": 3}),
        (DQNConfig, {"replay_capacity": 264}),
        (PPOConfig, {"n_minibatches": 60, "n_timesteps": 10, "n_envs": 6}),
    ],
)
def test_settings_that_just_fit_together_are_kept(kind: Any, changes: dict[str, Any]) -> None:
    settings = kind(**changes)
    assert {name: getattr(settings, name) for name in changes} == changes
