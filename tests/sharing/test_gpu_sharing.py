"""Each worker's settings, the mode that is chosen, and refusals, on machines that are only described."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_agents import FixedAgent
from fake_envs import CountingEnv
from fake_mps import FakeMps

from rlstruct.agents import ActorCritic, ActorCriticAgent, RandomAgent
from rlstruct.algos import a2c
from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.distributed import launch
from rlstruct.algos.distributed.process_group import learner_group, local_device
from rlstruct.algos.training.build import create_batchers
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.workers import placement
from rlstruct.batchers.workers.processes import quiet_start
from rlstruct.cli.main import main
from rlstruct.errors import LearnerError, SharingError
from rlstruct.sharing import (
    GpuSharing,
    Role,
    describe,
    gpu_sharing,
    gpus,
    launch_roles,
    learners,
    mig_instances,
    mps,
    no_green_contexts,
)
from rlstruct.sims import make
from rlstruct.vec_env import VecEnv

GPU = torch.device("cuda:0")
LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11)
  MIG 1g.10gb     Device  0: (UUID: MIG-aa)
  MIG 3g.40gb     Device  1: (UUID: MIG-bb)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-33)
  MIG 1g.5gb      Device  0: (UUID: MIG-GPU-33/7/0)
"""


@pytest.fixture
def h100(fake: FakeMps, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    """A machine with one GPU, GPU-11, and with MPS; nvidia-smi comes from the fake's folder."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        "rlstruct.sharing.daemon.gpu_of", lambda device: device if isinstance(device, str) else "GPU-11"
    )
    monkeypatch.setattr(placement, "running_daemon", lambda: None)
    list_gpus(fake, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11)\n")
    return fake


def list_gpus(fake: FakeMps, listing: str) -> None:
    script = fake.folder / "bin" / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}END\n")
    script.chmod(0o755)


NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
)


class ShowingEnv(CountingEnv):
    """Writes down what its process started with."""

    def __init__(self, folder: str, seed: int) -> None:
        super().__init__(1, seed, auto_reset=True)
        shown = {name: os.environ.get(name) for name in NAMES} | {"cores": sorted(os.sched_getaffinity(0))}
        Path(folder, f"worker{seed}-{os.getpid()}.json").write_text(json.dumps(shown))


def batcher(monkeypatch: pytest.MonkeyPatch, folder: Path, **arguments: Any) -> RL_Batcher:
    """A batcher whose workers compute on the CPU and are started as those of a GPU are."""
    monkeypatch.setattr(
        "rlstruct.batchers.batcher.place_workers", lambda device, *others: GpuSharing(torch.device("cuda:0"), *others)
    )
    monkeypatch.setattr(placement, "take_cores", lambda n: [{core} for core in (list(os.sched_getaffinity(0)) * n)[:n]])
    return RL_Batcher(2, FixedAgent, ShowingEnv, env_args={"folder": str(folder)}, seed=0, n_processes=2, **arguments)


def shown(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("worker*.json"))]


def test_workers_under_mps_are_clients_of_one_private_daemon_and_pinned(
    h100: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)
    restarting = {"on_worker_error": "restart"}
    with batcher(monkeypatch, h100.folder, sharing="mps", thread_percentage=25, **restarting) as collecting:
        collecting.reset()
        os.kill(collecting.stats().pids[0], 9)
        collecting.execute()
        collecting.get()
        assert len(collecting.lost_episodes) == 1  # and a third worker was started
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        assert os.sched_getaffinity(0) == cores
        pipe = h100.environment()["CUDA_MPS_PIPE_DIRECTORY"]
        assert pipe.startswith(str(h100.folder))
    expected = {
        "CUDA_VISIBLE_DEVICES": "GPU-11",
        "CUDA_MPS_PIPE_DIRECTORY": pipe,
        "CUDA_MPS_LOG_DIRECTORY": pipe.replace("/pipe", "/log"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    found = shown(h100.folder)
    assert [worker | {"cores": None} for worker in found] == [expected | {"cores": None}] * 3
    assert [len(worker["cores"]) for worker in found] == [1, 1, 1]
    assert len({tuple(worker["cores"]) for worker in found}) == min(2, len(cores))
    assert h100.left() == []


def test_a_batcher_uses_the_daemon_of_the_block_around_it(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    with mps("GPU-11", memory_limit=2**30) as daemon:
        with batcher(monkeypatch, h100.folder, sharing="mps") as collecting:
            assert collecting.n_envs() == 2
        assert daemon.alive()
        assert len(h100.orders("daemon")) == 1
    assert {worker["CUDA_MPS_PIPE_DIRECTORY"] for worker in shown(h100.folder)} == {f"{daemon.folder}/pipe"}
    assert h100.left() == []


def test_workers_are_spread_over_the_mig_instances(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    list_gpus(h100, "".join(LISTING.splitlines(keepends=True)[:3]))
    with batcher(monkeypatch, h100.folder, sharing="auto") as collecting:
        assert collecting.n_envs() == 2
    assert [worker["CUDA_VISIBLE_DEVICES"] for worker in shown(h100.folder)] == ["MIG-aa", "MIG-bb"]
    assert h100.orders("daemon") == []


def test_processes_that_two_threads_start_inherit_nothing_from_each_other(
    h100: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_gpus(h100, "".join(LISTING.splitlines(keepends=True)[:3]))
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    placed = GpuSharing(GPU, 2, "mig")
    began, ended, found = threading.Event(), threading.Event(), {}

    def start(i: int) -> None:
        if i:
            began.wait(10.0)
        with quiet_start(), placed.starting(i):
            began.set()
            before = {name: os.environ.get(name) for name in names}
            if i:
                ended.wait(10.0)  # leave last
            else:
                time.sleep(0.3)  # the other one wants to start processes, too
            found[i] = before, {name: os.environ.get(name) for name in names}
        if not i:
            ended.set()

    threads = [threading.Thread(target=start, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    placed.close()
    for i, uuid in enumerate(("MIG-aa", "MIG-bb")):
        assert found[i] == ({"CUDA_VISIBLE_DEVICES": uuid, "OMP_NUM_THREADS": "1"},) * 2
    assert {name: os.environ.get(name) for name in names} == {"CUDA_VISIBLE_DEVICES": None, "OMP_NUM_THREADS": "7"}


def test_a_batcher_that_cannot_be_made_leaves_no_daemon(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        batcher(monkeypatch, h100.folder, sharing="mps", agent_args={"value": (i for i in range(3))})
    monkeypatch.setattr("rlstruct.batchers.workers.local.LocalLink", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batcher(monkeypatch, h100.folder, sharing="mps")
    assert len(h100.orders("daemon")) == 1
    assert h100.left() == []


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["MIG-aa", "MIG-bb", "MIG-GPU-33/7/0"]),
        ("0", ["MIG-aa", "MIG-bb"]),
        ("1", []),
        ("GPU-3", ["MIG-GPU-33/7/0"]),
        ("MIG-bb, MIG-GPU-33/7/0", ["MIG-bb", "MIG-GPU-33/7/0"]),
        ("", []),
    ],
)
def test_mig_instances_are_those_that_this_process_may_use(
    h100: FakeMps, monkeypatch: pytest.MonkeyPatch, visible: str | None, found: list[str]
) -> None:
    list_gpus(h100, LISTING)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [instance.uuid for instance in mig_instances()] == found
    assert {instance.uuid: (instance.profile, instance.gpu) for instance in mig_instances()}.get("MIG-bb") in (
        None,
        ("3g.40gb", "GPU-11"),
    )


def test_batchers_take_turns_over_the_free_cores(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4, 8, 9})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)

    def started(n: int) -> GpuSharing:
        placed = GpuSharing(GPU, n, "mps")
        with placed.starting(0):
            return placed

    first, second = started(2), started(2)
    assert (first.cores, second.cores) == ([{1}, {3}], [{4}, {8}])
    third = started(2)
    assert third.cores == []  # one is left, and there are two workers: all may use all
    first.close()
    first.close()
    again = started(3)
    assert again.cores == [{1}, {3}, {9}]
    for taken in (second, third, again):
        taken.close()
    whole = started(5)
    assert whole.cores == [{1}, {3}, {4}, {8}, {9}]
    whole.close()
    assert started(6).cores == []


@pytest.mark.parametrize(
    ("device", "n", "mode"), [("cuda:0", 4, "mps"), ("cuda:0", 1, "none"), ("cuda:0", 0, "none"), ("cpu", 4, "none")]
)
def test_auto_takes_mps_where_processes_share_a_gpu(h100: FakeMps, device: str, n: int, mode: str) -> None:
    chosen = GpuSharing(torch.device(device), n, "auto", 50)
    assert chosen.mode == mode
    assert [len(chosen.environment(worker)) for worker in range(n)] == [4 if mode == "mps" else 0] * n
    chosen.close()
    assert h100.left() == []


@pytest.mark.parametrize("obstacle", ["second GPU", "daemon", "49 processes", "no program", "dies"])
def test_auto_shares_in_turns_and_says_why(
    h100: FakeMps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    if obstacle == "daemon":
        monkeypatch.setattr(placement, "running_daemon", lambda: Path("/tmp/nvidia-mps"))
    if obstacle == "no program":
        monkeypatch.setenv("PATH", "/nowhere")
    if obstacle == "dies":
        h100.fault("dies")
    device = torch.device("cuda:1" if obstacle == "second GPU" else "cuda:0")
    warns = pytest.warns(UserWarning, match="take turns on the GPU")
    with caplog.at_level("INFO", "rlstruct"), contextlib.nullcontext([]) if obstacle == "daemon" else warns as warned:
        assert GpuSharing(device, 49 if "49" in obstacle else 2, "auto").environment(0) == {}
    said = {
        "second GPU": "each worker would see one GPU",
        "daemon": "an MPS daemon runs already (/tmp/nvidia-mps)",
        "49 processes": "MPS serves 48 at most",
        "no program": "no program nvidia-cuda-mps-control",
        "dies": "no device is there",
    }
    assert {warning.filename for warning in warned} <= {__file__}
    assert said[obstacle] in caplog.text + "".join(str(warning.message) for warning in warned)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((GPU, 2, "mpi"), "sharing is 'mpi', expected 'none', 'mps', 'mig' or 'auto'"),
        ((torch.device("cpu"), 2, "mps"), "device='cpu' and n_processes=2, expected worker processes on a GPU"),
        ((GPU, 0, "mig"), r"n_processes=0, expected worker .* Pass device='cuda:0' and n_processes=2"),
        ((torch.device("cuda:1"), 2, "mps"), "sees one GPU, as cuda:0. Start the program with CUDA_VISIBLE_DEVICES=1"),
        ((GPU, 2, "mps", 0), "thread_percentage is 0, expected more than 0"),
        ((GPU, 2, "none", 50), "only MPS limits threads. Pass sharing='mps'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(h100: FakeMps, arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"RL_Batcher: .*{said}"):
        GpuSharing(*arguments)
    assert h100.orders("daemon") == []


def test_what_a_machine_lacks_is_named_with_the_mend(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SharingError, match=r"sees no MIG instance, and creates none.*sharing='mps'"):
        GpuSharing(GPU, 2, "mig")
    with pytest.raises(SharingError, match=r"n_processes is 49, MPS serves 48 at most\. Start fewer"):
        GpuSharing(GPU, 49, "mps")
    list_gpus(h100, LISTING)
    with pytest.raises(SharingError, match=r"split into 3 MIG instances\. Pass sharing='mig'"):
        GpuSharing(GPU, 2, "mps")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SharingError, match=r"no program nvidia-cuda-mps-control.*nvidia-compute-utils"):
        GpuSharing(GPU, 2, "mps")
    assert h100.orders("daemon") == []


def test_the_machine_is_described(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'sharing="mps": many processes' in "\n".join(describe())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11")
    list_gpus(h100, LISTING)
    text = "\n".join(describe())
    assert "CUDA_VISIBLE_DEVICES=GPU-11" in text
    assert "3g.40gb MIG-bb" in text
    assert 'sharing="mig"' in text
    list_gpus(h100, "")
    monkeypatch.setattr(placement, "running_daemon", lambda: Path("/tmp/nvidia-mps"))
    assert "does it" in describe()[-1]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    assert any("no program nvidia-cuda-mps-control" in line for line in describe())


def test_green_contexts_are_for_a_torch_with_disjoint_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no torch.cuda.green_contexts.SMPartition" in no_green_contexts()
    monkeypatch.setattr(torch.cuda.green_contexts, "SMPartition", object, raising=False)
    assert no_green_contexts() == ""


def test_learners_are_spread_over_the_gpus_with_a_daemon_for_each(
    h100: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_gpus(h100, "".join(line for line in LISTING.splitlines(keepends=True) if "MIG" not in line))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-11")
    assert gpus() == ["GPU-33", "GPU-11"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus() == ["GPU-11", "GPU-22", "GPU-33"]
    sharing = GpuSharing(torch.device("cuda"), 96, "mps", 30, gpus=gpus()[:2])  # 48 on each
    found = [sharing.environment(rank) for rank in range(4)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["GPU-11", "GPU-22", "GPU-11", "GPU-22"]
    assert found[0] == found[2]
    assert found[0]["CUDA_MPS_PIPE_DIRECTORY"] != found[1]["CUDA_MPS_PIPE_DIRECTORY"]
    assert found[1]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert len(h100.orders("daemon")) == 2
    sharing.close()
    assert h100.left() == []
    list_gpus(h100, LISTING)
    found = [GpuSharing(GPU, 2, "mig", gpus=chosen).environment(1) for chosen in ([], ["GPU-33"])]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["MIG-bb", "MIG-GPU-33/7/0"]
    list_gpus(h100, "")
    with pytest.raises(SharingError, match=r"A2CConfig: sharing='mps': n_processes is 49, MPS serves 48"):
        GpuSharing(torch.device("cuda"), 97, "mps", gpus=["GPU-11", "GPU-22"], where="A2CConfig")


class SharingConfig(A2CConfig):
    """Settings of learners that compute on the CPU and are started as those of a GPU are."""

    def learners_share_gpus(self) -> bool:
        return self.n_learners > 1


SHARING = SharingConfig(
    n_env_steps=64, n_envs=2, n_timesteps=16, n_processes=0, n_learners=2, evaluation_processes=0,
    evaluation_episodes=1, sharing="mps", thread_percentage=40,
)  # fmt: skip


@pytest.fixture
def learners_of_a_gpu(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    """The machine; what this process joins is forgotten afterwards."""
    monkeypatch.setattr(
        learners, "GpuSharing", lambda device, *others, **named: GpuSharing(torch.device("cuda"), *others, **named)
    )
    monkeypatch.setattr(learners, "JOINED", {})
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = "CUDA_MPS_PIPE_DIRECTORY"
    monkeypatch.setattr(placement, "running_daemon", lambda: Path(os.environ[found]) if found in os.environ else None)
    yield h100
    for sharing in learners.JOINED.values():
        sharing.close()


def test_the_first_learner_gets_its_share_once_and_before_it_uses_cuda(
    learners_of_a_gpu: FakeMps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert launch.share_gpus(replace(SHARING, sharing="none", n_learners=1)) is None
    monkeypatch.setattr(gpu_sharing, "cuda_in_use", lambda: True)
    with pytest.raises(SharingError, match=r"SharingConfig: sharing='mps': this process uses CUDA already.*or pass"):
        launch.share_gpus(SHARING)
    with caplog.at_level("INFO", "rlstruct"):
        alone = launch.share_gpus(replace(SHARING, sharing="auto"))
    assert alone is not None
    assert alone.environment(1) == {}
    assert "takes turns on the GPU: this process uses CUDA already" in caplog.text
    assert learners_of_a_gpu.orders("daemon") == []
    monkeypatch.setattr(gpu_sharing, "cuda_in_use", lambda: False)
    sharing = launch.share_gpus(SHARING)
    assert sharing is not None
    assert {name: os.environ.get(name) for name in NAMES} == sharing.environment(1)
    monkeypatch.setattr(gpu_sharing, "cuda_in_use", lambda: True)  # as the first one of them, by now
    assert launch.share_gpus(replace(SHARING, n_learners=3)) is sharing
    assert GpuSharing(GPU, 2, "mps", 20).environment(1) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}  # a worker
    assert len(learners_of_a_gpu.orders("daemon")) == 1


def test_torchrun_gives_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LearnerError, match="torchrun has started the learners, and only those of n_learners"):
        a2c.train(SHARING, partial(ActorCritic, 4, 2), ActorCriticAgent, partial(showing_sim, "nowhere"))


def showing_sim(folder: str, n_envs: int, seed: int) -> VecEnv:
    """CartPoles that write down what their process started with."""
    shown = {name: os.environ.get(name) for name in NAMES} | {"cores": sorted(os.sched_getaffinity(0))}
    Path(folder, f"worker{learner_group().rank}-{os.getpid()}.json").write_text(json.dumps(shown))
    return make("CartPole-v1", n_envs, seed, auto_reset=True)


@pytest.mark.slow
def test_learners_are_clients_of_one_daemon_and_train_as_one(learners_of_a_gpu: FakeMps) -> None:
    folder, cores = learners_of_a_gpu.folder, os.sched_getaffinity(0)
    factories = partial(ActorCritic, 4, 2), ActorCriticAgent, partial(showing_sim, str(folder))
    found = a2c.train(SHARING, *factories)
    assert len(multiprocessing.active_children()) == 0
    expected = {
        "CUDA_VISIBLE_DEVICES": "GPU-11",
        "CUDA_MPS_PIPE_DIRECTORY": learners_of_a_gpu.environment()["CUDA_MPS_PIPE_DIRECTORY"],
        "CUDA_MPS_LOG_DIRECTORY": learners_of_a_gpu.environment()["CUDA_MPS_LOG_DIRECTORY"],
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40",
        "cores": sorted(cores),
    }
    workers = shown(folder)
    assert len(workers) >= 2
    assert all(worker == expected for worker in workers)
    assert {path.name[:7] for path in folder.glob("worker*")} == {"worker0", "worker1"}
    assert len(learners_of_a_gpu.orders("daemon")) == 1
    assert len(learners_of_a_gpu.left()) == 3  # daemon, server, folder: the model of this process may be on the GPU
    alone = a2c.train(replace(SHARING, n_learners=1, sharing="none", thread_percentage=None), *factories)
    for mine, theirs in zip(found.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


class ShowingRole(Role):
    """Returns what its process started with."""

    def run(self) -> dict[str, str | None]:
        return {"device": self.device} | {name: os.environ.get(name) for name in NAMES}


@pytest.mark.slow
def test_roles_are_clients_of_a_daemon_on_each_gpu(h100: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    list_gpus(h100, "GPU 0: NVIDIA H100 (UUID: GPU-11)\nGPU 1: NVIDIA H100 (UUID: GPU-22)\n")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    roles = {"collector": [ShowingRole(), ShowingRole()], "trainer": [ShowingRole()]}
    results = launch_roles(roles, device="cuda", sharing="mps", thread_percentage=25)
    assert {role: len(each) for role, each in results.items()} == {"collector": 2, "trainer": 1}
    assert len(h100.orders("daemon")) == 2
    assert h100.left() == []
    first, second, third = (*results["collector"], *results["trainer"])
    assert third == first
    assert first["CUDA_MPS_PIPE_DIRECTORY"] != second["CUDA_MPS_PIPE_DIRECTORY"]
    for one, gpu in ((first, "GPU-11"), (second, "GPU-22")):
        pipe = one["CUDA_MPS_PIPE_DIRECTORY"]
        assert one == {
            "device": "cuda:0", "CUDA_VISIBLE_DEVICES": gpu, "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "CUDA_MPS_LOG_DIRECTORY": pipe.replace("/pipe", "/log"), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        }  # fmt: skip
    (alone,) = launch_roles({"trainer": [ShowingRole()]}, device="cuda:0", sharing="mps")["trainer"]
    assert (alone["CUDA_VISIBLE_DEVICES"], alone["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("GPU-11", None)
    assert h100.left() == []


def test_roles_are_spread_over_gpus_as_learners_are(
    h100: FakeMps, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    list_gpus(h100, "".join(LISTING.splitlines(keepends=True)[:3]))
    placed = learners.place_roles(torch.device("cuda"), 3, "auto", None)
    assert [placed.environment(i)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["MIG-aa", "MIG-bb", "MIG-aa"]
    list_gpus(h100, "GPU 0: NVIDIA H100 (UUID: GPU-11)\nGPU 1: NVIDIA H100 (UUID: GPU-22)\n")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [local_device(device, rank) for device in ("cuda", "cuda:1", "cpu") for rank in range(3)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0", *["cuda:1"] * 3, *["cpu"] * 3]
    with pytest.raises(ValueError, match=r"launch_roles: sharing='mps' with device='cuda:1': each worker sees one GPU"):
        launch_roles({"trainer": [ShowingRole()]}, device="cuda:1", sharing="mps")
    assert learners.place_roles(torch.device("cuda"), 2, "none", None).environment(1) == {}
    assert not recwarn.list  # each of them has its own GPU
    with pytest.warns(UserWarning, match="launch_roles: 3 processes on cuda open 3 CUDA contexts"):
        learners.place_roles(torch.device("cuda"), 3, "none", None)


def test_a_number_that_may_be_another_gpu_is_refused(
    h100: FakeMps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, every = torch.device("cuda:0"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    list_gpus(h100, "GPU 0: NVIDIA T4 (UUID: GPU-11)\nGPU 1: NVIDIA H100 (UUID: GPU-22)\n")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    said = (
        r"launch_roles: sharing='mps': .*\(NVIDIA H100, NVIDIA T4\).*cuda:0 may be .* Set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )
    with pytest.raises(SharingError, match=said):
        launch_roles({"trainer": [ShowingRole()]}, device="cuda:0", sharing="mps")
    with caplog.at_level("INFO", "rlstruct"):
        assert learners.place_roles(first, 1, "auto", None).environment(0) == {}
    assert "launch_roles(sharing='auto') takes turns on the GPU: this machine has GPUs of different" in caplog.text

    def visible(device: torch.device) -> str:
        placed = learners.place_roles(device, 2, "mps", None)
        try:
            return placed.environment(0)["CUDA_VISIBLE_DEVICES"]
        finally:
            placed.close()

    assert visible(every) == "GPU-11"  # the other process gets the other one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(SharingError, match="CUDA_VISIBLE_DEVICES=1 may be another GPU"):
        visible(every)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert visible(first) == "GPU-22"
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-22")
    assert visible(first) == "GPU-22"


def test_trainings_share_as_their_settings_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("rlstruct.algos.training.build.RL_Batcher", lambda *arguments, **named: made.append(named))
    config = A2CConfig(n_processes=2, batcher_device="cuda:0", sharing="mps", thread_percentage=25)
    for create in create_batchers(config, RandomAgent, CountingEnv, {}, torch.nn.Linear(1, 1), 0):
        create()
    collecting, evaluating = made
    assert (collecting["sharing"], collecting["thread_percentage"]) == ("mps", 25)
    assert "sharing" not in evaluating
    for settings in ({"n_processes": 2}, {"n_learners": 2}, {"learner_device": "cuda", "n_processes": 0}):
        with pytest.raises(
            ValueError, match="A2CConfig: sharing is 'mps', expected 'none' or 'auto', or worker processes"
        ):
            A2CConfig(**settings, sharing="mps")
    assert A2CConfig(n_learners=2, learner_device="cuda", n_processes=0, sharing="mig").learners_share_gpus()
    assert main(["train", "a2c", "--env", "CartPole-v1", "--sharing", "mps"]) == 2
    boxed = capsys.readouterr().err.replace("│", " ")
    assert "sharing is 'mps', expected 'none' or 'auto'" in " ".join(boxed.split())
