"""CleanRL's ppo.py trains in our environments after one statement is changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OURS = 'envs = GymnasiumVectorEnv(sims.make, {"name": args.env_id, "n_envs": args.num_envs}, listed_info=True)\n'
IMPORTS = "import tyro\nfrom rlstruct import sims\nfrom rlstruct.adapters import GymnasiumVectorEnv\n"


@pytest.mark.slow
@pytest.mark.skipif("CLEANRL" not in os.environ, reason="CLEANRL names no checkout of vwxyzjn/cleanrl")
def test_cleanrls_ppo_learns_in_our_cart_poles(tmp_path: Path) -> None:
    code = (Path(os.environ["CLEANRL"]) / "cleanrl" / "ppo.py").read_text()
    code, n_changed = re.subn(r"envs = gym\.vector\.SyncVectorEnv\(.*?\n    \)\n", OURS, code, flags=re.DOTALL)
    code, n_imports = re.subn(r"import tyro\n", IMPORTS, code)
    assert (n_changed, n_imports) == (1, 1)
    (tmp_path / "ppo.py").write_text(code)
    words = "--num-envs 256 --learning-rate 0.001 --total-timesteps 330000 --no-cuda --seed 1"
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "ppo.py", *words.split()],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    returns = [float(one) for one in re.findall(r"episodic_return=([\d.]+)", run.stdout)]
    assert sum(returns[:100]) / 100 < 30
    assert sum(returns[-100:]) / 100 > 80  # three seeds: 133 to 137
