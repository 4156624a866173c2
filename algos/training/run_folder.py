"""One folder per training: configuration, metrics, checkpoint, TensorBoard log, learning curve.

It needs the extra ``train``: tqdm and matplotlib are imported when a RunFolder is created, tensorboard when it is used.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rlstruct.algos.distributed.launch import launched_rank
from rlstruct.algos.training.checkpoint import lock_file, read_checkpoint, replace_file, write_checkpoint
from rlstruct.algos.training.evaluation import Evaluation
from rlstruct.algos.training.learning_curve import draw_learning_curve, in_order
from rlstruct.algos.training.loggers import CreateLogger, create_bar, find_loggers, flat_settings
from rlstruct.errors import BadTypeError, BadValueError, MissingFileError, UsageError, import_extra, kind_of
from rlstruct.profiling import operation

_COUNTERS = ("env_steps", "policy_version", "seconds", "steps_per_second")
_EVALUATION = ("evaluation/mean_return", "evaluation/std_return", "evaluation/mean_length", "evaluation/seconds")


class RunFolder:
    """Writes ``<root>/<name>-<date>-<time>/`` and shows a progress bar.

    ====================== =============================================================================
    file                   content
    ====================== =============================================================================
    config.json            the settings
    metrics.csv            one line per update that is logged and per evaluation; `close` sorts those until the
                           checkpoint, and those after it
    events.out.tfevents.*  the same for TensorBoard: ``tensorboard --logdir <root>``
    checkpoint.pt          the complete state for `resume`; ``torch.load(path, weights_only=True)``
    learning_curve.png     return against environment steps
    log.txt                everything that ``rlstruct train`` printed, except the progress bar
    ====================== =============================================================================

    No other process can `resume` the folder until it is closed or its process ends. With several learners under
    torchrun only rank 0 writes; in the others a RunFolder does nothing.

    Args:
        name: first part of the folder's name.
        config: a dataclass of settings.
        n_env_steps: number of environment steps at which the progress bar ends.
        root: folder of all runs, created if missing.
        progress: show a bar on the standard error stream; in a log file a line every ten seconds.
        loggers: destinations besides ``metrics.csv``: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, or a factory of
            your own logger; see `rlstruct.algos.training.loggers`.

    Raises:
        ImportError: the extra ``train``, or a package that a logger needs, is not installed.
        TypeError: config is not a dataclass instance.
        ValueError: a logger's name is unknown.

    Attributes:
        path: the folder; ``root`` if this object does nothing.
        checkpoint: the state to continue from; None in a new folder. The training clears it.
    """

    checkpoint: dict[str, Any] | None

    def __init__(
        self,
        name: str,
        config: object,
        *,
        n_env_steps: int,
        root: str | Path = "runs",
        progress: bool = True,
        loggers: Sequence[str | CreateLogger] = ("tensorboard",),
    ) -> None:
        text = _settings_text("RunFolder", config)
        find_loggers(loggers)
        for module in ("tqdm", "matplotlib"):
            import_extra(module, "train", "RunFolder")
        self.path, self.checkpoint, self._closed, self._writes = Path(root), None, True, not launched_rank()
        if not self._writes:
            return
        self.path = _new_folder(self.path, name)
        with contextlib.ExitStack() as undo:  # do not leave a folder without settings or log
            undo.callback(shutil.rmtree, self.path)
            replace_file(self.path / "config.json", lambda file: file.write(text))
            self._open(n_env_steps, progress, loggers, again=False)
            undo.pop_all()

    @classmethod
    def resume(
        cls,
        path: str | Path,
        *,
        n_env_steps: int | None = None,
        progress: bool = True,
        loggers: Sequence[str | CreateLogger] = ("tensorboard",),
    ) -> RunFolder:
        """Open the folder of an interrupted training. ``train(…, run=folder)`` then continues from its checkpoint.

        A loop of your own continues from whatever it has passed to `save_checkpoint`: ``folder.checkpoint``.

        Lines logged after that checkpoint are removed, because they will be logged again. Without a checkpoint, the
        training starts again in the same folder.

        Args:
            path: the folder.
            n_env_steps: number of steps at which the progress bar ends; by default unchanged.
            progress: show the bar.
            loggers: the loggers of the original training, which continue.

        Raises:
            FileNotFoundError: ``path`` is not a run folder.
            RuntimeError: another training writes into the folder.
            ValueError: the checkpoint or ``metrics.csv`` is damaged, or was not written by a training.
            ImportError: the extra ``train`` is not installed.
        """
        folder = cls.__new__(cls)
        folder.path, folder.checkpoint, folder._closed, folder._writes = Path(path), None, True, not launched_rank()
        if not folder._writes:
            return folder  # rank 0 sends the other learners their part of the checkpoint
        if not (folder.path / "config.json").exists():
            raise MissingFileError(
                f"RunFolder.resume: {folder.path} is not a run folder: it has no config.json. Pass the folder that a "
                "RunFolder has created."
            )
        folder._open(n_env_steps, progress, loggers, again=True)
        return folder

    def _open(
        self, n_env_steps: int | None, progress: bool, loggers: Sequence[str | CreateLogger], *, again: bool
    ) -> None:
        """Start the log, or continue it from where it was when the checkpoint was written."""
        config = self.path / "config.json"
        saved: dict[str, Any] = {"n_lines": 0, "seconds": 0.0, "n_env_steps": n_env_steps}
        with contextlib.ExitStack() as resources:
            resources.enter_context(lock_file(config, "RunFolder.resume" if again else "RunFolder"))
            if (file := self.path / "checkpoint.pt").exists():
                self.checkpoint = read_checkpoint(file, own=True)
                saved = self.checkpoint["run"]
            self._rows = read_lines(self.path / "metrics.csv", saved["n_lines"])
            last = int(max((line["env_steps"] for line in self._rows), default=-1))
            settings, self._loggers = flat_settings(json.loads(config.read_bytes())), []
            for create in find_loggers(loggers):
                self._loggers.append(create(self.path, settings, last + 1 if again else None))
                resources.callback(self._loggers[-1].close)
            self._columns: tuple[str, ...] = ()
            if again:
                self._rewrite()
            self._resources = resources.pop_all()
        self._n_env_steps = n_env_steps or saved["n_env_steps"]
        self._create_bar = functools.partial(create_bar, self._n_env_steps, progress, max(0, last))
        self._start = time.perf_counter() - saved["seconds"]
        self._last: tuple[int, float] | None = None  # environment steps and time of the previous line
        self._shown: dict[str, str] = {}
        self._n_saved = len(self._rows)  # lines that the checkpoint counts
        self._closed = self._begun = False

    def begin(self, config: object) -> None:
        """Check that a training with these settings may write here; `run_training` calls this.

        Raises:
            RuntimeError: the folder is closed, or a training has written here.
            ValueError: ``config.json`` has other values of the same settings.
        """
        if not self._is_open("begin"):
            return
        if self._begun and self._rows:
            raise UsageError(
                f"run_training: run is {self.path}, to which another training has written. Create a RunFolder for each "
                "training. To continue that training from its checkpoint, close this folder (run.close()) and pass "
                "run=RunFolder.resume(run.path)."
            )
        self._begun = True
        if self.checkpoint is None:  # otherwise `check_resumed` compares
            saved = json.loads((self.path / "config.json").read_bytes())
            now = json.loads(_settings_text("run_training", config))
            changed = [name for name in now if now[name] != saved.get(name)] if now.keys() == saved.keys() else []
            for name in changed[:1]:
                raise BadValueError(
                    f"run_training: {name} is {now[name]!r} in config, but {saved[name]!r} in {self.path}/config.json. "
                    "Pass the same settings to RunFolder and to the training, or call run.save_config(config) first."
                )

    def log(self, env_steps: int, policy_version: int, values: Mapping[str, float], *, at: float) -> None:
        """Write one line of numbers, and move the progress bar. The first line of a process has no rate.

        Args:
            env_steps: number of environment steps collected so far.
            policy_version: number of gradient steps so far.
            values: numbers by name; ``return`` is shown next to the bar.
            at: time of the update, from `time.perf_counter`.

        Raises:
            TypeError: a value is no number, or a count no whole one.
            RuntimeError: the folder is closed.
        """
        if not self._is_open("log"):
            return
        counts: dict[str, Any] = {"env_steps": env_steps, "policy_version": policy_version}
        for name, value in {**values, **counts}.items():
            if not isinstance(value, Integral if name in counts else Real):
                noun = "whole number" if name in counts else "number"
                raise BadTypeError(
                    f"RunFolder.log: {name} is {value!r}, {kind_of(value)}; expected a {noun}. Pass "
                    "tensor.item() of a tensor."
                )
        row: dict[str, float] = {"env_steps": env_steps, "policy_version": policy_version, "seconds": at - self._start}
        if self._last is not None and at > self._last[1]:
            row["steps_per_second"] = (env_steps - self._last[0]) / (at - self._last[1])
        self._last = (env_steps, at)
        row |= {f"train/{name}": value for name, value in values.items()}
        self._write(row)
        if "return" in values:
            self._shown["return"] = f"{values['return']:.1f}"
        self._bar.set_postfix(self._shown)
        self.advance(env_steps)

    def advance(self, env_steps: int) -> None:
        """Move the progress bar forward, never back: lines are logged a few updates late."""
        if not self._is_open("advance"):
            return
        self._bar.update(max(0, min(env_steps, self._bar.total or env_steps) - self._bar.n))

    def show_evaluation(self, n_episodes: int, n_ended: int, n_steps: int) -> None:
        """Show the progress of an evaluation next to the bar."""
        if not self._closed:
            self._shown["evaluating"] = f"{n_ended} of {n_episodes} episodes, step {n_steps}"
            self._bar.set_postfix(self._shown)

    def log_evaluation(self, result: Evaluation) -> None:
        """Write one line for an evaluation, at the environment steps of its weights."""
        if not self._is_open("log_evaluation"):
            return
        numbers = (result.mean_return, result.std_return, result.mean_length, result.seconds)
        row: dict[str, float] = {"env_steps": result.env_steps, "policy_version": result.policy_version}
        row |= {"seconds": time.perf_counter() - self._start}
        self._write(row | dict(zip(_EVALUATION, numbers, strict=True)))
        self._shown["evaluation"] = f"{result.mean_return:.1f}"
        self._shown.pop("evaluating", None)
        if not result.env_steps:
            self._bar.reset()  # measure the rate from the start of the training
        self._bar.set_postfix(self._shown)

    def save_config(self, config: object) -> None:
        """Replace the settings in ``config.json`` when a training continues with new ones, such as more steps.

        Raises:
            TypeError: config is not a dataclass instance.
        """
        text, file = _settings_text("RunFolder.save_config", config), self.path / "config.json"
        if self._closed:
            return
        # This file is locked, so it cannot be replaced. A single write is just as safe: a process that is killed has
        # written all of it or nothing.
        with file.open("r+b", buffering=0) as opened:
            opened.write(text.ljust(file.stat().st_size, b"\n"))

    @operation("checkpoint")
    def save_checkpoint(self, state: Mapping[str, object]) -> None:
        """Replace ``checkpoint.pt`` atomically.

        Args:
            state: tensors and plain values, nested in dicts and lists, which `resume` returns as ``checkpoint``; in a
                loop of your own whatever you need. `rlstruct.load` needs the network's weights as ``model``. The
                position of the log is added as ``run``.

        Raises:
            TypeError: the state has something else, which could not be read again; the old checkpoint stays.
            RuntimeError: the folder is closed.
        """
        if not self._is_open("save_checkpoint"):
            return
        with (self.path / "metrics.csv").open("ab") as file:
            os.fsync(file.fileno())  # the lines that a checkpoint counts must survive a power failure
        seconds = time.perf_counter() - self._start
        log = {"n_lines": len(self._rows), "seconds": seconds, "n_env_steps": self._n_env_steps}
        write_checkpoint(self.path / "checkpoint.pt", {**state, "run": log})
        self._n_saved = len(self._rows)

    def _is_open(self, method: str) -> bool:
        """Return False in a process that does not write; raise if the folder has been closed."""
        if self._writes and self._closed:
            raise UsageError(
                f"RunFolder.{method}: {self.path} is closed, and another process may write there. Continue it with "
                "RunFolder.resume(path)."
            )
        return self._writes

    def close(self, *, draw: bool = True) -> None:
        """Draw the learning curve and close all files. Calling it again does nothing.

        Args:
            draw: False skips the curve, which takes a second or more. ``rlstruct plot`` can draw it at any time.
        """
        if self._closed:
            return
        self._closed = True
        with self._resources:  # closed even if the disk is full
            # An evaluation is written when it ends, with the steps of its weights, so lines may be out of order. The
            # lines that the checkpoint counts stay first, because `resume` keeps them.
            n = self._n_saved
            if (ordered := in_order(self._rows[:n]) + in_order(self._rows[n:])) != self._rows:
                self._rows = ordered
                self._rewrite()
            if draw:
                draw_learning_curve(self._rows, self.path / "learning_curve.png", title=self.path.name)

    def __enter__(self) -> RunFolder:
        """Return the folder; leaving the block closes it."""
        return self

    def __exit__(self, error_class: type[BaseException] | None, *error: object) -> None:
        """Close all files. After an error the curve shows the training so far; Ctrl-C skips the curve."""
        self.close(draw=error_class is None or not issubclass(error_class, KeyboardInterrupt))

    @functools.cached_property
    def _bar(self) -> Any:  # noqa: ANN401 - a bar of tqdm, which has no types
        """Progress bar, created with the first number, so that its rate excludes the start of processes."""
        bar = self._create_bar()
        self._resources.callback(bar.close)
        return bar

    def _write(self, row: dict[str, float]) -> None:
        """Append a line to the CSV file and to the other loggers."""
        self._rows.append(row)
        others = {name: value for name, value in row.items() if name not in ("env_steps", "seconds")}
        for logger in self._loggers:
            logger.log(int(row["env_steps"]), others)
        if not row.keys() <= set(self._columns):
            self._rewrite()  # new names appear once or twice in a training
            return
        with (self.path / "metrics.csv").open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _rewrite(self) -> None:
        """Replace the whole CSV file."""
        present = {name for row in self._rows for name in row}
        others = sorted(present - set(_COUNTERS) - set(_EVALUATION))
        self._columns = (*_COUNTERS, *_EVALUATION, *others)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(self._rows)
        replace_file(self.path / "metrics.csv", lambda file: file.write(text.getvalue().encode()))


def _settings_text(where: str, config: object) -> bytes:
    if not is_dataclass(config) or isinstance(config, type):
        raise BadTypeError(f"{where}: config is {kind_of(config)}, expected an instance of a dataclass.")
    return (json.dumps(asdict(config), indent=2, default=str) + "\n").encode()


def read_lines(path: Path, n: int | None = None) -> list[dict[str, float]]:
    """Read the lines of a ``metrics.csv``, without the empty cells."""
    if n == 0:
        return []
    try:
        with path.open(newline="") as file:
            cells = list(itertools.islice(csv.DictReader(file), n))
        lines = [
            {name: int(cell) if cell.isdigit() else float(cell) for name, cell in row.items() if cell} for row in cells
        ]
    except (AttributeError, OSError, TypeError, ValueError) as error:  # AttributeError: a line with more cells
        raise BadValueError(f"{path} is damaged: {error}. Restore a copy, or train again.") from error
    if n is not None and len(lines) < n:
        raise BadValueError(
            f"{path} has {len(lines)} lines, expected at least {n}, those written before the checkpoint. Restore a "
            "copy, or train again."
        )
    return lines


def _new_folder(root: Path, name: str) -> Path:
    """Create a new folder, even if two trainings start in the same second."""
    stem = path = root / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path.parent.mkdir(parents=True, exist_ok=True)  # raises if it is a file or a broken link
    for attempt in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
        path = stem.with_name(f"{stem.name}-{attempt}")
    return path
