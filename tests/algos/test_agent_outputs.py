"""Outputs of agents that an algorithm cannot learn from are refused in the first evaluation, before any update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fake_envs import CountingEnv
from torch import Tensor, nn

from rlstruct import DictTensor, RL_Agent_CheckDevice
from rlstruct.agents.model_agent import ModelAgent
from rlstruct.algos import (
    A2CConfig,
    Algorithm,
    DQNConfig,
    PPOConfig,
    PQNConfig,
    ReinforceConfig,
    a2c,
    dqn,
    ppo,
    pqn,
    reinforce,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import TrainingDiverged
from rlstruct.functional import categorical, random
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import frame_of

Outputs = dict[str, Any]


class Net(nn.Module):
    """Two linear layers on the frame [B, 3] of a `CountingEnv`."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(3, 2), nn.Linear(3, 1)


class Mine(ModelAgent[Net]):
    """Returns right outputs for every algorithm with discrete actions, changed by a function."""

    def __init__(self, *arguments: Any, change: Callable[[Outputs], object], **words: Any) -> None:
        super().__init__(*arguments, **words)
        self.change = change

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        frame = frame_of(observation).float()
        logits, value = self.model.policy(frame), self.model.value(frame).squeeze(-1)
        action = random.randint(observation["rng"], 2) if "rng" in observation else logits.argmax(-1)
        outputs = {"action": action, "action_logits": logits, "action_values": logits, "value": value}
        outputs["log_probability"] = categorical.log_probability(logits, action)
        self.change(outputs)
        return DictTensor(outputs), state


