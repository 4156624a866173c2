"""The life of an executor: warm up, make, compare, fall back once, follow replaced weights or start over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rlstruct import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.pytree import TreeSpec, named_tensors
from rlstruct.engine.purity import PurityError, Unavailable
from rlstruct.engine.runner import Runner

CPU = torch.device("cpu")


class Fast:
    """An executor that calls the step, and notes what is asked of it."""

    name, writes = "fast", False
    made: list[Fast]

    def __init__(self, step: Any) -> None:
        self.step, self.calls = step, 0
        self.made.append(self)

    def prepare(self, *args: Any) -> None:
        assert not self.calls

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.step(*args)

    def rebind(self, places: Mapping[tuple[object, ...], str], weights: Mapping[str, Tensor]) -> bool:
        return False


class Slow(Fast):
    """Needs a warm-up, and is not compared, as a graph."""

    prepare = None


class Broken(Slow):
    def __call__(self, *args: Any) -> Any:
        raise Unavailable("aten::item needs the host")


class Wrong(Fast):
    def __call__(self, *args: Any) -> Any:
        return {"y": super().__call__(*args)["y"] + 1.0}


class Writing(Fast):
    writes = True


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Fast]:
    found: list[Fast] = []
    monkeypatch.setattr(Fast, "made", found, raising=False)
    monkeypatch.setattr("rlstruct.engine.runner.MOST_FORMS", 2)
    return found


def runner(model: nn.Module, make: type[Fast], said: list[str]) -> Runner[dict[str, Tensor]]:
    return Runner(lambda x: {"y": model(x["x"])}, model, CPU, make, failed=said.append)


def x(rows: int = 3) -> DictTensor:
    return DictTensor({"x": torch.ones(rows, 2)})


@torch.no_grad()
def test_code_is_compared_in_its_first_call_and_alone_later(made: list[Fast]) -> None:
    said: list[str] = []
    run = runner(nn.Linear(2, 1), Fast, said)
    assert run.executor == "eager"
    for _ in range(3):
        run(x())
    run(x(5))  # another form of arguments
    assert [one.calls for one in made] == [3, 1]
    assert (run.executor, run.why_not, said) == ("fast", "", [])
    run(x(7))  # at most two
    run(x())
    assert [one.calls for one in made] == [3, 1, 1, 1]


@torch.no_grad()
def test_a_graph_is_made_after_a_warm_up_and_one_at_a_time(made: list[Fast]) -> None:
    run = runner(nn.Linear(2, 1), Slow, [])
    run(x())
    assert run.executor == "eager"
    run(x())
    run(x())
    assert [one.calls for one in made] == [0, 2]
    run(x(5))
    run(x())
    assert [one.calls for one in made[1:]] == [2, 1, 1]


@pytest.mark.parametrize(
    ("kind", "why"), [(Broken, "aten::item needs the host"), (Wrong, "'y' differs in 3 of 3 rows when compiled")]
)
@torch.no_grad()
def test_what_cannot_be_made_is_reported_once_and_the_step_goes_on(kind: type[Fast], why: str) -> None:
    said: list[str] = []
    model = nn.Linear(2, 1)
    run = runner(model, kind, said)
    for _ in range(4):
        torch.testing.assert_close(run(x())["y"], model(torch.ones(3, 2)), rtol=0.0, atol=0.0)
    assert len(said) == 1
    assert said[0].startswith(why)
    assert (run.why_not, run.executor) == (said[0], "eager")


@torch.no_grad()
def test_a_step_that_gives_something_else_each_time_breaks_its_promise() -> None:
    n = iter(range(100))
    run = Runner(lambda x: {"y": x["x"] + next(n)}, None, CPU, Fast)
    with pytest.raises(PurityError, match="'y' differs in 3 of 3 rows"):
        run(x())


@torch.no_grad()
def test_replaced_weights_end_an_executor_that_cannot_follow(made: list[Fast]) -> None:
    model = nn.Linear(2, 1)
    run = runner(model, Slow, [])
    for _ in range(2):
        run(x())
    model.weight.add_(1.0)
    run.weights_changed()
    assert run.executor == "fast"  # new values in the same memory
    model.weight.data = model.weight.data * 2.0
    run.weights_changed()
    assert run.executor == "eager"
    run(x())  # warms up again
    assert run.executor == "eager"
    torch.testing.assert_close(run(x())["y"], model(torch.ones(3, 2)))
    assert run.executor == "fast"
    model.eval()
    run.weights_changed()
    assert run.executor == "eager"


def test_a_step_that_writes_into_its_arguments_is_compared_on_copies(made: list[Fast]) -> None:
    def step(given: dict[str, Tensor]) -> dict[str, Tensor]:
        given["sum"].add_(given["x"])
        return {"fresh": given["x"] + 0}

    run = Runner(step, None, CPU, Writing)
    given = {"sum": torch.zeros(3), "x": torch.ones(3)}
    for n in (1.0, 2.0):
        run(given)
        assert given["sum"].tolist() == [n] * 3
    assert [one.calls for one in made] == [2]
    assert run.executor == "fast"


def batch(value: float) -> Trajectories:
    steps = {"observation/frame": torch.full((2, 3, 4), value), "action/action": torch.zeros(2, 3)}
    return Trajectories(
        DictTensor({"step": torch.zeros(2)}), TemporalDictTensor(steps, torch.tensor([3, 2], dtype=torch.int64))
    )


class Named(NamedTuple):
    tensors: DictTensor
    nothing: None


def test_trees_are_taken_apart_and_put_together() -> None:
    named = Named(DictTensor({"a": torch.ones(2)}), None)
    tree = (batch(1.0), DictTensor(), {"a": torch.ones(2)}, [torch.zeros(1), None, "greedy"], {"n": 3}, named)
    structure = TreeSpec(tree)
    tensors = structure.flatten(tree)
    assert structure.n_tensors == len(tensors) == 7
    again = structure.unflatten([tensor + 1 for tensor in tensors])
    assert [type(part) for part in again] == [type(part) for part in tree]
    assert again[0].steps["observation/frame"].unique().tolist() == [2.0]
    assert again[0].lengths.tolist() == [4, 3]
    assert again[3][1:] == [None, "greedy"]
    assert again[4] == {"n": 3}
    assert again[5].tensors["a"].tolist() == [2.0, 2.0]
    assert again[5].nothing is None
    assert TreeSpec(again) == structure
    assert hash(TreeSpec(again)) == hash(structure)
    assert TreeSpec((*tree[:4], {"n": 4}, named)) != structure
    names = [path[-1] for path in named_tensors(tree)]
    assert names == ["step", "observation/frame", "action/action", "lengths", "a", 0, "a"]


def test_the_order_of_keys_does_not_matter() -> None:
    one = TreeSpec(DictTensor({"a": torch.zeros(2), "b": torch.ones(2)}))
    found = one.flatten(DictTensor({"b": torch.ones(2), "a": torch.zeros(2)}))
    assert [tensor.sum().item() for tensor in found] == [0.0, 2.0]


class Counting(nn.Module):
    """Counts its calls in an attribute, or in a buffer."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        if buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        else:
            self.calls: int | Tensor = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


@torch.no_grad()
def test_an_attribute_that_changes_all_the_time_is_named_once(made: list[Fast]) -> None:
    said: list[str] = []
    run = runner(nn.Sequential(Counting(buffer=False)), Slow, said)
    for _ in range(2):
        run(x())
        run.weights_changed()
    run(x())
    with pytest.warns(UserWarning, match=r"Counting: the attribute 'calls' has changed before 3 updates in a row"):
        run.weights_changed()
    for _ in range(5):  # a second warning would be an error
        run(x())
        run.weights_changed()
    assert run.executor == "eager"


@torch.no_grad()
def test_a_counter_in_a_buffer_and_an_attribute_that_changes_now_and_then_are_no_reason_to_warn(
    made: list[Fast],
) -> None:
    said: list[str] = []
    network = Counting(buffer=True)
    run = runner(network, Slow, said)
    for i in range(12):
        run(x())
        if i % 3:
            network.training = not network.training
        run.weights_changed()
    for _ in range(3):
        run(x())
        run.weights_changed()
    assert run.executor == "fast"
    assert int(network.calls) == 15
