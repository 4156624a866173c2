from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.advantages import generalized_advantage, vtrace
from rlstruct.functional.returns import bootstrapped_return
from rlstruct.testing import forbid_host_sync

NAN = float("nan")
YES, NO = True, False


@dataclass
class Batch:
    """Arguments that all functions take. Only V-trace takes ``log_ratio``."""

    reward: Tensor
    terminated: Tensor
    done: Tensor
    mask: Tensor
    value: Tensor
    next_value: Tensor
    log_ratio: Tensor

    def gae(self, discount: float, trace_decay: float) -> Tensor:
        return generalized_advantage(
            self.reward, self.terminated, self.done, self.mask,
            value=self.value, next_value=self.next_value, discount=discount, trace_decay=trace_decay,
        )  # fmt: skip

    def vtrace(self, discount: float, **options: float) -> tuple[Tensor, Tensor]:
        return vtrace(
            self.reward, self.terminated, self.done, self.mask, value=self.value, next_value=self.next_value,
            log_ratio=self.log_ratio, discount=discount, **options,
        )  # fmt: skip


def by_hand(device: torch.device) -> Batch:
    """A row of four steps, of which the second is a termination and the last is left unfinished; a truncated row."""
    return Batch(
        reward=torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, NAN, NAN]], device=device),
        terminated=torch.tensor([[NO, YES, NO, NO], [NO, NO, YES, YES]], device=device),
        done=torch.tensor([[NO, YES, NO, NO], [NO, YES, NO, NO]], device=device),
        mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=device, dtype=torch.float32),
        value=torch.tensor([[1.0, 4.0, 2.0, 6.0], [2.0, 2.0, NAN, NAN]], device=device),
        next_value=torch.tensor([[4.0, 100.0, 6.0, 8.0], [2.0, 10.0, NAN, NAN]], device=device),
        log_ratio=torch.tensor([[2.0, 0.5, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0]], device=device).log(),
    )


def test_gae_by_hand_never_syncs(device: torch.device) -> None:
    batch = by_hand(device)
    with forbid_host_sync():
        out = batch.gae(discount=0.5, trace_decay=0.5)
    # Errors of row 0: 1 + 4/2 - 1 = 2; 2 + 0 - 4 = -2 (terminated); 3 + 6/2 - 2 = 4; 4 + 8/2 - 6 = 2.
    # Backwards with 1/4: 2; 4 + 2/4 = 4.5; -2 (ended); 2 - 2/4 = 1.5.
    # Row 1: 1 + 2/2 - 2 = 0; 1 + 10/2 - 2 = 4 (truncated: its value counts). Backwards: 4; 0 + 4/4 = 1.
    expected = [[1.5, -2.0, 4.5, 2.0], [1.0, 4.0, 0.0, 0.0]]
    torch.testing.assert_close(out, torch.tensor(expected, device=device))


def test_vtrace_by_hand_never_syncs(device: torch.device) -> None:
    batch = by_hand(device)
    with forbid_host_sync():
        target, advantage = batch.vtrace(discount=0.5, rho_clip=1.0, c_clip=2.0)
    # Row 0: rho = 1, 1/2, 1, 1; c = 2, 1/2, 1, 1; errors 2, -2, 4, 2 as above.
    # v - V: 2; 4 + 1/2 * 1 * 2 = 5; -2/2 = -1 (ended); 2 + 1/2 * 2 * (-1) = 1. So v = 2, 3, 7, 8.
    # Advantages: 1 + 3/2 - 1 = 1.5; (2 - 4)/2 = -1; 3 + 8/2 - 2 = 5; 4 + 8/2 - 6 = 2.
    # Row 1: rho = 1, 1; c = 1, 2; errors 0, 4. v - V: 4; 0 + 1/2 * 4 = 2. Advantages: 1 + 6/2 - 2 = 2; 4.
    torch.testing.assert_close(target, torch.tensor([[2.0, 3.0, 7.0, 8.0], [4.0, 6.0, 0.0, 0.0]], device=device))
    torch.testing.assert_close(advantage, torch.tensor([[1.5, -1.0, 5.0, 2.0], [2.0, 4.0, 0.0, 0.0]], device=device))


def random_batch(B: int, T: int, seed: int) -> tuple[Batch, list[int]]:
    """A row is a stretch of a stream: next_value is the value of the next step, unless an episode ended between."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    padding = torch.arange(T) >= lengths.unsqueeze(1)
    done = torch.rand(B, T, generator=generator) < 0.3
    terminated = done & (torch.rand(B, T, generator=generator) < 0.5)
    values = torch.randn(B, T + 1, dtype=torch.float64, generator=generator)
    final = torch.randn(B, T, dtype=torch.float64, generator=generator)
    reward = torch.randn(B, T, dtype=torch.float64, generator=generator)
    batch = Batch(
        reward=reward.masked_fill(padding, NAN),
        terminated=terminated,
        done=done,
        mask=~padding,
        value=values[:, :T].masked_fill(padding, NAN),
        next_value=torch.where(done, final, values[:, 1:]).masked_fill(padding, NAN),
        log_ratio=torch.randn(B, T, dtype=torch.float64, generator=generator).masked_fill(padding, NAN),
    )
    return batch, lengths.tolist()


def slow(batch: Batch, lengths: list[int], one: Callable[[Batch, int, int, int], float]) -> Tensor:
    """Evaluate a definition at every real step; ``one`` gets the row, the step and one after its episode's last."""
    out = torch.zeros_like(batch.reward)
    for b, length in enumerate(lengths):
        for t in range(length):
            end = next((k + 1 for k in range(t, length) if batch.done[b, k]), length)
            out[b, t] = one(batch, b, t, end)
    return out


