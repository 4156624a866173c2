"""Environments that take actions by index, for agents whose networks number them from 0."""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import BadTypeError, ShapeMismatchError
from rlstruct.rl_agent import RL_Agent
from rlstruct.spaces import ActionIndices
from rlstruct.vec_env import Capturable, EnvWrapper, Observed, StepResult, VecEnv, check_action


class IndexedEnv(EnvWrapper):
    """A VecEnv whose actions are indices of choices, whatever numbers, shape and dtype the wrapped one expects.

    Its ``action_space`` is a Discrete or MultiDiscrete space of int64 that begins with 0, and ``last_action`` holds
    indices, too.

    Args:
        env: the environments.
        actions: indices of its action space.

    Attributes:
        actions: the argument.
    """

    def __init__(self, env: VecEnv, actions: ActionIndices) -> None:
        super().__init__(env)
        self.actions, self.action_space = actions, actions.space()
        self._starts = actions.starts(env.device)
        self._size = (env.n_envs(),) if actions.single else (env.n_envs(), len(actions.sizes))

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Reset the wrapped environment; see `VecEnv.reset`."""
        observation, running = self.env.reset(env_info)
        return self._indexed(observation), running

    def step(self, action: DictTensor) -> StepResult:
        """Step the wrapped environment; see `VecEnv.step`.

        Raises:
            ShapeMismatchError: the action is not [B] or [B, K] int64.
        """
        index = check_action("IndexedEnv", action, ("action",))["action"]
        if index.dtype != torch.int64 or tuple(index.shape) != self._size:
            raise wrong_index(index, self._size, self.actions, self.env.action_space)
        sent = {**action._tensors, "action": self.actions.elements(index, self._starts)}
        answer = self.env.step(DictTensor.unchecked(sent))
        (reached, ran), (current, running) = answer
        restarted = getattr(answer, "restarted", True)
        observation = self._indexed(reached)
        after = self._indexed(current) if restarted else observation
        return StepResult((observation, ran), (after, running), restarted=restarted)

    def _indexed(self, observation: DictTensor) -> DictTensor:
        """Return the observation with indices as ``last_action``, 0 after a reset."""
        tensors = observation._tensors
        last = self.actions.indices(tensors["last_action"], self._starts)
        first = tensors["initial_state"].view(-1, *[1] * (last.dim() - 1))
        return DictTensor.unchecked({**tensors, "last_action": last.masked_fill(first, 0)})


def wrong_index(index: Tensor, size: tuple[int, ...], actions: ActionIndices, space: object) -> ShapeMismatchError:
    """Create the error for an agent's index whose shape is not ``size``, or that is not int64."""
    fix = "Give the network one output per action, n_actions=n."
    if not actions.single:
        fix = f"Take an agent that makes {size[1]} choices at once, such as ActorCriticAgent with "
        fix += f"n_actions={actions.sizes}."
    return ShapeMismatchError(
        f"agent: the action is {index.dtype} {list(index.shape)}, expected int64 {list(size)}, because the environment "
        f"expects an element of {space}. {fix}"
    )


class _CapturableIndexedEnv(IndexedEnv):
    """An `IndexedEnv` around a `Capturable`, which it is as well."""

    env: Capturable  # type: ignore[assignment]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state of the wrapped environment."""
        return self.env.state_tensors()

    def set_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from a result of `state_tensors`."""
        self.env.set_state_tensors(tensors)


def env_for(agent: RL_Agent, env: VecEnv) -> VecEnv:
    """Return the environments as an agent acts in them: an `IndexedEnv` if its ``action_form`` requires one.

    Raises:
        TypeError: the agent's actions cannot be turned into elements of the action space.
    """
    form, space = agent.action_form, env.action_space
    if form == "element" or (form == "vector" and _holds_vectors(space)):
        return env
    actions = ActionIndices.of(space) if form == "index" else None
    if actions is None:
        returns, kinds, others = {
            "index": (
                "the index of an action, or of several at once",
                "a Discrete, MultiDiscrete or MultiBinary space",
                "GaussianAgent for PPO and A2C, SquashedGaussianAgent for SAC",
            ),
            "vector": ("a vector of numbers", "a Box of floats", "ActorCriticAgent for PPO and A2C, QAgent for DQN"),
        }[form]
        raise BadTypeError(
            f"agent: {type(agent).__name__} returns {returns}, expected an element of the environment's action space, "
            f"{space}. It needs {kinds}: wrap the environment, for example in gymnasium.wrappers.TransformAction; take "
            f"another agent ({others}); or write one that returns elements of the space (docs/your_own.md)."
        )
    if actions.equal:
        return env
    return (_CapturableIndexedEnv if isinstance(env, Capturable) else IndexedEnv)(env, actions)


def indices_of(env: VecEnv) -> ActionIndices | None:
    """Return how the result of `env_for` turns indices into elements; None if it does not."""
    return env.actions if isinstance(env, IndexedEnv) else None


def _holds_vectors(space: object) -> bool:
    return isinstance(space, spaces.Box) and space.dtype.kind == "f"
