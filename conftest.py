"""Shared by all tests: one thread, fixed seeds, the devices of this machine, the reason why a GPU test is skipped."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Generator

import hypothesis
import pytest
import torch

gc.disable()  # until all files of tests have been imported: nothing of that can be freed
ROOT = os.path.dirname(__file__)
# pytest puts it on the path, where ./rlstruct hides an rlstruct that is installed or laid out elsewhere.
sys.path[:] = [place for place in sys.path if place != ROOT]

from rlstruct.errors import UsageError  # noqa: E402

torch.set_num_threads(1)
# Programs that tests start, too: threads of OpenMP spin while they wait, and while other tests run
# the training of the README takes 180 seconds of processor time in place of 22.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
# TorchInductor would try in every process that compiles whether it may use what the processor has, for two seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Programs that tests start find fake_envs and fake_agents too.
shared = os.path.join(ROOT, "tests")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [shared, os.environ.get("PYTHONPATH")]))
# Ctrl-C does nothing to what a shell starts in the background, nor to its children: tests of it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first call of a torch operator may take seconds. The same examples in every run of CI.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

SIMULATED = "rlstruct.testing.sim_device"
# torch and this library say so where a test names a device that this torch cannot have.
NO_SIMULATED = re.compile(
    r"at start of device string: sim|rlstruct\.testing\.sim_device has been imported|sim: torch \S+ has no torch\.\S+,"
)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _torch_as_new() -> None:
    """Undo what an earlier test left in torch: its seed, and the validation that torch.compile turns off for good."""
    torch.manual_seed(0)
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.fixture(scope="module", autouse=True)
def _collect_garbage_of_one_file() -> None:
    """Take what is imported by now from the collector: it takes half a second to search it, before each capture."""
    gc.collect()
    gc.freeze()


@functools.cache
def without_simulated() -> str:
    """Make the simulated accelerator known; return why this torch cannot have it, or nothing."""
    try:
        importlib.import_module(SIMULATED)
    except UsageError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that met a simulated device where this torch cannot have one."""
    report = yield
    if report.failed and call.excinfo is not None and NO_SIMULATED.search(report.longreprtext) and without_simulated():
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {without_simulated()}")
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make sim:0 to sim:3 known to the tests that run without a GPU; a process that has them skips the others.

    torch has one accelerator per process: with the simulated one, CUDA can neither pin memory nor run backward().
    """
    if not item.get_closest_marker("gpu"):
        without_simulated()
    elif SIMULATED in sys.modules:
        pytest.skip("the simulated accelerator is in this process; pytest -m gpu leaves it out")


def seconds_allowed(item: pytest.Item) -> float:
    """Return the timeout of a slow test; 0 for the others."""
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else item.config.getini("timeout")
    return float(seconds) if item.get_closest_marker("slow") else 0.0


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where torch finds no CUDA device, and say so; where it finds one they come last.

    Slow ones come first, by the time that they may take: the last minute has short ones for every core.
    """
    items.sort(key=seconds_allowed, reverse=True)
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.get_closest_marker("gpu") is not None)
        return
    reason = f"needs a CUDA device; torch {torch.__version__} sees none"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
