"""The structures as pytrees: torch.compile without a graph break, torch.func, tree_map with paths."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def batch() -> tuple[DictTensor, TemporalDictTensor]:
    one = DictTensor({"observation/a": torch.arange(12.0).view(4, 3), "action/b": torch.arange(4)})
    return one, DictTensor.stack([one, one.map(lambda v: v + 1)])


def keys_and_rows(state: DictTensor, frame: Tensor) -> tuple[DictTensor, Tensor]:
    both = DictTensor({"frame": frame, "twice": frame * 2}) + state.prepend_key("state/")
    chosen = both.index(torch.tensor([1, 0])).to("cpu")
    return chosen.truncate_key("state/observation/"), chosen["twice"] + chosen.slice(0, 1)["frame"]


def time_and_joins(state: DictTensor, steps: TemporalDictTensor) -> tuple[TemporalDictTensor, DictTensor, Trajectories]:
    longer = DictTensor.stack([state, state.clone().detach(), steps.temporal_index(1)])
    later = DictTensor.cat([state, steps.temporal_slice(1, 2).temporal_index(0)]).map(lambda v: v + 1)
    last = steps.temporal_multi_index(steps.lengths - 1).get(["action/b"])
    return longer, later, Trajectories(last, steps)


def whole_batches(state: DictTensor, steps: TemporalDictTensor) -> tuple[Trajectories, DictTensor, Tensor]:
    made = Trajectories.unchecked(state, steps)
    rows = Trajectories.cat([made.index(torch.tensor([3, 0])), made.slice(1)])
    seen = rows.steps.truncate_key("observation/").map(lambda v: v * 2)
    return rows, seen.temporal_index(0), torch.where(rows.mask(), seen["a"].sum(2), 0)


@pytest.mark.parametrize("function", [keys_and_rows, time_and_joins, whole_batches])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_in_one_graph(function, backend: str) -> None:
    state, steps = batch()
    arguments = (state, torch.ones(4, 2)) if function is keys_and_rows else (state, steps)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    got, expected = (pytree.tree_flatten(f(*arguments)) for f in (compiled, function))
    assert got[1] == expected[1]
    for mine, theirs in zip(got[0], expected[0], strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


def test_another_batch_size_compiles_too() -> None:
    compiled = torch.compile(keys_and_rows, fullgraph=True, backend="eager", dynamic=True)
    for n_rows in (2, 3, 7):
        state = DictTensor({"observation/a": torch.ones(n_rows, 3)})
        assert compiled(state, torch.ones(n_rows, 2))[0].n_elems() == 2


def test_gradients_flow_through_compiled_structures() -> None:
    weight = torch.ones(3, requires_grad=True)

    def loss(state: DictTensor) -> Tensor:
        return (DictTensor({"x": state["observation/a"] * weight}) + state).index(torch.tensor([1]))["x"].sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(batch()[0]).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
@pytest.mark.slow
def test_compiles_with_the_default_backend() -> None:
    state, _ = batch()
    kept, total = torch.compile(keys_and_rows, fullgraph=True)(state, torch.ones(4, 2))
    # Rows 1 and 0 of arange(12).view(4, 3); 2 * 1 + 1 everywhere.
    assert kept["a"].tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]]
    assert total.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_tree_map_reaches_every_tensor_once() -> None:
    state, steps = batch()
    made = Trajectories(state, steps)
    doubled = pytree.tree_map(lambda v: v * 2, made)
    assert isinstance(doubled, Trajectories)
    assert torch.equal(doubled.info["action/b"], state["action/b"] * 2)
    assert torch.equal(doubled.lengths, steps.lengths * 2)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(made)[0]]
    assert paths == [
        ".info['observation/a']",
        ".info['action/b']",
        ".trajectories['observation/a']",
        ".trajectories['action/b']",
        ".trajectories.lengths",
    ]
    assert pytree.tree_flatten(DictTensor())[0] == []


def test_unflatten_takes_placeholders() -> None:
    for structure in (*batch(), Trajectories(*batch())):
        leaves, spec = pytree.tree_flatten(structure)
        assert type(pytree.tree_unflatten([object()] * len(leaves), spec)) is type(structure)
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_vmap_over_rows() -> None:
    state, _ = batch()
    got = torch.func.vmap(lambda row: row["observation/a"].sum() + row["action/b"])(state)
    # Rows of arange(12): 0+1+2 + 0, 3+4+5 + 1, 6+7+8 + 2, 9+10+11 + 3.
    assert got.tolist() == [3.0, 13.0, 23.0, 33.0]
