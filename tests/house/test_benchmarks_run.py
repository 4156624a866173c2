"""The benchmark that is to be run on a GPU runs here too, so that it does not break unseen."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from checkers import ROOT

pytest.importorskip("warp", reason="needs the extra warp")


@pytest.mark.slow
def test_the_quick_ladder_of_the_gpu_benchmark(tmp_path: pathlib.Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--quick",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())["rows"]
    measured = {(row["part"], row["rung"]) for row in rows if "steps_per_second" in row}
    expected = {"SyncVectorEnv", "numpy-vectorised", "torch eager", "Warp one step", "Warp fused"}
    assert {rung for part, rung in measured if part == "simulation"} == expected
    assert ("policy", "Warp fused policy") in measured
    assert {row["part"] for row in rows} == {
        "limits",
        "sync",
        "fused",
        "policy",
        "simulation",
        "launches",
        "training",
        "summary",
    }
    without_cuda = {
        "there is no CUDA device",
        "it compiles for half a minute",
        "it takes minutes on a CPU; raise --minutes",
    }
    assert {row["left_out"] for row in rows if "left_out" in row} == without_cuda  # nothing failed
    assert all(row["steps_per_second"] > 0 for row in rows if "steps_per_second" in row)
