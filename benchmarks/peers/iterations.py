"""Settings that both contenders of ``learning_speed.py`` and ``threads.py`` share; imports neither library."""

from __future__ import annotations

import os

GAMES = "Breakout", "Asterix", "SpaceInvaders", "Freeway"
SETTINGS = {
    ("ppo", "Breakout-MinAtar"): {"n_epochs": 4, "n_minibatches": 8},
    ("ppo", "CartPole-v1"): {"n_epochs": 4, "n_minibatches": 8},
    ("dqn", "CartPole-v1"): {"n_updates": 32, "batch_size": 128},
    **{("pqn", f"{game}-MinAtar"): {"n_epochs": 2, "n_minibatches": 32} for game in GAMES},
}
NETWORKS = {
    ("ppo", "Breakout-MinAtar"): (128, 128),
    ("ppo", "CartPole-v1"): (64, 64),
    ("dqn", "CartPole-v1"): (64, 64),
    **{("pqn", f"{game}-MinAtar"): (64, 64) for game in GAMES},
}
"""Sizes of the hidden layers, with ReLU. PPO's actor and critic have a network each; PQN's has layer normalisation."""
if "UNITS" in os.environ:
    NETWORKS = dict.fromkeys(NETWORKS, (int(os.environ["UNITS"]),) * 2)
CAPACITY = 100_000
"""Steps that DQN's replay buffer holds."""


def keep_cores() -> None:
    """Run on the first ``CORES`` cores that this process may use."""
    if hasattr(os, "sched_setaffinity"):  # Linux; elsewhere the numbers of threads have to do
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[: int(os.environ["CORES"])])
