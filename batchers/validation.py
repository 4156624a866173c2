"""Checks of each batch for invalid actions and NaN, on the batch's device.

Environments that compute with tensors raise no error: to them, an action that does not exist is just another number,
and NaN passes through networks unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.engine.streams import AsyncRead
from rlstruct.engine.validity import NAN_FRAME, NAN_REWARD, ActionCheck
from rlstruct.errors import BadValueError, tag_environment
from rlstruct.spaces import advice_on

_VALID = -1


class BatchValidator:
    """Checks of actions against the action space, and of frames and rewards for NaN.

    On the CPU a batch is checked at once. On other devices only the first one is. The results for later ones are read
    when the device has finished, without waiting, so an error is raised a batch or two late.

    Args:
        space: action space of one environment. In a Box only NaN is an error, because environments clip actions.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._check = ActionCheck(space)
        self._actions = self._check.leaves
        self._names: list[str] = []  # of the tensors that `first_invalid` checked
        self._read = False  # whether a batch has been checked at once
        self._later: list[
            tuple[int, AsyncRead]
        ] = []  # number of environments, and result of `first_invalid`, for each batch

    @torch.no_grad()
    def first_invalid(self, steps: Rollout, n_steps: int) -> Tensor:
        """Return the first wrong position t * B + b in each tensor, or -1, [K] int64. A CUDA graph can capture this.

        For actions, t = 0 is the first step. For frames and rewards it is the time before the first step.
        """
        names, places = zip(*((name, _first(wrong)) for name, wrong in self._wrong(steps, n_steps)), strict=True)
        self._names = list(names)  # a frame may occur twice, in the stream and in `reached`
        return torch.stack(places)

    def check(self, steps: Rollout, n_steps: int, invalid: Tensor | None = None) -> None:
        """Check a batch; ``invalid`` is its result of `first_invalid`. A ValueError carries the environment's index."""
        B = steps.running.shape[1]
        if n_steps and (steps.running.is_cpu or not self._read):
            self._read = True
            first = [(name, int(_first(wrong))) for name, wrong in self._wrong(steps, n_steps)]  # sync: in one batch
            if first:
                self._raise_first(first, B, steps)
        elif n_steps:
            self._later.append((B, AsyncRead(self.first_invalid(steps, n_steps) if invalid is None else invalid)))
            while self._later and (places := self._later[0][1].read()) is not None:
                self._later.pop(0)
                self._raise_first(zip(self._names, places, strict=True), B)

    def close(self) -> None:
        """Wait for the results of the last batches. Raise the same errors as `check`."""
        while self._later:
            B, later = self._later.pop(0)
            self._raise_first(zip(self._names, later.wait(), strict=True), B)

    def _raise_first(self, places: Iterable[tuple[str, int]], B: int, steps: Rollout | None = None) -> None:
        """Raise an error for the earliest position, since one NaN or wrong action leads to others."""
        mistakes = [(2 * (at // B) + (name in self._actions), name, at) for name, at in places if at != _VALID]
        if mistakes:
            _, name, place = min(mistakes)
            t, j = divmod(place, B)
            shown = "out of range"
            if steps is not None and name in self._actions:
                shown = str(steps.action[name][t, j].tolist())  # sync: only for errors
            self._later.clear()  # errors in later batches may follow from this one
            raise self._error(name, t, j, shown)

    def _wrong(self, steps: Rollout, n: int) -> Iterator[tuple[str, Tensor]]:
        """Yield names of tensors and a mask of wrong entries, [n, B] bool for an action, else [n + 1, B]."""
        running = steps.running[:n]
        for name in self._actions:
            if (values := steps.action.get(name)) is None:
                continue
            wrong = self._check.wrong(name, values[:n])
            if not values.is_cpu or bool(wrong.any()):  # sync: of CPU memory
                yield name, _any(wrong, running)
        at = steps.final_rows(n)
        for part in (steps.stream, steps.reached):
            few = part is steps.reached and steps.restarted is not None  # only the rows `at` have been written
            for key, values in part.items():
                if not values.is_floating_point() or key.split("/")[0] not in ("frame", "reward"):
                    continue
                rows = values.flatten(0, 1).index_select(0, at) if few else values[: n + 1]
                # A sum needs no memory, and is NaN if any number is.
                if values.is_cpu and not bool(rows.sum().isnan()):  # sync: of CPU memory
                    continue
                nan = rows.isnan()
                if few:
                    nan = torch.zeros_like(values, dtype=torch.bool)
                    nan.flatten(0, 1)[at] = rows.isnan()
                if part is steps.reached:  # its slot t comes after step t
                    nan = torch.cat([torch.zeros_like(nan[:1]), nan])
                # It counts where the step before or after it does; after a step that a restart takes, only the latter.
                counts = torch.cat([running[:1], running]) | torch.cat([running, running[-1:]])
                yield f"observation/{key}", _any(nan[: n + 1], counts)

    def _error(self, name: str, t: int, j: int, shown: str) -> ValueError:
        if name in self._actions:
            space = self._actions[name].space
            text = (
                f"agent: action {name!r} of environment {j} in step {t} of the batch is {shown}, expected an element "
                f"of {space}. The environment accepted it silently. {advice_on(space)}"
            )
        else:
            fix = NAN_REWARD if name.endswith("/reward") else NAN_FRAME
            when = f"after step {t - 1}" if t else "at the beginning"
            text = f"environment: {name!r} of environment {j} is NaN {when} of the batch. {fix}"
        error = BadValueError(text)
        tag_environment(error, j, t if name in self._actions else max(0, t - 1))
        return error


def _any(wrong: Tensor, running: Tensor) -> Tensor:
    """Return True for running environments with a wrong feature, [n, B]."""
    return wrong.reshape(*running.shape, -1).any(dim=2) & running


def _first(wrong: Tensor) -> Tensor:
    """Return the first wrong position, or -1, as a tensor without dimensions."""
    flat = wrong.flatten()
    return torch.where(flat.any(), flat.to(torch.uint8).argmax(), _VALID)
