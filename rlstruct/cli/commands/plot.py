"""`rlstruct plot`: learning curves of runs, those of one setting together."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from rlstruct.algos import ALGORITHMS
from rlstruct.algos.training.evaluation import format_return
from rlstruct.algos.training.learning_curve import Curve, draw_panels, in_order
from rlstruct.algos.training.loggers import flat_settings
from rlstruct.algos.training.run_folder import read_lines
from rlstruct.cli.messages import UserError, check_output, nearest, plural, say
from rlstruct.cli.stored_run import ForeignRun, load_settings, read_settings

_TIME_BEHIND = re.compile(r"-\d{8}-\d{6}(-\d+)?$")  # end of a folder's name


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw learning curves; runs that differ only in their seed become one band.

    Attributes:
        runs: run folders.
        out: output file, .png, .svg or .pdf.
        metric: column of metrics.csv to draw.
        title: title of the figure if all runs share an environment; None for the environment's name.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("learning_curves.png")
    metric: str = "evaluation/mean_return"
    title: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct plot`` with these arguments."""
    options: Plot = tyro.cli(Plot, args=arguments, prog="rlstruct plot")
    if not options.runs:
        raise UserError("name one or more run folders: rlstruct plot runs/*")
    if options.out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {options.out}: expected a name that ends with .png, .svg or .pdf.")
    check_output("--out", options.out)
    # runs/* may also contain profiles, and trainings stopped before they logged anything
    runs = [path for path in options.runs if (path / "metrics.csv").exists() or not path.exists()] or options.runs
    panels = read_panels(runs, options.metric)
    metric = "return of the evaluations" if options.metric == "evaluation/mean_return" else options.metric
    title = options.title if len(panels) == 1 else None
    draw_panels({title or name: groups for name, groups in panels.items()}, options.out, metric=metric)
    for environment, groups in panels.items():
        for label, curves in groups.items():
            last = [curve.values[-1] for curve in curves]
            end = f"ends at {format_return(sum(last) / len(last))}"
            line = (
                (f"{environment}: " if len(panels) > 1 else "")
                + f"{label}: {plural(len(curves), 'run')}, {end}"
                + (f" (from {format_return(min(last))} to {format_return(max(last))})" if last[1:] else "")
            )
            say(textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))
    if left_out := sorted(map(str, set(options.runs) - set(runs))):
        say(f"left out, nothing was logged there: {', '.join(left_out)}")
    say(f"{options.out}")


def read_panels(folders: Sequence[Path], metric: str) -> dict[str, dict[str, list[Curve]]]:
    """Read the curves, by environment (returns of different environments need separate axes) and by label.

    A label names the settings that distinguish a run from the others; runs with equal labels become one curve.
    """
    panels: dict[str, dict[str, list[Curve]]] = {}
    runs = {folder: _described(folder) for folder in folders}
    for environment in sorted({run[0] for run in runs.values()}):
        mine = {folder: run[1:] for folder, run in runs.items() if run[0] == environment}
        of_tasks = _differing([task for _, task, _ in mine.values()])
        groups = panels.setdefault(environment, {})
        for folder, (name, task, settings) in mine.items():
            # Algorithms have different settings, and different defaults: only equal ones are compared.
            differing = _differing([other for called, _, other in mine.values() if called == name])
            words = [f"{key} {task[key]}" for key in of_tasks]
            words += [f"{key} {settings.get(key, 'missing')}" for key in differing]
            groups.setdefault(", ".join([name, *words]), []).append(read_curve(folder, metric))
    return panels


def _described(folder: Path) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """Return a run's environment, name, and the settings of task and algorithm, without the seed."""
    try:
        _, plain = read_settings(folder)
        if plain["algorithm"] not in ALGORITHMS:  # nothing is imported for a curve
            return plain["task"]["env"], plain["algorithm"], plain["task"], {**plain["config"], "seed": 0}
        run = load_settings(folder)
    except ForeignRun:  # a program of the user's trained there: several runs of one have the same name
        stored = json.loads((folder / "config.json").read_text())
        settings = flat_settings(stored if isinstance(stored, dict) else {"config.json": stored})
        name = _TIME_BEHIND.sub("", folder.resolve().name)
        return "other programs", name, {}, {k: v for k, v in settings.items() if k.rpartition("/")[2] != "seed"}
    settings = asdict(replace(run.config, seed=0))
    return run.task.env, run.algorithm, asdict(run.task), settings


def read_curve(folder: Path, metric: str) -> Curve:
    """Read one column of a run's ``metrics.csv``."""
    file = folder / "metrics.csv"
    if not file.exists():
        raise UserError(f"{folder} has no metrics.csv: nothing was logged.")
    try:
        lines = read_lines(file)
    except ValueError as error:
        raise UserError(str(error)) from None
    columns = list(dict.fromkeys(name for line in lines for name in line))
    if metric not in columns:
        contents = f"only {', '.join(columns)}" if columns else "and no lines yet"
        raise UserError(f"{file} has no column {metric!r}, {contents}.{nearest(metric, columns)}")
    points = in_order(line for line in lines if metric in line)
    return Curve([line["env_steps"] for line in points], [line[metric] for line in points])


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({str(one.get(name, "missing")) for one in settings}) > 1]
