"""The library keeps the rules of the house, and each checker catches what it is for."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from checkers import (
    IMITATING,
    MAX_FUNCTION_LINES,
    MAX_MODULE_LINES,
    ROOT,
    all_files,
    craft_complaints,
    factory_complaints,
    folder_import_complaints,
    layer_complaints,
    library_files,
    module_name,
    private_complaints,
    size_complaints,
    sync_complaints,
    unexplained_complaints,
)

Checker = Callable[[str], list[str]]


def in_all(files: list[pathlib.Path], checker: Checker) -> list[str]:
    return [f"{file.relative_to(ROOT)}:{complaint}" for file in files for complaint in checker(file.read_text())]


@pytest.mark.parametrize("checker", [factory_complaints, sync_complaints, craft_complaints, size_complaints])
def test_the_library_keeps_the_rule(checker: Checker) -> None:
    complaints = in_all(library_files(), checker)
    assert not complaints, "\n".join(complaints)


def test_nobody_imports_a_folder_by_its_own_name() -> None:
    assert in_all(all_files(), folder_import_complaints) == []


def test_imports_go_downward() -> None:
    complaints = [
        f"{file.relative_to(ROOT)}:{complaint}"
        for file in library_files()
        for complaint in layer_complaints(file.read_text(), module_name(file), file.name == "__init__.py")
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rlstruct.core.dict_tensor", "import rlstruct.vec_env"),  # upward
        ("rlstruct.core.dict_tensor", "from ..vec_env import VecEnv"),  # upward, relative
        ("rlstruct.core.dict_tensor", "from rlstruct import VecEnv"),  # upward, through the front page
        ("rlstruct.core.dict_tensor", "def f():\n    from rlstruct.algos import train"),  # inside a function
        ("rlstruct.vec_env", "if TYPE_CHECKING:\n    from rlstruct.envs import GymEnv"),  # for types only
        ("rlstruct.vec_env", "import importlib\nimportlib.import_module('rlstruct.envs')"),  # by a string
        ("rlstruct.core.dict_tensor", "from rlstruct import functional"),  # same layer
        ("rlstruct.agents.mlp", "from rlstruct.envs import GymEnv"),  # sibling of layer 4
        ("rlstruct.agents.mlp", "from ..batchers import RL_Batcher"),  # the same, relative
        ("rlstruct.engine.graph", "from rlstruct.testing import forbid_host_sync"),  # upward
        ("rlstruct.algos.dqn", "from rlstruct.agents import QAgent"),  # agents arrive as factories
        ("rlstruct.envs.gym", "from tests.fakes import CountingEnv"),  # nobody imports the tests
        ("rlstruct.unheard_of", "import torch"),  # no layer
    ],
)
def test_layer_checker_catches(module: str, source: str) -> None:
    assert len(layer_complaints(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rlstruct.core.dict_tensor", "import torch\nfrom rlstruct.errors import ShapeMismatchError"),
        ("rlstruct.core.dict_tensor", "from .specs import TensorSpec\nfrom ..device import resolve_device"),
        ("rlstruct.agents.mlp", "from rlstruct import DictTensor, core\nfrom .networks import mlp"),
        ("rlstruct.algos.dqn", "from rlstruct.batchers import RL_Batcher"),
        ("rlstruct.algos.dqn", "from rlstruct.engine.graph import Graph"),
    ],
)
def test_layer_checker_allows(module: str, source: str) -> None:
    assert layer_complaints(source, module) == []


def test_layer_checker_resolves_relative_imports_of_a_package() -> None:
    assert layer_complaints("from .dict_tensor import DictTensor", "rlstruct.core", is_package=True) == []
    assert len(layer_complaints("from ..envs import GymEnv", "rlstruct.core", is_package=True)) == 1


@pytest.mark.parametrize(
    "source",
    ["import agents", "from batchers.rl_batcher import RL_Batcher", "import os\nimport algos.dqn as d"],
)
def test_folder_import_checker_catches(source: str) -> None:
    assert len(folder_import_complaints(source)) == 1


def test_folder_import_checker_allows_the_installed_names() -> None:
    assert folder_import_complaints("import rlstruct.agents\nfrom rlstruct import batchers\nfrom . import algos") == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.zeros(3)",
        "import torch as th\nth.arange(3, dtype=th.int64)",
        "from torch import full as fill\nfill((3,), 0.0)",
        "import torch\ntorch.LongTensor([1])",
    ],
)
def test_factory_checker_catches(source: str) -> None:
    assert len(factory_complaints(source)) == 1


def test_factory_checker_allows() -> None:
    source = """
