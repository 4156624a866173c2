"""Iterations of CleanRL's recurrent PPO on CartPole-v1: ``cleanrl_recurrent.py TASK CELL``, CELL being LSTM or GRU.

CLEANRL names a checkout of vwxyzjn/cleanrl, whose ``ppo_atari_lstm.py`` runs with these changes: environments,
the layers below the cell, which saw Atari's pictures, the name of the cell, and nothing is logged.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from recurrent import HIDDEN, SETTINGS
from serve import Batches, Task, serve

CHANGES = (
    (r"from cleanrl_utils\.atari_wrappers import \(.*?\n\)\n", ""),
    (r"gym\.vector\.SyncVectorEnv\(.*?\n    \)\n", "make_envs(args)\n"),
    (r"self\.network = nn\.Sequential\(.*?\n        \)\n", f"self.network = nn.Sequential(\n"
     f"            layer_init(nn.Linear(envs.single_observation_space.shape[0], {HIDDEN})), nn.Tanh())\n"),
    (r"x / 255\.0", "x"),
    (r"nn\.LSTM\(512, 128\)", f"nn.LSTM({HIDDEN}, {HIDDEN})"),
    (r'if __name__ == "__main__":\n    args = tyro\.cli\(Args\)', "def train(args):"),
    (r'        print\("SPS:".*?\n', "        yield args.batch_size\n"),
)  # fmt: skip
# A gated recurrent unit has one state: the pair that the code carries holds it twice.
TO_GRU = (
    (r"nn\.LSTM\(", "nn.GRU("),
    (r"h, lstm_state = self\.lstm\(\n +h\.unsqueeze\(0\),\n +\(\n +(.*?),\n.*?\n +\),\n +\)",
     r"h, new = self.lstm(h.unsqueeze(0), \1); lstm_state = (new, new)"),
)  # fmt: skip


def program(cell: str) -> str:
    """Return CleanRL's code with the changes."""
    code = (Path(os.environ["CLEANRL"]) / "cleanrl" / "ppo_atari_lstm.py").read_text()
    for pattern, new in CHANGES + (TO_GRU if cell == "GRU" else ()):
        code, n = re.subn(pattern, new, code, flags=re.DOTALL)
        if n != 1:
            raise ValueError(f"{pattern!r} is {n} times in CleanRL's ppo_atari_lstm.py, expected once")
    return code


def make_envs(args: Any) -> SyncVectorEnv:  # noqa: ANN401 - CleanRL's settings
    """Make environments that restart within a step, as in the gymnasium that CleanRL was written for."""
    makers = [lambda: gymnasium.make(args.env_id)] * args.num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def iterations(task: Task) -> Batches:
    """Take one iteration after the other."""
    sys.modules["tyro"], logs = ModuleType("tyro"), ModuleType("torch.utils.tensorboard")
    nothing = lambda *_: None  # noqa: E731
    logs.SummaryWriter = lambda *_: SimpleNamespace(add_text=nothing, add_scalar=nothing, close=nothing)  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"] = logs
    names: dict[str, Any] = {"__name__": "cleanrl_recurrent", "__file__": "ppo_atari_lstm.py", "make_envs": make_envs}
    exec(compile(program(sys.argv[2]), "ppo_atari_lstm.py", "exec", dont_inherit=True), names)
    args = names["Args"](
        env_id=task.environment, num_envs=task.n_envs, num_steps=task.n_timesteps, cuda=False,
        num_minibatches=SETTINGS["n_minibatches"], update_epochs=SETTINGS["n_epochs"],
    )  # fmt: skip
    training = names["train"](args)
    while True:
        with torch.enable_grad():
            n_steps: int = next(training)
        yield n_steps


if __name__ == "__main__":
    serve(iterations)
