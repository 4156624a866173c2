"""`rlstruct export`, in this process."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

from rlstruct.cli.main import main

for package in ("tyro", "tqdm", "tensorboard", "matplotlib", "PIL"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

SMALL = ["--n-env-steps", "200", "--n-timesteps", "20", "--n-envs", "2", "--n-processes", "0"]
SMALL += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--no-progress"]


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", "--env", "CartPole-v1", "--recurrent", "--name", "one", "--loggers", *SMALL]) == 0
    capsys.readouterr()
    return next(pathlib.Path("runs").iterdir())


def test_export(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{run / 'policy.pt2'}: checked against the policy, largest difference ")
    program = torch.export.load(run / "policy.pt2").module()
    inputs = {"frame": torch.zeros(1, 4), "initial_state": torch.tensor([True]), "state/hidden": torch.zeros(1, 64)}
    assert program(inputs)["action"].shape == (1,)
    assert main(["export", str(run / "checkpoint.pt"), "--out", "elsewhere"]) == 0
    assert [one.name for one in pathlib.Path("elsewhere").iterdir()] == ["policy.pt2"]


def test_mistakes(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    assert main(["export", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "rlstruct export: there is no nowhere, expected a run folder with a checkpoint. A run writes checkpoint.pt "
        "after its first evaluation.\n"
    )
    find_spec = "rlstruct.cli.messages.importlib.util.find_spec"
    monkeypatch.setattr(find_spec, lambda name: None if name == "onnxruntime" else sys)
    assert main(["export", str(run), "--onnx"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlstruct export: --onnx needs onnxruntime, which is not installed. Install ")
    monkeypatch.setattr(find_spec, lambda name: None if name.startswith("onnx") else sys)
    assert main(["export", str(run), "--onnx"]) == 2
    assert "needs onnx, onnxscript, onnxruntime, which are not installed." in capsys.readouterr().err
    assert not (run / "policy.pt2").exists()
