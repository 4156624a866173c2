"""Draw the picture of the README, every seed of it, from results of learn.py: learning_curve.py RESULTS.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from _learning import evaluations_of

from rlstruct.algos.learning_curve import Curve, draw_curves

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Write docs/learning_curve.png."""
    results = json.loads(Path(sys.argv[1]).read_text())
    curves = [Curve(*zip(*evaluations_of(row), strict=True)) for row in results["rows"]]
    name = results["benchmark"].partition("_")[0].upper()
    picture = ROOT / "docs" / "learning_curve.png"
    draw_curves({name: curves}, picture, title=f"{name} on CartPole-v1", metric="return of the evaluations")
    print(f"{picture}: {len(curves)} seeds of {results['machine']['commit']}")


if __name__ == "__main__":
    main()
