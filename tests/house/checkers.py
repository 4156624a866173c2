"""The rules of the house as functions from source text to complaints; an empty list means that the rule holds.

The AST sees names, not types: `.item()` is reported on a numpy array too (say so in the reason), and `bool(tensor)`
is not seen at all, which is what `rlstruct.testing.forbid_host_sync` is for.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

from rlstruct.errors import Explained

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Where each folder of the repository installs.
FOLDERS = {
    "rlstruct": "rlstruct",
    "agents": "rlstruct.agents",
    "batchers": "rlstruct.batchers",
    "algos": "rlstruct.algos",
}

LAYERS = {
    "rlstruct.errors": 0,
    "rlstruct.device": 0,
    "rlstruct.registry": 0,
    "rlstruct.renamed": 0,
    "rlstruct.profiling": 0,
    "rlstruct.core": 1,
    "rlstruct.options": 1,
    "rlstruct.spaces": 1,
    "rlstruct.functional": 1,
    "rlstruct.vec_env": 2,
    "rlstruct.indexed_actions": 2,
    "rlstruct.rl_agent": 2,
    "rlstruct.replay": 2,
    "rlstruct.policies": 2,
    "rlstruct.engine": 3,
    "rlstruct.envs": 4,
    "rlstruct.sims": 4,
    "rlstruct.adapters": 4,
    "rlstruct.testing": 4,
    "rlstruct.agents": 4,
    "rlstruct.batchers": 4,
    "rlstruct.algos": 5,
    "rlstruct.atari": 6,
    "rlstruct.search": 6,
    "rlstruct.sharing": 6,
    "rlstruct.cli": 7,
    "rlstruct.__main__": 8,
}
NOT_IMPORTED_BY_THE_LIBRARY = {"tests", "tutorials", "benchmarks"}
# Edges inside one layer: small, acyclic, and each for the reason next to it.
SAME_LAYER = {
    ("rlstruct.device", "rlstruct.errors"),  # raises them
    ("rlstruct.device", "rlstruct.renamed"),  # has an old name
    ("rlstruct.profiling", "rlstruct.errors"),  # the same
    ("rlstruct.core", "rlstruct.options"),  # checks where it saves
    ("rlstruct.functional", "rlstruct.core"),  # masked_dicttensor builds a DictTensor
    ("rlstruct.replay", "rlstruct.rl_agent"),  # replays one
    ("rlstruct.policies", "rlstruct.rl_agent"),  # acts with one
    ("rlstruct.indexed_actions", "rlstruct.vec_env"),  # wraps one
    ("rlstruct.indexed_actions", "rlstruct.rl_agent"),  # for which it is wrapped
}
# What the design takes away from algorithms: environments and agents arrive as factories.
ALGORITHMS_MAY_IMPORT_OF_LAYER_4 = {"rlstruct.batchers"}

FACTORIES = {
    *("zeros", "ones", "empty", "full", "tensor", "as_tensor", "asarray", "arange", "range", "linspace", "logspace"),
    *("eye", "rand", "randn", "randint", "randperm", "scalar_tensor", "empty_strided", "tril_indices", "triu_indices"),
    *("hann_window", "hamming_window", "sparse_coo_tensor"),
}
TYPED_CONSTRUCTORS = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "IntTensor", "LongTensor", "BoolTensor"}
SYNCS = {"item", "tolist", "cpu", "numpy", "nonzero"}

PRIVATE_ATTRIBUTES = {"_version", "_cdata", "_schema", "_make_wrapper_subclass"}  # of tensors and operators

# They imitate others: Python's own errors of a missing name, and torch's of a device.
SIMULATED = ROOT / "rlstruct" / "testing" / "simulated"
IMITATING = {ROOT / "rlstruct" / "__init__.py", SIMULATED / "devices.py", SIMULATED / "tensor.py"}

IMPORT_BY_STRING = {"importlib.import_module", "import_module", "__import__"}

PRIVATE = re.compile(r"_(?!_)\w*[a-zA-Z]\w*|__\w*(?<!__)")
# Private names of others that tests need: whatever is below these, and two of the standard library.
OTHERS = ("torch", "warp._src", "mctx._src", "os._exit")
OF_THE_STANDARD_LIBRARY = {"_replace", "_semlock"}  # of named tuples, and of locks of multiprocessing
BY_STRING = {"setattr", "getattr", "hasattr", "delattr", "attrgetter", "object", "patch", *IMPORT_BY_STRING}


def library_files() -> list[pathlib.Path]:
    """Every source file that gets installed."""
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def all_files() -> list[pathlib.Path]:
    """Every source file of the repository."""
    others = ("tests", "tutorials", "benchmarks", ".ci")
    return library_files() + sorted(file for folder in others for file in (ROOT / folder).rglob("*.py"))


def module_name(file: pathlib.Path) -> str:
    """Name under which a file of the library is imported: agents/mlp.py is rlstruct.agents.mlp."""
    folder, *parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS.get(folder, folder), *(part for part in parts if part != "__init__")])


def imports(source: str, module: str = "", is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything imported anywhere: in functions and for type checking too."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*stem, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORT_BY_STRING:
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def unit(name: str) -> str:
    """The entry of LAYERS that a dotted name belongs to; `rlstruct` itself for the names it re-exports."""
    head = ".".join(name.split(".")[:2])
    return head if head in LAYERS else name.split(".")[0]


def layer_complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that do not go strictly downward."""
    own = unit(module)
    if own == "rlstruct":
        if module != "rlstruct":
            return [f"{module} has no layer: add it to the design and to LAYERS"]
        own_layer: float = 2.5  # the page that re-exports layers 0 to 2
    else:
        own_layer = LAYERS[own]
    complaints = []
    for line, name in imports(source, module, is_package):
        other = unit(name)
        if other in NOT_IMPORTED_BY_THE_LIBRARY:
            complaints.append(f"{line}: {own} imports {name}: no module imports {other}")
            continue
        if not other.startswith("rlstruct") or other == own or (own, other) in SAME_LAYER:
            continue
        other_layer = LAYERS.get(other, 2.5)
        taken_away = own_layer == 5 and other_layer == 4 and other not in ALGORITHMS_MAY_IMPORT_OF_LAYER_4
        if other_layer >= own_layer or taken_away:
            complaints.append(f"{line}: {own} (layer {own_layer:g}) imports {name} (layer {other_layer:g})")
    return complaints


