"""A policy that its checkpoint would not reproduce exactly is loaded only with the training's own functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from trainings import DQN, TASKS, Task

import rlstruct
from rlstruct import DictTensor
from rlstruct import agents as bundled
from rlstruct.algos.training.shipped_callbacks import BestCheckpoint
from rlstruct.cli.commands.export import run as export_run
from rlstruct.cli.messages import UserError
from rlstruct.cli.stored_run import load_trained
from rlstruct.policies.comparison import differences
from rlstruct.policies.loading import describe_network, description, missing_factories


def network(change: Callable[[Any], object]) -> nn.Module:
    """Return a network that a program changes after it was made."""
    model = bundled.Normalised(bundled.ActorCritic(4, 2, hidden=(8,)), (4,))
    change(model)
    return model


def replace_activation(model: Any) -> None:
    model.model.actor.layers[1] = nn.ReLU()


def add_hook(model: Any) -> None:
    model.model.register_forward_hook(negative_logits)


def negative_logits(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return -outputs[0], outputs[1]


def change_attribute(model: Any) -> None:
    model.clip = 0.1


def replace_forward(model: Any) -> None:
    model.model.forward = partial(forward_with_a_square, model.model)


def forward_with_a_square(model: Any, frame: Tensor) -> tuple[Tensor, Tensor]:
    features = frame.square()
    return model.policy(model.actor(features)), model.critic(features).squeeze(-1)


class Scaled(nn.Module):
    """A network around another one, whose weights have the same names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, frame: Tensor) -> Any:
        return self.model(10 * frame)

    def state_dict(self, *others: Any, **named: Any) -> Any:
        return self.model.state_dict(*others, **named)

    def load_state_dict(self, *others: Any, **named: Any) -> Any:
        return self.model.load_state_dict(*others, **named)


def scaled_agent(model: nn.Module, *, copy_model: bool = True, **settings: Any) -> bundled.ActorCriticAgent:
    return bundled.ActorCriticAgent(Scaled(model), copy_model=copy_model, **settings)


def second_action(model: nn.Module, **settings: Any) -> bundled.ActorCriticAgent:
    agent = bundled.ActorCriticAgent(model, **settings)
    agent.favourite = 1
    return agent


def plain() -> nn.Module:
    return bundled.ActorCritic(4, 2, hidden=(8,))


def weight_normalised() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))


def spectrally_normalised() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))


