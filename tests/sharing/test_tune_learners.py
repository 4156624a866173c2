"""`rlstruct tune --n-learners`: the climb and its table against rates that are known, and one real measurement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.cli.main import main
from rlstruct.cli.stored_run import load_settings
from rlstruct.cli.tune_learners import tune_learners, without_end

Capture = pytest.CaptureFixture[str]
ON_GPU = A2CConfig(learner_device="cuda:0", batcher_device="cuda:0", n_processes=0, n_envs=64)


class Rates:
    """Speeds by number of learners; notes what is measured."""

    def __init__(self, **rates: float) -> None:
        self._rates, self.asked = rates, list[TrainingConfig]()

    def __call__(self, config: TrainingConfig) -> float:
        self.asked.append(config)
        return self._rates[f"k{config.n_learners}"]


def test_learners_are_added_until_they_are_not_faster(capsys: Capture) -> None:
    rate = Rates(k1=100.0, k2=170.0, k4=160.0)
    best = tune_learners(A2CConfig(n_processes=2, n_envs=8), (1, 2, 4, 8), None, "none", rate)
    assert [(one.n_learners, one.n_processes, one.n_envs) for one in rate.asked] == [(1, 2, 8), (2, 4, 8), (4, 8, 8)]
    assert (best.n_learners, best.n_processes, best.n_env_steps) == (2, 4, A2CConfig().n_env_steps)
    said = capsys.readouterr().out
    assert re.search(r"2 +170 steps/s, 1\.70 times 1\n", said)
    assert "paste: --learners 2 --n-processes 4 --n-envs 8\n" in said


def test_speed_on_more_gpus_is_measured_where_they_are_and_projected_beyond(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    rate = Rates(k1=100.0, k2=150.0, k4=280.0)
    best = tune_learners(ON_GPU, (1, 2), 8, "mps", rate)
    assert [(one.n_learners, one.n_envs, one.sharing, one.learner_device) for one in rate.asked] == [
        (1, 64, "none", "cuda:0"), (2, 128, "mps", "cuda:0"), (4, 256, "mps", "cuda"),
    ]  # fmt: skip
    assert (best.n_learners, best.sharing, best.batcher_device) == (4, "mps", "cuda")
    said = capsys.readouterr().out
    assert re.search(r"4 +280 steps/s on 2 GPUs, measured\n", said)
    assert re.search(r"16 +1,200 steps/s on 8 GPUs at most: projected from one GPU", said)
    alone = tune_learners(ON_GPU, (1,), None, "mps", Rates(k1=100.0, k2=190.0))
    assert (alone.n_learners, alone.sharing) == (2, "none")  # one on each GPU
    assert "projected" not in capsys.readouterr().out


@pytest.mark.parametrize(("n_env_steps", "compiled"), [(20_000, False), (10**8, "auto")])
def test_a_timed_training_compiles_what_pays_in_the_steps_of_the_real_one(n_env_steps: int, compiled: object) -> None:
    timed = without_end(A2CConfig(n_processes=0, n_env_steps=n_env_steps, compile_agent=True))
    assert (timed.compile_agent, timed.compile_update, timed.compile_simulator) == (True, compiled, compiled)
    assert timed.n_env_steps > 10**12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "2"], "--gpus needs --n-learners"),
        (["--n-learners", "1", "--gpus", "8"], "--gpus 8 --device cpu: expected at least one GPU"),
        (["--n-learners", "2", "1"], "expected increasing numbers, at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["tune", "a2c", "--env", "CartPole-v1", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_learners_are_really_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--n-processes", "0", "--n-envs", "4", "--n-timesteps", "8", "--seconds", "4", "--out", "tuned"]
    assert main(["tune", "a2c", "--env", "CartPole-v1", "--n-learners", "1", "2", *options]) == 0
    rates = re.findall(r"^ +([12]) +([\d,]+) steps/s", capsys.readouterr().out, re.MULTILINE)
    assert [n for n, _ in rates] == ["1", "2"]
    assert all(float(rate.replace(",", "")) > 0 for _, rate in rates)
    config = load_settings(Path("tuned")).config
    assert config.n_envs == 4 * config.n_learners
