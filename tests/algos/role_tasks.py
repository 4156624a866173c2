"""Roles that tests start, in a separate module, because processes import it."""

from __future__ import annotations

import os
import signal
import threading
import time
import tracemalloc
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlstruct import DictTensor
from rlstruct.algos.distributed.launch import launched_rank
from rlstruct.errors import ShapeMismatchError
from rlstruct.sharing import Role


class Collector(Role):
    """Sends batches of numbers, which it overwrites at once."""

    def __init__(self, n_batches: int) -> None:
        self.n_batches = n_batches

    def run(self) -> tuple[int, list[float]]:
        values = torch.zeros(50_000)
        for i in range(self.n_batches):
            values.fill_(100.0 * self.index + i)
            self.send({"batch": values, "number": i}, "trainer")
            values.fill_(-1.0)
        total = self.all_reduce(torch.tensor([self.index + 1.0]), "collector")
        weights = self.receive("trainer")
        everyone = self.all_reduce(torch.ones(3))
        return self.size("collector"), [total.item(), weights, *everyone.tolist()]


class Trainer(Role):
    """Receives from each collector in turn."""

    def __init__(self, n_batches: int) -> None:
        self.n_batches = n_batches

    def run(self) -> list[tuple[int, float, float]]:
        found = []
        for _ in range(self.n_batches):
            for index in range(self.size("collector")):
                one = self.receive("collector", index)
                assert one["batch"].unique().numel() == 1
                found.append((index, one["number"], one["batch"][0].item()))
        for index in range(self.size("collector")):
            self.send(3.5, "collector", index)
        self.all_reduce(torch.ones(3))
        return found


class Streams(Role):
    """Sends large messages, each after the previous one has arrived, and returns how many MB more are held at the end.

    Python counts the memory of pickled messages; the size of the process depends on what malloc gives back.
    """

    def run(self) -> float:
        tracemalloc.start()
        sizes = []
        for _ in range(16):
            self.send(torch.zeros(4 * 2**20), "drains")  # 16 MB
            self.receive("drains")
            sizes.append(tracemalloc.get_traced_memory()[0] / 2**20)
        return sizes[-1] - sizes[3]


class Drains(Role):
    def run(self) -> None:
        for _ in range(16):
            self.receive("streams")
            self.send(None, "streams")


class SaysGoodbye(Role):
    """Sends more than the other one receives, and ends at once."""

    def run(self) -> None:
        for i in range(3):
            self.send(torch.full([100_000], float(i)), "late")


class Late(Role):
    def run(self) -> list[float]:
        time.sleep(1.0)
        return [self.receive("goodbye").mean().item() for _ in range(2)]


class Step(NamedTuple):
    observation: torch.Tensor
    rewards: list[torch.Tensor]


@dataclass
class Batch:
    steps: DictTensor


class SendsViews(Role):
    """Sends single numbers of a large tensor; returns its rank as a training sees it."""

    def run(self) -> int:
        values = torch.zeros(100_000)
        batch = Batch(DictTensor({"reward": values[3:4]}))
        self.send((Step(values[:1], [values[1:2]]), {"last": values[2:3]}, batch), "receives")
        self.send(torch.nn.Linear(2, 1), "receives")
        return launched_rank()


class ReceivesViews(Role):
    def run(self) -> tuple[list[type], list[int], type]:
        value = self.receive("sends")
        step, last, batch = value
        views = [step.observation, *step.rewards, last["last"], batch.steps["reward"]]
        kinds = [type(value), type(step), type(step.rewards), type(batch.steps)]
        return kinds, [view.untyped_storage().nbytes() for view in views], type(self.receive("sends").weight)


class Waits(Role):
    def run(self) -> Any:
        return self.receive("other")


class ReceivesFirst(Role):
    """Receives from another role before it sends to a third one."""

    def __init__(self, source: str, to: str) -> None:
        self.source, self.to = source, to

    def run(self) -> None:
        self.receive(self.source)
        self.send(1, self.to)


class TakesTurns(Role):
    """Sends or receives in turn; the other one waits longer than the time between two looks at the others."""

    def __init__(self, other: str, turn: int) -> None:
        self.other, self.turn = other, turn

    def run(self) -> int:
        total = 0
        for i in range(2):
            if i % 2 == self.turn:
                time.sleep(1.2)
                self.send(2, self.other)
            else:
                total += self.receive(self.other)
        self.all_reduce(torch.ones(1))
        return total


class ReceivesInThread(Role):
    """Receives in a thread, and sends later than a wait takes to be looked at twice."""

    def __init__(self, other: str) -> None:
        self.other = other

    def run(self) -> list[int]:
        received: list[int] = []
        thread = threading.Thread(target=lambda: received.append(self.receive(self.other)))
        thread.start()
        time.sleep(2.5)
        self.send(2, self.other)
        thread.join()
        return received


class GivesUp(Role):
    """Waits until a signal comes, and sends later than the other's wait takes to be looked at twice."""

    def run(self) -> Any:
        def give_up(*_: object) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        try:
            self.receive("waits")
        except TimeoutError:
            time.sleep(2.5)
        self.send(3, "waits")


class WaitsForOneThatGivesUp(Role):
    def run(self) -> Any:
        time.sleep(1.5)  # until the other one has given up: two that wait at the same time are an error
        return self.receive("other")


class Network(Role, torch.nn.Module):
    """A role that is a network, too; returns the sum of all weights of both processes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(self.layer.weight)

    def run(self) -> float:
        return self.all_reduce(self.layer.weight.detach().sum()).item()


class Fails(Role):
    def __init__(self, how: str) -> None:
        self.how = how

    def run(self) -> None:
        time.sleep(0.3)
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "raises":
            raise ZeroDivisionError("no batch")
        elif self.how == "sends elsewhere":
            self.send(1, "critic", 3)
        elif self.how == "sums a list":
            self.all_reduce([1.0])  # type: ignore[arg-type]
        elif self.how == "sums elsewhere":
            self.all_reduce(torch.ones(1), "waits")
        else:
            assert self.how == "ends"


class Cores(Role):
    def run(self) -> tuple[list[int], int]:
        return sorted(os.sched_getaffinity(0)), torch.get_num_threads()


class ReturnsMuch(Role):
    """Returns 12 MB, in a dict of another class."""

    def run(self) -> OrderedDict[str, torch.Tensor]:
        return OrderedDict({"values": torch.arange(3_000_000, dtype=torch.float32)})


class ReturnsLittle(Role):
    """Returns the start of a large tensor, and a sparse one."""

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(4_000_000)[:2], torch.eye(2).to_sparse()


class Sums(Role):
    """Sums tensors one after the other, and returns the sums."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def run(self) -> list[list[float]]:
        return [self.all_reduce(x).tolist() for x in self.tensors]


class SumsThenReceives(Sums):
    def run(self) -> Any:
        return super().run(), self.receive("a")


class Reports(Sums):
    """Writes the error of a sum to a file, and waits until the other one has written its error as well."""

    def __init__(self, folder: Path, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.folder = folder

    def run(self) -> list[list[float]]:
        try:
            return super().run()
        except ShapeMismatchError as error:
            (self.folder / f"{self.role}.txt").write_text(str(error))
            while len(list(self.folder.glob("*.txt"))) < 2:
                time.sleep(0.01)
            raise
