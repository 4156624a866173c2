"""The others name a learner that is lost under NCCL within seconds; and GPUs are known by what they are."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_learners import fork_learners

from rlstruct.algos.distributed import peers
from rlstruct.algos.distributed.gpu_all_reduce import by_gpu
from rlstruct.algos.distributed.launch import gpu_facts
from rlstruct.algos.distributed.peers import Peers
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup, use_group
from rlstruct.errors import LearnerError

CPU = {"host": "a", "device": "cpu"}


def learner(host: str, gpu: str, bus: str, device: str = "cuda:0") -> dict[str, Any]:
    return {"host": host, "gpu": gpu, "bus": bus, "device": device}


def test_a_thread_frees_a_learner_that_waits_for_a_killed_one_and_names_it(caplog: pytest.LogCaptureFixture) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    facts = [{"host": os.uname().nodename, "pid": pid} for pid in (os.getpid(), other.pid)]
    freed = threading.Event()  # stands in for a sum on the device
    watching = Peers(0, dist.HashStore(), facts, freed.set)
    watching.raise_if_lost()
    assert not freed.wait(1.2)
    other.kill()
    assert freed.wait(60.0)
    match = rf"run_training: learner 1 \(pid {other.pid} on .*\) has died"
    with pytest.raises(LearnerError, match=match) as error:
        watching.raise_if_lost()
    assert error.value.ranks == (1,)
    assert [record.getMessage() for record in caplog.records] == [str(watching.lost)]
    watching.close()
    other.wait()


def test_closing_does_not_wait_for_a_thread_that_hangs_and_names_the_learner(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CLOSING_SECONDS", 0.2)
    lost = subprocess.Popen([sys.executable, "-c", ""])
    lost.wait()
    facts = [{"host": os.uname().nodename, "pid": pid} for pid in (os.getpid(), lost.pid)]
    aborting, over = threading.Event(), threading.Event()

    def abort() -> None:  # NCCL's may never return
        aborting.set()
        over.wait(60.0)

    watching = Peers(0, dist.HashStore(), facts, abort)
    try:
        assert aborting.wait(60.0)
        begun = time.monotonic()
        watching.close()
        assert time.monotonic() - begun < 20.0
    finally:
        over.set()
    assert f"learner 0 (pid {os.getpid()} on {os.uname().nodename}) closes although its thread" in caplog.text


def test_a_sum_that_is_complete_just_when_a_second_is_over_means_no_lost_learner() -> None:
    class Sum:
        waits = 0

        def wait(self, limit: object) -> None:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return True

    group, work = DistributedLearnerGroup.__new__(DistributedLearnerGroup), Sum()
    group.wait(work)  # type: ignore[arg-type]
    assert work.waits == 2


def test_a_learner_that_has_finished_may_end_and_one_that_waits_too_long_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    store = dist.HashStore()
    facts = [{"host": os.uname().nodename, "pid": pid} for pid in (os.getpid(), other.pid)]
    one, two = (Peers(rank, store, facts) for rank in range(2))
    with pytest.raises(LearnerError, match=r"learner 1 .* has died"):
        one.watch(0.0)
    two.finish()
    one.watch(0.0)
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 5.0)
    with pytest.raises(LearnerError, match="learner 0 has waited 6 s for the others"):
        one.watch(6.0)


@pytest.mark.parametrize(("own", "is_lost"), [({}, True), ({"role": "collector 0"}, False)])
def test_only_a_learner_has_to_make_progress(
    own: dict[str, str], is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.1)
    watching = Peers(0, dist.HashStore(), [{"host": os.uname().nodename, "pid": os.getpid(), **own}], lambda: None)
    time.sleep(1.2)
    watching.close()
    assert (watching.lost is not None) == is_lost


def test_a_silent_learner_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENT_SECONDS", 1.0)
    store = dist.HashStore()
    facts = [{"host": os.uname().nodename, "pid": os.getpid()}, {"host": "far away", "pid": 7}]
    one, two = (Peers(rank, store, facts) for rank in range(2))
    for _ in range(5):  # not before it begins to look, and not while it does
        one.watch(0.0)
        time.sleep(0.1)
    for _ in range(5):
        two.watch(0.0)
        one.watch(0.0)
        time.sleep(0.1)
    time.sleep(1.1)
    with pytest.raises(LearnerError, match=r"learner 1 \(pid 7 on far away\) has sent no heartbeat for 1 s"):
        one.watch(0.0)


def lose_the_second(group: DistributedLearnerGroup) -> tuple[str, float, bool, str]:
    """Wait for a learner that is killed, as a sum of NCCL does on the device."""
    group.all_reduce_sum(torch.ones(2))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    freed, begin = threading.Event(), time.monotonic()
    type(dist.group.WORLD).abort = lambda self: freed.set()  # type: ignore[method-assign, union-attr, assignment]
    try:
        with use_group(group):
            freed.wait(60.0)
            raise FloatingPointError("the loss is NaN")  # of numbers that came out of a broken sum
    except LearnerError as error:
        return str(error), time.monotonic() - begin, group.can_capture, repr(error.__cause__)


@pytest.mark.slow
def test_a_group_under_nccl_names_the_learner_that_dies() -> None:
    ((text, seconds, records, cause),) = fork_learners(["a", "a"], lose_the_second, gpus=["one", "two"], dying=[1])
    assert "learner 1 (pid " in text
    assert text.split("\n")[0].endswith(" on a) has died.")
    assert seconds < 30.0  # not the minute that it waits at most; about 1 s
    assert records
    assert "the loss is NaN" in cause


@pytest.mark.parametrize("chosen", [None, "3"])
def test_nccl_leaves_lost_learners_to_the_watching_thread_unless_told_otherwise(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default torch ends the process at a communicator's error, before anything could name the lost learner."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", list[str | None]()
    monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(name, chosen)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **settings: seen.append(os.environ.get(name)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for facts in (learner("a", "u1", "1"), CPU):
        DistributedLearnerGroup(0, 0, dist.HashStore(), [{**facts, "pid": os.getpid()}]).close()
    assert seen == [chosen or "0", chosen]
    assert os.environ.get(name) == chosen


def test_a_group_under_nccl_frees_graphs_that_are_in_cycles_before_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for them: they hold an all-reduce."""

    class Captured:
        def __init__(self) -> None:
            self.learner = self

    left, seen = weakref.ref(Captured()), list[object]()
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **settings: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(left()))
    gc.disable()
    try:
        group = DistributedLearnerGroup(0, 0, dist.HashStore(), [{**learner("a", "u1", "1"), "pid": os.getpid()}])
        assert left() is not None
        group.close()
    finally:
        gc.enable()
    assert seen == [None]


