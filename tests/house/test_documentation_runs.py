"""The documentation's code runs: docstrings of every module, tutorials, and the names of `import rlstruct`."""

from __future__ import annotations

import doctest
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from warm_python import WarmPython

from checkers import ROOT, library_files, module_name

pytestmark = pytest.mark.timeout(310)  # of a machine that has other things to do

TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
# What takes half a minute runs as well in a few seconds: the text, and what stands there instead.
SHORTER = {
    "08_evaluation_checkpoints_and_plots.py": {"--n-env-steps 15000": "--n-env-steps 3000"},
    "10_four_thousand_environments.py": {"n_env_steps=400_000": "n_env_steps=100_000"},
    "13_connect_four.py": {"n_env_steps=8_000": "n_env_steps=2_000", "n_updates=8": "n_updates=4", "=32)": "=8)"},
    "18_tuning.py": {"seconds=30.0": "seconds=6.0"},
    "19_start_states.py": {"default=8192": "default=4096", "JUDGED = 16, 8": "JUDGED = 16, 4"},
    "20_evolution_strategies.py": {"n_generations=16": "n_generations=5", "mean_return > 475": "mean_return > 150"},
    "21_roles.py": {"T = 300": "T = 100"},
}
# What `import rlstruct` must leave alone: environments and everything optional.
HEAVY = {"gymnasium", "tqdm", "tensorboard", "matplotlib", "tyro", "ale_py", "envpool", "warp", "tensordict", "ray"}


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# "<!-- run: optuna -->" needs a package that only some have.
RUN_ME = re.compile(r"<!-- run(?:: (\w+))? -->\n+```python\n(.*?)```", re.DOTALL)
BLOCKS = [
    pytest.param(match.group(1), match.group(2), id=f"{page.name}-{number}")
    for page in PAGES
    for number, match in enumerate(RUN_ME.finditer(page.read_text()))
]


def run_python(arguments: list[str], folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, without a screen."""
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="session")
def python() -> Iterator[WarmPython]:
    """Run scripts in processes that need not import torch."""
    with WarmPython() as server:
        yield server


def run_doctests(module: object) -> doctest.TestResults:
    return doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [module_name(file) for file in library_files()])
def test_docstring_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _ = run_doctests(importlib.import_module(name))
    assert failed == 0, capsys.readouterr().out


def test_a_wrong_docstring_example_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    module = type(sys)("wrong")
    module.__doc__ = ">>> 1 + 1\n3\n"
    assert run_doctests(module).failed == 1


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS[:1] + TUTORIALS[2:], ids=lambda file: file.name)  # 02 runs as a notebook
def test_tutorial_warns_of_nothing(tutorial: pathlib.Path, python: WarmPython, tmp_path: pathlib.Path) -> None:
    script, text = tutorial, tutorial.read_text()
    for shown, shorter in SHORTER.get(tutorial.name, {}).items():
        assert shown in text
        text, script = text.replace(shown, shorter), tmp_path / tutorial.name
        script.write_text(text)
    run = python.run(script, tmp_path, seconds=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert "Warning" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("package", "block"), BLOCKS)
def test_page_block_marked_to_run_does(
    package: str | None, block: str, python: WarmPython, tmp_path: pathlib.Path
) -> None:
    if package:
        pytest.importorskip(package)
    script = tmp_path / "block.py"
    script.write_text(block)
    run = python.run(script, tmp_path, seconds=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert "Warning" not in run.stderr


@pytest.mark.slow
def test_a_script_in_a_process_with_torch_ends_as_it_would_elsewhere(
    python: WarmPython, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys, warnings\n"
        "class Mine: pass\n"
        "def put(queue): queue.put(Mine())\n"
        "if __name__ == '__main__':\n"
        "    assert not [name for name in sys.modules if name.startswith('rlstruct')]\n"
        "    spawning = multiprocessing.get_context('spawn')\n"
        "    queue = spawning.Queue()\n"
        "    spawning.Process(target=put, args=(queue,)).start()\n"
        "    print(type(queue.get()) is Mine, sys.argv)\n"
        "    warnings.warn('careful', DeprecationWarning)\n"
        "    sys.exit('the end')\n"
    )
    found, expected = python.run(script, tmp_path, seconds=60), run_python([str(script)], tmp_path)
    assert expected.stderr.endswith("the end\n")
    assert (found.returncode, found.stdout, found.stderr) == (1, f"True {[str(script)]}\n", expected.stderr)
    script.write_text("def fail():\n    raise ValueError('wrong')\nfail()\n")
    found, expected = python.run(script, tmp_path, seconds=60), run_python([str(script)], tmp_path)
    assert found.returncode == expected.returncode == 1
    where = f'  File "{script}", line 3, in <module>\n'  # below it, tracebacks are equal
    assert found.stderr.partition(where)[1:] == expected.stderr.partition(where)[1:] != ("", "")
    script.write_text("while True: pass\n")
    assert python.run(script, tmp_path, seconds=1).returncode == -signal.SIGALRM


@pytest.mark.slow
def test_the_first_lines_of_the_readme_print_the_result_below_them(python: WarmPython, tmp_path: pathlib.Path) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    (tmp_path / "first.py").write_text(shown[1])
    run = python.run(tmp_path / "first.py", tmp_path, seconds=300)
    assert run.returncode == 0, run.stderr
    words, expected = (re.sub(r"[-+\d.,e]*\d", "N", text) for text in (run.stdout, shown[2]))
    assert words == expected  # numbers depend on the machine and on the version of torch
    after = re.search(r"after: return ([\d.]+)", run.stdout)
    assert after is not None
    assert float(after[1]) > 400


@pytest.mark.slow
def test_the_device_mistake_of_the_documentation_is_found_with_the_message_that_it_shows(
    python: WarmPython, tmp_path: pathlib.Path
) -> None:
    section = (ROOT / "docs" / "devices.md").read_text().partition("## Device mistakes, found on a laptop")[2]
    shown = re.search(r"```python\n(.*?)```\n\n```\nSimDeviceMismatchError: (.*?)```", section, re.DOTALL)
    assert shown is not None
    (tmp_path / "agent.py").write_text(shown[1])
    run = python.run(tmp_path / "agent.py", tmp_path, seconds=60)
    assert run.returncode == 1
    assert " ".join(shown[2].split()) in run.stderr
    (tmp_path / "right.py").write_text(shown[1].replace("torch.nn.Linear(4, 2)", 'torch.nn.Linear(4, 2).to("sim:1")'))
    run = python.run(tmp_path / "right.py", tmp_path, seconds=60)
    assert run.returncode == 0, run.stderr


def test_import_rlstruct_brings_in_nothing_heavy(tmp_path: pathlib.Path) -> None:
    # torch itself may look for an optional package: only what rlstruct adds counts.
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import rlstruct; [getattr(rlstruct, name) for name in dir(rlstruct)]\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    run = run_python(["-c", code], tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""  # such as warnings of torch
    added = set(run.stdout.split())
    assert "rlstruct" in added
    assert added & HEAVY == set()
