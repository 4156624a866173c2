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
KERNELS = {"rlstruct.atari.frame": {"run_frame", "draw_frame"}, "rlstruct.atari.scoring": {"score_frame"},
           "rlstruct.atari.picture": {"render"}}  # fmt: skip
# Of 255. A multiprocessor has 65,536 for its warps: 16 of `run_frame`, 20 of `draw_frame`.
MOST_REGISTERS = {"run_frame": 128, "draw_frame": 96, "score_frame": 64, "render": 128}


def test_all_kernels_are_looked_at() -> None:
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, wp.Kernel) and value.module.name == module:
                found.setdefault(module, set()).add(name)
    assert found == KERNELS


@pytest.mark.slow  # up to a minute for a compiler
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", KERNELS)
def test_a_kernel_neither_spills_nor_takes_more_registers_than_it_may(module: str, tmp_path: pathlib.Path) -> None:
    needs = compiled(importlib.import_module(module), tmp_path)
    for kernel in KERNELS[module]:
        (need,) = (need for name, need in needs.items() if name.startswith(kernel))
        assert 16 < need[REGISTERS] <= MOST_REGISTERS[kernel]
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
