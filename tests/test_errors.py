"""Errors: who inherits from whom, what a WorkerError carries, and that it survives the way out of a worker."""

from __future__ import annotations

import math
import pickle
import sys
import traceback
from importlib import metadata
from typing import Any

import pytest

from rlstruct.errors import (
    BadIndexError,
    BadKeyError,
    BadTypeError,
    BadValueError,
    BatcherStateError,
    DeviceMismatchError,
    FolderTakenError,
    MissingFileError,
    MissingMethodError,
    MissingPackageError,
    ShapeMismatchError,
    UsageError,
    WorkerError,
    WorkerTimeout,
    how_to_install,
    import_extra,
    tag_environment,
)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (BadValueError, ValueError),
        (BadTypeError, TypeError),
        (BadKeyError, KeyError),
        (BadIndexError, IndexError),
        (UsageError, RuntimeError),
        (MissingPackageError, ImportError),
        (MissingMethodError, NotImplementedError),
        (MissingFileError, FileNotFoundError),
        (FolderTakenError, FileExistsError),
        (ShapeMismatchError, ValueError),
        (DeviceMismatchError, ValueError),
        (BatcherStateError, RuntimeError),
        (WorkerError, RuntimeError),
        (WorkerTimeout, WorkerError),
    ],
)
def test_users_can_catch_the_builtin_class(error: type[Exception], base: type[Exception]) -> None:
    assert issubclass(error, base)
    told = pickle.loads(pickle.dumps(error("it's wrong")))
    assert type(told) is error
    assert str(told) == "it's wrong"  # a KeyError of Python's own would put it in quotes


@pytest.mark.parametrize("kind", [WorkerError, WorkerTimeout])
def test_worker_error_keeps_its_place_through_pickling(kind: type[WorkerError]) -> None:
    place = {
        "worker": 2,
        "pid": 77,
        "phase": "environment.step",
        "environment": 5,
        "environments": (4, 8),
        "seed": 105,
        "step": 3,
        "remote_traceback": "Traceback …",
    }
    error = pickle.loads(pickle.dumps(kind("worker 2 failed", **place)))
    assert type(error) is kind
    assert str(error) == "worker 2 failed"
    assert {name: getattr(error, name) for name in place} == place


def test_worker_error_knows_nothing_unless_told() -> None:
    error = WorkerError("failed")
    assert error.worker == 0
    assert (error.pid, error.phase, error.environment, error.environments, error.seed, error.step) == (None,) * 6
    assert error.remote_traceback == ""


def test_tag_environment_marks_the_exception() -> None:
    error = KeyError("x")
    tag_environment(error, 3)
    assert error.environment_index == 3  # type: ignore[attr-defined]


def test_tag_environment_leaves_an_exception_that_takes_no_attributes() -> None:
    class Closed(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    error = Closed("as it was")
    tag_environment(error, 3)
    assert error.args == ("as it was",)
    assert not hasattr(error, "environment_index")


def test_install_hints_name_what_pip_finds() -> None:
    assert how_to_install("box2d") == "Install the extra 'box2d': pip install 'gymnasium[box2d]>=1.1'"
    assert how_to_install("nvml").startswith("Install the extra 'nvml': pip install 'nvidia-ml-py>=")


def test_a_module_of_an_extra_is_imported_or_its_extra_is_named() -> None:
    assert import_extra("math", "nvml", "Sums") is math
    with pytest.raises(MissingPackageError, match=r"^Sums needs not_there, .*Install the extra 'nvml'"):
        import_extra("not_there", "nvml", "Sums")


def test_install_hints_without_an_installation_name_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert how_to_install("warp") == "Install the extra 'warp': pip install '.[warp]' in a checkout of rlstruct"


def test_a_traceback_ends_with_the_page_that_explains_the_error() -> None:
    class Mine(WorkerError):
        pass

    for error in (WorkerError("it failed"), Mine("it failed"), pickle.loads(pickle.dumps(WorkerError("it failed")))):
        assert str(error) == "it failed"
        assert error.page == "faults#workererror"
        if sys.version_info >= (3, 11):
            *_, last = traceback.format_exception(error)
            assert last == "See docs: faults#workererror, or run: rlstruct explain WorkerError\n"
            assert error.__notes__ == [last.strip()]


@pytest.mark.parametrize(
    "module", ["rlstruct.batchers.batcher", "rlstruct.batchers.workers.cluster", "rlstruct.search.agent"]
)
def test_a_warning_names_the_line_that_called_the_library(module: str) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec("from rlstruct.errors import warn_user\ndef call(): warn_user('slow')", names)
    with pytest.warns(UserWarning, match="^slow$") as caught:
        names["call"]()
    assert [warning.filename for warning in caught] == [__file__]
