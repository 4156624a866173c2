"""The core without add-ons: every entry to one names the add-on and the command that installs it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from rlstruct import addons
from rlstruct.errors import MissingPackageError

ROOT = pathlib.Path(__file__).parents[1]

# Makes the add-ons of this environment invisible, as in one that has only rlstruct.
HIDE = """
import importlib.metadata, sys
class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("rlstruct_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden)
"""

ENTRIES = {
    "import rlstruct.sims.atari": "atari",
    "import rlstruct.batchers as b; b.RL_Batcher(5, list, lambda seed: 0, n_processes=1, cluster='auto')": "ray",
    "import rlstruct.sharing": "sharing",
    "from rlstruct.batchers import tune": "sharing",
    "from rlstruct import sims; sims.make('ALE/Pong-v5', 2)": "atari",
    "import rlstruct.search": "search",
    "import rlstruct.algos.alphazero": "search",
    "from rlstruct.algos import AlphaZeroConfig": "search",
    "from rlstruct.algos import alphazero": "search",
    **{
        f"from rlstruct.profiling import {name}": "profiler"
        for name in ("Report", "differences", "profile", "read", "save")
    },
}
COMMANDS = {
    "train a2c --env CartPole-v1 --cluster local --n-processes 1": "ray",
    "tune ppo --env CartPole-v1": "sharing",
}


def run_without_addons(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(HIDE)  # in workers and learners, too
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", HIDE + code]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(("code", "addon"), ENTRIES.items())
def test_an_entry_names_the_missing_addon(code: str, addon: str, tmp_path: pathlib.Path) -> None:
    run = run_without_addons(code, tmp_path)
    assert run.returncode == 1
    said = run.stderr.splitlines()[-2]
    assert said.startswith("rlstruct.errors.MissingPackageError: "), run.stderr
    assert f"the add-on rlstruct-{addon}, which is not installed" in said
    assert f"pip install -e packages/{addon}" in said


@pytest.mark.parametrize(("words", "addon"), COMMANDS.items())
def test_a_command_names_the_missing_addon_in_one_line(words: str, addon: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")
    code = f"import sys; from rlstruct.cli.main import main; sys.exit(main({words.split()}))"
    run = run_without_addons(code, tmp_path)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith(f"rlstruct {words.split()[0]}: ")
    assert f"pip install -e packages/{addon} in a checkout" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "runs").exists()


def test_a_module_that_an_addon_lacks_is_not_taken_for_the_addon() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there") as caught:
        addons.load("rlstruct_atari.not_there", "A test")
    assert not isinstance(caught.value, MissingPackageError)


def test_attributes_are_those_of_the_addon_and_no_others() -> None:
    get = addons.attributes("some.package", {"OrderedDict": "collections"})
    import collections

    assert get("OrderedDict") is collections.OrderedDict
    with pytest.raises(AttributeError, match=r"module 'some\.package' has no attribute 'other'"):
        get("other")


def test_each_module_of_an_addon_can_be_imported_first() -> None:
    files = [file for file in ROOT.glob("packages/*/rlstruct_*/**/*.py") if "rlstruct_atari" not in file.parts]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts[2:]).removesuffix(".__init__") for file in files]
    assert "rlstruct_search.arena" in names
    code = f"""
import importlib, os, gymnasium, torch  # once for all
for name in {sorted(names)}:
    if os.fork() == 0:
        importlib.import_module(name)
        os._exit(0)
    if os.wait()[1] != 0:
        print(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
