"""Learning curves: return against environment steps. They need matplotlib, from the extra ``train``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

_COLOURS = ("#1f5fa8", "#d9722e", "#2f9e62", "#a23b72", "#6b5fb5", "#8a7a1f", "#3a9aa8", "#777777")
_LINES = ("-", "--", ":", "-.")  # once all colours are taken
_INSIDE, _LETTERS = 4, 48  # labels that fit into a panel; letters in a line of a label next to it


Line = TypeVar("Line", bound=Mapping[str, float])


@dataclass(frozen=True)
class Curve:
    """One number over the course of a training. A step may occur twice, such as that of the last weights."""

    steps: Sequence[float]  # environment steps, in order
    values: Sequence[float]  # the number at each step

    def points(self) -> tuple[list[float], list[float]]:
        """Return each step once. Where it occurs twice, the later value counts: nothing was selected by it."""
        latest = dict(zip(self.steps, self.values, strict=True))
        return list(latest), list(latest.values())


def draw_learning_curve(rows: Sequence[Mapping[str, float]], path: Path, *, title: str) -> None:
    """Draw ``train/return`` and ``evaluation/mean_return`` of lines of metrics, where there are any, as PNG."""
    groups = {}
    for label, name in (("training", "train/return"), ("evaluation", "evaluation/mean_return")):
        if points := in_order(row for row in rows if name in row):
            groups[label] = [Curve([row["env_steps"] for row in points], [row[name] for row in points])]
    draw_panels({title: groups}, path, metric="mean return (sum of rewards of an episode)")


def in_order(rows: Iterable[Line]) -> list[Line]:
    """Sort by ``env_steps``: an evaluation that runs during the training is written after later losses."""
    return sorted(rows, key=itemgetter("env_steps"))


def draw_panels(
    panels: Mapping[str, Mapping[str, Sequence[Curve]]],
    path: Path,
    *,
    metric: str,
    columns: int = 1,
    ended: bool = False,
    against: str = "environment steps",
    order: Sequence[str] = (),
) -> None:
    """Draw one panel below the other, or a grid of small ones, each with its own axes.

    Args:
        panels: by title, such as the environment: the curves of each setting's trainings, by label. Each curve is a
            thin line, with the mean over the steps that all of them cover, and a band from the lowest to the highest.
            The legend is inside a single panel with few labels, above small ones, and otherwise next to the panels. If
            a label is in several panels, it has the same colour in all of them.
        path: file of the picture; its suffix selects the format.
        metric: name of the values.
        columns: number of columns; more than one makes the panels small.
        ended: all trainings have ended, some by reaching their target early: mean and band go on to the last step of
            any of them, with the last value of each that has ended before.
        against: name of what the curves' steps count.
        order: labels that have the first colours, in this order, so that several pictures agree.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here: it takes half a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    columns, small = min(columns, len(panels)), columns > 1
    outside = not small and (len(panels) > 1 or any(len(groups) > _INSIDE for groups in panels.values()))
    lines = [sum(2 + len(label) // _LETTERS for label in groups) for groups in panels.values()]
    heights = [max(4.5 if len(panels) == 1 else 3.2, 0.16 * n) for n in lines]
    if small:
        heights = [2.7] * -(-len(panels) // columns)
    width = 4.0 * columns if small else 10.5 if outside else 7.5
    figure = Figure(figsize=(width, sum(heights)), dpi=110 if small else 150, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no global state, no display
    everything = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flatten()
    for axes in everything[len(panels) :]:
        axes.remove()
    labels = [label for groups in panels.values() for label in groups]
    ordered = list(dict.fromkeys([*order, *labels]))
    shown: dict[str, Any] = {}  # a line of each label, in small panels
    for axes, (title, groups) in zip(everything, panels.items(), strict=False):
        for place, (label, curves) in enumerate(groups.items()):
            i = ordered.index(label) if order or len(ordered) < len(labels) else place
            line = _LINES[i // len(_COLOURS) % len(_LINES)]
            drawn = _draw(axes, in_lines(label), curves, _COLOURS[i % len(_COLOURS)], line, ended)
            shown.setdefault(label, drawn)
        if groups and not small:
            where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if outside else {"loc": "best"}
            axes.legend(frameon=False, fontsize=8 if outside else 9, borderaxespad=0.5, **where)
        axes.set_title(textwrap.fill(title, _LETTERS) if small else title, loc="left", fontsize=9 if small else 11)
        axes.set_ylabel(metric)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.margins(x=0.01)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    if small:
        names = [label for label in ordered if label in shown]
        handles, words = [shown[label] for label in names], [*map(in_lines, names)]
        figure.legend(handles, words, loc="outside upper left", ncols=3 * columns, frameon=False, fontsize=9)
    figure.supxlabel(against, fontsize=10)
    figure.savefig(path)


def in_lines(label: str) -> str:
    r"""Break a label of settings into lines, but not between a setting and its value.

    >>> in_lines("ppo, n_env_steps 500000, evaluation_episodes 100, seed 1")
    'ppo, n_env_steps 500000,\nevaluation_episodes 100, seed 1'
    """
    bound = re.sub(r" (\S+)(?=,|$)", "\N{NO-BREAK SPACE}\\1", label)
    return textwrap.fill(bound, _LETTERS).replace("\N{NO-BREAK SPACE}", " ")


def _draw(
    axes: Any,  # noqa: ANN401 - of matplotlib
    label: str,
    curves: Sequence[Curve],
    colour: str,
    line: str,
    ended: bool,
) -> Any:  # noqa: ANN401
    """Draw the curves of a label, and return the line that stands for it."""
    if len(curves) == 1:
        (curve,) = curves
        look = {"color": colour, "linestyle": line, "linewidth": 2, "marker": "o", "markersize": 3}
        return axes.plot(*curve.points(), label=label, **look)[0]
    for curve in curves:
        axes.plot(*curve.points(), color=colour, linewidth=0.7, alpha=0.45)
    steps, values = together(curves, ended=ended)
    axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    spread = f"{label}: mean, lowest and highest of {len(curves)} runs"
    return axes.plot(steps, values.mean(axis=0), color=colour, linestyle=line, linewidth=2.2, label=spread)[0]


def together(curves: Sequence[Curve], *, ended: bool = False) -> tuple[Any, Any]:
    """Interpolate curves linearly at common steps, in the range that all of them cover.

    If all have ``ended``, the range goes on to the last step of any of them, and each keeps its last value from its end
    on.

    Returns:
        The steps, [S], and the values, [len(curves), S].
    """
    ends = [curve.steps[-1] for curve in curves]
    first, last = max(curve.steps[0] for curve in curves), max(ends) if ended else min(ends)
    inside = {step for curve in curves for step in curve.steps if first <= step <= last}
    steps = np.array(sorted(inside | {first}), dtype=np.float64)
    return steps, np.stack([np.interp(steps, *curve.points()) for curve in curves])
