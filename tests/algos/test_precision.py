"""Learners whose products are bfloat16: what is rounded, what is not, and where it is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from replaying_learners import REPLAYING, batches_for, replaying
from torch import Tensor
from torch.nn import functional as F

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import a2c, ppo
from rlstruct.engine import mixed_precision
from rlstruct.engine.mixed_precision import Bfloat16Products, why_not_bfloat16

HERE = pytest.mark.skipif(bool(why_not_bfloat16(torch.device("cpu"))), reason="this processor has no bfloat16")
COARSE = 2.0**-8  # half a unit in the last place of bfloat16, relative


@pytest.fixture(autouse=True)
def _small_layers_are_rounded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Round the small layers of these tests, as large ones are."""
    if request.node.name != "test_layers_with_few_outputs_stay_float32":
        monkeypatch.setattr(mixed_precision, "FEW_OUTPUTS", 0)


def test_layers_with_few_outputs_stay_float32() -> None:
    """Values near 200 would else have steps of 1, as large as a reward."""
    torch.manual_seed(0)
    x, weights, bias = torch.randn(7, 40), torch.randn(33, 40), torch.full((33,), 200.0)
    for n, stays in ((1, True), (32, True), (33, False)):
        w, b = weights[:n], bias[:n]
        for product in (
            lambda: F.linear(x, w, b),  # noqa: B023 - called at once
            lambda: F.linear(x, bias=b, weight=w),  # noqa: B023
            lambda: F.linear(x, w),  # noqa: B023
            lambda: torch.addmm(b, x, w.t()),  # noqa: B023
            lambda: torch.addmm(b, mat1=x, mat2=w.t(), beta=2.0),  # noqa: B023
            lambda: torch.baddbmm(b.view(1, 1, -1), x.unsqueeze(0), w.t().unsqueeze(0))[0],  # noqa: B023
            lambda: x @ w.t() + b,  # noqa: B023
        ):
            with Bfloat16Products():
                answer = product()
            assert torch.equal(answer, product()) == stays


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: F.linear(x, w, x[0, :5]),
        lambda x, w: x @ w.t(),
        lambda x, w: torch.addmm(x[0, :5], x, w.t()),
        lambda x, w: torch.einsum("ij,kj->ik", x, w),
        lambda x, w: F.conv1d(x.unsqueeze(-1), w.unsqueeze(-1)),
        lambda x, w: torch.bmm(x.unsqueeze(0), w.t().unsqueeze(0))[0],
    ],
)
def test_arguments_of_products_are_rounded_and_results_are_float32(product: Any) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(7, 33), torch.randn(5, 33, requires_grad=True)
    with Bfloat16Products():
        found = product(x, w)
        rest = (found * 3.0).log_softmax(-1)
    rounded = product(x.bfloat16().double(), w.bfloat16().double())
    assert found.dtype is rest.dtype is torch.float32
    torch.testing.assert_close(found.double(), rounded, rtol=2 * COARSE, atol=2 * COARSE)
    assert not torch.equal(found, product(x, w))
    (gradient,) = torch.autograd.grad(found.sum(), w)
    assert gradient.dtype is torch.float32


def test_each_tensor_is_rounded_once_and_again_after_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    n = []
    convert = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda x, *given: n.append(given) or convert(x, *given))
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    with Bfloat16Products():
        first = x @ w
        assert torch.equal(x @ w, first)
        assert n.count((torch.bfloat16,)) == 2
        x.mul_(2.0)
        assert torch.equal(x @ w, first * 2.0)


def test_a_product_that_writes_into_a_tensor_writes_float32() -> None:
    x, w, result = torch.randn(7, 33), torch.randn(33, 40), torch.full((7, 40), torch.nan)
    with Bfloat16Products():
        assert torch.mm(x, w, out=result) is result
    torch.testing.assert_close(result, x @ w)


def test_gradients_reach_weights_that_were_read_without_them_before() -> None:
    x, w = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
    with Bfloat16Products():
        with torch.no_grad():
            target = x @ w
        loss = (x @ w - 2.0 * target).square().sum()
        loss.backward()
    assert w.grad is not None
    assert bool((w.grad != 0.0).all())


