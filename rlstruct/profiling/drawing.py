"""Picture of a profile: one bar for each operation, stacked by region."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlstruct.profiling.breakdown import N_REGIONS, REGIONS, Process
from rlstruct.profiling.overhead import WAIT
from rlstruct.profiling.overlap import Floats
from rlstruct.profiling.summary import WORDS, main_process

_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")
_WAITING = "#c8c8c8"
_IDLE = (WAIT, "start")  # operations that do not set the scale
_MOST, _LEAST = 18, 0.005


def draw(processes: Sequence[Process], path: Path, title: str) -> None:
    """Draw the seconds of the operations as stacked bars; a GPU was busy during hatched parts.

    The longest operation that is not waiting sets the scale: longer bars of waiting are cut off and labelled.
    """
    from matplotlib.figure import Figure  # imported here: the extra ``train`` may be missing
    from matplotlib.patches import Patch

    bars = bars_of(processes)
    names = [name for name, _ in bars]
    seconds = np.reshape([values for _, values in bars], (-1, N_REGIONS))
    is_idle = np.asarray([name.endswith(_IDLE) for name in names], dtype=bool)
    totals, left = seconds.sum(axis=1), np.zeros(len(bars))
    limit = 1.05 * (totals[~is_idle].max(initial=0.0) or totals.max(initial=1.0))
    figure = Figure(figsize=(9.5, 1.9 + 0.3 * len(bars)), layout="constrained")
    axes = figure.add_subplot(xlim=(0.0, limit), xlabel="seconds, without the cost of measuring")
    legend = [Patch(facecolor=_WAITING, label="waiting, starting")] if bars else []
    for index in np.flatnonzero(seconds.any(axis=0)):
        region, busy = index % len(REGIONS), index >= len(REGIONS)
        hatch = "////" if busy else None
        colors = [_WAITING if idle else _COLORS[region] for idle in is_idle]
        axes.barh(names, seconds[:, index], left=left, color=colors, hatch=hatch, edgecolor="white")
        left += seconds[:, index]
        label = WORDS[region] + (", GPU busy" if busy else "")
        legend.insert(-1, Patch(facecolor=_COLORS[region], hatch=hatch, edgecolor="white", label=label))
    for place in np.flatnonzero(totals > limit):
        axes.annotate(f"{totals[place]:.1f} s →", (limit, place), (-4, 0), textcoords="offset points", ha="right",
                      va="center", fontsize=8, bbox={"color": "white", "pad": 1})  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=10, x=0.02, ha="left")
    figure.legend(handles=legend, fontsize=8, loc="outside lower right", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


def bars_of(processes: Sequence[Process]) -> list[tuple[str, Floats]]:
    """Return the names, and seconds by region, of the longest operations; a batcher's workers are pooled."""
    main = main_process(processes)
    sums: dict[str, Floats] = {}
    for process in processes:
        label = "main" if process is main else process.kind.removeprefix("rlstruct-")
        for row in process.rows:
            if row.path and (process is main or label != "main"):
                inside = "" if row.phase != "evaluation" else ", evaluation"
                name = f"{label}{inside}: {' / '.join(row.path)}"
                sums[name] = sums.get(name, np.zeros(N_REGIONS)) + row.corrected
    least = _LEAST * sum(float(seconds.sum()) for seconds in sums.values())
    longest = sorted(sums.items(), key=lambda pair: -pair[1].sum())[:_MOST]
    kept = [(name, seconds) for name, seconds in longest if seconds.sum() > least]
    return sorted(kept, key=lambda pair: pair[0].split(":")[0])  # the longest of each process first
