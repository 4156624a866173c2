"""PTX of a Warp kernel, run on a CPU: every thread's instructions are counted, and those of a warp that diverges.

A kernel is compiled for a GPU by Warp (which needs no driver), translated to C block by block, and compiled by ``cc``.
Its memory is that of CPU arrays. Only what our kernels use is translated; anything else raises `NotImplementedError`.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import warp as wp

_KINDS = {"p": "uint8_t", "rs": "uint16_t", "r": "uint32_t", "rd": "uint64_t", "f": "float"}
_TYPES = {
    **{f"{sign}{bits}": f"{'' if sign == 's' else 'u'}int{bits}_t" for sign in "sub" for bits in (8, 16, 32, 64)},
    "pred": "uint8_t", "f32": "float",
}  # fmt: skip
_BINARY = {"and": "&", "or": "|", "xor": "^", "add": "+", "sub": "-", "mul": "*"}
_PASS = 8  # numbers in a row of passes: thread, at most 5 nested loops, head, instructions
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

_DRIVER = """
static int immediate[N_BLOCKS] = {IMMEDIATE};
static int length[N_BLOCKS] = {LENGTH};
static int depth[N_BLOCKS] = {DEPTH};  /* of the loop that begins there; 0 for none */

/* Run threads one by one. A row of `passes` is a pass of a loop: its thread, passes of the outer loops and
   of this one so far, its head, and the instructions that it took until the next pass of any loop. */
long run_threads(char *params, long n_threads, long most, int (*passes)[PASS]) {
    static struct Thread t;
    long at = 0;
    for (long i = 0; i < n_threads; i++) {
        memset(&t, 0, sizeof t);
        t.id = i; t.n_threads = n_threads; t.params = params;
        int now[PASS] = {i}, heads[PASS] = {0};
        for (int b = 0; b >= 0; b = block(b, &t)) {
            int d = depth[b];
            if (d) {
                if (at < most) memcpy(passes[at], now, sizeof now);
                at++;
                now[d] = heads[d] == b ? now[d] + 1 : 1;
                heads[d] = b;
                for (int k = d + 1; k < PASS - 2; k++) now[k] = heads[k] = 0;
                now[PASS - 2] = b; now[PASS - 1] = 0;
            }
            now[PASS - 1] += length[b];
        }
        if (at < most) memcpy(passes[at], now, sizeof now);
        at++;
    }
    return at;
}

