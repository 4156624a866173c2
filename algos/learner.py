"""What learns: the contract that the training loop knows, and what learners with one network share. Layer 4."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlstruct.algos.config import TrainingConfig
from rlstruct.core import DictTensor, Trajectories
from rlstruct.device import resolve_device
from rlstruct.rl_agent import RL_Agent


class Learner(Protocol):
    """Turns what was collected into better weights.

    Attributes:
        model: whose weights are published to the batchers.
        policy_version: how often the weights have changed.
    """

    model: nn.Module
    policy_version: int

    @property
    def batches(self) -> Sequence[Trajectories | DictTensor]:
        """What the last update has learnt from."""

    def update(self, trajectories: Trajectories, progress: float) -> dict[str, Tensor]:
        """Learn from one batch.

        Args:
            trajectories: on any device.  [B, T]
            progress: how much of the training is over, in [0, 1].

        Returns:
            Detached numbers on one device, always the same names; empty if nothing was learnt.  [] each
        """

    def agent_info(self, progress: float, n_envs: int) -> DictTensor:
        """Return the settings with which the agent shall collect the next batch: [B] on the CPU, or empty."""

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, bit by bit, where `state_dict` was called; tensors may be on any device, and are copied."""


class GradientLearner(ABC):
    """One network, one optimiser, one gradient step for each batch.

    From the first loss or gradient norm on that is not finite the optimiser leaves the weights alone, without anybody
    waiting for the device: whoever finds out later finds the weights that led there. (Where torch has a fused Adam, on
    CPU and CUDA.)

    Args:
        model: on the learner's device.
        agent: acts with this very model, so that gradients reach it.
        config: its learning rate, gradient norm and device.

    Attributes:
        model: as given.
        agent: as given.
        device: where the losses are computed.
        optimizer: Adam (Kingma and Ba, ICLR 2015).
        policy_version: how many steps it took.
        batches: see `Learner`.
    """

    def __init__(self, model: nn.Module, agent: RL_Agent, config: TrainingConfig) -> None:
        """Create the optimiser."""
        self.model = model
        self.agent = agent
        self.device = resolve_device(config.learner_device)
        # One kernel for all weights, where torch has one: an update of a small network costs what its calls cost.
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=fused)
        self.policy_version = 0
        self.batches: list[Trajectories | DictTensor] = []
        self._finite = torch.ones((), dtype=torch.bool, device=self.device) if fused else None
        self._weights = list(model.parameters())
        self._settings = config

    @abstractmethod
    def update(self, trajectories: Trajectories, progress: float) -> dict[str, Tensor]:
        """Take one gradient step; see `Learner.update`."""

    def agent_info(self, progress: float, n_envs: int) -> DictTensor:
        """Return nothing: these agents have no settings."""
        return DictTensor()

    def descend(self, loss: Tensor, progress: float) -> dict[str, Tensor]:
        """Take a gradient step.

        Args:
            loss: what to make smaller.  []
            progress: how much of the training is over, in [0, 1]; the learning rate falls with it.

        Returns:
            ``gradient_norm`` before it was scaled down, if there is a bound.  []
        """
        config = self._settings
        rate = config.learning_rate * (1.0 + (config.final_learning_rate_fraction - 1.0) * min(progress, 1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norms = {}
        if config.max_gradient_norm is not None:
            norms["gradient_norm"] = nn.utils.clip_grad_norm_(self._weights, config.max_gradient_norm)
        self._hold_unless_finite(norms.get("gradient_norm", loss.detach()))
        self.optimizer.step()
        self.policy_version += 1
        return norms

    def _hold_unless_finite(self, number: Tensor) -> None:
        if self._finite is not None:
            self._finite = self._finite & torch.isfinite(number)
            # What torch.amp.GradScaler sets, too: the kernel of a fused optimiser then writes nothing.
            self.optimizer.found_inf = (~self._finite).to(torch.float32)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs: model, optimiser, configuration, number of updates."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self._settings),
            "policy_version": self.policy_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the settings are those of now.

        Raises:
            RuntimeError: the model is another one.
        """
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.policy_version = int(state["policy_version"])


def mean_terms(steps: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average what several gradient steps say.

    Args:
        steps: at least one; name to number, the same names in all.  [] each

    Returns:
        Name to the mean over the steps.  [] each
    """
    return {name: torch.stack([terms[name] for terms in steps]).mean() for name in steps[0]}
