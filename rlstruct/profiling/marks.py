"""Operations of programs that do not mark them in code: presets for known libraries, and comments in a script.

A preset names functions of a library; each is an operation from the moment its module has been imported. A comment
``# operation: inference`` names the statements after it, up to the next such comment or the end of their block; without
a name it only ends the operation before it. CleanRL's scripts have comments that serve the same purpose.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import io
import re
import sys
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from rlstruct.profiling.operations import operation

Preset = Mapping[str, Sequence[str]]
"""Functions by operation, each as ``module:Class.method`` or ``module:function``."""

_BUFFERS = "stable_baselines3.common.buffers"
PRESETS: Mapping[str, Preset] = {
    "torch": {
        "backward": ("torch._tensor:Tensor.backward",),
        "optimiser": ("torch.optim.adam:Adam.step", "torch.optim.sgd:SGD.step", "torch.optim.rmsprop:RMSprop.step"),
    },
    "gymnasium": {
        "simulator": (
            "gymnasium.wrappers.common:OrderEnforcing.step", "gymnasium.wrappers.common:OrderEnforcing.reset",
        ),
        "environment": (
            "gymnasium.vector.sync_vector_env:SyncVectorEnv.step",
            "gymnasium.vector.async_vector_env:AsyncVectorEnv.step",
        ),
        "wait": ("gymnasium.vector.async_vector_env:AsyncVectorEnv.step_wait",),
    },
    "stable-baselines3": {
        "environment": ("stable_baselines3.common.vec_env.base_vec_env:VecEnv.step",),
        "wait": ("stable_baselines3.common.vec_env.subproc_vec_env:SubprocVecEnv.step_wait",),
        "agent": (
            "stable_baselines3.common.policies:ActorCriticPolicy.forward",
            "stable_baselines3.common.off_policy_algorithm:OffPolicyAlgorithm._sample_action",
        ),
        "assembly": (f"{_BUFFERS}:RolloutBuffer.add", f"{_BUFFERS}:RolloutBuffer.compute_returns_and_advantage"),
        "replay buffer": (f"{_BUFFERS}:ReplayBuffer.add", f"{_BUFFERS}:ReplayBuffer.sample"),
        "loss": tuple(f"stable_baselines3.{name.lower()}.{name.lower()}:{name}.train"
                      for name in ("A2C", "DQN", "PPO", "SAC", "TD3")),
        "evaluation": ("stable_baselines3.common.evaluation:evaluate_policy",),
    },
    "sbx-rl": {
        "agent": ("sbx.ppo.policies:PPOPolicy.predict_all", "sbx.ppo.policies:PPOPolicy.reset_noise"),
        "loss": tuple(f"sbx.{name.lower()}.{name.lower()}:{name}.train"
                      for name in ("CrossQ", "DQN", "PPO", "SAC", "TD3", "TQC")),
    },
    "torchrl": {
        "environment": ("torchrl.envs.common:EnvBase.step", "torchrl.envs.common:EnvBase.step_and_maybe_reset"),
        "agent": ("tensordict.nn.probabilistic:ProbabilisticTensorDictSequential.forward",),
        "loss": (
            "torchrl.objectives.common:LossModule.__call__", "torchrl.objectives.value.advantages:GAE.forward",
            "torchrl.objectives.utils:TargetNetUpdater.step",
        ),
        "replay buffer": tuple(f"torchrl.data.replay_buffers.replay_buffers:ReplayBuffer.{name}"
                               for name in ("extend", "sample")),
    },
}  # fmt: skip
"""Presets by distribution."""

_OPERATION = r"(?i:operation)\s*[:=](.*)"
_COMMENTS = {
    _OPERATION: r"\1",
    "ALGO LOGIC: (put )?action logic": "agent",
    "TRY NOT TO MODIFY: execute the game": "environment",
    "TRY NOT TO MODIFY: save data to rep": "replay buffer",
    "ALGO LOGIC: training|bootstrap value if not done|Optimizing the ": "loss",
    "TRY NOT TO MODIFY": "",  # ends the operation before it
}  # the first that matches counts
_BETWEEN = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class Marks(MetaPathFinder):
    """Import hook that marks the functions of presets.

    Args:
        presets: by distribution, whose version is part of warnings.
    """

    def __init__(self, presets: Mapping[str, Preset]) -> None:
        self._wanted: dict[str, list[tuple[str, str, str]]] = {}  # distribution, operation and function, by module
        for library, preset in presets.items():
            for name, targets in preset.items():
                for target in targets:
                    module, _, function = target.partition(":")
                    self._wanted.setdefault(module, []).append((library, name, function))

    def install(self) -> None:
        """Mark functions of all modules that are imported, at once or later."""
        sys.meta_path.insert(0, self)
        for name in self._wanted.keys() & sys.modules.keys():
            self._mark(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find, which marks the module's functions after its execution."""
        if fullname not in self._wanted:
            return None
        others = (other.find_spec(fullname, path, target) for other in sys.meta_path if other is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_mark(module: ModuleType) -> None:
                execute(module)
                self._mark(module)

            spec.loader.exec_module = execute_and_mark  # type: ignore[method-assign]
        return spec

    def warn_of_absent_modules(self) -> None:
        """Warn of modules that the installed version of an imported package does not have."""
        for module, targets in self._wanted.items():
            if module.rpartition(".")[0] in sys.modules and importlib.util.find_spec(module) is None:
                for library, name, function in targets:
                    _warn(library, module, function, name)

    def _mark(self, module: ModuleType) -> None:
        for library, name, function in self._wanted[module.__name__]:
            *owners, last = function.split(".")
            try:
                owner: Any = functools.reduce(getattr, owners, module)
                found = inspect.getattr_static(owner, last)
            except AttributeError:
                _warn(library, module.__name__, function, name)
            else:
                setattr(owner, last, operation(name)(found))


def _warn(library: str, module: str, function: str, name: str) -> None:
    version = importlib.metadata.version(library)
    warnings.warn(
        f"rlstruct profile: {library} {version} has no {module}:{function}, which the profile would show as {name!r}: "
        f"its time counts for the operation around it. Mark it with a comment in your script, '# operation: {name}'.",
        stacklevel=2,
    )


def compile_marked(path: str) -> CodeType:
    """Compile a script, in which comments name the operations of the statements after them.

    The code needs a global name ``__operation__``, which is `rlstruct.profiling.operation`.

    Raises:
        OSError: the script cannot be read.
        SyntaxError: the script is no valid Python.
    """
    with tokenize.open(path) as file:
        source = file.read()
    tree = ast.parse(source, path)
    statements = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.stmt)), key=lambda node: (node.lineno, node.col_offset)
    )
    lines = [statement.lineno for statement in statements]
    names: dict[ast.AST, str] = {}
    waiting: tuple[tokenize.TokenInfo, str] | None = None  # the last such comment and its name, until a word follows
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (name := _name_in(token.string)) is not None:
            waiting = token, name
        elif waiting is not None and token.type not in _BETWEEN:
            (comment, name), waiting = waiting, None
            following = bisect_right(lines, token.start[0] - 1)  # a decorator comes before its function
            if following < len(lines) and token.start[1] == statements[following].col_offset == comment.start[1]:
                names[statements[following]] = name
            elif _matches(_OPERATION, comment.string):
                warnings.warn(
                    f"rlstruct profile: {path}, line {comment.start[0]}: the comment {comment.string!r} is ignored, "
                    "because no statement follows that begins in its column. Put it on a separate line, directly "
                    "before the first statement of the operation, and indent it like this statement.",
                    stacklevel=2,
                )
    for node in ast.walk(tree):
        for field, block in ast.iter_fields(node):
            if isinstance(block, list) and not names.keys().isdisjoint(block):
                setattr(node, field, _grouped(block, names, path))
    return compile(tree, path, "exec", dont_inherit=True)


