"""Products of frames of bits in compiled code, as sums of the rows of the weights that the ones select.

Boards, such as the frames of MinAtar, have ones in a few percent of their places. A product of such frames with the
weights of a linear layer takes a quarter of the time in this way, and so does the gradient of the weights. Where too
many places are ones, matrices are multiplied. Results are equal to rounding where weights and gradients are finite; an
infinite number, or NaN, reaches only results for which there is a one in its place.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from rlstruct.engine import products, torch_private

MIN_ROWS, MIN_MULTIPLICATIONS = 32, 1 << 21
"""Fewest rows and multiplications of a product that is computed as sums."""
LANES = 16
"""Columns that the kernel adds at once: their number must be a multiple."""
LIMITS: Final = {torch.float32: 8, torch.bfloat16: 10}
"""Places for each one, at least, by dtype of the weights. Fewer would pay for float32 where MKL is slow (TRIED.md)."""
_aten: Any = torch.ops.aten
_ARRANGING = {
    _aten.index.Tensor, _aten.index_select.default, _aten.view.default, _aten.reshape.default, _aten.squeeze.dim,
    _aten.squeeze.dims, _aten.unsqueeze.default, _aten.select.int, _aten.slice.Tensor, _aten.expand.default,
    _aten.permute.default, _aten.clone.default, _aten._unsafe_view.default,
}  # fmt: skip
_CONVERTING = torch.ops.prims.convert_element_type.default
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, products.ONEDNN}

# With vectors of GCC's and Clang's: neither keeps the sums of a plain loop in registers.
SOURCE: Final = (
    f"#define LANES {LANES}"
    + r"""
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")  // TorchInductor turns it off, because it writes vectors itself
#endif
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
constexpr int64_t CHAIN = 256;  // most rows that are added one after the other: longer sums would lose digits

int64_t count_ones(const uint8_t* bits, int64_t n) {
    constexpr uint64_t EACH = 0x0101010101010101u;
    int64_t ones = 0, i = 0;
    while (i + 8 <= n) {
        uint64_t counts = 0;  // eight, each in a byte, for as long as they cannot overflow
        for (const int64_t end = std::min(i + 8 * 255, n - 7); i < end; i += 8) {
            uint64_t eight;
            std::memcpy(&eight, bits + i, 8);
            counts += eight & EACH;
        }
        ones += ((counts & 0x00ff00ff00ff00ffu) + (counts >> 8 & 0x00ff00ff00ff00ffu)) * 0x0001000100010001u >> 48;
    }
    for (; i < n; i++) ones += bits[i] & 1;
    return ones;
}

// Writes the places of the ones, in order, and returns their number.
inline int64_t find(const uint8_t* bits, int64_t n, int32_t* places) {
    int64_t n_ones = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t ones = 0;
        for (int64_t b = 0; b < 8; b++) {
            uint64_t eight;
            std::memcpy(&eight, bits + i + 8 * b, 8);
            ones |= ((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56) << (8 * b);
        }
        for (; ones; ones &= ones - 1) places[n_ones++] = i + __builtin_ctzll(ones);
    }
    for (; i < n; i++)
        if (bits[i] & 1) places[n_ones++] = i;
    return n_ones;
}

// to[c, r] = from[r, c] for columns first to end of `from`, in squares that fit into the registers and the L1 cache.
void transpose(const float* __restrict from, float* __restrict to, int64_t rows, int64_t first, int64_t end,
               int64_t from_stride, int64_t to_stride) {
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = first; c < end; c += LANES)
            for (int64_t i = c; i < std::min(c + LANES, end); i++)
                for (int64_t j = r; j < std::min(r + LANES, rows); j++)
                    to[(i - first) * to_stride + j] = from[j * from_stride + i];
}

// result[l] = sum of weights[place, l] over the places, for N vectors of columns
template <int64_t N>
inline void gather(const float* weights, const int32_t* places, int64_t n_ones, int64_t columns, float* result) {
    Vector sums[N] = {};
    for (int64_t i = 0; i < n_ones; i++) {
        const Vector* row = reinterpret_cast<const Vector*>(weights + places[i] * columns);
#pragma GCC unroll 8
        for (int64_t l = 0; l < N; l++) sums[l] += row[l];
    }
#pragma GCC unroll 8
    for (int64_t l = 0; l < N; l++) reinterpret_cast<Vector*>(result)[l] = sums[l];
}

// sums[place, l] += values[l] for all places, for N vectors of columns
template <int64_t N>
inline void scatter(const float* values, const int32_t* places, int64_t n_ones, int64_t columns, float* sums) {
    Vector added[N];
#pragma GCC unroll 8
    for (int64_t l = 0; l < N; l++) added[l] = reinterpret_cast<const Vector*>(values)[l];
    for (int64_t i = 0; i < n_ones; i++) {
        Vector* row = reinterpret_cast<Vector*>(sums + places[i] * columns);
#pragma GCC unroll 8
        for (int64_t l = 0; l < N; l++) row[l] += added[l];
    }
}

