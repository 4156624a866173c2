"""Simulators of other libraries whose tensors stay where they are: Isaac Lab and ManiSkill, JAX, MuJoCo Warp.

Each adapter imports its library when it is made, and says which extra brings it. See `TorchVectorEnv`, `JaxEnv` and
`MujocoWarpEnv`.
"""

from rlstruct.adapters.jax_env import JaxEnv
from rlstruct.adapters.mujoco_warp_env import MujocoWarpEnv, Task
from rlstruct.adapters.torch_vector_env import TorchVectorEnv

__all__ = ["JaxEnv", "MujocoWarpEnv", "Task", "TorchVectorEnv"]
