"""What an agent that promises to be pure may depend on: its weights; and what breaks that promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from rlstruct.engine.compiled import Tensors
from rlstruct.engine.streams import Later
from rlstruct.errors import Explained
from rlstruct.rl_agent import RL_Agent

Step = Callable[..., tuple[Tensors, Tensors]]
"""``step(carry, *inputs) -> (carry, record)``, pure; dicts of tensors."""

# Compiled code fuses and so rounds differently; a wrong answer is further off.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
RANDOM_IN_TRAINING = (*_DROPOUT, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules whose answer, in train mode, depends on a generator or on the rest of the batch."""
_FLIPPED = 1000  # one row in this many may differ: rounding decides between two classes that are equally near
MEND = (
    "`pure = True` promises that what __call__ returns depends on parameters, buffers and arguments only, but this "
    "depends on something else: a global, a Python value that changes, torch's generator. "
    "rlstruct.testing.check_agent finds out what; or set pure = False."
)


class PurityError(Explained, RuntimeError):
    """A step that promises to be pure gives other results when it does not run as it is."""


def weights_of(owner: object) -> dict[str, Tensor]:
    """Return the tensors that an agent acts with, by name: parameters, buffers, and tensors in its own attributes."""
    found = {path: value for path, value in _parts(owner) if isinstance(value, Tensor)}
    for path, module in modules_of(owner).items():
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        found |= {f"{path}.{key}".strip("."): tensor for key, tensor in held}
    return found


def modules_of(owner: object) -> dict[str, nn.Module]:
    """Return the modules of an agent and all modules within them, by name."""
    found: dict[str, nn.Module] = {}
    for path, value in _parts(owner):
        if isinstance(value, nn.Module):
            found |= {f"{path}.{key}".strip("."): module for key, module in value.named_modules()}
    return found


class WeightsWatch:
    """Notices when other tensors stand where an agent's weights were. New values in the same tensors are no change."""

    def __init__(self, owner: object) -> None:
        """Look for the first time."""
        self._owner = owner
        self._seen = self._look()

    def replaced(self) -> bool:
        """Look again: whether a tensor has another place or layout, or a module another mode, than at the last look."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> object:
        modes = {name: module.training for name, module in modules_of(self._owner).items()}
        return modes, {name: place_of(tensor) for name, tensor in weights_of(self._owner).items()}


def check_equal(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise PurityError unless an executor has found [B, ...] what the step itself gives, to rounding."""
    for key, value in expected.items():
        other = found.get(key)
        if other is None or other.shape != value.shape or other.dtype != value.dtype:
            got = "is missing" if other is None else f"is {list(other.shape)} {other.dtype}"
            raise PurityError(
                f"{key!r} {got} in the compiled answer, expected {list(value.shape)} {value.dtype}. {MEND}"
            )
        n_rows = value.shape[0] if value.dim() else 1
        n_different = int(_n_different(value, other))  # sync: once when the code is made
        if n_different > n_rows // _FLIPPED:
            raise PurityError(f"{key!r} differs in {n_different} of {n_rows} rows when compiled. {MEND}")


class Doubt:
    """Compares now and then what an executor gave with what the step gives as it is; nothing waits for the device.

    A promise may be broken between two batches, by a global that changes for example. Rounding may flip a draw once in
    millions, so one difference is none: two looks in a row have to find one.
    """

    def __init__(self) -> None:
        """Begin with no difference."""
        self._later: list[tuple[list[str], Later]] = []
        self._odd = ""  # what differed at the last look

    def look(self, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        """Compare [B, ...] with the same keys, shapes and dtypes, and judge what earlier looks have found."""
        n_different = [_n_different(value, found[key]) for key, value in expected.items()]
        self._later.append((list(expected), Later(torch.stack(n_different))))
        while self._later and (numbers := self._later[0][1].read()) is not None:
            names, _ = self._later.pop(0)
            before, self._odd = self._odd, next((name for name, n in zip(names, numbers, strict=True) if n), "")
            if before and self._odd:
                raise PurityError(f"{self._odd!r} is another one than the agent gives as it is. {MEND}")


def _n_different(value: Tensor, other: Tensor) -> Tensor:
    """Count the rows that differ by more than rounding, without a wait."""
    same = value == other
    if value.is_floating_point():
        same = torch.isclose(value, other, _RELATIVE, _ABSOLUTE, equal_nan=True)
    return (~(same.flatten(1).all(dim=1) if same.dim() > 1 else same.view(-1))).sum()


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return where a tensor is, and then its layout: equal for tensors that show the same memory in the same way."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _parts(value: object, path: str = "") -> Iterator[tuple[str, nn.Module | Tensor]]:
    """The modules and tensors that an agent holds, directly, in containers or in an agent within it."""
    if isinstance(value, nn.Module | Tensor):
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
