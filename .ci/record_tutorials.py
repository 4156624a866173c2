"""Record the output and pictures of tutorials for the site: `python .ci/record_tutorials.py [NAME ...]`.

Output goes to docs/tutorials/NAME.txt, with the commit in its first line; pictures go next to it. `make docs` shows
both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "docs" / "tutorials"
# Lines about the machine, not the tutorial: Warp's versions, devices and modules, and the log of Ray's daemon.
OF_MACHINE = re.compile(r"^(Warp \S+ initialized:\n(   .*\n)*|Module rlstruct\..*\n|\S*\(raylet\).*\n)", re.MULTILINE)
WIDTH, COLOURS = 1100, 128  # largest width in pixels, and number of colours, of a picture


def record(script: Path) -> None:
    """Run one tutorial in an empty folder, and store its output and its pictures."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, str(script)], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        commit = subprocess.run(
            ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        text = OF_MACHINE.sub("", run.stdout).replace(f"{folder}/", "").replace(f"{script.parent}/", "tutorials/")
        (PLACE / f"{script.stem}.txt").write_text(f"{commit.stdout.strip()}\n{text.rstrip()}\n")
        for old in PLACE.glob(f"{script.stem}-*.png"):
            old.unlink()
        for file in sorted(Path(folder).rglob("*.png")):
            picture = Image.open(file).convert("RGB")
            picture.thumbnail((WIDTH, 2 * WIDTH))
            picture.quantize(COLOURS).save(PLACE / f"{script.stem}-{file.stem}.png", optimize=True)


def main() -> None:
    names = sys.argv[1:] or [file.stem for file in sorted((ROOT / "tutorials").glob("[0-9]*.py"))]
    PLACE.mkdir(exist_ok=True)
    for name in names:
        record(ROOT / "tutorials" / f"{name}.py")
        print(f"{PLACE / name}.txt")


if __name__ == "__main__":
    main()
