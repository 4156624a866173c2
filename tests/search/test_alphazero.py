"""AlphaZero: its loss and targets by hand, matches, learning, resuming, three devices."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_learners import fork_learners
from torch import Tensor, nn

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup, use_group
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor
from rlstruct.errors import BatcherStateError
from rlstruct.rl_agent import RL_Agent
from rlstruct.search import SearchAgent, SearchConfig, alphazero
from rlstruct.search.alphazero import AlphaZeroConfig, AlphaZeroLearner, losses, mirrored
from rlstruct.search.arena import Arena, RandomPlayer, play_match
from rlstruct.sims import ConnectFour

SMALL = AlphaZeroConfig(
    n_env_steps=192,
    n_timesteps=8,
    n_envs=4,
    n_simulations=4,
    max_depth=4,
    batch_size=16,
    n_updates=2,
    learning_starts=32,
    replay_capacity=1000,
    mirror=True,
    evaluation_episodes=4,
    evaluation_interval=64,
    opponent_simulations=2,
    log_interval=1,
)
create_model = partial(ConvolutionalActorCritic, (2, 6, 7), 7, n_features=16, layers=[(8, 4, 1)])


def train_small(run: RunFolder | None = None, **changes: Any) -> TrainingResult:
    return alphazero.train(dataclasses.replace(SMALL, **changes), create_model, SearchAgent, ConnectFour, run=run)


class Script:
    """Plays columns from a list, the same in all games."""

    def __init__(self, columns: list[int]) -> None:
        self.columns = list(columns)

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor) -> Any:
        column = self.columns.pop(0) if self.columns else 6
        return DictTensor({"action": torch.full((observation.n_elems(),), column)}), state


def test_the_loss_by_hand() -> None:
    class Model(nn.Module):
        def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
            return torch.log(torch.tensor([[1.0, 3.0, 4.0]])).expand(len(frame), 3), frame.sum(1) * 0.5

    batch = DictTensor(
        {
            "observation/frame/board": torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
            "observation/frame/legal": torch.tensor([[True, True, False], [True, True, True]]),
            "action/action_policy": torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]),
            "action/action_value": torch.tensor([0.0, 0.0]),
            "reward": torch.tensor([-1.0, 0.0]),
            "terminated": torch.tensor([True, False]),
        }
    )
    terms = losses(Model(), batch, dataclasses.replace(SMALL, value_coefficient=2.0))
    # Probabilities 1/4, 3/4 of the two legal actions, then 1/2 of the third one.
    policy_loss = (-0.5 * torch.log(torch.tensor(0.25 * 0.75)) + torch.log(torch.tensor(2.0))) / 2
    torch.testing.assert_close(terms["policy_loss"], policy_loss)
    # The first game was lost, and its position judged 0.5; the other one has not ended.
    torch.testing.assert_close(terms["value_loss"], torch.tensor(1.5**2))
    torch.testing.assert_close(terms["loss"], policy_loss + 2.0 * terms["value_loss"])
    torch.testing.assert_close(terms["divergence"], policy_loss - torch.log(torch.tensor(2.0)) / 2)
    # A quarter of the target is what the search expected, 1.
    batch = DictTensor({**dict(batch.items()), "action/action_value": torch.ones(2)})
    terms = losses(Model(), batch, dataclasses.replace(SMALL, search_value_fraction=0.25))
    torch.testing.assert_close(terms["value_loss"], torch.tensor((0.5 - (0.75 * -1.0 + 0.25)) ** 2))


def positions(known: list[bool]) -> DictTensor:
    """Positions of which the network thinks something else each, and whose games have ended or not."""
    generator = torch.Generator().manual_seed(0)
    n, shapes = len(known), {"observation/frame/board": (2, 6, 7), "action/action_policy": (7,)}
    drawn = {name: torch.rand(n, *shape, generator=generator) for name, shape in shapes.items()}
    drawn["action/action_policy"] /= drawn["action/action_policy"].sum(-1, keepdim=True)
    drawn["observation/frame/legal"] = torch.ones(n, 7, dtype=torch.bool)
    numbers = {"reward": torch.linspace(-1.0, 1.0, n), "action/action_value": torch.zeros(n)}
    return DictTensor({**drawn, **numbers, "terminated": torch.tensor(known)})


def gradient_of(batch: DictTensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = create_model()
    agent = SearchAgent(model, create_simulator=ConnectFour, device="cpu", config=SMALL.search(2))
    config = dataclasses.replace(SMALL, max_gradient_norm=0.1)
    terms, gradient = AlphaZeroLearner(model, agent, config).gradient(batch)
    return dict(terms), dict(gradient)


def gradients_of_learners(group: DistributedLearnerGroup) -> dict[str, Any]:
    found = {}
    with use_group(group):
        for name, known in KNOWN.items():
            half = len(known) // group.size
            found[name] = gradient_of(positions(known).slice(half * group.rank, half * (group.rank + 1)))
    return found


KNOWN = {
    "as many": [True, False, False, True, True, False, False, True],
    "more in one": [True, True, True, True, False, False, True, False],
    "one in all": [False, False, False, True, False, False, False, False],
    "none": [False] * 8,
}


@pytest.mark.slow
def test_two_learners_follow_the_gradient_of_all_their_positions() -> None:
    found = fork_learners(["a", "a"], gradients_of_learners)
    for name, known in KNOWN.items():
        expected, whole = gradient_of(positions(known))
        for terms, gradient in (one[name] for one in found):
            assert terms.keys() == expected.keys()
            for key, term in expected.items():
                torch.testing.assert_close(terms[key], term, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
            for key, one in whole.items():
                torch.testing.assert_close(gradient[key], one, rtol=1e-4, atol=1e-6, msg=f"{name}: weight {key}")


def test_results_reach_every_position_of_a_game_with_the_sign_of_who_moved() -> None:
    # Column 0 four times against column 1: who begins wins with the seventh move.
    learner = AlphaZeroLearner.create(create_model(), partial(SearchAgent, create_simulator=ConnectFour), SMALL)

    class Agent(Script, RL_Agent):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            action, state = Script.__call__(self, *arguments[:3])
            return action + DictTensor(
                {
                    "action_policy": torch.zeros(1, 7),
                    "action_value": torch.zeros(1),
                    "action_index": action["action"] * 0,
                }
            ), state

    agent = Agent([0, 1, 0, 1, 0, 1, 0, 3, 3, 3])
    with RL_Batcher(10, lambda: agent, ConnectFour, env_args={"n_envs": 1}, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    learner.buffer.extend(trajectories)
    batch = learner.buffer.sample(400)
    boards = batch["observation/frame/board"].flatten(1).sum(1)  # stones
    over = batch["terminated"]
    assert over.any()
    for stones, reward, terminated in zip(boards.tolist(), batch["reward"].tolist(), over.tolist(), strict=True):
        if terminated:  # the first game; the second one has not ended
            assert reward == (1.0 if stones % 2 == 0 else -1.0)
        else:
            assert reward == 0.0


def test_mirror_images() -> None:
    frame = torch.arange(84).view(1, 2, 6, 7)
    batch = DictTensor(
        {"observation/frame/board": frame, "action/action_policy": torch.arange(7)[None], "reward": frame}
    )
    turned = mirrored(batch)
    assert torch.equal(turned["observation/frame/board"], frame.flip(3))
    assert turned["action/action_policy"].tolist() == [[6, 5, 4, 3, 2, 1, 0]]
    assert torch.equal(turned["reward"], frame)


def test_a_board_whose_columns_are_not_the_actions_has_no_mirror_images() -> None:
    assert not AlphaZeroConfig().mirror  # tic-tac-toe has nine actions
    squares = {"observation/frame/board": torch.zeros(4, 2, 3, 3), "action/action_policy": torch.zeros(4, 9)}
    with pytest.raises(
        ValueError, match=r"frame/board \[4, 2, 3, 3\], action/.*one action for each column.*mirror=False"
    ):
        mirrored(DictTensor(squares))


def test_a_match_counts_for_who_won() -> None:
    env = partial(ConnectFour, auto_reset=False)
    result, length = play_match(Script([0, 0, 0, 0]), Script([1, 1, 1, 1]), env(3))
    assert (result.tolist(), length.tolist()) == ([1.0] * 3, [7] * 3)
    result, length = play_match(Script([0, 2, 0, 3]), Script([1, 1, 1, 1]), env(2))
    assert (result.tolist(), length.tolist()) == ([-1.0] * 2, [8] * 2)


def test_a_match_of_games_that_restart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"play_match: ConnectFour begins the next game by itself.*auto_reset=False"):
        play_match(Script([]), Script([]), ConnectFour(2))


def test_an_arena_lets_each_side_begin_half_of_the_games() -> None:
    agent = SearchAgent(create_model(), create_simulator=ConnectFour, config=SearchConfig(n_simulations=4))
    arena = Arena(agent, RandomPlayer(7), partial(ConnectFour, auto_reset=False), n_games=6)
    with pytest.raises(BatcherStateError, match="no evaluation was started"):
        arena.wait()
    assert arena.poll() is None
    arena.start(agent.model.state_dict(), env_steps=7, policy_version=3)
    found = arena.poll()
    assert found is not None
    assert (len(found.returns), found.env_steps, found.policy_version) == (6, 7, 3)
    assert set(found.returns) <= {-1.0, 0.0, 1.0}
    # An odd number of moves: who began won.
    for result, moves in zip(found.returns[:3], found.lengths[:3], strict=True):
        assert result == 0.0 or result == (1.0 if moves % 2 else -1.0)
    for result, moves in zip(found.returns[3:], found.lengths[3:], strict=True):
        assert result == 0.0 or result == (-1.0 if moves % 2 else 1.0)
    later = arena.state_dict()
    arena.load_state_dict(later)
    assert later == {"n_played": 6}


@pytest.mark.parametrize("opponent", ["random", "uct"])
def test_learns_what_the_search_finds(opponent: str) -> None:
    result = train_small(opponent=opponent)
    assert result.env_steps == 192
    assert len(result.after.returns) == 4
    assert set(result.losses) >= {"policy_loss", "value_loss", "divergence"}
    assert all(value > -1e-5 for value in result.losses["divergence"])


def test_the_network_comes_to_agree_with_the_search() -> None:
    config = dataclasses.replace(SMALL, n_updates=150, batch_size=64, learning_starts=1, mirror=False)
    create_agent = partial(SearchAgent, create_simulator=ConnectFour, config=config.search(4))
    torch.manual_seed(2)
    model = ConvolutionalActorCritic((2, 6, 7), 7, n_features=64, layers=[(32, 4, 1)])
    learner = AlphaZeroLearner.create(model, create_agent, config)
    arguments = {"model": learner.model}
    with RL_Batcher(32, create_agent, ConnectFour, agent_args=arguments, env_args={"n_envs": 4}, seed=2) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    first = learner.update(trajectories, 0.5)
    batch = learner.buffer.sample(100)
    after = losses(learner.model, batch, config)
    # Searches of one position differ by their noise: what they have in common can be learned, not more.
    assert after["value_loss"] < 0.5 * first["value_loss"]
    assert 0.0 < after["divergence"] < first["divergence"]


@pytest.mark.slow  # a C++ compiler
def test_compiled_steps_mirror_the_samples_that_eager_ones_do() -> None:
    config = dataclasses.replace(SMALL, n_updates=3, learning_starts=1)
    create_agent = partial(SearchAgent, create_simulator=ConnectFour, config=config.search(4))
    torch.manual_seed(2)
    model = create_model()
    plain, compiled = (
        AlphaZeroLearner.create(copy.deepcopy(model), create_agent, dataclasses.replace(config, compile_update=fast))
        for fast in (False, True)
    )
    with RL_Batcher(32, create_agent, ConnectFour, agent_args={"model": model}, env_args={"n_envs": 4}) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    for _ in range(2):
        expected, found = (learner.update(trajectories, 0.5) for learner in (plain, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert plain.policy_version == compiled.policy_version == 6
    torch.testing.assert_close(compiled.model.state_dict(), plain.model.state_dict(), rtol=0, atol=1e-6)


def test_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, opponent="random", final_learning_rate_fraction=1.0, n_env_steps=96)
    train_az = partial(alphazero.train, create_model=create_model, create_agent=SearchAgent, create_env=ConnectFour)
    shorter = dataclasses.replace(config, n_env_steps=64)
    with RunFolder("az", shorter, n_env_steps=64, root=tmp_path, progress=False) as run:
        train_az(shorter, run=run)
        path = run.path
    straight = train_az(config)
    with RunFolder.resume(path, progress=False) as run:
        resumed = train_az(config, run=run)
    assert resumed.losses == straight.losses
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


@pytest.mark.slow
def test_learner_self_play_and_evaluation_on_three_devices() -> None:
    devices = {"learner_device": "sim:0", "batcher_device": "sim:1", "evaluation_device": "sim:2"}
    small: dict[str, Any] = {
        "n_env_steps": 24,
        "n_simulations": 2,
        "max_depth": 2,
        "learning_starts": 1,
        "opponent": "random",
    }
    small |= {"n_timesteps": 4, "evaluation_episodes": 2, "n_updates": 1}
    there = train_small(**devices, **small)
    here = train_small(**small)
    for name, weight in here.model.state_dict().items():
        torch.testing.assert_close(there.model.state_dict()[name].to("cpu"), weight)


def test_refuses_what_makes_no_sense() -> None:
    for name, wrong in (("evaluation_episodes", 5), ("opponent", "me"), ("method", "uct"), ("n_simulations", 0)):
        with pytest.raises(ValueError, match=f"AlphaZeroConfig: {name} is"):
            dataclasses.replace(SMALL, **{name: wrong})
