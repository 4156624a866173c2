"""The steps of a batch that is still being collected, as an agent sees them. Part of rlstruct.batchers."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.batchers.slab import Slab
from rlstruct.core import DictTensor, TemporalDictTensor

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def history_until(slab: Slab | None, observation: DictTensor, t: int, n_final: int) -> TemporalDictTensor:
    """The steps of a batch before t, as views wherever no environment restarted.

    Args:
        slab: where they are written; None before the first action.
        observation: what the environments show now.  [B]
        t: how many there are.
        n_final: how many rows of ``final`` are used.

    Returns:
        With the keys of Trajectories.  [B, t]
    """
    if slab is None:
        return _no_history(observation)
    steps = {f"observation/{k}": v[:t].transpose(0, 1) for k, v in slab.stream.items()}
    steps |= {f"action/{k}": v[:t].transpose(0, 1) for k, v in slab.action.items()}
    steps |= {f"_observation/{k}": v for k, v in next_observations(slab, t, n_final).items()}
    return TemporalDictTensor(steps, slab.running[:t].sum(0))


def _no_history(observation: DictTensor) -> TemporalDictTensor:
    """A history of no step, before the first action. What an agent returns beside it is not known yet."""
    empty = {k: v.new_empty((v.shape[0], 0, *v.shape[1:])) for k, v in observation.items()}
    actions = {k.removeprefix("last_"): v for k, v in empty.items() if k.startswith("last_action")}
    empty["rng"] = observation["done"].new_empty((observation.n_elems(), 0), dtype=torch.int64)
    return TemporalDictTensor(
        {f"observation/{k}": v for k, v in empty.items()}
        | {f"_observation/{k}": v for k, v in empty.items()}
        | {f"action/{k}": v for k, v in actions.items()}
    )


def next_observations(slab: Slab, t: int, n_final: int) -> dict[str, Tensor]:
    """Return what the environments answered in the first t steps, before any restart, [B, t, ...].

    Views of the stream, except where an environment restarted.
    """
    following = {k: v[1 : t + 1].transpose(0, 1) for k, v in slab.stream.items()}
    following |= {k: v[:t].transpose(0, 1) for k, v in slab.reached.items()}
    if n_final and slab.final_at is not None:
        step, row = slab.final_at[:n_final].unbind(1)
        for key, packed in slab.final.items():
            following[key] = following[key].clone()
            as_signed(following[key])[row, step] = as_signed(packed[:n_final])
    return following


def as_signed(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that torch can write by index or by mask: it has no such kernels for wide unsigned."""
    signed = _SIGNED.get(tensor.dtype)
    return tensor if signed is None else tensor.view(signed)
