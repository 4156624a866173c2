"""Processes with roles: messages, sums, and what happens if one of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from role_tasks import (
    Collector,
    Cores,
    Drains,
    Fails,
    GivesUp,
    Late,
    Network,
    ReceivesFirst,
    ReceivesInThread,
    ReceivesViews,
    Reports,
    ReturnsLittle,
    ReturnsMuch,
    SaysGoodbye,
    SendsViews,
    Step,
    Streams,
    Sums,
    SumsThenReceives,
    TakesTurns,
    Trainer,
    Waits,
    WaitsForOneThatGivesUp,
)

from rlstruct import DictTensor
from rlstruct.errors import LearnerError, UsageError
from rlstruct.sharing import launch_roles

UNGUARDED = """
from rlstruct.sharing import Role, launch_roles

class Alone(Role):
    def run(self):
        return 1

launch_roles({"alone": [Alone()]})
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_messages_arrive_once_each_in_order_and_sums_are_those_of_the_group() -> None:
    found = launch_roles({"collector": [Collector(5), Collector(5)], "trainer": [Trainer(5)]})
    assert found["trainer"] == [[(c, i, 100.0 * c + i) for i in range(5) for c in range(2)]]
    assert found["collector"] == [(2, [3.0, 3.5, 3.0, 3.0, 3.0])] * 2


def test_a_sender_forgets_what_has_arrived() -> None:
    (growth,) = launch_roles({"streams": [Streams()], "drains": [Drains()]})["streams"]
    assert growth < 8.0  # MB; all that were sent are 192, and one is 16


def test_last_messages_arrive_late_and_none_has_to_be_received() -> None:
    begin = time.monotonic()
    assert launch_roles({"goodbye": [SaysGoodbye()], "late": [Late()]})["late"] == [[0.0, 1.0]]
    assert time.monotonic() - begin < 60.0


def test_views_arrive_without_the_rest_of_their_memory_and_a_role_is_no_learner_of_torchrun() -> None:
    results = launch_roles({"sends": [SendsViews()], "receives": [ReceivesViews()]})
    kinds = [tuple, Step, list, DictTensor]
    assert results == {"sends": [0], "receives": [(kinds, [4, 4, 4, 4], torch.nn.Parameter)]}


def test_results_may_be_large_and_a_view_comes_without_the_rest() -> None:
    results = launch_roles({"much": [ReturnsMuch()], "little": [ReturnsLittle()]})
    (much,), ((few, sparse),) = results["much"], results["little"]
    assert type(much) is OrderedDict
    torch.testing.assert_close(much["values"], torch.arange(3_000_000, dtype=torch.float32))
    assert few.tolist() == [0, 1]
    assert few.untyped_storage().nbytes() == 16
    torch.testing.assert_close(sparse.to_dense(), torch.eye(2))


def test_a_missing_main_guard_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert "ended with code 86 before it returned a result. Your main script calls launch_roles" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("is killed", r"other 0 \(pid \d+\) ended with code -9 before it returned a result"),
        ("raises", r"(?s)other 0 failed:.*ZeroDivisionError: no batch"),
        ("sends elsewhere", "Role.send: there is no critic 3, expected one of waits 0, other 0"),
        ("sums a list", r"Role.all_reduce: x is a list, expected a tensor. Pass for example torch.tensor\(\[1.0\]\)"),
        ("sums elsewhere", "Role.all_reduce: other 0 sums over the role 'waits', which it does not have"),
    ],
)
def test_one_that_fails_ends_all_and_is_named(how: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(LearnerError, match=message) as caught:
        launch_roles({"waits": [Waits()], "other": [Fails(how)]})
    assert caught.value.ranks == (1,)
    assert time.monotonic() - begin < 60.0


def test_roles_that_wait_for_each_other_are_named() -> None:
    begin = time.monotonic()
    with pytest.raises(
        LearnerError, match=r"Role: . 0 waits for . 0, . 0 .*, so none of them can go on\. Let one"
    ) as one:
        launch_roles({name: [ReceivesFirst(*others)] for name, others in (("a", "bc"), ("b", "ca"), ("c", "ab"))})
    assert all(f"{pair[0]} 0 waits for {pair[1]} 0" in str(one.value) for pair in ("ab", "bc", "ca"))
    assert time.monotonic() - begin < 60.0


def test_roles_that_answer_late_wait_for_each_other_in_turn() -> None:
    assert launch_roles({"a": [TakesTurns("b", 0)], "b": [TakesTurns("a", 1)]}) == {"a": [2], "b": [2]}


def test_roles_that_receive_in_a_thread_may_send_later() -> None:
    assert launch_roles({"a": [ReceivesInThread("b")], "b": [ReceivesInThread("a")]}) == {"a": [[2]], "b": [[2]]}


def test_one_that_gave_up_a_wait_may_send_later() -> None:
    assert launch_roles({"waits": [WaitsForOneThatGivesUp()], "other": [GivesUp()]})["waits"] == [3]


def test_outside_of_launch_roles_a_role_has_no_others() -> None:
    role = Waits()
    for call in (role.run, lambda: role.send(1, "other"), role.size, lambda: role.device):
        with pytest.raises(UsageError, match=r"Waits: there is no role, .* Use them in run\(\), not in __init__"):
            call()
    assert not hasattr(role, "other")
    assert not hasattr(role, "device")
    assert getattr(role, "index", None) is None


def test_a_role_may_be_a_network() -> None:
    network = Network()
    assert network.layer.weight.tolist() == [[1.0, 1.0]] * 2
    assert not hasattr(network, "device")
    assert launch_roles({"network": [network, Network()]}) == {"network": [8.0, 8.0]}


def test_a_wrong_name_in_a_property_of_a_role_is_the_one_that_is_named() -> None:
    class Misspelt(Waits):
        @property
        def net(self) -> Any:
            return self.modle  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="modle"):
        _ = Misspelt().net


