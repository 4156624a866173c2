"""Settings and base class of learners that learn from a replay buffer: DQN, SAC and AlphaZero."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from rlstruct import renamed
from rlstruct.algos.learner import GradientLearner, mean_terms
from rlstruct.algos.optimising import Terms
from rlstruct.algos.prioritised_replay import PrioritisedReplayBuffer
from rlstruct.algos.replay_buffer import ReplayBuffer, min_capacity
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import DictTensor, Trajectories
from rlstruct.errors import warn_user
from rlstruct.options import option
from rlstruct.profiling import operation
from rlstruct.rl_agent import RL_Agent


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(TrainingConfig):
    """Settings of a training with a replay buffer, and those of `TrainingConfig`.

    Attributes:
        batch_size: number of steps sampled for one gradient step.
        n_updates: number of gradient steps per collected batch.
        replay_capacity: number of observations that the buffer holds, see ReplayBuffer.
        replay_device: device of the buffer; None for the learner's device.
        learning_starts: environment steps to collect before the first gradient step, which follows the batch that
            reaches this number.
        overlap: collect the next batch while learning. It pays with worker processes.
    """

    n_processes: int = 0
    batch_size: int = option(256, at_least=1, divided=True)
    n_updates: int = option(32, at_least=1)
    replay_capacity: int = option(100_000, at_least=1, divided=True)
    replay_device: str | None = option(None, may_change=True)
    learning_starts: int = option(1000, at_least=0)
    overlap: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        n_envs = self.n_envs * max(1, self.n_processes)
        least = min_capacity(n_envs, self.n_timesteps, getattr(self, "n_stack", 1))
        words = f"at least {least}: {self.n_timesteps} steps of {n_envs} environments, each of which may end an episode"
        self.require("replay_capacity", self.replay_capacity >= least, words)


@renamed.members
class PolyakAverage:
    """Polyak average of a network's weights, such as a target network: moves in place, and copies the buffers.

    Args:
        copied: the copy, with the parameters and buffers of ``model``, on the same device.
        model: the network that learns.

    >>> slow, fast = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> PolyakAverage(slow, fast).update(1.0)
    >>> torch.equal(slow.weight, fast.weight)
    True
    """

    def __init__(self, copied: nn.Module, model: nn.Module) -> None:
        # Listed once, because walking through the modules costs more than the update itself.
        self._weights = list(copied.parameters()), list(model.parameters())
        self._buffers = list(zip(copied.buffers(), model.buffers(), strict=True))

    @operation("weights")
    @torch.no_grad()
    def update(self, rate: float, due: Tensor | None = None) -> None:
        """Set the copy to ``rate`` * model + (1 - ``rate``) * copy.

        Args:
            rate: 1 copies the model.
            due: change nothing unless this is True, without waiting for the device; None stands for True.  [] bool
        """
        if due is None:
            get_ema_multi_avg_fn(1.0 - rate)(*self._weights, 0)  # type: ignore[no-untyped-call]
            for mine, theirs in self._buffers:
                mine.copy_(theirs)
            return
        for mine, moved in zip(self.copies(), self.moved(rate, due, {}), strict=True):
            mine.copy_(moved)

    def copies(self) -> list[Tensor]:
        """Return the tensors that `update` changes, of the copy."""
        return [*(weight.detach() for weight in self._weights[0]), *(mine for mine, _ in self._buffers)]

    def moved(self, rate: float, due: Tensor | None, latest: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Compute what `update` writes to `copies`: a pure function.

        Args:
            rate: see `update`.
            due: see `update`.
            latest: values to use instead of those of weights of the model.
        """
        weights = [latest.get(weight, weight.detach()) for weight in self._weights[1]]
        moved = [copy.detach().lerp(weight, rate) for copy, weight in zip(self._weights[0], weights, strict=True)]
        moved += [theirs for _, theirs in self._buffers]
        if due is None:
            return moved
        return [torch.where(due, new, old) for new, old in zip(moved, self.copies(), strict=True)]


class SlowCopy(NamedTuple):
    """A copy of the network that follows it, and how.

    Attributes:
        average: the copy.
        rate: see `PolyakAverage.update`.
        interval: gradient steps between two updates.
    """

    average: PolyakAverage
    rate: float
    interval: int = 1


_STEPS = "minibatches", "sample", "keys", "prepare_sample", "gradient_step", "after_step"
_VERSION = "version"


