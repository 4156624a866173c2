"""The daemon's life, against a fake: its orders, its environment, and that nothing of it is left however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_mps import FakeMps, is_alive

from rlstruct.errors import SharingError
from rlstruct.sharing import mps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS is for Linux")


def test_a_daemon_is_private_asked_and_ended(fake: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somebody/elses")
    monkeypatch.setenv("CUDA_MPS_PROTOCOL_VERSION", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    with mps("GPU-a") as daemon:
        (pid,), (server,) = fake.orders("daemon"), fake.orders("server")
        assert is_alive(pid)
        assert is_alive(server)
        assert daemon.folder.stat().st_mode & 0o777 == 0o700
        expected = {
            "CUDA_VISIBLE_DEVICES": "GPU-a",
            "CUDA_MPS_PIPE_DIRECTORY": f"{daemon.folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{daemon.folder}/log",
        }
        assert fake.environment() == expected
        assert daemon.environment() == expected
        assert daemon.environment(12.5) == expected | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5"}
        assert daemon.ask("get_server_list") == str(server)
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/somebody/elses"
    assert fake.left() == []
    commands = fake.orders("command")
    assert commands[0] == "get_default_active_thread_percentage"
    assert f"start_server -uid {os.getuid()}" in commands
    assert commands[-1] == "quit -t 3"


def test_limits_of_each_client_are_those_of_the_daemon(fake: FakeMps) -> None:
    with mps("GPU-a", thread_percentage=30, memory_limit=3 * 2**30) as daemon:
        environment = fake.environment()
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=3072M"
        assert daemon.ask("get_default_active_thread_percentage") == "30"


def test_two_blocks_for_one_gpu_have_one_daemon_and_two_gpus_have_two(fake: FakeMps) -> None:
    with mps("GPU-a", thread_percentage=50) as outer:
        with mps("GPU-a") as inner, mps("GPU-b") as other:
            assert inner is outer
            assert other.folder != outer.folder
            assert len(fake.orders("daemon")) == 2
            with pytest.raises(ValueError, match=r"\(50, None\)\. Pass the same"), mps("GPU-a", thread_percentage=20):
                pass
        assert outer.ask("get_server_list") == str(fake.orders("server")[0])
        assert [is_alive(pid) for pid in fake.orders("daemon")] == [True, False]
    assert fake.left() == []
    with mps("GPU-a"):
        assert len(fake.orders("daemon")) == 3


def test_a_daemon_that_ends_at_once_is_an_error_with_what_it_said(fake: FakeMps) -> None:
    fake.fault("dies")
    with (
        pytest.raises(SharingError, match=r"GPU-a ended at once[\s\S]*sharing='none'[\s\S]*no device is there"),
        mps("GPU-a"),
    ):
        pass
    assert fake.left() == []


@pytest.mark.parametrize(("fault", "command"), [("mute", "get_default"), ("no_server", "get_server_status")])
def test_a_daemon_that_does_not_answer_is_an_error_in_time(fake: FakeMps, fault: str, command: str) -> None:
    fake.fault(fault)
    start = time.monotonic()
    with pytest.raises(SharingError, match=f"not ready within 1 s: '{command}"), mps("GPU-a", seconds=1.0):
        pass
    assert time.monotonic() - start < 30
    assert fake.left() == []


def test_a_daemon_that_will_not_end_is_killed_with_its_server(fake: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.fault("stubborn")
    start = time.monotonic()
    with mps("GPU-a"):
        pass
    assert time.monotonic() - start < 30
    assert fake.left() == []


def test_an_exception_in_the_block_ends_the_daemon(fake: FakeMps) -> None:
    with pytest.raises(ZeroDivisionError), mps("GPU-a"):
        raise ZeroDivisionError
    assert fake.left() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_a_signal_ends_leaves_no_daemon(fake: FakeMps, number: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            with mps("GPU-a"):
                (fake.folder / "ready").touch()
                time.sleep(60)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 30
    while not (fake.folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(fake.left()) == 3  # daemon, server, folder
    os.kill(child, number)
    os.waitpid(child, 0)
    fake.assert_nothing_left()


def test_a_forked_child_leaves_its_parents_daemon_alone(fake: FakeMps) -> None:
    with mps("GPU-a") as daemon:
        child = os.fork()
        if child == 0:
            daemon.end()
            time.sleep(60)  # holds the pipe to the supervisor open
            os._exit(0)
        time.sleep(0.2)
        assert len(fake.left()) == 3
    assert fake.left() == []
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_signals_to_the_group_do_not_end_the_daemon_before_its_clients(fake: FakeMps) -> None:
    with mps("GPU-a") as daemon:
        supervisor = int(Path(f"/proc/{fake.orders('daemon')[0]}/stat").read_text().rpartition(")")[2].split()[1])
        assert os.getsid(supervisor) == supervisor
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(supervisor, number)
        time.sleep(0.2)
        assert daemon.alive()
        assert daemon.ask("get_server_list")


def test_a_daemon_that_ends_by_itself_is_reported(fake: FakeMps) -> None:
    with contextlib.ExitStack() as block:
        daemon = block.enter_context(mps("GPU-a"))
        os.kill(fake.orders("daemon")[0], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while daemon.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(SharingError, match=r"ended by itself\. Leave the block"), mps("GPU-a"):
            pass
        with pytest.warns(UserWarning, match=r"daemon of GPU-a had ended by itself[\s\S]*fake daemon"):
            block.close()
    assert fake.left() == []  # its server too


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(SharingError, match=r"no program nvidia-cuda-mps-control[\s\S]*nvidia-compute-utils"),
        mps("GPU-a"),
    ):
        pass


@pytest.mark.parametrize(
    ("device", "limits", "said"),
    [
        ("cpu", {}, "the device is cpu, expected a CUDA device"),
        ("GPU-a", {"thread_percentage": 0}, "thread_percentage is 0, expected more than 0"),
        ("GPU-a", {"thread_percentage": 101}, "at most 100"),
        ("GPU-a", {"memory_limit": 8}, "memory_limit is 8, expected at least 1048576, or None"),
    ],
)
def test_wrong_arguments_start_nothing(fake: FakeMps, device: str, limits: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said), mps(device, **limits):
        pass
    assert fake.orders("daemon") == []


def test_clients_get_there(fake: FakeMps) -> None:
    with mps("GPU-a") as daemon:
        order = [str(fake.folder / "bin" / "nvidia-cuda-mps-control")]
        environment = os.environ | daemon.environment(25)
        run = subprocess.run(
            order, input="get_server_list\n", env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == str(fake.orders("server")[0])
