"""Simulators of other libraries whose tensors stay where they are, such as Isaac Lab and ManiSkill."""

from rlstruct.adapters.torch_vector_env import TorchVectorEnv

__all__ = ["TorchVectorEnv"]
