"""Loggers besides ``metrics.csv``: TensorBoard, Weights & Biases, MLflow, a class of yours; and the progress bar.

A package is imported when its logger is made, and never otherwise.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlstruct.errors import BadValueError, UsageError, import_extra

_LINE_SECONDS = 10.0  # between two lines of a log file
_BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"

Settings = Mapping[str, "bool | int | float | str"]


class Logger(Protocol):
    """Takes the numbers of one training."""

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Write numbers by name, such as ``train/loss`` and ``evaluation/mean_return``.

        An evaluation that runs during the training comes late: later lines may have fewer ``env_steps``.
        """

    def close(self) -> None:
        """Write what waits, and end."""


CreateLogger = Callable[[Path, Settings, "int | None"], Logger]
"""Makes a logger for a run folder and its settings, as ``learning_rate`` and ``training/learning_rate``. The third
argument is None in a new run; in one that goes on, the environment steps from which it is logged again."""


class TensorBoardLogger:
    """Writes an event file into the run folder; the settings are in the tab HPARAMS, with the last evaluation."""

    def __init__(self, path: Path, settings: Settings, again_from: int | None) -> None:
        board = import_extra("torch.utils.tensorboard", "train", "RunFolder")
        summaries = importlib.import_module("torch.utils.tensorboard.summary")
        self._board = board.SummaryWriter(str(path), purge_step=again_from)
        # What SummaryWriter.add_hparams writes, but into this run in place of one below it.
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
    """Sends everything to Weights & Biases, in a run of the folder's name; ``WANDB_MODE=offline`` keeps it here."""

    def __init__(self, path: Path, settings: Settings, again_from: int | None) -> None:
        """Begin a run, or go on with that of this folder.

        Raises:
            RuntimeError: wandb begins none, usually because no user is logged in.
        """
        wandb = import_extra("wandb", "wandb", "RunFolder")
        try:
            self._run = wandb.init(id=path.name, name=path.name, dir=str(path), config=dict(settings), resume="allow")
        except wandb.Error as error:
            raise UsageError(
                f"RunFolder: wandb begins no run: {error} Run `wandb login` once, or set WANDB_MODE=offline, "
                "which keeps everything on this machine."
            ) from error
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._run.log({**values, "env_steps": env_steps})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class MlflowLogger:
    """Writes an MLflow run of the folder's name, below the active run if there is one, to ``MLFLOW_TRACKING_URI``."""

    def __init__(self, path: Path, settings: Settings, again_from: int | None) -> None:
        self._mlflow = import_extra("mlflow", "mlflow", "RunFolder")
        before = []
        if again_from is not None:
            query = f"attributes.run_name = '{path.name}'"
            before = self._mlflow.search_runs(filter_string=query, max_results=1, output_format="list")
        known = {"run_id": before[0].info.run_id} if before else {"run_name": path.name}
        self._id: str = self._mlflow.start_run(**known, nested=True).info.run_id
        if not before:  # MLflow keeps the settings that a run began with
            self._mlflow.log_params(dict(settings))

    def log(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._mlflow.log_metrics(dict(values), step=env_steps, run_id=self._id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


LOGGERS: dict[str, CreateLogger] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}


def find_loggers(chosen: Sequence[str | CreateLogger]) -> list[CreateLogger]:
    """Return what makes the chosen loggers."""
    if unknown := [name for name in chosen if isinstance(name, str) and name not in LOGGERS]:
        raise BadValueError(
            f"RunFolder: loggers has {unknown[0]!r}, expected some of {', '.join(LOGGERS)}, or a function."
        )
    return [LOGGERS[create] if isinstance(create, str) else create for create in chosen]


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Write nested settings out, one plain value for each path: what is neither number nor text becomes text.

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


def create_bar(total: int | None, progress: bool) -> Any:  # noqa: ANN401 - tqdm has no types
    """Make what shows the progress on the standard error stream; nothing is shown without ``progress``."""
    tqdm = import_extra("tqdm", "train", "RunFolder").tqdm
    if progress and not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        return LogLines(total)
    return tqdm(total=total, unit="", unit_scale=True, disable=not progress, dynamic_ncols=True, bar_format=_BAR)


class LogLines:
    """The methods of a tqdm bar that a RunFolder calls; writes a line every ten seconds, the first after ten.

    Args:
        total: environment steps of the training; None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self.total, self.n = total, 0
        self._shown: Mapping[str, str] = {}
        self._start = self._written = time.monotonic()
        self._from = 0

    def update(self, n: int) -> None:
        """Count ``n`` more steps."""
        self.n += n
        self._write()

    def set_postfix(self, shown: Mapping[str, str]) -> None:
        """Show these numbers in later lines."""
        self._shown = shown
        self._write()

    def reset(self) -> None:
        """Begin the rate anew."""
        self._start, self._from = time.monotonic(), self.n

    def close(self) -> None:
        """Write nothing more."""

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
