"""Agents with a learned baseline: discrete or continuous actions, with and without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlstruct.agents.model_agent import ANY_NUMBER, ModelAgent, expect_outputs
from rlstruct.agents.networks import MLP, ActionLogits, ActorCritic, Recurrent, takes_sequences
from rlstruct.core import DictTensor, Trajectories
from rlstruct.engine.fused import Layers, Perceptron
from rlstruct.engine.torch_private import has_hooks
from rlstruct.errors import BadTypeError, kind_of
from rlstruct.functional import categorical, gaussian
from rlstruct.functional.masks import masked_dicttensor
from rlstruct.rl_agent import ActionForm, frame_of, replayed_observation


def discrete_choice(agent: ModelAgent[Any], policy: Tensor, value: Tensor, observation: DictTensor) -> DictTensor:
    """Sample actions from logits, or take the most probable ones; see `ActorCriticAgent`.

    Args:
        agent: samples if it is ``stochastic``.
        policy: unnormalised log-probabilities.    [B, A] or [B, K, A] float
        value: the baseline.                       [B] float
        observation: its ``rng`` is drawn from, unless there is a ``chosen_action``.  [B]
    """
    detached = policy.detach()  # choosing is not differentiable
    if "chosen_action" in observation:
        action = in_range = observation["chosen_action"]
    else:
        action = categorical.sample(detached, observation["rng"]) if agent.stochastic else categorical.best(detached)
        in_range = action.clamp(max=policy.shape[-1] - 1)  # NaN logits give an invalid class, which the batcher reports
    each = categorical.log_probability(policy, in_range)  # [B] or [B, K]
    log_probability = each if each.dim() == 1 else each.sum(-1)
    return DictTensor({"action": action, "action_logits": policy, "log_probability": log_probability, "value": value})


def gaussian_choice(agent: ModelAgent[Any], policy: Tensor, value: Tensor, observation: DictTensor) -> DictTensor:
    """Sample continuous actions, or take their mean; see `GaussianAgent`.

    Args:
        agent: samples if it is ``stochastic``.
        policy: mean and log sigma, concatenated.  [B, 2 D] float
        value: the baseline.                      [B] float
        observation: its ``rng`` is drawn from, unless there is a ``chosen_action``.  [B]
    """
    mean, log_std = policy.chunk(2, dim=-1)  # [B, D] each
    action = mean.detach()  # choosing is not differentiable
    if "chosen_action" in observation:
        action = observation["chosen_action"]
    elif agent.stochastic:
        action = gaussian.sample(action, log_std.detach(), observation["rng"])
    log_probability = gaussian.log_probability(mean, log_std, action)
    outputs = {"action": action, "action_mean": mean, "action_log_std": log_std}
    return DictTensor({**outputs, "log_probability": log_probability, "value": value})


class ActorCriticAgent(ModelAgent[nn.Module]):
    """Agent that samples one of A actions from a network's logits, or K actions at once. It keeps no state.

    It returns ``action`` [B] int64, ``action_logits`` [B, A], ``log_probability`` [B] of that action and ``value`` [B],
    the baseline. For a MultiDiscrete or MultiBinary space these are ``action`` [B, K] and ``action_logits`` [B, K, A],
    and ``log_probability`` is the sum over the K actions. An action is the index of an output, see
    `RL_Agent.action_form`. A replay, even with other weights, returns the stored ``action``
    and its current ``log_probability``, with gradients.

    Args:
        model: maps ``frame`` [B, ...] to logits and value [B], as `rlstruct.agents.ActorCritic` does.
        device: see `ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """

    pure = True
    action_form: ActionForm = "index"
    choose = discrete_choice  # turns the network's output into actions
    _outputs = ("logits [B, A]", "value [B]")

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]``, drawing from ``observation["rng"]``; see `RL_Agent.__call__`."""
        policy, value = expect_outputs(self, self.model(frame_of(observation)))
        return self.choose(policy, value, observation), state

    def perceptron(self) -> Perceptron | None:
        """Return the agent as a kernel sees it, see `rlstruct.engine.fused`; None without an `ActorCritic`."""
        model = self.model
        if type(self) is not ActorCriticAgent or type(model) is not ActorCritic or has_hooks(model):
            return None
        (actor, activation), (critic, other) = _layers(model.actor), _layers(model.critic)
        one_choice = type(model.policy) is ActionLogits and len(model.policy.shape) == 1
        if not (activation and activation == other and one_choice):
            return None
        return Perceptron(actor, critic, activation, self.stochastic)


def _layers(network: nn.Module) -> tuple[Layers, str]:
    """Return weights, biases and the activation between linear layers; "" if there are other layers."""
    parts = list(network.layers) if type(network) is MLP else []
    linear = [part for part in parts[::2] if type(part) is nn.Linear and part.bias is not None]
    between = {type(part).__name__ for part in parts[1::2]}
    if len(between) != 1 or len(parts) % 2 == 0 or len(linear) != len(parts[::2]):
        return (), ""
    return tuple((layer.weight, layer.bias) for layer in linear), between.pop()


class RecurrentAgent(ModelAgent[Recurrent]):
    """An `ActorCriticAgent` with a recurrent network.

    Its state is ``hidden`` [B, H]. It is reset to zero where ``observation["initial_state"]`` is True, so nothing is
    remembered from an earlier episode, even if an environment restarts in the middle of a batch.

    Args:
        model: see `rlstruct.agents.RecurrentActorCritic`.
        device: see `ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """

    pure = True
    action_form: ActionForm = "index"
    choose: Callable[..., DictTensor] = discrete_choice
    _outputs: ClassVar[tuple[str, ...]] = ("logits [B, A]", "value [B]", "hidden [B, H]")

    def __init_subclass__(cls, **settings: Any) -> None:  # noqa: ANN401 - whatever other bases take
        """Accept any number of outputs before ``hidden`` if a subclass has its own ``choose``, which gets them."""
        super().__init_subclass__(**settings)
        declaring: Any = next(base for base in cls.__mro__ if "_outputs" in vars(base))
        if cls.choose is not declaring.choose:
            cls._outputs = (ANY_NUMBER, "hidden [B, H]")

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Return ``hidden``: zeros [B, H] on the agent's device."""
        n_hidden = getattr(self.model, "n_hidden", None)
        if n_hidden is None:
            raise BadTypeError(
                f"{type(self).__name__}: model is {kind_of(self.model)} without the attribute 'n_hidden', expected one "
                "that has it: H, the size of its hidden state. Set self.n_hidden in the network, or define "
                "initial_state in the agent."
            )
        dtype = next(self.model.parameters()).dtype
        return DictTensor({"hidden": torch.zeros(B, n_hidden, dtype=dtype, device=self.device)})

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]`` and the state; returns what `ActorCriticAgent` returns."""
        fresh = self.initial_state(agent_info, state.n_elems())
        state = masked_dicttensor(state, fresh, observation["initial_state"])
        *outputs, hidden = expect_outputs(self, self.model(frame_of(observation), state["hidden"]))
        return self.choose(*outputs, observation), DictTensor({"hidden": hidden})

    def replay_sequence(self, trajectories: Trajectories) -> tuple[DictTensor, DictTensor] | None:
        """Call the network's ``sequence``, if it has one; see `RL_Agent.replay_sequence`."""
        if not takes_sequences(self.model):
            return None
        observation = replayed_observation(trajectories.steps)
        hidden, initial = trajectories.info["agent_state/hidden"], observation["initial_state"]
        *outputs, after = self.model.sequence(frame_of(observation, n_axes=2), hidden, initial)
        flat = DictTensor({key: tensor.flatten(0, 1) for key, tensor in observation.items()})
        return self.choose(*outputs, flat), DictTensor({"hidden": after})