def folder_import_complaints(source: str) -> list[str]:
    """Imports of `agents`, `batchers` or `algos` as top-level names: each makes a second copy of every class."""
    folders = set(FOLDERS) - {"rlstruct"}
    return [
        f"{line}: import {name} makes a second copy of its classes: import rlstruct.{name}"
        for line, name in imports(source, module="some.module")
        if name.split(".")[0] in folders
    ]


def _torch_names(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    """Names bound to the torch module, and names bound to its functions."""
    modules, functions = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "torch"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch" and not node.level:
            functions |= {alias.asname or alias.name: alias.name for alias in node.names}
    return modules, functions


def factory_complaints(source: str) -> list[str]:
    """Tensor factories without `device=`: they put tensors on the CPU whatever the caller works on."""
    tree = ast.parse(source)
    modules, functions = _torch_names(tree)
    complaints = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ""
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in modules:
            name = node.func.attr
        elif isinstance(node.func, ast.Name):
            name = functions.get(node.func.id, "")
        # A bare ** may hold the device, and out= decides it.
        says_where = any(keyword.arg in {"device", "out", None} for keyword in node.keywords)
        if name in FACTORIES and not says_where:
            complaints.append(f"{node.lineno}: torch.{name}(...) without device=")
        if name in TYPED_CONSTRUCTORS:
            complaints.append(f"{node.lineno}: torch.{name}(...) takes no device: use a factory with device=")
    return complaints


def sync_complaints(source: str) -> list[str]:
    """Named host syncs without `# sync: <why, how often>` on their line."""
    lines = source.splitlines()
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SYNCS):
            continue
        line = node.func.end_lineno or node.lineno
        if not lines[line - 1].partition("# sync:")[2].strip():
            complaints.append(f"{line}: .{node.func.attr}() without '# sync: <why, how often>' on its line")
    return complaints


def unexplained_complaints(source: str) -> list[str]:
    """Errors of Python's own classes where `rlstruct.errors` has one that names its page of the documentation."""
    ours = {base.__name__: kind.__name__ for kind in Explained.__subclasses__()[::-1] for base in kind.__bases__}
    return [
        f"{node.lineno}: {node.func.id} names no page: take {ours[node.func.id]}, or another one of rlstruct.errors"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours
    ]


def private_complaints(source: str) -> list[str]:
    """Private names of torch: they belong into `rlstruct.engine.torch_private`, which knows what happens without them.

    torch documents the ``_foreach`` functions, and ``torch.utils._pytree`` as the place where a class is registered.
    """
    complaints = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if node.attr in PRIVATE_ATTRIBUTES:
                complaints.append(
                    f"{node.lineno}: .{node.attr} is a private name of torch: use rlstruct.engine.torch_private"
                )
                continue
            dotted = ast.unparse(node)
            names = [dotted] if dotted.replace(".", "").isidentifier() else []
        for name in names:
            first, *parts = name.split(".")
            if first == "torch" and any(
                part.startswith("_") and not part.startswith(("__", "_foreach", "_pytree")) for part in parts
            ):
                complaints.append(f"{node.lineno}: {name} is private to torch: use rlstruct.engine.torch_private")
    return complaints


def _of_others(dotted: str) -> bool:
    return any(dotted == name or dotted.startswith(f"{name}.") for name in OTHERS)


def names_of_classes(source: str) -> set[str]:
    """Private names that the classes of a module define: methods, fields, and what is assigned to self or cls."""
    names = set()
    for cls in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if PRIVATE.fullmatch(name)}


def known_private_complaints(source: str, own: set[str]) -> list[str]:
    """Private names of the library that a test knows: attributes, imports, and names in strings.

    A test class may use private names of test classes on ``self`` and ``cls``.

    Args:
        source: a module of the tests.
        own: private names that classes of the tests define, see `names_of_classes`.
    """
    complaints = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            allowed = node.attr in OF_THE_STANDARD_LIBRARY or (owner in ("self", "cls") and node.attr in own)
            names = [f"{owner}.{node.attr}"] if PRIVATE.fullmatch(node.attr) and not allowed else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in BY_STRING:
            strings = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            of = "" if isinstance(node.args[0], ast.Constant) else f"{ast.unparse(node.args[0])}."
            names = [of + text for text in strings if text.replace(".", "_").isidentifier()]
        elif isinstance(node, ast.Subscript):
            owner, key = ast.unparse(node.value), ast.unparse(node.slice).strip("'")
            names = [f"{owner}.{key}"] if owner.startswith("vars(") or owner.endswith(".__dict__") else []
        complaints += [
            f"{node.lineno}: {name} is private: test what a user can see"
            for name in names
            if any(PRIVATE.fullmatch(part) for part in name.split(".")) and not _of_others(name)
        ]
    return complaints