class Watched(RL_Agent_CheckDevice):
    """The same agent, watched: messages still name the agent itself."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(Mine(*arguments, **words), words["device"])


def train(
    algorithm: Algorithm[Any], config: type[Any], change: Callable[[Outputs], object], create: Any = Mine, **words: Any
) -> Any:
    sizes = {"n_env_steps": 96, "n_timesteps": 8, "n_envs": 4, "n_processes": 0, "compile_agent": False}
    evaluation = {"evaluation_processes": 0, "evaluation_episodes": 2, "compile_update": False, "graph": False}
    if config is DQNConfig:
        words["learning_starts"] = 0
    settings = config(**{**sizes, **evaluation, **words})
    create_env = partial(CountingEnv, auto_reset=not algorithm.learner.whole_episodes)
    return algorithm(settings, Net, partial(create, change=change), create_env)


def lacks(*names: str) -> Callable[[Outputs], object]:
    return lambda outputs: [outputs.pop(name) for name in names]


def sets(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Outputs], object]:
    return lambda outputs: outputs.update({name: function(outputs[name])})


def column(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(-1)


ACTOR_CRITIC = [(reinforce.train, ReinforceConfig), (a2c.train, A2CConfig), (ppo.train, PPOConfig)]
VALUES = [(dqn.train, DQNConfig), (pqn.train, PQNConfig)]
NUMBER = r"\[B\], one number per environment\. "
CHOICES = r"\[B, A\], one number per action"
WRONG = {
    "a column of values": (
        ACTOR_CRITIC, sets("value", column), rf"'value' is \[B, 1\], expected {NUMBER}Remove the last axis: squeeze",
    ),
    "two values": (
        ACTOR_CRITIC, sets("value", lambda v: column(v).repeat(1, 2)), rf"is \[B, 2\], expected {NUMBER}Return one val",
    ),
    "whole values": (ACTOR_CRITIC, sets("value", Tensor.long), r"'value' is torch.int64, expected floats: \[B\], one"),
    "a log-probability per entry": (
        [(ppo.train, PPOConfig)],
        sets("log_probability", lambda p: column(p).repeat(1, 3)),
        rf"'log_probability' is \[B, 3\], expected {NUMBER}Sum over an action's entries: sum\(-1\)",
    ),
    "no value": (
        ACTOR_CRITIC, lacks("value"), r"returned \['action', 'action_logits', .*\], expected 'value' \[B\] as well",
    ),
    "logits alone": (ACTOR_CRITIC, lacks("value", "log_probability"), r"\['action', 'action_logits', .*ted 'value'"),
    "no policy": (
        ACTOR_CRITIC,
        lacks("action_logits"),
        r"expected 'action_logits' \[B, A\], or 'action_mean' \[B, D\] and 'action_log_std' \[B, D\] as well",
    ),
    "the logit of the action": (
        ACTOR_CRITIC, sets("action_logits", lambda x: x.amax(-1)), rf"is \[B\], expected {CHOICES}.*logits of all act",
    ),
    "the value of the best action": (
        VALUES, sets("action_values", lambda x: x.amax(-1)), rf"'action_values' is \[B\], expected {CHOICES}\. Return",
    ),
    "no values of actions": (VALUES, lacks("action_values"), r"expected 'action_values' \[B, A\] as well, from which"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("create", [Mine, Watched])
def test_wrong_outputs_are_refused_by_name_and_shape(name: str, create: type[Any]) -> None:
    algorithms, change, message = WRONG[name]
    for algorithm, config in algorithms:
        with pytest.raises((KeyError, ValueError, TypeError), match=rf"Mine\.__call__: .*{message}"):
            train(algorithm, config, change, create)


def test_the_first_batch_of_a_loop_of_ones_own_is_checked() -> None:
    create = partial(Mine, change=sets("value", column))
    learner = a2c.train.learner.create(Net(), create, A2CConfig())
    steps = collected(create(learner.model))
    with pytest.raises(ValueError, match=r"Mine.__call__: 'value' is \[B, 1\], expected \[B\]"):
        learner.update(steps, 0.0)


def collected(agent: Any) -> Any:
    with RL_Batcher(
        n_timesteps=4,
        create_agent=lambda: agent,
        agent_args={},
        create_env=CountingEnv,
        env_args={"n_envs": 2, "auto_reset": True},
        n_processes=0,
        seeds=[0],
        device="cpu",
    ) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


def test_vtrace_needs_the_log_probability() -> None:
    with pytest.raises(KeyError, match=r"expected 'log_probability' \[B\] as well"):
        train(a2c.train, A2CConfig, lacks("log_probability"), vtrace=True)


def test_an_agent_may_return_an_output_only_where_the_loss_needs_it() -> None:
    def value_with_gradients_only(outputs: Outputs) -> None:
        if not outputs["value"].requires_grad:
            outputs.pop("value")

    with pytest.raises(KeyError, match="expected 'value'"):  # A2C bootstraps from values without gradients
        train(a2c.train, A2CConfig, value_with_gradients_only)
    assert train(reinforce.train, ReinforceConfig, value_with_gradients_only, bootstrap=False).env_steps > 0


def test_outputs_that_an_algorithm_does_not_read_may_have_any_shape() -> None:
    assert train(dqn.train, DQNConfig, sets("value", column)).losses["loss"]
    assert train(reinforce.train, ReinforceConfig, sets("log_probability", column)).losses["loss"]


def test_a_learner_that_replaces_terms_declares_what_it_reads_or_is_left_alone() -> None:
    class Renamed(reinforce.ReinforceLearner):
        def terms(self, minibatch: Any) -> dict[str, Tensor]:
            return {"loss": replay_agent(self.agent, minibatch)["my_logits"].square().mean()}

    class Declared(Renamed):
        outputs = (("my_logits", "value"),)

    def rename(outputs: Outputs) -> None:
        outputs["my_logits"] = outputs.pop("action_logits")
        outputs.pop("value")

    assert train(Algorithm(Renamed, "about"), ReinforceConfig, rename).env_steps > 0
    with pytest.raises(KeyError, match=r"expected 'value' \[B\] as well"):
        train(Algorithm(Declared, "about"), ReinforceConfig, rename)


def test_log_probabilities_of_other_actions_warn_in_the_first_update() -> None:
    with pytest.warns(UserWarning, match=r"PPO: before the first .* differs from 1 by up to 1\.\d*e\+08, .*Mine ret"):
        train(ppo.train, PPOConfig, sets("log_probability", lambda p: p - 18.5))
    with pytest.warns(UserWarning, match=r"by up to inf, .*Mine ret"), pytest.raises(TrainingDiverged):
        train(ppo.train, PPOConfig, sets("log_probability", lambda p: p - 100.0))
