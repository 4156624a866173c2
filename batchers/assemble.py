"""Assembly of the collectors' buffers into one Trajectories, by the only copy of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected
from rlstruct.batchers.rollout_buffer import Rollout, compact_rows, join_rollouts, join_tensor
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.layout import take_rows
from rlstruct.engine.streams import move


@dataclass(frozen=True)
class Part:
    """One collector's part of a batch."""

    steps: Rollout
    collected: Collected
    seed: int  # of its first environment
    first_environment: int  # its global index
    n_running: int  # number of environments with a running episode


def assemble(
    parts: Sequence[Part],
    infos: DictTensor,
    device: torch.device,
    *,
    auto_reset: bool,
    restarts_take_steps: bool = True,
    reuse: bool = False,
) -> tuple[Trajectories, int]:
    """Copy a batch out of the buffers of all collectors, batch first; return it and how many environments continue.

    Auto-resetting environments give B rows of T steps, with fewer real steps where a vector environment spends some on
    restarts. Episodic ones give the rows that took part, shortened to the longest. ``observation/`` and
    ``_observation/`` of a key share memory unless an environment restarted. Padding is zero, except that the first
    padded step of ``observation/`` repeats the final observation. With ``reuse``, a batch that a graph collected is a
    view of the graph's memory, which its next replay overwrites.
    """
    if device.type != "cpu" and parts[0].steps.running.is_cpu:
        # Worker processes write to shared CPU memory: join the parts there, then move the batch to CUDA in one copy.
        on_cpu = torch.device("cpu")
        joined, n_running = assemble(
            parts, DictTensor(), on_cpu, auto_reset=auto_reset, restarts_take_steps=restarts_take_steps
        )
        joined = joined.to(device)
        return Trajectories(infos.index(joined.info["environment"]) + joined.info, joined.steps), n_running
    info = _info(parts, infos, device)
    T, n_envs, filled = 0, 0, list[tuple[Rollout, int]]()
    full = True  # every environment took part in every step
    for part in parts:
        n_steps, running = part.collected.n_steps, part.steps.running
        filled.append((part.steps, n_steps))
        T, n_envs = max(T, n_steps), n_envs + running.shape[1]
        full = full and auto_reset and (not restarts_take_steps or bool(running[:n_steps].all()))  # sync: per batch
    collected = parts[0].collected
    makes_copy = len(parts) > 1 or (collected.reused and not (reuse and collected.executor == "graph"))
    if auto_reset:
        steps = join_rollouts(filled, T, copy=makes_copy)
        if full:
            lengths = torch.full((n_envs,), T, dtype=torch.int64, device=device)
            batch = TemporalDictTensor.unchecked(steps, lengths)
        else:
            batch = compact_rows(steps, join_tensor(filled, "running", T).transpose(0, 1))
        return Trajectories.unchecked(DictTensor.unchecked(info), batch), n_envs
    lengths = join_tensor(filled, "running", T).sum(0)
    on_host = lengths.cpu()  # sync: once per batch of episodes
    T = int(on_host.max())  # sync: of CPU memory. Off the CPU, collectors rarely check whether all episodes have ended
    rows = None
    if not bool((on_host > 0).all()):  # sync: of CPU memory
        rows = move(on_host.nonzero().squeeze(1), device)  # sync: of CPU memory
        info, lengths = dict(DictTensor(info).index(rows).items()), lengths.index_select(0, rows)
    steps = join_rollouts(filled, T, rows=rows, lengths=lengths, copy=makes_copy)
    return Trajectories(DictTensor(info), TemporalDictTensor(steps, lengths)), sum(part.n_running for part in parts)


def _info(parts: Sequence[Part], infos: DictTensor, device: torch.device) -> dict[str, Tensor]:
    """Return infos, indices, seeds, policy version and initial agent state of the environments in these parts, [B]."""
    columns: dict[str, list[Tensor]] = {}
    for part in parts:  # collectors whose episodes had all ended have no part
        index = torch.arange(part.steps.running.shape[1], device=device, dtype=torch.int64)
        row = {
            "environment": index + part.first_environment,
            "env_seed": index + part.seed,
            "step": torch.full_like(index, part.collected.first_step),
            "policy_version": torch.full_like(index, part.collected.version),
        }
        for key, state in part.steps.state.items():
            row[f"agent_state/{key}"] = state
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    info, environments = dict[str, Tensor](), torch.cat(columns["environment"])
    for key, value in infos.items():
        info[key] = take_rows(value, environments)
    for key, values in columns.items():
        info[key] = torch.cat(values)
    return info
