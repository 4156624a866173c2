"""Gymnasium environments as VecEnvs: `GymEnv`, `GymEnvInf`, `GymVectorEnv`."""

from rlstruct.envs.gym_env import GymEnv, GymEnvInf
from rlstruct.envs.gym_vector_env import GymVectorEnv

__all__ = ["GymEnv", "GymEnvInf", "GymVectorEnv"]
