"""From the collectors' slabs to one Trajectories: the only copy of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstruct.batchers.collector import Collected
from rlstruct.batchers.slab import Steps, as_signed, without_gaps, zero_after
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.engine.streams import move


@dataclass(frozen=True)
class Part:
    """One collector's part of a batch.

    Attributes:
        steps: its steps, time first.
        collected: what it said about them.
        seed: seed of its first environment.
        first_environment: global index of its first environment.
        running: how many environments go on, or which ones, [B] bool, where counting would wait for the device.
        owned: whether the memory of the steps becomes the batch, so that nothing is copied.
    """

    steps: Steps
    collected: Collected
    seed: int
    first_environment: int
    running: int | Tensor
    owned: bool = False


def assemble(
    parts: Sequence[Part], infos: DictTensor, device: torch.device, *, auto_reset: bool, has_gaps: bool = True
) -> tuple[Trajectories, int]:
    """Copy a batch out of the slabs, batch first, on the batcher's device.

    Args:
        parts: one per collector, in the order of their environments.
        infos: ``agent_info/…`` and ``env_info/…`` of all environments, on the device.  [B]
        device: the batcher's device.
        auto_reset: whether the environments restart by themselves.
        has_gaps: whether they may spend steps on that. If not, the device is asked nothing.

    Returns:
        Trajectories that use no memory of the slabs (except of one that is owned), and how many environments
        go on. Auto-resetting: all B rows, T steps; fewer real ones, or none, where a vector environment spends steps on
        its restarts. Episodic: the rows that took part, shortened to the longest. ``observation/`` and
        ``_observation/`` of a key part memory unless an environment restarted. Padding is zero, except that the first
        padded step of ``observation/`` shows the final observation once more.
    """
    if device.type != "cpu" and parts[0].steps.running.is_cpu:
        # Worker processes write to shared memory of the CPU: joined there, a batch travels to CUDA in one copy.
        kind = {"auto_reset": auto_reset, "has_gaps": has_gaps}
        batch, n_running = assemble(parts, DictTensor(), torch.device("cpu"), **kind)
        batch = batch.to(device)
        return Trajectories(infos.index(batch.info["environment"]) + batch.info, batch.trajectories), n_running
    identity = _identity(parts, device)  # not of collectors whose episodes had all ended before
    info = infos.index(identity["environment"]) + identity
    T = max(part.collected.n_steps for part in parts)
    if auto_reset:
        steps = _steps(parts, T)
        n_running = sum(part.steps.running.shape[1] for part in parts)
        if not has_gaps or all(bool(part.steps.running[:T].all()) for part in parts):  # sync: once per batch
            return Trajectories(info, TemporalDictTensor(steps)), n_running
        return Trajectories(info, without_gaps(steps, _running(parts, T))), n_running
    lengths = _running(parts, T).sum(1)
    on_cpu, n_running = _count(lengths, parts)
    T = int(on_cpu.max())  # sync: of CPU memory. Off the CPU collectors do not look after every step whether all ended
    rows = None
    if not bool((on_cpu > 0).all()):  # sync: of CPU memory
        rows = move(on_cpu.nonzero().squeeze(1), device)  # sync: of CPU memory
        info, lengths = info.index(rows), lengths.index_select(0, rows)
    return Trajectories(info, TemporalDictTensor(_steps(parts, T, rows, lengths), lengths)), n_running


def _count(lengths: Tensor, parts: Sequence[Part]) -> tuple[Tensor, int]:
    """Bring the lengths of the episodes to the CPU, [B] int64, with the number of environments that go on."""
    masks = [part.running for part in parts if isinstance(part.running, Tensor)]
    counted = sum(part.running for part in parts if isinstance(part.running, int))
    numbers = torch.cat([lengths, *(mask.sum().view(1) for mask in masks)]).cpu()  # sync: once per batch of episodes
    n = lengths.shape[0]
    return numbers[:n], counted + int(numbers[n:].sum())  # sync: of CPU memory


def _identity(parts: Sequence[Part], device: torch.device) -> DictTensor:
    """Return the environment, seed, weights version and first agent state of each row, [B]."""
    rows: dict[str, list[Tensor]] = {key: [] for key in ("environment", "env_seed", "step", "policy_version")}
    for part in parts:
        B = part.steps.running.shape[1]
        index = torch.arange(B, device=device, dtype=torch.int64)
        rows["environment"].append(index + part.first_environment)
        rows["env_seed"].append(index + part.seed)
        rows["step"].append(torch.full_like(index, part.collected.first_step))
        rows["policy_version"].append(torch.full_like(index, part.collected.version))
    states = {
        f"agent_state/{key}": torch.cat([part.steps.state[key] for part in parts]) for key in parts[0].steps.state
    }
    return DictTensor({key: torch.cat(value) for key, value in rows.items()} | states)


def _steps(
    parts: Sequence[Part], T: int, rows: Tensor | None = None, lengths: Tensor | None = None
) -> dict[str, Tensor]:
    """Join the steps of all parts by their keys in a batch, [B, T, ...].

    Both observation keys show one copy of the frames wherever no environment restarted. Of episodes only ``rows`` are
    kept (None for all), padded with zeros after their ``lengths``.
    """
    steps: dict[str, Tensor] = {}
    for name in parts[0].steps.tensors:
        group, _, key = name.partition("/")
        if group not in ("stream", "action", "reached"):
            continue
        extra = int(group == "stream")  # slot `lengths` of the stream holds the last observation that was reached
        cut = [_cut(part.steps.tensors[name], part.collected.n_steps + extra, T + extra) for part in parts]
        joined = cut[0].transpose(0, 1) if len(parts) == 1 and parts[0].owned else _cat(cut)
        if lengths is not None:
            joined = zero_after(joined if rows is None else joined.index_select(0, rows), lengths + extra)
        if group == "stream":
            steps[f"observation/{key}"], steps[f"_observation/{key}"] = joined[:, :T], joined[:, 1:]
        else:
            steps[f"_observation/{key}" if group == "reached" else name] = joined
    return steps | _with_finals(parts, steps)


def _with_finals(parts: Sequence[Part], steps: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``_observation/`` of the keys that restarts change, final observations in their places, [B, T, ...]."""
    first, n_envs = 0, sum(part.steps.running.shape[1] for part in parts)
    changed: dict[str, Tensor] = {}
    for part in parts:
        if part.collected.n_final:
            at, B = part.steps.finals(part.collected.n_steps), part.steps.running.shape[1]
            to = at.div(B, rounding_mode="floor") * n_envs + at % B + first
            for key, plane in part.steps.final.items():
                name = f"_observation/{key}"
                time_first = changed.get(name, steps[name]).transpose(0, 1)
                if name not in changed:
                    time_first = time_first.clone(memory_format=torch.contiguous_format)
                final = as_signed(plane).flatten(0, 1).index_select(0, at)
                as_signed(time_first).flatten(0, 1).index_copy_(0, to, final)
                changed[name] = time_first.transpose(0, 1)
        first += part.steps.running.shape[1]
    return changed


def _running(parts: Sequence[Part], T: int) -> Tensor:
    return _cat([_cut(part.steps.running, part.collected.n_steps, T) for part in parts])  # [B, T]


def _cat(parts: list[Tensor]) -> Tensor:
    """Copy time-first tensors [T, B, ...] to one [sum of B, T, ...]; in memory time stays first.

    So whole rows are copied, which is several times faster than to turn them, and every batch has the same strides.
    """
    return torch.cat(parts, dim=1).transpose(0, 1)


def _cut(tensor: Tensor, n_steps: int, T: int) -> Tensor:
    """The first n_steps of a slab, padded with zeros to T: beyond them it holds an older batch, [T, B, ...]."""
    if n_steps >= T:
        return tensor[:T]
    return torch.cat([tensor[:n_steps], tensor.new_zeros((T - n_steps, *tensor.shape[1:]))])