def error(batch: Batch, b: int, k: int, discount: float) -> float:
    following = 0.0 if batch.terminated[b, k] else float(batch.next_value[b, k])
    return float(batch.reward[b, k]) + discount * following - float(batch.value[b, k])


SIZES = {"B": st.integers(1, 4), "T": st.integers(1, 18), "seed": st.integers(0, 10**6)}
FACTOR = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@given(**SIZES, discount=FACTOR, trace_decay=FACTOR)
def test_gae_is_the_sum_of_its_definition(B: int, T: int, seed: int, discount: float, trace_decay: float) -> None:
    batch, lengths = random_batch(B, T, seed)

    def one(batch: Batch, b: int, t: int, end: int) -> float:  # Schulman et al., equation 16
        return sum((discount * trace_decay) ** (k - t) * error(batch, b, k, discount) for k in range(t, end))

    torch.testing.assert_close(batch.gae(discount, trace_decay), slow(batch, lengths, one), rtol=1e-6, atol=1e-6)


@given(**SIZES, discount=FACTOR, trace_decay=FACTOR, rho_clip=st.sampled_from([0.5, 1.0, 2.0, math.inf]), c_clip=FACTOR)
def test_vtrace_targets_are_the_sum_of_equation_1(
    B: int, T: int, seed: int, discount: float, trace_decay: float, rho_clip: float, c_clip: float
) -> None:
    batch, lengths = random_batch(B, T, seed)
    ratio = batch.log_ratio.exp()

    def one(batch: Batch, b: int, t: int, end: int) -> float:
        traces = [trace_decay * min(c_clip, float(ratio[b, k])) for k in range(t, end)]
        return float(batch.value[b, t]) + sum(
            discount ** (k - t) * math.prod(traces[: k - t]) * min(rho_clip, float(ratio[b, k]))
            * error(batch, b, k, discount)
            for k in range(t, end)
        )  # fmt: skip

    expected = slow(batch, lengths, one)
    target, advantage = batch.vtrace(discount, trace_decay=trace_decay, rho_clip=rho_clip, c_clip=c_clip)
    torch.testing.assert_close(target, expected, rtol=1e-6, atol=1e-6)

    def ahead(batch: Batch, b: int, t: int, end: int) -> float:
        beyond = trace_decay * float(expected[b, t + 1] - batch.value[b, t + 1]) if t + 1 < end else 0.0
        return min(rho_clip, float(ratio[b, t])) * (error(batch, b, t, discount) + discount * beyond)

    torch.testing.assert_close(advantage, slow(batch, lengths, ahead), rtol=1e-6, atol=1e-6)


@given(**SIZES, discount=FACTOR, trace_decay=FACTOR)
def test_vtrace_of_the_same_policy_is_gae(B: int, T: int, seed: int, discount: float, trace_decay: float) -> None:
    batch, _ = random_batch(B, T, seed)
    batch.log_ratio = torch.zeros_like(batch.log_ratio)
    target, advantage = batch.vtrace(discount, trace_decay=trace_decay)
    expected = batch.gae(discount, trace_decay)
    torch.testing.assert_close(advantage, expected, rtol=1e-6, atol=1e-6)
    baseline = batch.value.masked_fill(~batch.mask, 0.0)
    torch.testing.assert_close(target - baseline, expected, rtol=1e-6, atol=1e-6)


@given(**SIZES, discount=FACTOR)
def test_gae_without_decay_is_the_bootstrapped_return(B: int, T: int, seed: int, discount: float) -> None:
    batch, _ = random_batch(B, T, seed)
    whole = bootstrapped_return(
        batch.reward, batch.terminated, batch.done, batch.mask, next_value=batch.next_value, discount=discount
    )
    baseline = batch.value.masked_fill(~batch.mask, 0.0)
    torch.testing.assert_close(batch.gae(discount, trace_decay=1.0) + baseline, whole, rtol=1e-6, atol=1e-6)


def test_values_and_ratios_are_constants(device: torch.device) -> None:
    batch = by_hand(device)
    for name in ("value", "next_value", "log_ratio"):
        setattr(batch, name, getattr(batch, name).requires_grad_())
    results = [batch.gae(0.9, 0.9), *batch.vtrace(0.9)]
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda batch: batch.gae(1.5, 0.5), r"generalized_advantage: discount is 1.5, expected 0 to 1"),
        (lambda batch: batch.gae(0.5, -0.1), r"generalized_advantage: trace_decay is -0.1, expected 0 to 1"),
        (lambda batch: batch.vtrace(0.5, rho_clip=-1.0), r"vtrace: rho_clip is -1.0, expected at least 0"),
    ],
)
def test_wrong_numbers_are_named(call: Callable[[Batch], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(by_hand(torch.device("cpu")))


@pytest.mark.parametrize("name", ["value", "next_value", "done", "mask"])
def test_a_trailing_axis_is_refused(name: str) -> None:
    batch = by_hand(torch.device("cpu"))
    setattr(batch, name, getattr(batch, name).unsqueeze(2))
    with pytest.raises(ShapeMismatchError, match=rf"generalized_advantage: {name} is \[2, 4, 1\], expected \[B, T\]"):
        batch.gae(0.5, 0.5)