PARTS = {
    "activation": (
        Task(partial(network, replace_activation), bundled.ActorCriticAgent),
        r"layers\.1 is ReLU, and Tanh",
    ),
    "hook": (Task(partial(network, add_hook), bundled.ActorCriticAgent), r"model\._forward_hooks\.\d+ was added"),
    "attribute": (Task(partial(network, change_attribute), bundled.ActorCriticAgent), r"clip is 0\.1, and 10\.0 after"),
    "forward": (Task(partial(network, replace_forward), bundled.ActorCriticAgent), r"model\.forward was added"),
    "wrapper": (Task(plain, scaled_agent), r"agent is .*ActorCriticAgent, .* model is Scaled, and ActorCritic after"),
    "agent": (
        Task(plain, second_action),
        r"the agent is .*ActorCriticAgent, which was changed .*: favourite was added",
    ),
    "weight norm": (Task(weight_normalised, bundled.QAgent, **DQN), r"network is .*ParametrizedLinear"),
    "spectral norm": (Task(spectrally_normalised, bundled.QAgent, **DQN), r"network is .*ParametrizedLinear"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_changed_policy_needs_the_functions_of_its_training(name: str, tmp_path: Path) -> None:
    task, why = PARTS[name]
    with pytest.warns(UserWarning, match=why) as caught:
        run = task.train(tmp_path, callbacks=[BestCheckpoint()])
    assert len(caught) == 1
    assert "--factory MODULE:CREATE_ENV MODULE:CREATE_MODEL MODULE:CREATE_AGENT" in str(caught[0].message)
    for file in (run, run / "best.pt"):
        with pytest.raises(ValueError, match=rf"{why}.*Pass create_(model|agent)="):
            rlstruct.load(file)
    with pytest.raises(
        UserError, match=rf"{why}.* --factory MODULE:CREATE_ENV MODULE:CREATE_MODEL MODULE:CREATE_AGENT"
    ):
        export_run([str(run)])
    with pytest.raises(UserError, match=rf"{why}.* --factory MODULE:CREATE_ENV"):
        load_trained(run, auto_reset=False, factories=["trainings:CART_POLE"])
    policy = rlstruct.load(run, create_model=task.create_model, create_agent=task.create_agent)
    agent = task.create_agent(policy.model, stochastic=False)
    frames = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    expected, _ = agent(DictTensor(), DictTensor({"frame": frames}), DictTensor())
    assert torch.equal(policy.act(frames, stochastic=False), expected["action"])


def test_a_run_of_the_command_line_with_a_patched_class_is_not_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlstruct.cli.commands.train import run as train_run

    monkeypatch.setattr(bundled.ActorCritic, "forward", forward_with_a_square)
    words = (
        f"ppo --env CartPole-v1 --preset none --runs {tmp_path} --name x --n-processes 0 --n-env-steps 64 --n-envs 2"
    )
    small = "--n-timesteps 8 --n-minibatches 2 --evaluation-episodes 2 --evaluation-processes 0 --loggers"
    with pytest.warns(UserWarning, match=r"a class whose method ActorCritic\.forward was replaced"):
        train_run([*words.split(), *small.split(), "--no-progress"])
    (run,) = tmp_path.iterdir()
    with pytest.raises(UserError, match=r"ActorCritic\.forward was replaced.* --factory MODULE:CREATE_ENV"):
        load_trained(run, auto_reset=False)


def test_bundled_policies_are_described_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TASKS["stacks"].train(tmp_path)
    network = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
    before = torch.get_rng_state()
    described = description(bundled.QAgent, network, None, None, {}, stochastic=False, agent_info={})
    assert missing_factories(described) == {}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training for part in network.modules())


def test_values_that_are_no_weights_are_compared() -> None:
    network = bundled.SoftActorCritic(3, [-1.0], [1.0], hidden=(8,))
    network.scale += 1.0
    with pytest.raises(TypeError, match=r"SoftActorCritic, .*: scale is \[1\] torch.float32"):
        describe_network(network)
    nan = nn.Linear(2, 2)
    nn.init.constant_(nan.weight, torch.nan)
    describe_network(nan)  # a training may diverge
    assert list(differences(-0.0, 0.0)) == []
    assert list(differences({"a": [1, float("nan")]}, {"a": (1, float("nan"))})) == []
    assert list(differences({"a": 1}, {"a": 1, "b": 2})) == ["b was added after it was made"]


def test_weights_of_another_dtype_are_not_rounded(tmp_path: Path) -> None:
    task = TASKS["actor-critic"]
    double = replace(task, create_model=lambda: task.create_model().double())
    with pytest.warns(UserWarning, match=r"actor.*torch\.float64, and .*torch\.float32 after it was rebuilt"):
        run = double.train(tmp_path)
    with pytest.raises(ValueError, match=r"is torch\.float32, expected torch\.float64"):
        rlstruct.load(run, create_model=task.create_model)
    assert rlstruct.load(run, create_model=double.create_model).act(np.zeros(4, np.float32)) in (0, 1)


def test_an_attribute_that_changes_in_the_middle_is_noticed(tmp_path: Path) -> None:
    class Narrow(BestCheckpoint):
        def on_update(self, context: Any) -> None:
            context.learner.model.clip = 1.0

    with pytest.warns(UserWarning, match=r"clip is 1\.0, and 10\.0 after"):
        run = TASKS["normalised"].train(tmp_path, callbacks=[Narrow()])
    with pytest.raises(ValueError, match=r"clip is 1\.0"):
        rlstruct.load(run)
