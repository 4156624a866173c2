"""`rlstruct explain` prints the page of an error without a network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlstruct.cli.commands import explain
from rlstruct.cli.main import main
from rlstruct.errors import WorkerError


@pytest.mark.parametrize("name", ["WorkerError", "workererror", "rlstruct.errors.WorkerError", WorkerError.topic])
def test_the_page_of_an_error_is_printed_within_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith("WorkerError\n-----------\nAn agent or environment raised, or a worker died,")
    assert "- the message says: `agent.update`\n  what happened: the weights do not fit the agent\n" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("title", list(explain.sections()))
def test_every_part_of_the_page_can_be_printed(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", title]) == 0
    said = capsys.readouterr().out
    assert said.startswith(title)
    assert "](" not in said  # a link leads nowhere in a terminal
    assert len(said.splitlines()) > 3


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:]] == list(explain.sections())


def test_an_unknown_name_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "WorkrError"]) == 2
    assert capsys.readouterr().err == (
        "rlstruct explain: no error is called 'WorkrError'. Did you mean 'WorkerError'?\n"
    )
    assert main(["explain", "a", "b"]) == 2
    assert "expected the name of one error" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["explain", "WorkerError"], ["train", "ppo", "--help"]])
def test_a_reader_that_stops_ends_a_command_in_silence(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rlstruct", *words]
    run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writing)
    assert (run.returncode, run.stderr) == (1, "")


def test_a_name_like_no_other_gets_the_way_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "Zebra"]) == 2
    assert capsys.readouterr().err == "rlstruct explain: no error is called 'Zebra'. `rlstruct explain` lists all.\n"
