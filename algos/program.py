"""How a learner's update runs: as it is, with compiled parts, or recorded as one graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from rlstruct.engine import private
from rlstruct.engine.acting import PROMISE
from rlstruct.engine.compiled import Compiled, Tensors, told, warn_uncompiled
from rlstruct.engine.graph import Graph, RecordingError, recorder_of
from rlstruct.engine.precision import Precision
from rlstruct.engine.promise import Step, WeightsWatch, why_unlike
from rlstruct.engine.streams import Lane, lane_of
from rlstruct.errors import warn_user
from rlstruct.profiling import operation

_logger = logging.getLogger(__name__)


class Program:
    """Runs an update by the executors that are asked for, if it is pure; else as it is.

    Args:
        step: the update, a step of `rlstruct.engine` with an empty carry; it writes to the weights in place.
        watched: agents or modules whose weights the update reads.
        device: where it learns.
        pure: whether it depends on them and its arguments alone, see `RL_Agent.pure`.
        compiled: compile the parts of the update that are called through `part`.
        graph: record the whole update, where the device can record.
    """

    def __init__(
        self, step: Step, watched: object, device: torch.device, *, pure: bool, compiled: bool, graph: bool
    ) -> None:
        """Compile and record nothing yet."""
        recorder = recorder_of(device) if graph else None
        if not pure and (compiled or recorder is not None):
            _logger.info("run_training: updates on %s could run faster, but the agent does not: %s.", device, PROMISE)
        self._step, self._device = step, device
        self._graph = Graph(step, recorder) if recorder is not None and pure else None
        self._lane = Lane() if self._graph is None else lane_of(device)  # CUDA records on no stream but one's own
        self._compiles = compiled and pure and not private.missing("compiled")
        self._codes: dict[object, Compiled] = {}
        self._weights = WeightsWatch(watched)
        self._warm = False

    def __call__(self, given: Tensors) -> Tensors:
        """Run the update."""
        with self._lane.work():
            terms = self._run(given)
        self._lane.give(terms.values())
        return terms

    def _run(self, given: Tensors) -> Tensors:
        if (self._graph is not None or self._codes) and self._weights.replaced():
            self.forget()
        if self._graph is not None and self._warm:
            try:
                with operation("graph"):
                    return self._graph({}, given)[1]
            except RecordingError as error:
                self._graph = None
                warn_user(
                    "run_training: an update cannot be recorded as one graph and runs step by step, slower and with "
                    f"equal results: {error}. graph=False in the configuration does not warn."
                )
        self._warm = True  # libraries have made what they need once the update has run as it is
        return self._step({}, given)[1]

    def part(self, name: str, fn: Callable[..., Sequence[Tensors]], *given: Tensors) -> Sequence[Tensors]:
        """Call a pure function of dicts of tensors, compiled if that is asked for; the first call compares.

        ``name`` is that of the operation that compiled code is; as it is, the function enters operations of its own.

        Raises:
            PurityError: compiled code gives something else.
        """
        if not self._compiles:
            return fn(*given)
        key = fn, *(tensor.shape for tensors in given for tensor in tensors.values())
        if (code := self._codes.get(key)) is not None:
            with operation(name):
                return code(*given)
        return self.compile(key, fn, *given)

    def compile(self, key: object, fn: Callable[..., Sequence[Tensors]], *given: Tensors) -> Sequence[Tensors]:
        """Compile a part for such arguments, and return what it gives as it is; see `part`."""
        code = Compiled(fn)  # type: ignore[arg-type]  # as many dicts as it likes
        with Precision() as precision:
            expected = fn(*given)
        try:
            found = code(*given)
        except Exception as error:  # whatever tracing and a compiler may say
            why = told(error)
        else:
            eps = precision.eps(self._device)
            why = why_unlike(expected, found, lambda: fn(*given), eps, self._device)
        if why:
            self._compiles = False
            warn_uncompiled("run_training: an update", why, "compile_update")
        else:
            self._codes[key] = code
        return expected

    def forget(self) -> None:
        """Compile and record anew: other tensors stand where weights, or the optimiser's, have been."""
        self._codes.clear()
        self._warm = False
        if self._graph is not None:
            self._graph.forget()
