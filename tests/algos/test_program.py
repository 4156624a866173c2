"""Updates eagerly, compiled, and as one captured graph: the same weights; and who may not be captured."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches_in_place import check_batches_read_in_place
from picture_env import SIDES, PictureEnv
from replaying_learners import REPLAYING, batches_for, check_captured_gradient_steps, replaying
from resume_tasks import create_network, create_sim
from torch import Tensor, nn

from rlstruct import Trajectories, agents
from rlstruct.agents import ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos import GradientLearner, a2c, dqn, ppo, pqn, replay_buffer
from rlstruct.batchers import RL_Batcher
from rlstruct.engine import graph as graph_module
from rlstruct.engine.compiled import Compiled
from rlstruct.engine.executors import EXECUTORS
from rlstruct.engine.purity import PurityError
from rlstruct.profiling import operation, profile
from rlstruct.profiling.events import load_recordings
from rlstruct.profiling.overlap import lookup

SIM, SHAPE = "sim:0", (4, *SIDES)
SMALL: dict[str, Any] = {"n_timesteps": 6, "n_envs": 4, "n_env_steps": 1000}
PPO = ppo.PPOConfig(**SMALL, n_epochs=2, n_minibatches=2)
PQN = pqn.PQNConfig(**SMALL, n_epochs=2, n_minibatches=2)
A2C = a2c.A2CConfig(**SMALL, n_updates=2, n_minibatches=2, vtrace=True, max_gradient_norm=None)
Kind = tuple[type[GradientLearner], Any, Callable[[], nn.Module], Any]
KINDS: dict[str, Kind] = {
    "ppo": (ppo.PPOLearner, PPO, create_network, ActorCriticAgent),
    "ppo, uneven minibatches": (
        ppo.PPOLearner,
        dataclasses.replace(PPO, n_minibatches=5, value_clip=None, max_gradient_norm=None),
        create_network,
        ActorCriticAgent,
    ),
    "ppo, recurrent": (
        ppo.PPOLearner, PPO, lambda: agents.RecurrentActorCritic(4, 2, n_hidden=8), agents.RecurrentAgent
    ),
    "ppo, normalised": (
        ppo.PPOLearner, PPO, lambda: agents.Normalised(create_network(), (4,), discount=0.99), ActorCriticAgent
    ),
    "ppo, stacking": (
        ppo.PPOLearner, PPO, partial(agents.ConvolutionalActorCritic, SHAPE, 2, n_features=4, layers=((3, 3, 1),)),
        partial(agents.StackingAgent.create, create_agent=ActorCriticAgent, shape=SHAPE),
    ),
    "ppo, stacking, recurrent": (
        ppo.PPOLearner, PPO,
        lambda: agents.RecurrentActorCritic(
            agents.ConvolutionalTrunk(SHAPE, n_features=4, layers=((3, 3, 1),)), 2, n_hidden=8
        ),
        partial(agents.StackingAgent.create, create_agent=agents.RecurrentAgent, shape=SHAPE),
    ),
    "pqn": (
        pqn.PQNLearner, PQN, partial(agents.QNetwork, 4, 2, hidden=(8,), layer_norm=True), agents.QAgent
    ),
    "pqn, recurrent": (
        pqn.PQNLearner, PQN, partial(agents.RecurrentQNetwork, 4, 2, n_hidden=8, layer_norm=True),
        agents.RecurrentQAgent,
    ),
    "a2c": (a2c.A2CLearner, A2C, create_network, ActorCriticAgent),
}  # fmt: skip


def create_learner(kind: str, device: str = "cpu", **changes: Any) -> GradientLearner:
    learner, config, create_model, create_agent = KINDS[kind]
    torch.manual_seed(3)
    model = create_model().to(device)
    return learner.create(model, create_agent, dataclasses.replace(config, learner_device=device, **changes))


def collect(kind: str, n_batches: int) -> list[Trajectories]:
    """Batches of an agent with first weights, so that ratios differ from 1 later on."""
    _, _, create_model, create_agent = KINDS[kind]
    torch.manual_seed(3)
    args = {"model": create_model()}
    create_env = partial(PictureEnv, auto_reset=True) if "stacking" in kind else create_sim
    with RL_Batcher(6, create_agent, create_env, agent_args=args, env_args={"n_envs": 4}, seed=1) as batcher:
        batcher.reset()
        batches = []
        for _ in range(n_batches):
            batcher.execute()
            batches.append(batcher.get()[0])
    return batches


def learn(learner: GradientLearner, batches: list[Trajectories], first: int = 0) -> list[dict[str, Tensor]]:
    return [learner.update(batch, (first + i) / 10) for i, batch in enumerate(batches)]


def weights(learner: GradientLearner) -> dict[str, Tensor]:
    return {name: weight.to("cpu") for name, weight in learner.model.state_dict().items()}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are captured on the simulated accelerator."""
    found: list[Any] = []
    sim_device = importlib.import_module("rlstruct.testing.sim_device")  # older torch has no such device
    capture = sim_device.capture
    monkeypatch.setattr(sim_device, "capture", lambda work: found.append(capture(work)) or found[-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_update_is_the_update_bit_by_bit(kind: str, captured: list[Any]) -> None:
    batches = collect(kind, 4)
    plain, graph = create_learner(kind, SIM, graph=False), create_learner(kind, SIM)
    expected = learn(plain, batches)
    assert not captured
    found = learn(graph, batches)
    assert len(captured) == 1
    for one, other in zip(expected, found, strict=True):
        assert {name: term.item() for name, term in one.items()} == {name: term.item() for name, term in other.items()}
    assert len({terms["loss"].item() for terms in found}) == 4
    assert graph.policy_version == plain.policy_version
    before = weights(create_learner(kind))
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(graph)[name]), name
        assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize("kind", REPLAYING)
def test_a_captured_gradient_step_is_the_step_bit_by_bit(kind: str, captured: list[Any]) -> None:
    check_captured_gradient_steps(kind, SIM)
    assert len(captured) == 1


@pytest.mark.parametrize("kind", REPLAYING)
def test_a_captured_gradient_step_samples_and_does_what_follows(
    kind: str, captured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = replaying(kind, SIM, True)
    calls = [record_calls(monkeypatch, learner.buffer, "sample")]
    calls += [record_calls(monkeypatch, average, "update") for average, *_ in learner.slow_copies()]
    batches = batches_for(kind, 4)
    learn(learner, batches[:1])
    first = [len(one) for one in calls]
    learn(learner, batches[1:], first=1)
    assert len(captured) == 1
    assert [len(one) for one in calls] == first  # no Python runs in later steps


def record_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    calls, method = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: calls.append(None) or method(*args))
    return calls


@pytest.mark.parametrize("kind", ["dqn, double, prioritised", "sac"])
def test_a_captured_gradient_step_reads_a_loaded_buffer(kind: str, captured: list[Any]) -> None:
    batches = batches_for(kind, 5)
    other = replaying(kind, SIM, False)
    learn(other, batches[3:4])
    learners = [replaying(kind, SIM, graph) for graph in (False, True)]
    for learner in learners:
        learn(learner, batches[:3])
        learner.buffer.load_state_dict(copy.deepcopy(other.buffer.state_dict()))
        learn(learner, batches[4:], first=3)
    plain, graph = map(weights, learners)
    assert len(captured) == 1
    for name, weight in plain.items():
        assert torch.equal(weight, graph[name]), name


def test_code_of_a_user_between_gradient_steps_is_not_captured(captured: list[Any]) -> None:
    class Delayed(dqn.DQNLearner):
        def after_step(self, minibatch: Any, terms: dict[str, Tensor]) -> dict[str, Tensor]:
            return super().after_step(minibatch, terms) if self.policy_version % 2 else terms

    batches = batches_for("dqn", 4)
    settings = dataclasses.replace(replaying("dqn", SIM, True).config, target_update_interval=1)
    learners = []
    for graph in (False, True):
        torch.manual_seed(3)
        config = dataclasses.replace(settings, graph=graph)
        learners.append(Delayed.create(QNetwork(4, 2, hidden=(8,)).to(SIM), QAgent, config))
        learn(learners[-1], batches)
    assert len(captured) == 1
    for name, weight in weights(learners[0]).items():
        assert torch.equal(weight, weights(learners[1])[name]), name


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_a_closed_learner_keeps_nothing_that_was_captured(kind: str, captured: list[Any]) -> None:
    learner = create_learner(kind, SIM) if kind == "ppo" else replaying(kind, SIM, True)
    learn(learner, collect("ppo", 2), 1)
    left = weakref.ref(captured.pop())
    assert left() is not None
    gc.disable()
    try:
        learner.close()
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_captured_outlives_a_training(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sim_device = importlib.import_module("rlstruct.testing.sim_device")
    left, capture, learn_one = [], sim_device.capture, ppo.PPOLearner.update

    def remember(work: Callable[[], None]) -> Callable[[], None]:
        replay = capture(work)
        left.append(weakref.ref(replay))
        return replay

    def update(self: ppo.PPOLearner, *given: Any) -> dict[str, Tensor]:
        if fails and self.policy_version == 12:
            raise OSError("the last update")
        return learn_one(self, *given)

    monkeypatch.setattr(sim_device, "capture", remember)
    monkeypatch.setattr(ppo.PPOLearner, "update", update)
    settings = {"evaluation_processes": 0, "evaluation_timesteps": 5, "evaluation_episodes": 1, "n_processes": 0}
    config = dataclasses.replace(PPO, n_env_steps=96, learner_device=SIM, **settings)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OSError, match="the last update") if fails else contextlib.nullcontext() as caught:
            ppo.train(config, create_network, ActorCriticAgent, create_sim)
        assert len(left) == 1
        assert left[0]() is None, caught
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["ppo", "a2c", "ppo, recurrent", "ppo, normalised", "a2c, overlap", "a2c, window"])
@pytest.mark.slow
def test_a_captured_update_reads_a_captured_batch_in_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"a2c, overlap": {"overlap": True}, "a2c, window": {"window": 3}}.get(kind, {})
    learner, config, create_model, create_agent = KINDS["a2c" if changes else kind]
    config = dataclasses.replace(config, **changes)
    train = partial((ppo if learner is ppo.PPOLearner else a2c).train, create_agent=create_agent)
    check_batches_read_in_place(partial(train, create_model=create_model), config, SIM, monkeypatch)


