"""Gymnasium environments as VecEnvs: `GymEnv`, `GymEnvInf`, `GymVectorEnv`. Layer 3."""

from rlstruct.envs.gym_env import GymEnv, GymEnvInf
from rlstruct.envs.gym_vector_env import GymVectorEnv

__all__ = ["GymEnv", "GymEnvInf", "GymVectorEnv"]
