"""REINFORCE, A2C, PPO, DQN and AlphaZero on one training loop; `rlstruct.algos.reinforce` is the first to read.

Each algorithm is a module with a `train` function and a class of settings: ``a2c.train(A2CConfig(...), ...)``.
"""

from rlstruct.algos import a2c, alphazero, dqn, ppo, reinforce
from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.alphazero import AlphaZeroConfig
from rlstruct.algos.config import TrainingConfig, load_config
from rlstruct.algos.dqn import DQNConfig
from rlstruct.algos.evaluation import Evaluation, Evaluator
from rlstruct.algos.learner import GradientLearner
from rlstruct.algos.ppo import PPOConfig
from rlstruct.algos.prioritised import PrioritisedReplayBuffer
from rlstruct.algos.reinforce import ReinforceConfig
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.algos.run_folder import RunFolder
from rlstruct.algos.training import TrainingResult, run_training
from rlstruct.options import option

__all__ = [
    "A2CConfig",
    "AlphaZeroConfig",
    "DQNConfig",
    "Evaluation",
    "Evaluator",
    "GradientLearner",
    "PPOConfig",
    "PrioritisedReplayBuffer",
    "ReinforceConfig",
    "ReplayBuffer",
    "RunFolder",
    "TrainingConfig",
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