def test_other_numbers_are_left_alone() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    with Bfloat16Products():
        assert (x @ x.t()).dtype is torch.float64
        assert torch.equal(x.sum(0), torch.full((3,), 2.0, dtype=torch.float64))


def learner(precision: str, device: str = "cpu", **changes: Any) -> ppo.PPOLearner:
    torch.manual_seed(0)
    model = ActorCritic(4, 2, hidden=(32, 32)).to(device)
    config = ppo.PPOConfig(
        n_envs=4, n_timesteps=16, n_minibatches=2, n_epochs=2, precision=precision, learner_device=device, **changes
    )
    return ppo.PPOLearner.create(model, ActorCriticAgent, config)


def collected() -> Any:
    from rlstruct.batchers import RL_Batcher
    from rlstruct.sims import make

    torch.manual_seed(0)
    model = ActorCritic(4, 2, hidden=(32, 32))
    with RL_Batcher(16, lambda: ActorCriticAgent(model), lambda seed: make("CartPole-v1", 4, seed=seed)) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=HERE), "sim:0"])
def test_an_update_differs_by_rounding_and_keeps_float32(device: str) -> None:
    batch = collected()
    fine, coarse = learner("float32", device), learner("bfloat16", device)
    for one, other in zip(fine.model.parameters(), coarse.model.parameters(), strict=True):
        assert torch.equal(one, other)
    expected, found = fine.update(batch, 0.0), coarse.update(batch, 0.0)
    for name, value in expected.items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=0.05, atol=0.05, msg=name)
    assert found["ratio_error"] > expected["ratio_error"]  # agents act in float32
    state = coarse.optimizer.state
    for weight in coarse.model.parameters():
        assert weight.dtype is state[weight]["exp_avg"].dtype is torch.float32
    pairs = zip(fine.model.parameters(), coarse.model.parameters(), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)


@HERE
@pytest.mark.slow  # a C++ compiler
def test_a_compiled_update_is_the_eager_one() -> None:
    batch = collected()
    eager, compiled = learner("bfloat16"), learner("bfloat16", compile_update=True)
    for _ in range(2):
        expected, found = eager.update(batch, 0.0), compiled.update(batch, 0.0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02, msg=name)


@HERE
@pytest.mark.parametrize("kind", ["sac", "sac, distributional"])
def test_critics_as_one_product_are_rounded_too(kind: str) -> None:
    from replaying_learners import replaying

    fine = replaying(kind, "cpu", False)
    coarse = replaying(kind, "cpu", False)
    coarse = type(coarse).create(
        coarse.model, type(coarse.agent), dataclasses.replace(coarse.config, precision="bfloat16")
    )
    for batch in batches_for("sac", 2):
        expected, found = fine.update(batch, 0.5), coarse.update(batch, 0.5)
    assert expected["critic_loss"] != found["critic_loss"]
    torch.testing.assert_close(found["critic_loss"], expected["critic_loss"], rtol=0.1, atol=0.05)


@HERE
@pytest.mark.parametrize("kind", REPLAYING)
def test_every_weight_gets_its_gradient_up_to_rounding(kind: str) -> None:
    """Targets are computed first, by some of the same weights, and without gradients."""
    fine, coarse = (replaying(kind, "cpu", False, precision=precision) for precision in ("float32", "bfloat16"))
    for batch in batches_for(kind, 2):
        fine.update(batch, 0.5)
    coarse.load_state_dict(fine.state_dict())
    minibatch = next(iter(fine.minibatches(None)))
    (_, expected), (_, found) = fine.gradient(minibatch), coarse.gradient(minibatch)
    assert expected.keys() == found.keys()
    for i, gradient in expected.items():
        assert found[i].dtype is torch.float32
        assert (found[i] - gradient).abs().mean() < 0.2 * gradient.abs().mean() + 1e-4, i


def test_processors_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    with pytest.raises(ValueError, match="precision is 'bfloat16', which cpu does not compute in: this processor has"):
        learner("bfloat16")
    with pytest.raises(ValueError, match="precision is 'float16', expected 'float32' or 'bfloat16'"):
        a2c.A2CConfig(precision="float16")  # type: ignore[arg-type]
