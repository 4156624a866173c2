"""Images with continuous actions, and memory behind convolutions: trained, resumed and evaluated by the commands."""

from __future__ import annotations

import json
import pathlib

import image_envs
import pytest

from rlstruct.cli.main import main

for package in ("tyro", "tqdm", "tensorboard", "matplotlib", "PIL"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

SMALL = ["--n-timesteps", "12", "--n-envs", "2", "--n-processes", "0", "--loggers", "--no-progress", "--name", "one"]
SMALL += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--preset", "none"]
NARROW = ["n_features=8", "layers=[[4,3,2]]"]
DRIVEN, CHOSEN = "image_envs:Steering", "image_envs:Picking"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(pathlib.Path(image_envs.__file__).parent))


@pytest.mark.parametrize(
    ("algorithm", "env", "words", "agent"),
    [
        ("ppo", DRIVEN, ["activation=silu", "layer_norm=true"], "convolutional Gaussian policy"),
        ("a2c", DRIVEN, ["initial_log_std=-1", "normalise=true"], "convolutional Gaussian policy, normalised"),
        ("reinforce", DRIVEN, [], "convolutional Gaussian policy"),
        ("ppo", DRIVEN, ["recurrent=true", "n_hidden=4"], "recurrent Gaussian policy, behind convolutions"),
        ("a2c", CHOSEN, ["recurrent=true", "normalise=true"], "recurrent policy, behind convolutions, normalised"),
        ("dqn", CHOSEN, [], "convolutional network of action values, duelling"),
        ("pqn", CHOSEN, [], "convolutional network of action values, layer norm"),
        ("reinforce", CHOSEN, ["recurrent=true"], "recurrent policy, behind convolutions"),
        ("pqn", CHOSEN, ["recurrent=true"], "recurrent network of action values, layer norm, behind convolutions"),
    ],
)
def test_images_are_trained_on_resumed_and_evaluated(algorithm: str, env: str, words: list[str], agent: str) -> None:
    fewer = {"dqn": ["--learning-starts", "40"]}.get(algorithm, [])
    fewer += ["--n-minibatches", "2"] if algorithm in ("ppo", "pqn") else []
    options = [*SMALL, *fewer, "--network", *NARROW, *words]
    assert main(["train", algorithm, "--env", env, "--n-env-steps", "96", *options]) == 0
    (run,) = pathlib.Path("runs").iterdir()
    assert json.loads((run / "config.json").read_text())["agent"] == agent
    assert main(["train", "--resume", str(run), "--n-env-steps", "192", "--no-progress"]) == 0
    rows = (run / "metrics.csv").read_text().splitlines()
    assert len(rows) > 2
    assert main(["evaluate", str(run), "--episodes", "3", "--out", "result.json"]) == 0
    assert json.loads(pathlib.Path("result.json").read_text())["lengths"] == [6, 6, 6]
