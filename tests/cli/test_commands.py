"""The commands as users call them, in this process: what they say, what they leave, how they end."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import pathlib
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces

from rlstruct.algos import ALGORITHMS
from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.training import compiling
from rlstruct.algos.training.evaluation import Evaluation
from rlstruct.algos.training.learning_curve import Curve, draw_panels, together
from rlstruct.algos.training.presets import PRESETS
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.cli.agents import algorithm_of, choose
from rlstruct.cli.commands.plot import read_curve, read_panels
from rlstruct.cli.commands.train import read_options
from rlstruct.cli.main import COMMANDS, main
from rlstruct.cli.messages import UserError, nearest
from rlstruct.cli.stored_run import RunSettings, load_settings
from rlstruct.cli.tasks import Task, find, spaces_of

for package in ("tyro", "tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")
Image = pytest.importorskip("PIL.Image", reason="needs the extra: pip install 'rlstruct[train]'")

SMALL = ["--n-env-steps", "200", "--n-timesteps", "20", "--n-envs", "2", "--n-processes", "0"]
SMALL += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--no-progress"]
DISTRIBUTIONAL = ["--network", "layer_norm=true", "n_atoms=11", "value_range=[-50,5]"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def train(*options: str) -> pathlib.Path:
    """Train for a few steps and return the run's folder."""
    before = set(pathlib.Path("runs").glob("*"))
    assert main(["train", *options]) == 0
    (folder,) = set(pathlib.Path("runs").glob("*")) - before
    return folder


@pytest.mark.parametrize(
    ("algorithm", "options", "agent"),
    [
        ("reinforce", ["--env", "CartPole-v1", "--n-timesteps", "500"], "policy, perceptron"),
        ("a2c", ["--env", "CartPole-v1", "--simulator", "torch", "--recurrent"], "recurrent policy"),
        ("a2c", ["--env", "Pendulum-v1", "--evaluation-timesteps", "200"], "Gaussian policy, perceptron"),
        ("a2c", ["--env", "Seaquest-MinAtar"], "convolutional policy"),
        ("ppo", ["--env", "CartPole-v1", "--n-epochs", "2"], "policy, perceptron"),
        ("ppo", ["--env", "CartPole-v1", "--simulator", "torch", "--recurrent"], "recurrent policy"),
        ("ppo", ["--env", "CartPole-v1", "--network", "normalise=true"], "policy, perceptron, normalised"),
        ("pqn", ["--env", "CartPole-v1"], "perceptron of action values, layer norm"),
        ("pqn", ["--env", "CartPole-v1", "--recurrent"], "recurrent network of action values, layer norm"),
        ("sac", ["--env", "Pendulum-v1", "--network", "hidden=[16]"], "squashed Gaussian policy, perceptron"),
        (
            "sac",
            ["--env", "Pendulum-v1", "--n-step=3", "--critic-reduction=mean", "--weight-decay=0.01", *DISTRIBUTIONAL],
            "squashed Gaussian policy, perceptron",
        ),
        # Who says how wide a perceptron is to be gets one, also for images: as the tuned settings of Breakout do.
        ("a2c", ["--env", "Breakout-MinAtar", "--n-minibatches", "1"], "policy, perceptron"),
        ("dqn", ["--env", "Breakout-MinAtar", "--network", "hidden=[16]"], "perceptron of action values, duelling"),
        ("dqn", ["--env", "FrozenLake-v1", "--env-options", "is_slippery=false"], "perceptron of action values"),
    ],
)
def test_train_picks_the_agent_and_leaves_a_run_that_can_be_evaluated(
    algorithm: str, options: list[str], agent: str, capsys: Capture
) -> None:
    extra = ["--learning-starts", "50", "--n-updates", "1", "--replay-capacity", "1000"]
    extra = extra if algorithm in ("dqn", "sac") else []
    folder = train(algorithm, *SMALL, *options, *extra)
    assert folder.name.startswith(f"{algorithm}-{options[1]}-seed0-")
    stored = json.loads((folder / "config.json").read_text())
    assert stored["algorithm"] == algorithm
    assert stored["task"]["env"] == options[1]
    assert stored["agent"].startswith(agent)
    # The wheel of the package index is 2.13.0, and torch calls itself 2.13.0+cu130.
    assert torch.__version__.startswith(stored["versions"]["torch"])
    assert {"checkpoint.pt", "metrics.csv", "learning_curve.png"} <= {file.name for file in folder.iterdir()}
    assert "after training: return" in capsys.readouterr().out
    assert main(["evaluate", str(folder), "--episodes", "3"]) == 0
    assert "3 episodes" in capsys.readouterr().out


def settings_of(run: pathlib.Path) -> dict[str, object]:
    return json.loads((run / "config.json").read_text())["config"]


def test_train_begins_with_the_settings_tuned_for_the_environment(capsys: Capture) -> None:
    tuned = dataclasses.asdict(PRESETS["a2c", "Pendulum-v1"].config)
    run = train("a2c", "--env", "Pendulum-v1", *SMALL)
    assert "settings: those for Pendulum-v1" in capsys.readouterr().out
    found = settings_of(run)
    given = {option.removeprefix("--").replace("-", "_") for option in SMALL}
    assert {name: found[name] for name in found if name not in given} == {
        name: tuned[name] for name in tuned if name not in given
    }
    assert found["n_timesteps"] == 20
    # Its network draws wide at first; Adam moves a number by the learning rate at most, in each of a few updates.
    weights = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    torch.testing.assert_close(weights["policy.log_std"], torch.ones(1), atol=0.1, rtol=0)
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0