/* Run a warp as hardware with a stack does: threads that part at a branch meet again where all its ways meet. */
long run_warp(char *params, long first, long width, long n_threads) {
    static struct Thread t[32];
    struct { int at, meet; unsigned mask; } stack[4096];
    long paid = 0; int top = 0;
    for (int k = 0; k < width; k++) {
        memset(&t[k], 0, sizeof t[k]);
        t[k].id = first + k; t[k].n_threads = n_threads; t[k].params = params;
    }
    stack[0].at = 0; stack[0].meet = -1; stack[0].mask = width == 32 ? 0xFFFFFFFFu : (1u << width) - 1;
    while (top >= 0) {
        int b = stack[top].at;
        if (b == stack[top].meet || b < 0) { top--; continue; }
        unsigned mask = stack[top].mask, left = 0;
        int next = -2, other[32], ways = 0; unsigned masks[32];
        paid += length[b];
        for (int k = 0; k < width; k++) if (mask >> k & 1) {
            int to = block(b, &t[k]), w = 0;
            while (w < ways && other[w] != to) w++;
            if (w == ways) { other[ways] = to; masks[ways++] = 0; }
            masks[w] |= 1u << k;
        }
        if (ways == 1) { stack[top].at = other[0]; continue; }
        int meet = immediate[b];
        stack[top].at = meet;                       /* go on together there */
        for (int w = 0; w < ways; w++) if (other[w] != meet) {
            top++;
            stack[top].at = other[w]; stack[top].meet = meet; stack[top].mask = masks[w];
        }
    }
    return paid;
}
"""


@dataclass(frozen=True)
class _Block:
    """Instructions without a branch among them."""

    lines: list[str]  # of C
    length: int  # in instructions of PTX
    next: list[int]  # numbers of the blocks that may follow; -1 is the end of the kernel


def _typed(name: str) -> str:
    if name not in _TYPES:
        raise NotImplementedError(f"PTX type {name!r}")
    return _TYPES[name]


class _Translator:
    """From lines of PTX to blocks of C."""

    def __init__(self, text: str, kernel: str) -> None:
        entry = re.search(rf"\.entry ({kernel}\w*cuda_kernel_forward)\((.*?)\)(.*?)\n}}", text, re.DOTALL)
        if entry is None:
            raise ValueError(f"ptx: found no kernel {kernel!r}, expected one of "
                             f"{re.findall(r'[.]entry (.*?)[(]', text)}.")  # fmt: skip
        self.name, self.offsets, at = entry[1], {}, 0
        for declared in entry[2].split(","):
            align, size, name = _param(declared)
            at = -(-at // align) * align
            self.offsets[name] = (at, size)
            at += size
        body = entry[3][entry[3].index("{") + 1 :]
        self.registers = {kind: int(n) for kind, n in re.findall(r"\.reg \.\w+\s+%(\w+?)<(\d+)>;", body)}
        self.shared = set(re.findall(r"\.shared .*?(\w+)\[", text))
        statements = [line.split("//")[0].strip() for line in body.splitlines()]
        self.blocks = self._blocks([line for line in statements if line and not line.startswith(".")])

    def _blocks(self, statements: Sequence[str]) -> list[_Block]:
        groups: list[list[str]] = [[]]
        for line in statements:
            if line.endswith(":"):
                groups.append([line])
            else:
                groups[-1].append(line)
                if re.match(r"(@\S+\s+)?(bra|ret)\b", line):
                    groups.append([])
        groups = [group for group in groups if group]
        self.labels = {group[0][:-1]: k for k, group in enumerate(groups) if group[0].endswith(":")}
        return [self._block(group, k) for k, group in enumerate(groups)]

    def _block(self, group: Sequence[str], number: int) -> _Block:
        code = [line.rstrip(";") for line in group if not line.endswith(":")]
        branch = code and re.match(r"(?:@(!?)%p(\d+)\s+)?(?:bra(?:\.uni)?\s+(\S+)|(ret))$", code[-1])
        if not branch:
            return _Block([*map(self._instruction, code), f"return {number + 1};"], len(code), [number + 1])
        plain = [*map(self._instruction, code[:-1])]
        to = -1 if branch[4] else self.labels[branch[3]]
        if not branch[2]:
            return _Block([*plain, f"return {to};"], len(code), [to])
        jump = f"return {branch[1]}t->p[{branch[2]}] ? {to} : {number + 1};"
        return _Block([*plain, jump], len(code), [to, number + 1])

    def _value(self, text: str, kind: str) -> str:
        """Return an operand as C, with a PTX type."""
        special = {"%tid.x": "t->id", "%ntid.x": "t->n_threads", "%ctaid.x": "0", "%nctaid.x": "1"}
        if text in special:
            return f"({kind})({special[text]})"
        if found := re.fullmatch(r"%([a-z]+)(\d+)", text):
            return f"({kind})t->{found[1]}[{found[2]}]"
        if text.startswith("0f"):
            return f"hexfloat(0x{text[2:]}u)"
        if text in self.offsets:
            return f"(uint64_t)(t->params + {self.offsets[text][0]})"
        if re.fullmatch(r"-?\d+", text):
            return f"({kind})({text}ll)"
        if text in self.shared:
            return "0"  # an address that is written, and never read
        raise NotImplementedError(f"PTX operand {text!r}")

    def _place(self, text: str) -> str:
        base, _, offset = text.strip("[]").partition("+")
        return f"({self._value(base, 'uint64_t')} + {offset or 0})"

    def _instruction(self, line: str) -> str:
        code, _, rest = line.partition(" ")
        name, *parts = code.replace("\t", "").split(".")
        operands = [word.strip() for word in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]
        kind = _typed(parts[-1]) if parts[-1] in _TYPES else ""
        target, *sources = operands
        if name == "st":
            if parts[0] == "shared":
                return ";"
            return f"*({kind} *){self._place(target)} = {self._value(sources[0], kind)};"
        if name == "ld":
            place = self._place(sources[0])
            names = [one.strip() for one in target.strip("{}").split(",")]
            return " ".join(f"{self._set(one)} = (({kind} *){place})[{k}];" for k, one in enumerate(names))
        to = self._set(target)
        v = [self._value(source, kind) for source in sources]
        unsigned = kind.replace("int", "uint") if kind.startswith("int") else kind
        bits = re.sub(r"\D", "", kind.replace("_t", ""))
        if name == "cvt":
            into, of = (p for p in parts if p in _TYPES)
            return f"{to} = ({_typed(into)}){self._value(sources[0], _typed(of))};"
        if name in ("mov", "cvta"):
            return f"{to} = {self._value(sources[0], _TYPES.get(parts[-1], 'uint64_t'))};"
        if name == "setp" and len(parts) == 2:
            return f"{to} = {v[0]} {_COMPARE[parts[0]]} {v[1]};"
        if name == "selp":
            return f"{to} = {self._value(sources[2], 'uint8_t')} ? {v[0]} : {v[1]};"
        if name == "not":
            return f"{to} = {'!' if kind == 'uint8_t' else '~'}{v[0]};"
        if name == "neg":
            return f"{to} = -({unsigned}){v[0]};"
        if name in ("shl", "shr"):
            shift, most = self._value(sources[1], "uint32_t"), int(bits)
            over = f"({v[0]} >> {most - 1})" if name == "shr" and kind.startswith("int") else "0"
            return f"{to} = {shift} < {most} ? {v[0]} {'<<' if name == 'shl' else '>>'} {shift} : {over};"
        if name in ("mul", "mad") and parts[0] in ("wide", "hi"):
            wide = kind.replace(bits, str(2 * int(bits)))
            down = f" >> {bits}" if parts[0] == "hi" else ""
            more = f" + {self._value(sources[2], wide if parts[0] == 'wide' else kind)}" if name == "mad" else ""
            return f"{to} = (((({wide}){v[0]}) * ({wide}){v[1]}){down}){more};"
        if name == "mad":
            return f"{to} = ({unsigned}){v[0]} * ({unsigned}){v[1]} + ({unsigned}){v[2]};"
        if name in _BINARY:
            return f"{to} = ({unsigned}){v[0]} {_BINARY[name]} ({unsigned}){v[1]};"
        if name in ("div", "rem"):
            return f"{to} = {v[0]} {'/' if name == 'div' else '%'} {v[1]};"
        if name in ("min", "max"):
            return f"{to} = {v[0]} {'<' if name == 'min' else '>'} {v[1]} ? {v[0]} : {v[1]};"
        if name == "bfi":
            mask = f"(({(1 << int(sources[3])) - 1}u) << {sources[2]})"
            return f"{to} = ({v[1]} & ~{mask}) | ({v[0]} << {sources[2]} & {mask});"
        if name == "prmt":
            return f"{to} = permute({v[0]}, {v[1]}, {v[2]});"
        raise NotImplementedError(f"PTX instruction {line!r}")

    def _set(self, target: str) -> str:
        found = re.fullmatch(r"%([a-z]+)(\d+)", target)
        if found is None:
            raise NotImplementedError(f"PTX target {target!r}")
        return f"t->{found[1]}[{found[2]}]"

    def source(self, main: str) -> str:
        """Write the C program; ``main`` is found in the C of one block, in the main loop, if it is not empty."""
        ways = [one.next for one in self.blocks]
        nested = [0] * len(ways)
        if main:
            (last,) = (k for k, one in enumerate(self.blocks) if any(re.search(main, line) for line in one.lines))
            nested = depths(ways, last)
        fields = " ".join(f"{_KINDS[kind]} {kind}[{n}];" for kind, n in self.registers.items())
        cases = "\n".join(f"case {k}: {' '.join(one.lines)}" for k, one in enumerate(self.blocks))
        driver = _DRIVER.replace("N_BLOCKS", str(len(self.blocks))).replace("PASS", str(_PASS))
        columns = {"IMMEDIATE": meetings(ways), "LENGTH": [one.length for one in self.blocks],
                   "DEPTH": nested}  # fmt: skip
        for name, numbers in columns.items():
            driver = driver.replace(f"{{{name}}}", "{" + ", ".join(map(str, numbers)) + "}")
        return f"""
