"""Text of `rlstruct train` on a terminal and in the run folder, and what a run stores about its start."""

from __future__ import annotations

import io
import json
import pathlib
import re
import subprocess
import sys
from importlib import metadata

import pytest

from rlstruct.algos.training.loggers import create_bar
from rlstruct.cli.main import main

for package in ("tyro", "tqdm", "tensorboard", "matplotlib", "PIL"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

Capture = pytest.CaptureFixture[str]
SMALL = ["--n-env-steps", "200", "--n-timesteps", "20", "--n-envs", "2", "--n-processes", "0", "--loggers"]
SMALL += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--no-progress", "--name", "one"]
START = ["train", "a2c", "--env", "CartPole-v1", *SMALL]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def run(capsys: Capture) -> pathlib.Path:
    assert main(START) == 0
    return next(pathlib.Path("runs").iterdir())


def test_sentences_fit_the_terminal(run: pathlib.Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["train", "--resume", str(run), "--no-progress"]) == 0
    sentences, _, rest = capsys.readouterr().out.partition("before training")
    text = " ".join(sentences.split())
    assert "nothing is left to do: this run is complete. To continue it, raise the total number of steps" in text
    assert max(map(len, f"{sentences}{rest.partition('next:')[0]}".splitlines())) <= 60
    shown = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", shown)
        assert main(["train", "a2c", "--env", "CartPole-v1", "--wrapper", "TimeLimit"]) == 2
    lines = shown.getvalue().splitlines()
    assert lines[0] == "rlstruct train: --wrapper TimeLimit: expected MODULE:NAME or"
    assert max(map(len, lines)) <= 60
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--resume", str(run), "--no-progress"]) == 0
    assert "nothing is left to do: this run is complete. To continue it, raise the total" in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "all_numbers"), [("80", False), ("200", True)])
def test_the_bar_shows_on_any_terminal_that_it_evaluates(
    columns: str, all_numbers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = create_bar(100_000_000, True)
    bar.set_postfix({"return": "-1234.5", "evaluation": "-1234.5", "evaluating": "31 of 128 episodes, step 99968"})
    bar.close()
    assert ("evaluation=-1234.5, evaluating=31 of 128 episodes, step 99968" in shown.getvalue()) == all_numbers
    assert ("?/s, evaluating=31/128, step 99968" in shown.getvalue()) != all_numbers


def test_the_run_folder_keeps_what_was_printed(run: pathlib.Path, capsys: Capture) -> None:
    said = capsys.readouterr().out
    first, _, rest = (run / "log.txt").read_text().partition("\n")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rlstruct train a2c --env CartPole-v1 .* --name one", first)
    assert rest == said
    assert main(["train", "--resume", str(run), "--no-progress", "--n-env-steps", "300"]) == 0
    said += capsys.readouterr().out
    log = (run / "log.txt").read_text().splitlines()
    assert [line for line in log if " rlstruct train " not in line] == said.splitlines()
    assert sum(" rlstruct train " in line for line in log) == 2
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert len((run / "log.txt").read_text().splitlines()) == len(log)


@pytest.mark.filterwarnings("always:Evaluator")
def test_a_warning_is_kept_too(capsys: Capture) -> None:
    assert main([*START, "--evaluation-step-limit", "5", "--evaluation-timesteps", "5"]) == 0
    said = capsys.readouterr().err
    assert "2 of 2 episodes had not ended after 5 steps" in said
    (log,) = pathlib.Path("runs").glob("*/log.txt")
    assert set(said.splitlines()) <= set(log.read_text().splitlines())


def test_the_settings_hold_version_commit_and_command_lines(run: pathlib.Path) -> None:
    stored = json.loads((run / "config.json").read_text())
    assert stored["versions"]["rlstruct"] == metadata.version("rlstruct")
    assert stored["commands"] == [f"rlstruct {' '.join(START)}"]
    assert "folder" not in stored["commits"]
    again = ["train", "--resume", str(run), "--no-progress"]
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "--allow-empty", "-m", "c"],
    ):
        subprocess.run(["git", *words], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert main(again) == 0
    stored = json.loads((run / "config.json").read_text())
    assert stored["commits"]["folder"] == commit
    assert stored["commands"] == [f"rlstruct {' '.join(words)}" for words in (START, again)]


def test_the_closing_line_counts_the_evaluations(run: pathlib.Path, capsys: Capture) -> None:
    text = " ".join(capsys.readouterr().out.split())
    found = re.search(
        r"200 environment steps in (\S+) s, of which (\S+) s were the evaluations before and after;", text
    )
    assert found is not None
    with (run / "metrics.csv").open() as file:
        seconds = [float(line.split(",")[7]) for line in file.readlines()[1:] if line.split(",")[7]]
    assert float(found[2]) == pytest.approx(seconds[0] + seconds[-1], abs=0.06)
    assert float(found[1]) >= float(found[2])


def test_a_resumed_run_that_changes_a_setting_is_refused_in_options(run: pathlib.Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--learning-rate", "0.5", "--no-progress"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rlstruct train: --resume {run}: --learning-rate is 0.5, but 0.007 in the checkpoint. Omit")
    assert f"rlstruct train --config {run} --learning-rate 0.5." in said
    assert "--n-env-steps" in said
    assert "load_config" not in said


def test_envs_lists_what_train_accepts(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)  # phys2d/CartPole-v1 needs it
    assert main(["envs", "cart"]) == 0
    bundled, names, gymnasium, others = capsys.readouterr().out.splitlines()
    assert (bundled, names) == ("bundled simulators (--simulator torch):", "  CartPole-v0  CartPole-v1")
    assert (gymnasium, others) == ("gymnasium:", "  CartPole-v1")
