"""Output of `rlstruct devices`, also for machines that are only described."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rlstruct.algos import ALGORITHMS
from rlstruct.cli.commands.devices import find_gpus, layout, report
from rlstruct.cli.commands.train import parse_options
from rlstruct.cli.main import main
from rlstruct.device import usable_cores

GIB = 2**30


def test_this_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    said = capsys.readouterr().out
    cores = usable_cores()
    assert f"cpu      {cores} core" in said
    assert ("cuda:0" in said.split("Where each part should run:")[0]) == bool(find_gpus())


def test_every_gpu_is_listed_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(name="Big", total_memory=80 * GIB), SimpleNamespace(name="Small", total_memory=8 * GIB)]

    def free_memory(i: int) -> tuple[int, int]:
        if i == 1:
            raise RuntimeError("exclusive mode")
        return 79 * GIB, 80 * GIB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpus[i])
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_memory)
    text = "\n".join(report(16, 8, find_gpus()))
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


@pytest.mark.parametrize("n_gpus", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_options_are_those_that_an_algorithm_accepts(algorithm: str, n_gpus: int) -> None:
    lines = layout(8, n_gpus)
    proposed = [(what, line) for what, line in pairwise(lines) if line.strip().startswith("--")]
    assert len(proposed) >= 4
    for what, options in proposed:
        named = re.search(r"\(((?:[a-z0-9]+, )*[a-z0-9]+)\)$", what)
        if named is None or algorithm in named[1].split(", "):
            words = [re.sub("^--learners", "--n-learners", word) for word in options.split()]
            parse_options(algorithm, ["--env", "CartPole-v1", *words], None)  # exits at an unknown option


def test_each_gpu_gets_a_learner_with_its_own_environments() -> None:
    one, two = "\n".join(layout(8, 1)), "\n".join(layout(8, 2))
    assert "--n-envs 4096 --batcher-device cuda:0 --learner-device cuda:0" in one
    assert "--learners" not in one
    assert "--n-envs 8192 --batcher-device cuda --learner-device cuda" in two
    assert "--learners 2" in two
    assert "cuda:1" not in two  # one process per GPU does everything


def test_it_ends_with_how_to_measure_on_this_machine() -> None:
    for n_gpus in (0, 1, 4):
        assert layout(8, n_gpus)[-1].strip() == "rlstruct tune ppo --env CartPole-v1"
