"""One action for each environment: rlstruct's counter-based draw beside torch.distributions, in microseconds a call.

Run: ``python benchmarks/random_draws.py``; ``--device cuda`` on a GPU. The keys are made by the batcher once for all
steps of a batch; their share per step is in the table too, as part of "with its keys".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import _report
import torch

from rlstruct import resolve_device
from rlstruct.functional import random

T = 128


def calls(B: int, A: int, device: torch.device) -> dict[str, Callable[[], object]]:
    logits = torch.randn(B, A, device=device)
    seeds = torch.arange(B, device=device)
    steps = torch.arange(T, device=device)
    key = random.step_keys(seeds, 0, steps)[0]

    def synchronised(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            result = call()
            torch.cuda.synchronize(device)
            return result

        return run if device.type == "cuda" else call

    return {
        name: synchronised(call)
        for name, call in {
            "categorical": lambda: random.categorical(logits, key),
            "keys of 128 steps": lambda: random.step_keys(seeds, 0, steps),
            "Categorical.sample": lambda: torch.distributions.Categorical(logits=logits).sample(),
            "Categorical.sample, unvalidated": lambda: torch.distributions.Categorical(
                logits=logits, validate_args=False
            ).sample(),
        }.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--actions", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = resolve_device(options.device)
    rows = []
    print(f"{options.actions} actions on {device}, microseconds a call")
    print("| environments | categorical, with its keys | Categorical(...).sample() | unvalidated | ratio |")
    print("|---:|---:|---:|---:|---:|")
    for B in (1, 8, 64, 512, 4096):
        times = {name: 1e6 * s for name, s in _report.interleaved(calls(B, options.actions, device)).items()}
        ours = times["categorical"] + times["keys of 128 steps"] / T
        theirs = times["Categorical.sample"]
        rows.append({"environments": B, "actions": options.actions, **times, "with_keys": ours, "ratio": ours / theirs})
        other = times["Categorical.sample, unvalidated"]
        print(f"| {B} | {ours:.1f} | {theirs:.1f} | {other:.1f} | {ours / theirs:.2f} |", flush=True)
    print(f"Written: {_report.write('random_draws', rows)}")


if __name__ == "__main__":
    main()
