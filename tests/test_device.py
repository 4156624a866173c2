"""resolve_device: indexed devices, and an error that lists what there is instead of a silent fall-back."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

from rlstruct.device import device_count, keep_freed_memory, register_backend, registered_backends, resolve_device


@pytest.mark.parametrize("word", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_every_cpu_is_the_cpu(word: str | torch.device) -> None:
    assert resolve_device(word) == torch.device("cpu")


def test_meta_is_there_without_an_index() -> None:
    assert resolve_device("meta:0") == torch.device("meta")


@pytest.mark.parametrize("word", ["gpu", "cud:0", "", "cpu:x", None, 1.5])
def test_nonsense_is_refused_with_the_devices_that_exist(word: object) -> None:
    with pytest.raises(ValueError, match=r"resolve_device: .* is not a device\. Devices here: cpu"):
        resolve_device(word)  # type: ignore[arg-type]


def test_the_simulated_accelerator_says_what_to_import(tmp_path: pathlib.Path) -> None:
    code = "from rlstruct import resolve_device; resolve_device('sim:1')"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "'sim:1' is not a device" in run.stderr
    assert "exists once rlstruct.testing.sim_device has been imported." in run.stderr


def test_cuda_without_cuda_raises_and_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = r"cuda does not exist\. Devices here: cpu.*sees no CUDA device: check the driver and torch\.version\.cuda"
    with pytest.raises(ValueError, match=message):
        resolve_device("cuda")


def test_cuda_is_cuda_0_and_an_index_beyond_the_last_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device(torch.device("cuda")) == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"cuda:2 does not exist\. Devices here: cpu, cuda:0, cuda:1[.,]"):
        resolve_device("cuda:2")


@pytest.mark.gpu
def test_cuda_where_there_is_one() -> None:
    assert resolve_device("cuda") == torch.zeros(1, device="cuda").device


def test_count_of_a_backend_that_torch_does_not_have() -> None:
    assert device_count("cpu") == device_count("meta") == 1
    assert device_count("privateuseone_of_nobody") == 0


def test_a_registered_backend_is_imported_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "backend_of_this_test.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("rlstruct.device.BACKENDS", {})
    register_backend("madeup", "backend_of_this_test")
    assert registered_backends() == {"madeup": "backend_of_this_test"}
    with pytest.raises(ValueError, match="'madeup:0' is not a device"):  # the module registers nothing with torch
        resolve_device("madeup:0")
    assert sys.modules.pop("backend_of_this_test", None) is not None


def test_the_list_of_backends_is_a_copy() -> None:
    registered_backends()["madeup"] = "nowhere"
    assert "madeup" not in registered_backends()


PAGES_OF_TEN_BLOCKS = """
import resource, torch
from rlstruct.device import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use_ten_blocks():
    before = faults()
    for _ in range(10):
        torch.zeros(16 << 20)  # 64 MB
    return faults() - before

use_ten_blocks()
handed_back = use_ten_blocks()
assert keep_freed_memory()
use_ten_blocks()
print(handed_back, use_ten_blocks())
"""


SIZE_AFTER_A_LARGE_BLOCK = """
import pathlib, re, torch
from rlstruct.device import keep_freed_memory

def size():
    return int(re.search(r"VmSize:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

assert keep_freed_memory()
before = size()
torch.empty(5 << 29, dtype=torch.uint8)  # 2.5 GB, of which nothing is written, so that it takes no real memory
print(size() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's C library is tuned")
def test_blocks_beyond_what_an_int_counts_are_kept() -> None:
    run = subprocess.run([sys.executable, "-c", SIZE_AFTER_A_LARGE_BLOCK], check=True, capture_output=True, text=True)
    assert int(run.stdout) >= (5 << 29) - (1 << 20)  # what was free before may be used


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's C library is tuned")
@pytest.mark.slow
def test_kept_memory_is_used_again_without_new_pages() -> None:
    run = subprocess.run([sys.executable, "-c", PAGES_OF_TEN_BLOCKS], check=True, capture_output=True, text=True)
    handed_back, kept = map(int, run.stdout.split())
    assert handed_back > 100
    assert kept < handed_back / 10


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstruct.device.ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is False
