"""Every algorithm with learner, simulators and evaluation on one GPU: it learns what it learns on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from functools import partial
from typing import Any

import pytest
import resume_tasks
import torch
from batches_in_place import check_batches_read_in_place
from picture_env import SIDES, PictureEnv
from replaying_learners import REPLAYING, check_captured_gradient_steps
from resume_tasks import TASKS, create_network, train

from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalActorCritic,
    RecurrentActorCritic,
    RecurrentAgent,
    StackingAgent,
)
from rlstruct.algos import a2c, ppo
from rlstruct.batchers import RL_Batcher
from rlstruct.engine import graph as graph_module
from rlstruct.engine import mixed_precision
from rlstruct.sims import make
from rlstruct.testing import forbid_host_sync

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
ON_GPU = {"learner_device": DEVICE, "batcher_device": DEVICE, "evaluation_device": DEVICE}


def create_sim(n_envs: int, seed: int, device: str) -> Any:
    return make("CartPole-v1", n_envs, seed, device=device, time_limit=60)


def create_episodic_sim(n_envs: int, seed: int, device: str) -> Any:
    return make("CartPole-v1", n_envs, seed, device=device, auto_reset=False, time_limit=60)


def create_pendulum(n_envs: int, seed: int, device: str) -> Any:
    return make("Pendulum-v1", n_envs, seed, device=device, time_limit=60)


def create_breakout(n_envs: int, seed: int, device: str) -> Any:
    return make("Breakout-MinAtar", n_envs, seed, device=device, time_limit=60)


ON_DEVICE: dict[Any, Any] = {
    resume_tasks.create_sim: create_sim,
    resume_tasks.create_episodic_sim: create_episodic_sim,
    resume_tasks.create_pendulum: create_pendulum,
    resume_tasks.create_breakout: create_breakout,
}
ENVIRONMENTS: dict[str, Any] = {name: ON_DEVICE[create_env] for name, (*_, create_env) in TASKS.items()}
KEEP_STATES: dict[str, Any] = {
    "recurrent": (partial(RecurrentActorCritic, 4, 2, n_hidden=8), RecurrentAgent, create_sim),
    "stacking": (
        partial(ConvolutionalActorCritic, (4, *SIDES), 2, n_features=4, layers=((3, 3, 1),)),
        partial(StackingAgent.create, create_agent=ActorCriticAgent, shape=(4, *SIDES)),
        partial(PictureEnv, auto_reset=True),
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_algorithm_learns_there_as_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    capture_cuda = graph_module.capture_cuda
    monkeypatch.setattr(graph_module, "capture_cuda", lambda work: graphs.append(capture_cuda(work)) or graphs[-1])
    create_env = ENVIRONMENTS[name]
    # A batch that cannot be a graph warns, and warnings are errors in the tests.
    there = train(name, None, create_env, n_env_steps=500, **ON_GPU)
    here = train(name, None, create_env, n_env_steps=500)
    assert len(graphs) >= 1
    assert there.losses.keys() == here.losses.keys()
    for key, numbers in there.losses.items():
        assert len(numbers) == len(here.losses[key])
        assert all(torch.tensor(numbers).isfinite()), key
        assert numbers[0] == pytest.approx(here.losses[key][0], rel=1e-3, abs=1e-4), key  # later ones may part
    assert {str(weight.device) for weight in there.model.parameters()} == {DEVICE}
    assert there.before.returns == pytest.approx(here.before.returns, rel=0.02, abs=3.0)


@pytest.mark.parametrize("module", [a2c, ppo])
def test_a_captured_update_reads_a_captured_batch_in_place(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = partial(module.train, create_model=create_network, create_agent=ActorCriticAgent)
    config = a2c.A2CConfig if module is a2c else ppo.PPOConfig
    check_batches_read_in_place(train, config(n_envs=4, n_timesteps=6), DEVICE, monkeypatch)


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith(("a2c", "ppo"))])
def test_a_captured_update_is_the_update_bit_by_bit(name: str) -> None:
    settings = {**ON_GPU, "n_env_steps": 500}
    captured = train(name, None, ENVIRONMENTS[name], **settings)
    plain = train(name, None, ENVIRONMENTS[name], graph=False, **settings)
    assert captured.losses == plain.losses
    for one, other in zip(captured.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_captured_products_in_bfloat16_are_those_of_single_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "FEW_OUTPUTS", 0)  # small layers are rounded, as large ones are
    create_env = ENVIRONMENTS[name]
    settings = {**ON_GPU, "n_env_steps": 500}
    coarse = {**settings, "precision": "bfloat16"}
    captured, plain = (train(name, None, create_env, graph=graph, **coarse) for graph in (True, False))
    assert captured.losses == plain.losses
    assert captured.losses != train(name, None, create_env, **settings).losses
    for weight in captured.model.parameters():
        assert weight.dtype is torch.float32
        assert bool(weight.isfinite().all())


@pytest.mark.parametrize("kind", KEEP_STATES)
def test_an_update_of_an_agent_with_a_state_is_captured_and_gives_the_plain_ones_weights(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_model, create_agent, create_env = KEEP_STATES[kind]
    graphs: list[Any] = []
    capture_cuda = graph_module.capture_cuda
    monkeypatch.setattr(graph_module, "capture_cuda", lambda work: graphs.append(capture_cuda(work)) or graphs[-1])
    config = ppo.PPOConfig(n_timesteps=6, n_envs=4, n_epochs=2, n_minibatches=2, learner_device=DEVICE)
    args = {"model": create_model()}
    with RL_Batcher(
        6, create_agent, create_env, agent_args=args, env_args={"n_envs": 4, "device": "cpu"}, seed=1
    ) as batcher:
        batcher.reset()
        batches = []
        for _ in range(4):
            batcher.execute()
            batches.append(batcher.get()[0])

    def learnt(graph: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = create_model().to(DEVICE)
        learner = ppo.PPOLearner.create(model, create_agent, dataclasses.replace(config, graph=graph))
        for i, batch in enumerate(batches):  # the first eagerly, the second is captured, the others are replays
            learner.update(batch, i / 10)
        return [weight.detach().to("cpu") for weight in model.parameters()]

    plain = learnt(graph=False)
    assert graphs == []
    captured = learnt(graph=True)
    assert len(graphs) == 1
    for one, other in zip(captured, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)


WINDOW = {"n_minibatches": 2, "window": 2, "vtrace": True}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", KEEP_STATES)
@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        (a2c, a2c.A2CConfig(n_timesteps=6, n_envs=4, learner_device=DEVICE)),
        (a2c, a2c.A2CConfig(n_timesteps=6, n_envs=4, learner_device=DEVICE, **WINDOW)),
        (ppo, ppo.PPOConfig(n_timesteps=6, n_envs=4, learner_device=DEVICE, n_epochs=2, n_minibatches=2)),
    ],
    ids=["a2c", "window", "ppo"],
)
def test_no_update_of_an_agent_with_a_state_waits(algorithm: Any, config: Any, kind: str, graph: bool) -> None:
    create_model, create_agent, create_env = KEEP_STATES[kind]
    learner = algorithm.train.learner.create(
        create_model().to(DEVICE), create_agent, dataclasses.replace(config, graph=graph)
    )
    settings = {"n_envs": 4, "device": DEVICE}
    args = {"model": create_model(), "device": DEVICE}
    waits = int(getattr(config, "window", None) is not None)  # for a second batch, which fills the window
    with RL_Batcher(6, create_agent, create_env, agent_args=args, env_args=settings, seed=1, device=DEVICE) as batcher:
        batcher.reset()
        learnt = []
        for i in range(4 + waits):
            batcher.execute()
            batch = batcher.get()[0]
            # After an update of single steps comes the one that is captured: torch waits when a capture begins.
            with contextlib.nullcontext() if graph and i == 1 + waits else forbid_host_sync():
                learnt.append(learner.update(batch, i / 10))
    assert [bool(terms) for terms in learnt] == [False] * waits + [True] * 4
    assert all(term.isfinite() for terms in learnt for term in terms.values())


def test_an_update_that_stops_early_is_captured_too() -> None:
    settings = {**ON_GPU, "n_env_steps": 500, "target_kl": 1e-4, "learning_rate": 0.01}
    captured, plain = (train("ppo", None, create_sim, graph=graph, **settings) for graph in (True, False))
    stopped = captured.losses["skipped"]
    assert 0.0 < stopped[0] < 1.0
    assert 0.0 < stopped[2] < 1.0  # a replay; the last update has a learning rate of nearly 0, and stops nowhere
    assert captured.losses == plain.losses


@pytest.mark.parametrize("replay_device", ["cpu", DEVICE])
def test_replay_memory_stays_where_it_is_put(replay_device: str) -> None:
    changes = {**ON_GPU, "replay_device": replay_device, "n_env_steps": 400}
    there = train("dqn, prioritised", None, create_sim, **changes)
    here = train("dqn, prioritised", None, create_sim, n_env_steps=400)
    assert there.losses["loss"][0] == pytest.approx(here.losses["loss"][0], rel=1e-3)
    assert all(torch.tensor(there.losses["loss"]).isfinite())


def test_a_learner_goes_on_bit_by_bit() -> None:
    config = a2c.A2CConfig(n_envs=64, **ON_GPU)

    def create_learner() -> a2c.A2CLearner:
        torch.manual_seed(0)
        model = create_network().to(DEVICE)
        return a2c.A2CLearner(model, ActorCriticAgent(model, copy_model=False), config)

    with RL_Batcher(
        16,
        ActorCriticAgent,
        create_sim,
        agent_args={"model": ActorCritic(4, 2), "device": DEVICE},
        env_args={"n_envs": 64, "device": DEVICE},
        seed=0,
        device=DEVICE,
    ) as batcher:
        batcher.reset()
        batches = []
        for _ in range(3):
            batcher.execute()
            batches.append(batcher.get()[0])
    one, other = create_learner(), create_learner()
    one.update(batches[0], 0.0)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    for batch in batches[1:]:
        first, second = one.update(batch, 0.5), other.update(batch, 0.5)
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", REPLAYING)
def test_a_gradient_step_is_captured_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, capture = [], graph_module.capture_cuda
    monkeypatch.setattr(graph_module, "capture_cuda", lambda work: found.append(capture(work)) or found[-1])
    check_captured_gradient_steps(kind, "cuda:0")
    assert len(found) == 1
