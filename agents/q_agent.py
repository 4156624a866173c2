"""Epsilon-greedy agents and their networks of action values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct.agents.actor_critic import RecurrentAgent
from rlstruct.agents.convolutional import ConvolutionalTrunk
from rlstruct.agents.model_agent import ModelAgent, expect_outputs
from rlstruct.agents.networks import MLP, Activation, Recurrent, as_features, create_activation
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import BadValueError
from rlstruct.functional import categorical, random
from rlstruct.functional.q_learning import duelling_values
from rlstruct.policies.blueprint import KeepsArguments
from rlstruct.rl_agent import frame_of


def epsilon_greedy(
    agent: ModelAgent[Any], values: Tensor, observation: DictTensor, agent_info: DictTensor
) -> DictTensor:
    """Choose the actions of a `QAgent`.

    Args:
        agent: explores if it is ``stochastic``.
        values: Q(s, a).                              [B, A] float
        observation: its ``rng`` is drawn from.       [B]
        agent_info: ``epsilon``; empty to be greedy.  [B] float
    """
    action = categorical.best(values.detach())  # no class if values are NaN, which the batcher reports
    if agent.stochastic and "epsilon" in agent_info:
        key = observation["rng"]
        # Number 0 is the key itself and costs nothing; the default streams would do as well.
        explore = random.uniform(key, stream=0) < agent_info["epsilon"]
        action = torch.where(explore, random.randint(key, values.shape[-1], stream=1), action)
    return DictTensor({"action": action, "action_values": values})


class QAgent(ModelAgent[nn.Module]):
    """Epsilon-greedy agent: takes a random action with probability epsilon, else the one with the highest value.

    Epsilon is ``agent_info["epsilon"]`` [B] float, one per environment. Without it, or with ``stochastic=False``, the
    agent is greedy. It keeps no state, and returns ``action`` [B] int64, the index of a value, and ``action_values``
    [B, A].

    Args:
        model: maps ``frame`` [B, ...] to action values [B, A], as `rlstruct.agents.QNetwork` does.
        device: see `ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """

    pure = True
    action_form = "index"
    agent_info_on_device = True  # epsilon is compared with random numbers on the device
    samples_with = "epsilon"
    _outputs = ("action values [B, A]",)

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]``, drawing from ``observation["rng"]``; see `RL_Agent.__call__`."""
        values = expect_outputs(self, self.model(frame_of(observation)))
        return epsilon_greedy(self, values, observation, agent_info), state


class RecurrentQAgent(RecurrentAgent):
    """A `QAgent` with the state of a `RecurrentAgent`; its model is a `RecurrentQNetwork`."""

    pure = True
    action_form = "index"
    agent_info_on_device = True
    samples_with = "epsilon"
    _outputs = ("action values [B, A]", "hidden [B, H]")

    def choose(self, values: Tensor, observation: DictTensor) -> DictTensor:
        """Choose actions; `__call__` and `replay_sequence` have added epsilon to the observation."""
        return epsilon_greedy(self, values, observation, observation)

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]`` and the state; returns what `QAgent` returns."""
        return super().__call__(state, observation + agent_info, agent_info)

    def replay_sequence(self, trajectories: Trajectories) -> tuple[DictTensor, DictTensor] | None:
        """Call the network's ``sequence``; see `RecurrentAgent.replay_sequence`."""
        info, steps = trajectories.info, trajectories.steps
        epsilons = info.truncate_key("agent_info/").prepend_key("observation/")  # [B, ...]
        n_steps = steps.n_steps()
        repeated = {key: one.unsqueeze(1).expand(-1, n_steps, *one.shape[1:]) for key, one in epsilons.items()}
        steps = TemporalDictTensor.unchecked({**dict(steps.items()), **repeated}, steps.lengths)
        return super().replay_sequence(Trajectories.unchecked(info, steps))


class DuellingHead(KeepsArguments, nn.Module):
    """Action values from features, as the sum of a state value and A advantages; see `duelling_values`.

    Args:
        n_features: F.
        n_actions: A.
        hidden: width of each hidden layer of either stream; Wang et al. (ICML 2016) use one of 512.
        orthogonal: see `MLP`.
    """

    def __init__(
        self, n_features: int, n_actions: int, *, hidden: Sequence[int] = (), orthogonal: bool = False
    ) -> None:
        super().__init__()
        self.value = MLP(n_features, 1, hidden=hidden, activation=nn.ReLU, orthogonal=orthogonal)
        self.advantage = MLP(n_features, n_actions, hidden=hidden, activation=nn.ReLU, orthogonal=orthogonal)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, F] float to action values [B, A]."""
        return duelling_values(self.value(features), self.advantage(features))


class QNetwork(KeepsArguments, nn.Module):
    """Values of A actions, from a multi-layer perceptron.

    Args:
        n_inputs: D, the number of entries of a frame, counted over all its axes.
        n_actions: A.
        hidden: width of each hidden layer, at least one.
        duelling: end in a `DuellingHead` instead of one linear layer.
        activation: see `MLP`, as are ``orthogonal`` and ``layer_norm``.

    Raises:
        ValueError: ``hidden`` is empty.
    """

    def __init__(
        self,
        n_inputs: int,
        n_actions: int,
        *,
        hidden: Sequence[int] = (128, 128),
        duelling: bool = False,
        activation: Activation = nn.ReLU,
        orthogonal: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if not hidden:
            raise BadValueError(
                "QNetwork: hidden is empty, expected the width of at least one layer, such as (128, 128). "
                f"MLP({n_inputs}, {n_actions}, hidden=()) is linear, for frames of shape [{n_inputs}]."
            )
        *lower, width = hidden
        settings: dict[str, Any] = {"activation": activation, "orthogonal": orthogonal, "layer_norm": layer_norm}
        trunk = MLP(n_inputs, width, hidden=lower, output_gain=2.0**0.5, **settings)
        self.trunk = nn.Sequential(trunk, *([nn.LayerNorm(width)] if layer_norm else []), create_activation(activation))
        self.head: nn.Module = (
            DuellingHead(width, n_actions, orthogonal=orthogonal)
            if duelling
            else MLP(width, n_actions, hidden=(), orthogonal=orthogonal)
        )

    def forward(self, frame: Tensor) -> Tensor:
        """Compute action values.

        Args:
            frame: frames of the environments; integers and bools are converted.  [B, ...] any dtype

        Returns:
            Q(s, a).  [B, A] in the dtype of the weights
        """
        values: Tensor = self.head(self.trunk(as_features(frame, self)))
        return values


class RecurrentQNetwork(Recurrent):
    """Values of A actions, on top of one gated recurrent unit.

    Args:
        n_inputs: see `Recurrent`, as are ``n_hidden``, ``activation``, ``orthogonal`` and ``layer_norm``.
        n_actions: A.
    """

    def __init__(
        self,
        n_inputs: int | ConvolutionalTrunk,
        n_actions: int,
        *,
        n_hidden: int = 64,
        activation: Activation = nn.Tanh,
        orthogonal: bool = True,
        layer_norm: bool = False,
    ) -> None:
        settings: dict[str, Any] = {"activation": activation, "orthogonal": orthogonal, "layer_norm": layer_norm}
        super().__init__(n_inputs, n_hidden=n_hidden, **settings)
        self.head = MLP(n_hidden, n_actions, hidden=(), orthogonal=orthogonal)

    def heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute Q(s, a).  [B, A]."""
        return (self.head(hidden),)
