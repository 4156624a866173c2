"""Old import paths and names, which work for one release with a DeprecationWarning: the one table of them.

Importing rlstruct puts `OldModules` on ``sys.meta_path``, where ``import rlstruct.sims.atari.env`` finds the module
that stands at ``rlstruct.atari.env`` today. A module with old names has the line
``__getattr__ = renamed.attributes(__name__)``, a class the decorator `members`, a function `parameters`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

SINCE = "0.4"

MODULES = {
    "rlstruct.algos.alphazero": "rlstruct.search.alphazero",
    "rlstruct.algos.build": "rlstruct.algos.training.build",
    "rlstruct.algos.config": "rlstruct.algos.training.config",
    "rlstruct.algos.evaluation": "rlstruct.algos.training.evaluation",
    "rlstruct.algos.callbacks": "rlstruct.algos.training.callbacks",
    "rlstruct.algos.shipped_callbacks": "rlstruct.algos.training.shipped_callbacks",
    "rlstruct.algos.history": "rlstruct.algos.training.history",
    "rlstruct.algos.checkpoint": "rlstruct.algos.training.checkpoint",
    "rlstruct.algos.run_folder": "rlstruct.algos.training.run_folder",
    "rlstruct.algos.loggers": "rlstruct.algos.training.loggers",
    "rlstruct.algos.learning_curve": "rlstruct.algos.training.learning_curve",
    "rlstruct.algos.presets": "rlstruct.algos.training.presets",
    "rlstruct.algos.launch": "rlstruct.algos.distributed.launch",
    "rlstruct.algos.process_group": "rlstruct.algos.distributed.process_group",
    "rlstruct.algos.peers": "rlstruct.algos.distributed.peers",
    "rlstruct.algos.gpu_all_reduce": "rlstruct.algos.distributed.gpu_all_reduce",
    "rlstruct.cli.train": "rlstruct.cli.commands.train",
    "rlstruct.cli.evaluate": "rlstruct.cli.commands.evaluate",
    "rlstruct.cli.export": "rlstruct.cli.commands.export",
    "rlstruct.cli.plot": "rlstruct.cli.commands.plot",
    "rlstruct.cli.play": "rlstruct.cli.commands.play",
    "rlstruct.cli.tune": "rlstruct.cli.commands.tune",
    "rlstruct.cli.profile": "rlstruct.cli.commands.profile",
    "rlstruct.cli.explain": "rlstruct.cli.commands.explain",
    "rlstruct.cli.envs": "rlstruct.cli.commands.envs",
    "rlstruct.cli.devices": "rlstruct.cli.commands.devices",
    "rlstruct.cli.environments": "rlstruct.cli.tasks",
    "rlstruct.functional.learners": "rlstruct.functional.all_reduce",
    "rlstruct.algos.follower": "rlstruct.algos.replay_learner",
    "rlstruct.algos.gpu_sums": "rlstruct.algos.distributed.gpu_all_reduce",
    "rlstruct.algos.others": "rlstruct.algos.distributed.peers",
    "rlstruct.algos.result": "rlstruct.algos.training.evaluation",
    "rlstruct.algos.prioritised": "rlstruct.algos.prioritised_replay",
    "rlstruct.batchers.checks": "rlstruct.batchers.validation",
    "rlstruct.batchers.recipe": "rlstruct.batchers.collector_factory",
    "rlstruct.batchers.slab": "rlstruct.batchers.rollout_buffer",
    "rlstruct.batchers.workers.channel": "rlstruct.batchers.workers.transport",
    "rlstruct.sims.registry": "rlstruct.sims",
    "rlstruct.core.named": "rlstruct.core.named_tensors",
    "rlstruct.in_place": "rlstruct.vec_env",
    "rlstruct.profiling.prices": "rlstruct.profiling.overhead",
    "rlstruct.profiling.sentence": "rlstruct.profiling.summary",
    "rlstruct.cli.presets": "rlstruct.cli.initial_settings",
    "rlstruct.cli.complaint": "rlstruct.cli.messages",
    "rlstruct.cli.record": "rlstruct.cli.stored_run",
    "rlstruct.sharing.keeper": "rlstruct.sharing.supervisor",
    "rlstruct.sims.atari.judge": "rlstruct.atari.scoring",
    "rlstruct.sims.atari.objects": "rlstruct.atari.tia_objects",
    "rlstruct.sims.atari.opening": "rlstruct.atari.ale_game",
    "rlstruct.sims.atari.quick": "rlstruct.atari.picture",
    "rlstruct.algos.arena": "rlstruct.search.arena",
    "rlstruct.batchers.tuning": "rlstruct.sharing.tuning",
    "rlstruct.sims.atari": "rlstruct.atari",
}
"""Modules and packages with everything in them, old path to new path."""

NAMES = {
    "rlstruct": {"Stepped": "rlstruct:StepResult"},
    "rlstruct.algos": {
        "AlphaZeroConfig": "rlstruct.search.alphazero:AlphaZeroConfig",
        "alphazero": "rlstruct.search.alphazero",
        "Follower": "rlstruct.algos:PolyakAverage",
        "judge_actions": "rlstruct.algos:evaluate_actions",
    },
    "rlstruct.algos.a2c": {"Learner": "rlstruct.algos.a2c:A2CLearner"},
    "rlstruct.algos.dqn": {"Learner": "rlstruct.algos.dqn:DQNLearner"},
    "rlstruct.algos.ppo": {"Learner": "rlstruct.algos.ppo:PPOLearner"},
    "rlstruct.algos.reinforce": {"Learner": "rlstruct.algos.reinforce:ReinforceLearner"},
    "rlstruct.algos.learner": {
        "judge_actions": "rlstruct.algos.learner:evaluate_actions",
        "replay_with_next_values": "rlstruct.algos.bootstrapping:replay_with_next_values",
    },
    "rlstruct.algos.replay_buffer": {"least_capacity": "rlstruct.algos.replay_buffer:min_capacity"},
    "rlstruct.algos.replay_learner": {"Follower": "rlstruct.algos.replay_learner:PolyakAverage"},
    "rlstruct.algos.distributed.process_group": {"learners": "rlstruct.algos.distributed.process_group:learner_group"},
    "rlstruct.algos.training": {
        "CreateModel": "rlstruct.algos.training.loop:CreateModel",
        "Fetched": "rlstruct.algos.training.loop:Fetched",
        "TrainingLoop": "rlstruct.algos.training.loop:TrainingLoop",
        "run_training": "rlstruct.algos:run_training",
    },
    "rlstruct.algos.training.build": {"PlacedEnv": "rlstruct.algos.training.build:DeviceEnvFactory"},
    "rlstruct.batchers.arguments": {
        "named": "rlstruct.batchers.arguments:as_arguments",
        "refuse_call": "rlstruct.batchers.arguments:check_call_order",
        "whole": "rlstruct.batchers.arguments:as_integer",
    },
    "rlstruct.cli.agents": {"named": "rlstruct.cli.agents:display_name"},
    "rlstruct.device": {"free_memory": "rlstruct.search.tree_search:free_memory"},
    "rlstruct.batchers": {
        "Tuning": "rlstruct.sharing:Tuning",
        "tune": "rlstruct.sharing:tune",
    },
    "rlstruct.core": {"Specs": "rlstruct.core:Layout"},
    "rlstruct.core.layout": {"Specs": "rlstruct.core.layout:Layout"},
    "rlstruct.core.pytree": {"Structure": "rlstruct.core.pytree:TreeSpec"},
    "rlstruct.engine.executors": {"Answer": "rlstruct.engine.executors:AgentOutput"},
    "rlstruct.engine.purity": {
        "WeightsWatch": "rlstruct.engine.purity:WeightsMonitor",
        "why_unlike": "rlstruct.engine.purity:mismatch_reason",
    },
    "rlstruct.engine.torch_private": {"Watching": "rlstruct.engine.torch_private:OperatorObserver"},
    "rlstruct.policies.blueprint": {"describe_network": "rlstruct.policies.blueprint:describe"},
    "rlstruct.engine.graph": {"RecordingError": "rlstruct.engine.graph:CaptureError"},
    "rlstruct.search": {"Search": "rlstruct.search:TreeSearch"},
    "rlstruct.search.alphazero": {"Learner": "rlstruct.search.alphazero:AlphaZeroLearner"},
    "rlstruct.sharing": {"Placement": "rlstruct.sharing:GpuSharing"},
    "rlstruct.testing.sim_device": {"record": "rlstruct.testing.sim_device:capture"},
    "rlstruct.vec_env": {
        "Carrying": "rlstruct.vec_env:Capturable",
        "IdleWatch": "rlstruct.vec_env:IdleGuard",
        "Stepped": "rlstruct.vec_env:StepResult",
    },
}
"""Names of each module, old name to ``module:new name``, or to a module."""

MEMBERS = {
    "rlstruct.algos.distributed.launch.LearnerProcesses": {"refuse_dead": "raise_if_ended"},
    "rlstruct.algos.distributed.peers.Peers": {"refuse_lost": "raise_if_lost"},
    "rlstruct.algos.distributed.process_group.LearnerGroup": {
        "from_first": "broadcast",
        "refuse_lost": "raise_if_lost",
    },
    "rlstruct.algos.learner.GradientLearner": {"learners": "group"},
    "rlstruct.algos.replay_learner.PolyakAverage": {"follow": "update"},
    "rlstruct.batchers.reports.BatcherStats": {"hand_over": "assembly"},
    "rlstruct.batchers.reports.MemoryReport": {"slabs": "rollout_buffers"},
    "rlstruct.sims.tensor_env.TensorEnv": {"carry": "state_tensors", "set_carry": "set_state_tensors"},
    "rlstruct.testing.conformance.ConformanceError": {"mend": "fix"},
    "rlstruct.atari.env.Atari": {"from_beginnings": "from_start_states"},
    "rlstruct.search.tree.Tree": {"choose": "select_actions", "grow": "write_nodes"},
    "rlstruct.search.tree_search.TreeSearch": {"plant": "new_trees"},
    "rlstruct.vec_env.IdleGuard": {"look": "check"},
}
"""Attributes and methods of each class, old name to new name; the class has the decorator `members`."""

PARAMETERS = {
    "rlstruct.algos.training.config.load_config": {"kind": "cls"},
    "rlstruct.algos.training.loop.run_training": {"kind": "learner_class"},
}
"""Keyword arguments of each function, old name to new name; the function has the decorator `parameters`."""

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


def module_of(name: str) -> str | None:
    """Return the path at which a module stands today, or None if it has not moved.

    >>> module_of("rlstruct.sims.atari.env"), module_of("rlstruct.sims")
    ('rlstruct.atari.env', None)
    """
    head, tail = name, ""
    while head:
        if head in MODULES:
            return MODULES[head] + tail
        head, dot, last = head.rpartition(".")
        tail = f"{dot}{last}{tail}"
    return None


def attributes(place: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for the module ``place``, which finds its old names."""
    names = NAMES[place]

    def get(name: str) -> Any:  # noqa: ANN401 - any name of a module
        if name not in names:
            raise AttributeError(f"module {place!r} has no attribute {name!r}", name=name, obj=sys.modules[place])
        home, _, now = names[name].partition(":")
        _warn(f"{place}.{name}", names[name].replace(":", "."))
        module = importlib.import_module(home)
        return getattr(module, now) if now else module

    return get