@pytest.mark.parametrize(("algorithm", "env"), PRESETS)
def test_the_network_of_a_preset_can_be_made(algorithm: str, env: str) -> None:
    preset = PRESETS[algorithm, env]
    env = re.sub("-(1024|recurrent|steady)$", "", env)
    assert type(preset.config) is algorithm_of(algorithm).learner.settings
    task = Task(env=env, network=tuple(f"{key}={json.dumps(value)}" for key, value in preset.network.items()))
    if env.startswith("LunarLander"):  # needs an extra; these are its spaces
        actions = spaces.Discrete(4) if env == "LunarLander-v3" else spaces.Box(-1.0, 1.0, (2,))
        found: tuple[spaces.Space, spaces.Space] = spaces.Box(-2.5, 2.5, (8,)), actions
    elif env.startswith("ALE/"):  # likewise
        found = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(4)
    elif env.endswith("-v5"):  # MuJoCo, likewise
        found = spaces.Box(-math.inf, math.inf, (17,)), spaces.Box(-1.0, 1.0, (6,))
    else:
        found = spaces_of(find(task, auto_reset=True))
    model = choose(algorithm, task, *found).create_model()
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000


@pytest.mark.parametrize(("algorithm", "env"), PRESETS)
def test_the_target_of_a_preset_is_above_the_threshold_of_its_task(algorithm: str, env: str) -> None:
    spec = gymnasium.registry.get(re.sub("-(1024|recurrent|steady)$", "", env))
    threshold = None if spec is None else spec.reward_threshold
    target = PRESETS[algorithm, env].config.target_return
    assert target is None or (threshold is not None and target > threshold)


def test_several_choices_at_once_get_an_agent_and_dqn_refuses_them() -> None:
    found = spaces.Box(-1.0, 1.0, (2,)), spaces.MultiDiscrete([3, 2])
    logits, _ = choose("a2c", Task(env="any"), *found).create_model()(torch.zeros(5, 2))
    assert logits.shape == (5, 2, 3)
    assert logits[:, 1, 2].isinf().all()
    with pytest.raises(UserError, match="DQN chooses one action at a time, and here they are several at once"):
        choose("dqn", Task(env="any"), *found)


def test_another_preset_or_none_can_be_chosen(capsys: Capture) -> None:
    short = [*SMALL, "--env-options", "max_episode_steps=20"]
    other = train("a2c", "--env=MountainCar-v0", "--preset=Acrobot-v1", *short)
    assert "settings: those for Acrobot-v1" in capsys.readouterr().out
    assert settings_of(other)["trace_decay"] == PRESETS["a2c", "Acrobot-v1"].config.trace_decay
    assert PRESETS["a2c", "Acrobot-v1"].config.target_return is not None
    assert settings_of(other)["target_return"] is None  # a return of Acrobot says nothing of this task
    none = train("a2c", "--env", "Acrobot-v1", "--preset", "none", *short)
    assert "settings: the defaults, tuned for CartPole-v1" in capsys.readouterr().out
    assert settings_of(none)["trace_decay"] == A2CConfig().trace_decay


