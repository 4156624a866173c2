"""Operators in the graphs of simulators and updates: TorchInductor compiles each of them for CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from replaying_learners import REPLAYING, SMALL, batches_for, collect_batches, replaying
from test_program import KINDS, collect, create_learner
from torch import Tensor
from torch._ops import OpOverload

from rlstruct import Trajectories
from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.algos import GradientLearner
from rlstruct.core import DictTensor
from rlstruct.engine.compiled import Compiled
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.search.alphazero import AlphaZeroConfig, AlphaZeroLearner
from rlstruct.sims import SIMULATORS, ConnectFour, make
from rlstruct.spaces import sample

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch imports its own deprecated modules
    from torch._inductor import compile_fx, lowering


pytestmark = pytest.mark.slow  # a compiler


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Functions of all graphs that Inductor is given; the graphs are interpreted instead of compiled."""
    found: set[Any] = set()

    def interpret(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        found.update(node.target for node in graph.graph.nodes if node.op == "call_function")
        return lambda inputs: graph(*inputs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", interpret)
    monkeypatch.setattr(Compiled, "prepare", None)  # nothing is compared
    return found


def check(targets: set[Any]) -> None:
    """Inductor compiles an operator, or calls its CUDA kernel. It makes wrong code of foreach operators there."""
    operators = {target for target in targets if isinstance(target, OpOverload) and target.namespace != "rlstruct"}
    assert len(operators) > 5
    called = {op for op in operators if op not in lowering.lowerings}
    assert {str(op) for op in called if not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CUDA)} == set()
    assert {str(target) for target in operators if "_foreach_" in str(target)} == set()


@pytest.mark.parametrize("name", SIMULATORS)
def test_simulators(name: str, targets: set[Any], device: torch.device) -> None:
    env = make(name, 4, device=device, backend="compile")
    env.reset()
    env.step(DictTensor(sample(env.action_space, "action", 4, device)))
    check(targets)


searching = partial(SearchAgent, create_simulator=ConnectFour, config=SearchConfig(n_simulations=2, max_depth=2))
create_network = partial(ConvolutionalActorCritic, (2, 6, 7), 7, n_features=8, layers=((4, 3, 1),))


def create_alphazero(device: str, **changes: Any) -> GradientLearner:
    config = AlphaZeroConfig(**SMALL, learner_device=device, graph=False, max_gradient_norm=0.5, **changes)
    return AlphaZeroLearner.create(create_network().to(device), searching, config)


LEARNERS: dict[str, tuple[Callable[..., GradientLearner], Callable[[], list[Trajectories]]]] = {
    **{kind: (partial(create_learner, kind), partial(collect, kind, 2)) for kind in KINDS if "uneven" not in kind},
    **{kind: (partial(replaying, kind, graph=False), partial(batches_for, kind, 2)) for kind in REPLAYING},
    "alphazero": (create_alphazero, lambda: collect_batches(searching, create_network(), ConnectFour, 2)),
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_updates(kind: str, targets: set[Any], device: torch.device) -> None:
    create, batches = LEARNERS[kind]
    learner = create(device=str(device), compile_update=True)
    for batch in batches():
        learner.update(batch, 0.5)
    check(targets)
