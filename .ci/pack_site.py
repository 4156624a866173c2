"""Pack the packages that a GPU machine without a network needs into five small archives.

    python3 .ci/pack_site.py build/site        on a machine with a network; about 6 minutes on one core

On the GPU machine, `.ci/on_gpu.py` unpacks build/site into build/packages. git ignores both, so they survive between
commands on a borrowed machine. If only 64 MiB can be copied at a time, which the files of the tree and the first two
archives just fit, send those with the first command and the others with the second. If that machine has no pytest or
hypothesis, the tests of the first command then run in the second one; to have them in the first, send 2-warp alone
before, with a command that does nothing, and all others with the first.

``1-packages.tar.xz`` and ``2-warp.tar.xz``, 56 MB together, hold what collection, learning and Atari need on a GPU:
cloudpickle, gymnasium, ale-py with its ROMs, and Warp with machine code for one architecture only. ``3-cpu.tar.xz``
holds Warp's CPU compiler, for tests that compare a GPU with the CPU; ``4-mujoco.tar.xz`` MuJoCo and MuJoCo Warp, for
the tests of `MujocoWarpEnv` (JAX for CUDA is too large); ``5-tests.tar.xz`` pytest and hypothesis. torch and numpy are
not packed: they must be installed. Versions are those of constraints.txt, where it names one.
"""

from __future__ import annotations

import argparse
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gymnasium", "farama-notifications", "cloudpickle", "warp-lang", "ale-py")
PACKAGES += ("pytest", "iniconfig", "packaging", "pluggy", "pygments", "pytest-timeout")
PACKAGES += ("hypothesis", "sortedcontainers")
PACKAGES += ("mujoco-warp", "mujoco", "mujoco-core", "absl-py", "etils")
UNUSED = re.compile(
    r"warp/(tests|examples|fem|_src/fem)/|warp/native/.*\.(cpp|cu)$|\.pyi$"
    r"|ale_py/libSDL2|gymnasium/.*\.png$"  # for a screen
    r"|pygments/(lexers|styles|formatters)/(?!_|python|diff|terminal\.|default)"
)
ARCHIVES = {  # the first pattern that matches a file decides
    "5-tests": r"^_?(pytest|hypothesis|iniconfig|packaging|pluggy|pygments|sortedcontainers)|^py\.py",
    "4-mujoco": r"^(mujoco|absl|etils)",
    "3-cpu": r"warp/bin/warp-clang",
    "2-warp": r"warp/bin/warp\.so",
    "1-packages": r"",
}
FIRST = ("1-packages", "2-warp")  # for the first command
LIMIT = 64 << 20  # bytes that a borrowed machine takes at a time, with the files of the tree
_PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_CONTAINER, _CUBIN = 0xBA55ED50, 2  # magic number of fatbins; kind of a part with machine code


def download(folder: Path, python: str) -> None:
    """Download the wheels and unpack them."""
    pins = dict(re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins["mujoco-core"] = pins["mujoco"]
    names = [f"{name}=={pins[name]}" if name in pins else name for name in PACKAGES]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--implementation", "cp", "--python-version", python]
    subprocess.run([*command, *(f"--platform={name}" for name in _PLATFORMS), *names], check=True)
    for wheel in folder.glob("*.whl"):
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(folder / "site")], check=True)


def trim(data: bytearray, architecture: int) -> int:
    """Zero all device code except one architecture's machine code, in place; return the number of zeroed bytes."""
    begin, size = _section(data, b".nv_fatbin")
    zeroed, at = 0, begin
    while at < begin + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != _CONTAINER:
            at += 8
            continue
        part, at = at + header, at + header + length
        while part < at:
            kind, _, header, length = struct.unpack_from("<HHIQ", data, part)
            (its,) = struct.unpack_from("<I", data, part + 28)
            if kind != _CUBIN or its != architecture:
                data[part + header : part + header + length] = bytes(length)
                zeroed += length
            part += header + length
    return zeroed


def _section(data: bytearray, wanted: bytes) -> tuple[int, int]:
    """Return the offset and size of a section of a 64-bit ELF file."""
    (headers,) = struct.unpack_from("<Q", data, 0x28)
    n, names = struct.unpack_from("<HH", data, 0x3C)
    read = [struct.unpack_from("<IIQQQQIIQQ", data, headers + 64 * i) for i in range(n)]
    for header in read:
        name = read[names][4] + header[0]
        if data[name : name + len(wanted) + 1] == wanted + b"\0":
            return header[4], header[5]
    raise SystemExit(f"pack_site: no section {wanted.decode()}")


def pack(site: Path, archive: Path, files: list[Path]) -> None:
    """Compress files into an archive. The x86 filter makes targets of jumps absolute, so that they repeat."""
    size = max(1 << 20, min(384 << 20, sum(file.stat().st_size for file in files)))
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": size, "lc": 4, "lp": 0, "pb": 0}
    filters = [{"id": lzma.FILTER_X86}, lzma2]
    with lzma.open(archive, "wb", filters=filters) as whole, tarfile.open(fileobj=whole, mode="w") as tar:
        for file in files:
            tar.add(file, str(file.relative_to(site)))
    print(f"{archive}: {archive.stat().st_size:,} bytes", flush=True)


def main() -> None:
    """Download, trim and pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the archives")
    parser.add_argument(
        "--architecture", type=int, default=90, help="compute capability of the GPU: 90 for H100 and H200"
    )
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        download(Path(scratch), options.python)
        library = site / "warp" / "bin" / "warp.so"
        contents = bytearray(library.read_bytes())
        print(f"{library.name}: {trim(contents, options.architecture):,} of {len(contents):,} bytes zeroed", flush=True)
        library.write_bytes(contents)
        files = [file for file in sorted(site.rglob("*")) if file.is_file()]
        files = [file for file in files if not UNUSED.search(str(file.relative_to(site)))]
        for name, pattern in ARCHIVES.items():
            chosen = [file for file in files if re.search(pattern, str(file.relative_to(site)))]
            files = [file for file in files if file not in chosen]
            pack(site, options.out / f"{name}.tar.xz", chosen)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sent = [ROOT / name for name in names.split("\0") if name]
    sent += [options.out / f"{name}.tar.xz" for name in FIRST]
    size = sum(file.stat().st_size for file in sent)
    print(f"The first command sends {size:,} bytes: the files of the tree, {' and '.join(FIRST)}.")
    if size > LIMIT:
        print(f"That is more than {LIMIT:,} bytes: send 2-warp before, with a command that does nothing.")


if __name__ == "__main__":
    main()