#include <stdint.h>
#include <string.h>
struct Thread {{ long id, n_threads; char *params; {fields} }};
static float hexfloat(uint32_t bits) {{ float f; memcpy(&f, &bits, 4); return f; }}
static uint32_t permute(uint32_t a, uint32_t b, uint32_t how) {{
    uint64_t both = (uint64_t)b << 32 | a; uint32_t out = 0;
    for (int k = 0; k < 4; k++) out |= (uint32_t)(both >> 8 * (how >> 4 * k & 7) & 0xFF) << 8 * k;
    return out;
}}
static int block(int b, struct Thread *t) {{ switch (b) {{
{cases}
default: return -1; }} }}
{driver}"""


def _param(declared: str) -> tuple[int, int, str]:
    """Read alignment, size and name of a parameter."""
    if found := re.search(r"\.align (\d+) \.b8 (\w+)\[(\d+)\]", declared):
        return int(found[1]), int(found[3]), found[2]
    found = re.search(r"\.param \.\w(\d+) (\w+)", declared)
    if found is None:
        raise NotImplementedError(f"PTX parameter {declared!r}")
    return int(found[1]) // 8, int(found[1]) // 8, found[2]


def _passed_by_all(next_of: Sequence[Sequence[int]], first: int) -> list[set[int]]:
    """Return for each block the blocks, itself too, that every way from it to block ``first`` passes."""
    n, changed = len(next_of), True
    passed = [set(range(n)) for _ in range(n)]
    passed[first] = {first}
    while changed:
        changed = False
        for k in range(n):
            new = set.intersection(*(passed[to] for to in next_of[k])) | {k} if k != first and next_of[k] else passed[k]
            if new != passed[k]:
                passed[k], changed = new, True
    return passed


def depths(next_of: Sequence[Sequence[int]], last: int) -> list[int]:
    """Return how deeply nested each loop is that begins at a block; 0 where none begins, or within the main loop.

    The main loop is the innermost with block ``last``. Of the others, only those count which hold it, and those next
    to it in the same loops. Where an outer loop begins with the main loop, it is counted from the end of that.

    >>> depths([[1], [2, -1], [3], [2, 4], [5], [5, 1]], 3)
    [0, 1, 2, 0, 0, 2]
    """
    before: list[list[int]] = [[] for _ in next_of]
    for k, ways in enumerate(next_of):
        for to in ways:
            if to >= 0:
                before[to].append(k)
    dominators, bodies = _passed_by_all(before, 0), {}
    for k, ways in enumerate(next_of):
        for head in ways:
            if head in dominators[k]:
                body, found = bodies.setdefault(head, {head}), [k]
                while found:
                    block = found.pop()
                    if block not in body:
                        body.add(block)
                        found += before[block]
    around = [head for head, body in bodies.items() if last in body]
    main = min(around, key=lambda head: len(bodies[head]))
    end = meetings(next_of)[main]
    if {end in dominators[k] for k in before[main] if k in bodies[main]} == {True, False}:
        # The loop begins where the one around it does; the outer one gets another block before.
        inner = {k for k in bodies[main] if end not in dominators[k]}
        split = [
            [len(next_of) if to == main and k not in inner else to for to in ways] for k, ways in enumerate(next_of)
        ]
        *found, outer = depths([*split, [main]], last)
        found[end] = outer
        return found
    within = [sum(head in body for body in bodies.values()) for head in range(len(next_of))]
    return [within[k] if k in bodies and all(o in around and o != main for o in bodies if k in bodies[o] and o != k)
            else 0 for k in range(len(next_of))]  # fmt: skip


def meetings(next_of: Sequence[Sequence[int]]) -> list[int]:
    """Return where all ways from each block meet again: its immediate post-dominator; -1 is the end.

    >>> meetings([[1, 2], [3], [3], [-1]])
    [3, 3, 3, -1]
    """
    n, changed = len(next_of), True
    after = [{*range(n), -1} for _ in range(n)]  # the blocks that every way from here passes
    while changed:
        changed = False
        for k in range(n - 1, -1, -1):
            ways = [{-1} if to < 0 else after[to] for to in next_of[k]]
            new = set.intersection(*ways) | {k}
            if new != after[k]:
                after[k], changed = new, True
    # Of the blocks that every way passes, the nearest has the most others behind it.
    return [max((to for to in after[k] if to != k), key=lambda to: 0 if to < 0 else len(after[to])) for k in range(n)]


class Kernel:
    """A kernel of Warp whose PTX runs on the CPU.

    Args:
        kernel: the kernel.
        folder: with the PTX of its module, from ``wp.compile_aot_module(..., use_ptx=True)``; C goes there, too.
        main: regular expression that is found in the C of one block only, which lies in its main loop; empty for none.

    Raises:
        NotImplementedError: the PTX holds an instruction that is not known here.
        OSError: there is no C compiler.
    """

    def __init__(self, kernel: Any, folder: Path, main: str = "") -> None:  # noqa: ANN401
        self._kernel = kernel
        text = next(folder.glob("*.ptx")).read_text().rstrip("\0")
        program = _Translator(text, kernel.key)
        self._offsets = list(program.offsets.values())
        source = folder / f"{kernel.key}.c"
        source.write_text(program.source(main))
        library = source.with_suffix(".so")
        subprocess.run(
            ["cc", "-O2", "-w", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC", "-o", library, source],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))
        self._library.run_warp.restype = self._library.run_threads.restype = ctypes.c_long

    def _params(self, shape: tuple[int, ...], inputs: Sequence[Any]) -> ctypes.Array[ctypes.c_char]:
        """Pack the arguments of a launch as the driver does."""
        launch = wp.launch(self._kernel, shape, inputs=list(inputs), device="cpu", record_cmd=True)
        at, size = self._offsets[-1]
        packed = ctypes.create_string_buffer(at + size)
        fields = np.dtype([("shape", "<u4", len(shape)), ("size", "<u8"), ("share", "<u8")], align=True)
        bounds = np.array([(shape, math.prod(shape), 1)], fields)
        values = [bounds.tobytes(), *(bytes(one) for one in launch.params[1:])]
        for (at, size), value in zip(self._offsets, values, strict=True):
            packed[at : at + size] = value[:size].ljust(size, b"\0")
        return packed

    def passes(self, shape: tuple[int, ...], inputs: Sequence[Any], most: int = 1 << 24) -> npt.NDArray[np.int32]:
        """Run the threads one after the other.

        Returns:
            a row for each pass of a loop: its thread, how many passes of each loop around it had begun, up to its own
            (then zeros), the block at which it begins, and the instructions until the next pass.  [passes, 8]
        """
        rows = np.zeros((most, _PASS), np.int32)
        n = self._library.run_threads(
            self._params(shape, inputs), ctypes.c_long(math.prod(shape)), ctypes.c_long(most),
            rows.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        if n > most:
            raise ValueError(f"ptx: got {n} passes of loops, expected at most {most}.")
        return rows[:n]

    def paid(self, shape: tuple[int, ...], inputs: Sequence[Any], width: int = 32) -> npt.NDArray[np.int64]:
        """Run warp after warp, of ``width`` threads, and return the instructions that each issues.  [warps] int64."""
        params, n_threads = self._params(shape, inputs), math.prod(shape)
        warps = range(0, n_threads, width)
        return np.array([self._library.run_warp(
            params, ctypes.c_long(first), ctypes.c_long(min(width, n_threads - first)), ctypes.c_long(n_threads)
        ) for first in warps])  # fmt: skip


def slowest(passes: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int64]:
    """Return what each warp of ``width`` threads issues if its threads wait for the slowest in each pass.  [warps].

    >>> rows = [[0, 1, 0, 0, 0, 0, 7, 10], [0, 2, 0, 0, 0, 0, 7, 30], [1, 1, 0, 0, 0, 0, 7, 20]]
    >>> slowest(np.array(rows, np.int32), 2).tolist()
    [50]
    """
    warps = passes[:, 0] // width
    keys = np.column_stack([warps, passes[:, 1:-1]])
    order = np.lexsort(keys.T[::-1])
    keys, costs = keys[order], passes[order, -1].astype(np.int64)
    begins = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(1)])
    paid = np.maximum.reduceat(costs, begins)
    return np.bincount(keys[begins, 0], paid).astype(np.int64)
