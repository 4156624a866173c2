"""Exactness of the consoles of rlstruct.atari: every game of ale-py against ALE, frame by frame.

``python benchmarks/atari_exact.py`` plays all games that ale-py ships for 1,000 frames of random actions (a quarter of
an hour on one core), and writes ``results/atari_exact.json`` as it goes. ``--put-off`` plays them as a GPU does, where
a console puts off its beam, and ``--held-out --seed 7`` plays the games that no test names, with other actions; each
has a result file with a longer name. ``python benchmarks/tables.py`` makes the table of ``docs/atari.md`` from all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections import defaultdict
from typing import Any

from common.reporting import RESULTS, machine

HELD_OUT = (
    *("asteroids", "battle_zone", "boxing", "darkchambers", "double_dunk", "jamesbond"),
    *("riverraid", "skiing", "solaris", "tutankham", "yars_revenge", "zaxxon"),
)
"""Games that no test names; tests/atari/test_consoles.py keeps it so."""


def result_file(*, held_out: bool = False, put_off: bool = False) -> pathlib.Path:
    """Return the file of all games or of those held out, which follow their beam at once or put it off."""
    return RESULTS / f"atari_exact{'_held_out' * held_out}{'_put_off' * put_off}.json"


def measure(game: str, n_frames: int, seed: int, put_off: bool) -> dict[str, Any]:
    """Compare one game."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "atari"))
    from ale_comparison import compare_with_ale

    try:
        return dataclasses.asdict(compare_with_ale(game, n_frames, seed=seed, puts_off=put_off))
    except ValueError as error:
        return {"game": game, "left_out": str(error)}


def words(row: dict[str, Any]) -> list[str]:
    """Say what a row of the table says."""
    if "left_out" in row:
        return [f"`{row['game']}`", "", "", "", str(row["left_out"])]
    differences = row["differences"]
    what = ", ".join(f"`{name}`" for name in list(differences)[:4]) + (" …" if len(differences) > 4 else "")
    equal = row["n_frames"] - bool(differences)
    if row["n_wrong_pictures"] and not what:
        what = f"{row['wrong_pixels']} pixels in the first of them"
    return [f"`{row['game']}`", str(row["mapper"]), f"{equal:,}", f"{row['n_wrong_pictures']:,}", what]


def summary(report: dict[str, Any], games: str, actions: str) -> str:
    """Say how many games of a report are exact."""
    rows = report["rows"]
    exact = [row for row in rows if not row.get("left_out") and not row["differences"]]
    pixels = [row for row in exact if not row["n_wrong_pictures"]]
    return (
        f"At commit `{report['machine']['commit']}`{games}: of {len(rows)} games, {len(exact)} are equal to ALE "
        f"in RAM and every compared register over {report['n_frames']:,} "
        f"frames of {actions}, and {len(pixels)} of them in every pixel of every frame too."
    )


def render() -> str:
    """Write a sentence for each result file, a table of the games that differ, and the names of the others."""
    lines, reports = [], {}
    for held_out in (False, True):
        for put_off in (False, True):
            report = json.loads(result_file(held_out=held_out, put_off=put_off).read_text())
            reports[held_out, put_off] = report
            games = ", games held out" * held_out + ", beam put off" * put_off
            actions = f"other random actions (seed {report['seed']})" if held_out else "random actions"
            lines += [summary(report, games, actions), ""]
    rows = reports[False, False]["rows"]
    equal: dict[str, list[str]] = defaultdict(list)  # names by cartridge
    lines += ["| game | cartridge | equal frames | frames with other pixels | what differs |", "|---|---|--:|--:|---|"]
    for row in rows:
        if row.get("left_out") or row["differences"] or row["n_wrong_pictures"]:
            lines.append("| " + " | ".join(words(row)) + " |")
        else:
            equal[row["mapper"]].append(f"`{row['game']}`")
    lines += ["", "| cartridge | games that are equal in every frame |", "|---|---|"]
    lines += [f"| {mapper} | {', '.join(names)} |" for mapper, names in sorted(equal.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="of the actions and of ALE; default: 0, of the games held out 7")
    parser.add_argument("--put-off", action="store_true", help="log the beam and follow it later, as on a GPU")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--held-out", action="store_true", help="only the games that no test names")
    chosen.add_argument("--games", nargs="*", default=None, help="only these, not written")
    arguments = parser.parse_args()

    from rlstruct.atari import playable_games

    seed = arguments.seed if arguments.seed is not None else 7 * arguments.held_out
    games = HELD_OUT if arguments.held_out else arguments.games or playable_games()
    settings = {"n_frames": arguments.frames, "seed": seed, "put_off": arguments.put_off}
    rows: list[dict[str, Any]] = []
    report = {"machine": machine(), **settings, "rows": rows}
    for game in games:
        rows.append(measure(game, **settings))
        print(" | ".join(words(rows[-1])), flush=True)
        if arguments.games is None:
            file = result_file(held_out=arguments.held_out, put_off=arguments.put_off)
            file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
