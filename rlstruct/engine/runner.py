"""The runner of every fast path: it creates and replaces compiled code, captured graphs and kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlstruct.core import DictTensor
from rlstruct.core.pytree import Form, TreeSpec
from rlstruct.engine.donated import is_donated
from rlstruct.engine.precision import EXACT, Precision
from rlstruct.engine.purity import (
    FIX,
    PurityError,
    PurityProbe,
    Unavailable,
    WeightsMonitor,
    mismatch_reason,
    weights_of,
)
from rlstruct.engine.streams import Stream
from rlstruct.profiling import operation as profiled

MOST_FORMS = 64
"""Largest number of compiled executors of one step, one for each form of arguments."""
R = TypeVar("R")


class Executor(Protocol):
    """A fast implementation of a step, for one form of arguments: keys, shapes and dtypes.

    Attributes:
        name: as `RL_Batcher.stats` shows it.
        prepare: method that prepares for arguments of this form, which keep their values. The first call is then
            compared with the step itself. None: the first call captures the step. That follows an eager call, in which
            libraries initialise what a capture cannot; nothing is compared, and there is one executor at a time.
        writes: whether the step writes to its arguments.
    """

    name: str
    writes: bool

    @property
    def prepare(self) -> Callable[..., None] | None:
        """Return the method; see above."""

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - pytrees, like all arguments and results here
        """Take the step; the first call may raise `Unavailable`, or anything if it is compared."""

    def rebind(self, places: Mapping[tuple[object, ...], str], weights: Mapping[str, Tensor]) -> bool:
        """Read ``weights`` from now on instead of the tensors at ``places``; return False if that is impossible."""


Make = Callable[..., Executor]  # of a step; further arguments are those of the executor


@dataclass(eq=False, repr=False)
class Runner(Generic[R]):
    """A step and its fast executors, which return equal results.

    The first call creates the executor and compares both, or runs the step itself if the second one is to capture it;
    later calls run the executor. If it cannot be created, or returns something else, the runner falls back to the step
    permanently. When weights are replaced, the executor reads the new tensors or is created again.

    Args:
        step: takes and returns pytrees; depends only on them and on the weights of its owner.
        owner: holds the weights: an agent, a module, or a container of several.
        device: where the step computes.
        make: creates executors; None to always run the step itself.
        alike: all arguments have the same form until `forget` is called, so the runner does not compare forms.
        failed: called with the reason if the runner falls back.
        stream: where to queue the work, on CUDA.
        operation: name of the executor's work in a profile.

    Attributes:
        why_not: reason why the step runs without an executor although one was requested, or "".
    """

    step: Callable[..., R]
    owner: object
    device: torch.device
    make: Make | None
    _: KW_ONLY
    alike: bool = False
    failed: Callable[[str], None] | None = None
    stream: Stream | None = None
    operation: str = ""
    why_not: str = field(default="", init=False)
    _form: Form | None = field(default=None, init=False)  # of the last arguments
    _memory_form: Form | None = field(default=None, init=False)  # of the last donated argument
    _executors: dict[Form | None, Executor] = field(default_factory=dict, init=False)
    _watch: WeightsMonitor | None = field(default=None, init=False)  # set by the first call that may create an executor
    _is_warm: bool = field(default=False, init=False)  # an eager call precedes a capture
    _precision: Precision | None = field(default=None, init=False)  # of the step's numbers, once measured
    _probe: PurityProbe = field(default_factory=PurityProbe, init=False)

    def __call__(self, *args: Any) -> R:  # noqa: ANN401
        """Take the step."""
        if self.make is None:
            return self.step(*args)
        if self.stream is None:
            return self._run(args)
        with self.stream.work():
            result = self._run(args)
        self.stream.to_caller(TreeSpec(result).flatten(result))
        return result

    @property
    def executor(self) -> str:
        """Name of the current executor; ``"eager"`` for the step itself."""
        return next(reversed(self._executors.values())).name if self._executors else "eager"

    def weights_changed(self) -> None:
        """Check for replaced weights, modules and settings after an update of the owner.

        This costs nothing before there may be an executor.
        """
        if (watch := self._watch) is None:
            return
        settings, names = watch.settings, {place: name for name, place in watch.places.items()}
        if not watch.replaced():
            return
        self._precision = None
        weights, alike = weights_of(self.owner), settings == watch.settings
        kept = {form: one for form, one in self._executors.items() if alike and one.rebind(names, weights)}
        self._executors = kept
        self._is_warm = bool(kept)

    def forget(self) -> None:
        """Discard all executors: the step will read other tensors or do something else."""
        self._executors.clear()
        self._is_warm, self._watch = False, None

    @torch.no_grad()
    def probe(self, actual: DictTensor, *args: Any) -> None:  # noqa: ANN401
        """Run the step itself and compare the first part of its result with ``actual``; see `PurityProbe`."""
        result: Any = self.step(*args) if self._precision is not None else self._measured(args)
        self._probe.compare(dict(result[0].items()), dict(actual.items()), self._eps())

    @torch.no_grad()
    def times(self, n: int, *args: Any) -> list[Any]:  # noqa: ANN401
        """Take a step whose last argument is `Donated` n times, and write each result for its last argument over that.

        Returns:
            The results without that last part.
        """
        results: list[Any] = []
        while len(results) < n:
            executor: Any = self.make and self._executors.get(self._form_of(args))  # a Compiled, if any
            rest: list[Any] | None = executor and self._profiled(executor.times, n - len(results), *args)
            if rest is not None:
                return results + rest
            answer: Any = self(*args)
            *result, new = answer
            for key, value in new.items():
                args[-1][key].copy_(value)
            results.append(tuple(result))
        return results

    def _run(self, args: tuple[Any, ...]) -> R:
        form = self._form_of(args)
        executor = self._executors.get(form)
        if executor is None:
            return self._begin(form, args)
        return self._execute(executor, args)

    def _form_of(self, args: tuple[Any, ...]) -> Form | None:
        """Return the form of arguments, by which executors are found; None if all have the same."""
        if self.alike:
            return None
        if is_donated(args):
            if args[-1].form != self._memory_form:  # weights of other shapes
                self._memory_form = args[-1].form
                self._executors.clear()
            args = args[:-1]
        if self._form is None or not self._form.fits(args):
            self._form = Form(args)
        return self._form

    def _begin(self, form: Form | None, args: tuple[Any, ...]) -> R:
        """Warm up, or create an executor for this form of arguments and run it."""
        if self._watch is None:
            self._watch = WeightsMonitor(self.owner)
        executor = self.make(self.step)  # type: ignore[misc]  # `__call__` has returned without one
        prepare = executor.prepare
        if prepare is None and not self._is_warm:
            self._is_warm = True
            return self.step(*args)
        while len(self._executors) >= (1 if prepare is None else MOST_FORMS):
            del self._executors[next(iter(self._executors))]
        if prepare is not None:
            return self._compare(executor, prepare, form, args)
        self._executors[form] = executor
        return self._execute(executor, args)

    def _execute(self, executor: Executor, args: tuple[Any, ...]) -> R:
        try:
            result: R = self._profiled(executor, *args)
        except Unavailable as error:
            self._give_up(str(error))
            result = self.step(*args)
        return result

    def _profiled(self, call: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        with profiled(self.operation) if self.operation else contextlib.nullcontext():
            return call(*args)

    def _compare(self, executor: Executor, prepare: Callable[..., None], form: Form | None, args: tuple[Any, ...]) -> R:
        """Run the step and a new executor, and keep the executor if both agree.

        Returns:
            The result of the executor if it is kept, because later calls round in the same way: so a resumed training
            continues bit for bit. Otherwise the step's.
        """
        copies = tree_map_only(Tensor, torch.clone, args)
        others = tree_map_only(Tensor, torch.clone, args) if executor.writes else args
        places = WeightsMonitor(self.owner).places
        result = self._measured(args)
        if places != WeightsMonitor(self.owner).places:
            raise PurityError(f"it assigns other tensors to its attributes while it acts. {FIX}")
        before = {name: value.clone() for name, value in weights_of(self.owner).items()}
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                prepare(*args)
                actual = executor(*copies)
                if is_donated(args):  # what it has written over its arguments belongs to its result, too
                    *answer, rest = actual
                    own: Any = result
                    actual = (*answer, {key: rest.get(key, copies[-1][key]) for key in own[-1]})
        except Exception as error:  # tracing and compilers raise anything
            for name, value in weights_of(self.owner).items():
                value.detach().copy_(before[name])  # undo in-place operations, which tracing executes
            self._give_up(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            return result

        def again() -> Any:  # noqa: ANN401
            once_more = self.step(*others)
            return others if executor.writes else once_more

        expected, answer = (args, copies) if executor.writes else (result, actual)
        if why := mismatch_reason(expected, answer, again, self._eps(), self.device):
            self._give_up(why)
            return result
        self._executors[form] = executor
        if executor.writes:
            structure = TreeSpec(args)
            for place, value in zip(structure.flatten(args), structure.flatten(copies), strict=True):
                place.copy_(value)
        kept: R = actual
        return kept

    def _measured(self, args: tuple[Any, ...]) -> R:
        """Run the step itself and record the precision of its numbers."""
        with Precision() as self._precision:
            return self.step(*args)

    def _eps(self) -> float:
        return EXACT if self._precision is None else self._precision.eps(self.device)

    def _give_up(self, why: str) -> None:
        self.why_not, self.make = why, None
        self._executors.clear()
        if self.failed is not None:
            self.failed(why)
