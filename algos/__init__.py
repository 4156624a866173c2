"""REINFORCE, A2C, PPO, DQN, SAC and AlphaZero on one training loop. Read `rlstruct.algos.reinforce` first.

Each algorithm is a module with a class of settings and `train`, an `Algorithm`: ``a2c.train(A2CConfig(...), ...)``.
"""

import contextlib
from typing import TYPE_CHECKING, Any

from rlstruct.addons import attributes, load
from rlstruct.algos import a2c, dqn, ppo, reinforce, sac
from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.callbacks import Callback, TrainingContext
from rlstruct.algos.config import TrainingConfig, load_config
from rlstruct.algos.dqn import DQNConfig
from rlstruct.algos.evaluation import Evaluation, Evaluator, TrainingResult
from rlstruct.algos.learner import GradientLearner, agent_around, evaluate_actions, mean_terms
from rlstruct.algos.ppo import PPOConfig
from rlstruct.algos.prioritised import PrioritisedReplayBuffer
from rlstruct.algos.reinforce import ReinforceConfig
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.algos.replay_learner import PolyakAverage, ReplayConfig, ReplayLearner
from rlstruct.algos.run_folder import RunFolder
from rlstruct.algos.sac import SACConfig
from rlstruct.algos.shipped_callbacks import BestCheckpoint, EarlyStopping, OptunaPruning, PeriodicVideo
from rlstruct.algos.training import run_training
from rlstruct.errors import MissingPackageError
from rlstruct.options import option

if TYPE_CHECKING:
    from rlstruct_search import alphazero as alphazero
    from rlstruct_search.alphazero import AlphaZeroConfig as AlphaZeroConfig
else:
    __getattr__ = attributes(__name__, {"AlphaZeroConfig": "rlstruct_search.alphazero", "alphazero": "rlstruct_search"})

ALGORITHMS: dict[str, Algorithm[Any]] = {
    "reinforce": reinforce.train,
    "a2c": a2c.train,
    "ppo": ppo.train,
    "dqn": dqn.train,
    "sac": sac.train,
}
"""Algorithms by their names on the command line; add your own before you call `rlstruct.cli.main.main`."""

Follower, judge_actions = PolyakAverage, evaluate_actions  # their names in 0.3

__all__ = [
    "ALGORITHMS",
    "A2CConfig",
    "Algorithm",
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
    "PolyakAverage",
    "PrioritisedReplayBuffer",
    "ReinforceConfig",
    "ReplayBuffer",
    "ReplayConfig",
    "ReplayLearner",
    "RunFolder",
    "SACConfig",
    "TrainingConfig",
    "TrainingContext",
    "TrainingResult",
    "a2c",
    "agent_around",
    "dqn",
    "evaluate_actions",
    "load_config",
    "mean_terms",
    "option",
    "ppo",
    "reinforce",
    "run_training",
    "sac",
]

with contextlib.suppress(MissingPackageError):
    load("rlstruct_search.alphazero", "AlphaZero")  # adds itself to ALGORITHMS
