"""Contract between a pool and its workers, which receive orders and send answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rlstruct.batchers.collector import Collected
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.rollout_buffer import Rollout
from rlstruct.core import Layout
from rlstruct.spaces import ActionIndices, Bounds


class Transport(Protocol):
    """Connection of a pool to its workers. The pool decides when a worker is late, and when to restart or stop it.

    Attributes:
        is_local: whether workers run on this machine, so that their process ids mean something here.
    """

    is_local: bool

    def open(self, index: int, factory: bytes) -> Link:
        """Start a worker, perhaps in place of a closed one, and return at once. An OSError says what is lacking."""

    def publish(
        self, weights: Mapping[str, Tensor], version: int, in_use: Sequence[PublishedWeights]
    ) -> PublishedWeights | None:
        """Copy weights to where workers read them. Return None if there is no room besides the weights in use."""

    def wait(self, seconds: float) -> list[int]:
        """Return the indices of workers that have answered or ended. Wait at most this long for the first one."""

    def n_bytes(self) -> int:
        """Return the size in bytes of the buffers for published weights."""

    def close(self) -> None:
        """Release everything. The workers have ended."""


class Link(Protocol):
    """The pool's connection to one worker, which answers orders in sequence.

    Attributes:
        progress: phase and step of the worker, as far as known in this process.
    """

    progress: Progress

    @property
    def pid(self) -> int | None:
        """Process id; None if there is no process."""

    def send(self, order: Order, seconds: float, /) -> None:
        """Send an order. Raise ConnectionError if the worker is gone, OSError if it has not read it in time."""

    def receive(self) -> Any:  # noqa: ANN401 - `Created`, `Executed`, a Failure, or the result of another order
        """Return the next answer, or None if it has not arrived. Raise EOFError or OSError if there will be none."""

    def steps(self, batch: Executed, buffer: int) -> Rollout:
        """Return the steps of a batch, which was written to this buffer."""

    def where(self) -> str:
        """Complete the sentence "the worker is …", such as "in its start", for an error message."""

    def ended(self) -> bool:
        """Return True if the worker is known to have ended."""

    def death(self) -> str:
        """Describe how the worker ended, for an error message. May wait a few seconds."""

    def stop(self) -> None:
        """Ask the worker to end."""

    def join(self, seconds: float) -> None:
        """Wait at most this long for the worker to end."""

    def kill(self) -> None:
        """Kill the worker, and remove what it leaves behind."""

    def close(self) -> None:
        """Release the connection to a worker that has ended or was killed."""


@dataclass(frozen=True, eq=False)
class PublishedWeights:
    """Published weights: their policy version, their layout, and the place from which workers read them."""

    version: int
    layout: Layout
    place: Any


@dataclass(frozen=True)
class Order:
    """A method of `Worker`, its arguments, and weights that the worker first loads, if any."""

    name: str
    arguments: tuple[Any, ...] = ()
    weights: PublishedWeights | None = None


@dataclass(frozen=True)
class Created:
    """Answer to ``create``."""

    n_envs: int
    auto_reset: bool
    cuda_initialised: bool
    actions: ActionIndices | None
    bounds: Bounds


@dataclass(frozen=True)
class Executed:
    """Answer to ``execute``."""

    collected: Collected
    n_running: int  # number of environments with a running episode
    seconds: dict[str, float]  # spent in each phase until now
    layout: Layout | None  # layout of the buffer, only with its first batch
    tensors: Any = None  # the steps, if they travel with the answer
