from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.q_learning import (
    double_q_value,
    duelling_values,
    n_step_reward,
    project_distribution,
    q_loss,
    td_target,
)
from rlstruct.functional.schedules import epsilon_ladder, linear_schedule
from rlstruct.testing import forbid_host_sync

NAN = float("nan")


def test_the_n_step_reward_stops_at_the_first_step_that_is_not_real(device: torch.device) -> None:
    reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, NAN], [3.0, NAN, 8.0]], device=device)
    real = torch.tensor([[True, True, True], [True, True, False], [True, False, True]], device=device)
    with forbid_host_sync():
        partial, m = n_step_reward(reward, real, 0.5)
    # 1 + 2/2 + 4/4 = 3;  1 + 2/2 = 2;  3, although a later step is real again.
    torch.testing.assert_close(partial, torch.tensor([3.0, 2.0, 3.0], device=device))
    assert m.tolist() == [3, 2, 1]


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_the_n_step_reward_is_the_slow_loop(B: int, n: int, discount: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(B, n, generator=generator, dtype=torch.float64)
    real = torch.rand(B, n, generator=generator) < 0.7
    real[:, 0] = True
    partial, m = n_step_reward(reward, real, discount)
    for b in range(B):
        total, factor, steps = 0.0, 1.0, 0
        for i in range(n):
            if not real[b, i]:
                break
            total, factor, steps = total + factor * reward[b, i].item(), factor * discount, steps + 1
        assert partial[b].item() == pytest.approx(total, abs=1e-6)
        assert m[b].item() == steps


def test_one_network_chooses_and_the_other_judges() -> None:
    online = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]])
    target = torch.tensor([[9.0, 7.0, 8.0], [1.0, 2.0, 3.0]])
    # The first chooses actions 1 and 0, worth 7 and 1; the second alone would say 9 and 3.
    assert double_q_value(online, target).tolist() == [7.0, 1.0]
    assert double_q_value(target, target).tolist() == [9.0, 3.0]


def test_nothing_follows_a_termination_not_even_nan(device: torch.device) -> None:
    reward = torch.tensor([1.0, 1.0, 1.0], device=device)
    discount = torch.tensor([0.5, 0.5, 0.25], device=device)
    terminated = torch.tensor([True, False, False], device=device)
    next_value = torch.tensor([NAN, 8.0, 8.0], device=device).requires_grad_()
    with forbid_host_sync():
        target = td_target(reward, discount, terminated, next_value)
    # 1;  1 + 8/2 = 5;  two steps: 1 + 8/4 = 3.
    torch.testing.assert_close(target, torch.tensor([1.0, 5.0, 3.0], device=device))
    assert not target.requires_grad


@given(st.integers(1, 8), st.integers(2, 5), st.integers(0, 2**31))
def test_targets_are_the_slow_loop(B: int, A: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward, discount = torch.randn(2, B, generator=generator, dtype=torch.float64)
    online, judged = torch.randn(2, B, A, generator=generator, dtype=torch.float64)
    terminated = torch.rand(B, generator=generator) < 0.5
    double = td_target(reward, discount, terminated, double_q_value(online, judged))
    single = td_target(reward, discount, terminated, double_q_value(judged, judged))
    for b in range(B):
        values = judged[b].tolist()
        best = max(range(A), key=online[b].tolist().__getitem__)
        follows = 0.0 if terminated[b] else discount[b].item()
        assert double[b].item() == pytest.approx(reward[b].item() + follows * values[best], abs=1e-6)
        assert single[b].item() == pytest.approx(reward[b].item() + follows * max(values), abs=1e-6)


def test_the_loss_weighs_each_step_and_leaves_the_target_alone() -> None:
    value = torch.tensor([1.0, 4.0, 0.0], requires_grad=True)
    target = torch.tensor([1.5, 1.0, 9.0], requires_grad=True)
    loss = q_loss(value, target, torch.tensor([2.0, 0.5, 0.0]))
    # (2 * 0.5^2 / 2 + 0.5 * (3 - 1/2) + 0) / 3 = (0.25 + 1.25) / 3 = 0.5
    assert loss.item() == pytest.approx(0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(value.grad, torch.tensor([2 * -0.5, 0.5 * 1.0, 0.0]) / 3)
    assert target.grad is None


@given(K=st.integers(1, 6), A=st.integers(1, 4), delta=st.sampled_from([0.1, 1.0, 3.0]), seed=st.integers(0, 10**6))
def test_losses_and_duelling_values_are_the_slow_loop(K: int, A: int, delta: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value, target, weight = (2 * torch.randn(K, generator=generator, dtype=torch.float64) for _ in range(3))
    advantage = torch.randn(K, A, generator=generator, dtype=torch.float64)
    total, duelling = 0.0, duelling_values(value.unsqueeze(1), advantage)
    for k in range(K):
        error = abs(value[k].item() - target[k].item())
        each = error**2 / 2 if error <= delta else delta * error - delta**2 / 2
        total += weight[k].item() * each
        row = advantage[k].tolist()
        for a in range(A):
            assert duelling[k, a].item() == pytest.approx(value[k].item() + row[a] - sum(row) / A, abs=1e-6)
    assert q_loss(value, target, weight, delta).item() == pytest.approx(total / K, abs=1e-6)


def test_duelling_values_average_to_the_state_value_whatever_is_added_to_the_advantages() -> None:
    value, advantage = torch.tensor([[5.0], [1.0]]), torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 6.0]])
    values = duelling_values(value, advantage)
    # Means of the advantages: 2 and 2.
    assert values.tolist() == [[4.0, 6.0, 5.0], [-1.0, -1.0, 5.0]]
    torch.testing.assert_close(duelling_values(value, advantage + 100.0), values)


