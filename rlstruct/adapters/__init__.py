"""Adapters to other libraries: simulators whose tensors stay where they are, and gymnasium's vector interface."""

from rlstruct.adapters.gymnasium_vector_env import GymnasiumVectorEnv
from rlstruct.adapters.torch_vector_env import TorchVectorEnv

__all__ = ["GymnasiumVectorEnv", "TorchVectorEnv"]
