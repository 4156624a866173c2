"""Import time of all names of `rlstruct` beyond `import torch`, in fresh processes.

    python benchmarks/import_time.py [--rounds 9]

Each round starts two processes in turn: one imports rlstruct after torch, the other gymnasium, which rlstruct leaves
out. Both time their second import alone. The target is met where the median is at most 0.15 s.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile

from _report import machine, write

TARGET_SECONDS = 0.15
TIMED = "import time; start = time.perf_counter(); {first}; middle = time.perf_counter(); {second}; " + (
    "print(middle - start, time.perf_counter() - middle)"
)
# rlstruct imports each of its names when it is first asked for: here all of them.
ALL_NAMES = "import rlstruct; [getattr(rlstruct, name) for name in dir(rlstruct)]"
STATEMENTS = {"rlstruct": ALL_NAMES, "gymnasium": "import gymnasium"}


def import_seconds(second: str) -> tuple[float, float]:
    """Seconds to import torch, and then `second`, in a process of their own."""
    code = TIMED.format(first="import torch", second=STATEMENTS[second])
    # Elsewhere, so that the installed package is imported and not ./rlstruct.
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    torch_seconds, second_seconds = map(float, run.stdout.split())
    return torch_seconds, second_seconds


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="processes of each kind, at least 5")
    rounds = max(5, parser.parse_args().rounds)
    names = tuple(STATEMENTS)
    for name in names:
        import_seconds(name)  # fills the caches of files and of byte code
    seconds: dict[str, list[float]] = {name: [] for name in names}
    torch_seconds = []
    for _ in range(rounds):
        for name in names:
            torch_took, took = import_seconds(name)
            torch_seconds.append(torch_took)
            seconds[name].append(took)

    median = statistics.median(seconds["rlstruct"])
    print(machine())
    print(f"import torch                {statistics.median(torch_seconds):7.3f} s")
    print(f"all of rlstruct after it    {median:7.3f} s   (target: at most {TARGET_SECONDS} s)")
    print(f"import gymnasium after it   {statistics.median(seconds['gymnasium']):7.3f} s   (what rlstruct leaves out)")
    rows = [
        {"import": name, "after": "torch", "median_s": statistics.median(taken), "rounds_s": taken}
        for name, taken in (("torch", torch_seconds), *seconds.items())
    ]
    rows[0]["after"] = None
    print(f"written to {write('import_time', rows)}")
    if median > TARGET_SECONDS:
        sys.exit(f"rlstruct takes {median:.3f} s beyond torch, more than {TARGET_SECONDS} s")


if __name__ == "__main__":
    main()
