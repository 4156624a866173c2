"""Every Atari kernel, compiled for an H100 without one: its threads keep all they need in registers."""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
import struct

import pytest

pytest.importorskip("warp", reason="needs the extra warp")

import warp as wp

import rlstruct.atari

MODULES = [f"rlstruct.atari.{module.name}" for module in pkgutil.iter_modules(rlstruct.atari.__path__)]
KERNELS = {"rlstruct.atari.frame": "run_frame", "rlstruct.atari.scoring": "score_frame",
           "rlstruct.atari.picture": "render"}  # fmt: skip
MOST_REGISTERS = 208  # of 255: 65,536 of a multiprocessor are enough for 9 warps
REGISTERS, LOCAL_BYTES = 0x2F, 0x11  # EIATTR_REGCOUNT and EIATTR_FRAME_SIZE in the section .nv.info


def resources(cubin: bytes) -> dict[str, dict[int, int]]:
    """Read what each kernel of a cubin needs: an ELF file, whose section .nv.info holds (format, attribute, value)."""
    begin, (size, n, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, begin + k * size) for k in range(n)]

    def text(table: int, at: int) -> str:
        first = sections[table][4] + at
        return cubin[first : cubin.index(b"\0", first)].decode()

    symbols = next(section for section in sections if section[1] == 2)
    info = next(section for section in sections if text(names, section[0]) == ".nv.info")
    needs: dict[str, dict[int, int]] = {}
    at, end = info[4], info[4] + info[5]
    while at < end:
        form, attribute, n_bytes = struct.unpack_from("<BBH", cubin, at)
        if form == 4 and attribute in (REGISTERS, LOCAL_BYTES):
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            name = text(symbols[6], struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)[0])
            needs.setdefault(name, {})[attribute] = value
        at += 4 + (n_bytes if form == 4 else 0)
    return needs


def compiled(module: str, folder: pathlib.Path, arch: int = 90) -> dict[str, dict[int, int]]:
    if arch not in wp.get_cuda_supported_archs():
        pytest.skip("this Warp has no compiler for CUDA")
    wp.compile_aot_module(importlib.import_module(module), arch=arch, module_dir=folder, use_ptx=False)
    return resources(next(folder.glob("*.cubin")).read_bytes())


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
    needs = compiled(module, tmp_path)
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
