"""Any optimiser learns, and leaves weights and its own state alone once a gradient is no number."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from forked_learners import fork_learners
from resume_tasks import create_network
from torch import Tensor, nn, optim

from rlstruct.agents import ActorCriticAgent
from rlstruct.algos import a2c
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup, use_group
from rlstruct.algos.optimising import PureAdam
from rlstruct.testing import forbid_host_sync

Loss = Callable[[Tensor, Tensor], Tensor]
OTHERS = ("SparseAdam", "LBFGS", "Muon")  # want sparse gradients, a closure, matrices alone
NAMES = [name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
SETTINGS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}
KINDS = [(name, SETTINGS.get(name, {})) for name in NAMES if name not in (*OTHERS, "Optimizer")]
KINDS += [(name, {"fused": True}) for name in ("Adagrad", "Adam", "AdamW", "SGD")]
CAPTURABLE = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")


class Stepping(a2c.A2CLearner):
    """Takes gradient steps on whatever loss of the network's outputs it is given."""

    def step(self, loss: Loss) -> dict[str, Tensor]:
        self.loss = loss
        self.anneal(0.0)
        return self.descend(*self.gradient({"frame": torch.ones(8, 4, device=self.device)}))

    def terms(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.loss(*self.model(batch["frame"]))}


def good(policy: Tensor, value: Tensor) -> Tensor:
    return policy.square().mean() + (value - 3.0).square().mean()


def bad(policy: Tensor, value: Tensor) -> Tensor:
    """A finite loss with gradients of 0 * inf."""
    return policy.square().mean() + (value * 0.0).abs().sqrt().mean()


def create_learner(create: Callable[..., optim.Optimizer], device: str = "cpu", bound: float | None = None) -> Stepping:
    torch.manual_seed(0)
    model = create_network().to(device)
    agent = ActorCriticAgent(model, device=device, stochastic=True, copy_model=False)
    learner = Stepping(model, agent, a2c.A2CConfig(learner_device=device, max_gradient_norm=bound, learning_rate=0.01))
    learner.optimizer = create(model.parameters())  # type: ignore[assignment]
    return learner


def everything(learner: Stepping) -> list[Any]:
    """The weights, and all that the optimiser remembers."""
    state = [learner.optimizer.state[weight] for weight in learner.model.parameters()]
    kept = [*learner.model.parameters(), *(one[name] for one in state for name in sorted(one))]
    return [copy.deepcopy(x).detach().to("cpu") if isinstance(x, Tensor) else x for x in kept]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("bound", [None, 0.5])
@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_any_optimiser_steps_and_stops_at_the_first_gradient_that_is_no_number(
    name: str, settings: dict[str, Any], bound: float | None
) -> None:
    learner = create_learner(lambda weights: getattr(optim, name)(weights, **settings), bound=bound)
    torch.manual_seed(0)
    plain = create_network()
    own = getattr(optim, name)(plain.parameters(), **settings)
    for _ in range(3):
        before = everything(learner)
        learner.step(good)
        assert not same(everything(learner), before)
        for group in own.param_groups:
            group["lr"] = 0.01
        own.zero_grad()
        good(*plain(torch.ones(8, 4))).backward()
        if bound is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), bound)
        own.step()
    for weight, expected in zip(learner.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)
    before = everything(learner)
    assert learner.step(bad)["loss"].isfinite()
    assert same(everything(learner), before)
    learner.step(good)  # from here on nothing changes any more
    assert same(everything(learner), before)


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_a_first_gradient_that_is_no_number_leaves_even_the_first_state(name: str, settings: dict[str, Any]) -> None:
    learner = create_learner(lambda weights: getattr(optim, name)(weights, **settings))
    before = everything(learner)
    learner.step(bad)
    assert same(everything(learner), before)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_optimisers_stop_on_an_accelerator_without_a_wait(name: str) -> None:
    def create(weights: Any) -> optim.Optimizer:  # all at once, as on CUDA: one by one some read the learning rate
        return getattr(optim, name)(weights, capturable=True, foreach=True)  # type: ignore[no-any-return]

    learner = create_learner(create, "sim:0")
    on_cpu = create_learner(getattr(optim, name))
    for _ in range(2):
        learner.step(good)
        on_cpu.step(good)
    for one, other in zip(everything(learner), everything(on_cpu), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-6)
    before = everything(learner)
    with forbid_host_sync():
        learner.step(bad)
        learner.step(good)
    assert same(everything(learner), before)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad"])
