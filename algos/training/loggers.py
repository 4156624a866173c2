"""Loggers in addition to ``metrics.csv``: TensorBoard, Weights & Biases, MLflow or your own; and the progress bar.

A package is imported only when its logger is created.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlstruct.errors import BadValueError, UsageError, import_extra

_WIDE = 110  # columns of a terminal that holds a bar and all its numbers
_LINE_SECONDS = 10.0  # between two lines of a log file
_BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"

Settings = Mapping[str, "bool | int | float | str"]


class Logger(Protocol):
    """Protocol of a logger: the destination of one training's numbers."""

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Write numbers by name, such as ``train/loss`` and ``evaluation/mean_return``.

        An evaluation that runs during the training arrives late, so ``env_steps`` may decrease between calls.
        """

    def close(self) -> None:
        """Flush and close."""


CreateLogger = Callable[[Path, Settings, "int | None"], Logger]
"""Creates a logger from a run folder and its settings, such as ``learning_rate`` and ``training/learning_rate``. The
third argument is None in a new run; in a resumed run it is the environment step at which logging continues."""


class TensorBoardLogger:
    """Writes an event file into the run folder; the tab HPARAMS shows the settings and the last evaluation."""

    def __init__(self, path: Path, settings: Settings, again_from: int | None) -> None:
        board = import_extra("torch.utils.tensorboard", "train", "RunFolder")
        summaries = importlib.import_module("torch.utils.tensorboard.summary")
        self._board = board.SummaryWriter(str(path), purge_step=again_from)
        # As SummaryWriter.add_hparams, but in this run instead of a sub-run.
        *begins, self._ends = summaries.hparams(dict(settings), {"evaluation/mean_return": 0.0})
        for summary in begins:
            self._board.file_writer.add_summary(summary)

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in values.items():
            self._board.add_scalar(name, value, env_steps)

    def close(self) -> None:
        """Close the file."""
        self._board.file_writer.add_summary(self._ends)
        self._board.close()


class WandbLogger:
    """Sends everything to Weights & Biases, as a run with the folder's name; ``WANDB_MODE=offline`` keeps it local."""

    def __init__(self, path: Path, settings: Settings, again_from: int | None) -> None:
        """Start a run, or continue the one of this folder.

        Raises:
            RuntimeError: wandb cannot start a run, usually because no user is logged in.
        """
        wandb = import_extra("wandb", "wandb", "RunFolder")
        try:
            self._run = wandb.init(id=path.name, name=path.name, dir=str(path), config=dict(settings), resume="allow")
        except wandb.Error as error:
            raise UsageError(
                f"RunFolder: wandb cannot start a run: {error} Run `wandb login` once, or set WANDB_MODE=offline, "
                "which keeps everything on this machine."
            ) from error
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._run.log({**values, "env_steps": env_steps})

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._run.finish()


class MlflowLogger:
    """Writes an MLflow run with the folder's name to ``MLFLOW_TRACKING_URI``, nested in the active run, if any."""

    def __init__(self, path: Path, settings: Settings, again_from: int | None) -> None:
        self._mlflow = import_extra("mlflow", "mlflow", "RunFolder")
        before = []
        if again_from is not None:
            query = f"attributes.run_name = '{path.name}'"
            before = self._mlflow.search_runs(filter_string=query, max_results=1, output_format="list")
        identity = {"run_id": before[0].info.run_id} if before else {"run_name": path.name}
        self._id: str = self._mlflow.start_run(**identity, nested=True).info.run_id
        if not before:  # MLflow does not let a run change its settings
            self._mlflow.log_params(dict(settings))

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._mlflow.log_metrics(dict(values), step=env_steps, run_id=self._id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


LOGGERS: dict[str, CreateLogger] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}


def find_loggers(chosen: Sequence[str | CreateLogger]) -> list[CreateLogger]:
    """Return the factories of the chosen loggers."""
    if unknown := [name for name in chosen if isinstance(name, str) and name not in LOGGERS]:
        raise BadValueError(
            f"RunFolder: loggers has {unknown[0]!r}, expected some of {', '.join(LOGGERS)}, or a function."
        )
    return [LOGGERS[create] if isinstance(create, str) else create for create in chosen]


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Flatten nested settings to one value per path; values other than numbers and strings become strings.

    >>> flat_settings({"training": {"seed": 0, "sizes": [64, 64]}})
    {'training/seed': 0, 'training/sizes': '[64, 64]'}
    """
    flat: dict[str, bool | int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def create_bar(total: int | None, progress: bool, first: int = 0) -> Any:  # noqa: ANN401 - tqdm has no types
    """Create the progress bar on standard error, beginning at step ``first``; without ``progress`` it shows nothing."""
    tqdm = import_extra("tqdm", "train", "RunFolder").tqdm
    if progress and not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        return LogLines(total, first)

    class Bar(tqdm):  # type: ignore[misc, valid-type]  # tqdm has no types
        def set_postfix(self, shown: Mapping[str, str]) -> None:
            """Show these numbers; while an evaluation runs, a narrow terminal shows only its progress."""
            if "evaluating" in shown and shutil.get_terminal_size().columns < _WIDE:
                shown = {"evaluating": shown["evaluating"].replace(" of ", "/").replace(" episodes", "")}
            super().set_postfix(shown)

    look = {"unit": "", "unit_scale": True, "dynamic_ncols": True, "bar_format": _BAR}
    return Bar(total=total, initial=first, disable=not progress, **look)


class LogLines:
    """The methods of a tqdm bar that a RunFolder calls; writes a line every ten seconds, the first after ten.

    Args:
        total: environment steps of the training; None if unknown.
        first: environment steps before this process; the rate excludes them.
    """

    def __init__(self, total: int | None, first: int = 0) -> None:
        self.total, self.n = total, first
        self._shown: Mapping[str, str] = {}
        self._written = time.monotonic()
        self.reset()

    def update(self, n: int) -> None:
        """Add ``n`` steps."""
        self.n += n
        self._write()

    def set_postfix(self, shown: Mapping[str, str]) -> None:
        """Show these numbers in later lines."""
        self._shown = shown
        self._write()

    def reset(self) -> None:
        """Restart the measurement of the rate."""
        self._start, self._from = time.monotonic(), self.n

    def close(self) -> None:
        """Stop writing."""

    def _write(self) -> None:
        now = time.monotonic()
        if now < self._written + _LINE_SECONDS:
            return
        self._written = now
        rate = (self.n - self._from) / max(now - self._start, 1e-9)
        of = "" if self.total is None else f" of {self.total:,}"
        numbers = "".join(f", {name} {value}" for name, value in self._shown.items())
        sys.stderr.write(f"{self.n:,}{of} steps, {rate:,.0f} per second{numbers}\n")
        sys.stderr.flush()
