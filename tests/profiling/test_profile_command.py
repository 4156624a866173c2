from __future__ import annotations

import pathlib

import pytest

from rlstruct.cli.main import main

SCRIPT = """
import sys, time
from rlstruct.profiling import operation

for _ in range(5):
    with operation("iteration"), operation("loss"):
        time.sleep({seconds})
sys.exit({status})
"""


def profiled(folder: pathlib.Path, seconds: float, status: int = 0) -> int:
    script = folder.parent / "script.py"
    script.write_text(SCRIPT.format(seconds=seconds, status=status))
    return main(["profile", "--out", str(folder), "--window", "60", str(script)])


@pytest.mark.slow
def test_a_script_is_profiled_and_compared(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra train")
    assert profiled(tmp_path / "a", 0.02) == 0
    out, err = capfd.readouterr()
    assert "% of an iteration is the loss, mostly in Python: try a larger batch" in " ".join(out.split())
    assert "Measuring took" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert err == ""
    assert {file.name for file in (tmp_path / "a").iterdir()} >= {"profile.json", "trace.json.gz", "profile.png"}
    assert profiled(tmp_path / "b", 0.1, status=3) == 3  # the status of the script
    capfd.readouterr()
    assert main(["profile", "--diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "iteration/loss: 2" in (told := capfd.readouterr().out)
    assert "times as long" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the command to profile"),
        (["--wat", "x"], "--wat: expected --out FOLDER, --window SECONDS or --diff A B"),
        (["--diff", "a"], "--diff needs the folders of two profiles, got 1"),
        (["--diff", "nowhere", "nothing"], "nowhere holds no profile"),
        (["--out", "{tmp}/p", "nothing.py"], "there is no file nothing.py"),
        (["--out", "{tmp}/p", "no_such_program"], "neither a command of rlstruct, nor a script, nor a program"),
        (
            ["--out", "{tmp}/p", "--window", "0", "train"],
            "window is 0.0, expected a finite number of seconds, at least 0.001",
        ),
        (["--out", "{tmp}/p", "true"], "holds no profile, expected files"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *(word.replace("{tmp}", str(tmp_path)) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("rlstruct profile: ")
    assert (tmp_path / "p").exists() == ("true" in arguments)  # nothing is left behind of what was not started


def test_the_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--help"]) == 0
    assert "--diff A B" in capsys.readouterr().out
