"""Training AlphaZero from the command line, judging it, and playing against it in the terminal."""

from __future__ import annotations

import io
import pathlib

import pytest

from rlstruct.cli.main import main

Capture = pytest.CaptureFixture[str]

SMALL = [
    "--preset",
    "none",
    *("--env", "ConnectFour-v0", "--n-env-steps", "64", "--n-timesteps", "8", "--n-envs", "4", "--no-progress"),
    *("--n-simulations", "2", "--max-depth", "3", "--learning-starts", "16", "--batch-size", "8", "--n-updates", "1"),
    *("--evaluation-episodes", "2", "--opponent-simulations", "2", "--network", "n_features=8", "--name", "az"),
    "--mirror",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of AlphaZero with two updates."""
    root = tmp_path_factory.mktemp("runs")
    assert main(["train", "alphazero", *SMALL, "--runs", str(root)]) == 0
    return next(root.iterdir())


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_run_is_judged_by_games_against_its_opponent(run: pathlib.Path, capsys: Capture) -> None:
    assert main(["evaluate", str(run), "--episodes", "3"]) == 0
    said = capsys.readouterr().out
    assert "after 64 moves of self-play" in said
    assert "4 games against UCT with 2 simulations: " in said
    assert main(["evaluate", str(run), "--video", "a.gif"]) == 2
    assert "omit --video" in capsys.readouterr().err


def test_a_run_goes_on(run: pathlib.Path, capsys: Capture) -> None:
    assert main(["train", "--resume", str(run), "--n-env-steps", "96", "--no-progress"]) == 0
    assert "96 environment steps" in capsys.readouterr().out


def test_a_person_plays_against_a_checkpoint_and_sees_the_numbers(
    run: pathlib.Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the search does, 42 answers are enough: full columns and words are refused.
    typed(monkeypatch, "left", "9", *(str(1 + i % 7) for i in range(300)))
    words = ["play", "connect-four", "--run", str(run), "--simulations", "8", "--first", "search"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "moves of self-play" in said
    assert "'left' is not a column" in said
    assert "'9' is not a column" in said
    visits = next(line for line in said.splitlines() if line.startswith("visits"))
    assert sum(map(int, visits.split()[1:])) == 8
    assert said.strip().splitlines()[-1] in ("You win.", "The search wins.", "A draw.")


def test_a_search_without_a_network_takes_the_win_that_it_is_offered(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, *["7", "1"] * 20)
    assert main(["play", "connect-four", "--simulations", "60"]) == 0
    said = capsys.readouterr().out
    assert "judged by random games" in said
    assert said.strip().splitlines()[-1] == "The search wins."
    last = [line for line in said.splitlines() if line and set(line) <= set("XO. ")][-6:]
    assert sum(line.count("O") for line in last) == sum(line.count("X") for line in last)  # it moved last, and second


def test_a_game_that_is_broken_off_and_runs_of_something_else(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    typed(monkeypatch, "1", "q")
    assert main(["play", "connect-four", "--simulations", "4"]) == 130
    assert "the game was stopped" in capsys.readouterr().err
    assert main(["play", "connect-four", "--simulations", "0"]) == 2
    assert main(["play", "connect-four", "--run", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert main(["train", "alphazero", "--env", "CartPole-v1"]) == 2
    assert "two-player games" in capsys.readouterr().err


def test_the_help_of_the_game_fits_a_narrow_screen(capsys: Capture) -> None:
    assert main(["play", "connect-four", "--help"]) == 0
    text = capsys.readouterr().out
    assert "show this help message" in text
    assert "`" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("n_envs", "more"),
    [
        ("2", []),
        ("2", ["--learn"]),
        # Learning starts after 10,000 moves; test_tune_learners.py times trainings of A2C.
        pytest.param("64", ["--n-learners", "1"], marks=pytest.mark.exhaustive),
    ],
    ids=["collect", "learn", "learners"],
)
def test_alphazero_is_tuned(
    n_envs: str, more: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pytest.importorskip("rlstruct.sharing")
    monkeypatch.chdir(tmp_path)
    words = ["--env", "ConnectFour-v0", "--network", "n_features=8", "--n-processes", "0", "--n-envs", n_envs]
    words += ["--n-timesteps", "2", "--seconds", "4", "--no-progress", "--out", "tuned"]
    assert main(["tune", "alphazero", *words, *more]) == 0
    assert "to use it: rlstruct train --config tuned" in capsys.readouterr().out
    assert f'"n_envs": {n_envs}' in (tmp_path / "tuned" / "config.json").read_text()