def test_an_optimiser_that_counts_on_the_host_stops_on_an_accelerator_too(name: str) -> None:
    learner = create_learner(lambda weights: getattr(optim, name)(weights, **SETTINGS.get(name, {})), "sim:0")
    learner.step(bad)
    assert not any(map(dict, learner.optimizer.state.values())) or name == "Adagrad"
    again = create_learner(lambda weights: getattr(optim, name)(weights, **SETTINGS.get(name, {})), "sim:0")
    before = everything(again)
    again.step(good)
    assert not same(everything(again), before)


class Sparse(nn.Module):
    """A network with an embedding, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=True)
        self.policy = nn.Linear(3, 1)

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        found = self.embedding(torch.ones(len(frame), dtype=torch.int64))
        return self.policy(found), found.sum(-1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes a sparse tensor unasked
@pytest.mark.parametrize("bound", [None, 0.5])
@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients_are_taken_bounded_and_guarded(name: str, bound: float | None) -> None:
    torch.manual_seed(0)
    model, plain = Sparse(), Sparse()
    plain.load_state_dict(model.state_dict())
    learner = Stepping(model, ActorCriticAgent(model, copy_model=False), a2c.A2CConfig(max_gradient_norm=bound))
    learner.optimizer = getattr(optim, name)([model.embedding.weight], lr=0.01)
    learner.config = dataclasses.replace(learner.config, learning_rate=0.01)
    learner.step(good)
    good(*plain(torch.ones(8, 4))).backward()
    expected = {key: weight.grad.to_dense() for key, weight in plain.named_parameters() if weight.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    scale = 1.0 if bound is None else min(1.0, bound / float(norm))
    assert model.embedding.weight.grad is not None
    torch.testing.assert_close(model.embedding.weight.grad.to_dense(), expected["embedding.weight"] * scale)
    assert not torch.equal(model.embedding.weight[1], plain.embedding.weight[1])
    before = everything(learner)
    learner.step(bad)
    assert same(everything(learner), before)


def stop_together(group: DistributedLearnerGroup) -> dict[str, list[Any]]:
    found = {}
    kinds: dict[str, Callable[..., optim.Optimizer]] = {"RMSprop": optim.RMSprop, "AdamW": optim.AdamW}
    kinds["fused"] = lambda weights: optim.Adam(weights, fused=True)
    with use_group(group):
        for name, create in kinds.items():
            learner = create_learner(create)
            learner.step(good)
            found[name] = [everything(learner)]
            learner.step(bad if group.rank == 1 else good)
            learner.step(good)
            found[name].append(everything(learner))
    return found


@pytest.mark.slow
def test_a_gradient_that_is_no_number_in_one_learner_stops_all() -> None:
    first, second = fork_learners(["a", "a"], stop_together)
    for name, (before, after) in first.items():
        assert same(before, after), name
        assert same(after, second[name][1]), name
        assert not same(before, everything(create_learner(optim.RMSprop))), name


def step_sparsely(group: DistributedLearnerGroup) -> list[Any]:
    with use_group(group):
        torch.manual_seed(0)
        model = Sparse()
        config = a2c.A2CConfig(max_gradient_norm=None, learning_rate=0.01)
        learner = Stepping(model, ActorCriticAgent(model, copy_model=False), config)
        learner.optimizer = optim.SparseAdam([model.embedding.weight])  # type: ignore[assignment]
        learner.step(lambda policy, value: good(policy, value) * (1.0 + 2.0 * group.rank))
        gradient = model.embedding.weight.grad
        assert gradient is not None
        return [gradient.to_dense(), *everything(learner)]


@pytest.mark.slow
def test_learners_average_sparse_gradients() -> None:
    first, second = fork_learners(["a", "a"], step_sparsely)
    assert same(first, second)
    torch.manual_seed(0)
    model = Sparse()
    (good(*model(torch.ones(8, 4))) * 2.0).backward()  # type: ignore[no-untyped-call]
    assert model.embedding.weight.grad is not None
    torch.testing.assert_close(first[0], model.embedding.weight.grad.to_dense())
    assert not torch.equal(first[1], model.embedding.weight)


def test_a_checkpoint_of_another_device_keeps_the_optimisers_own_settings() -> None:
    def create(weights: Any) -> optim.Optimizer:
        return optim.RMSprop(weights, capturable=True)

    on_cpu, elsewhere = create_learner(optim.RMSprop), create_learner(create, "sim:0")
    on_cpu.step(good)
    elsewhere.load_state_dict(on_cpu.state_dict())
    for learner in (on_cpu, elsewhere):
        learner.step(good)
    assert elsewhere.optimizer.param_groups[0]["capturable"]
    for one, other in zip(everything(elsewhere), everything(on_cpu), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_optimiser_that_wants_a_closure_is_refused() -> None:
    learner = create_learner(optim.LBFGS)
    with pytest.raises(TypeError, match="the optimizer is LBFGS, which computes the loss several times in a step"):
        learner.step(good)


DECOUPLED = pytest.param(
    partial(optim.Adam, decoupled_weight_decay=True),
    marks=pytest.mark.skipif("decoupled_weight_decay" not in signature(optim.Adam).parameters, reason="an older torch"),
    id="decoupled",
)


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.7), "eps": 1e-3, "fused": True}])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, DECOUPLED])
def test_steps_of_the_pure_adam_are_those_of_torch(cls: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, theirs = ([torch.randn(3, 2).requires_grad_() for _ in range(3)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.data.copy_(one.data)
    optimizers = [
        cls([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 0.01}], **settings)
        for weights in (ours, theirs)
    ]
    assert PureAdam.supports(optimizers[0], ours)
    pure = PureAdam(optimizers[0], ours)
    for step in range(5):
        gradient = {str(i): torch.randn(3, 2) for i in range(3) if i < 2 or step > 1}  # the last has none at first
        pure.write(pure.compute(gradient, pure.state(), torch.tensor(1.0)))
        for i, weight in enumerate(theirs):
            weight.grad = gradient.get(str(i))
        optimizers[1].step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    weights, state = [weight.clone() for weight in ours], {key: x.clone() for key, x in pure.state().items()}
    assert pure.count()
    for bad in (torch.inf, torch.nan, 1.0):  # whatever follows
        pure.write(pure.compute(gradient, pure.state(), torch.tensor(bad)))
        assert not pure.count()
    assert all(torch.equal(one, other) for one, other in zip(weights, ours, strict=True))
    assert all(torch.equal(x, state[key]) for key, x in pure.state().items() if key != "largest")
    one, other = (optimizer.state_dict() for optimizer in optimizers)
    torch.testing.assert_close(one["state"], other["state"], rtol=1e-5, atol=1e-7)


def test_the_pure_adam_leaves_other_optimisers_to_torch() -> None:
    weights = [torch.ones(2).requires_grad_()]
    adam = torch.optim.Adam
    scheduled = adam(weights)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    hooked = adam(weights)
    hooked.register_step_post_hook(lambda *given: None)
    others = [torch.optim.SGD(weights, 0.1), adam(weights, amsgrad=True), adam([torch.ones(1).requires_grad_()])]
    for optimizer in (scheduled, hooked, *others, adam(weights, maximize=True)):
        assert not PureAdam.supports(optimizer, weights)
