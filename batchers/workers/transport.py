"""Contract between a pool and its workers: orders go to them, answers come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rlstruct.batchers.collector import Collected
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.slab import Steps
from rlstruct.core import Layout


class Transport(Protocol):
    """Connection of a pool to its workers. The pool decides when a worker is late, is replaced or must end.

    Attributes:
        is_local: whether process ids are those of this machine.
    """

    is_local: bool

    def open(self, index: int, recipe: bytes) -> Link:
        """Start a worker, perhaps in place of one that was closed; return at once. OSError says what is lacking."""

    def publish(self, weights: Mapping[str, Tensor], version: int, in_use: Sequence[Weights]) -> Weights | None:
        """Copy weights to where workers read them; None if one of those in use must be read first."""

    def wait(self, seconds: float) -> list[int]:
        """Return the indices of workers that have answered or ended; wait for the first, but no longer than this."""

    def n_bytes(self) -> int:
        """Return the size of the buffers of published weights."""

    def close(self) -> None:
        """Release everything; the workers have ended."""


class Link(Protocol):
    """The pool's end of one worker, which answers its orders one by one.

    Attributes:
        progress: phase and step of the worker, as far as they are known here.
    """

    progress: Progress

    @property
    def pid(self) -> int | None:
        """Process id, None while there is none."""

    def send(self, order: Order, seconds: float, /) -> None:
        """Send an order. ConnectionError: the worker is gone; another OSError: it was not read within this time."""

    def receive(self) -> Any:  # noqa: ANN401 - `Created`, `Batch`, a Failure, or the result of another order
        """Return the next answer, None if it is not there yet. EOFError or OSError: there will be none."""

    def steps(self, batch: Batch, slab: int) -> Steps:
        """Return the steps of a batch that was written to this slab."""

    def where(self) -> str:
        """Say where the worker is, for an error message."""

    def ended(self) -> bool:
        """Return True if the worker has ended, as far as is known."""

    def death(self) -> str:
        """Say how the worker ended, for an error message; wait a few seconds for that."""

    def stop(self) -> None:
        """Ask the worker to end."""

    def join(self, seconds: float) -> None:
        """Wait until it has ended, but no longer than this."""

    def kill(self) -> None:
        """End it at once."""

    def close(self) -> None:
        """Wait a second for a killed worker to be gone, and release the connection."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Published weights: their policy version, their layout, and the place where workers read them."""

    version: int
    layout: Layout
    place: Any


@dataclass(frozen=True)
class Order:
    """A method of `Worker`, its arguments, and weights that the worker reads first, if any."""

    name: str
    arguments: tuple[Any, ...] = ()
    weights: Weights | None = None


@dataclass(frozen=True)
class Created:
    """Answer to ``create``."""

    n_envs: int
    auto_reset: bool
    cuda_initialised: bool


@dataclass(frozen=True)
class Batch:
    """Answer to ``execute``."""

    collected: Collected
    n_running: int  # environments that go on
    seconds: dict[str, float]  # of each phase until now
    layout: Layout | None  # that of the slab, with the first batch in it
    tensors: Any = None  # the steps, where they travel with the answer