class GaussianAgent(ActorCriticAgent):
    """Agent that samples D continuous actions. It keeps no state.

    It returns ``action`` [B, D], ``action_mean`` and ``action_log_std`` [B, D], ``log_probability`` [B] and ``value``
    [B]. Actions are not clipped, because the policy gradient needs the density of the sampled action. If the
    environment does not clip them, wrap it in ``gymnasium.wrappers.ClipAction``.

    Args:
        model: maps ``frame`` to mean and log sigma [B, 2 D] and value [B], as `GaussianActorCritic` does.
        device: see `rlstruct.agents.model_agent.ModelAgent`, as are ``stochastic`` and ``copy_model``; without
            ``stochastic`` the mean is the action.
    """

    pure = True
    action_form = "vector"
    choose = gaussian_choice
    _outputs = ("mean and log sigma [B, 2 D]", "value [B]")


class RecurrentGaussianAgent(RecurrentAgent):
    """A `GaussianAgent` with the state of a `RecurrentAgent`; its model is a `RecurrentGaussianActorCritic`."""

    pure = True
    action_form = "vector"
    choose = gaussian_choice
    _outputs = ("mean and log sigma [B, 2 D]", "value [B]", "hidden [B, H]")
    replay_sequence = RecurrentAgent.replay_sequence
