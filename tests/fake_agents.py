"""Small agents whose every answer is known beforehand.

Each class serves a batcher as ``create_agent``: spawned processes can import it, its arguments are ``agent_args``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.random import categorical, randint, uniform
from rlstruct.rl_agent import RL_Agent


class FixedAgent(RL_Agent):
    """Always takes the same action, in the dtype and shape of the last one.

    Args:
        value: the action.
    """

    def __init__(self, value: float = 0) -> None:
        """Remember the action."""
        self.value = value

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Return ``action``."""
        return DictTensor({"action": torch.full_like(observation["last_action"], self.value)}), DictTensor()


class RngAgent(RL_Agent):
    """Draws its action from ``observation["rng"]``, whatever it sees.

    Args:
        n_actions: how many actions there are.
    """

    def __init__(self, n_actions: int = 2) -> None:
        """Remember how many actions there are."""
        self.n_actions = n_actions

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Return ``action`` [B] int64 and the independent number ``drawn`` [B] float32."""
        key = observation["rng"]
        action = {"action": randint(key, self.n_actions), "drawn": uniform(key, stream=1)}
        return DictTensor(action), DictTensor()


class StatefulAgent(RL_Agent):
    """Counts the steps of each episode in its state, from ``agent_info["start"]`` if that is given, else from 0.

    Args:
        n_actions: it walks through this many actions.
        device: where the state lives.
    """

    def __init__(self, n_actions: int = 2, *, device: DeviceLike = "cpu") -> None:
        """Remember where the state lives."""
        self.n_actions = n_actions
        self.state_device = resolve_device(device)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Return ``steps`` and ``start``, [B] int64."""
        start = torch.zeros(B, dtype=torch.int64, device=self.state_device)
        if "start" in agent_info:
            start = agent_info["start"].to(self.state_device)
        return DictTensor({"steps": start.clone(), "start": start.clone()})

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Return ``steps`` [B] int64, the episode's step, and ``action``, its remainder; count on."""
        start = state["start"]
        steps = torch.where(observation["initial_state"], start, state["steps"])
        action = DictTensor({"action": steps % self.n_actions, "steps": steps})
        return action, DictTensor({"steps": steps + 1, "start": start.clone()})


class HistoryAgent(RL_Agent):
    """Reads the history of the batch: how long it is, and what was rewarded in it."""

    def require_history(self) -> bool:
        """Ask for the history."""
        return True

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Return ``action`` 0, ``history_steps`` [B] int64 and ``history_reward`` [B] float32, the sum of its rewards.

        Raises:
            ValueError: there is no history.
            ShapeMismatchError: the history is of another number of environments.
        """
        last_action = observation["last_action"]
        if history is None:
            raise ValueError("HistoryAgent: history is None, expected [B, t]: pass it where require_history() is True.")
        if history.n_elems() != len(last_action):
            raise ShapeMismatchError(
                f"HistoryAgent: history has {history.n_elems()} rows, expected {len(last_action)}, those of the "
                "observation. Give each environment its own history."
            )
        action = {
            "action": torch.zeros_like(last_action),
            "history_steps": torch.full_like(observation["rng"], history.n_steps()),
            "history_reward": history["observation/reward"].sum(dim=1),  # [B]
        }
        return DictTensor(action), DictTensor()


class LinearAgent(RL_Agent):
    """A softmax policy that is linear in the frame: the smallest agent that learns.

    Args:
        n_features: size of a frame, flattened.
        n_actions: how many actions there are.
        device: where the model lives.
        seed: of the initial weights.
    """

    def __init__(self, n_features: int, n_actions: int = 2, *, device: DeviceLike = "cpu", seed: int = 0) -> None:
        """Draw the weights on the CPU, equal for every device, and move them."""
        self.model = nn.Linear(n_features, n_actions)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)
        self.model.to(resolve_device(device))

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Return ``action`` [B] int64, ``log_prob`` [B] float32 of it, and ``logits`` [B, A] float32."""
        features = observation["frame"].flatten(1).to(torch.float32)  # [B, n_features]
        logits = self.model(features)  # [B, A]
        action = categorical(logits.detach(), observation["rng"])
        log_prob = logits.log_softmax(dim=-1).gather(1, action.unsqueeze(1)).squeeze(1)
        return DictTensor({"action": action, "log_prob": log_prob, "logits": logits}), DictTensor()

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Copy a state_dict into the model."""
        self.model.load_state_dict(info)