def test_shapes_that_would_broadcast_are_refused() -> None:
    column, row = torch.zeros(3, 1), torch.zeros(3)
    with pytest.raises(ShapeMismatchError, match=r"q_loss: target is \[3, 1\], expected .* value is \[3\]"):
        q_loss(row, column, row)
    with pytest.raises(ShapeMismatchError, match=r"td_target: next_value is \[3, 1\]"):
        td_target(row, row, row.bool(), column)
    with pytest.raises(ShapeMismatchError, match="double_q_value"):
        double_q_value(torch.zeros(3, 2), torch.zeros(3, 4))
    with pytest.raises(ShapeMismatchError, match="n_step_reward"):
        n_step_reward(torch.zeros(3, 2), torch.ones(3, 1, dtype=torch.bool), 0.5)


def test_schedules_by_hand() -> None:
    progress = (0.0, 0.1, 0.2, 0.9, 1.5)
    assert [linear_schedule(p, 1.0, 0.1, 0.2) for p in progress] == pytest.approx([1.0, 0.55, 0.1, 0.1, 0.1])
    assert epsilon_ladder(0.3, 4, 0.0) == [0.3] * 4
    assert epsilon_ladder(0.4, 8, 7.0) == pytest.approx([0.4 ** (1 + i) for i in range(8)])
    assert epsilon_ladder(0.4, 1, 7.0) == [0.4]


def projected_slowly(values: list[float], probabilities: list[float], support: list[float]) -> list[float]:
    """Algorithm 1 of Bellemare et al. (2017), one atom after the other; equal neighbours keep all."""
    low, high = support[0], support[-1]
    gap, projected = (high - low) / (len(support) - 1), [0.0] * len(support)
    for value, probability in zip(values, probabilities, strict=True):
        b = (min(max(value, low), high) - low) / gap
        lower, upper = math.floor(b), min(math.ceil(b), len(support) - 1)
        if lower == upper:
            projected[lower] += probability
        else:
            projected[lower] += probability * (upper - b)
            projected[upper] += probability * (b - lower)
    return projected


@given(
    st.integers(1, 4), st.integers(2, 9), st.integers(1, 5), st.floats(0.0, 1.0), st.floats(-5.0, 5.0),
    st.floats(0.5, 8.0), st.integers(0, 2**31),
)  # fmt: skip
def test_projection_is_the_slow_loop_and_keeps_the_mean(
    B: int, M: int, n_step: int, discount: float, low: float, width: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    support = torch.linspace(low, low + width, M, dtype=torch.float64)
    reward = torch.randn(B, generator=generator, dtype=torch.float64)
    terminated = torch.rand(B, generator=generator) < 0.5
    probabilities = torch.rand(B, M, generator=generator, dtype=torch.float64).softmax(-1)
    factor = torch.full((B, M), discount**n_step, dtype=torch.float64)
    columns = (one.unsqueeze(1).expand(B, M) for one in (reward, terminated))
    values = td_target(next(columns), factor, next(columns), support.expand(B, M))
    with forbid_host_sync():
        found = project_distribution(values, probabilities, support)
    for b in range(B):
        ends = (0.0 if terminated[b] else 1.0) * discount**n_step
        moved = [reward[b].item() + ends * atom for atom in support.tolist()]
        expected = projected_slowly(moved, probabilities[b].tolist(), support.tolist())
        assert found[b].tolist() == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(found.sum(-1), torch.ones(B, dtype=torch.float64))
    kept = (probabilities * values.clamp(support[0], support[-1])).sum(-1)
    torch.testing.assert_close((found * support).sum(-1), kept)


DEVICES = ["cpu", "sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_projection_on_an_accelerator_is_that_on_the_cpu(device: str) -> None:
    values, probabilities = 3.0 * torch.randn(3, 5, 7), torch.randn(3, 5, 7).softmax(-1)
    tensors = values, probabilities, torch.linspace(-2.0, 3.0, 7)
    there = [tensor.to(device) for tensor in tensors]
    with forbid_host_sync():
        found = project_distribution(*there)
    torch.testing.assert_close(found.to("cpu"), project_distribution(*tensors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_on_the_support_and_beyond_it_keep_all_their_probability(device: str, dtype: torch.dtype) -> None:
    support = torch.linspace(-0.7, 0.3, 11, device=device, dtype=dtype)  # whose numbers no float holds
    probabilities = torch.arange(1.0, 12.0, device=device, dtype=dtype) / 66
    same = project_distribution(support, probabilities, support)
    torch.testing.assert_close(same, probabilities)
    for value, end in ((-torch.inf, 0), (-9.0, 0), (9.0, -1), (torch.inf, -1)):
        found = project_distribution(torch.full_like(support, value), probabilities, support)
        expected = torch.zeros_like(support)
        expected[end] = 1.0
        torch.testing.assert_close(found, expected)


def test_a_support_of_another_size_is_refused() -> None:
    with pytest.raises(ShapeMismatchError, match="project_distribution"):
        project_distribution(torch.zeros(2, 3), torch.ones(2, 3), torch.arange(4.0))
