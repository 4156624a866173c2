"""Picture of a profile: one bar for each operation, stacked by region."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlstruct.profiling.breakdown import REGIONS, Process
from rlstruct.profiling.overlap import Floats
from rlstruct.profiling.prices import WAIT
from rlstruct.profiling.sentence import WORDS, main_process

_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")
_WAITING = "#c8c8c8"
_IDLE = (WAIT, "start")  # operations that do not set the scale
_MOST, _LEAST = 18, 0.005


def draw(processes: Sequence[Process], path: Path, title: str) -> None:
    """Draw the seconds of the operations as stacked bars; a GPU was busy during hatched parts.

    The longest operation that is not waiting sets the scale: longer bars of waiting are cut off and labelled.
    """
    from matplotlib.figure import Figure  # imported here: the extra ``train`` may be missing

    bars = bars_of(processes)
    figure = Figure(figsize=(9.5, 1.9 + 0.3 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(bars))[::-1]
    left = np.zeros(len(bars))
    values = np.stack([seconds for _, seconds in bars]) if bars else np.zeros((0, 2 * len(REGIONS)))
    for index in range(2 * len(REGIONS)):
        region, busy = index % len(REGIONS), index >= len(REGIONS)
        width = values[:, index]
        if not width.any():
            continue
        label = WORDS[region] + (", GPU busy" if busy else "")
        hatch = "////" if busy else None
        colors = [_WAITING if name.endswith(_IDLE) else _COLORS[region] for name, _ in bars]
        axes.barh(places, width, left=left, color=colors, hatch=hatch, edgecolor="white")
        axes.barh([0], [0], color=_COLORS[region], hatch=hatch, label=label)
        left = left + width
    working = [float(seconds.sum()) for name, seconds in bars if not name.endswith(_IDLE)]
    limit = 1.05 * max(working, default=float(left.max(initial=1.0)))
    axes.set_xlim(0.0, limit)
    for place, total in zip(places, left, strict=True):
        if total > limit:
            axes.annotate(f"{total:.1f} s →", (limit, place), (-4, 0), textcoords="offset points", ha="right",
                          va="center", fontsize=8, bbox={"color": "white", "pad": 1})  # fmt: skip
    axes.set_yticks(places, [name for name, _ in bars], fontsize=9)
    axes.set_xlabel("seconds, without the cost of measuring")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=10, x=0.02, ha="left")
    if bars:
        axes.barh([0], [0], color=_WAITING, label="waiting, starting")
        figure.legend(fontsize=8, loc="outside lower right", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


def bars_of(processes: Sequence[Process]) -> list[tuple[str, Floats]]:
    """Return the names, and seconds by region, of the longest operations; a batcher's workers are pooled."""
    main = main_process(processes)
    sums: dict[str, Floats] = {}
    for process in processes:
        kind = "main" if process is main else process.kind.removeprefix("rlstruct-")
        for row in process.rows:
            if row.path and (process is main or kind != "main"):
                inside = "" if row.phase != "evaluation" else ", evaluation"
                name = f"{kind}{inside}: {' / '.join(row.path)}"
                sums[name] = sums.get(name, np.zeros(2 * len(REGIONS))) + row.corrected
    total = sum(float(seconds.sum()) for seconds in sums.values())
    large = [(name, seconds) for name, seconds in sums.items() if seconds.sum() > _LEAST * total]
    kept = sorted(large, key=lambda pair: -pair[1].sum())[:_MOST]
    return sorted(kept, key=lambda pair: (pair[0].split(":")[0], -pair[1].sum()))
