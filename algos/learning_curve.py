"""The picture of a training: return against environment steps. Layer 4; needs matplotlib, from the extra ``train``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_TRAINING, _EVALUATION = "#9aa5b1", "#1f5fa8"


def draw_learning_curve(rows: Sequence[Mapping[str, float]], path: Path, *, title: str) -> None:
    """Draw the returns of a training and of its evaluations into a PNG file.

    Args:
        rows: lines of metrics with ``env_steps`` and, where there is something to draw, ``train/return`` or
            ``evaluation/mean_return`` and ``evaluation/std_return``.
        path: of the file to write.
        title: stands above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here: it takes half a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no global state, no display
    axes = figure.add_subplot()
    training = sorted((row["env_steps"], row["train/return"]) for row in rows if "train/return" in row)
    if training:
        steps, returns = zip(*training, strict=True)
        axes.plot(steps, returns, color=_TRAINING, linewidth=1.2, label="training, mean of an update")
    evaluations = sorted(
        (row["env_steps"], row["evaluation/mean_return"], row["evaluation/std_return"])
        for row in rows
        if "evaluation/mean_return" in row
    )
    if evaluations:
        steps, means, deviations = zip(*evaluations, strict=True)
        low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
        high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
        axes.fill_between(
            steps, low, high, color=_EVALUATION, alpha=0.15, linewidth=0, label="evaluation, ± 1 standard deviation"
        )
        axes.plot(
            steps,
            means,
            color=_EVALUATION,
            linewidth=2,
            marker="o",
            markersize=4,
            label="evaluation, mean of its episodes",
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("environment steps collected")
    axes.set_ylabel("return (sum of rewards of an episode)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if training or evaluations:
        axes.legend(frameon=False, loc="best", fontsize=9)
    figure.savefig(path)