class ReplayLearner(GradientLearner):
    """Learner that stores every batch in a replay buffer, and takes ``n_updates`` gradient steps on samples from it.

    If the network keeps statistics of its inputs, every batch updates them, and `prepare_sample` scales the rewards:
    the buffer keeps them as they were collected.

    Args:
        model: see `GradientLearner`.
        agent: see `GradientLearner`.
        config: see `ReplayConfig`.
        create_buffer: class of the buffer, or a function that returns one.
        networks: further networks that `terms` reads, such as a target network, by name. Checkpoints contain them.
        settings: further arguments of ``create_buffer``.

    Attributes:
        buffer: the collected steps.
        version_now: ``policy_version``, readable inside a graph.  [] int64 on the device
        random_keys: names of random keys [K] int64 that `prepare_sample` adds to every sample, for agents that act in
            `terms`.
    """

    settings: ClassVar[type[TrainingConfig]] = ReplayConfig
    random_keys: ClassVar[Sequence[str]] = ()
    config: ReplayConfig
    reuse_batches = True  # the buffer copies them

    def __init__(
        self,
        model: nn.Module,
        agent: RL_Agent,
        config: ReplayConfig,
        *,
        create_buffer: Callable[..., ReplayBuffer] = ReplayBuffer,
        networks: Mapping[str, nn.Module] | None = None,
        **settings: Any,  # noqa: ANN401 - of the buffer
    ) -> None:
        self._networks = dict(networks or {})
        super().__init__(model, agent, config)
        if config.learning_starts > config.n_env_steps:
            warn_user(
                f"{type(self).__name__}: learning_starts is {config.learning_starts}, and the training ends after "
                f"n_env_steps = {config.n_env_steps}, so it takes no gradient step. Set learning_starts to fewer steps."
            )
        self.overlap = config.overlap
        self._filling = False  # the buffer, before the first gradient step
        options: dict[str, Any] = {"discount": config.discount, "seed": self._own_seed(), **settings}
        self.buffer = create_buffer(config.replay_capacity, device=config.replay_device or self.device, **options)

    def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        """Add a batch to the replay buffer, and take ``n_updates`` gradient steps; see `GradientLearner.update`.

        Returns the means of the results of `after_step` over these steps; empty while the buffer fills.  [] each
        """
        self._check_first(trajectories)
        if self.statistics is not None:
            self._see_frames(self._scaled(trajectories.to(self.device)))
        steps = trajectories.steps
        self._filling = self.fills(fraction_done, n_more=steps.n_elems() * steps.n_steps() * self.group.size)
        self.anneal(fraction_done)
        with self._updating() if self._runs_bundled_code() else contextlib.nullcontext():
            self.version_now.fill_(self.policy_version)
            self._n_keys = 0
            prepared, numbers = self.prepare(trajectories)
            return {**mean_terms(self._each_step(prepared)), **numbers}

    def _runs_bundled_code(self) -> bool:
        """Return True if no code of a user runs between gradient steps, so that nothing is replaced there."""
        return self._is_bundled(*_STEPS)

    def prepare(self, trajectories: Trajectories) -> tuple[None, dict[str, Tensor]]:
        """Add a batch to the replay buffer."""
        self.buffer.extend(trajectories.to(self.buffer.device))
        return None, {}

    def minibatches(self, prepared: None) -> Iterator[DictTensor]:
        """Yield ``n_updates`` samples; none while the buffer fills."""
        n = 0 if self._filling else self.config.n_updates
        if not self._is_bundled("sample") or not isinstance(self.buffer, ReplayBuffer):
            for _ in range(n):
                yield self.sample()
        elif n:
            for batch in self.buffer.samples(self.config.batch_size, n):
                yield self.prepare_sample(batch)

    def gradient_step(self, minibatch: Any) -> dict[str, Tensor]:  # noqa: ANN401 - see GradientLearner
        """Take one gradient step, which later calls may replay as a captured graph; see `GradientLearner`."""
        return self._replayed(minibatch)

    def slow_copies(self) -> Sequence[SlowCopy]:
        """Return the copies of the network that `after_step` moves; by default none."""
        return ()

    def after_step(self, minibatch: DictTensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the `slow_copies`, and update the priorities of a buffer that has them by the term ``error``, [K]."""
        if isinstance(self.buffer, PrioritisedReplayBuffer):
            where = self.buffer.device
            self.buffer.update_priorities(minibatch["index"].to(where), terms["error"].to(where))
        for average, rate, interval in self.slow_copies():
            if self.device.type != "cpu":  # a captured graph reads the number of the step on the device
                average.update(rate, self.version_now % interval == 0 if interval > 1 else None)
            elif self.policy_version % interval == 0:
                average.update(rate)
        return terms

    def _each_step(self, prepared: None) -> list[Terms]:
        """Take the gradient steps, each as one graph with its sample and what follows it, or compiled all in one call.

        A compiled call gathers the samples of all steps together.
        """
        if self._filling or not isinstance(self.buffer, ReplayBuffer) or not self._runs_bundled_code():
            return super()._each_step(prepared)
        if self._graph.make is not None and self.buffer.device == self.device:
            return [self._replayed(None) for _ in range(self.config.n_updates)]
        if not self.buffer.draws_uniformly():
            return super()._each_step(prepared)
        stacks = map(self._with_keys, self.buffer.stacks(self.config.batch_size, self.config.n_updates))
        steps = self._compiled_steps.take_stacks(stacks, self._copies)
        return super()._each_step(prepared) if steps is None else steps

    def _copies(self) -> Terms:
        """Return what `_pure_step` changes besides weights and moments: the slow copies, and the number of steps."""
        copies = {f"copy/{i}/{j}": one for i, (average, *_) in enumerate(self.slow_copies())
                  for j, one in enumerate(average.copies())}  # fmt: skip
        return {**copies, _VERSION: self.version_now}

    def _with_keys(self, stack: DictTensor) -> DictTensor:
        """Add the random keys to a stack of samples, each of which draws them anew."""
        if not (names := self.random_keys):
            return stack
        self._n_keys = 0
        n, batch_size = stack["reward"].shape
        keys = self._keys(len(names) * batch_size, n).view(n, len(names), batch_size)
        return stack + DictTensor(dict(zip(names, keys.unbind(1), strict=True)))

    def _pure_step(self, minibatch: DictTensor, state: Terms) -> tuple[Terms, Terms]:
        """Take a gradient step on a sample, and do what follows; see `GradientLearner`."""
        terms, new = super()._pure_step(self.prepare_sample(minibatch), state)
        latest: dict[Tensor, Tensor] = {
            weight: new.get(f"weight/{i}", weight.detach()) for i, weight in enumerate(self._weights)
        }
        new[_VERSION] = state[_VERSION] + 1
        for i, (average, rate, interval) in enumerate(self.slow_copies()):
            due = new[_VERSION] % interval == 0 if interval > 1 else None
            new |= {f"copy/{i}/{j}": one for j, one in enumerate(average.moved(rate, due, latest))}
        return terms, new

    def _captured(self, argument: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Take one gradient step on a minibatch; without one, on a new sample, and do what follows the step."""
        first, self._n_keys = self.policy_version, 0
        minibatch = self.sample() if argument is None else argument
        terms = super().gradient_step(minibatch)
        self._n_steps = self.policy_version - first  # a replayed graph does not count them
        self.version_now += 1
        return terms if argument is not None else self.after_step(minibatch, terms)

    def sample(self) -> DictTensor:
        """Sample the steps of one gradient step from the buffer, on the learner's device.  [batch_size].

        If the network keeps statistics, they scale the ``reward``.
        """
        return self.prepare_sample(self.buffer.sample(self.config.batch_size))

    def prepare_sample(self, batch: DictTensor) -> DictTensor:
        """Move a sample of the buffer to the learner's device, and add what else `terms` reads.  [batch_size]."""
        batch = batch.to(self.device, non_blocking=True)
        if self.random_keys and self.random_keys[0] not in batch.keys():
            keys = self.keys(len(self.random_keys) * len(batch["reward"])).view(len(self.random_keys), -1)
            batch += DictTensor(dict(zip(self.random_keys, keys, strict=True)))
        if self.statistics is None:
            return batch
        return DictTensor({**dict(batch.items()), "reward": self.statistics.scale_rewards(batch["reward"])})

    def fills(self, fraction_done: float, n_more: int = 0) -> bool:
        """Return True while the buffer fills, before the first gradient step.

        Args:
            fraction_done: share of the training, as in `update`.
            n_more: environment steps that all learners have collected since then.
        """
        return self._steps_done(fraction_done) + n_more < self.config.learning_starts

    def _steps_done(self, fraction_done: float) -> int:
        """Return the exact number of environment steps, of which the share of the training is a quotient."""
        return round(fraction_done * self.config.n_env_steps)

    def depends_on(self) -> tuple[object, bool]:
        """Include the further networks; see `GradientLearner.depends_on`."""
        return (self.agent, *self._networks.values()), self.agent.pure

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint, including the replay buffer."""
        networks = {name: network.state_dict() for name, network in self._networks.items()}
        return {**super().state_dict(), **networks, "replay_buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; see `GradientLearner.load_state_dict`."""
        super().load_state_dict(state)
        for name, network in self._networks.items():
            network.load_state_dict(state[name])
        self.buffer.load_state_dict(state["replay_buffer"])


__getattr__ = renamed.attributes(__name__)