def sum_until_killed(group: DistributedLearnerGroup) -> tuple[str, float]:
    x = torch.ones(1000, device=f"cuda:{group.rank}")
    group.all_reduce_sum(x)
    torch.cuda.synchronize(x.device)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        with use_group(group):
            for _ in range(100):
                x = group.all_reduce_sum(x)
                x.sum().item()
    except LearnerError as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0.0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two learners")
def test_nccl_names_the_learner_that_dies() -> None:
    ((text, seconds),) = fork_learners(["a", "a"], sum_until_killed, "cuda", dying=[1])
    assert "learner 1 (pid " in text
    assert "has died" in text
    assert seconds < 60.0  # NCCL itself waits half an hour


@pytest.mark.parametrize(
    ("facts", "each"),
    [
        ([learner("a", "u1", "1"), learner("a", "u2", "2", "cuda:1")], True),
        ([learner("a", "u1", "1"), learner("a", "u2", "2")], True),  # each sees one GPU, as cuda:0
        ([learner("a", "u1", "1"), learner("b", "u2", "1")], True),  # the same slot of two machines
        ([learner("a", "u1", "1"), learner("a", "u1", "1")], False),
        ([learner("a", "u1", "1"), learner("a", "u1", "1", "cuda:1")], False),  # another number of the same GPU
        ([learner("a", "MIG-1", "1"), learner("a", "MIG-2", "1")], False),  # parts of one GPU
        ([learner("a", "u1", "1"), learner("a", "u1", "1"), learner("a", "u2", "2")], False),
        ([CPU, CPU], False),
    ],
)
def test_gpus_are_known_by_what_they_are(facts: list[dict[str, Any]], each: bool) -> None:
    assert (len(by_gpu(facts)) == len(facts)) == each  # then NCCL connects them


def records(group: DistributedLearnerGroup) -> bool:
    return group.can_capture


@pytest.mark.parametrize(("gpus", "recorded"), [(["one", "two"], True), (["one", "one"], False)])
@pytest.mark.slow
def test_learners_that_see_one_gpu_each_record_their_updates(gpus: list[str], recorded: bool) -> None:
    assert fork_learners(["a", "a"], records, gpus=gpus) == [recorded, recorded]


def test_a_gpu_is_known_by_its_uuid_and_its_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"uuid": "5a1e", "pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**found))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpu_facts("cuda:0") == {"gpu": "5a1e", "bus": "0000:3b:00"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77/1/0,MIG-78")
    assert gpu_facts("cuda:0") == {"gpu": "MIG-77/1/0", "bus": "0000:3b:00"}
    assert gpu_facts("cuda:1") == gpu_facts("cpu") == {}


@pytest.mark.gpu
def test_a_real_gpu_is_known_by_its_uuid_and_its_bus() -> None:
    found = gpu_facts("cuda:0")
    assert set(found) == {"gpu", "bus"}
    assert all(found.values())
