"""REINFORCE, A2C, PPO, DQN and AlphaZero on one training loop; `rlstruct.algos.reinforce` is the first to read.

Each algorithm is a module with a class of settings and `train`, an `Algorithm`: ``a2c.train(A2CConfig(...), ...)``.
"""

from typing import Any

from rlstruct.algos import a2c, alphazero, dqn, ppo, reinforce
from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.alphazero import AlphaZeroConfig
from rlstruct.algos.callbacks import Callback, TrainingContext
from rlstruct.algos.config import TrainingConfig, load_config
from rlstruct.algos.dqn import DQNConfig
from rlstruct.algos.evaluation import Evaluation, Evaluator
from rlstruct.algos.learner import GradientLearner
from rlstruct.algos.ppo import PPOConfig
from rlstruct.algos.prioritised import PrioritisedReplayBuffer
from rlstruct.algos.reinforce import ReinforceConfig
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.algos.run_folder import RunFolder
from rlstruct.algos.shipped_callbacks import BestCheckpoint, EarlyStopping, OptunaPruning, PeriodicVideo
from rlstruct.algos.training import TrainingResult, run_training
from rlstruct.options import option

ALGORITHMS: dict[str, Algorithm[Any]] = {
    "reinforce": reinforce.train,
    "a2c": a2c.train,
    "ppo": ppo.train,
    "dqn": dqn.train,
    "alphazero": alphazero.train,
}
"""Algorithms by their names on the command line; add your own before you call `rlstruct.cli.main.main`."""

__all__ = [
    "ALGORITHMS",
    "A2CConfig",
    "Algorithm",
    "AlphaZeroConfig",
    "BestCheckpoint",
    "Callback",
    "DQNConfig",
    "EarlyStopping",
    "Evaluation",
    "Evaluator",
    "GradientLearner",
    "OptunaPruning",
    "PPOConfig",
    "PeriodicVideo",
    "PrioritisedReplayBuffer",
    "ReinforceConfig",
    "ReplayBuffer",
    "RunFolder",
    "TrainingConfig",
    "TrainingContext",
    "TrainingResult",
    "a2c",
    "alphazero",
    "dqn",
    "load_config",
    "option",
    "ppo",
    "reinforce",
    "run_training",
]