import numpy as np, torch
torch.zeros(3, device=x.device); torch.zeros_like(x); x.new_zeros(3); np.zeros(3); torch.from_numpy(a)
torch.rand(3, out=x); torch.ones(3, **options); torch.nn.Linear(2, 2)
"""
    assert factory_complaints(source) == []


def test_private_names_of_torch_are_in_the_engine_only() -> None:
    engine = ROOT / "rlstruct" / "engine"
    own = {ROOT / "batchers" / "workers" / "weights.py"}  # its _version is its own
    files = [file for file in library_files() if engine not in file.parents and file not in own]
    assert in_all(files, private_complaints) == []


@pytest.mark.parametrize(
    "source",
    ["import torch._dynamo", "from torch._inductor import config", "torch._C._cuda_x()", "x._version", "func._schema"],
)
def test_private_checker_catches(source: str) -> None:
    assert private_complaints(source)


def test_private_checker_allows_what_is_documented() -> None:
    assert (
        private_complaints("import torch\ntorch._foreach_copy_(a, b)\nfrom torch.utils._pytree import tree_map") == []
    )


@pytest.mark.parametrize("call", ["x.item()", "x.tolist()", "x.cpu()", "x.numpy()", "x.nonzero()", "torch.nonzero(x)"])
def test_sync_checker_catches(call: str) -> None:
    assert len(sync_complaints(call)) == 1
    assert len(sync_complaints(f"{call}  # sync:")) == 1  # no reason
    assert sync_complaints(f"{call}  # sync: the user asks for a float, once a batch") == []


def test_sync_checker_wants_the_reason_on_the_line_of_the_call() -> None:
    assert len(sync_complaints("# sync: above\nx.item()")) == 1
    assert sync_complaints("y = (\n    x\n    .item()  # sync: once\n)") == []


@pytest.mark.parametrize("source", ["print(1)", "assert x", "try:\n    f()\nexcept:\n    pass"])
def test_craft_checker_catches(source: str) -> None:
    assert len(craft_complaints(source)) == 1


def test_every_error_names_the_page_that_explains_it() -> None:
    complaints = in_all([file for file in library_files() if file not in IMITATING], unexplained_complaints)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("source", ["raise ValueError('x')", "def f():\n    return KeyError('x')", "e = TypeError()"])
def test_the_checker_of_errors_catches(source: str) -> None:
    assert len(unexplained_complaints(source)) == 1


def test_the_checker_of_errors_allows() -> None:
    source = "try:\n    f()\nexcept ValueError as e:\n    raise BadValueError(e) from e\nraise NotImplementedError"
    assert unexplained_complaints(source) == []


def test_size_checker_catches_long_modules() -> None:
    assert size_complaints("x = 1\n" * MAX_MODULE_LINES) == []
    assert len(size_complaints("x = 1\n" * (MAX_MODULE_LINES + 1))) == 1


@pytest.mark.parametrize(
    "head", ["def f():\n", "def f(\n    a,\n    b,\n):\n", 'def f():\n    """One\n\n    two."""\n']
)
def test_size_checker_catches_long_bodies(head: str) -> None:
    assert size_complaints(head + "    x = 1\n" * MAX_FUNCTION_LINES) == []
    assert len(size_complaints(head + "    x = 1\n" * (MAX_FUNCTION_LINES + 1))) == 1
    assert size_complaints('def f():\n    """Only a docstring."""\n') == []
