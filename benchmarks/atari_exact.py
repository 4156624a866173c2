"""Exactness of the consoles of rlstruct.atari: every game of ale-py against ALE, frame by frame.

``python benchmarks/atari_exact.py`` plays all games that ale-py ships for 1,000 frames of random actions (a quarter of
an hour on one core), and writes ``results/atari_exact.json`` as it goes; ``python benchmarks/tables.py`` makes the
table of ``docs/atari.md`` from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys

from common.reporting import RESULTS, machine

FILE = RESULTS / "atari_exact.json"


def measure(game: str, n_frames: int) -> dict[str, object]:
    """Compare one game."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "atari"))
    from ale_comparison import compare_with_ale

    try:
        return dataclasses.asdict(compare_with_ale(game, n_frames))
    except ValueError as error:
        return {"game": game, "left_out": str(error)}


def words(row: dict[str, object]) -> list[str]:
    """Say what a row of the table says."""
    if "left_out" in row:
        return [f"`{row['game']}`", "", "", "", str(row["left_out"])]
    differences = row["differences"]
    what = ", ".join(f"`{name}`" for name in list(differences)[:4]) + (" …" if len(differences) > 4 else "")
    equal = row["n_frames"] - bool(differences)
    if row["n_wrong_pictures"] and not what:
        what = f"{row['wrong_pixels']} pixels in the first of them"
    return [f"`{row['game']}`", str(row["mapper"]), f"{equal:,}", f"{row['n_wrong_pictures']:,}", what]


def render(report: dict[str, object]) -> str:
    """Write the table of the page."""
    rows, n_frames = report["rows"], report["n_frames"]
    exact = [row for row in rows if not row.get("left_out") and not row["differences"]]
    pixels = [row for row in exact if not row["n_wrong_pictures"]]
    lines = [
        f"At commit `{report['machine']['commit']}`: of {len(rows)} games, {len(exact)} are equal to ALE "
        f"in RAM and every compared register over {n_frames:,} "
        f"frames of random actions, and {len(pixels)} of them in every pixel of every frame too.",
        "",
        "| game | cartridge | equal frames | frames with other pixels | what differs |",
        "|---|---|--:|--:|---|",
        *("| " + " | ".join(words(row)) + " |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--games", nargs="*", default=None, help="only these, not written")
    arguments = parser.parse_args()

    from rlstruct.atari import playable_games

    report = {"machine": machine(), "n_frames": arguments.frames, "rows": []}
    for game in arguments.games or playable_games():
        row = measure(game, arguments.frames)
        report["rows"].append(row)
        print(" | ".join(words(row)), flush=True)
        if arguments.games is None:
            FILE.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