def test_a_captured_update_never_writes_to_memory_that_it_reads_in_place() -> None:
    batches = [batch.to(SIM) for batch in collect("ppo", 4)]
    plain, graph = create_learner("ppo", SIM, graph=False), create_learner("ppo", SIM)
    before = batches[1].clone()
    sim_device = importlib.import_module("rlstruct.testing.sim_device")
    collecting = graph_module.Graph(lambda: [*batches[1].steps.values()], sim_device.capture)
    collecting()  # so its replays write this batch
    order = [batches[0], batches[1], batches[2], batches[3], batches[1]]
    expected, found = learn(plain, order), learn(graph, order)
    for one, other in zip(expected, found, strict=True):
        assert {name: term.item() for name, term in one.items()} == {name: term.item() for name, term in other.items()}
    for key, value in batches[1].steps.items():
        assert torch.equal(value, before.steps[key]), key


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_profile_says_what_compiled_and_captured_updates_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Interpreted(Compiled):  # stands in for code of TorchInductor, which takes a minute to make
        def __init__(self, fn: Any, **settings: Any) -> None:
            super().__init__(fn, **settings)
            self.fn = fn

        def prepare(self, *args: Any) -> None:
            """Compile nothing."""

        def __call__(self, *args: Any) -> Any:
            with torch.profiler.record_function("compiled code"):
                return self.fn(*args)

    monkeypatch.setitem(EXECUTORS, "compiled", lambda device: Interpreted)
    batches = collect("ppo", 3)
    compiled, graph = create_learner("ppo", compile_update=True), create_learner("ppo", SIM)
    learn(compiled, batches[:1])  # compiles
    learn(graph, batches[:1])  # warms up
    with profile(tmp_path, window=60):
        learn(compiled, batches[1:])
        with operation("on an accelerator"):
            learn(graph, batches[1:2])  # captures
            learn(graph, batches[2:])
    (found,) = load_recordings(tmp_path)
    at = [found.host.starts[i] for i, name in enumerate(found.host.names) if name == "compiled code"]
    around = [found.paths[i] for i in lookup(found.innermost, np.asarray(at))]
    assert {"/".join(path) for path in around} == {"gradient step"}  # what it fuses, and nothing of no name
    captured = ("on an accelerator", "graph")
    assert sum(found.paths[i] == captured for i in found.spans.key) == 2
    assert (*captured, "optimiser") in found.paths  # where it is captured


