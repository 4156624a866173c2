"""The diffs of CONTRIBUTING.md apply, touch as many files as it says, and what they add works."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from checkers import ROOT

DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
ALGORITHM, SIMULATOR = DIFFS
# The kernel does what the simulator does, with the agent in the loop.
COMPARE = """
import torch
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

def collect(backend):
    torch.manual_seed(0)
    model = ActorCritic(n_inputs=1, n_actions=2)
    env_args = {"name": "Walk-v0", "n_envs": 32, "backend": backend}
    with RL_Batcher(50, ActorCriticAgent, make, agent_args={"model": model}, env_args=env_args, seed=1) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0].steps

kernel, oracle = collect("warp"), collect("torch")
for key in oracle.keys():
    torch.testing.assert_close(kernel[key], oracle[key], rtol=1e-4, atol=1e-4)
assert oracle["_observation/terminated"].sum() > 10
"""


@pytest.mark.parametrize(
    ("diff", "files"),
    [
        (ALGORITHM, {"algos/__init__.py", "algos/vpg.py"}),
        (SIMULATOR, {"rlstruct/sims/__init__.py", "rlstruct/sims/walk.py", "rlstruct/sims/walk_kernel.py"}),
    ],
    ids=["algorithm", "simulator"],
)
def test_a_diff_touches_few_files_and_applies(diff: str, files: set[str], patched: pathlib.Path) -> None:
    assert set(re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)) == files
    for file in files:
        added = [line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
        assert set((patched / file).read_text().splitlines()) & set(added)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Make a copy of the library with both diffs applied; ``package`` in it is laid out as it installs."""
    folder = tmp_path_factory.mktemp("patched")
    for name in ("rlstruct", "agents", "batchers", "algos"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in DIFFS:
        subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)
    (folder / "package").mkdir()
    (folder / "package" / "rlstruct").symlink_to(folder / "rlstruct")
    for name in ("agents", "batchers", "algos"):
        (folder / "rlstruct" / name).symlink_to(folder / name)
    return folder


def run(patched: pathlib.Path, *arguments: str, folder: pathlib.Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(patched / "package"), "COLUMNS": "100"}
    found = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    return found.stdout


@pytest.mark.slow
def test_the_algorithm_trains_by_its_name_in_the_simulator(patched: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")
    words = ["train", "vpg", "--env", "Walk-v0", "--simulator", "torch", "--baseline", "0.2", "--n-env-steps", "400"]
    words += ["--n-processes", "0", "--n-timesteps", "100", "--evaluation-processes", "0", "--no-progress"]
    assert "after training: return" in run(patched, "-m", "rlstruct", *words, folder=tmp_path)
    said = run(patched, "-m", "rlstruct", "train", "vpg", "--help", folder=tmp_path)
    assert "subtracted from every return. At least 0." in " ".join(said.replace("│", " ").split())


@pytest.mark.slow
def test_the_kernel_does_what_the_simulator_does(patched: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    run(patched, "-c", COMPARE, folder=tmp_path)
