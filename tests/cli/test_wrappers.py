"""Wrappers of gymnasium by name: a run trains, continues, is evaluated, filmed and exported with them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gymnasium
import odd_envs
import pytest

from rlstruct.cli.main import main
from rlstruct.cli.tasks import Task, find, spaces_of

for package in ("tyro", "tqdm", "tensorboard", "matplotlib", "PIL"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

Capture = pytest.CaptureFixture[str]
SMALL = ["--n-env-steps", "40", "--n-timesteps", "10", "--n-envs", "2", "--loggers", "--no-progress"]
HERE = ["--n-processes", "0", "--evaluation-processes", "0", "--evaluation-episodes", "2"]
SHORT = "gymnasium.wrappers:TimeLimit,max_episode_steps=7"
FLAT = "gymnasium.wrappers:FlattenObservation"
STACK = "gymnasium.wrappers:FrameStackObservation,stack_size=3"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(pathlib.Path(odd_envs.__file__).parent))


def lengths(run: pathlib.Path) -> list[int]:
    assert main(["evaluate", str(run), "--episodes", "3", "--out", "result.json"]) == 0
    result: list[int] = json.loads(pathlib.Path("result.json").read_text())["lengths"]
    return result


@pytest.mark.parametrize("processes", [HERE, ["--n-processes", "1", "--evaluation-episodes", "2"]])
def test_a_run_keeps_its_wrappers(processes: list[str], capsys: Capture) -> None:
    # Pendulum's episodes have 200 steps, and its frames have 3 numbers.
    words = ["--env", "Pendulum-v1", "--wrapper", STACK, FLAT, SHORT]
    assert main(["train", "ppo", *words, *SMALL, *processes, "--n-minibatches", "1"]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    assert json.loads((run / "config.json").read_text())["task"]["wrapper"] == [STACK, FLAT, SHORT]
    assert lengths(run) == [7, 7, 7]
    assert main(["train", "--resume", str(run), "--n-env-steps", "80", "--loggers", "--no-progress"]) == 0
    assert lengths(run) == [7, 7, 7]
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--wrapper", FLAT]) == 2
    assert f": --wrapper is {(FLAT,)}, but {(STACK, FLAT, SHORT)} in the run." in capsys.readouterr().err
    assert main(["export", str(run)]) == 0
    assert "checked against the policy" in capsys.readouterr().out


def test_play_draws_the_wrapped_environment(capsys: Capture) -> None:
    assert main(["train", "ppo", "--env", "odd_envs:Base", "--wrapper", STACK, *SMALL, *HERE]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    capsys.readouterr()
    assert main(["play", str(run), "--steps", "4", "--out", "film.gif"]) == 0
    assert capsys.readouterr().out.startswith("film.gif: 5 frames of odd_envs:Base")


def test_the_first_wrapper_is_the_innermost_one() -> None:
    task = Task(env="Pendulum-v1", wrapper=(STACK, FLAT))
    assert spaces_of(find(task, auto_reset=True))[0].shape == (9,)
    task = Task(env="Pendulum-v1", wrapper=(FLAT, STACK))
    assert spaces_of(find(task, auto_reset=True))[0].shape == (3, 3)


def test_values_are_json_or_text_and_lists_are_tuples() -> None:
    task = Task(env="Pendulum-v1", wrapper=("test_wrappers:noted,shape=[84,84],name=a b,flag=false",))
    find(task, auto_reset=True)(n_envs=1)
    assert NOTED == [{"shape": (84, 84), "name": "a b", "flag": False}]


NOTED: list[dict[str, Any]] = []


def noted(env: gymnasium.Env[Any, Any], **arguments: Any) -> gymnasium.Env[Any, Any]:
    NOTED.append(arguments)
    return env


def not_an_env(env: gymnasium.Env[Any, Any]) -> int:
    return 3


LIMIT = "gymnasium.wrappers:TimeLimit"


@pytest.mark.parametrize(
    ("wrapper", "says"),
    [
        ("TimeLimit", f"expected MODULE:NAME or MODULE:NAME,KEY=VALUE, such as {LIMIT},max_episode_steps=50."),
        ("gymnasium.wrappers:TimLimit", "gymnasium.wrappers has no function or class 'TimLimit'. Did you mean 'TimeL"),
        ("no_such_module:Wrapper", "there is no module 'no_such_module' in the current folder or on PYTHONPATH"),
        (LIMIT, "the argument 'max_episode_steps' is missing. Add ,max_episode_steps=VALUE"),
        (f"{LIMIT},max_steps=5", "there is no argument 'max_steps', expected max_episode_steps. Did you mean 'max_ep"),
        (f"{LIMIT},5", "expected KEY=VALUE, such as max_episode_steps=50"),
        (f"{LIMIT},max_episode_steps=-5", "raised ValueError: Expect the `max_episode_steps` to be positive"),
        (f"{FLAT},size=3", "there is no argument 'size', expected none: omit it."),
        ("gymnasium.wrappers.vector:ClipReward", "ClipReward wraps vector environments, expected a wrapper of single"),
        ("test_wrappers:not_an_env", "it returned an int, expected a gymnasium.Env. Name a class of gymnasium.Wrapper"),
        ("builtins:dict", "cannot wrap an environment: "),
    ],
)
def test_a_wrong_wrapper_is_one_sentence(wrapper: str, says: str, capsys: Capture) -> None:
    assert main(["train", "ppo", "--env", "Pendulum-v1", "--wrapper", wrapper, *SMALL, *HERE]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlstruct train: --wrapper ")
    assert says in said
    assert said.count("\n") == 1
    assert not pathlib.Path("runs").exists()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (["--env", "CartPole-v1", "--simulator", "torch"], "CartPole-v1 is a bundled simulator here, expected"),
        (["--env", "Breakout-MinAtar"], "Breakout-MinAtar is a bundled simulator here, expected"),
        (["--env", "rlstruct.sims.cart_pole:CartPole"], "is a VecEnv, CartPole, expected an environment of gymnasium"),
    ],
)
def test_only_environments_of_gymnasium_have_wrappers(env: list[str], says: str, capsys: Capture) -> None:
    assert main(["train", "a2c", *env, "--wrapper", SHORT, *SMALL, *HERE]) == 2
    assert says in capsys.readouterr().err
