"""Ranks: every function of `rlstruct.functional` refuses shapes that would broadcast, and says which it expects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlstruct.errors import BadValueError, ShapeMismatchError
from rlstruct.functional import (
    advantages,
    categorical,
    gaussian,
    masks,
    policy_gradient,
    q_learning,
    random,
    returns,
    scan,
    squashed,
    statistics,
)

BT, B, T = torch.ones(2, 3), torch.ones(2), torch.ones(3)
KEY = torch.arange(2)
WRONG: dict[str, Callable[[], object]] = {
    "step_keys": lambda: random.step_keys(KEY.unsqueeze(1), 0, torch.arange(3)),
    "symmetric_uniform": lambda: random.symmetric_uniform(KEY.unsqueeze(1), 3, 1.0),
    "categorical, a key for three rows": lambda: random.categorical(torch.zeros(2, 4), torch.arange(3)),
    "categorical, one key for all rows": lambda: random.categorical(torch.zeros(2, 4), torch.arange(1)),
    "categorical, one row": lambda: random.categorical(torch.zeros(4), torch.arange(1)),
    "categorical, four axes": lambda: random.categorical(torch.zeros(2, 3, 4, 5), KEY),
    "categorical, keys of other rows": lambda: random.categorical(torch.zeros(2, 3, 4), torch.arange(3)),
    "dirichlet": lambda: random.dirichlet(KEY, 1.0, torch.ones(3, 4, dtype=torch.bool)),
    "log_probability": lambda: categorical.log_probability(torch.zeros(2, 3, 4), KEY),
    "log_probability_and_entropy": lambda: categorical.log_probability_and_entropy(torch.zeros(2, 4), KEY[:1]),
    "entropy": lambda: categorical.entropy(torch.tensor(0.0)),
    "gaussian.sample": lambda: gaussian.sample(BT, B.unsqueeze(1), KEY),
    "gaussian.sample, key": lambda: gaussian.sample(BT, T, KEY[:1]),
    "gaussian.log_probability": lambda: gaussian.log_probability(BT, T, torch.ones(2, 1)),
    "squashed": lambda: squashed.sample_with_log_probability(BT, T, KEY[:1]),
    "masked_tensor": lambda: masks.masked_tensor(BT, BT, T.bool()),
    "backward_recurrence": lambda: scan.backward_recurrence(BT, T),
    "masked_mean": lambda: statistics.masked_mean(BT, T),
    "masked_means": lambda: statistics.masked_means(BT, BT, T),
    "whiten": lambda: statistics.whiten(BT, T),
    "n_step_reward": lambda: q_learning.n_step_reward(T, T.bool(), 0.9),
    "double_q_value": lambda: q_learning.double_q_value(BT, BT[:1]),
    "td_target": lambda: q_learning.td_target(B, B, B.bool(), BT),
    "q_loss": lambda: q_learning.q_loss(B, B.unsqueeze(1), B),
    "duelling_values": lambda: q_learning.duelling_values(B, BT),
    "policy_gradient_loss": lambda: policy_gradient.policy_gradient_loss(BT, B.unsqueeze(1), BT),
    "reward_to_go": lambda: returns.reward_to_go(T, T, 0.9),
    "discounted_sum": lambda: returns.discounted_sum(BT, BT.bool(), BT, 0.9, B.unsqueeze(1)),
    "gae": lambda: advantages.generalized_advantage(
        BT, BT.bool(), BT.bool(), BT, value=BT, next_value=B.unsqueeze(1), discount=0.9, trace_decay=0.9
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    with pytest.raises(ShapeMismatchError, match="expected"):
        WRONG[name]()


@pytest.mark.parametrize("n", [1, 3, 5])
def test_each_of_several_choices_has_random_numbers_of_its_own(n: int) -> None:
    # The logits of all choices are equal, so choices that shared a number would agree.
    key = random.step_keys(torch.arange(n), 0, torch.arange(1))[0]
    drawn = random.categorical(torch.zeros(n, 5, 1000), key)
    assert drawn.shape == (n, 5)
    assert drawn.unique().numel() > 4 * n  # nearly all differ; n if each environment drew once
    each = torch.stack([random.categorical(torch.zeros(n, 1000), k) for k in random.split(key, 5).unbind(1)], 1)
    torch.testing.assert_close(drawn, each, rtol=0, atol=0)
    torch.testing.assert_close(drawn, categorical.sample(torch.zeros(n, 5, 1000), key), rtol=0, atol=0)


def test_an_environment_chooses_alike_in_every_batch() -> None:
    logits, keys = torch.randn(3, 3, 7), torch.arange(3) * 12345
    whole = random.categorical(logits, keys)
    for b in range(3):
        torch.testing.assert_close(random.categorical(logits[b : b + 1], keys[b : b + 1])[0], whole[b])


def test_normal_takes_keys_of_any_shape() -> None:
    keys = random.split(torch.arange(4), 3)
    flat = random.normal(keys.flatten(), (2,)).view(4, 3, 2)
    torch.testing.assert_close(random.normal(keys, (2,)), flat, rtol=0, atol=0)


def test_an_action_out_of_range_is_named_with_the_number_of_actions() -> None:
    with pytest.raises(BadValueError, match=r"actions are 0 to 4, expected 0 to 3, as there are logits of 4 actions"):
        categorical.log_probability(torch.zeros(2, 4), torch.tensor([0, 4]))