def _name_in(comment: str) -> str | None:
    """Return the operation that a comment begins, "" if it only ends one, None for any other comment."""
    for pattern, name in _COMMENTS.items():
        if found := _matches(pattern, comment):
            return found.expand(name).strip()
    return None


def _matches(pattern: str, comment: str) -> re.Match[str] | None:
    return re.match(rf"#+\s*(?:{pattern})", comment)


def _suspends(node: ast.AST) -> bool:
    """Return True if a statement may suspend the function that it belongs to: by yield, await, async for or with."""
    if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)):
        return True
    nested = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef))
    return not nested and (getattr(node, "is_async", 0) == 1 or any(map(_suspends, ast.iter_child_nodes(node))))


def _stays_first(node: ast.stmt) -> bool:
    """Return True for a docstring and ``from __future__``, which Python only accepts before other statements."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _grouped(block: Sequence[ast.stmt], names: Mapping[ast.AST, str], path: str) -> list[ast.stmt]:
    """Put each named statement of a block, and those after it, into ``with __operation__(name)``.

    Warn of a group that may be suspended, and leave it alone, because other operations begin and end meanwhile.
    """
    runs: list[tuple[str, list[ast.stmt]]] = [("", [])]
    for statement in block:
        if statement in names:
            runs.append((names[statement], []))
        runs[-1][1].append(statement)
    grouped: list[ast.stmt] = []
    for name, body in runs:
        while body and _stays_first(body[0]):
            grouped.append(body.pop(0))
        if name and body and not any(map(_suspends, body)):
            call = ast.Call(ast.Name("__operation__", ast.Load()), [ast.Constant(name)], [])
            entered = ast.With([ast.withitem(call)], [])
            for node in ast.walk(entered):
                ast.copy_location(node, body[0])
            entered.body = body
            grouped.append(entered)
            continue
        if name and body:
            warnings.warn(
                f"rlstruct profile: {path}, line {body[0].lineno}: the comment that begins the operation {name!r} is "
                "ignored, because the statements after it contain yield or await. Name the statements between those.",
                stacklevel=3,
            )
        grouped += body
    return grouped
