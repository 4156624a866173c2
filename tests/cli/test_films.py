"""Films show every frame of an episode once, at the speed of the environment, however long it is."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import filmed_envs
import pytest
from filmed_envs import FPS, LENGTH, square

from rlstruct.agents import RandomAgent
from rlstruct.cli.film import film
from rlstruct.cli.main import main
from rlstruct.cli.tasks import Task, find, spaces_of

for package in ("tyro", "tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")
Image = pytest.importorskip("PIL.Image", reason="needs the extra: pip install 'rlstruct[train]'")

Place = tuple[int, int]  # episode and step


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(pathlib.Path(filmed_envs.__file__).parent))


def shown(path: str, n_envs: int = 1) -> tuple[list[list[Place]], list[int]]:
    """Return the place that each environment shows in each frame of a gif, and the milliseconds of each frame."""
    colours = {tuple(map(int, square(e, s)[0, 0])): (e, s) for e, s in itertools.product(range(4), range(30))}
    found: list[list[Place]] = []
    times: list[int] = []
    with Image.open(path) as opened:
        for i in range(opened.n_frames):
            opened.seek(i)
            times.append(opened.info["duration"])
            picture: Any = opened.convert("RGB")
            found.append([colours[picture.getpixel((164 * j + 80, 80))] for j in range(n_envs)])
    return found, times


TEN = [(e, s) for e in range(3) for s in range(LENGTH + 1)][:10]  # frames of 7 steps: 3 episodes begin


@pytest.mark.parametrize("name", ["Counted", "restarting"])
def test_play_shows_every_frame_of_every_episode_once_at_the_speed_of_the_environment(name: str) -> None:
    assert main(["play", f"filmed_envs:{name}", "--steps", "7", "--out", "film.gif"]) == 0
    frames, times = shown("film.gif")
    assert [place for (place,) in frames] == TEN
    assert times == [1000 // FPS] * 10


def test_play_shows_the_last_frame_of_a_simulator() -> None:
    assert main(["play", "filmed_envs:Simulated", "--steps", "7", "--out", "film.gif"]) == 0
    frames, times = shown("film.gif")
    assert [step for ((_, step),) in frames] == [step for _, step in TEN]
    assert times == [1000 // FPS] * 10


def test_environments_side_by_side_show_each_frame_once() -> None:
    assert main(["play", "filmed_envs:Counted", "--steps", "7", "--n-envs", "2", "--out", "film.gif"]) == 0
    assert shown("film.gif", 2)[0] == [[place, place] for place in TEN]


def test_a_film_ends_with_the_last_frame_of_the_last_episode() -> None:
    assert main(["play", "filmed_envs:Counted", "--steps", "6", "--out", "film.gif"]) == 0
    assert [place for (place,) in shown("film.gif")[0]] == TEN[:8]


def test_a_gif_that_is_too_slow_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "filmed_envs:Fast", "--steps", "3", "--out", "film.gif"]) == 0
    assert "film.gif: a .gif shows at most 50 of 125 frames per second" in capsys.readouterr().out
    assert shown("film.gif")[1] == [20] * 4


def test_a_film_of_a_long_episode_is_whole() -> None:
    factory = find(Task(env="filmed_envs:Counted", env_options=("length=2010",)), auto_reset=False)
    agent = RandomAgent(spaces_of(factory)[1])
    n = film(factory, agent, pathlib.Path("sheet.png"), n_envs=1, n_steps=5000, seed=0, one_episode=True)
    assert n == 2011
    with Image.open("sheet.png") as sheet:  # 12 pictures in 3 rows, the last one of the last step
        corner = sheet.convert("RGB").getpixel((sheet.width - 80, sheet.height - 100))
    assert corner == tuple(square(0, 2010)[0, 0])


@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")  # of what reads it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_evaluate_films_a_whole_episode_and_an_mp4_has_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")
    small = ["--n-env-steps", "16", "--n-timesteps", "4", "--n-envs", "2", "--n-processes", "0", "--no-progress"]
    small += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--n-minibatches", "1"]
    assert main(["train", "a2c", "--env", "filmed_envs:Counted", *small]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    for name in ("film.gif", "film.mp4"):
        assert main(["evaluate", str(run), "--episodes", "2", "--video", name]) == 0
        assert f"{name}: one episode, {LENGTH + 1} frames" in capsys.readouterr().out
    frames, times = shown("film.gif")
    assert [place for (place,) in frames] == TEN[: LENGTH + 1]
    assert times == [1000 // FPS] * (LENGTH + 1)
    reader = ffmpeg.read_frames("film.mp4")
    assert next(reader)["fps"] == FPS
    assert len(list(reader)) == LENGTH + 1


@pytest.mark.filterwarnings("default:Evaluator")
def test_evaluate_cuts_episodes_and_the_film_at_the_step_limit(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--n-env-steps", "16", "--n-timesteps", "4", "--n-envs", "2", "--n-processes", "0", "--no-progress"]
    small += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--n-minibatches", "1"]
    assert main(["train", "a2c", "--env", "MountainCar-v0", "--simulator", "torch", *small]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    limit = ["--evaluation-step-limit", "3", "--video", "film.gif"]
    assert main(["evaluate", str(run), "--episodes", "2", *limit]) == 0
    said = capsys.readouterr()
    assert "2 of 2 episodes had not ended after 64 steps (step limit 3)" in said.err
    assert "film.gif: one episode, 4 frames" in said.out