def members(cls: C) -> C:
    """Give a class its old attributes and methods; a decorator."""
    for old, new in MEMBERS[f"{cls.__module__}.{cls.__qualname__}"].items():
        setattr(cls, old, property(partial(_member, cls.__name__, old, new)))
    return cls


def _member(cls: str, old: str, new: str, instance: object) -> Any:  # noqa: ANN401 - any attribute
    _warn(f"{cls}.{old}", f"{cls}.{new}")
    return getattr(instance, new)


def parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function take keyword arguments by their old names; a decorator."""
    names = PARAMETERS[f"{function.__module__}.{function.__qualname__}"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for old in names.keys() & kwargs.keys():
            _warn(f"{function.__name__}({old}=…)", f"{function.__name__}({names[old]}=…)")
            kwargs[names[old]] = kwargs.pop(old)
        return function(*args, **kwargs)

    return call


class OldModules:
    """Finder and loader of modules that have moved. An old path gives the very module of the new path, not a copy."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a specification for an old path, None for all others."""
        if not name.startswith("rlstruct.") or (now := module_of(name)) is None:
            return None
        _warn(name, now)
        return ModuleSpec(name, cls(), loader_state=now)  # type: ignore[arg-type]  # it has what a loader needs

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module from its new path."""
        made = importlib.import_module(spec.loader_state)
        spec.loader_state = made, made.__spec__
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own specification, which Python has replaced by that of the old path."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state[1]


def _warn(old: str, new: str) -> None:
    """Warn at the line that uses the old name, past the frames of the import system."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_globals.get("__name__") in (__name__, "rlstruct")
    ):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    where = frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__"))
    warnings.warn_explicit(f"{old} is {new} since version {SINCE}", DeprecationWarning, *where, registry)


sys.meta_path.insert(0, OldModules)  # before the usual finder, which would make a copy
