"""Weights of an agent that promises to be pure, and checks of that promise."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.core.pytree import named_tensors
from rlstruct.engine.precision import EXACT, count_different, difference, flip_fraction
from rlstruct.engine.streams import AsyncRead
from rlstruct.errors import Explained, warn_user
from rlstruct.rl_agent import RL_Agent

_CHANGES_IN_A_ROW = 3  # of an attribute, before a warning
_FAILED_PROBES, _FAILED_PROBES_COARSE = 2, 8  # that differ in a row, see `PurityProbe`
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_Part = tuple[str, nn.Module | Tensor | RL_Agent]
_PLAIN = {bool, int, float, str, types.NoneType, types.FunctionType, types.BuiltinFunctionType}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
RANDOM_IN_TRAINING = (*_DROPOUT, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules whose output, in train mode, depends on a generator or on the rest of the batch."""
FIX = (
    "`pure = True` promises that what __call__ returns depends on parameters, buffers and arguments only, but this "
    "depends on something else: a global, a Python value that changes, torch's generator. "
    "rlstruct.testing.check_agent finds out what; or set pure = False."
)


class Unavailable(Exception):
    """The executor cannot run this step; the message gives the reason."""


class PurityError(Explained, RuntimeError):
    """A step that promises to be pure returns other results when an executor runs it."""


def weights_of(owner: object) -> dict[str, Tensor]:
    """Return the tensors that an agent acts with, by name: parameters, buffers, and tensors in its attributes."""
    parts = list(_parts(owner))
    return _weights(parts, _modules(parts))


def modules_of(owner: object) -> dict[str, nn.Module]:
    """Return the modules of an agent and all modules within them, by name."""
    return _modules(list(_parts(owner)))


def _weights(parts: Sequence[_Part], modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    weights = {path: value for path, value in parts if isinstance(value, Tensor)}
    for path, module in modules.items():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):  # twice as fast as by name
            if tensor is not None:
                weights[f"{path}.{key}" if path else key] = tensor
    return weights


def _modules(parts: Sequence[_Part]) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    for path, value in parts:
        if isinstance(value, nn.Module):
            modules |= {f"{path}.{key}".strip("."): module for key, module in value.named_modules()}
    return modules


def _settings(parts: Sequence[_Part], modules: Mapping[str, nn.Module]) -> dict[str, tuple[object, ...]]:
    """Return what the code of an agent depends on besides its weights: classes, plain attributes and hooks, by name."""
    settings: dict[str, tuple[object, ...]] = {}
    agents = [(path, value) for path, value in parts if isinstance(value, RL_Agent)]
    for path, part in [*agents, *modules.items()]:
        plain = [pair for pair in vars(part).items() if type(pair[1]) in _PLAIN]  # a module's mode among them
        hooks = [*getattr(part, "_forward_hooks", ()), *getattr(part, "_forward_pre_hooks", ())]  # their numbers
        settings[path] = type(part), *plain, *hooks
    return settings


class WeightsMonitor:
    """Detector of replaced weights, modules and settings. New values in the same tensors do not count.

    A plain attribute that has changed in each of the last few checks is reported in one warning, because it discards
    every executor before it gains anything.

    Attributes:
        settings: classes, plain attributes and hooks of each agent and module at the last check.
        places: address and layout of each weight at the last check, see `place_of`.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._in_a_row: dict[tuple[str, object], int] = {}  # changes of a plain attribute, by module and name
        self._warned = False
        self.settings: dict[str, tuple[object, ...]] = {}
        self.places: dict[str, tuple[object, ...]] = {}
        self.replaced()

    def replaced(self) -> bool:
        """Return True if a tensor's address or layout, or a setting, has changed since the last check."""
        before, parts = (self.settings, self.places), list(_parts(self._owner))
        modules = _modules(parts)
        self.settings = _settings(parts, modules)
        self.places = {name: place_of(tensor) for name, tensor in _weights(parts, modules).items()}
        if before[0] != self.settings:
            self._count_changes(before[0])
        else:
            self._in_a_row.clear()
        return before != (self.settings, self.places)

    def _count_changes(self, before: Mapping[str, tuple[object, ...]]) -> None:
        """Count changes in a row of each plain attribute, and warn about the first one that changes all the time."""
        changed = []
        for path, (cls, *pairs) in self.settings.items():
            if path in before and before[path][0] is cls:
                changed += [(path, pair[0]) for pair in set(pairs) - set(before[path][1:]) if isinstance(pair, tuple)]
        self._in_a_row = {place: self._in_a_row.get(place, 0) + 1 for place in changed}
        always = [place for place, n in self._in_a_row.items() if n >= _CHANGES_IN_A_ROW]
        if always and not self._warned:
            self._warned = True
            path, name = always[0]
            cls = cast("type", self.settings[path][0])
            warn_user(
                f"{cls.__name__}: the attribute {name!r} has changed before {_CHANGES_IN_A_ROW} updates in a row. "
                "Compiled code and graphs keep its value, so they are discarded each time, and most steps run eagerly. "
                "Count in a buffer (register_buffer), or pass values that change in agent_info."
            )


