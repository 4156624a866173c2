"""Settings and base class of learners that pass several times over each batch in shuffled minibatches: PPO and PQN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rlstruct.algos.learner import GradientLearner
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.pytree import TreeSpec
from rlstruct.errors import BadValueError
from rlstruct.functional import random
from rlstruct.options import option
from rlstruct.rl_agent import RL_Agent


@dataclass(frozen=True, kw_only=True)
class EpochConfig(TrainingConfig):
    """Settings of a training with several passes over each batch, and those of `TrainingConfig`.

    Attributes:
        n_epochs: passes over each batch.
        n_minibatches: gradient steps of an epoch. An agent that has no state, or whose states can be computed, learns
            from shuffled single steps. Any other agent learns from whole rows, so there must be at least as many
            environments as minibatches.
    """

    n_processes: int = 0
    n_epochs: int = option(4, at_least=1)
    n_minibatches: int = option(4, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        n_steps = self.n_timesteps * self.n_envs * max(1, self.n_processes)
        self.require("n_minibatches", self.n_minibatches <= n_steps, f"at most one for each of {n_steps} steps")


class Prepared(NamedTuple):
    """A batch with what stays constant during an update.

    Attributes:
        rows: the rows [B, T], or, if the agent can compute its states, single steps [B * T, 1].
        collected: the batch from which the agent computes the states of single steps, whose numbers are then in
            ``learner/step``; None if it has no state, or learns from whole rows.  [B, T]
    """

    rows: Trajectories
    collected: Trajectories | None


class EpochLearner(GradientLearner):
    """Learner that takes ``n_epochs`` passes over each batch, each in ``n_minibatches`` shuffled minibatches."""

    settings: ClassVar[type[TrainingConfig]] = EpochConfig
    config: EpochConfig
    reuse_batches = True

    def __init__(self, model: nn.Module, agent: RL_Agent, config: Any) -> None:  # noqa: ANN401 - its own config
        super().__init__(model, agent, config)
        self._seed = self.seed_for("minibatches")

    def rows_of(self, trajectories: Trajectories, kept: Mapping[str, Tensor]) -> Prepared:
        """Split a batch into the rows that minibatches consist of.

        Args:
            trajectories: the batch on the learner's device.  [B, T]
            kept: the steps that `terms` reads.  [B, T, ...] each
        """
        steps = trajectories.steps
        states = self.agent.states_at(trajectories, steps.lengths[:0])
        batch = Trajectories.unchecked(trajectories.info, TemporalDictTensor.unchecked(dict(kept), steps.lengths))
        if states is None:
            return Prepared(batch, None)
        return Prepared(_single_steps(batch, numbered=not states.empty()), None if states.empty() else trajectories)

    def minibatches(self, prepared: Prepared) -> Iterator[Trajectories]:
        """Yield ``n_minibatches`` minibatches of shuffled rows in each of ``n_epochs`` passes.

        Each pass gathers all rows at once, and minibatches are slices of them.
        """
        for epoch in range(self.config.n_epochs):
            rows, sizes = self._rows_of_epoch(prepared.rows, epoch)
            tree = TreeSpec(rows)
            for tensors in zip(*(tensor.split_with_sizes(sizes) for tensor in tree.flatten(rows)), strict=True):
                yield self._with_states(tree.unflatten(tensors), prepared.collected)

    def _rows_of_epoch(self, rows: Trajectories, epoch: int) -> tuple[Trajectories, list[int]]:
        """Return the shuffled rows of an epoch, and the sizes of the minibatches that they consist of."""
        chosen = self.shuffled(rows.n_elems(), epoch)
        sizes = [len(one) for one in chosen]
        return self.of_epoch(rows.index(torch.cat(chosen)), sizes), sizes

    def _each_step(self, prepared: Prepared) -> list[dict[str, Tensor]]:
        """Take the gradient steps of an epoch in one call, if they are compiled and their minibatches equally large."""
        n = self.config.n_minibatches
        bundled = self._is_bundled("minibatches", "gradient_step", "after_step")
        even = prepared.collected is None and prepared.rows.n_elems() % n == 0
        steps = self._compiled_steps.take_stacks(self._stacks(prepared.rows), dict) if bundled and even else None
        return super()._each_step(prepared) if steps is None else steps

    def _stacks(self, rows: Trajectories) -> Iterator[Trajectories]:
        """Yield the equally large minibatches of each epoch.  [n_minibatches, B, T]."""
        n = self.config.n_minibatches
        for epoch in range(self.config.n_epochs):
            shuffled, _ = self._rows_of_epoch(rows, epoch)
            tree = TreeSpec(shuffled)
            yield tree.unflatten(one.view(n, len(one) // n, *one.shape[1:]) for one in tree.flatten(shuffled))

    def of_epoch(self, rows: Trajectories, sizes: list[int]) -> Trajectories:
        """Change the rows of an epoch, of which minibatches of these sizes will be slices; by default nothing."""
        return rows

    def _with_states(self, minibatch: Trajectories, collected: Trajectories | None) -> Trajectories:
        """Add the agent's states before single steps, if it has any."""
        if collected is None:
            return minibatch
        states = self.agent.states_at(collected, minibatch.steps["learner/step"].squeeze(1)) or DictTensor()
        return Trajectories.unchecked(minibatch.info + states.prepend_key("agent_state/"), minibatch.steps)

    def shuffled(self, n_rows: int, epoch: int) -> tuple[Tensor, ...]:
        """Split the rows into the minibatches of an epoch: every row once, in an order of this seed and gradient step.

        Returns:
            Row numbers; the minibatches are of almost equal size.  [n_rows / n_minibatches] int64 each
        """
        n = self.config.n_minibatches
        if n_rows < n:
            raise BadValueError(
                f"{type(self.config).__name__}: n_minibatches is {n}, expected at most {n_rows}, one for each "
                "environment: an agent with a state learns from whole rows."
            )
        # Keys from a counter: the same order on all devices, and after a resume, but different in each learner.
        lanes = torch.arange(n_rows, device=self.device, dtype=torch.int64)
        order = random.step_keys(self._seed, self.version_now + epoch * n, lanes).squeeze(1).argsort()
        return order.tensor_split([n_rows * k // n for k in range(1, n)])


def _single_steps(batch: Trajectories, *, numbered: bool) -> Trajectories:
    """Make every step [B, T] a separate row [B * T, 1], with what an agent without a state reads.

    Padding becomes rows of length 0.
    """
    steps, T = batch.steps, batch.steps.n_steps()
    flat = {key: tensor.flatten(0, 1).unsqueeze(1) for key, tensor in steps.items()}
    if numbered:
        flat["learner/step"] = torch.arange(steps.n_elems() * T, device=steps.device).unsqueeze(1)
    info = {k: v.repeat_interleave(T, dim=0) for k, v in batch.info.items() if k.startswith("agent_info/")}
    lengths = steps.mask().flatten().to(torch.int64)
    return Trajectories.unchecked(DictTensor(info), TemporalDictTensor.unchecked(flat, lengths))
