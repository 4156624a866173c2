"""A backend, and a transport, of somebody else: registered in one line, with the trajectories of ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from fake_agents import RngAgent
from fake_envs import create_counting_env
from torch import Tensor

from rlstruct import Trajectories
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.backend import BACKENDS, BackendSettings
from rlstruct.batchers.in_process import InProcess
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.batchers.workers.pool import WorkerPool
from rlstruct.batchers.workers.transport import Executed, Order, PublishedWeights
from rlstruct.batchers.workers.worker import Worker
from rlstruct.engine.torch_private import TorchDispatchMode
from rlstruct.sims import CartPole


class InlineLink:
    """A worker that carries out orders in this process, as soon as they are sent."""

    pid = None

    def __init__(self, factory: bytes) -> None:
        self.progress = Progress(torch.zeros(3, dtype=torch.int64))
        self.answers: deque[Any] = deque()
        memories = [SharedBlock().map, SharedBlock().map]
        self._worker = Worker(factory, {}, self.progress, memories, lambda weights: weights.place)
        self._worker.begin()

    def send(self, order: Order, seconds: float) -> None:
        try:
            self.answers.append(self._worker.carry_out(order))
        except Exception as error:
            self.answers.append(self._worker.describe(error))

    def receive(self) -> Any:
        return self.answers.popleft() if self.answers else None

    def steps(self, batch: Executed, buffer: int) -> Rollout:
        return Rollout(self._worker.buffers[buffer])

    def where(self) -> str:
        return "in this process"

    def ended(self) -> bool:
        return False

    def death(self) -> str:
        return "ended"

    def stop(self) -> None:
        self._worker.close()

    def join(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        pass

    def close(self) -> None:
        self.answers.clear()


class InlineTransport:
    """Workers in this process, which read the weights where they are copied."""

    is_local = False

    def __init__(self) -> None:
        self.links: dict[int, InlineLink] = {}

    def open(self, index: int, factory: bytes) -> InlineLink:
        self.links[index] = InlineLink(factory)
        return self.links[index]

    def publish(
        self, weights: Mapping[str, Tensor], version: int, in_use: Sequence[PublishedWeights]
    ) -> PublishedWeights | None:
        return PublishedWeights(version, None, {key: tensor.clone() for key, tensor in weights.items()})  # type: ignore[arg-type]

    def wait(self, seconds: float) -> list[int]:
        return [index for index, link in self.links.items() if link.answers]

    def n_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def create_inline_pool(settings: BackendSettings) -> WorkerPool:
    return WorkerPool(settings, InlineTransport())


def collect(n_processes: int, cluster: str | None = None, n_envs: int = 1) -> list[Trajectories]:
    env_args = {"n_envs": n_envs, "auto_reset": True}
    with RL_Batcher(
        5, RngAgent, create_counting_env, env_args=env_args, n_processes=n_processes, seed=3, cluster=cluster
    ) as batcher:
        batcher.reset()
        batches = []
        for _ in range(3):
            batcher.execute()
            batches.append(batcher.get()[0])
    return batches


@pytest.mark.parametrize(
    ("target", "n_envs"), [(f"{__name__}:create_inline_pool", 1), (f"{InProcess.__module__}:InProcess", 2)]
)
def test_a_registered_backend_collects_what_ours_collect(
    target: str, n_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "mine", target)
    for mine, ours in zip(collect(2, "mine://here", n_envs), collect(0, n_envs=2), strict=True):
        for key, value in ours.steps.items():
            assert torch.equal(mine.steps[key], value), key
        assert mine.info["env_seed"].tolist() == [3, 4]


class Fetched(TorchDispatchMode):
    """Notes the size of each copy from an accelerator to the CPU, and whether it went to pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        source = {"_to_copy": args[:1], "copy_": args[1:2]}.get(name, ())
        if source and not source[0].is_cpu and answer.is_cpu:
            self.copies.append((answer.nbytes, answer.is_pinned() if source[0].is_cuda else False))
        return answer


@pytest.mark.parametrize("device", ["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_batch_leaves_a_workers_accelerator_in_one_copy(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "sim:0":
        import rlstruct.testing.sim_device  # noqa: F401 - makes it known
    monkeypatch.setitem(BACKENDS, "mine", f"{__name__}:create_inline_pool")
    env_args = {"n_envs": 3, "device": device}
    batches: dict[str | None, list[Trajectories]] = {}
    for cluster in ("mine://here", None):
        with RL_Batcher(
            5,
            RngAgent,
            CartPole,
            env_args=env_args,
            n_processes=0 if cluster is None else 1,
            seed=3,
            device=device,
            cluster=cluster,
        ) as batcher:
            batcher.reset()
            batches[cluster] = []
            for _ in range(3):
                with Fetched() as fetched:
                    batcher.execute()
                batches[cluster].append(batcher.get()[0])
                size = sum(value.nbytes for value in batches[cluster][-1].steps.values())
                if cluster is not None:
                    # Counts of wrong actions, 40 bytes, are read later.
                    (n_bytes,) = (n for n, _ in fetched.copies if n > 40)
                    assert size / 2 < n_bytes < 2 * size
                    assert {pinned for _, pinned in fetched.copies} == {device == "cuda:0"}
    for found, expected in zip(batches["mine://here"], batches[None], strict=True):
        for key, value in expected.steps.items():
            assert torch.equal(found.steps[key], value), key
            assert str(found.steps[key].device) == device


def test_an_unknown_backend_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"names the backend 'yours', expected one of \['process', 'ray', 'workers'\]"):
        collect(1, "yours://there")


def test_what_fails_in_an_inline_worker_is_a_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "mine", f"{__name__}:create_inline_pool")
    batcher = RL_Batcher(5, RngAgent, lambda seed: 3, n_processes=1, cluster="mine://here")  # type: ignore[arg-type, return-value]
    with batcher, pytest.raises(RuntimeError, match="create_env returned an int, expected a VecEnv"):
        batcher.reset()