// result [rows, columns] from weights [columns, n]
void sum_rows(const uint8_t* bits, const float* weights, float* result, int64_t rows, int64_t n, int64_t columns,
              int64_t threads) {
    std::unique_ptr<float[]> turned(new float[n * columns]);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t part = 0; part < threads; part++) {
            const int64_t first = n * part / threads;
            transpose(weights, turned.get() + first * columns, columns, first, n * (part + 1) / threads, n, columns);
        }
        std::vector<int32_t> places(n);
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            const int64_t n_ones = find(bits + r * n, n, places.data());
            const float* from = turned.get();
            const int32_t* at = places.data();
            float* to = result + r * columns;
            int64_t c = 0;
            for (; c + 8 * LANES <= columns; c += 8 * LANES) gather<8>(from + c, at, n_ones, columns, to + c);
            for (; c + 4 * LANES <= columns; c += 4 * LANES) gather<4>(from + c, at, n_ones, columns, to + c);
            for (; c < columns; c += LANES) gather<1>(from + c, at, n_ones, columns, to + c);
        }
    }
}

// result [columns, n] from values [rows, columns]
void gradient(const uint8_t* bits, const float* values, float* result, int64_t rows, int64_t n, int64_t columns,
              int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t part = 0; part < threads; part++) {
        const int64_t first = n * part / threads, width = n * (part + 1) / threads - first;
        std::vector<int32_t> places(width);
        std::vector<float> sums(width * columns), total(rows > CHAIN ? width * columns : 0);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t n_ones = find(bits + r * n + first, width, places.data());
            const float* from = values + r * columns;
            const int32_t* at = places.data();
            float* to = sums.data();
            int64_t c = 0;
            for (; c + 8 * LANES <= columns; c += 8 * LANES) scatter<8>(from + c, at, n_ones, columns, to + c);
            for (; c + 4 * LANES <= columns; c += 4 * LANES) scatter<4>(from + c, at, n_ones, columns, to + c);
            for (; c < columns; c += LANES) scatter<1>(from + c, at, n_ones, columns, to + c);
            if (!total.empty() && ((r + 1) % CHAIN == 0 || r + 1 == rows)) {
                for (size_t i = 0; i < total.size(); i++) total[i] += sums[i];
                std::fill(sums.begin(), sums.end(), 0.0f);
            }
        }
        transpose((total.empty() ? sums : total).data(), result + first, width, 0, columns, columns, n);
    }
}
}  // namespace

