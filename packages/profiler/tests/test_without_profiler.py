"""The library without the add-on: trainings run, and each entry names what to install."""

from __future__ import annotations

import pathlib

import pytest
from test_addons import run_without_addons

from rlstruct.profiling.operations import VARIABLE

TRAINING = """
from rlstruct.profiling import Clock, is_on, operation, phase, recorded
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.sims import make

config = A2CConfig(n_env_steps=256, n_envs=4, n_processes=0, evaluation_processes=0, evaluation_episodes=1)
train(config, lambda: ActorCritic(4, 2), ActorCriticAgent, lambda n_envs, seed: make("CartPole-v1", n_envs, seed))
clock = Clock({"work": "work"})
with phase("training"), operation("outer"), recorded():
    clock.enter(0)
print(is_on(), [name for name in sys.modules if name.startswith("rlstruct_")])
"""
COMMAND = "from rlstruct.cli.main import main; raise SystemExit(main(['profile', 'train', 'a2c']))"


def test_operations_are_free_and_a_training_runs(tmp_path: pathlib.Path) -> None:
    done = run_without_addons(TRAINING, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["False []"]), done.stderr


def test_the_command_says_what_to_install(tmp_path: pathlib.Path) -> None:
    done = run_without_addons(COMMAND, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rlstruct profile: rlstruct profile needs the add-on rlstruct-profiler"), done.stderr
    assert "pip install -e packages/profiler" in done.stderr


@pytest.mark.parametrize("asked", ["nvtx", '{"folder": "unused"}'])
def test_a_process_that_is_to_be_profiled_says_so_at_once(
    asked: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    done = run_without_addons("import rlstruct.profiling", tmp_path)
    assert done.returncode == 1
    assert f"MissingPackageError: {VARIABLE} needs the add-on rlstruct-profiler" in done.stderr
    assert "pip install -e packages/profiler" in done.stderr
