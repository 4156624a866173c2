"""Operators in the graphs of simulators and updates: TorchInductor compiles each of them for CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from replaying_learners import REPLAYING, SMALL, batches_for, collect_batches, replaying
from resume_tasks import create_episodic_sim
from resume_tasks import create_network as create_actor_critic
from test_program import KINDS, collect, create_learner
from torch import Tensor
from torch._ops import OpOverload

from rlstruct import Trajectories
from rlstruct.agents import ActorCriticAgent, ConvolutionalActorCritic
from rlstruct.algos import GradientLearner
from rlstruct.algos import learner as learner_module
from rlstruct.algos.reinforce import ReinforceConfig, ReinforceLearner
from rlstruct.core import DictTensor
from rlstruct.engine import mixed_precision
from rlstruct.engine.compiled import Compiled
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.search.alphazero import AlphaZeroConfig, AlphaZeroLearner
from rlstruct.sims import SIMULATORS, ConnectFour, make
from rlstruct.spaces import sample

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch imports its own deprecated modules
    from torch._inductor import compile_fx, lowering


pytestmark = pytest.mark.slow  # a compiler
ON_ALL_DEVICES = {"rlstruct.gated_recurrence.default", "rlstruct.gated_recurrence_backward.default"}
"""Operators of ours that call torch's; the others run on the CPU only."""
LOWERED = frozenset(op for op in lowering.lowerings if isinstance(op, OpOverload))
"""Operators that Inductor compiles. Once it has met any other, it lists that one, too, and calls its kernel."""


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
    operators = {target for target in targets if isinstance(target, OpOverload)}
    assert len(operators) > 5
    called = {op for op in operators if op not in LOWERED and str(op) not in ON_ALL_DEVICES}
    assert {str(op) for op in called if not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CUDA)} == set()
    assert {str(target) for target in operators if "_foreach_" in str(target)} == set()


@pytest.mark.parametrize("name", SIMULATORS)
def test_simulators(name: str, targets: set[Any], device: torch.device) -> None:
    env = make(name, 4, device=device, backend="compile")
    env.reset()
    env.step(DictTensor(sample(env.action_space, "action", 4, device)))
    check(targets)


@pytest.mark.parametrize("name", ["product", "sum_rows", "sum_rows_gradient"])
def test_an_operator_for_the_cpu_is_refused(name: str) -> None:
    ours = getattr(torch.ops.rlstruct, name).default
    allowed = {op for op in LOWERED if "_foreach_" not in str(op)}
    check(allowed)
    with pytest.raises(AssertionError, match=name):
        check({*allowed, ours})


searching = partial(SearchAgent, create_simulator=ConnectFour, config=SearchConfig(n_simulations=2, max_depth=2))
create_network = partial(ConvolutionalActorCritic, (2, 6, 7), 7, n_features=8, layers=((4, 3, 1),))


def create_alphazero(device: str, **changes: Any) -> GradientLearner:
    settings = {**SMALL, "learner_device": device, "graph": False, "max_gradient_norm": 0.5, "mirror": True}
    config = AlphaZeroConfig(**settings, **changes)
    return AlphaZeroLearner.create(create_network().to(device), searching, config)


class ReinforceInFixedShapes(ReinforceLearner):
    """REINFORCE as if all batches had the same shape: otherwise its updates are not compiled."""

    whole_episodes = False


def create_reinforce(device: str, **changes: Any) -> GradientLearner:
    config = ReinforceConfig(n_timesteps=6, n_envs=4, n_env_steps=1000, learner_device=device, graph=False, **changes)
    return ReinforceInFixedShapes.create(create_actor_critic().to(device), ActorCriticAgent, config)


LEARNERS: dict[str, tuple[Callable[..., GradientLearner], Callable[[], list[Trajectories]]]] = {
    **{kind: (partial(create_learner, kind), partial(collect, kind, 2)) for kind in KINDS if "uneven" not in kind},
    **{kind: (partial(replaying, kind, graph=False), partial(batches_for, kind, 2)) for kind in REPLAYING},
    "reinforce": (
        create_reinforce, lambda: collect_batches(ActorCriticAgent, create_actor_critic(), create_episodic_sim, 2)
    ),
    "alphazero": (create_alphazero, lambda: collect_batches(searching, create_network(), ConnectFour, 2)),
    "ppo, stacking, bfloat16": (
        partial(create_learner, "ppo, stacking", precision="bfloat16"), partial(collect, "ppo, stacking", 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEARNERS)
def test_updates(kind: str, targets: set[Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "FEW_OUTPUTS", 0)  # small layers are rounded, as large ones are
    monkeypatch.setattr(learner_module, "why_not_bfloat16", lambda device: "")  # a slow processor traces the same graph
    create, batches = LEARNERS[kind]
    learner = create(device=str(device), compile_update=True)
    for batch in batches():
        learner.update(batch, 0.5)
    check(targets)
