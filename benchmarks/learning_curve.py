"""Draw the pictures of README.md and docs/algorithms/, every seed of each training, from results of learn.py."""

from __future__ import annotations

from pathlib import Path

from _learning import draw, evaluations_of
from _tasks import TASKS
from tables import CONFIGS, GAME, load

from rlstruct.algos.learning_curve import Curve, draw_panels

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    curves = [Curve(*zip(*evaluations_of(row), strict=True)) for row in load("reinforce_cartpole")[0]]
    picture = ROOT / "docs" / "learning_curve.png"
    draw_panels({"REINFORCE on CartPole-v1": {"REINFORCE": curves}}, picture, metric="return")
    if found := load("connect_four_strength")[0]:
        whole = Curve(*zip(*found[0]["returns"], strict=True))
        picture = ROOT / "docs" / "algorithms" / "alphazero.png"
        draw_panels({"AlphaZero on Connect Four": {"AlphaZero": [whole]}}, picture, metric="return against UCT-50")
    plain = {name: task for name, task in TASKS.items() if GAME not in name and load(name)[0]}
    pages = {
        kind: {task.about: ({"": load(name)[0]}, task.target) for name, task in plain.items() if name.startswith(kind)}
        for kind in CONFIGS
    }
    games = dict.fromkeys(name.partition(GAME)[2] for name in TASKS if GAME in name)
    pages["minatar"] = {
        game: ({kind.upper(): found for kind in CONFIGS if (found := load(f"{kind}{GAME}{game}")[0])}, None)
        for game in games
    }
    for name, panels in pages.items():
        if drawn := {title: panel for title, panel in panels.items() if panel[0]}:
            draw(drawn, ROOT / "docs" / "algorithms" / f"{name}.png")


if __name__ == "__main__":
    main()
