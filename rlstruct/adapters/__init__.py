"""Adapters to other libraries: simulators whose tensors stay where they are, and gymnasium's vector interface."""

from rlstruct.adapters.gymnasium_vector_env import GymnasiumVectorEnv
from rlstruct.adapters.jax_env import JaxEnv
from rlstruct.adapters.mujoco_warp_env import MujocoTask, MujocoWarpEnv
from rlstruct.adapters.torch_vector_env import TorchVectorEnv

__all__ = ["GymnasiumVectorEnv", "JaxEnv", "MujocoTask", "MujocoWarpEnv", "TorchVectorEnv"]
