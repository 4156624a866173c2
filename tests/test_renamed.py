"""Old import paths and names: each is the object of its new name, after a warning that says so."""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import subprocess
import sys
import warnings

import pytest

from rlstruct import renamed

ROOT = pathlib.Path(__file__).parents[1]
DEEP = {  # one module inside each package that has moved, and packages themselves
    "rlstruct.sims.atari.games": "rlstruct.atari.games",
    "rlstruct.batchers.tuning.search": "rlstruct.sharing.tuning.search",
}
NAMES = [(place, name, now) for place, names in renamed.NAMES.items() for name, now in names.items()]

MEMBERS = [(place, old, new) for place, names in renamed.MEMBERS.items() for old, new in names.items()]
PARAMETERS = [(place, old, new) for place, names in renamed.PARAMETERS.items() for old, new in names.items()]


@pytest.fixture
def _unimported() -> None:
    """Forget the old paths, so that the next import warns again."""
    for name in [name for name in sys.modules if name.startswith("rlstruct.") and renamed.module_of(name)]:
        del sys.modules[name]


@pytest.mark.usefixtures("_unimported")
@pytest.mark.parametrize(("old", "new"), [*renamed.MODULES.items(), *DEEP.items()])
def test_an_old_path_is_the_module_of_the_new_one(old: str, new: str) -> None:
    if new.startswith("rlstruct.atari"):
        pytest.importorskip("warp", reason="needs the extra warp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert str(caught[-1].message) == f"{old} is {new} since version 0.4"
    assert module is importlib.import_module(new)
    assert module.__spec__ is not None
    assert (module.__name__, module.__spec__.name) == (new, new)
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(("place", "name", "now"), NAMES)
def test_an_old_name_is_the_object_of_the_new_one(
    place: str, name: str, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(importlib.import_module(place)), name, raising=False)  # left by an import of an old path
    with pytest.warns(DeprecationWarning, match=f"{place}.{name} is {now.replace(':', '.')} since") as caught:
        old = getattr(importlib.import_module(place), name)
    home, _, attribute = now.partition(":")
    module = importlib.import_module(home)
    assert old is (getattr(module, attribute) if attribute else module)
    assert [warning.filename for warning in caught] == [__file__]
    assert name not in getattr(importlib.import_module(place), "__all__", ())


@pytest.mark.parametrize(("place", "old", "new"), MEMBERS)
def test_an_old_attribute_is_the_new_one(place: str, old: str, new: str) -> None:
    module, _, name = place.rpartition(".")
    if module.startswith("rlstruct.atari"):
        pytest.importorskip("warp", reason="needs the extra warp")
    cls = getattr(importlib.import_module(module), name)
    stand_in = type("StandIn", (), {new: 7})()
    with pytest.warns(DeprecationWarning, match=f"{name}.{old} is {name}.{new} since") as caught:
        assert vars(cls)[old].fget(stand_in) == 7
    assert [warning.filename for warning in caught] == [__file__]
    assert hasattr(cls, new) or new in cls.__annotations__ or new == "group"


@pytest.mark.parametrize(("place", "old", "new"), PARAMETERS)
def test_an_old_keyword_argument_arrives_as_the_new_one(place: str, old: str, new: str) -> None:
    module, _, name = place.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    assert new in inspect.signature(function).parameters

    def stand_in(**arguments: object) -> dict[str, object]:
        return arguments

    stand_in.__module__, stand_in.__qualname__, stand_in.__name__ = module, name, name
    with pytest.warns(DeprecationWarning, match=rf"{name}\({old}=…\) is {name}\({new}=…\) since") as caught:
        assert renamed.parameters(stand_in)(**{old: 7, "other": 8}) == {new: 7, "other": 8}
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match=name), pytest.raises(TypeError):
        function(**{old: 7})  # the others are missing


def test_a_name_that_never_was_is_missing_as_in_any_module() -> None:
    for place in renamed.NAMES:
        with pytest.raises(AttributeError, match="has no attribute 'never'"):
            importlib.import_module(place).never  # noqa: B018
        assert not hasattr(importlib.import_module(place), "never")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_never_was_is_missing_from_the_new_place() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rlstruct\.sharing\.tuning\.never"):
        importlib.import_module("rlstruct.batchers.tuning.never")


@pytest.mark.slow
def test_importing_the_library_uses_no_old_name() -> None:
    code = """
import pkgutil, importlib, rlstruct, json, sys
names = []
for module in pkgutil.walk_packages(rlstruct.__path__, "rlstruct."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        assert "extra" in str(error) or module.name.startswith("rlstruct.cli."), (module.name, error)
print(json.dumps([name for name in sys.modules if name.startswith("rlstruct.")]))
"""
    command = [sys.executable, "-W", "error::DeprecationWarning:rlstruct", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])
    assert "rlstruct.search.alphazero" in imported
    assert [name for name in imported if renamed.module_of(name)] == []


@pytest.mark.slow
def test_each_module_of_the_top_layer_can_be_imported_first() -> None:
    files = [file for name in ("search", "sharing", "profiling") for file in (ROOT / "rlstruct" / name).rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert "rlstruct.search.arena" in names
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
