"""Environments of a user's module on the command line, and runs that a user's program has made."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import gymnasium
import own_games
import pytest
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent, Normalised
from rlstruct.algos import A2CConfig, RunFolder, a2c
from rlstruct.cli.main import main
from rlstruct.cli.stored_run import load_settings

pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")

SMALL = "--n-env-steps 200 --n-timesteps 20 --n-envs 2 --n-processes 0 --evaluation-processes 0".split()  # noqa: SIM905
SMALL += ["--evaluation-episodes", "2", "--no-progress"]
CONFIG = A2CConfig(
    n_env_steps=200, n_timesteps=20, n_envs=2, n_processes=0, evaluation_processes=0, evaluation_episodes=2
)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def program_run() -> pathlib.Path:
    """A run of a program with gymnasium environments."""
    with RunFolder("mine", CONFIG, n_env_steps=200, progress=False) as run:
        a2c.train(CONFIG, own_games.create_model, ActorCriticAgent, own_games.create_env, run=run)
    return run.path


@pytest.mark.parametrize("name", ["Walk", "WalkInParts", "Parts", "create_env"])
def test_a_simulator_an_environment_and_a_factory_of_a_module_are_trained_evaluated_and_filmed(
    name: str, capsys: Capture
) -> None:
    assert main(["train", "a2c", "--env", f"own_games:{name}", *SMALL]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    assert load_settings(run).task.env == f"own_games:{name}"
    assert main(["evaluate", str(run), "--episodes", "3", "--video", "film.gif"]) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert pathlib.Path("film.gif").stat().st_size > 100
    assert main(["train", "--resume", str(run), "--n-env-steps", "300", "--no-progress"]) == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_games:Wlk", "own_games has no function or class 'Wlk'. Did you mean 'Walk'?"),
        ("no_such_games:Walk", "there is no module 'no_such_games'"),
        ("own_games:SIZE", "own_games:SIZE is an int, expected a function or a class."),
        ("own_games:create_model", "own_games:create_model cannot be called with n_envs, seed: got an unexpected"),
        ("own_games:Place", "own_games:Place cannot be called with n_envs, seed"),
    ],
)
def test_a_name_that_makes_no_environment_is_refused(name: str, says: str, capsys: Capture) -> None:
    assert main(["train", "a2c", "--env", name, *SMALL]) == 2
    assert says in capsys.readouterr().err


def test_a_run_of_a_program_is_evaluated_filmed_plotted_and_resumed(program_run: pathlib.Path, capsys: Capture) -> None:
    factory = ["--factory", "own_games:create_env"]
    assert main(["evaluate", str(program_run), "--episodes", "3", "--video", "film.gif", *factory]) == 0
    assert "after 200 environment steps" in capsys.readouterr().out
    assert main(["play", str(program_run), "--steps", "5", "--out", "play.png", *factory]) == 0
    assert main(["plot", str(program_run)]) == 0
    words = ["train", "a2c", "--resume", str(program_run), *factory, "--n-env-steps", "400", "--no-progress"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "400 environment steps" in said
    assert f"next: rlstruct evaluate {program_run} --factory own_games:create_env\n" in said
    state = torch.load(program_run / "checkpoint.pt", weights_only=True)
    assert state["env_steps"] == 400


def test_what_is_missing_is_named(program_run: pathlib.Path, capsys: Capture) -> None:
    assert main(["evaluate", str(program_run)]) == 2
    assert "--factory module:create_env" in capsys.readouterr().err
    assert main(["evaluate", str(program_run), "--factory", "CartPole-v1"]) == 2
    assert "--factory CartPole-v1: expected module:create_env" in capsys.readouterr().err
    for command in ("evaluate", "export"):
        assert main([command, str(program_run), "--factory", "own_games:create_env", "own_games:create_nothing"]) == 2
        assert "create_model returned NoneType, expected a torch.nn.Module" in capsys.readouterr().err


def test_the_bundled_agents_see_dict_observations_in_python() -> None:
    def create_env(n_envs: int, seed: int) -> own_games.VecEnv:
        return own_games.GymEnvInf([own_games.Parts() for _ in range(n_envs)], seed)

    assert isinstance(own_games.Parts.observation_space, gymnasium.spaces.Dict)
    result = a2c.train(CONFIG, lambda: own_games.ActorCritic(3, 2), ActorCriticAgent, create_env)
    assert result.env_steps == 200


def test_a_normalised_network_sees_dict_observations_with_whole_numbers() -> None:
    config = replace(CONFIG, n_env_steps=400)
    result = a2c.train(config, lambda: Normalised(ActorCritic(2, 2), (2,)), ActorCriticAgent, own_games.WalkInParts)
    frames = result.model.get_submodule("frames")
    assert frames.get_buffer("count").item() == pytest.approx(400)
    assert 0 < frames.get_buffer("mean")[1] < frames.get_buffer("mean")[0]  # the side, and the place


def test_a_run_with_a_network_of_its_own_is_exported_with_factories(capsys: Capture) -> None:
    warned = pytest.warns(UserWarning, match=r"the network is own_games\.Policy.*--factory MODULE:CREATE_ENV")
    with RunFolder("mine", CONFIG, n_env_steps=200, progress=False) as run, warned:
        a2c.train(CONFIG, own_games.Policy, ActorCriticAgent, own_games.create_env, run=run)
    assert main(["export", str(run.path)]) == 2
    assert "On the command line: --factory MODULE:CREATE_ENV MODULE:CREATE_MODEL" in capsys.readouterr().err
    assert main(["export", str(run.path / "nothing")]) == 2
    assert "--factory" not in capsys.readouterr().err
    assert main(["export", str(run.path), "--factory", "own_games:create_env", "own_games:Policy"]) == 0


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c", "ppo", "dqn"])
def test_images_never_get_the_settings_for_cartpole(algorithm: str, capsys: Capture) -> None:
    words = [algorithm, "--env", "own_games:Camera", *SMALL]
    words += {"ppo": ["--n-minibatches", "1"], "dqn": ["--learning-starts", "40"]}.get(algorithm, [])
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    game = "Freeway" if algorithm == "ppo" else "Breakout"  # PPO's settings for Breakout are for that game alone
    assert f"settings: those for {game}-MinAtar, which also shows images" in said
    assert "tuned for CartPole" not in said
    (run,) = pathlib.Path("runs").iterdir()
    record = load_settings(run)
    assert record.agent.startswith("convolutional network" if algorithm == "dqn" else "convolutional policy")
    assert record.config.target_return is None
