"""Base class of learners that learn from a replay buffer: DQN, SAC and AlphaZero."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from rlstruct.algos.learner import GradientLearner, mean_terms
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.core import Trajectories
from rlstruct.rl_agent import RL_Agent


class ReplayLearner(GradientLearner):
    """Learner that stores every batch in a replay buffer, and takes ``n_updates`` gradient steps on samples from it.

    Args:
        model: see `GradientLearner`, as are ``agent`` and ``config``.
        agent: acts with it.
        config: also has ``overlap``, ``learning_starts``, ``n_updates``, ``replay_capacity``, and perhaps
            ``replay_device``.
        create_buffer: makes the buffer.
        networks: those besides the model that a checkpoint keeps, by their names in it.
        settings: of the buffer.

    Attributes:
        buffer: the collected steps.
    """

    config: Any

    def __init__(
        self,
        model: nn.Module,
        agent: RL_Agent,
        config: Any,  # noqa: ANN401 - each algorithm's own
        *,
        create_buffer: Callable[..., ReplayBuffer] = ReplayBuffer,
        networks: Mapping[str, nn.Module] | None = None,
        **settings: Any,  # noqa: ANN401 - of the buffer
    ) -> None:
        super().__init__(model, agent, config)
        self.overlap = config.overlap
        known = {"device": getattr(config, "replay_device", None) or self.device, "discount": config.discount}
        known["seed"] = config.seed + self.learners.rank
        self.buffer = create_buffer(config.replay_capacity, **{**known, **settings})
        self._networks = dict(networks or {})

    def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        """Add a batch to the replay buffer, and take ``n_updates`` gradient steps.

        Args:
            trajectories: the next steps of every environment, on any device.  [B, T]
            fraction_done: see `GradientLearner.update`.

        Returns:
            Detached means over the gradient steps of what `learn` returns, on the learner's device; nothing while the
            buffer fills.  [] each
        """
        self.buffer.extend(trajectories.to(self.buffer.device))
        if self.fills(fraction_done):
            return {}
        self.anneal(fraction_done)
        return mean_terms([self.learn() for _ in range(self.config.n_updates)])

    @abstractmethod
    def learn(self) -> dict[str, Tensor]:
        """Take one gradient step on a sample from the buffer, and return its terms, detached.  [] each."""

    def fills(self, fraction_done: float) -> bool:
        """Return True while the buffer fills and nothing is learned."""
        return bool(fraction_done * self.config.n_env_steps < self.config.learning_starts)

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs, the replay buffer included."""
        networks = {name: network.state_dict() for name, network in self._networks.items()}
        return {**super().state_dict(), **networks, "replay_buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; see `GradientLearner.load_state_dict`."""
        super().load_state_dict(state)
        for name, network in self._networks.items():
            network.load_state_dict(state[name])
        self.buffer.load_state_dict(state["replay_buffer"])
