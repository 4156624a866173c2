"""An algorithm that is registered under a name is one for the command line, too."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

from rlstruct.algos import ALGORITHMS, A2CConfig, Algorithm, TrainingConfig, option
from rlstruct.algos.a2c import A2CLearner
from rlstruct.cli.main import main

pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")

SMALL = ["--n-env-steps", "200", "--n-timesteps", "20", "--n-envs", "2", "--n-processes", "0"]
SMALL += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--no-progress"]


@dataclass(frozen=True, kw_only=True)
class ToyConfig(A2CConfig):
    """Settings of a toy.

    Attributes:
        zeal: factor of the loss.
    """

    n_envs: int = 3
    zeal: float = option(2.0, above=0, at_most=8)


class ToyLearner(A2CLearner):
    """Takes larger steps than A2C."""

    settings: ClassVar[type[TrainingConfig]] = ToyConfig
    config: ToyConfig

    def terms(self, *given: Any) -> dict[str, Tensor]:
        terms = super().terms(*given)
        return {**terms, "loss": self.config.zeal * terms["loss"]}


TOY = Algorithm(ToyLearner, "large steps")


@pytest.fixture(autouse=True)
def _registered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(ALGORITHMS, "toy", TOY)


def test_it_trains_by_its_name_and_its_run_is_evaluated_repeated_and_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "toy", "--env", "CartPole-v1", *SMALL, "--zeal", "3"]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    stored = json.loads((run / "config.json").read_text())
    assert (stored["algorithm"], stored["config"]["zeal"], stored["agent"]) == ("toy", 3.0, "policy, perceptron")
    assert "settings: the defaults\n" in capsys.readouterr().out  # nothing is tuned for it
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert "toy on CartPole-v1, after 200 environment steps" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--n-env-steps", "240", "--no-progress"]) == 0
    assert main(["train", "--config", str(run), "--seed", "1", "--no-progress"]) == 0
    assert {json.loads(file.read_text())["config"]["seed"] for file in pathlib.Path("runs").glob("*/config.json")} == {
        0, 1,
    }  # fmt: skip


def test_an_algorithm_in_a_module_trains_by_module_and_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = f"{__name__}:TOY"
    monkeypatch.setitem(ALGORITHMS, own, TOY)
    monkeypatch.delitem(ALGORITHMS, own)  # restored after the test
    assert main(["train", own, "--env", "CartPole-v1", *SMALL]) == 0
    assert f"{own} on CartPole-v1: policy, perceptron, learner on cpu\n" in capsys.readouterr().out
    (run,) = pathlib.Path("runs").iterdir()
    del ALGORITHMS[own]  # as in the next process
    assert main(["plot", str(run)]) == 0
    assert main(["export", str(run)]) == 0
    assert own not in ALGORITHMS  # neither imports it
    assert f"{own}: 1 run, ends at" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert f"{own} on CartPole-v1, after 200 environment steps" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--n-env-steps", "240", "--no-progress"]) == 0
    assert main(["train", f"{__name__}:SMALL", "--env", "CartPole-v1"]) == 2
    assert main(["train", f"{__name__}:ToyConfig", "--env", "CartPole-v1"]) == 2
    assert f"{__name__}:ToyConfig is a class, expected an Algorithm of rlstruct.algos." in capsys.readouterr().err


def test_its_help_has_its_settings_with_their_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "\n  toy         large steps\n" in capsys.readouterr().out
    assert main(["train", "toy", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "factor of the loss. More than 0 and at most 8. (default: 2.0)" in words
    assert "environments in each process. At least 1. (default: 3)" in words


def test_a_value_out_of_range_is_refused_in_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "toy", "--env", "CartPole-v1", "--zeal", "9"]) == 2
    assert "zeal is 9.0, expected more than 0 and at most 8" in " ".join(capsys.readouterr().err.split())
    assert not pathlib.Path("runs").exists()


def test_a_name_that_is_not_registered_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "toys", "--env", "CartPole-v1"]) == 2
    names = ", ".join(ALGORITHMS)
    assert f"there is no algorithm 'toys', only {names}. Did you mean 'toy'?" in capsys.readouterr().err
    assert names.startswith("reinforce, a2c, ppo, dqn, pqn, sac, ")