// Sets done to 0, and does nothing, unless there are `limit` places for each one. The transpose costs 16 rows.
extern "C" void kernel(const uint8_t* bits, const float* values, float* result, int64_t done_at, int64_t rows,
                       int64_t n, int64_t columns, int64_t limit, int64_t is_gradient, int64_t threads) {
    int64_t* const done = reinterpret_cast<int64_t*>(done_at);
    *done = limit * count_ones(bits, rows * n) + 16 * n <= rows * n;
    if (*done) (is_gradient ? gradient : sum_rows)(bits, values, result, rows, n, columns, threads);
}
"""
)


def is_only_converted(node: Node) -> bool:
    """Return True if bools are only arranged and turned into floats: then bytes, which have vectors, may stand in."""
    return node.meta["val"].dtype is torch.bool and all(
        (user.target in _ARRANGING and user.args[0] is node and is_only_converted(user))
        or (user.target is _CONVERTING and user.meta["val"].is_floating_point())
        for user in node.users
    )


def sum_rows(graph: Graph, places: Iterable[Node]) -> None:
    """Replace the products of bits with weights, and with gradients, in a traced graph.

    Args:
        graph: of ATen operators; changed in place.
        places: its inputs that hold bits as bytes, each 0 or 1, as torch's bools do.
    """
    bits = {node: node for node in places}  # for each node that holds bits, the node that holds them as bytes
    for node in [*graph.nodes]:
        if node.op != "call_function":
            continue
        if node.target in _ARRANGING and (before := bits.get(node.args[0])) is not None:
            bits[node] = node
            if before is not node.args[0]:  # floats: arrange the bytes in the same way
                bits[node] = _insert(graph, node, node.target, before, *node.args[1:], **node.kwargs)
                bits[node].meta["val"] = node.meta["val"].to(torch.uint8)
        elif node.target is _CONVERTING and (before := bits.get(node.args[0])) is not None:
            bits[node] = before
        elif node.target in _PRODUCTS and not node.kwargs:
            *bias, x, weight = node.args
            if (frames := bits.get(x)) is not None and _is_worth_it(frames, node.meta["val"]):
                sums = _insert(graph, node, torch.ops.rlstruct.sum_rows.default, frames, weight)
            elif (frames := bits.get(weight)) is not None and _is_worth_it(frames, node.meta["val"].t()):
                sums = _insert(graph, node, torch.ops.rlstruct.sum_rows_gradient.default, x, frames)
            else:
                continue
            if bias:
                sums = _insert(graph, node, _aten.add.Tensor, sums, *bias)
            node.replace_all_uses_with(sums)
            graph.erase_node(node)


def _insert(graph: Graph, before: Node, target: Any, *args: Any, **words: Any) -> Node:  # noqa: ANN401
    with graph.inserting_before(before):
        node = graph.call_function(target, args, words)
    node.meta["val"] = before.meta["val"]
    return node


def _is_worth_it(frames: Node, result: Tensor) -> bool:
    bits = frames.meta["val"]
    (rows, n), columns = bits.shape, result.shape[1]
    large = rows >= MIN_ROWS and rows * n * columns >= MIN_MULTIPLICATIONS
    fits = columns % LANES == 0 and result.dtype in LIMITS and bits.device.type == "cpu"
    return large and fits and not why_not()


def product(bits: Tensor, weight: Tensor) -> Tensor:
    """Multiply bits, as bytes, with weights.  [R, C] from [R, N] uint8 and [N, C]."""
    sums = _sums(bits, weight.t(), is_gradient=False)
    return torch.mm(bits.to(weight.dtype), weight) if sums is None else sums


def gradient(values: Tensor, bits: Tensor) -> Tensor:
    """Multiply the gradient of a product, transposed, with its bits.  [C, N] from [C, R] and [R, N] uint8."""
    sums = _sums(bits, values.t(), is_gradient=True)
    return torch.mm(values, bits.to(values.dtype)) if sums is None else sums


def _sums(bits: Tensor, values: Tensor, *, is_gradient: bool) -> Tensor | None:
    """Return the sums of the weights [C, N], or of the gradient of a product [R, C], in their dtype.

    Returns:
        [R, C], or [C, N] of a gradient; None if the kernel does not compute it: too many bits are ones, or sizes or
        dtypes are not those that the graph pass chooses.
    """
    (rows, n), limit = bits.shape, LIMITS.get(values.dtype)
    columns, also = values.shape[::-1] if is_gradient else values.shape
    fits = also == (rows if is_gradient else n) and columns % LANES == 0 and bits.dtype is torch.uint8
    if not fits or limit is None:
        return None
    result = torch.empty((columns, n) if is_gradient else (rows, columns), dtype=torch.float32, device="cpu")
    done, threads = ctypes.c_int64(), torch.get_num_threads()
    floats = values.to(torch.float32).contiguous()
    kernel()(bits.contiguous(), floats, result, ctypes.addressof(done), rows, n, columns, limit, is_gradient, threads)
    return result.to(values.dtype) if done.value else None


@functools.cache
def why_not() -> str:
    """Return the reason why products of bits are not computed as sums here; empty if they are."""
    if sys.byteorder != "little" or sys.platform == "win32":
        return "the kernel needs bytes in ascending order, and vectors of GCC or Clang"
    if why := torch_private.why_missing("sums of bits"):
        return why
    try:
        kernel()
    except Exception as error:  # whatever the compiler says, products do as well
        why = f"its compiler refuses the kernel: {error}"
        logging.getLogger("rlstruct").info("products of bits are not computed as sums: %s", why)
    return why


@functools.cache
def kernel() -> Callable[..., None]:
    """Return the compiled `SOURCE`."""
    arguments = ["const uint8_t*", "const float*", "float*", *7 * ["int64_t"]]
    return torch_private.compile_cpp(arguments, SOURCE)


OPERATORS: Final = {"rlstruct.sum_rows": product, "rlstruct.sum_rows_gradient": gradient}
"""By name of the operator, its implementation on the CPU."""
_library: Any = torch.library
if not hasattr(torch.ops.rlstruct, "sum_rows"):  # a notebook that reloads this module has it already
    _operators = _library.Library("rlstruct", "FRAGMENT")
    _operators.define("sum_rows(Tensor bits, Tensor weight) -> Tensor")
    _operators.define("sum_rows_gradient(Tensor values, Tensor bits) -> Tensor")
    _operators.impl("sum_rows", product, "CPU")
    _operators.impl("sum_rows_gradient", gradient, "CPU")
    _operators.impl("sum_rows", lambda bits, weight: weight.new_empty((bits.shape[0], weight.shape[1])), "Meta")
    _operators.impl("sum_rows_gradient", lambda x, bits: x.new_empty((x.shape[0], bits.shape[1])), "Meta")
