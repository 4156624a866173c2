"""States of a batcher, and the calls that each of them refuses."""

from __future__ import annotations

from typing import Literal

from rlstruct.errors import BatcherStateError

State = Literal["new", "ready", "ended", "executing", "alone", "full", "failed", "closed"]

_CALLS = ("n_envs", "reset", "execute", "get", "update", "state_dict", "load_state_dict", "memory_report", "__enter__")
_NO_BATCH = {"get": "no batch is being collected. Call execute() first."}
_BUSY = dict.fromkeys(("reset", "state_dict", "load_state_dict"), "a batch is being collected. Call get() first.")
_GET = "get() has not been called. Call get() first: "
_ALONE = "only worker processes whose environments restart by themselves can have a second batch queued."

REFUSED: dict[State, dict[str, str]] = {
    "new": _NO_BATCH | {"execute": "reset() has not been called. Call reset() first."},
    "ready": _NO_BATCH,
    "ended": _NO_BATCH | {"execute": "every episode has ended. Call reset() to start new ones."},
    "executing": _BUSY,
    "alone": _BUSY | {"execute": _GET + _ALONE},  # a batch that no other can wait behind
    "full": _BUSY | {"execute": _GET + "one batch is being collected and another waits behind it."},
    "failed": dict.fromkeys(_CALLS, "collection has failed; close() this batcher. Create a new one."),
    "closed": dict.fromkeys(_CALLS, "the batcher is closed. Create a new one."),
}
"""Reasons by state and call; calls that are missing are allowed."""


def check_call(call: str, state: State) -> None:
    """Raise BatcherStateError if this state refuses the call."""
    if call in REFUSED[state]:
        raise BatcherStateError(f"RL_Batcher.{call}: {REFUSED[state][call]}")
