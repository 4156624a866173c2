"""Speed of collection on the CPU, compared with other libraries and with a bare loop.

Run: ``make peers`` once, then ``python benchmarks/cpu_collect.py --rlstructures PATH``, where PATH is a checkout of
facebookresearch/rlstructures at v0.2. ``--part`` takes some of the parts:

* ``throughput``: CartPole-v1, a 4-64-64-2 policy that draws its actions, T = 128, at 64 and at 8 environments; ours
  four times: the agent as it is and compiled, each batch ordered when the one before has been handed over, and (queued)
  while the one before is collected;
* ``scaling``: one process and two, each with 32 environments, ours and the bare loop;
* ``slow``: environments of 1 ms per step, one step in ten 10 ms, 8 workers; a plain ``get()``, and one with the next
  batch queued; turns of 4 seconds at least;
* ``weights``: a million parameters to 4 workers;  ``startup``: 2 and 16 workers to the first batch;
* ``frames``: ALE Pong, uint8 84x84x4, 16 environments: bytes moved and kept per step (extra ``atari``).

All of it takes about fifteen minutes on an idle machine. Contenders run in turns, each a warm process of its own with
one torch thread per process; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import _cpu_parts
import _report
from _contenders import Entry, Result, compete

ROOT = Path(__file__).parent.parent
T = 128
OURS = "rlstruct RL_Batcher"
COMPILED = "rlstruct RL_Batcher, compile_agent=True"
QUEUED = f"{OURS}, queued"
COMPILED_QUEUED = f"{COMPILED}, queued"
# Keys of the ratios that each row has, and whose they are.
VARIANTS = {
    "ratio": OURS,
    "compiled_ratio": COMPILED,
    "queued_ratio": QUEUED,
    "compiled_queued_ratio": COMPILED_QUEUED,
}
BARE = "bare loop, 1 process, half of them"
# What the issue asks of ours / peer, by number of environments.
TARGETS = {
    64: {
        "rlstructures v0.2": 5.0,
        "TorchRL MultiSyncCollector": 12.0,
        "SB3 collect_rollouts, SubprocVecEnv": 10.0,
        "SB3 collect_rollouts, DummyVecEnv": 2.0,
        "gymnasium SyncVectorEnv": 1.4,
    },
    8: {"rlstructures v0.2": 5.0, "TorchRL MultiSyncCollector": 5.0},
}
LIMIT = 0.85


def entries(n_envs: int, n_processes: int, peers: str, rlstructures: str) -> list[Entry]:
    """Everybody who takes part, with as many environments in as many processes."""
    task = {"n_envs": n_envs, "n_processes": n_processes, "n_timesteps": T}
    half = {**task, "n_envs": n_envs // n_processes, "n_processes": 1}
    old = {"RLSTRUCTURES": rlstructures}
    return [
        Entry(OURS, "rlstruct_batcher.py", task),
        Entry(COMPILED, "rlstruct_batcher.py", task, ("compiled",)),
        Entry(QUEUED, "rlstruct_batcher.py", task, ("queued",)),
        Entry(COMPILED_QUEUED, "rlstruct_batcher.py", task, ("compiled", "queued")),
        Entry(BARE, "bare_loop.py", half),
        Entry(f"bare loop, {n_processes} processes", "bare_loop.py", task),
        Entry("rlstructures v0.2", "rlstructures_v02.py", task, python=peers, variables=old),
        Entry("TorchRL MultiSyncCollector", "torchrl_collectors.py", task, python=peers, requires="torchrl"),
        Entry(
            "SB3 collect_rollouts, SubprocVecEnv",
            "sb3_rollouts.py",
            task,
            ("subproc",),
            python=peers,
            requires="stable_baselines3",
        ),
        Entry("SB3 collect_rollouts, DummyVecEnv", "sb3_rollouts.py", task, python=peers, requires="stable_baselines3"),
        Entry("gymnasium SyncVectorEnv", "gymnasium_vector.py", task, python=peers, requires="gymnasium"),
        Entry("EnvPool (C++ environments)", "envpool_sync.py", task, python=peers, requires="envpool"),
    ]


def throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines 1 and 2 of the table of targets."""
    rows = []
    for n_envs in options.envs:
        results = compete(entries(n_envs, 2, options.peers, options.rlstructures), options.rounds, options.seconds)
        rates = {result.name: result.rate for result in results}
        print(f"\n## {n_envs} environments, 2 processes, T = {T}, {options.rounds} rounds\n")
        print("| | environment steps/s | slowest - fastest round | ours / it | compiled / it | queued / it |", end=" ")
        print("compiled, queued / it | target | CPU µs per step |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for result in results:
            rows.append(row(result, rates, n_envs))
            print(line(rows[-1]))
        for name in VARIANTS.values():
            if rates[name] and rates[BARE]:
                share = rates[name] / (2 * rates[BARE])
                print(f"\n{name}, share of 2 x bare loop of one process: {share:.1%}, {_report.verdict(share, LIMIT)}")
                rows.append({"name": f"share of the limit, {name}", "n_envs": n_envs, "ratio": share, "target": LIMIT})
        if reports := results[0].reports:
            print_phases(reports)
    return rows


def print_phases(reports: list[dict[str, Any]]) -> None:
    """Say where our time goes."""
    print("\nShare of the clock during our turns, mean over the workers, median round:")
    shares = {
        phase: statistics.median(report["phases"][phase] / report["seconds"] for report in reports)
        for phase in reports[0]["phases"]
        if phase != "wait"  # it covers the turns of the others too
    }
    copied_out = shares.pop("hand_over")
    for phase, share in shares.items():
        print(f"  {phase:12} {share:6.1%}")
    print(f"  {'wait':12} {1.0 - sum(shares.values()):6.1%}, of which the parent copies batches out {copied_out:.1%}")
    print(f"batcher.stats() since the start, the turns of the others included:\n{reports[-1]['text']}")


def row(result: Result, rates: dict[str, float | None], n_envs: int) -> dict[str, Any]:
    def over(name: str) -> float | None:
        ours = rates[name]
        return ours / result.rate if ours and result.rate and result.name not in VARIANTS.values() else None

    return {
        "name": result.name,
        "n_envs": n_envs,
        "rate": result.rate,
        "rates": result.rates,
        "cpu_us": None if result.cpu is None else result.cpu * 1e6,
        **{key: over(name) for key, name in VARIANTS.items()},
        "target": TARGETS.get(n_envs, {}).get(result.name),
        "why": result.why,
        "versions": result.versions,
        "reports": result.reports,
    }


def line(row: dict[str, Any]) -> str:
    if row["rate"] is None:
        return f"| {row['name']} | {row['why']} | | | | | | | |"
    spread = f"{min(row['rates']):,.0f} - {max(row['rates']):,.0f}"
    ratios = {key.removesuffix("ratio").replace("_", " "): row[key] for key in VARIANTS}
    words = " | ".join("" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values())
    judged = {} if row["target"] is None else {who: ratio for who, ratio in ratios.items() if ratio is not None}
    target = "; ".join(f"{who}{_report.verdict(ratio, row['target'])}" for who, ratio in judged.items())
    return f"| {row['name']} | {row['rate']:,.0f} | {spread} | {words} | {target} | {row['cpu_us']:.1f} |"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the throughput as bars, one panel for each number of environments."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({row["n_envs"] for row in rows}, reverse=True)
    figure, panels = pyplot.subplots(1, len(counts), figsize=(6.5 * len(counts), 4.2), squeeze=False)
    for panel, n_envs in zip(panels[0], counts, strict=True):
        shown = [row for row in rows if row["n_envs"] == n_envs and "rate" in row][::-1]
        rates = [(row["rate"] or 0.0) / 1000 for row in shown]
        colours = ["tab:blue" if row["name"] in VARIANTS.values() else "0.65" for row in shown]
        bars = panel.barh([row["name"] for row in shown], rates, color=colours)
        labels = [f"{row['rate'] / 1000:.1f}" if row["rate"] else row["why"].split(" (")[0] for row in shown]
        panel.bar_label(bars, labels, padding=3, fontsize=8)
        panel.set_title(f"{n_envs} environments, 2 processes", fontsize=10)
        panel.set_xlabel("thousand environment steps per second")
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"CartPole-v1, 4-64-64-2 policy, T = {T}, {_report.machine()['cores']} cores", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"Drawn: {path}")


PARTS = {
    "throughput": throughput,
    "scaling": _cpu_parts.scaling,
    "slow": _cpu_parts.slow,
    "weights": _cpu_parts.weights,
    "startup": _cpu_parts.startup,
    "frames": _cpu_parts.frames,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "all"], default=["all"])
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 8], help="environments of the part throughput")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="the peers' interpreter")
    parser.add_argument("--rlstructures", default="", help="path of a checkout of rlstructures v0.2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long a turn takes")
    options = parser.parse_args()
    print(f"Machine: {_report.machine()}", file=sys.stderr)
    for name in PARTS if "all" in options.part else options.part:
        rows = PARTS[name](options)
        path = _report.write(f"cpu_collect_{name}", rows)
        print(f"Written: {path}")
        if name == "throughput":
            draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
