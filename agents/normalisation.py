"""Normalisation of frames and rewards by running statistics, which are published with the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from rlstruct.device import accumulator_dtype
from rlstruct.functional.all_reduce import sum_over_learners
from rlstruct.functional.returns import discounted_sum
from rlstruct.policies.blueprint import KeepsArguments

_MOMENTS = "mean", "variance", "count"


class RunningMoments(nn.Module):
    """Running mean and variance, in buffers (Chan, Golub and LeVeque, 1979).

    Attributes:
        mean: initially 0.         float64; on mps float32, as the other two
        variance: initially 1.     float64
        count: number of values, initially 1e-4 as in gymnasium.  [] float64
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__()
        device = torch.get_default_device()
        wide = accumulator_dtype(device)
        for name, first, size in (("mean", 0.0, shape), ("variance", 1.0, shape), ("count", 1e-4, ())):
            self.register_buffer(name, torch.full(tuple(size), first, dtype=wide, device=device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningMoments:
        if accumulator_dtype(fn(torch.zeros(0, device="cpu")).device) is torch.float32:  # .to("mps")
            for name in _MOMENTS:
                setattr(self, name, getattr(self, name).to(torch.float32))
        before = {name: getattr(self, name) for name in _MOMENTS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, wide in before.items():  # .half() changes weights; sums of many values need the wide dtype
            if (now := getattr(self, name)).dtype is not wide.dtype:
                setattr(self, name, wide.to(now.device))
        return self

    @torch.no_grad()
    def update(self, values: Tensor, mask: Tensor) -> None:
        """Add the values of all learners, in place and without waiting for the device.

        Args:
            values: [N, *shape], any dtype.
            mask: True for values that count.  [N] bool, same device
        """
        values = _floats(values)
        real = mask.view(-1, *[1] * (values.dim() - 1))
        wide = self.mean.dtype
        n = sum_over_learners(mask.sum().to(wide))
        mean = sum_over_learners(torch.where(real, values, 0).sum(0, dtype=wide)) / n.clamp(min=1)
        squares = sum_over_learners(torch.where(real, values.to(wide) - mean, 0.0).square().sum(0))
        difference, total = mean - self.mean, self.count + n
        squares = squares + self.variance * self.count + difference.square() * self.count * n / total
        self.mean += difference * n / total
        self.variance.copy_(squares / total)
        self.count.copy_(total)


class Normalised(KeepsArguments, nn.Module):
    """A network that gets normalised frames, and whose learner gets scaled rewards.

    The learners of `rlstruct.algos` update the statistics: those of rewards before they learn from a batch, those of
    frames after it, so that a replay normalises frames as the acting policy did (learners with a replay buffer, before
    it). The statistics are buffers, so they are published with the weights and saved in every checkpoint.

    Args:
        model: a network whose first argument is a frame, like all networks of `rlstruct.agents`.
        frame_shape: shape of one frame; None leaves frames unchanged.
        discount: discount of the returns whose standard deviation divides the rewards (Engstrom et al., "Implementation
            matters in deep policy gradients", ICLR 2020), as gymnasium's NormalizeReward does; None leaves rewards.
        clip: bound of the absolute value of normalised frames and scaled rewards; of their sums, where a learner with a
            replay buffer adds up several steps.
    """

    discount: Final[float | None]
    clip: Final[float]

    def __init__(
        self, model: nn.Module, frame_shape: Sequence[int] | None, *, discount: float | None = None, clip: float = 10.0
    ) -> None:
        super().__init__()
        self.model = model
        self.frames = None if frame_shape is None else RunningMoments(frame_shape)
        self.returns = None if discount is None else RunningMoments()
        self.discount, self.clip = discount, clip

    @property
    def n_hidden(self) -> int:
        """The size of the recurrent state of ``model``, if it has one."""
        size: int = self.model.n_hidden  # type: ignore[assignment]
        return size

    def forward(self, frame: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Normalise frames [B, ...] and call ``model`` with them and its other arguments."""
        outputs: tuple[Tensor, ...] = self.model(self._normalised(frame), *state)
        return outputs

    def sequence(self, frame: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Normalise frames [B, T, ...] and call ``model.sequence``, see `RecurrentActorCritic.sequence`."""
        model: Any = self.model
        outputs: tuple[Tensor, ...] = model.sequence(self._normalised(frame), *state)
        return outputs

    def _normalised(self, frame: Tensor) -> Tensor:
        if self.frames is None:
            return frame
        scale = (self.frames.variance + 1e-8).rsqrt()
        dtype = next(self.model.parameters()).dtype
        return ((_floats(frame) - self.frames.mean) * scale).clamp(-self.clip, self.clip).to(dtype)

    def scale_rewards(self, reward: Tensor) -> Tensor:
        """Divide rewards of any shape by the standard deviation of the returns."""
        if self.returns is None:
            return reward
        scale = (self.returns.variance + 1e-8).rsqrt().to(reward.dtype)
        return (reward * scale).clamp(-self.clip, self.clip)

    def see_rewards(self, reward: Tensor, done: Tensor, mask: Tensor, before: Tensor | None) -> Tensor | None:
        """Update the statistics of returns: at each step, the discounted sum of the episode's rewards so far.

        Unlike in gymnasium, an episode's last reward still counts to its own return, and a truncation ends a sum, too.

        Args:
            reward: rewards of the environments.                          [B, T] float
            done: True where the step ended an episode.                   [B, T] bool
            mask: True at real steps.                                     [B, T] bool
            before: result of the previous call; None in the first.       [B]

        Returns:
            The sums with which the next batch continues.  [B]
        """
        if self.returns is None or self.discount is None:
            return None
        sums = discounted_sum(reward, done, mask, self.discount, before)  # [B, T]
        self.returns.update(sums.flatten(), mask.flatten())
        return torch.where(done[:, -1], 0.0, sums[:, -1])

    def see_frames(self, frame: Tensor, mask: Tensor) -> None:
        """Update the statistics of frames [B, T, ...]; the mask [B, T] is True at real steps."""
        if self.frames is not None:
            self.frames.update(frame.flatten(0, 1), mask.flatten())


def _floats(values: Tensor) -> Tensor:
    """Turn bools and integers into floats: torch subtracts no bools, and few operations take all integers."""
    return values if values.is_floating_point() else values.to(accumulator_dtype(values.device))