@pytest.mark.exhaustive  # a minute for a C++ compiler
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_update_is_the_update_to_rounding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = collect(kind, 3)
    plain, compiled = create_learner(kind), create_learner(kind, compile_update=True)
    losses = []
    monkeypatch.setattr(compiled, "terms", lambda batch: losses.append(1) or type(compiled).terms(compiled, batch))
    expected, found = learn(plain, batches), learn(compiled, batches)
    sizes = 2 if "uneven" in kind else 1
    assert len(losses) == 2 * sizes  # eagerly and traced, once for each size of a minibatch; then no Python runs
    for one, other in zip(expected, found, strict=True):
        close(one, other)
    close(weights(plain), weights(compiled))


def of_dqn(create_model: Callable[[], nn.Module], **changes: Any) -> dqn.DQNLearner:
    torch.manual_seed(3)
    settings = {**SMALL, "learning_starts": 0, "n_updates": 4, "batch_size": 8, "replay_capacity": 100, **changes}
    return dqn.DQNLearner.create(create_model(), QAgent, dqn.DQNConfig(**settings))


@pytest.mark.slow  # a C++ compiler
@pytest.mark.parametrize("most_bytes", [1 << 26, 1 << 10])  # all samples of an update together, or each alone
def test_the_compiled_steps_of_dqn_in_one_call_are_those_one_by_one(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_buffer, "MOST_BYTES", most_bytes)
    batches = collect("ppo", 3)
    create_model = partial(agents.Normalised, QNetwork(4, 2, hidden=(8,)), (4,), discount=0.99)
    changes: dict[str, Any] = {"compile_update": True, "target_update_interval": 3, "target_update_rate": 0.5}
    at_once, one_by_one = (of_dqn(lambda: copy.deepcopy(create_model()), **changes) for _ in range(2))
    seen: list[int] = []

    def after_step(minibatch: Any, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(one_by_one.policy_version)
        return dqn.DQNLearner.after_step(one_by_one, minibatch, terms)

    monkeypatch.setattr(one_by_one, "after_step", after_step)  # a user's own, which must see every step
    calls = record_calls(monkeypatch, Compiled, "times")
    expected = learn(one_by_one, batches)
    assert not calls
    assert seen == [*range(1, 13)]
    found = learn(at_once, batches)
    assert len(calls) == (3 if most_bytes == 1 << 26 else 11)  # the very first step is compared with its eager self
    assert at_once.policy_version == 12
    for one, other in zip(expected, found, strict=True):
        close(one, other)
    for network in ("model", "online_model", "target_model"):
        close(*({k: v for k, v in getattr(one, network).state_dict().items()} for one in (one_by_one, at_once)))
    first, other = (next(iter(one.parameters())) for one in (at_once.model, at_once.target_model))
    assert not torch.equal(first, other)


@pytest.mark.slow  # a C++ compiler
@pytest.mark.parametrize("changes", [{"prioritised": True}, {"prepare_sample": True}])
def test_priorities_and_samples_of_a_user_see_each_compiled_step(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = changes.pop("prepare_sample", False)
    learner = of_dqn(partial(QNetwork, 4, 2, hidden=(8,)), compile_update=True, **changes)
    if own:
        prepare = learner.prepare_sample
        monkeypatch.setattr(learner, "prepare_sample", lambda batch: prepare(batch))
    calls = record_calls(monkeypatch, Compiled, "times")
    learn(learner, collect("ppo", 2))
    assert learner.policy_version == 8
    assert not calls


@pytest.mark.slow  # a C++ compiler
@pytest.mark.parametrize("kind", ["ppo", "pqn"])
def test_the_compiled_steps_of_an_epoch_in_one_call_are_those_one_by_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = collect(kind, 3)
    at_once, one_by_one = (create_learner(kind, compile_update=True) for _ in range(2))
    seen: list[int] = []

    def after_step(minibatch: Trajectories, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(one_by_one.policy_version)
        return terms

    monkeypatch.setattr(one_by_one, "after_step", after_step)  # a user's own, which must see every step
    calls = record_calls(monkeypatch, Compiled, "times")
    expected = learn(one_by_one, batches)
    assert not calls
    assert seen == [*range(1, one_by_one.policy_version + 1)]
    found = learn(at_once, batches)
    assert len(calls) == at_once.config.n_epochs * len(batches)
    assert at_once.policy_version == one_by_one.policy_version
    for one, other in zip(expected, found, strict=True):
        close(one, other)
    close(weights(one_by_one), weights(at_once))


@pytest.mark.parametrize(  # a C++ compiler
    "kind",
    [pytest.param("sac", marks=pytest.mark.exhaustive), pytest.param("sac, distributional", marks=pytest.mark.slow)],
)
@pytest.mark.timeout(600)
def test_a_compiled_gradient_step_of_sac_is_the_step_to_rounding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = (replaying(kind, "cpu", False, compile_update=compiled) for compiled in (False, True))
    losses = []
    monkeypatch.setattr(compiled, "terms", lambda batch: losses.append(1) or type(compiled).terms(compiled, batch))
    for batch in batches_for("sac", 3):
        close(*(learner.update(batch, 0.5) for learner in (plain, compiled)))
    close(*map(weights, (plain, compiled)))
    assert len(losses) == 2  # eagerly and traced; then no Python runs


@pytest.mark.slow  # a C++ compiler
def test_compiled_values_of_actions_are_those_to_rounding() -> None:
    config = dqn.DQNConfig(**SMALL, learning_starts=0, n_updates=3, batch_size=8, replay_capacity=100)
    learners = []
    for compiled in (False, True):
        torch.manual_seed(3)
        changed = dataclasses.replace(config, compile_update=compiled)
        learners.append(dqn.DQNLearner.create(agents.QNetwork(4, 2, hidden=(8,)), agents.QAgent, changed))
    for batch in collect("ppo", 3):
        close(*(learner.update(batch, 0.5) for learner in learners))
    close(*map(weights, learners))


@pytest.mark.slow  # a C++ compiler
def test_an_optimiser_of_a_user_takes_its_own_steps_with_compiled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = create_learner("a2c"), create_learner("a2c", compile_update=True)
    for learner in (plain, compiled):
        learner.optimizer = torch.optim.RMSprop(learner.model.parameters(), lr=0.01)
    losses: list[int] = []
    monkeypatch.setattr(compiled, "terms", lambda batch: losses.append(1) or type(compiled).terms(compiled, batch))
    batches = collect("a2c", 3)
    for one, other in zip(learn(plain, batches), learn(compiled, batches), strict=True):
        close(one, other)
    close(weights(plain), weights(compiled))
    assert len(losses) == 2  # eagerly and traced; then no Python runs
    states = compiled.optimizer.state_dict()["state"]
    assert {int(state["step"]) for state in states.values()} == {compiled.policy_version}


class Impure(ActorCriticAgent):
    pure = False


def test_an_agent_that_promises_nothing_learns_as_it_is(caplog: pytest.LogCaptureFixture, captured: list[Any]) -> None:
    with caplog.at_level(logging.INFO, "rlstruct.algos.learner"):
        learner = ppo.PPOLearner.create(create_network().to(SIM), Impure, dataclasses.replace(PPO, learner_device=SIM))
    assert "updates on sim:0 could run faster, but the agent does not: set `pure = True`" in caplog.text
    learn(learner, collect("ppo", 3))
    assert not captured


class Reading(ActorCriticAgent):
    """Breaks its promise in replays: the host reads a number."""

    pure = True

    def __call__(self, *given: Any) -> Any:
        action, state = super().__call__(*given)
        if action["value"].requires_grad and action["value"].sum().item() > 1e9:
            raise RuntimeError("unlikely")
        return action, state


@pytest.mark.parametrize(
    ("kind", "device", "changes", "said"),
    [
        ("ppo", SIM, {}, "an update cannot be captured as one graph and runs eagerly"),
        ("a2c", "cpu", {"compile_update": True}, "an update cannot be compiled and runs eagerly"),
    ],
)
def test_what_cannot_be_frozen_warns_once_and_learns_the_same(
    kind: str, device: str, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = collect("ppo", 4)
    expected = create_learner(kind)
    learn(expected, batches)
    monkeypatch.setitem(KINDS, kind, (*KINDS[kind][:3], Reading))
    learner = create_learner(kind, device, **changes)
    with pytest.warns(UserWarning, match=said) as seen:
        learn(learner, batches)
    assert len(seen) == 1
    assert learner.policy_version == expected.policy_version == 16
    close(weights(learner), weights(expected))


class Counting(a2c.A2CLearner):
    """Its loss depends on how often it was computed."""

    calls = 0

    def terms(self, batch: Trajectories) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": self.model(batch.steps["observation/frame"][:, 0])[1].square().mean() * self.calls}


@pytest.mark.slow
def test_code_that_gives_something_else_is_an_error() -> None:
    learner = Counting.create(create_network(), ActorCriticAgent, a2c.A2CConfig(**SMALL, compile_update=True))
    with pytest.raises(PurityError, match="'loss' differs in 1 of 1 rows when compiled"):
        learn(learner, collect("ppo", 1))


def other_optimizer(learner: GradientLearner) -> None:
    learner.optimizer = torch.optim.Adam(learner.model.parameters(), lr=0.5, capturable=True)


def other_setting_of_the_optimizer(learner: GradientLearner) -> None:
    learner.optimizer.param_groups[0]["betas"] = (0.5, 0.6)


def other_config(learner: GradientLearner) -> None:
    learner.config = dataclasses.replace(learner.config, value_coefficient=3.0)  # type: ignore[call-arg]


class Doubting(ActorCriticAgent):
    """Believes half of the values."""

    pure = True

    def __call__(self, *given: Any) -> Any:
        action, state = super().__call__(*given)
        action.set("value", action["value"] / 2)
        return action, state


def other_agent(learner: GradientLearner) -> None:
    learner.agent = Doubting(learner.model, device=learner.device, copy_model=False)


def other_activation(learner: GradientLearner) -> None:
    network: Any = learner.model
    hidden = next(part for part in network.modules() if isinstance(part, nn.Sequential))
    hidden[1] = nn.Sigmoid()


def hook(learner: GradientLearner) -> None:
    next(learner.model.children()).register_forward_hook(lambda module, args, result: 2 * result)


def number_of_the_agent(learner: GradientLearner) -> None:
    learner.agent.doubt = 0.25  # type: ignore[attr-defined]


class Hesitating(ActorCriticAgent):
    """Believes a share of the values."""

    pure, doubt = True, 1.0

    def __call__(self, *given: Any) -> Any:
        action, state = super().__call__(*given)
        action.set("value", action["value"] * self.doubt)
        return action, state


REPLACED = [other_optimizer, other_config, hook]
MORE_REPLACED = [other_setting_of_the_optimizer, other_agent, other_activation, number_of_the_agent]


@pytest.mark.parametrize("replace", [*REPLACED, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_REPLACED)])
def test_what_a_user_replaces_after_a_capture_is_seen(
    replace: Callable[[GradientLearner], None], captured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "a2c", (*KINDS["a2c"][:3], Hesitating))
    batches = collect("ppo", 6)
    unchanged, plain, graph = create_learner("a2c", SIM, graph=False), *both("a2c")
    for learner in (unchanged, plain, graph):
        learn(learner, batches[:3])
        if learner is not unchanged:
            replace(learner)
        learn(learner, batches[3:], first=3)
    assert len(captured) == 2
    different = False
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(graph)[name]), name
        different |= not torch.equal(weight, weights(unchanged)[name])
    assert different


def both(kind: str) -> list[GradientLearner]:
    """Two equal learners on the simulated accelerator: without and with a graph."""
    return [create_learner(kind, SIM, graph=False), create_learner(kind, SIM)]


def test_an_optimiser_that_is_set_later_keeps_its_rate(captured: list[Any]) -> None:
    batches = collect("a2c", 5)
    for learner, warns in zip(both("a2c"), (contextlib.nullcontext(), pytest.warns(match="captured")), strict=True):
        learn(learner, batches[:3])
        before = {name: weight.clone() for name, weight in weights(learner).items()}
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.0)  # type: ignore[assignment]
        with warns:  # this optimiser counts on the host
            learn(learner, batches[3:], first=3)
        for name, weight in weights(learner).items():
            assert torch.equal(weight, before[name]), name


@pytest.mark.slow
def test_compiled_updates_see_a_network_that_was_changed() -> None:
    batches = collect("ppo", 3)
    plain, compiled = create_learner("a2c"), create_learner("a2c", compile_update=True)
    for learner in (plain, compiled):
        learn(learner, batches[:2])
        other_activation(learner)
        learn(learner, batches[2:], first=2)
    close(weights(plain), weights(compiled))


def test_weights_that_others_take_the_place_of_are_seen(captured: list[Any]) -> None:
    batches = collect("ppo", 6)
    plain, graph = create_learner("ppo", SIM, graph=False), create_learner("ppo", SIM)
    for learner in (plain, graph):
        learn(learner, batches[:3])
        saved = copy.deepcopy(learner.state_dict())
        learn(learner, batches[3:4], first=3)
        learner.load_state_dict(saved)  # the optimiser gets new memory
        learn(learner, batches[3:5], first=3)
        for weight in learner.model.parameters():
            weight.data = weight.data.clone()  # the graph still writes to the old memory
        learn(learner, batches[5:], first=5)
        learn(learner, batches[4:5], first=6)
    assert len(captured) == 3
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(graph)[name]), name
