"""Algorithm: the type of every ``train``, with the facts that the command line needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

from torch import nn

from rlstruct.algos.learner import CreateAgent, GradientLearner
from rlstruct.algos.training.build import CreateEnv, check_create_env
from rlstruct.algos.training.callbacks import Callback
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.algos.training.evaluation import Evaluates, TrainingResult
from rlstruct.algos.training.loop import CreateModel, run_training
from rlstruct.algos.training.run_folder import RunFolder

Config = TypeVar("Config", bound=TrainingConfig)
Arrange = Callable[
    [Config, CreateAgent, CreateEnv], tuple[Config, CreateAgent, Callable[[nn.Module], Evaluates] | None]
]
"""Called with the settings and the factories of agents and environments. Returns settings, a factory of agents, and a
factory of evaluators (None lets the agent play episodes); see `run_training`."""


@dataclass(frozen=True, eq=False)
class Algorithm(Generic[Config]):
    """An algorithm, called to train. `rlstruct.algos.ALGORITHMS` gives it a name on the command line.

    Attributes:
        learner: class of the learner; its ``settings`` is the class of the configuration.
        about: one line of ``rlstruct train --help``.
        agents: kind of bundled agent for the command line: "policy", such as `rlstruct.agents.ActorCriticAgent`;
            "values", such as `rlstruct.agents.QAgent`; "online values", the same with layer normalisation; "soft",
            `rlstruct.agents.SquashedGaussianAgent`; or "search", `rlstruct.search.SearchAgent`.
        arrange: adjusts settings and factories before a training, see `Arrange`; None leaves them unchanged.
    """

    learner: type[GradientLearner]
    about: str
    agents: Literal["policy", "values", "online values", "soft", "search"] = "policy"
    arrange: Arrange[Config] | None = None

    def __post_init__(self) -> None:
        """Give this algorithm its own docstring, which help() shows instead of that of the class."""
        signature = inspect.signature(type(self).__call__)
        _, *plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        call = f"train{signature.replace(parameters=plain, return_annotation=signature.empty)}"
        about = f"{self.about}. Settings: {self.learner.settings.__name__}"
        text = f"{call}\n\n{about}.\n\n{inspect.getdoc(type(self).__call__)}"
        object.__setattr__(self, "__doc__", text)  # the dataclass is frozen

    def __call__(
        self,
        config: Config,
        create_model: CreateModel,
        create_agent: CreateAgent,
        create_env: CreateEnv,
        *,
        env_args: Mapping[str, object] | None = None,
        run: RunFolder | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainingResult:
        """Train a network.

        `run_training` says more about the arguments, and what it raises.

        Args:
            config: all settings.
            create_model: returns the network, on the CPU.
            create_agent: returns an agent around a network, called as ``create_agent(model, device=…, stochastic=…,
                copy_model=…)``, such as a class of `rlstruct.agents`.
            create_env: returns the environments, called as ``create_env(n_envs=…, seed=…, **env_args)``.
            env_args: further arguments of ``create_env``.
            run: folder of the results; None logs nothing.
            callbacks: called at the start and the end, after each update and after each evaluation.

        Returns:
            The trained network and its history.
        """
        create_evaluator, settings = None, config
        if self.arrange is not None:
            check_create_env(create_env, env_args or {})
            config, create_agent, create_evaluator = self.arrange(
                config, create_agent, partial(create_env, **(env_args or {}))
            )
        return run_training(
            self.learner,
            config,
            create_model,
            create_agent,
            create_env,
            env_args=env_args,
            run=run,
            settings=settings,
            create_evaluator=create_evaluator,
            callbacks=callbacks,
        )
