"""Executors of a learner's update: the whole as one recorded graph, parts of it as compiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rlstruct.engine.compiled import warn_uncompiled
from rlstruct.engine.executors import EXECUTORS, PROMISE
from rlstruct.engine.runner import Runner
from rlstruct.engine.streams import stream_on
from rlstruct.errors import warn_user

_logger = logging.getLogger(__name__)


class Program:
    """Runs an update by the executors that are asked for, if it is pure; else eagerly.

    Args:
        step: the update of a batch; it writes to the weights in place.
        watched: agents or modules whose weights the update reads.
        device: where it learns.
        pure: whether it depends on them and the batch alone, see `RL_Agent.pure`.
        compiled: compile the parts of the update that are made by `part`.
        graph: record the whole update, where the device can record.

    Attributes:
        update: runs the whole update.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        watched: object,
        device: torch.device,
        *,
        pure: bool,
        compiled: bool,
        graph: bool,
    ) -> None:
        make = EXECUTORS["graph"](device) if graph else None
        if not pure and (compiled or make is not None):
            _logger.info("run_training: updates on %s could run faster, but the agent does not: %s.", device, PROMISE)
        self._watched, self._device = watched, device
        self._compiled = EXECUTORS["compiled"](device) if compiled and pure else None
        self._warned = False
        make = make if pure else None
        stream = None if make is None else stream_on(device)  # CUDA records on no stream but one's own
        self.update: Runner[Any] = Runner(
            step, watched, device, make, failed=_warn_unrecorded, stream=stream, operation="graph"
        )
        self._runners = [self.update]

    def part(self, name: str, step: Callable[..., Any]) -> Runner[Any]:
        """Return what calls a pure part of the update, as compiled code if that is asked for.

        ``name`` is that of the operation that compiled code is; eagerly, the step enters its own operations.
        """
        runner = Runner(step, self._watched, self._device, self._compiled, failed=self._warn, operation=name)
        self._runners.append(runner)
        return runner

    def weights_changed(self) -> None:
        """Look for replaced weights; see `Runner`."""
        for runner in self._runners:
            runner.weights_changed()

    def forget(self) -> None:
        """Compile and record anew: other tensors stand where weights, or the optimiser's, have been."""
        for runner in self._runners:
            runner.forget()

    def _warn(self, why_not: str) -> None:
        if not self._warned:
            self._warned = True
            warn_uncompiled("run_training: an update", why_not, "compile_update")


def _warn_unrecorded(why_not: str) -> None:
    warn_user(
        "run_training: an update cannot be recorded as one graph and runs step by step, slower and with equal results: "
        f"{why_not}. graph=False in the configuration does not warn."
    )
