"""Pong from the emulator to the checkpoint, on the CPU; and the commands that the documentation gives for a GPU."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstruct.algos.training.checkpoint import read_checkpoint
from rlstruct.algos.training.presets import PRESETS
from rlstruct.cli.commands.train import parse_options
from rlstruct.cli.initial_settings import read_initial_options, settings_for
from rlstruct.cli.main import main
from rlstruct.cli.tasks import Task, find, spaces_of
from rlstruct.envs import GymEnv

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--env-options", "max_num_frames_per_episode=200", "--n-envs", "2", "--n-timesteps", "8", "--no-progress"]
SMALL += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--evaluation-timesteps", "60"]
FEW = ["--replay-capacity", "1000"]  # pictures are a part of every checkpoint

for package in ("tyro", "tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")


@pytest.mark.parametrize(
    "options",
    [
        ["a2c", "--n-env-steps", "48"],
        ["dqn", "--n-env-steps", "96", "--learning-starts", "64", "--n-updates", "1", "--batch-size", "8", *FEW],
    ],
    ids=["a2c", "dqn"],
)
@pytest.mark.slow
def test_pong_is_learnt_from_end_to_end(
    options: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("ale_py", "cv2"):
        pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[atari]'")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options, "--env", "ALE/Pong-v5", *SMALL]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    stored = json.loads((run / "config.json").read_text())
    assert stored["agent"].startswith("convolutional")
    assert stored["config"].get("n_stack", 4) == 4  # the replay buffer keeps each frame once
    assert (run / "checkpoint.pt").exists()
    assert "after training: return 0.0" in capsys.readouterr().out  # no agent scores within 200 frames
    if options[0] == "dqn":
        assert main(["play", str(run), "--steps", "3", "--out", "pong.png"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["a2c", "--n-env-steps", "32"],
        ["a2c", "--n-env-steps", "16", "--n-timesteps", "1", "--n-minibatches", "2", "--window", "2", "--vtrace"],
        ["ppo", "--n-env-steps", "32", "--n-epochs", "1", "--n-minibatches", "1"],
        ["dqn", "--n-env-steps", "48", "--learning-starts", "32", "--n-updates", "1", "--batch-size", "8", *FEW],
    ],
    ids=["a2c", "a2c-window", "ppo", "dqn"],
)
def test_pong_is_learnt_on_consoles_of_ours(
    options: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("ale_py", "warp"):
        pytest.importorskip(package, reason="needs the extras warp and atari")
    monkeypatch.chdir(tmp_path)
    small = ["--n-envs", "2", "--n-timesteps", "8", "--no-progress", "--evaluation-processes", "0"]
    small += ["--evaluation-episodes", "2", "--evaluation-timesteps", "8", "--env-options", "time_limit=8"]
    assert main(["train", options[0], "--env", "ALE/Pong-v5", "--simulator", "warp", *small, *options[1:]]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    stored = json.loads((run / "config.json").read_text())
    assert stored["agent"].startswith("convolutional")
    assert stored["config"].get("n_stack", 4) == 4  # the replay buffer keeps each frame once
    checkpoint = read_checkpoint(run / "checkpoint.pt")
    (collector,) = checkpoint["training"]["batcher"]["collectors"]
    assert collector["observation"]["frame"].shape == (2, 1, 84, 84)  # the agent stacks
    if options[0] == "dqn":
        assert main(["play", str(run), "--steps", "3", "--out", "pong.png"]) == 0


def test_four_games_need_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for game in ("Pong", "Breakout", "Freeway", "MsPacman"):
        words = ["--env", f"ALE/{game}-v5", "--simulator", "warp"]
        for has_gpu, device in ((False, "cpu"), (True, "cuda:0")):
            monkeypatch.setattr(torch.cuda, "is_available", lambda answer=has_gpu: answer)
            begun, (note, *devices) = settings_for("a2c", read_initial_options(words), None)
            assert begun is not None
            config = begun[1]
            assert f"those for ALE/{game}-v5" in note
            assert (config.n_envs, config.n_timesteps, config.n_minibatches, config.window) == (1200, 1, 20, 20)
            assert config.vtrace
            assert config.initial_steps == 100
            assert {config.learner_device, config.batcher_device, config.evaluation_device} == {device}
            assert len(devices) == has_gpu
        few, _ = settings_for("a2c", read_initial_options([*words, "--n-envs", "8"]), None)
        assert few is not None
        assert (few[1].n_minibatches, few[1].window) == (8, 8)  # each step is learned from once
        note = settings_for("a2c", read_initial_options(words[:2]), None)[1][
            0
        ]  # games of gymnasium, one after the other
        assert "those for ALE" not in note


def test_a_preset_trains_from_the_first_random_steps_to_the_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("ale_py", "warp"):
        pytest.importorskip(package, reason="needs the extras warp and atari")
    monkeypatch.chdir(tmp_path)
    words = ["--env", "ALE/Breakout-v5", "--simulator", "warp", "--env-options", "time_limit=8", "--n-envs", "3"]
    words += ["--n-env-steps", "18", "--initial-steps", "5", "--evaluation-episodes", "2", "--no-progress"]
    assert main(["train", "a2c", *words]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    checkpoint = read_checkpoint(run / "checkpoint.pt")
    assert checkpoint["policy_version"] == 4  # of 6 batches the first 2 fill the window
    (collector,) = checkpoint["training"]["batcher"]["collectors"]
    assert collector["environment"]["carry/episode"].tolist() == [0, 0, 0]


def test_a_console_of_ours_is_filmed(tmp_path: pathlib.Path) -> None:
    for package in ("ale_py", "warp", "PIL"):
        pytest.importorskip(package, reason="needs the extras warp, atari and train")
    from PIL import Image

    sheet = tmp_path / "seaquest.png"
    options = ["--simulator", "warp", "--steps", "2", "--out", str(sheet)]
    assert main(["play", "ALE/Seaquest-v5", *options]) == 0
    colors = Image.open(sheet).convert("RGB").getcolors(1 << 20)
    assert colors is not None
    assert len(colors) > 20  # the screen is in colour


def test_wrong_consoles_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("ale_py", "warp"):
        pytest.importorskip(package, reason="needs the extras warp and atari")
    assert main(["train", "a2c", "--env", "ALE/Pong-v5", "--simulator", "torch"]) != 0
    assert "--simulator warp" in capsys.readouterr().err
    assert main(["train", "a2c", "--env", "ALE/Nothing-v5", "--simulator", "warp"]) != 0
    assert "got the game 'ALE/Nothing-v5'" in capsys.readouterr().err


def test_the_commands_of_the_documentation_are_understood() -> None:
    page = (ROOT / "docs" / "atari.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^rlstruct train (\w+) (.*)$", page, re.MULTILINE)
    assert [algorithm for algorithm, _ in commands] == ["a2c", "dqn", "a2c", "ppo"]
    for algorithm, words in commands:
        options = parse_options(algorithm, shlex.split(words), None)
        on_cpu = algorithm == "ppo"
        assert options.environment.env == ("ALE/Freeway-v5" if on_cpu else "ALE/Pong-v5")
        is_preset = algorithm == "a2c" and "warp" in words
        assert options.training.learner_device == ("cpu" if on_cpu or is_preset else "cuda:0")


def test_without_the_extra_atari_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert main(["play", "ALE/Pong-v5"]) == 2
    assert "pip install 'ale-py>=0.11' 'opencv-python-headless" in capsys.readouterr().err
    assert sys.modules.get("rlstruct.cli.commands.play") is not None


@pytest.mark.parametrize(
    ("name", "options", "held", "sticky"),
    [
        ("ALE/Pong-v5", (), "4 frames,", 0.25),
        ("ale_py:ALE/Pong-v5", (), "4 frames,", 0.25),
        ("ale_py:ALE/Pong-v5", ("frameskip=1", "repeat_action_probability=0.1"), "1 frame,", 0.1),
        ("PongNoFrameskip-v4", (), "4 frames,", 0.0),
        ("ale_py:PongNoFrameskip-v0", (), "4 frames,", 0.25),
        ("Pong-v4", (), "2 to 4 frames, drawn at random,", 0.0),
        ("ale_py:Pong-v0", (), "2 to 4 frames, drawn at random,", 0.25),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is out of date")
def test_the_specification_of_a_game_decides_its_preprocessing_whatever_its_spelling(
    name: str, options: tuple[str, ...], held: str, sticky: float
) -> None:
    for package in ("ale_py", "cv2"):
        pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[atari]'")
    factory = find(Task(env=name, env_options=options), auto_reset=True)
    assert f"84 x 84 grey pixels, 4 frames stacked; an action is held for {held}" in factory.preprocessing
    assert f"probability {sticky:g};" in factory.preprocessing
    several = factory(n_envs=1, seed=0)
    assert isinstance(several, GymEnv)
    assert several.observation_space == spaces.Box(0, 255, (1, 84, 84), np.uint8)
    (env,) = several.envs
    game = env.unwrapped
    assert game.ale.getFloat("repeat_action_probability") == pytest.approx(sticky)
    env.reset(seed=0)
    skipped = set()
    for _ in range(40):
        before = game.ale.getEpisodeFrameNumber()
        env.step(0)
        skipped.add(game.ale.getEpisodeFrameNumber() - before)
    several.close()
    assert skipped == ({2, 3, 4} if "to" in held else {int(held[0])})


def test_a_run_prints_its_preprocessing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("ale_py", "cv2"):
        pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[atari]'")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a2c", "--env", "ale_py:Pong-v4", "--n-env-steps", "16", *SMALL]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a2c on ale_py:Pong-v4: convolutional policy" in said
    assert (
        "held for 2 to 4 frames, drawn at random, and a frame repeats the previous action with probability 0;" in said
    )
    (run,) = pathlib.Path("runs").iterdir()
    assert json.loads((run / "config.json").read_text())["agent"] == "convolutional policy"


def test_ram_is_shown_without_the_preprocessing_of_images() -> None:
    for package in ("ale_py", "cv2"):
        pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[atari]'")
    factory = find(Task(env="ALE/Pong-v5", env_options=("obs_type=ram",)), auto_reset=True)
    assert (factory.preprocessing, factory.stack) == ("", 1)
    assert spaces_of(factory)[0] == spaces.Box(0, 255, (128,), np.uint8)


def test_a_preset_is_found_by_every_spelling() -> None:
    for env in ("CartPole-v1", "gymnasium:CartPole-v1"):
        settings, notes = settings_for("a2c", read_initial_options(["--env", env]), None)
        assert settings is not None
        assert (settings[0].env, settings[1]) == (env, PRESETS["a2c", "CartPole-v1"].config)
        assert "those for CartPole-v1" in notes[0]
    assert find(Task(env="gymnasium:CartPole-v1", simulator="torch"), auto_reset=True)(n_envs=2).n_envs() == 2
