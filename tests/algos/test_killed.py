"""A training process that is killed at random moments, also while it writes its checkpoint, loses nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from resume_tasks import train
from test_resume import metrics, new_folder, without_clocks

from rlstruct.algos.training.run_folder import RunFolder

TASKS = Path(__file__).parent / "resume_tasks.py"


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_training_that_is_killed_again_and_again_ends_as_if_it_never_was(tmp_path: Path) -> None:
    name = "dqn, prioritised"
    with new_folder(tmp_path, name) as whole:
        expected = train(name, whole)
    run = new_folder(tmp_path, name)
    run.close()
    chance = random.Random(time.time_ns())
    unfinished, seen, n_kills = run.path / "checkpoint.pt.unfinished", 0, 0
    while n_kills < 3:
        process = subprocess.Popen([sys.executable, str(TASKS), name, str(run.path)], stderr=subprocess.PIPE)
        # Every other time while a checkpoint is being written, else some time after the first one of this process.
        before = _written(run.path)
        while process.poll() is None and _written(run.path) == before:
            time.sleep(0.001)
        end = time.monotonic() + chance.uniform(0.0, 0.15)
        while process.poll() is None and (time.monotonic() < end or (n_kills % 2 and not unfinished.exists())):
            time.sleep(0.0005)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            break  # it was faster
        seen, n_kills = seen + unfinished.exists(), n_kills + 1
        checkpoint = torch.load(run.path / "checkpoint.pt", weights_only=True)  # always whole
        if checkpoint["training"]["finished"]:
            break
    assert n_kills >= 2
    assert seen >= 1, "no kill met a checkpoint in the making"
    with RunFolder.resume(run.path, progress=False) as run:
        result = train(name, run)
    assert without_clocks(result) == without_clocks(expected)
    assert metrics(run.path) == metrics(whole.path)


def _written(path: Path) -> float:
    """Return the time at which the checkpoint was last replaced; 0 if there is none."""
    file = path / "checkpoint.pt"
    return os.stat(file).st_mtime_ns if file.exists() else 0