def test_a_message_from_one_that_has_ended_is_not_awaited() -> None:
    begin = time.monotonic()
    with pytest.raises(
        LearnerError, match=r"waits 0: other 0 has ended without sending another message\. Send as many"
    ):
        launch_roles({"waits": [Waits()], "other": [Fails("ends")]})
    assert time.monotonic() - begin < 60.0


@pytest.mark.parametrize(
    ("mine", "others", "layouts"),
    [
        ([torch.ones(2)], [torch.ones(300)], ["[2] torch.float32", "[300] torch.float32"]),
        ([torch.ones(2)], [torch.ones(2).int()], ["[2] torch.float32", "[2] torch.int32"]),
        # One has summed such tensors before, and does not compare again before it waits for the sum.
        ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(3)], ["[2] torch.float32", "[3] torch.float32"]),
    ],
)
def test_sums_of_different_tensors_raise_in_each_process(
    mine: list[torch.Tensor], others: list[torch.Tensor], layouts: list[str], tmp_path: Path
) -> None:
    expected = "Role.all_reduce: {} 0 sums {} and {} 0 sums {}, expected the same shape and dtype in each process."
    with pytest.raises(LearnerError, match="ShapeMismatchError"):
        launch_roles({"a": [Reports(tmp_path, *mine)], "b": [Reports(tmp_path, *others)]})
    assert (tmp_path / "a.txt").read_text().startswith(expected.format("a", layouts[0], "b", layouts[1]))
    assert (tmp_path / "b.txt").read_text().startswith(expected.format("b", layouts[1], "a", layouts[0]))


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_sum_with_one_that_has_ended_is_not_awaited(repeats: int) -> None:
    ones, begin = torch.ones(2), time.monotonic()
    with pytest.raises(LearnerError, match=r"b 0 has ended without taking part in a sum.*Call all_reduce equally"):
        launch_roles({"a": [Sums(*[ones] * repeats)], "b": [Sums(*[ones] * (repeats - 1))]})
    assert time.monotonic() - begin < 60.0


@pytest.mark.parametrize("repeats", [0, 1])
def test_a_sum_with_one_that_receives_is_not_awaited(repeats: int) -> None:
    ones, begin = torch.ones(2), time.monotonic()
    with pytest.raises(LearnerError, match=r"Role: (a|b) 0 waits for (a|b) 0, .*Let one send, or take part in the sum"):
        launch_roles({"a": [Sums(*[ones] * (repeats + 1))], "b": [SumsThenReceives(*[ones] * repeats)]})
    assert time.monotonic() - begin < 60.0


def test_each_computes_with_its_part_of_the_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    results = launch_roles({"cores": [Cores(), Cores()]})["cores"]
    if len(cores) >= 2:
        assert sorted(core for own, _ in results for core in own) == cores
    assert {n for _, n in results} == {max(1, len(cores) // 2)}


def test_bad_roles_are_refused() -> None:
    with pytest.raises(TypeError, match=r"roles\['a'\]\[0\] is an int, expected an object of a class that derives"):
        launch_roles({"a": [3]})  # type: ignore[list-item]
    with pytest.raises(ValueError, match="roles is empty"):
        launch_roles({"a": []})
    with pytest.raises(TypeError, match=r"roles is a list, expected a dict of lists .* Pass for example"):
        launch_roles([Waits()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"roles\['a'\] is a Waits, expected a list .* Pass {'a': \[...\]}"):
        launch_roles({"a": Waits()})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"roles\['a'\] is the class Waits, expected a list"):
        launch_roles({"a": Waits})  # type: ignore[dict-item]
    with pytest.raises(
        TypeError, match=r"roles\['a'\]\[0\] is the class Waits, expected an object of .*, such as Mine\(\)"
    ):
        launch_roles({"a": [Waits]})  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"roles has the key 3, expected a name. Pass '3'"):
        launch_roles({3: [Waits()]})  # type: ignore[dict-item]


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_does_not_exist_is_refused(device: str) -> None:
    before = torch.cuda.is_initialized()
    with pytest.raises(ValueError, match=f"launch_roles: device is '{device}', expected .*Devices here: cpu"):
        launch_roles({"waits": [Waits()]}, device=device)
    assert torch.cuda.is_initialized() == before
