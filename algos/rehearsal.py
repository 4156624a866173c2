"""Single iterations of a training, to time them: a batch and what is learnt from it, nothing else."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rlstruct.algos.config import TrainingConfig
from rlstruct.algos.evaluation import Evaluation
from rlstruct.algos.learner import CreateAgent, GradientLearner
from rlstruct.algos.placement import CreateEnv, create_batchers, create_network
from rlstruct.algos.training import TrainingLoop

_FEW_STEPS = 8


class _Nobody:
    """Evaluates nothing; see `Evaluates`."""

    busy = False

    def start(self, weights: Mapping[str, Tensor], *, env_steps: int, policy_version: int) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Have no result."""

    def wait(self) -> Evaluation:
        """There is nothing to wait for."""
        raise RuntimeError("rehearsal: nothing is evaluated, so that there is no result to wait for.")

    def state_dict(self) -> dict[str, Any]:
        """Remember nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember nothing."""


@contextlib.contextmanager
def rehearsal(
    kind: type[GradientLearner],
    config: TrainingConfig,
    create_model: Callable[[], nn.Module],
    create_agent: CreateAgent,
    create_env: CreateEnv,
) -> Iterator[Callable[[], None]]:
    """Prepare a training in this process; arguments are those of `run_training`.

    Args:
        kind: learner of the algorithm.
        config: its settings; it collects in this process, whatever they say, without compiled code.
        create_model: makes the network.
        create_agent: makes the agents.
        create_env: makes the environments.

    Yields:
        What does one iteration. Where learning starts late, the steps before have been taken.
    """
    plain: dict[str, Any] = {
        "compile_agent": False,
        "compile_update": False,
        "evaluation_processes": 0,
        "sharing": "none",
    }
    if kind.whole_episodes:  # their lengths differ, and an iteration should be as much work every time
        plain["n_timesteps"] = min(config.n_timesteps, _FEW_STEPS)
    config = replace(config, **plain, n_env_steps=10**9, n_processes=0, evaluation_interval=10**9)
    model = create_network(create_model, config.seed).to(config.learner_device)
    learner = kind.create(model, create_agent, config)
    collecting, _ = create_batchers(config, create_agent, create_env, {}, model, 0)
    with collecting() as batcher:
        loop = TrainingLoop(config, learner, batcher, _Nobody(), None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the few steps of an episode are not its end is said once
            loop.iterate()
        while loop.env_steps < getattr(config, "learning_starts", 0):
            loop.iterate()
        yield loop.iterate
