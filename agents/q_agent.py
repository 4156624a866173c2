"""The epsilon-greedy agent and its networks of action values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlstruct.agents.model_agent import ModelAgent
from rlstruct.agents.networks import MLP, as_features
from rlstruct.core import DictTensor
from rlstruct.functional import categorical, random
from rlstruct.functional.q_learning import duelling_values
from rlstruct.policies.blueprint import KeepsArguments
from rlstruct.rl_agent import frame_of


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

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]``, drawing from ``observation["rng"]``; see `RL_Agent.__call__`."""
        values = self.model(frame_of(observation))  # [B, A]
        action = categorical.best(values.detach())  # no class if values are NaN, which the batcher reports
        if self.stochastic and "epsilon" in agent_info:
            key = observation["rng"]
            # Number 0 is the key itself and costs nothing; the default streams would do as well.
            explore = random.uniform(key, stream=0) < agent_info["epsilon"]
            action = torch.where(explore, random.randint(key, values.shape[-1], stream=1), action)
        return DictTensor({"action": action, "action_values": values}), state


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
        orthogonal: see `MLP`.
    """

    def __init__(
        self,
        n_inputs: int,
        n_actions: int,
        *,
        hidden: Sequence[int] = (128, 128),
        duelling: bool = False,
        orthogonal: bool = False,
    ) -> None:
        super().__init__()
        *lower, width = hidden
        trunk = MLP(n_inputs, width, hidden=lower, activation=nn.ReLU, orthogonal=orthogonal, output_gain=2.0**0.5)
        self.trunk = nn.Sequential(trunk, nn.ReLU())
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
