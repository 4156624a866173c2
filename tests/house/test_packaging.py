"""Root folders install as one package: the wheel holds every file of them; and versions agree wherever they stand."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from checkers import FOLDERS, ROOT, library_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel of this tree, built from a copy: an old build/ folder would lend it files."""
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


def installed_path(file: pathlib.Path) -> str:
    """Return the place of a file of the tree in the wheel: agents/mlp.py is rlstruct/agents/mlp.py."""
    folder, *rest = file.relative_to(ROOT).parts
    return "/".join([*FOLDERS[folder].split("."), *rest])


def test_folders_are_mapped_as_the_checkers_think(pyproject: dict[str, Any]) -> None:
    mapping = pyproject["tool"]["setuptools"]["package-dir"]
    assert {folder: package for package, folder in mapping.items()} == FOLDERS


def test_the_wheel_holds_the_files_of_the_tree_and_no_other(wheel: pathlib.Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {installed_path(file) for file in library_files()} | {"rlstruct/py.typed", "rlstruct/cli/faults.md"}


# What the extras bring, as far as this package imports it.
OF_EXTRAS = (
    *("tyro", "tqdm", "matplotlib", "tensorboard", "PIL", "imageio_ffmpeg", "wandb", "mlflow", "mujoco"),
    *("warp", "ale_py", "cv2", "envpool", "pynvml", "ray"),
)


@pytest.mark.exhaustive
def test_the_wheel_imports_outside_the_repository_and_names_the_extras_it_lacks(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Every module, as `make types` does in an environment without extras; here they are hidden."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({OF_EXTRAS}))\n"
        f"sys.path.append({str(ROOT / '.ci')!r})\n"
        "import smoke\n"
        "print(*smoke.import_everything(), sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    files = run.stdout.split()
    assert len(files) > 150
    assert [file for file in files if not file.startswith(str(tmp_path))] == []


@pytest.mark.slow
def test_pytest_does_not_take_the_package_from_the_root(tmp_path: pathlib.Path) -> None:
    """A conftest.py puts its folder on the path; `.ci/on_gpu.py` lays the package out elsewhere."""
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    arguments += ["--rootdir", str(ROOT), str(ROOT / "tests" / "test_device.py")]
    code = f"import pytest, sys; pytest.main({arguments}); print({str(ROOT)!r} in sys.path)"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "test_device.py" in run.stdout, run.stderr
    assert run.stdout.splitlines()[-1] == "False"


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match.group().lower()


def test_every_dependency_is_pinned(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {requirement_name(line) for line in lines if "==" in line and not line.startswith("#")}
    assert {requirement_name(requirement) for requirement in requirements} - pinned == set()


def test_versions_agree(pyproject: dict[str, Any]) -> None:
    import rlstruct

    assert rlstruct.__version__ == pyproject["project"]["version"]
    assert pyproject["project"]["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_says_of_each_version_what_fits_a_screen() -> None:
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len(version.splitlines()) <= 45, version.splitlines()[0]


def test_the_releases_of_torch_agree(pyproject: dict[str, Any]) -> None:
    """The range that is allowed, the releases that .ci/torch_versions runs by itself, CI's matrix, and the warning."""
    from rlstruct.engine.torch_private import TESTED

    requirement = next(line for line in pyproject["project"]["dependencies"] if line.startswith("torch"))
    oldest, limit = (int(minor) for minor in re.findall(r"2\.(\d+)", requirement))
    assert f"2.{oldest} to 2.{limit - 1}" == TESTED
    script = (ROOT / ".ci" / "torch_versions").read_text()
    default = re.search(r"set -- (.*?) *#", script)
    assert default is not None
    assert [version.rpartition(".")[0] for version in default[1].split()] == [f"2.{oldest}", f"2.{limit - 1}"]
    matrix = re.search(r"torch: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert matrix is not None
    assert [int(minor) for minor in re.findall(r'"2\.(\d+)\.', matrix[1])] == [*range(oldest, limit)]


def test_the_versions_of_python_agree(pyproject: dict[str, Any]) -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(pyproject["project"]["classifiers"]))
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert matrix is not None
    assert re.findall(r"3\.\d+", matrix[1]) == classifiers
    assert pyproject["project"]["requires-python"] == f">={classifiers[0]}"
    assert f"Python {classifiers[0]} to {classifiers[-1]}" in (ROOT / "README.md").read_text()
    # A marker that leaves a Python out silently takes tests away from it.
    assert [line for line in pyproject["project"]["optional-dependencies"]["dev"] if "python_version <" in line] == [
        "tomli>=2.0; python_version < '3.11'"
    ]


def test_the_readme_says_what_each_extra_brings(pyproject: dict[str, Any]) -> None:
    table = re.findall(r"^\| (`.*?`) \| ", (ROOT / "README.md").read_text().partition("| extra |")[2], re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(table))) == sorted(pyproject["project"]["optional-dependencies"])