def test_a_preset_whose_network_does_not_fit_is_blamed(capsys: Capture) -> None:
    words = ["train", "ppo", "--env", "CartPole-v1", *SMALL, "--preset", "Pendulum-v1"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--preset Pendulum-v1: this preset is for another environment" in said
    assert "--network initial_log_std=0.5, does not fit CartPole-v1. Pass a --network that fits, or omit --pre" in said
    assert main([*words, "--network", "initial_log_std=0.7"]) == 2
    assert "train: --network initial_log_std: there are only hidden" in capsys.readouterr().err
    assert main([*words, "--env", "no_such_module:Env"]) == 2
    assert "train: there is no module 'no_such_module'" in capsys.readouterr().err


def test_what_would_be_compiled_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(compiling, "SECONDS", dict.fromkeys(compiling.SECONDS, 0.0))
    monkeypatch.setattr(compiling, "why_no_compiler", lambda: "there is no C++ compiler called g++")
    switches = ["--no-compile-agent", "--no-compile-simulator"]
    folder = train("ppo", "--env", "CartPole-v1", "--n-minibatches", "1", *switches, *SMALL)
    told = capsys.readouterr().out
    assert "run_training would turn on compile_update (saves about 0 s, costs 0)," in told
    assert "but there is no C++ compiler called g++." in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80 or str(folder) in told
    stored = json.loads((folder / "config.json").read_text())["config"]
    names = ("compile_agent", "compile_update", "compile_simulator")
    assert [stored[name] for name in names] == [False, "auto", False]


@pytest.mark.slow
def test_a_preset_has_no_more_minibatches_than_there_are_environments(capsys: Capture) -> None:
    assert PRESETS["a2c", "Breakout-MinAtar"].config.n_minibatches == 4
    run = train("a2c", "--env", "Breakout-MinAtar", *SMALL)  # has --n-envs 2
    assert "\nn_minibatches: 2 instead of 4, one for each environment\n" in capsys.readouterr().out
    assert settings_of(run)["n_minibatches"] == 2
    again = train("--config", str(run), "--n_envs=1", "--no-progress")
    assert "\nn_minibatches: 1 instead of 2, one for each environment\n" in capsys.readouterr().out
    assert settings_of(again)["n_minibatches"] == 1
    train("a2c", "--env", "Breakout-MinAtar", *SMALL, "--n-minibatches", "1")
    assert "instead of" not in capsys.readouterr().out
    assert main(["train", "a2c", "--env", "Breakout-MinAtar", *SMALL, "--n-minibatches", "3"]) == 2
    assert "n_minibatches is 3, expected at most one" in capsys.readouterr().err


def test_a_wider_network_is_remembered(capsys: Capture) -> None:
    run = train("a2c", "--env", "CartPole-v1", *SMALL, "--network", "hidden=[16]", "orthogonal=false")
    weights = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    assert [tuple(value.shape) for name, value in weights.items() if name.startswith("actor.")] == [
        *((16, 4), (16,)),
        *((2, 16), (2,)),
    ]
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    stored = run / "config.json"
    stored.write_text(stored.read_text().replace("hidden=[16]", "hidden=[8]"))
    assert main(["evaluate", str(run)]) == 2
    said = capsys.readouterr().err
    assert "does not fit the network of this version, policy, perceptron: " in said
    assert "is [8, 4], expected [16, 4]. Make the network with the sizes that the training used." in said


def test_a_stored_run_is_run_again_with_the_same_result_and_with_other_options() -> None:
    first = train("a2c", "--env", "CartPole-v1", *SMALL, "--seed", "3", "--learning-rate", "0.02")
    again = train("--config", str(first), "--no-progress")
    other = train(f"--config={first}", "--no-progress", "--discount", "0.5")
    weights = [torch.load(run / "checkpoint.pt", weights_only=True)["model"] for run in (first, again, other)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
    assert not all(torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    configs = [json.loads((run / "config.json").read_text())["config"] for run in (first, again, other)]
    assert configs[0] == configs[1]
    assert configs[2] == {**configs[0], "discount": 0.5}


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    options = ["a2c", "--env", "CartPole-v1", "--simulator", "torch", *SMALL, "--evaluation-interval", "80"]
    whole = train(*options)
    record = RunFolder.log_evaluation

    def stopped_at_the_second(folder: RunFolder, result: Evaluation) -> None:
        if result.env_steps and result.env_steps < 200 and not folder.checkpoint:
            raise KeyboardInterrupt
        record(folder, result)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log_evaluation", stopped_at_the_second)
        assert main(["train", *options, "--name", "stopped"]) == 130
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("rlstruct train: stopped. To continue: rlstruct train --resume runs/stopped-")
    (stopped,) = pathlib.Path("runs").glob("stopped-*")
    assert main(["train", "--resume", str(stopped), "--discount", "0.5", "--no-progress"]) == 2
    assert "discount is 0.5, but 0.99 in the checkpoint" in capsys.readouterr().err
    assert main(["train", "--resume", str(stopped), "--env", "Acrobot-v1"]) == 2
    said = capsys.readouterr().err
    assert f"--resume {stopped}: --env is 'Acrobot-v1', but 'CartPole-v1' in the run. Omit --env, or start an" in said
    assert f"another run with it: rlstruct train --config {stopped} --env …" in said
    with RunFolder.resume(stopped, progress=False):
        assert main(["train", "--resume", str(stopped)]) == 2
    assert "is in use: a training writes into it" in capsys.readouterr().err
    assert main(["train", "--resume", str(stopped), "--preset", "none"]) == 2
    assert "omit it" in capsys.readouterr().err
    assert main(["train", "--resume", str(stopped), "--no-progress"]) == 0
    assert "from its checkpoint" in capsys.readouterr().out
    weights = [torch.load(run / "checkpoint.pt", weights_only=True)["model"] for run in (whole, stopped)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
    assert main(["train", "--resume", str(stopped), "--n-env-steps", "300", "--no-progress"]) == 0
    assert load_settings(stopped).config.n_env_steps == 300  # what --config repeats, and plot tells apart
    capsys.readouterr()
    assert main(["train", "--resume", str(stopped), "--n-env-steps", "250", "--no-progress"]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith(f"rlstruct train: --resume {stopped}: A2CConfig: n_env_steps is 250, but 3")
    assert load_settings(stopped).config.n_env_steps == 300
    (stopped / "checkpoint.pt").write_bytes(b"half of it")
    assert main(["evaluate", str(stopped)]) == 2
    assert "checkpoint.pt is not a checkpoint of a training, or is damaged" in capsys.readouterr().err


def test_the_description_of_a_training_fits_80_columns(capsys: Capture) -> None:
    train("dqn", "--env", "Asterix-MinAtar", "--preset", "none", "--learning-starts", "40", *SMALL)
    said = capsys.readouterr().out
    assert "dqn on Asterix-MinAtar: convolutional network of action values, duelling,\n  learner on cpu\n" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.slow
def test_two_runs_are_plotted_as_one_curve_and_a_film_of_the_agent_moves(capsys: Capture) -> None:
    runs = [train("a2c", "--env", "CartPole-v1", *SMALL, "--seed", seed) for seed in "01"]
    other = train("a2c", "--env", "CartPole-v1", *SMALL, "--trace-decay", "0.5")
    capsys.readouterr()
    assert main(["plot", *map(str, runs), str(other), "--out", "pictures/curve.png"]) == 0
    said = capsys.readouterr().out
    assert "a2c, trace_decay 0.98: 2 runs" in said
    assert "a2c, trace_decay 0.5: 1 run," in said
    changed = ["--max-gradient-norm", "0.75", "--learning-rate", "0.0002", "--discount", "0.9", "--trace-decay", "0.5"]
    other = train("a2c", "--env", "CartPole-v1", *SMALL, *changed)
    capsys.readouterr()
    assert main(["plot", str(runs[0]), str(other), "--out", "pictures/two.png"]) == 0
    said = capsys.readouterr().out
    assert "\n  " in said  # settings that fill more than one line
    assert max(map(len, said.splitlines()[:-1])) <= 80
    for _ in range(2):  # runs of a program of the user's, such as the demo
        with RunFolder("mine", A2CConfig(), n_env_steps=9, progress=False) as mine:
            mine.log_evaluation(Evaluation(0, 0, (1.0, 3.0), (1, 2), 0.1))
    assert main(["plot", str(other), *map(str, pathlib.Path("runs").glob("mine-*"))]) == 0
    assert "a2c: 1 run, ends at" in (said := capsys.readouterr().out)
    assert "mine: 2 runs, ends at 2.0 (from 2.0 to 2.0)" in said
    assert main(["plot", str(mine.path)]) == 0
    assert "mine: 1 run, ends at 2.0" in capsys.readouterr().out
    with Image.open("pictures/curve.png") as picture:
        assert len(picture.convert("RGB").getcolors(maxcolors=2**20)) > 50  # lines, bands, words
    assert main(["evaluate", str(runs[0]), "--episodes", "2", "--video", "film.gif", "--actions", "best"]) == 0
    assert "best actions" in capsys.readouterr().out
    assert frames_differ(pathlib.Path("film.gif")) > 3
    assert main(["play", str(runs[0]), "--steps", "5", "--out", "sheet.png"]) == 0
    assert "a2c after 2" in capsys.readouterr().out  # 200 environment steps and a bit


def test_a_training_that_stops_at_its_target_shows_the_return_that_stopped_it(capsys: Capture) -> None:
    run = train("a2c", "--env", "CartPole-v1", *SMALL, "--target-return", "1", "--n-env-steps", "100")
    lines = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ": return " in line]
    assert lines == ["before training", "  at the target", " after training"]
    curve = read_curve(run, "evaluation/mean_return")
    assert curve.steps == [0, 0]  # the untrained agent reaches 1, and is judged again on other episodes


@pytest.mark.parametrize(
    "command",
    [
        "evaluate run --out notes/results.json",
        "evaluate run --video notes/film.gif",
        "play CartPole-v1 --out notes/film.gif",
        "plot run --out notes/curves.png",
        "export run --out notes",
        "tune a2c --env CartPole-v1 --out notes/preset",
        "tune a2c --env CartPole-v1 --cache notes/answers.json",
        "profile --out notes train a2c --env CartPole-v1",
        "train a2c --env CartPole-v1 --runs notes",
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(command: str, capsys: Capture) -> None:
    pathlib.Path("notes").write_text("not a folder")
    pathlib.Path("run").mkdir()
    begin = time.process_time()
    assert main(command.split()) == 2
    said = r"(cannot be written|cannot create a folder there): (Not a directory|File exists)"
    assert re.search(said, capsys.readouterr().err)
    assert time.process_time() - begin < 5


def test_the_evaluation_that_ended_a_training_is_drawn_and_the_final_one_counts(tmp_path: pathlib.Path) -> None:
    # 90 reached the target; 70 are other episodes of the same weights. What is learned besides is written in between.
    lines = ["env_steps,evaluation/mean_return", "0,20", "50,", "25,40", "50,90", "50,70"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    curve = read_curve(tmp_path, "evaluation/mean_return")
    assert curve == Curve([0, 25, 50, 50], [20.0, 40.0, 90.0, 70.0])
    steps, values = together([curve, Curve([0, 50], [0.0, 50.0])])
    assert steps.tolist() == [0, 25, 50]
    assert values.tolist() == [[20, 40, 70], [0, 25, 50]]


def test_a_mean_of_curves_stands_where_all_of_them_have_values() -> None:
    steps, values = together([Curve([0, 10, 20], [0.0, 1.0, 2.0]), Curve([5, 15], [10.0, 20.0])])
    assert steps.tolist() == [5, 10, 15]
    assert values.tolist() == [[0.5, 1.0, 1.5], [10.0, 15.0, 20.0]]


def test_the_mean_of_trainings_that_have_ended_goes_on_with_their_last_values() -> None:
    steps, values = together([Curve([0, 10, 10], [0.0, 1.0, 3.0]), Curve([5, 15], [10.0, 20.0])], ended=True)
    assert steps.tolist() == [5, 10, 15]
    assert values.tolist() == [[1.5, 3.0, 3.0], [10.0, 15.0, 20.0]]


def test_panels_stand_below_each_other_or_in_a_grid(tmp_path: pathlib.Path) -> None:
    panels = {f"panel {i}": {"PPO": [Curve([0, 10], [0.0, float(i)])]} for i in range(4)}
    sizes = {}
    for columns in (1, 3, 5):
        draw_panels(panels, tmp_path / "panels.png", metric="return", columns=columns)
        with Image.open(tmp_path / "panels.png") as picture:
            sizes[columns] = picture.size
    assert sizes[1][0] < sizes[1][1]  # four panels high
    assert sizes[3] == (1320, 594)  # two lines of 4.0 x 2.7 inches at 110 dots per inch
    assert sizes[5] == (1760, 297)


@pytest.mark.parametrize("n_runs", [1, 2])
def test_a_step_that_occurs_twice_is_drawn_once(n_runs: int, tmp_path: pathlib.Path) -> None:
    def pixels(curve: Curve) -> bytes:
        draw_panels({"": {"PPO": [curve] * n_runs}}, tmp_path / "curve.png", metric="return")
        with Image.open(tmp_path / "curve.png") as picture:
            return picture.tobytes()

    assert pixels(Curve([0, 50, 50], [1.0, 2.0, 3.0])) == pixels(Curve([0, 50], [1.0, 3.0]))
    assert pixels(Curve([0, 50], [1.0, 2.0])) != pixels(Curve([0, 50], [1.0, 3.0]))


def test_a_label_has_the_same_colour_in_all_panels(tmp_path: pathlib.Path) -> None:
    def colours(second: str, order: Sequence[str] = ()) -> list[set[tuple[int, ...]]]:
        up, down = [Curve([0, 10], [0.0, 1.0])], [Curve([0, 10], [1.0, 0.0])]
        panels = {"left": {"PPO": up, "PQN": down}, "right": {second: up}}
        draw_panels(panels, tmp_path / "panels.png", metric="return", columns=2, order=order)
        with Image.open(tmp_path / "panels.png") as picture:
            both = np.asarray(picture.convert("RGB"))
        both = both[40:]  # below the legend
        middle = both.shape[1] // 2
        found = [
            np.unique(half.reshape(-1, 3), axis=0, return_counts=True) for half in (both[:, :middle], both[:, middle:])
        ]
        # A line has more than a hundred pixels of one colour, which is not grey.
        return [{tuple(c) for c, n in zip(*one, strict=True) if n > 100 and np.ptp(c) > 60} for one in found]

    left, right = colours("PQN")
    assert (len(left), len(right)) == (2, 1)
    assert right < left
    assert colours("PPO")[1] == left - right
    assert colours("PPO", order=("PQN", "PPO"))[1] == right  # in this order, whatever comes first


def frames_differ(path: pathlib.Path) -> int:
    """Count the frames of a gif that differ from the one before."""
    with Image.open(path) as film:
        frames = []
        for i in range(film.n_frames):
            film.seek(i)
            frames.append(film.convert("RGB").tobytes())
    return sum(one != other for one, other in itertools.pairwise(frames))


@pytest.mark.parametrize(
    "env",
    [
        *("Breakout-MinAtar", "Seaquest-MinAtar", "ConnectFour-v0"),
        *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    ],
)
def test_play_draws_every_kind_of_environment(env: str, capsys: Capture) -> None:
    assert main(["play", env, "--steps", "6", "--n-envs", "2"]) == 0
    assert "acting at random" in capsys.readouterr().out
    assert frames_differ(pathlib.Path(f"play-{env}.gif")) >= 3


def test_a_legend_stands_once_beside_all_pictures() -> None:
    options = ["play", "Breakout-MinAtar", "--steps", "2", "--n-envs", "4"]
    assert main([*options, "--out", "sheet.png"]) == 0
    assert main([*options, "--out", "film.gif"]) == 0
    legend, caption = 112, 20
    width, height = 240 + 4 + 240, 240 + caption + 4 + 240 + caption
    with Image.open("sheet.png") as sheet:  # three steps side by side
        assert sheet.size == (3 * width + 2 * 16 + 4 + legend, height)
    with Image.open("film.gif") as film:
        assert film.size == (width + 4 + legend, height)


@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")  # of what reads it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_film_may_be_an_mp4() -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")
    assert main(["play", "Breakout-MinAtar", "--steps", "8", "--out", "film.mp4"]) == 0
    frames = ffmpeg.read_frames("film.mp4")
    size = next(frames)["size"]
    assert size == (240 + 4 + 112, 240 + 20)
    pictures = [Image.frombytes("RGB", size, frame) for frame in frames]
    assert len(pictures) == 1 + 8 + 1  # an end is followed by a start
    assert pictures[0].getpixel((238, 2)) != pictures[0].getpixel((2, 258))  # dark game, white caption


@pytest.mark.parametrize(
    ("package", "file", "says"),
    [("imageio_ffmpeg", "film.mp4", "film.mp4: a film as .mp4"), ("pygame", "film.gif", "a film of CartPole-v1")],
)
def test_a_package_that_a_film_lacks_is_named_before_anything_is_drawn(
    package: str, file: str, says: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["play", "CartPole-v1", "--out", file]) == 2
    assert f"{says} needs {package}, which is not installed. Install the extra" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["trian"],
            "there is no command 'trian', only train, evaluate, export, plot, play, tune, profile, explain, envs, "
            "devices. Did",
        ),
        (["train", "a2d", "--env", "CartPole-v1"], "Did you mean 'a2c'?"),
        (["train", "--env", "CartPole-v1"], "name the algorithm first"),
        (["train", "a2c", "--env", "CartPol-v1"], "Did you mean 'CartPole-v1'?"),
        (["train", "a2c", "--env", "cartpole"], "Did you mean 'CartPole-v"),
        (["train", "a2c", "--env", "Brekout-MinAtar"], "Did you mean 'Breakout-MinAtar'?"),
        (["train", "a2c", "--env", "Taxi-v3", "--simulator", "torch"], "no bundled simulator is called 'Taxi-v3'"),
        (["train", "a2c", "--env", "nowhere_at_all:Env-v0"], "there is no module 'nowhere_at_all'"),
        (["train", "a2c", "--env", "CartPole-v1", "--env-options", "gravity"], "expected KEY=VALUE"),
        (["train", "a2c", "--env", "CartPole-v1", "--env-options", "colour=3"], "colour"),
        (["train", "a2c", "--env", "CartPole-v1", "--network", "hiden=[9]"], "Did you mean 'hidden'?"),
        (["train", "a2c", "--env", "CartPole-v1", "--network", "hidden"], "expected KEY=VALUE"),
        (
            ["train", "dqn", "--env", "CartPole-v1", "--network", "normalise=true"],
            "normalise: there are only",
        ),
        (["train", "a2c", "--env", "CartPole-v1", "--preset", "Acrobat-v1"], "Did you mean 'Acrobot-v1'?"),
        (["train", "a2c", "--env", "CartPole-v1", "--learner-device", "cuda:7"], "Devices here: cpu"),
        (
            ["train", "a2c", "--env", "CartPole-v1", "--batcher-device", "gpu"],
            "'gpu' is not a device. Devices here: cpu",
        ),
        (
            ["train", "dqn", "--env", "CartPole-v1", "--replay-device", "cuda:7"],
            "--replay-device cuda:7: cuda",
        ),
        (["train", "dqn", "--env", "Pendulum-v1"], "use ppo, a2c or reinforce"),
        (["train", "sac", "--env", "CartPole-v1"], "SAC needs bounded continuous actions"),
        (["train", "sac", "--env", "Pendulum-v1", "--recurrent"], "SAC has no agent with a memory"),
        (["train", "dqn", "--env", "CartPole-v1", "--recurrent"], "use pqn, ppo or a2c"),
        (["train", "dqn", "--env", "CartPole-v1", "--network", "recurrent=true"], "omit --network recurrent=true"),
        (["train", "alphazero", "--env", "ConnectFour-v0", "--network", "hidden=64"], "hidden: there are only n_feat"),
        (["train", "a2c", "--env", "ConnectFour-v0"], "only AlphaZero respects that"),
        (["train", "--config", "nowhere"], "nowhere is not a run folder"),
        (["train", "--resume", "nowhere"], "nowhere is not a run folder"),
        (["train", "--resume"], "expected the folder of a run"),
        (["train", "--resume", "one", "--config", "another"], "pass only one of them"),
        (["evaluate", "nowhere"], "nowhere is not a run folder"),
        (["plot", "nowhere"], "nowhere is not a run folder"),
        (["train", "a2c", "--env", "CartPole-v1", "--network", "hidden=foo"], "hidden is 'foo', expected a sequence"),
        (["train", "a2c", "--env", "CartPole-v1", "--network", "hidden=[0]"], "hidden is [0], expected a sequence"),
        (
            ["train", "a2c", "--env", "CartPole-v1", "--runs", "/dev/null/runs"],
            "--runs /dev/null/runs: cannot create a folder",
        ),
        (["envs", "cartpol-v"], "no environment's name contains 'cartpol-v'. Did you mean 'CartPole-v1'?"),
        (["envs", "one", "two"], "expected a part of a name, or nothing"),
        (["play", "seaquest-minatr"], "Did you mean 'Seaquest-MinAtar'?"),
        (["play", "CartPole-v1", "--out", "film.avi"], "expected a name that ends with .gif or .mp4"),
        (["devices", "now"], "expected no arguments"),
        (["profile", "--window", "soon", "train"], "--window soon: expected a number of seconds"),
    ],
)
def test_a_mistake_is_one_line_with_the_mend_and_status_2(words: list[str], says: str, capsys: Capture) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith("rlstruct")
    assert said.count("\n") == 1
    assert not pathlib.Path("runs").exists()


def test_a_run_that_has_reached_its_target_goes_on_without_it(capsys: Capture) -> None:
    run = train("a2c", "--env", "CartPole-v1", *SMALL, "--target-return", "1")
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--no-progress"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "left to do: this run has reached its target, a return of 1. To continue it, pass --target" in said
    assert main(["train", "--resume", str(run), "--no-progress", "--target-return", "None"]) == 0
    said = capsys.readouterr().out
    assert "nothing is left" not in said
    assert "200 environment steps" in said


def test_a_stopped_run_names_its_loggers(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "log_evaluation", stopped)
    assert main(["train", "a2c", "--env", "CartPole-v1", *SMALL, "--loggers"]) == 130
    assert re.search(r"--resume runs/a2c-CartPole-v1-\S+ --loggers \(its curve", capsys.readouterr().err)


@pytest.mark.slow
def test_torchrun_resumes_what_torchrun_has_trained(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    words = ["-m", "rlstruct", "train"]

    def launch(n: int, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*torchrun, str(n), *words, *options], capture_output=True, text=True, timeout=300)

    done = launch(2, "a2c", "--env", "CartPole-v1", *SMALL)
    assert done.returncode == 0, done.stderr
    (run,) = pathlib.Path("runs").iterdir()
    done = launch(2, "--resume", str(run), "--n-env-steps", "400", "--no-progress")
    assert done.returncode == 0, done.stderr
    assert "400 environment steps" in done.stdout
    # What torchrun tells the first of three processes; it is refused before they look for each other.
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--resume", str(run), "--n-env-steps", "600", "--no-progress"]) == 2
    printed = capsys.readouterr().err
    assert "there are 3 learners now, and 2 in the checkpoint. Resume with --learners 2, or start" in printed


def test_what_may_not_be_read_is_told_in_one_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train("a2c", "--env", "CartPole-v1", *SMALL)
    capsys.readouterr()

    def refuse(path: pathlib.Path, *_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    assert main(["evaluate", str(run)]) == 2
    assert capsys.readouterr().err == f"rlstruct evaluate: {run}/config.json: Permission denied.\n"


def test_play_says_that_a_run_does_not_exist(capsys: Capture) -> None:
    run = train("a2c", "--env", "CartPole-v1", *SMALL)
    capsys.readouterr()
    assert main(["play", f"{run}1"]) == 2
    assert f"{run}1 is not a run folder: it does not exist. Did you mean '{run}'?" in capsys.readouterr().err
    assert main(["evaluate", str(run / "config.json"), "--episodes", "2"]) == 0


def test_a_full_disk_is_told_in_one_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "save_checkpoint", full)
    assert main(["train", "a2c", "--env", "CartPole-v1", *SMALL]) == 2
    assert "can no longer be written: No space left on device." in capsys.readouterr().err


@contextlib.contextmanager
def at_most(kind: int, n: int) -> Iterator[None]:
    """Lower one of the limits that ``ulimit`` sets."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (1000, r"--runs runs: cannot create a folder there: File too large\."),
        (
            8192,
            r"runs/\S* can no longer be written: File too large\. `ulimit -f` limits a file to 8192 bytes: raise it\.",
        ),
    ],
)
def test_a_limit_of_files_sizes_is_told_in_one_sentence(size: int, says: str, capsys: Capture) -> None:
    with at_most(resource.RLIMIT_FSIZE, size):
        assert main(["train", "a2c", "--env", "CartPole-v1", *SMALL]) == 2
    assert re.fullmatch(f"rlstruct train: {says}\n", capsys.readouterr().err)
    assert len(list(pathlib.Path("runs").iterdir())) == (size > 1000)  # an empty config.json would be of no use


@pytest.mark.slow
def test_a_limit_of_open_files_is_told_in_one_sentence() -> None:
    words = ["train", "a2c", "--env", "CartPole-v1", *SMALL, "--n-processes", "2"]
    command = [sys.executable, "-m", "rlstruct", *words]
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (24, 24))
    found = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert found.returncode == 2
    assert re.fullmatch(
        r"rlstruct train: worker \d cannot be started: Too many open files\. [^\n]*\.\nTo read more: [^\n]*\n",
        found.stderr,
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--learnin-rate", "3"], "--learning-rate FLOAT"),
        (["--discount", "2"], "discount is 2.0, expected 0 to 1"),
        (["--n-processes", "-1"], "n_processes is -1, expected at least 0"),
        (["--n-envs", "many"], "--n-envs"),
        ([], "--env"),
        (["--total-timesteps=500"], "there is no option --total-timesteps. Did you mean --n-env-steps?"),
        (["--gae-lambda", "0.9"], "there is no option --gae-lambda. Did you mean --trace-decay?"),
        (["--clip-range", "0.2"], "Unrecognized options: --clip-range"),  # A2C does not clip
    ],
)
def test_a_wrong_option_names_the_right_one(options: list[str], says: str, capsys: Capture) -> None:
    env = ["--env", "CartPole-v1"] if options else []
    assert main(["train", "a2c", *env, *options]) == 2
    assert says in capsys.readouterr().err


# In the current folder, not on PYTHONPATH; its constructor knows no render_mode.
MODULE = """
import gymnasium
import numpy as np

class Line(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 5, False, {}

gymnasium.register("Line-v0", Line)
"""


def test_the_first_hour_of_an_environment_of_ones_own(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as of an installed command
    pathlib.Path("line_module.py").write_text(MODULE)
    run = train("a2c", "--env", "line_module:Line-v0", *SMALL, "--n-env-steps", "1e2", "--runs", "runs/of mine")
    (folder,) = run.iterdir()
    assert load_settings(folder).config.n_env_steps == 100
    said = capsys.readouterr().out
    assert f"next: rlstruct evaluate '{folder}'\n      rlstruct plot '{folder}'" in said
    steps = [int(line.split(",")[0]) for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    assert steps == sorted(steps)
    assert main(["evaluate", str(folder), "--episodes", "3", "--out", "found/of.json"]) == 0
    found = json.loads(pathlib.Path("found/of.json").read_text())
    assert (found["env"], found["returns"], found["lengths"]) == ("line_module:Line-v0", [5.0] * 3, [5] * 3)
    capsys.readouterr()
    assert main(["train", "--resume", str(folder), "--no-progress"]) == 0
    assert "this run is complete" in capsys.readouterr().out
    (folder / "checkpoint.pt").unlink()
    assert main(["train", "--resume", str(folder), "--no-progress"]) == 0
    assert "which has no checkpoint: it starts over" in capsys.readouterr().out
    assert main(["play", "line_module:Line-v0"]) == 2
    assert "line_module:Line-v0 cannot be drawn: it does not accept render_mode='rgb_array'" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_environment_that_raises_is_a_line_and_its_own_traceback(workers: str, capsys: Capture) -> None:
    # Not in an evaluation, whose environments have larger seeds.
    hole = "self.t += 1\n        if self.np_random_seed < 500_000:\n            raise OSError('a hole')"
    broken = MODULE.replace("self.t += 1", hole).replace("Line-v0", f"Hole{workers}-v0")
    pathlib.Path(f"hole_{workers}.py").write_text(broken)
    env = f"hole_{workers}:Hole{workers}-v0"
    assert main(["train", "a2c", "--env", env, *SMALL, "--n-processes", workers, "--preset", "none"]) == 2
    out, said = capsys.readouterr()
    (folder,) = pathlib.Path("runs").iterdir()
    assert f"to continue from the last checkpoint: rlstruct train --resume {folder}" in out
    first, *rest = said.splitlines()
    assert first.startswith("rlstruct train: ")
    assert "OSError: a hole" in first
    assert rest
    assert said.count("Traceback (most recent call last)") == 1
    assert "in step\n    raise OSError('a hole')" in said
    assert "rlstruct/cli" not in said


def test_large_whole_numbers_may_be_written_short(capsys: Capture) -> None:
    words = "a2c --env CartPole-v1 --n-env-steps 2.5e5 --evaluation-interval=1E+3 --learning-rate 3e-4 --name 1e6"
    _, options, _ = read_options(words.split())
    config = options.training
    assert (config.n_env_steps, config.evaluation_interval, config.learning_rate) == (250_000, 1000, 3e-4)
    assert options.output.name == "1e6"
    assert main(["train", "a2c", "--env", "CartPole-v1", "--n-envs", "1.55e1"]) == 2
    assert "1.55e1" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")  # of Ant-v3, by gymnasium
def test_envs_lists_what_can_be_learnt_here(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    assert main(["envs", "cart"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "bundled simulators (--simulator torch):"
    assert "CartPole-v1" in told.split()  # phys2d/CartPole-v1 needs flax
    assert "Acrobot" not in told
    assert "jax" not in told
    assert main(["envs", "blackjack"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("gymnasium:\n")
    assert "Blackjack-v1" in told.split()  # besides ALE/Blackjack-v5, which is another game
    pytest.importorskip("ale_py", reason="needs the extra: pip install 'rlstruct[atari]'")
    assert main(["envs", "breakout"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["ale-py:", "  ALE/Breakout-v5"]
    assert main(["envs", "ant-v"]) == 2  # gymnasium has moved Ant-v3 to another package, and Ant-v5 needs MuJoCo
    assert "no environment's name contains 'ant-v'" in capsys.readouterr().err
    assert main(["train", "ppo", "--env", "Ant-v3"]) == 2
    assert (
        "Ant-v3 cannot be created: The mujoco v2 and v3 based environments have been moved" in capsys.readouterr().err
    )
    assert main(["envs", "--help"]) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"evaluation_episodes": 64},
        {"evaluation_interval": 5_000},
        {"compile_agent": True},
        {"learning_rate": 0.5},
        {"n_env_steps": 20},
        {"seed": 1},
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_only_runs_that_differ_by_their_seed_share_a_band(
    other: dict[str, Any], ours: bool, tmp_path: pathlib.Path
) -> None:
    folders = []
    for settings in ({}, other):
        config: Any = A2CConfig(**settings)
        if ours:
            config = RunSettings(
                algorithm="a2c", task=Task(env="CartPole-v1"), agent="policy", config=config, versions={}
            )
        with RunFolder("run", config, n_env_steps=10, root=tmp_path, progress=False) as folder:
            folder.log_evaluation(Evaluation(10, 0, (10.0,), (5,), 0.1))
        folders.append(folder.path)
    (groups,) = read_panels(folders, "evaluation/mean_return").values()
    assert [len(curves) for curves in groups.values()] == ([2] if "seed" in other else [1, 1])
    for name in set(other) - {"seed"}:
        assert all(f"{name} {value}" in "; ".join(groups) for value in (getattr(A2CConfig(), name), other[name]))


def test_runs_in_several_environments_have_a_panel_each(tmp_path: pathlib.Path, capsys: Capture) -> None:
    folders = []
    for i, env in enumerate(["CartPole-v1", "Acrobot-v1", "CartPole-v1"]):
        config = A2CConfig(learning_rate=0.01 + i)
        record = RunSettings(algorithm="a2c", task=Task(env=env), agent="policy", config=config, versions={})
        with RunFolder("run", record, n_env_steps=10, root=tmp_path, progress=False) as folder:
            for step in (20, 10):
                folder.log_evaluation(Evaluation(step, 0, (float(step),), (5,), 0.1))
        folders.append(folder.path)
    assert list(panels := read_panels(folders, "evaluation/mean_return")) == ["Acrobot-v1", "CartPole-v1"]
    assert list(panels["Acrobot-v1"]) == ["a2c"]  # alone: nothing to tell it from
    assert list(panels["CartPole-v1"]) == ["a2c, learning_rate 0.01", "a2c, learning_rate 2.01"]
    (tmp_path / "profile-1").mkdir()  # runs/* holds such folders, and files
    (tmp_path / "tuning.json").write_text("{}")
    others = [str(tmp_path / "profile-1"), str(tmp_path / "tuning.json")]
    assert main(["plot", *map(str, folders), *others, "--out", "panels.png"]) == 0
    said = capsys.readouterr().out
    assert "Acrobot-v1: a2c: 1 run, ends at 20.0" in said
    assert f"left out, nothing was logged there: {', '.join(others)}" in said
    assert main(["plot", str(folders[0]), "nowhere"]) == 2  # a slip of the pen is no profile
    with Image.open("panels.png") as picture:
        assert picture.size == (1575, 960)  # two panels, labels next to them


def test_the_documentation_shows_commands_that_are_understood() -> None:
    root = pathlib.Path(__file__).parents[2]
    text = "\n".join(page.read_text() for page in (root / "README.md", *(root / "docs").rglob("*.md")))
    blocks = re.findall(r"^```\w*\n(.*?)^```", text.replace("\\\n", " "), re.DOTALL | re.MULTILINE)
    lines = {line for line in "\n".join(blocks).splitlines() if line.startswith("rlstruct ")}
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    assert {words[0] for words in commands} >= {"train", "evaluate", "plot", "play", "profile", "tune", "devices"}
    for command, *words in commands:
        assert command in COMMANDS
        if command == "train" and not {"--config", "--resume", "--help"} & set(words):
            assert (
                ":" in words[0] or read_options(words)[0] in ALGORITHMS
            )  # module:function is on the reader's own disk
        elif command == "tune" and ":" not in words[0]:
            assert words[0] in ALGORITHMS


def test_a_missing_extra_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train", "a2c", "--env", "CartPole-v1"]) == 2
    assert "pip install 'tyro>=0.9' 'tqdm>=4.66'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("warp", ["a2c", "--env", "CartPole-v1", "--simulator", "warp"]),
        ("warp", ["a2c", "--env", "ALE/Pong-v5", "--simulator", "warp"]),
    ],
)
def test_a_missing_package_of_an_option_is_one_line(
    package: str, words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name == "rlstruct.sims.kernels" or name.startswith(("rlstruct.sims.kernels.", "rlstruct.atari")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"rlstruct train: --\S+.* needs {package}, which is not installed\. Install the extra '{package}'.*\n", said
    )


class Warns(gymnasium.Env[Any, Any]):
    """Warns in its reset, as a user's environment may."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        warnings.warn("the battery\n  is low", stacklevel=1)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.filterwarnings("always::UserWarning")
def test_a_warning_is_one_line_and_names_no_file_of_ours(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rlstructures", sys.modules[__name__])
    gymnasium.register("Warns-v0", Warns, max_episode_steps=50)
    assert main(["train", "reinforce", "--env", "Warns-v0", *SMALL]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    ours = [line for line in lines if "none of 2 episodes ended within" in line]
    (cut,) = ours
    assert cut.startswith("rlstruct train: warning: run_training: none of 2 episodes")
    assert ".py" not in cut
    users = [line for line in lines if "battery" in line]
    assert set(users) == {users[0]}
    assert re.fullmatch(r"rlstruct train: warning: the battery is low \(\S*test_commands\.py:\d+\)", users[0])
    assert len(users) + 1 == len(lines)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("sax", ALGORITHMS, "sac"),
        ("td3", ALGORITHMS, ""),
        ("a3c", ALGORITHMS, "a2c"),
        ("pop", ALGORITHMS, "ppo"),
        ("alpha-zero", ["a2c", "alphazero"], "alphazero"),
        ("CartPole-v3", ["CartPole-v1", "Pendulum-v1"], "CartPole-v1"),
        ("cart", ["CartPole-v1", "Pendulum-v1"], "CartPole-v1"),
    ],
)
def test_only_similar_names_are_proposed(word: str, known: list[str], meant: str) -> None:
    assert nearest(word, known) == (f" Did you mean {meant!r}?" if meant else "")


def test_help_shows_every_command_and_every_algorithm_on_a_narrow_screen(capsys: Capture) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command}" in text for command in COMMANDS)
    assert max(map(len, text.splitlines())) <= 80
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {algorithm}" in text for algorithm in ALGORITHMS)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "words",
    [*(["train", name] for name in ALGORITHMS), ["evaluate"], ["plot"], ["play"], ["export"]],
)
def test_help_of_options_fits_a_narrow_screen_in_plain_words(words: list[str], capsys: Capture) -> None:
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert "show this help message" in text
    assert "`" not in text  # what the documentation is written in
    assert max(map(len, text.splitlines())) <= 80


_WAITS_IN_TORCH = """
import sys, runpy, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("now", flush=True)
            try:
                time.sleep(60)
            except KeyboardInterrupt:  # as code in C does that knows failed imports only
                raise ImportError("initialization failed")
sys.meta_path.insert(0, Slow())
sys.argv = ["rlstruct", "devices"]
runpy.run_module("rlstruct", run_name="__main__")
"""


def test_ctrl_c_while_torch_is_imported_is_one_line_and_status_130() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS_IN_TORCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert said == "\nrlstruct devices: interrupted.\n"
    assert process.returncode == 130


def test_ctrl_c_in_a_training_ends_it_at_once_with_its_checkpoint_and_its_processes(tmp_path: pathlib.Path) -> None:
    words = [
        "train",
        "a2c",
        "--env",
        "CartPole-v1",
        "--n-env-steps",
        "100000000",
        "--evaluation-interval",
        "1000",
        "--runs",
    ]
    program = [sys.executable, "-m", "rlstruct", *words, str(tmp_path), "--n-processes", "1"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while not (saved := list(tmp_path.glob("*/checkpoint.pt"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        workers = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.endswith(f"--resume {saved[0].parent} (its curve: rlstruct plot {saved[0].parent})\n")
    assert workers
    left = psutil.wait_procs(workers, timeout=1)[1]
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]  # its exit status may not have been read
    assert torch.load(saved[0], weights_only=True)["env_steps"] >= 0


def test_a_wrong_command_is_told_without_torch() -> None:
    code = "import sys; from rlstruct.cli.main import main; print(main(['tain']), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "2 False\n"


def test_it_runs_as_a_module_and_leaves_the_import_of_the_library_alone() -> None:
    code = "import sys, rlstruct; print(any('rlstruct.cli' in name for name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"
    run = subprocess.run(
        [sys.executable, "-m", "rlstruct", "tain"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.strip().endswith("Did you mean 'train'?")
