"""What `rlstruct devices` says, for machines that are not here too."""

from __future__ import annotations

import pytest

from rlstruct.cli.devices import Gpu, find_gpus, layout, report
from rlstruct.cli.main import main
from rlstruct.device import usable_cores

GIB = 2**30


def test_this_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    said = capsys.readouterr().out
    cores = usable_cores()
    assert f"cpu      {cores} core" in said
    assert ("cuda:0" in said.split("Where things should live:")[0]) == bool(find_gpus())


def test_every_gpu_is_listed_with_its_memory() -> None:
    gpus = [Gpu("Big", 80 * GIB, 79 * GIB), Gpu("Small", 8 * GIB, None)]
    text = "\n".join(report(16, 8, gpus))
    assert "cpu      16 cores" in text
    assert "cuda:0   Big, 80.0 GiB, 79.0 GiB free" in text
    assert "cuda:1   Small, 8.0 GiB\n" in text
    assert "How processes can share a GPU:" in text
    assert "green contexts" in text
    assert "sharing=" in text
    assert "sharing=" not in "\n".join(report(16, 8, []))


def test_a_machine_without_a_gpu_is_told_to_use_its_cores() -> None:
    text = "\n".join(layout(8, 0))
    assert "cuda" not in text
    assert "--n-processes 7" in text


def test_each_gpu_gets_a_learner_with_its_own_environments() -> None:
    one, two = "\n".join(layout(8, 1)), "\n".join(layout(8, 2))
    assert "--n-envs 4096 --batcher-device cuda:0 --learner-device cuda:0" in one
    assert "--learners" not in one
    assert "--n-envs 8192 --batcher-device cuda --learner-device cuda" in two
    assert "--learners 2" in two
    assert "cuda:1" not in two  # a GPU for each role is what the model advises against


def test_who_lives_with_whom_is_proposed_by_the_model() -> None:
    one, many = "\n".join(layout(8, 1)), "\n".join(layout(8, 4))
    for text in (one, many):  # worked values of the paper: 2.58 and 5.46
        assert "in one process, not in two: 2.6 times" in text
        assert "in one process, not in three: 5.5 times" in text
    assert "one process on cuda:0 that does everything" in one
    assert "on each of 4 GPUs, not a GPU for each role" in many
    assert "GMI-DRL" not in "\n".join(layout(8, 0))
    assert "rlstruct tune" in "\n".join(layout(8, 0))
