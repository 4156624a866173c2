"""A small `make demo`: it trains, reports the result, and leaves the folder that it promises."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
import torch

for package in ("tyro", "tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

DEMO = pathlib.Path(__file__).parents[2] / "tutorials" / "train_cartpole.py"
SMALL = ["--n-env-steps", "600", "--n-envs", "4", "--evaluation-episodes", "4", "--seed", "3"]


@pytest.mark.slow
def test_the_demo_trains_and_leaves_its_run_folder(tmp_path: pathlib.Path) -> None:
    run = subprocess.run(
        [sys.executable, str(DEMO), *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Warning" not in run.stderr
    assert "step/s" not in run.stderr  # the progress bar is for terminals
    before, after = re.findall(r"Evaluation (?:before|after) training: mean return (\d+\.\d) of 500", run.stdout)
    assert 1.0 <= float(before) <= 500.0
    assert 1.0 <= float(after) <= 500.0
    named = re.search(r"Run folder: (.+)", run.stdout)
    assert named is not None
    folder = tmp_path / named.group(1)
    assert {"checkpoint.pt", "config.json", "learning_curve.png", "metrics.csv"} <= {
        file.name for file in folder.iterdir()
    }
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["env_steps"] >= 600
    assert checkpoint["config"]["seed"] == 3
    assert {"model", "optimizer", "policy_version", "training"} < set(checkpoint)
