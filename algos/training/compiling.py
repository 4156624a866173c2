"""Decisions of a training whose settings leave it open ("auto") what is compiled: whatever pays by their numbers.

No clock decides, because compiled code rounds differently: equal settings give equal results on every machine that has
a compiler. A checkpoint holds the decisions, and a resumed training keeps them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from rlstruct.algos.training.config import AnyConfig, TrainingConfig
from rlstruct.device import resolve_device
from rlstruct.engine.compiled import why_no_compiler
from rlstruct.engine.executors import why_not_compiled
from rlstruct.rl_agent import RL_Agent, replays_sequences

_logger = logging.getLogger(__name__)

SECONDS: Final = {"compile_agent": 17.0, "compile_update": 25.0, "compile_simulator": 15.0}
"""Seconds of one core that each takes to compile in a new process, with an empty cache. The first one takes 12 of them:
these import TorchInductor and compile its headers. Measured for networks of two layers, see docs/fast_paths.md."""
SAVED: Final = {"compile_agent": 200e-6, "compile_update": 1.4e-3, "compile_simulator": 250e-6}
"""Seconds that compiled code saves in each call of the agent, gradient step and step of a simulator of `rlstruct.sims`:
mostly calls of operations, so the number depends little on the sizes of batch and network."""
SECONDS_PER_STEP: Final = 1.8
SAVED_PER_STEP: Final = 150e-6
"""The same for each time step in the update of an agent that is replayed step by step: all its steps are compiled."""
MOST_ROWS: Final = 256
"""With more environments than these, the agent's arithmetic takes most of a step. With 1,024, compiled code takes 0.76
to 1.11 of the time, depending on the network, and with 4,096 1.09."""


def with_decisions(
    config: AnyConfig, stored: Mapping[str, Any], create_agent: Callable[[], RL_Agent], *, fixed_shapes: bool
) -> AnyConfig:
    """Replace "auto" in the settings by True or False, and log the decision in one line.

    Args:
        config: the settings of the whole training.
        stored: the settings in a checkpoint, whose decisions hold; empty in a new training.
        create_agent: creates the learner's agent. Without its promise to be pure, neither it nor an update is compiled.
        fixed_shapes: all batches have the same shape, so that an update can be compiled.
    """
    if config.compile_update is True and fixed_shapes:
        _log_long_compilation(config, create_agent())
    undecided = [name for name in SECONDS if getattr(config, name) == "auto"]
    chosen = {name: stored[name] for name in undecided if stored.get(name, "auto") != "auto"}
    new = [name for name in undecided if name not in chosen]
    saved, costs = seconds_saved(config), dict(SECONDS)
    pays = [n for n in new if saved[n] > costs[n] and (fixed_shapes or n != "compile_update")]
    why_not = why_no_compiler() if pays else ""
    if not why_not and any(name != "compile_simulator" for name in pays):
        agent = create_agent()
        if why_not_compiled(agent, torch.device("cpu")):
            pays = [name for name in pays if name == "compile_simulator"]
        elif "compile_update" in pays and _replayed_by_steps(agent):
            costs["compile_update"] += config.n_timesteps * SECONDS_PER_STEP
            saved["compile_update"] *= 1 + config.n_timesteps * SAVED_PER_STEP / SAVED["compile_update"]
    if pays:
        only = {"compile_simulator": ", if the environment is a TensorEnv"}
        words = ", ".join(
            f"{name} (saves about {saved[name]:.0f} s, costs {costs[name]:.0f}{only.get(name, '')})" for name in pays
        )
        turned_on, not_on = f"turns on {words}. Pass False to leave one off.", f"would turn on {words}, but {why_not}."
        _logger.info("run_training %s", not_on if why_not else turned_on)
    decisions: dict[str, Any] = {**chosen, **{name: name in pays and not why_not for name in new}}
    return replace(config, **decisions)


def _log_long_compilation(config: TrainingConfig, agent: RL_Agent) -> None:
    """Tell what takes minutes before the first update ends."""
    if _replayed_by_steps(agent) and not (why_not_compiled(agent, torch.device("cpu")) or why_no_compiler()):
        seconds = SECONDS["compile_update"] + config.n_timesteps * SECONDS_PER_STEP
        _logger.info(
            "run_training compiles every one of %d time steps of an update, which takes about %.0f s: %s is replayed "
            "step by step. Implement its replay_sequence, or set compile_update=False.",
            config.n_timesteps, seconds, type(agent).__name__,
        )  # fmt: skip


def _replayed_by_steps(agent: RL_Agent) -> bool:
    return type(agent).initial_state is not RL_Agent.initial_state and not replays_sequences(agent)


def seconds_saved(config: AnyConfig) -> dict[str, float]:
    """Predict how many seconds of a core each kind of compiled code saves in a whole training.

    Worker processes compile nothing, each would for itself. On CUDA, graphs save the same calls.
    """
    n_calls = config.n_env_steps / (config.n_envs * max(1, config.n_processes))
    collects_here = config.n_processes == 0 and resolve_device(config.batcher_device).type == "cpu"
    learns_here = config.n_learners == 1 and resolve_device(config.learner_device).type == "cpu"
    times = {
        "compile_agent": n_calls * (collects_here and config.n_envs <= MOST_ROWS),
        "compile_update": n_calls / config.n_timesteps * config.gradient_steps_per_batch() * learns_here,
        "compile_simulator": n_calls * collects_here,
    }
    return {name: n * SAVED[name] for name, n in times.items()}
