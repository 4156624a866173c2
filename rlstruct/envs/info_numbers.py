"""Numbers of gymnasium's ``info`` as parts of an observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlstruct.errors import BadTypeError, BadValueError, ShapeMismatchError, tag_environment, warn_user

Array = np.ndarray[Any, Any]


class InfoNumbers:
    """Numbers to carry from the ``info`` that `step` returns: ``"episode/r"`` is ``info["episode"]["r"]``.

    Args:
        names: paths of the numbers; None for none.
        where: name of the environments, the start of messages.

    Attributes:
        keys: keys of the observation, ``info/<name>``.

    Raises:
        TypeError: ``names`` is not a sequence of strings.
        ValueError: a name is empty or appears twice.
    """

    def __init__(self, names: Sequence[str] | None, where: str) -> None:
        fix = 'Pass a list of paths, such as info=["episode/r"].'
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise BadTypeError(f"{where}: info is {names!r}, expected a list of strings. {fix}")
        self.names = tuple(names or ())
        for name in self.names:
            if not all(name.split("/")) or self.names.count(name) > 1:
                what = "appears twice" if self.names.count(name) > 1 else "has an empty part"
                raise BadValueError(f"{where}: info has {name!r}, which {what}, expected different paths. {fix}")
        self.keys = tuple(f"info/{name}" for name in self.names)
        self._where, self._unseen = where, set(self.names)
        self._last: object = None  # info, until all names have been seen

    def __bool__(self) -> bool:
        """Return True if there is anything to carry."""
        return bool(self.names)

    def empty(self, n: int) -> list[Array]:
        """Allocate an array of NaN for each number, [n] float64."""
        return [np.full(n, np.nan) for _ in self.names]

    def write(self, arrays: Sequence[Array], j: int, info: object) -> None:
        """Write the numbers in environment j's info to row j; NaN for those that it lacks.

        Raises:
            ShapeMismatchError: a value is not a number.
        """
        self._last = info if self._unseen else None
        for name, array in zip(self.names, arrays, strict=True):
            value = info
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is None:
                array[j] = np.nan
                continue
            number = np.asarray(value)
            if number.size != 1 or number.dtype.kind not in "fiub":
                raise self._no_number(name, value, j)
            array[j] = number.item()  # sync: of CPU memory
            self._unseen.discard(name)

    def write_rows(self, arrays: Sequence[Array], info: Any, ended: Array) -> None:  # noqa: ANN401 - of any wrapper
        """Write the numbers in the info of a vector environment, which restarts rows itself or not.

        Where an episode has ``ended``, ``info["final_info"]`` comes first, because the rest may belong to the next one.

        Args:
            arrays: one for each number.  [B] float64 each
            info: a dict of arrays [B] and of dicts, each with a mask of the rows that have it under ``_<key>``, or
                without one for all rows; or a list of B dicts.
            ended: rows whose episode ended in this step.  [B] bool

        Raises:
            ShapeMismatchError: a value is not a number.
        """
        if isinstance(info, list):
            for j, row in enumerate(info):
                self.write(arrays, j, {**row, **row.get("final_info", {})} if ended[j] else row)
            return
        self._last = info if self._unseen else None
        for name, array in zip(self.names, arrays, strict=True):
            array[:] = np.nan
            self._write_column(name, array, info, np.ones_like(ended))
            if "final_info" in info:
                self._write_column(f"final_info/{name}", array, info, ended)
            if not np.isnan(array).all():
                self._unseen.discard(name)

    def check_seen(self) -> None:
        """Warn once about names that no info has had; call it when an episode has ended."""
        if self._unseen:
            missing, self._unseen = sorted(self._unseen), set()
            paths, self._last = ", ".join(map(repr, _paths(self._last))) or "nothing", None
            warn_user(
                f"{self._where}: no info of a step had {', '.join(map(repr, missing))} until the first episode ended: "
                f"NaN in the batch. The last info had {paths}; for episode/r, wrap each environment in "
                "gymnasium.wrappers.RecordEpisodeStatistics."
            )

    def _write_column(self, name: str, array: Array, info: Any, rows: Array) -> None:  # noqa: ANN401
        """Write one number in those of the ``rows`` [B] bool that have it."""
        value = info
        for part in name.split("/"):
            if not isinstance(value, Mapping) or part not in value:
                return
            value, mask = value[part], value.get(f"_{part}")
            rows = rows if mask is None else rows & np.asarray(mask, np.bool_)
        column = np.asarray(value)
        if column.dtype == object:  # of values that gymnasium does not know
            for j in np.flatnonzero(rows).tolist():  # sync: of CPU memory
                number = np.asarray(column[j])
                if number.size != 1 or number.dtype.kind not in "fiub":
                    raise self._no_number(name, column[j], j)
                array[j] = number.item()  # sync: of CPU memory
            return
        if column.shape != array.shape or column.dtype.kind not in "fiub":
            raise self._no_number(name, value, None)
        array[rows] = column[rows]

    def _no_number(self, name: str, value: Any, j: int | None) -> ShapeMismatchError:  # noqa: ANN401
        got = f"an array of shape {np.shape(value)}" if np.ndim(value) else repr(value)
        who = "the vector environment" if j is None else f"environment {j}"
        error = ShapeMismatchError(
            f"{self._where}.step: {who} has info {name!r}, {got}, expected one number per environment. Name a number "
            "in info=[…], or leave it out."
        )
        if j is not None:
            tag_environment(error, j)
        return error


def _paths(info: object) -> list[str]:
    """Return the paths of everything in an info, without the masks of vector environments."""
    if not isinstance(info, Mapping):
        return []
    parts = {str(name): _paths(value) for name, value in info.items() if not str(name).startswith("_")}
    return [path for name, inner in parts.items() for path in ([f"{name}/{one}" for one in inner] or [name])]
