"""An algorithm that is registered under a name is one for the command line, too."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor
from rlstruct.agents import ActorCritic
from rlstruct.agents.model_agent import ModelAgent
from rlstruct.algos import ALGORITHMS, A2CConfig, Algorithm, TrainingConfig, option
from rlstruct.algos.a2c import A2CLearner
from rlstruct.cli.main import main
from rlstruct.functional.random import categorical

pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")

ROOT = pathlib.Path(__file__).parents[2]
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


@pytest.fixture
def td3(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Write docs/custom_algorithms.md's algorithm with its own network and agent; return the command that trains it."""
    page = (ROOT / "docs" / "custom_algorithms.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class TD3Learner" in code)
    (tmp_path / "td3.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield ["train", "td3:train", "--env", "Pendulum-v1", *SMALL, "--learning-starts", "40", "--n-updates", "2"]
    ALGORITHMS.pop("td3:train", None)
    sys.modules.pop("td3", None)


@pytest.mark.slow
def test_network_and_agent_of_the_user_by_name(td3: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--network", "td3:TD3Network", "hidden=24", "--agent", "td3:TD3Agent"]
    assert main([*td3, *own]) == 0
    said = capsys.readouterr()
    assert "td3:train on Pendulum-v1: td3:TD3Network and td3:TD3Agent, learner on cpu" in " ".join(said.out.split())
    assert said.err == ""
    (run,) = pathlib.Path("runs").iterdir()
    weights = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    assert weights["policy.0.layers.0.weight"].shape == (24, 3)
    for command in (["evaluate", str(run), "--episodes", "2"], ["export", str(run)]):
        assert main(command) == 0
    assert main(["train", "--resume", str(run), "--n-env-steps", "240", "--no-progress"]) == 0
    assert main([*td3, "--network", "td3:TD3Network", "width=2"]) == 2
    assert "cannot be called with observation_space, action_space, width" in capsys.readouterr().err
    assert main([*td3, "--network", "td3:Nothing"]) == 2
    assert "td3 has no function or class 'Nothing'" in capsys.readouterr().err
    assert main([*td3, "--network", "td3:create_env", "n_envs=1", "seed=0"]) == 2
    assert "--network td3:create_env returned a GymEnvInf, expected a torch.nn.Module." in capsys.readouterr().err
    assert main([*td3, "--factory", "td3:create_env"]) == 2
    assert "--network MODULE:NAME --agent MODULE:NAME." in " ".join(capsys.readouterr().err.split())


def test_an_error_of_the_users_algorithm_names_what_the_command_has_created(
    td3: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(td3) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "td3:train raised AttributeError: 'GaussianActorCritic' object has no attribute 'scale' " in said
    assert "created GaussianActorCritic and GaussianAgent (Gaussian policy, perceptron). If the algorithm" in said
    assert "self.model.scale" in said  # the traceback


class TwoInputs(ActorCritic):
    """Sees both parts of a Dict observation."""

    def __init__(self, observation_space: spaces.Dict) -> None:
        super().__init__(sum(np.prod(part.shape) for part in observation_space.values()), 2)

    def forward(self, position: torch.Tensor, speed: torch.Tensor) -> Any:
        return super().forward(torch.cat([position, speed], -1))


class TwoInputsAgent(ModelAgent[TwoInputs]):
    def __call__(self, state: DictTensor, observation: DictTensor, *others: Any) -> tuple[DictTensor, DictTensor]:
        logits, value = self.model(observation["frame/position"], observation["frame/speed"])
        action = categorical(logits, observation["rng"]) if self.stochastic else logits.argmax(-1)
        return DictTensor({"action": action, "action_logits": logits, "value": value}), state


class Split(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with a Dict observation."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        part = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict(position=part, speed=part)

    def _split(self, frame: Any) -> dict[str, Any]:
        return {"position": frame[::2], "speed": frame[1::2]}

    def reset(self, **settings: Any) -> Any:
        frame, info = super().reset(**settings)
        return self._split(frame), info

    def step(self, action: Any) -> Any:
        frame, *rest = super().step(action)
        return self._split(frame), *rest


def test_own_parts_see_the_parts_of_an_observation(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--network", f"{__name__}:TwoInputs", "--agent", f"{__name__}:TwoInputsAgent"]
    assert main(["train", "a2c", "--env", f"{__name__}:Split", *SMALL, *own]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert main(["train", "alphazero", "--env", "ConnectFour-v0", *own]) == 2
    assert "alphazero searches with its own network and agent: omit --agent" in capsys.readouterr().err


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
