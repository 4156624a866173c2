"""Names that `import rlstruct` offers, each imported when it is first used."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import pydoc
import re
import subprocess
import sys

import pytest

import rlstruct


def test_every_name_is_what_its_module_has_and_what_type_checkers_see() -> None:
    tree = ast.parse(pathlib.Path(rlstruct.__file__).read_text())
    seen = next(node.body for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in seen if isinstance(node, ast.ImportFrom) for alias in node.names}
    modules = {"core", "device", "errors", "functional", "policies", "profiling", "replay", "rl_agent", "vec_env"}
    assert {name for name in dir(rlstruct) if not name.startswith("_")} == imported.keys() | modules
    for name, module in imported.items():
        assert module is not None
        assert getattr(rlstruct, name) is getattr(importlib.import_module(module), name)


def test_what_there_is_not_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'rlstruct' has no attribute 'DictTenser'$"):
        rlstruct.DictTenser  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'DictTenser' from 'rlstruct'"):
        from rlstruct import DictTenser  # noqa: F401
    assert not hasattr(rlstruct, "__wrapped__")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("RL_Batcher", "batchers"),
        ("A2CConfig", "algos"),
        ("GymEnvInf", "envs"),
        ("ActorCriticAgent", "agents"),
        ("TensorEnv", "sims"),
        ("check_vec_env", "testing"),
        ("TorchVectorEnv", "adapters"),
        ("mps", "sharing"),
    ],
)
def test_names_of_other_packages_say_where_they_live(name: str, place: str) -> None:
    code = f"from rlstruct import {name}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.stderr.strip().endswith(f"ImportError: {name!r} is not here. Write: from rlstruct.{place} import {name}")
    assert hasattr(importlib.import_module(f"rlstruct.{place}"), name)  # what it says is true


def test_the_name_of_an_algorithm_says_where_its_module_is() -> None:
    with pytest.raises(ImportError, match=r"^'PPO' is not here\. Write: from rlstruct\.algos import ppo$"):
        rlstruct.PPO  # noqa: B018


def test_a_package_that_is_not_imported_yet_says_how() -> None:
    code = "import rlstruct\ntry: rlstruct.batchers\nexcept AttributeError as error: print(error)"
    code += "\nfrom rlstruct import batchers; print(rlstruct.batchers.RL_Batcher)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.startswith(
        "module 'rlstruct' has no attribute 'batchers'. Write: import rlstruct.batchers\n<class"
    )


def test_a_star_brings_in_every_name_of_the_page() -> None:
    brought: dict[str, object] = {}
    exec("from rlstruct import *", brought)
    listed = {name for name in dir(rlstruct) if name[0] != "_" and not inspect.ismodule(getattr(rlstruct, name))}
    assert brought.keys() - {"__builtins__"} == listed
    assert brought["DictTensor"] is rlstruct.DictTensor


def test_help_begins_with_the_page_and_tells_of_nothing_else() -> None:
    text = pydoc.plain(pydoc.render_doc(rlstruct))
    assert rlstruct.__doc__ is not None
    assert rlstruct.__doc__.splitlines()[-2] in "\n".join(text.splitlines()[:12])
    assert "importlib" not in text
    assert re.findall(r"(?m)^    class (\w+)", text) == sorted(n for n in rlstruct.__all__ if n[0].isupper())


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, rlstruct; print('torch' in sys.modules); rlstruct.core.DictTensor; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["False", "True"]
