"""Registers and stack of Warp's kernels on an H100, read from their cubins: compiled without a GPU, or its driver."""

from __future__ import annotations

import pathlib
import struct
from typing import Any

import pytest
import warp as wp

REGISTERS, LOCAL_BYTES = 0x2F, 0x11  # EIATTR_REGCOUNT and EIATTR_FRAME_SIZE in the section .nv.info


def compiled(module: Any, folder: pathlib.Path, arch: int = 90) -> dict[str, dict[int, int]]:
    """Compile a module of kernels, and return the `resources` of each."""
    if arch not in wp.get_cuda_supported_archs():
        pytest.skip("this Warp has no compiler for CUDA")
    wp.compile_aot_module(module, arch=arch, module_dir=folder, use_ptx=False)
    return resources(next(folder.glob("*.cubin")).read_bytes())


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
