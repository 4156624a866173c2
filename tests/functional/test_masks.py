"""Rows chosen by a mask: any rank, any dtype of the mask, no arithmetic on the values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstruct import DeviceMismatchError, DictTensor, ShapeMismatchError, masked_dicttensor, masked_tensor
from rlstruct.functional import categorical
from rlstruct.functional.masks import mask_logits

MASKS = [torch.bool, torch.uint8, torch.int64, torch.float32]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64]


@given(
    st.lists(st.booleans(), max_size=4),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(MASKS),
    st.sampled_from(DTYPES),
)
def test_every_row_comes_from_one_side(
    rows: list[bool], tail: list[int], kind: torch.dtype, dtype: torch.dtype
) -> None:
    zeros, ones = torch.zeros(len(rows), *tail, dtype=dtype), torch.ones(len(rows), *tail, dtype=dtype)
    got = masked_tensor(zeros, ones, torch.tensor(rows, dtype=kind))
    assert got.shape == zeros.shape
    assert got.dtype is dtype
    for b, row in enumerate(rows):
        assert torch.equal(got[b], (ones if row else zeros)[b])


@pytest.mark.parametrize("kind", MASKS)
def test_three_dimensions_infinities_and_large_integers(kind: torch.dtype, device: torch.device) -> None:
    mask = torch.tensor([1, 0], dtype=kind, device=device)
    a, b = torch.zeros(2, 3, 4, device=device), torch.full((2, 3, 4), float("inf"), device=device)
    got = masked_tensor(a, b, mask)
    assert bool((got[0] == float("inf")).all())
    assert bool((got[1] == 0).all())  # 0 * inf would be nan here
    large = 2**53 + 1  # beyond float32 and float64
    small, big = torch.zeros(2, 1, 1, dtype=torch.int64, device=device), torch.full((2, 1, 1), large, device=device)
    assert masked_tensor(small, big, mask).tolist() == [[[large]], [[0]]]


def test_gradients_go_to_the_chosen_rows() -> None:
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    masked_tensor(a, b, torch.tensor([True, False])).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert b.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("tensor0", "tensor1", "mask", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2), r"'tensor1' is \[2, 4\] .*expected \[2, 3\]"),
        (torch.zeros(2, 3), torch.zeros(2), torch.ones(2), r"'tensor1' is \[2\] .*expected \[2, 3\]"),
        (torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0), r"\[B, ...\]"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.int64),
            torch.ones(2),
            r"'tensor1' is \[2\] torch.int64, expected \[2\] torch.float32",
        ),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3), r"'mask' is \[3\] .*expected \[2\]"),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), r"'mask' is \[2, 3\] .*expected \[2\]"),
    ],
)
def test_what_does_not_fit_is_named(
    tensor0: torch.Tensor, tensor1: torch.Tensor, mask: torch.Tensor, message: str
) -> None:
    with pytest.raises(ShapeMismatchError, match=message):
        masked_tensor(tensor0, tensor1, mask)


def test_devices_must_agree() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    with pytest.raises(DeviceMismatchError, match="'tensor1' is on meta, expected cpu"):
        masked_tensor(here, there, here)
    with pytest.raises(DeviceMismatchError, match="'mask' is on meta"):
        masked_tensor(here, here, there)


def test_whole_structures() -> None:
    mask = torch.tensor([0, 1])
    zeros = DictTensor({"a": torch.zeros(2, 2, 1), "b": torch.zeros(2, dtype=torch.int64)})
    ones = DictTensor({"b": torch.ones(2, dtype=torch.int64), "a": torch.ones(2, 2, 1)})
    got = masked_dicttensor(zeros, ones, mask)
    assert list(got) == ["a", "b"]
    assert got["a"].tolist() == [[[0.0], [0.0]], [[1.0], [1.0]]]
    assert got["b"].tolist() == [0, 1]
    assert masked_dicttensor(DictTensor(), DictTensor(), mask).empty()


def test_structures_must_have_the_same_keys_and_kinds() -> None:
    mask = torch.tensor([0, 1])
    one = DictTensor({"a": torch.zeros(2)})
    with pytest.raises(KeyError, match=r"dicttensor1 'a' is missing, expected \[2\] .*The keys are \['b'\]"):
        masked_dicttensor(one, DictTensor({"b": torch.zeros(2)}), mask)
    with pytest.raises(ShapeMismatchError, match=r"masked_dicttensor: dicttensor1 'a' is \[2\] torch.int64"):
        masked_dicttensor(one, DictTensor({"a": torch.zeros(2, dtype=torch.int64)}), mask)
    with pytest.raises(ShapeMismatchError, match=r"masked_tensor: 'mask' is \[1\]"):
        masked_dicttensor(one, one, torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32])
def test_masked_logits_are_neither_drawn_nor_learnt(device: torch.device, dtype: torch.dtype) -> None:
    logits = torch.zeros(64, 2, 3, device=device, requires_grad=True)
    allowed = torch.tensor([[1, 0, 1], [0, 1, 0]], device=device).to(dtype).expand(64, 2, 3)
    masked = mask_logits(logits, allowed)
    drawn = categorical.sample(masked, torch.arange(64, device=device) << 40)
    assert set(drawn[:, 0].tolist()) <= {0, 2}
    assert set(drawn[:, 1].tolist()) == {1}
    log_probability, entropy = categorical.log_probability_and_entropy(masked, drawn)
    torch.testing.assert_close(entropy[0], torch.tensor([2.0, 1.0], device=device).log())
    (log_probability.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad[allowed == 0].abs().max() == 0.0
    with pytest.raises(ShapeMismatchError, match=r"allowed is \[64, 3\], expected \[64, 2, 3\] as the logits"):
        mask_logits(logits, allowed[:, 0])
