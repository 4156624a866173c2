"""Kernel that renders observations: the brighter of two frames, grey or in colour, scaled down by averaging areas.

It computes like OpenCV's ``INTER_AREA``, which ale-py and gymnasium use: weights and sums in single precision, columns
before rows, in the same order. Otherwise an average that ends in one half might be rounded the other way.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import warp as wp

from rlstruct.atari.state import on_a_cpu

# A fused multiplication and addition would round differently.
wp.set_module_options({"fuse_fp": False, "max_unroll": 1})

WIDTH = 160
MOST_SOURCES = 4
"""Most source pixels of one pixel, along each axis."""


@wp.struct
class View:
    """Tables and settings by which `render` turns pictures into observations."""

    palette: wp.array2d(dtype=float)  # [channels, 256]
    columns: wp.array2d(dtype=float)  # from `area_weights`.  [W, 1 + MOST_SOURCES]
    rows: wp.array2d(dtype=float)  # [H, 1 + MOST_SOURCES]
    channels: int
    brighter: int  # 1: the brighter of the last two frames; 0: the last one


@wp.func_native(
    snippet="return palette.data[size_t(channel) * 256 + screens.data[size_t(which) * size + size_t(pixel)]];"
)
def shade(
    palette: wp.array2d(dtype=float), screens: wp.array3d(dtype=wp.uint8), which: int, size: int, pixel: int,
    channel: int,
) -> float:  # fmt: skip
    """Return one channel of a pixel."""


@wp.func_native(snippet="return one > other ? one : other;")
def brighter_of(one: float, other: float) -> float:
    """Return the larger of two numbers with one comparison; `wp.max` would also check for NaN."""


@wp.func_native(snippet="return table.data[line * table.shape[1] + k];")
def weight(table: wp.array2d(dtype=float), line: int, k: int) -> float:
    """Return an entry of `View.rows` or `View.columns`."""


@wp.func_native(
    snippet="""
    if (size_t(first) + 3 * 160 + width > size_t(size))
        return false;
    const wp::uint8* a = screens.data + size_t(one) * size + first;
    const wp::uint8* b = screens.data + size_t(other) * size + first;
    const wp::uint32 expected = wp::uint32(*a) * 0x01010101u;
    wp::uint32 differs = 0;
    for (int row = 0; row < 4 * 160; row += 160) {
        for (int k = 0; k < width; k += 4) {
            wp::uint32 four, others;
            memcpy(&four, a + row + k, 4);
            memcpy(&others, b + row + k, 4);
            differs |= (four ^ expected) | (others ^ expected);
        }
    }
    return differs == 0;
    """
)
def is_plain(screens: wp.array3d(dtype=wp.uint8), one: int, other: int, size: int, first: int, width: int) -> bool:
    """Return True if both screens show one colour only in 4 lines of `width` pixels, a multiple of 4, from `first`."""


@wp.func
def plain_pixels(
    view: View, screens: wp.array3d(dtype=wp.uint8), one: int, other: int, size: int, first: int, x: int, n: int
) -> int:
    """Return how many pixels of the observation from `x` on certainly come from a single colour: 16, 1 or 0."""
    if x % 16 == 0 and x + 16 <= n:
        width = int(weight(view.columns, x + 15, 0)) + MOST_SOURCES - int(weight(view.columns, x, 0))
        if is_plain(screens, one, other, size, first, (width + 3) & ~3):
            return 16
    if is_plain(screens, one, other, size, first, MOST_SOURCES):
        return 1
    return 0


@wp.kernel(enable_backward=False)
def render(
    view: View,
    before: wp.array3d(dtype=wp.uint8),  # both screens before the step.  [B, 2, lines * 160], contiguous
    after: wp.array3d(dtype=wp.uint8),  # both screens after the step, likewise
    last: wp.array(dtype=int),  # index of the newer screen.  [B]
    cut: wp.array(dtype=int),  # 1: the game ended in the last frame of the step; 2: earlier; 3: no older frame.  [B]
    frames: wp.array4d(dtype=wp.uint8),  # [B, H, W, channels]
    threads_per_line: int,  # threads for each line: one per pixel on a GPU, one on a CPU
):
    """Render the picture of each console; a game that ended before the last frame of the step keeps its old one."""
    i, y, thread = wp.tid()
    how = cut[i]
    if how == 2:
        return
    newest = 2 * i + last[i]
    older = newest ^ 1
    one = wp.where(how == 1, older, newest)
    other = wp.where(how == 0 and view.brighter != 0, older, one)
    size = after.shape[2]
    first_row = int(weight(view.rows, y, 0))
    x = int(thread)
    while x < frames.shape[2]:
        first = first_row * WIDTH + int(weight(view.columns, x, 0))
        n_plain = int(0)
        if on_a_cpu() and threads_per_line == 1 and how != 1:
            n_plain = plain_pixels(view, after, one, other, size, first, x, frames.shape[2])
        for channel in range(view.channels):
            if n_plain > 0:
                color = wp.uint8(shade(view.palette, after, one, size, first, channel))
                for k in range(n_plain):
                    frames[i, y, x + k, channel] = color
            else:
                total = float(0.0)
                for j in range(MOST_SOURCES):
                    share = weight(view.rows, y, 1 + j)
                    if share > 0.0:
                        row = float(0.0)
                        for k in range(MOST_SOURCES):
                            part = weight(view.columns, x, 1 + k)
                            if part > 0.0:
                                pixel = first + j * WIDTH + k
                                bright = brighter_of(
                                    shade(view.palette, after, one, size, pixel, channel),
                                    shade(view.palette, after, other, size, pixel, channel),
                                )
                                if how == 1:
                                    bright = brighter_of(
                                        bright, shade(view.palette, before, newest, size, pixel, channel)
                                    )
                                    bright = brighter_of(
                                        bright, shade(view.palette, before, older, size, pixel, channel)
                                    )
                                row = row + bright * part
                        total = total + row * share
                frames[i, y, x, channel] = wp.uint8(wp.rint(total))
        x += wp.max(n_plain, 1) * threads_per_line


def area_weights(n_sources: int, n_pixels: int) -> npt.NDArray[np.float32]:
    """Compute the share of each source pixel in each pixel of a smaller picture, along one axis.

    Args:
        n_sources: pixels of the larger picture.
        n_pixels: pixels of the smaller one, at least a third as many. If equal, each pixel is copied.

    Returns:
        For each pixel, the index of its first source, then the weights of its sources.  [n_pixels, 1 + MOST_SOURCES]

    >>> area_weights(5, 2)[:, :4].round(1).tolist()[1] == np.float32([2, 0.2, 0.4, 0.4]).tolist()
    True
    """
    weights = np.zeros((n_pixels, 1 + MOST_SOURCES), np.float32)
    scale = n_sources / n_pixels
    for k in range(n_pixels):
        begin, end = k * scale, (k + 1) * scale
        width = min(scale, n_sources - begin)
        first = math.floor(begin) if math.ceil(begin) - begin > 1e-3 else math.ceil(begin)
        inner, last = math.ceil(begin), min(math.floor(end), n_sources - 1)
        inner = min(inner, last)
        shares = [inner - begin] * (inner - begin > 1e-3) + [1.0] * (last - inner)
        shares += [min(end - last, 1.0, width)] * (end - last > 1e-3)
        weights[k, 0] = min(first, inner)
        weights[k, 1 : 1 + len(shares)] = np.asarray(shares) / width
    return weights
