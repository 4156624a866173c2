"""Cost of DictTensor compared with a plain dict of tensors, and with tensordict.

    python benchmarks/structures.py [--device cuda] [--repeats 21]

Overhead is the time of an operation minus the time of the bare torch calls on a plain dict, measured in turn (median
of the rounds). The bare calls are the ones the structure itself makes: for us ``index_select``, and the lengths that
`stack` creates; for tensordict ``tensor[index]``, and no lengths. The target is met where our overhead is at most a
third of tensordict's. tensordict gets the cheapest idiom that we know for each operation; its batch size is [64], its
keys are as flat as ours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import interleaved_rounds, machine, write

from rlstruct.core import DictTensor

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None

B = 64
KEYS = [f"observation/{i}" for i in range(4)] + [f"action/{i}" for i in range(4)]
PREFIX = "observation/"
Calls = dict[str, Callable[[], object]]


def make(device: torch.device, prefix: str = "") -> dict[str, torch.Tensor]:
    """Eight keys of the kinds that a trajectory holds: [B, 4] float32, [B] float32, [B] int64, [B] bool, twice."""
    kinds = [
        torch.zeros(B, 4, device=device),
        torch.zeros(B, device=device),
        torch.zeros(B, dtype=torch.int64, device=device),
        torch.zeros(B, dtype=torch.bool, device=device),
    ]
    return {prefix + key: kinds[i % 4].clone() for i, key in enumerate(KEYS)}


def bare_calls(device: torch.device) -> Calls:
    """The operations on a plain dict of tensors."""
    plain, other = make(device), make(device, "b/")
    index = torch.arange(0, B, 2, device=device)
    n = len(PREFIX)
    return {
        "construct": lambda: dict(plain),
        "get key": lambda: plain["observation/2"],
        "index": lambda: {k: v.index_select(0, index) for k, v in plain.items()},
        "slice": lambda: {k: v[8:24] for k, v in plain.items()},
        "cat": lambda: {k: torch.cat([plain[k], plain[k]]) for k in plain},
        "stack": lambda: (
            {k: torch.stack([plain[k], plain[k]], 1) for k in plain},
            torch.full((B,), 2, dtype=torch.int64, device=device),
        ),
        "to": lambda: {k: v.to(device) for k, v in plain.items()},
        "+": lambda: {**plain, **other},
        "truncate_key": lambda: {k[n:]: v for k, v in plain.items() if k.startswith(PREFIX)},
        "index, tensordict": lambda: {k: v[index] for k, v in plain.items()},
        "stack, tensordict": lambda: {k: torch.stack([plain[k], plain[k]], 1) for k in plain},
    }


def our_calls(device: torch.device) -> Calls:
    """The operations on a DictTensor."""
    tensors = make(device)
    ours, other = DictTensor(tensors), DictTensor(make(device, "b/"))
    index = torch.arange(0, B, 2, device=device)
    return {
        "construct": lambda: DictTensor(tensors),
        "get key": lambda: ours["observation/2"],
        "index": lambda: ours.index(index),
        "slice": lambda: ours.slice(8, 24),
        "cat": lambda: DictTensor.cat([ours, ours]),
        "stack": lambda: DictTensor.stack([ours, ours]),
        "to": lambda: ours.to(device),
        "+": lambda: ours + other,
        "truncate_key": lambda: ours.truncate_key(PREFIX),
    }


def tensordict_calls(device: torch.device) -> Calls:
    """The operations on a TensorDict [B]."""
    tensors = make(device)
    theirs = TensorDict(tensors, batch_size=[B], device=device)
    other = TensorDict(make(device, "b/"), batch_size=[B], device=device)
    homeless = TensorDict(tensors, batch_size=[B])  # without a device of its own, else `to` returns at once
    index = torch.arange(0, B, 2, device=device)
    n = len(PREFIX)

    def truncate() -> object:
        chosen = {k[n:]: v for k, v in theirs.items() if k.startswith(PREFIX)}
        return TensorDict(chosen, batch_size=[B], device=device)

    return {
        "construct": lambda: TensorDict(tensors, batch_size=[B], device=device),
        "get key": lambda: theirs["observation/2"],
        "index": lambda: theirs[index],
        "slice": lambda: theirs[8:24],
        "cat": lambda: torch.cat([theirs, theirs]),
        "stack": lambda: torch.stack([theirs, theirs], dim=1),
        "to": lambda: homeless.to(device),
        "+": lambda: theirs.copy().update(other),
        "truncate_key": truncate,
    }


def measure(device: torch.device, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Time every operation three ways, in turn.

    Args:
        device: where the tensors are.
        repeats: rounds.
        seconds: time of one callable in one round.

    Returns:
        One row for each operation: microseconds for each structure, both overheads, their ratio.
    """
    bare, ours = bare_calls(device), our_calls(device)
    theirs = tensordict_calls(device) if TensorDict is not None else {}
    # On the CPU, count this process's time only: other programs then cost precision, not truth.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    rows = []
    for name in ours:
        calls = {"plain": bare[name], "rlstruct": ours[name]}
        if theirs:
            calls["tensordict"] = theirs[name]
            calls["plain for tensordict"] = bare.get(f"{name}, tensordict", bare[name])
        rounds = interleaved_rounds(calls, repeats, seconds, clock)
        row: dict[str, Any] = {"operation": name}
        row |= {f"{key} us": round(statistics.median(values) * 1e6, 3) for key, values in rounds.items()}
        row["overhead rlstruct us"] = _overhead(rounds["rlstruct"], rounds["plain"])
        if theirs:
            row["overhead tensordict us"] = _overhead(rounds["tensordict"], rounds["plain for tensordict"])
            row["ratio"] = round(row["overhead rlstruct us"] / row["overhead tensordict us"], 3)
        rows.append(row)
    return rows


def _overhead(structure: list[float], plain: list[float]) -> float:
    """Median over the rounds of the difference within a round, in microseconds."""
    return round(statistics.median(s - p for s, p in zip(structure, plain, strict=True)) * 1e6, 3)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.02)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(torch.device(arguments.device), arguments.repeats, arguments.seconds)
    print(machine())
    print(f"{len(KEYS)} keys, B = {B}, microseconds per operation")
    print(f"{'operation':14}{'plain':>9}{'rlstruct':>10}{'tensordict':>12}{'overhead':>10}{'theirs':>9}{'ratio':>8}")
    missing = float("nan")
    for row in rows:
        print(
            f"{row['operation']:14}{row['plain us']:9.2f}{row['rlstruct us']:10.2f}"
            f"{row.get('tensordict us', missing):12.2f}{row['overhead rlstruct us']:10.2f}"
            f"{row.get('overhead tensordict us', missing):9.2f}{row.get('ratio', missing):8.3f}"
        )
    print(write("structures", rows))


if __name__ == "__main__":
    main()
