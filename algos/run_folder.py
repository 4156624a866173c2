"""One folder per training: configuration, metrics, checkpoint, TensorBoard log, learning curve. Layer 4.

The only module that needs the extra ``train``: tqdm, tensorboard and matplotlib are imported when a RunFolder is made.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rlstruct.algos.evaluation import Evaluation
from rlstruct.algos.learning_curve import draw_learning_curve

_COUNTERS = ("env_steps", "policy_version", "seconds", "steps_per_second")
_EVALUATION = ("evaluation/mean_return", "evaluation/std_return", "evaluation/mean_length", "evaluation/seconds")


class RunFolder:
    """Writes ``<root>/<name>-<date>-<time>/`` and shows a progress bar.

    ====================== =============================================================================
    file                   content
    ====================== =============================================================================
    config.json            the settings
    metrics.csv            one line for each look at the losses and for each evaluation, as they come
    events.out.tfevents.*  the same for TensorBoard: ``tensorboard --logdir <root>``
    checkpoint.pt          weights, optimiser, settings, counters; ``torch.load(path, weights_only=True)``
    learning_curve.png     return against environment steps
    ====================== =============================================================================

    Args:
        name: first part of the folder's name.
        config: a dataclass of settings.
        n_env_steps: where the progress bar ends.
        root: folder of all runs, made if missing.
        progress: show the bar, on the standard error stream.

    Raises:
        ImportError: the extra ``train`` is not installed.
        TypeError: config is not a dataclass instance.

    Attributes:
        path: the folder.
    """

    def __init__(
        self, name: str, config: object, *, n_env_steps: int, root: str | Path = "runs", progress: bool = True
    ) -> None:
        """Make the folder and write the settings."""
        if not is_dataclass(config) or isinstance(config, type):
            raise TypeError(f"RunFolder: config is a {type(config).__name__}, expected an instance of a dataclass.")
        tqdm = _extra("tqdm").tqdm
        writer = _extra("torch.utils.tensorboard").SummaryWriter
        _extra("matplotlib")
        self.path = _new_folder(Path(root), name)
        (self.path / "config.json").write_text(json.dumps(asdict(config), indent=2, default=str) + "\n")
        self._start = time.perf_counter()
        self._board = writer(str(self.path))
        # Made at the first line of the log, so that its rate does not count the start of the processes.
        self._create_bar = partial(
            tqdm, total=n_env_steps, unit="step", unit_scale=True, disable=not progress, dynamic_ncols=True
        )
        self._bar: Any = None
        self._last = (0, self._start)
        self._shown: dict[str, str] = {}
        self._rows: list[dict[str, float]] = []
        self._columns: tuple[str, ...] = ()
        self._closed = False

    def log(self, env_steps: int, policy_version: int, values: Mapping[str, float], *, at: float) -> None:
        """Write one line of numbers, and move the progress bar.

        Args:
            env_steps: collected until now.
            policy_version: updates until now.
            values: name to number; ``return`` is shown beside the bar.
            at: when that was, by `time.perf_counter`.
        """
        since_steps, since = self._last
        self._last = (env_steps, at)
        row = {"env_steps": env_steps, "policy_version": policy_version, "seconds": at - self._start}
        row |= {"steps_per_second": (env_steps - since_steps) / max(at - since, 1e-9)}
        row |= {f"train/{name}": value for name, value in values.items()}
        self._write(row)
        if "return" in values:
            self._shown["return"] = f"{values['return']:.1f}"
        bar = self._show()
        bar.update(min(env_steps, bar.total) - bar.n)

    def log_evaluation(self, result: Evaluation) -> None:
        """Write one line of numbers for an evaluation, at the environment steps of the weights that it judged."""
        numbers = (result.mean_return, result.std_return, result.mean_length, result.seconds)
        row: dict[str, float] = {"env_steps": result.env_steps, "policy_version": result.policy_version}
        row |= {"seconds": time.perf_counter() - self._start}
        self._write(row | dict(zip(_EVALUATION, numbers, strict=True)))
        self._shown["evaluation"] = f"{result.mean_return:.1f}"
        self._show()
        if self._last[0] == 0:
            self._last = (0, time.perf_counter())  # learning begins now

    def save_checkpoint(self, state: Mapping[str, object]) -> None:
        """Replace ``checkpoint.pt``; whoever reads it sees the old one or the new one, never a part.

        Args:
            state: tensors and plain values, nested in dicts and lists. Tensors are written as on the CPU, so that the
                file can be read on any machine.
        """
        on_cpu = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu"), dict(state))
        unfinished = self.path / "checkpoint.pt.unfinished"
        torch.save(on_cpu, unfinished)
        os.replace(unfinished, self.path / "checkpoint.pt")

    def close(self) -> None:
        """Draw the learning curve and close all files. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        self._board.close()
        draw_learning_curve(self._rows, self.path / "learning_curve.png", title=self.path.name)

    def __enter__(self) -> RunFolder:
        """Return the folder; leaving the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close all files, also after an error: the curve shows how far the training came."""
        self.close()

    def _show(self) -> Any:  # noqa: ANN401 - a bar of tqdm, which has no types
        """Return the progress bar, with the latest numbers beside it."""
        if self._bar is None:
            self._bar = self._create_bar()
        self._bar.set_postfix(self._shown)
        return self._bar

    def _write(self, row: dict[str, float]) -> None:
        """Append to the CSV and to the TensorBoard log."""
        self._rows.append(row)
        env_steps = int(row["env_steps"])
        for name, value in row.items():
            if name not in ("env_steps", "seconds"):
                self._board.add_scalar(name, value, env_steps)
        if row.keys() <= set(self._columns):
            self._append([row])
            return
        # New names come once or twice in a training: write the file again with a longer first line.
        present = {name for known in self._rows for name in known}
        others = sorted(present - set(_COUNTERS) - set(_EVALUATION))
        self._columns = (*_COUNTERS, *_EVALUATION, *others)
        with (self.path / "metrics.csv").open("w", newline="") as file:
            csv.DictWriter(file, self._columns).writeheader()
        self._append(self._rows)

    def _append(self, rows: list[dict[str, float]]) -> None:
        with (self.path / "metrics.csv").open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(rows)


def _new_folder(root: Path, name: str) -> Path:
    """Make a folder that nobody else has made."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1000):
        path = root / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"RunFolder: {root / stem} and 999 more exist. Choose another name.")


def _extra(module: str) -> Any:  # noqa: ANN401 - a module
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"RunFolder needs {module}, which is not installed. Install the extra: pip install 'rlstruct[train]'; "
            "or train without a run folder: run=None."
        ) from error
