"""`rlstruct plot`: learning curves of runs, those of one setting together."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from rlstruct.algos.evaluation import format_return
from rlstruct.algos.learning_curve import Curve, draw_panels, in_order
from rlstruct.algos.loggers import flat_settings
from rlstruct.algos.run_folder import read_lines
from rlstruct.cli.complaint import UserError, nearest, plural, say
from rlstruct.cli.record import ForeignRun, RunRecord, load

_TIME_BEHIND = re.compile(r"-\d{8}-\d{6}(-\d+)?$")  # of the name of a folder


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw learning curves; runs that differ only by seed make one, with a band.

    Attributes:
        runs: folders of runs.
        out: the picture, .png, .svg or .pdf.
        metric: column of metrics.csv that is drawn.
        title: stands above the picture, if all runs share an environment; None for its name.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("learning_curves.png")
    metric: str = "evaluation/mean_return"
    title: str | None = None


def run(arguments: Sequence[str]) -> None:
    """Draw as the words after ``plot`` say."""
    options: Plot = tyro.cli(Plot, args=arguments, prog="rlstruct plot")
    if not options.runs:
        raise UserError("name one folder of a run, or several: rlstruct plot runs/*")
    if options.out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {options.out}: expected a name that ends with .png, .svg or .pdf.")
    # runs/* holds profiles, too, and trainings that were stopped before they logged anything
    runs = [path for path in options.runs if (path / "metrics.csv").exists() or not path.exists()] or options.runs
    panels = _panels(runs, options.metric)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    metric = "return of the evaluations" if options.metric == "evaluation/mean_return" else options.metric
    titled = {options.title or next(iter(panels)): panels[next(iter(panels))]} if len(panels) == 1 else panels
    draw_panels(titled, options.out, metric=metric)
    for environment, groups in panels.items():
        for label, curves in groups.items():
            last = [curve.values[-1] for curve in curves]
            end = f"ends at {format_return(sum(last) / len(last))}"
            say(
                (f"{environment}: " if len(panels) > 1 else "")
                + f"{label}: {plural(len(curves), 'run')}, {end}"
                + (f" (from {format_return(min(last))} to {format_return(max(last))})" if last[1:] else "")
            )
    if left_out := sorted(map(str, set(options.runs) - set(runs))):
        say(f"left out, nothing was logged there: {', '.join(left_out)}")
    say(f"{options.out}")


def _panels(folders: Sequence[Path], metric: str) -> dict[str, dict[str, list[Curve]]]:
    """Read the curves: environment to label to those of one setting. Returns of two environments share no axis."""
    by_env: dict[str, list[tuple[Path, RunRecord | None]]] = {}
    for folder in folders:
        record = None
        with contextlib.suppress(ForeignRun):  # a program of the user's trained there
            record = load(folder)
        by_env.setdefault("other programs" if record is None else record.task.env, []).append((folder, record))
    panels: dict[str, dict[str, list[Curve]]] = {}
    for environment, runs in sorted(by_env.items()):
        labels = iter(labels_of([record for _, record in runs if record is not None]))
        others = iter(_labels_of_folders([folder for folder, record in runs if record is None]))
        groups = panels.setdefault(environment, {})
        for folder, record in runs:
            label = next(others if record is None else labels)
            groups.setdefault(label, []).append(read_curve(folder, metric))
    return panels


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
        known = f"only {', '.join(columns)}" if columns else "and no line yet"
        raise UserError(f"{file} has no column {metric!r}, {known}.{nearest(metric, columns)}")
    points = in_order(line for line in lines if metric in line)
    return Curve([line["env_steps"] for line in points], [line[metric] for line in points])


def labels_of(records: Sequence[RunRecord]) -> list[str]:
    """Name every run by the settings that tell it from the others; runs with equal names make one curve."""
    tasks = [asdict(record.task) for record in records]
    of_tasks = _differing(tasks)
    labels = []
    for record, task in zip(records, tasks, strict=True):
        # Algorithms have different settings, and different defaults: only equal ones are compared.
        same = [_settings(other) for other in records if other.algorithm == record.algorithm]
        settings = _settings(record)
        words = [str(task["env"])] if "env" in of_tasks else []
        words += [f"{name} {task[name]}" for name in of_tasks if name != "env"]
        words += [f"{name} {settings[name]}" for name in _differing(same)]
        labels.append(", ".join([record.algorithm, *words]))
    return labels


def _labels_of_folders(folders: Sequence[Path]) -> list[str]:
    """Name runs of other programs as `labels_of` does: by their folders' name and the settings that differ."""
    named = []
    for folder in folders:
        stored = json.loads((folder / "config.json").read_text())
        settings = flat_settings(stored if isinstance(stored, dict) else {"config.json": stored})
        named.append((_name_of(folder), {key: v for key, v in settings.items() if key.rpartition("/")[2] != "seed"}))
    labels = []
    for name, settings in named:
        of_settings = _differing([other for called, other in named if called == name])
        labels.append(", ".join([name, *(f"{key} {settings.get(key, 'missing')}" for key in of_settings)]))
    return labels


def _name_of(folder: Path) -> str:
    """Return the name that a `RunFolder` was made with: several runs of one program have the same."""
    return _TIME_BEHIND.sub("", folder.resolve().name)


def _settings(record: RunRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(record.config).items() if name != "seed"}


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({str(one.get(name, "missing")) for one in settings}) > 1]
