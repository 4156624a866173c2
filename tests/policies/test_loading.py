"""A loaded policy does what the agent of the training does, observation by observation."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from rollouts import SEED, check_actions, check_single_observations, played, shown
from torch import nn
from trainings import PARTS, SMALL, TASKS, Task

import rlstruct
from rlstruct import agents as bundled
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import ppo
from rlstruct.algos.training.checkpoint import read_checkpoint
from rlstruct.cli.commands.evaluate import episodes
from rlstruct.cli.messages import UserError
from rlstruct.cli.stored_run import load_trained
from rlstruct.core import TensorSpec
from rlstruct.policies.blueprint import build, describe
from rlstruct.policies.loading import describe_network


@pytest.fixture(scope="module", params=TASKS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Path]:
    task = TASKS[request.param]
    return task, task.train(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("stochastic", [False, True], ids=["best", "drawn"])
def test_the_actions_of_a_rollout(trained: tuple[Task, Path], stochastic: bool) -> None:
    task, run = trained
    batch = played(task, run, stochastic)
    assert bool(batch.steps["observation/initial_state"][:, 1:].any())
    check_actions(batch, rlstruct.load(run, stochastic=stochastic, seed=SEED))


def test_one_observation_is_a_batch_without_its_axis(trained: tuple[Task, Path]) -> None:
    task, run = trained
    check_single_observations(played(task, run, stochastic=False), run)


def test_a_whole_episode_in_gymnasium_without_the_library_in_between(tmp_path: Path) -> None:
    run = TASKS["actor-critic"].train(tmp_path)
    policy, env = rlstruct.load(run, stochastic=True), gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=1)
    policy.reset()
    steps, over = 0, False
    while not over:
        action = policy.act(observation)
        assert env.action_space.contains(action)
        observation, _, terminated, truncated, _ = env.step(action)
        steps, over = steps + 1, terminated or truncated
    assert steps >= 8


def test_tensors_come_back_as_tensors(tmp_path: Path) -> None:
    policy = rlstruct.load(TASKS["gaussian"].train(tmp_path), stochastic=False)
    frames = torch.randn(5, 3)
    found = policy.act(frames)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), policy.act(frames.numpy()))
    assert policy.act(frames[0]).shape == (1,)
    assert not found.requires_grad
    assert policy.act(frames.double(), stochastic=True).dtype == torch.float32


def test_a_policy_shows_its_agent_and_what_it_acts_on() -> None:
    specs = {"frame": TensorSpec((4,), torch.float32)}
    policy = rlstruct.Policy(ActorCritic(4, 2), ActorCriticAgent, specs)
    shown = "<Policy: ActorCriticAgent with ActorCritic on cpu, takes the best action for frame [4] torch.float32>"
    assert repr(policy) == shown
    policy.stochastic = True
    assert "samples actions for frame" in repr(policy)


def test_the_policy_follows_the_evaluations_of_its_training(tmp_path: Path) -> None:
    assert rlstruct.load(TASKS["actor-critic"].train(tmp_path)).stochastic
    assert not rlstruct.load(TASKS["values"].train(tmp_path)).stochastic


def test_what_is_said_to_be_sampled_is_sampled(trained: tuple[Task, Path]) -> None:
    policy = rlstruct.load(trained[1], stochastic=True)
    assert "samples actions" in repr(policy)
    (frame,) = (torch.zeros(400, *spec.shape, dtype=spec.dtype) for spec in policy.specs.values())
    best = policy.act(frame, stochastic=False)
    assert (best == best[0]).all()
    policy.reset()
    assert (policy.act(frame) != best).any()  # of 400 actions of DQN, 5 % are random
    policy.stochastic = False
    assert "takes the best action" in repr(policy)
    policy.reset()
    assert torch.equal(policy.act(frame), best)


def test_an_epsilon_greedy_policy_samples_only_with_an_epsilon(tmp_path: Path) -> None:
    run, frames = TASKS["values"].train(tmp_path), torch.zeros(1000, 4)
    greedy = rlstruct.load(run)
    assert greedy.agent_info["epsilon"] == pytest.approx(TASKS["values"].config.final_epsilon)
    always = rlstruct.load(run, agent_info={"epsilon": 1.0}, stochastic=True)
    assert 400 < (always.act(frames) != greedy.act(frames)).sum() < 600
    assert torch.equal(
        always.copy("cpu").act(frames), rlstruct.load(run, agent_info={"epsilon": 1.0}).act(frames, stochastic=True)
    )
    for agent in (bundled.QAgent, partial(bundled.StackingAgent.create, create_agent=bundled.QAgent, shape=(4, 4))):
        policy = rlstruct.Policy(bundled.QNetwork(4, 2), agent, greedy.specs)
        with pytest.raises(
            ValueError, match=r"samples only with agent_info\['epsilon'\], and agent_info has \[\]\. Pass"
        ):
            policy.act(frames, stochastic=True)
        with pytest.raises(ValueError, match="samples only with"):
            rlstruct.Policy(bundled.QNetwork(4, 2), agent, greedy.specs, stochastic=True)


def test_the_command_line_samples_as_the_policy_does(tmp_path: Path) -> None:
    run = TASKS["values"].train(tmp_path)
    trained = load_trained(run, auto_reset=False, factories=["trainings:CART_POLE"])
    agent = trained.choice.create_agent(trained.model, stochastic=True)
    epsilon = trained.sampling(agent, 3, stochastic=True)["epsilon"]
    torch.testing.assert_close(epsilon, torch.full((3,), TASKS["values"].config.final_epsilon))
    assert trained.sampling(agent, 3, stochastic=False).empty()
    with pytest.raises(UserError, match=r"samples only with agent_info\['epsilon'\].* --actions best"):
        replace(trained, agent_info={}).sampling(agent, 3, stochastic=True)
    assert episodes(trained, 20, "cpu", 0, stochastic=True) != episodes(trained, 20, "cpu", 0, stochastic=False)


def test_drawn_actions_follow_the_seed(tmp_path: Path) -> None:
    run, frames = TASKS["gaussian"].train(tmp_path), np.zeros((4, 3), np.float32)
    drawn = [rlstruct.load(run, stochastic=True, seed=seed).act(frames) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).all()
    policy = rlstruct.load(run, stochastic=True)
    first = policy.act(frames)
    assert (policy.act(frames) != first).all()
    policy.reset()
    assert (policy.act(frames) != first).all()


def test_parts_of_an_observation(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"the network is trainings\.PartsNetwork, and the agent is .* --factory MODULE"
    ):
        run = PARTS.train(tmp_path)
    with pytest.raises(ValueError, match=r"the network is trainings\.PartsNetwork, .* Pass create_model="):
        rlstruct.load(run)
    with pytest.raises(ValueError, match=r"the agent is trainings\.PartsAgent, .* Pass create_agent="):
        rlstruct.load(run, create_model=PARTS.create_model)
    with pytest.raises(
        TypeError, match=r"create_model is a network, PartsNetwork, expected a function .* lambda: Parts"
    ):
        rlstruct.load(run, create_model=PARTS.create_model())  # type: ignore[arg-type]
    policy = rlstruct.load(run, create_model=PARTS.create_model, create_agent=PARTS.create_agent, seed=SEED)
    batch = played(PARTS, run, stochastic=True)
    for t in range(30):
        found = policy.act(shown(batch, t))
        np.testing.assert_array_equal(found, batch.steps["action/action"][:, t].numpy())
    policy.reset()
    nested: dict[str, Any] = {"place": 3, "sight": {"near": [0.5, 1.0], "far": np.array([0, 1, 1], np.int8)}}
    assert policy.act(nested) in (0, 1)
    with pytest.raises(
        KeyError, match=r"the parts \['place'\], expected the parts \['place', 'sight/far', 'sight/near"
    ):
        policy.act({"place": 3})
    nested["sight"]["near"] = [0.5]
    with pytest.raises(
        ValueError,
        match=r"part 'sight/near' of the observation is \[1\] torch.float.*, expected numbers that fit into \[2\]",
    ):
        policy.act(nested)
    nested["sight"]["near"] = np.zeros((4, 2))
    with pytest.raises(ValueError, match="expected one of each, or as many of each"):
        policy.act(nested)
    nested["place"], nested["sight"]["near"] = 3.5, [0.5, 1.0]
    with pytest.raises(
        ValueError, match=r"part 'place' of the observation is \[\] torch.float64, expected .* \[\] torch.int64"
    ):
        policy.act(nested)


def test_mistakes_are_named(tmp_path: Path) -> None:
    policy = rlstruct.load(TASKS["recurrent"].train(tmp_path))
    for wrong, message in {
        "shape": (np.zeros(3), r"is \[3\] .*, expected numbers that fit into \[4\] torch.float32, or \['B', 4\]"),
        "axes": (np.zeros((2, 3, 4)), r"is \[2, 3, 4\] "),
        "rows": (np.zeros((0, 4)), r"is \[0, 4\] "),
        "dtype": (np.zeros(4, complex), r"torch.complex128, expected .* torch.float32"),
        "text": ("cart", "is 'cart', expected numbers"),
        "dict": ({"x": np.zeros(4)}, r"the parts \['x'\], expected no parts, but one array"),
    }.values():
        with pytest.raises((KeyError, TypeError, ValueError), match=message):
            policy.act(wrong)
    with pytest.raises(ValueError, match="one bool for each row of the last observations, of which there are none yet"):
        policy.reset(where=np.array([True]))
    policy.act(np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"2 rows, .* agent remembers 3, expected the same number. Call reset\(\)"):
        policy.act(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"where is \[2\] torch.bool, expected .* there are \[3\]"):
        policy.reset(where=np.array([True, False]))
    policy.reset()
    assert policy.act(np.zeros((2, 4), np.float32)).shape == (2,)


def test_bytes_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    policy = rlstruct.load(TASKS["stacks"].train(tmp_path), stochastic=False)
    picture = np.full((1, 12, 12), 255)
    policy.act(picture)  # whole numbers that bytes can hold
    with pytest.raises(ValueError, match=r"torch.int64, expected numbers that fit into .* torch.uint8"):
        policy.act(picture + 1)
    with pytest.raises(ValueError, match=r"torch.float64, expected .* torch.uint8"):
        policy.act(picture / 255.0)


def test_files_that_are_no_policies(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere, expected a run folder with a checkpoint"):
        rlstruct.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no .*/checkpoint.pt, .* after its first evaluation"):
        rlstruct.load(tmp_path)
    file = tmp_path / "checkpoint.pt"
    file.write_text("nothing")
    with pytest.raises(ValueError, match=r"checkpoint.pt is not a checkpoint of a training, or is damaged: "):
        rlstruct.load(tmp_path)
    torch.save(TASKS["actor-critic"].create_model(), file)  # a whole network, of which torch says how to run its code
    with pytest.raises(ValueError, match=r"or is damaged: torch cannot read it as plain data\. Pass") as raised:
        rlstruct.load(file)
    assert "weights_only" not in str(raised.value)
    assert raised.value.__suppress_context__  # a traceback shows this sentence alone
    torch.save({"weights": 1}, file)
    with pytest.raises(ValueError, match=r"is not a checkpoint of a training: it has \['weights'\]"):
        rlstruct.load(tmp_path)


def test_checkpoints_of_older_versions_need_the_factories(tmp_path: Path) -> None:
    run = TASKS["actor-critic"].train(tmp_path)
    state = read_checkpoint(run / "checkpoint.pt")
    del state["policy"]
    torch.save(state, run / "old.pt")
    with pytest.raises(ValueError, match="it does not say which network it has"):
        rlstruct.load(run / "old.pt")
    factories: dict[str, Any] = {"create_model": TASKS["actor-critic"].create_model, "create_agent": ActorCriticAgent}
    with pytest.raises(ValueError, match="does not say what the environment shows"):
        rlstruct.load(run / "old.pt", **factories)
    space = gymnasium.make("CartPole-v1").observation_space
    old, new = rlstruct.load(run / "old.pt", **factories, observation_space=space), rlstruct.load(run)
    frames = np.random.default_rng(0).normal(size=(5, 4))
    np.testing.assert_array_equal(old.act(frames, stochastic=False), new.act(frames, stochastic=False))
    factories["create_model"] = partial(ActorCritic, 4, 2, hidden=(9,))
    with pytest.raises(ValueError, match=r"does not fit what create_model makes: .*actor.layers"):
        rlstruct.load(run, **factories)
    factories["create_model"] = partial(ActorCritic, 7, 2, hidden=(8,))
    got = r"create_model makes: actor.layers.0.weight is \[8, 7\], expected \[8, 4\]\. Make .* torch says: "
    with pytest.raises(ValueError, match=got):
        rlstruct.load(run, **factories)


LOW = np.array([-2.0, 0.1], np.float32)
NETWORKS = [
    nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Embedding(3, 4), nn.Softmax(dim=-1), nn.Hardtanh(), nn.Identity()),
    bundled.SoftActorCritic(3, LOW, LOW + 1, hidden=np.array([8, 8])),
    bundled.SoftActorCritic(3, LOW, LOW + 1, layer_norm=True, n_atoms=5, value_range=(-1, 2.5)),
    nn.Sequential(nn.Flatten(), nn.Linear(8, 4, bias=False), nn.LayerNorm(4), nn.ELU(0.5), nn.Linear(4, 2)),
    nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.1)),
    nn.GRUCell(3, 4),
    bundled.ActorCritic(4, (2, 3), orthogonal=False),
    bundled.MLP(4, 2, activation=nn.GELU),
    bundled.ConvolutionalGaussianActorCritic((10, 10, 3), 2, channels_last=True, initial_log_std=-1.0),
    bundled.RecurrentGaussianActorCritic(bundled.ConvolutionalTrunk((1, 12, 12), n_features=8), 2, n_hidden=4),
    bundled.Normalised(bundled.GaussianActorCritic(3, 1, initial_log_std=-1.0), None, discount=0.9, clip=3.0),
]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda one: type(one).__name__)
def test_a_network_is_made_again(network: nn.Module) -> None:
    plain, again = describe_network(network)
    assert str(again) == str(network)
    assert describe_network(again)[0] == plain


def test_what_cannot_be_described() -> None:
    network = ActorCritic(4, 2)
    network.extra = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"ActorCritic, which was changed after it was made: extra was added"):
        describe_network(network)
    with pytest.raises(TypeError, match="lambda"):
        describe_network(bundled.MLP(4, 2, activation=lambda: nn.Tanh()))
    with pytest.raises(TypeError, match=r"builtins\.object"):
        describe(object())


@pytest.mark.parametrize(
    "place",
    [
        "os:system",
        "subprocess:Popen",
        "rlstruct.cli.main:main",
        "rlstruct.policies.loading:Path",
        "rlstruct.algos.training.run_folder:RunFolder",
        "rlstruct.policies.loading:torch.hub.load",
        "torch.nn.modules.linear:math.exp",
    ],
)
@pytest.mark.parametrize("kind", ["call", "partial", "name"])
def test_a_checkpoint_cannot_run_anything_else(place: str, kind: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"names {place}, expected a network or an agent")):
        build({kind: place, "args": [], "named": {}})


def test_the_first_checkpoint_does_not_know_what_is_shown(tmp_path: Path) -> None:
    task = TASKS["actor-critic"]
    config = ppo.PPOConfig(**{**SMALL, "n_env_steps": 16, "target_return": 0.0}, n_minibatches=2)
    run = Task(task.create_model, task.create_agent, config=config).train(tmp_path)
    with pytest.raises(ValueError, match="was written before the first batch"):
        rlstruct.load(run)