def check_equal(expected: Any, actual: Any, eps: float = EXACT) -> None:  # noqa: ANN401 - pytrees
    """Raise PurityError unless an executor's results [B, ...] equal those of the step, up to rounding."""
    if odd := difference(named_tensors(expected), named_tensors(actual), eps):
        raise PurityError(f"{odd}. {FIX}")


def check_repeatable(expected: Any, again: Callable[[], Any], eps: float, device: torch.device) -> None:  # noqa: ANN401
    """Raise PurityError unless ``again()``, which runs a step once more, returns the same, up to rounding."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if odd := difference(named_tensors(expected), named_tensors(again()), eps):
            raise PurityError(f"{odd}. {FIX}")


def mismatch_reason(expected: Any, actual: Any, again: Callable[[], Any], eps: float, device: torch.device) -> str:  # noqa: ANN401
    """Compare a step's results with those of its compiled code; return why the code cannot be used, or "".

    ``again`` runs the step once more, which distinguishes a broken promise from a wrong compilation.
    """
    odd = difference(named_tensors(expected), named_tensors(actual), eps)
    if not odd:
        return ""
    check_repeatable(expected, again, eps, device)
    return f"{odd}, more than rounding explains; run again, the step itself returns the same"


class PurityProbe:
    """Occasional comparison of an executor's results with those of eager steps, without waiting for the device.

    A promise may be broken between two batches, for example by a global that changes. Executors round differently,
    which changes a sample in 1e-8 to 2e-7 of the rows in float32. So a probe counts only if more than one row in 200
    differs (one in 10 if any number is coarser than float32), and more than one row of several. Two probes in a row
    that count raise PurityError (eight for coarse numbers): in float32, rounding causes that at most once in 10^13
    probes.
    """

    def __init__(self) -> None:
        self._later: list[tuple[list[str], int, float, AsyncRead]] = []
        self._n_failed = 0

    def compare(self, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], eps: float = EXACT) -> None:
        """Compare tensors [B, ...] with the same keys, shapes and dtypes, and check earlier probes that are ready."""
        n_different = [count_different(value, actual[key], eps) for key, value in expected.items()]
        rows = len(next(iter(expected.values())))
        self._later.append((list(expected), rows, eps, AsyncRead(torch.stack(n_different))))
        while self._later and (numbers := self._later[0][-1].read()) is not None:
            names, rows, eps, _ = self._later.pop(0)
            n, odd = max(zip(numbers, names, strict=True), key=operator.itemgetter(0))
            self.check(odd, n, rows, eps)

    def check(self, odd: str, n_different: int, rows: int, eps: float = EXACT) -> None:
        """Raise PurityError if too many probes in a row differ; in this one ``odd`` has the most different rows."""
        counts = n_different > max(int(5 * flip_fraction(eps) * rows), int(rows > 1))
        self._n_failed = self._n_failed + 1 if counts else 0
        if self._n_failed >= (_FAILED_PROBES if eps <= EXACT else _FAILED_PROBES_COARSE):
            raise PurityError(f"{odd!r} differs from the agent's eager result in {n_different} of {rows} rows. {FIX}")


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a tensor's address followed by its layout: equal for identical views of the same memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _parts(value: object, path: str = "") -> Iterator[_Part]:
    """Yield an agent, its modules and tensors, including those in containers and in nested agents."""
    if isinstance(value, nn.Module | Tensor | RL_Agent):
        yield path, value
    inner: Mapping[object, object] = {}
    if isinstance(value, RL_Agent):
        inner = {key: part for key, part in vars(value).items() if key not in _OF_MODULES and part is not value}
    elif isinstance(value, Mapping):
        inner = value
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    for key, part in inner.items():
        yield from _parts(part, f"{path}.{key}".strip("."))


__getattr__ = renamed.attributes(__name__)
