"""Draw docs/learning.gif, the picture at the top of the README: one agent at three moments of its training.

python .ci/draw_learning.py        trains PPO on CartPole-v1 three times from one seed, each time for more steps
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from rlstruct.cli import film
from rlstruct.cli.main import main
from rlstruct.cli.stored_run import load_trained

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "learning.gif"
STEPS = (2_000, 10_000, 40_000)  # of training
N_SHOWN, EVERY, SECONDS = 300, 3, 0.06  # environment steps to show, steps per frame, seconds per frame
SEED = 5


def pictures(steps: int, runs: Path) -> list[film.Picture]:
    """Train for this many steps, then draw the greedy policy until the pole falls."""
    words = f"train ppo --env CartPole-v1 --seed 0 --n-env-steps {steps} --evaluation-episodes 4 --runs {runs}/{steps}"
    if main(words.split()):
        raise SystemExit("the training failed")
    trained = load_trained(next((runs / str(steps)).iterdir()), auto_reset=False)
    env = trained.factory(n_envs=1, seed=SEED)
    agent = trained.choice.create_agent(trained.model, stochastic=False)
    drawn = film._played(env, agent, film._look_of(trained.factory, env)[1], None, SEED)
    shown = []
    for step, picture in enumerate(itertools.islice(drawn, N_SHOWN + 1)):
        title, caption = (_line(picture.width, text) for text in (f"after {steps:,} steps", f"return {step}"))
        screen = picture.crop((0, 0, picture.width, picture.height - 20))  # without the caption of films
        shown.append(film._grid([title, screen, caption], 1, 0))
    env.close()
    return shown


def _line(width: int, text: str) -> film.Picture:
    """Draw a line of text that can be read on a phone."""
    line = Image.new("RGB", (width, 44), "white")
    ImageDraw.Draw(line).text((10, 2), text, "#333333", ImageFont.load_default(34))
    return line


def draw() -> None:
    """Draw the stages next to each other; a stage that has ended keeps its last frame."""
    with tempfile.TemporaryDirectory() as runs:
        stages = [pictures(steps, Path(runs)) for steps in STEPS]
    last = max(map(len, stages)) - 1
    frames = []
    for at in [*range(0, last, EVERY), last]:
        whole = film._grid([stage[min(at, len(stage) - 1)] for stage in stages], len(stages))
        frames.append(whole.resize((whole.width * 2 // 3, whole.height * 2 // 3)).quantize(32))
    times = [round(1000 * SECONDS)] * (len(frames) - 1) + [2000]
    frames[0].save(PICTURE, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)
    print(f"{PICTURE}: {len(frames)} frames, {PICTURE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    draw()
