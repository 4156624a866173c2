"""REINFORCE, A2C, PPO, DQN, PQN and SAC on one training loop. Read `rlstruct.algos.reinforce` first.

Each algorithm is a module with a class of settings and `train`, an `Algorithm`: ``a2c.train(A2CConfig(...), ...)``.
"""

from typing import TYPE_CHECKING, Any

from rlstruct import renamed
from rlstruct.algos import a2c, dqn, ppo, pqn, reinforce, sac
from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.dqn import DQNConfig
from rlstruct.algos.learner import GradientLearner, agent_around, evaluate_actions, mean_terms
from rlstruct.algos.minibatches import EpochConfig, EpochLearner
from rlstruct.algos.ppo import PPOConfig
from rlstruct.algos.pqn import PQNConfig
from rlstruct.algos.prioritised_replay import PrioritisedReplayBuffer
from rlstruct.algos.reinforce import ReinforceConfig
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.algos.replay_learner import PolyakAverage, ReplayConfig, ReplayLearner, SlowCopy
from rlstruct.algos.sac import SACConfig
from rlstruct.algos.training.callbacks import Callback, TrainingContext
from rlstruct.algos.training.config import TrainingConfig, load_config
from rlstruct.algos.training.evaluation import Evaluation, Evaluator, TrainingResult
from rlstruct.algos.training.loop import run_training
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.algos.training.shipped_callbacks import BestCheckpoint, EarlyStopping, OptunaPruning, PeriodicVideo
from rlstruct.options import option
from rlstruct.registry import Registry

if not TYPE_CHECKING:
    __getattr__ = renamed.attributes(__name__)

ALGORITHMS: Registry[str, Algorithm[Any]] = Registry({
    "reinforce": reinforce.train,
    "a2c": a2c.train,
    "ppo": ppo.train,
    "dqn": dqn.train,
    "pqn": pqn.train,
    "sac": sac.train,
    "alphazero": "rlstruct.search.alphazero:train",
})  # fmt: skip
"""Algorithms by their names on the command line; add your own before you call `rlstruct.cli.main.main`."""

__all__ = [
    "ALGORITHMS",
    "A2CConfig",
    "Algorithm",
    "BestCheckpoint",
    "Callback",
    "DQNConfig",
    "EarlyStopping",
    "EpochConfig",
    "EpochLearner",
    "Evaluation",
    "Evaluator",
    "GradientLearner",
    "OptunaPruning",
    "PPOConfig",
    "PQNConfig",
    "PeriodicVideo",
    "PolyakAverage",
    "PrioritisedReplayBuffer",
    "ReinforceConfig",
    "ReplayBuffer",
    "ReplayConfig",
    "ReplayLearner",
    "RunFolder",
    "SACConfig",
    "SlowCopy",
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
    "pqn",
    "reinforce",
    "run_training",
    "sac",
]
