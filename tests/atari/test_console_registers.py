"""Every Atari kernel, compiled for an H100 without one: its threads keep all they need in registers."""

from __future__ import annotations

import importlib
import pathlib
import pkgutil

import pytest

pytest.importorskip("warp", reason="needs the extra warp")

import warp as wp
from cubins import LOCAL_BYTES, REGISTERS, compiled, resources

import rlstruct.atari

MODULES = [f"rlstruct.atari.{module.name}" for module in pkgutil.iter_modules(rlstruct.atari.__path__)]
KERNELS = {"rlstruct.atari.frame": "run_frame", "rlstruct.atari.scoring": "score_frame",
           "rlstruct.atari.picture": "render"}  # fmt: skip
MOST_REGISTERS = 208  # of 255: 65,536 of a multiprocessor are enough for 9 warps


def test_all_kernels_are_looked_at() -> None:
    found = {
        module: name
        for module in MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, wp.Kernel) and value.module.name == module
    }
    assert found == KERNELS


@pytest.mark.slow  # up to a minute for a compiler
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", KERNELS)
def test_a_kernel_neither_spills_nor_takes_more_registers_than_it_may(module: str, tmp_path: pathlib.Path) -> None:
    needs = compiled(importlib.import_module(module), tmp_path)
    kernel = next(need for name, need in needs.items() if KERNELS[module] in name)
    assert 16 < kernel[REGISTERS] <= MOST_REGISTERS
    assert {name: need[LOCAL_BYTES] for name, need in needs.items() if need.get(LOCAL_BYTES)} == {}


def test_local_memory_is_seen(tmp_path: pathlib.Path) -> None:
    @wp.kernel(enable_backward=False, module="unique")
    def spills(numbers: wp.array(dtype=int)):
        kept = wp.zeros(shape=(64,), dtype=int)
        for k in range(64):
            kept[numbers[k] & 63] = k
        numbers[0] = kept[numbers[1] & 63]

    wp.compile_aot_module(spills.module, arch=90, module_dir=tmp_path, use_ptx=False)
    (needs,) = (need for need in resources(next(tmp_path.glob("*.cubin")).read_bytes()).values() if REGISTERS in need)
    assert needs[LOCAL_BYTES] >= 256
