from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from replaying_learners import learn_once
from torch import Tensor, nn

from rlstruct import DictTensor
from rlstruct.agents import QAgent, QNetwork, RecurrentQAgent, RecurrentQNetwork
from rlstruct.algos import dqn
from rlstruct.algos.dqn import DQNConfig, DQNLearner, train
from rlstruct.algos.prioritised_replay import PrioritisedReplayBuffer
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.testing import allow_host_sync, forbid_host_sync

SMALL = DQNConfig(
    n_env_steps=600,
    n_timesteps=5,
    n_envs=4,
    batch_size=16,
    n_updates=2,
    learning_starts=100,
    replay_capacity=800,
    evaluation_episodes=4,
    evaluation_processes=0,
    evaluation_interval=200,
    evaluation_timesteps=40,
    log_interval=7,
)


def create_env(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=40) for _ in range(n_envs)], seed)


def create_model() -> QNetwork:
    return QNetwork(4, 2, hidden=(16,), duelling=True)


def train_small(**changes: Any) -> TrainingResult:
    return train(dataclasses.replace(SMALL, **changes), create_model, QAgent, create_env)


def test_the_loss_by_hand() -> None:
    online = torch.tensor([[1.0, 2.0], [1.0, 2.0]], requires_grad=True)
    judged = torch.tensor([[4.0, 8.0], [4.0, 8.0]])
    batch = DictTensor(
        {
            "observation/frame": torch.zeros(2, 4),
            "_observation/frame": torch.ones(2, 4),
            "action/action": torch.tensor([0, 1]),
            "reward": torch.tensor([1.0, 3.0]),
            "discount": torch.tensor([0.25, 0.25]),
            "terminated": torch.tensor([False, True]),
            "weight": torch.tensor([1.0, 0.5]),
        }
    )

    def agent(values: Tensor, after: Tensor) -> Any:
        return lambda state, observation, info: (
            DictTensor({"action_values": torch.where(observation["frame"][:, :1] == 1.0, after, values)}),
            state,
        )

    reached = torch.tensor([[9.0, 0.0], [9.0, 0.0]])  # the network that learns prefers action 0
    for double, follows in ((True, 4.0), (False, 8.0)):
        config = dataclasses.replace(SMALL, double=double)
        terms = dqn.losses(agent(online, reached), agent(judged, judged), batch, config)
        # Targets 1 + follows / 4 and 3; values 1 and 2; the errors -follows / 4 and -1.
        assert terms["error"].tolist() == [-follows / 4, -1.0]
        assert terms["value"].tolist() == [1.0, 2.0]
        first = follows / 4 - 0.5 if follows > 4 else 0.5
        assert terms["loss"].item() == pytest.approx((first + 0.5 * 0.5) / 2)
        assert terms["loss"].requires_grad
    scaled = dqn.losses(
        agent(online, reached), agent(judged, judged), batch, dataclasses.replace(config, reward_scale=3.0)
    )
    assert scaled["error"].tolist() == [-2.0 - 2.0, -1.0 - 6.0]  # targets 3 + 8 / 4 and 9


@pytest.fixture
def filled() -> Any:
    """A function that makes a learner whose buffer holds some steps."""

    def make(**changes: Any) -> DQNLearner:
        config = dataclasses.replace(SMALL, **changes)
        learner = DQNLearner(create_model().to(config.learner_device), QAgent, config)
        agent_args = {"model": create_model()}
        with RL_Batcher(20, QAgent, create_env, agent_args=agent_args, env_args={"n_envs": 4}, seed=0) as batcher:
            batcher.reset(DictTensor({"epsilon": torch.ones(4)}))
            batcher.execute()
            trajectories, _ = batcher.get()
        assert trajectories is not None
        learner.buffer.extend(trajectories.to(learner.buffer.device))
        return learner

    return make


def weights(learner: DQNLearner) -> list[nn.Parameter]:
    return list(learner.online_model.parameters())


def target_weights(learner: DQNLearner) -> list[nn.Parameter]:
    return list(learner.target_model.parameters())


@pytest.mark.parametrize("learner_device", ["cpu", "sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("prioritised", [True, False])
def test_one_update_moves_the_model_and_never_syncs(
    filled: Any, prioritised: bool, learner_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = filled(prioritised=prioritised, learner_device=learner_device)
    # Adam counts its steps in a tensor on the CPU, wherever the weights are: reading that waits for no device.
    monkeypatch.setattr(learner.optimizer, "step", allow_host_sync()(learner.optimizer.step))
    before = [weight.detach().clone() for weight in weights(learner)]
    with forbid_host_sync():
        learner.anneal(0.5)
        terms = learn_once(learner)
    assert set(terms) == {"loss", "value", "error", "gradient_norm"}
    assert not any(term.requires_grad for term in terms.values())
    assert terms["loss"].dim() == terms["gradient_norm"].dim() == 0
    assert all((old != new).any() for old, new in zip(before, weights(learner), strict=True))
    assert all(weight.grad is None for weight in target_weights(learner))
    if prioritised:
        assert isinstance(learner.buffer, PrioritisedReplayBuffer)
        assert learner.buffer.correction == pytest.approx(0.7)
        leaves = learner.buffer.priority.to("cpu")
        assert len(leaves[leaves > 0].unique()) > 5  # they were all 1


def test_an_agent_with_a_memory_is_told_which_algorithms_learn_with_one() -> None:
    def remember() -> nn.Module:
        return RecurrentQNetwork(4, 2, n_hidden=4)

    with pytest.raises(KeyError, match=r"DQN: RecurrentQAgent: .* train an agent with a memory by PQN, PPO or A2C"):
        train(SMALL, remember, RecurrentQAgent, create_env)


def test_a_training_without_a_gradient_step_warns() -> None:
    with pytest.warns(UserWarning, match=r"learning_starts is 601, and the training ends after n_env_steps = 600"):
        assert train_small(learning_starts=601).losses == {}


def test_hard_target_updates_copy_and_soft_ones_follow(filled: Any) -> None:
    learner = filled(target_update_interval=3, target_update_rate=1.0)
    first = [weight.clone() for weight in target_weights(learner)]
    for n in range(1, 7):
        learn_once(learner)
        equal = [torch.equal(a, b) for a, b in zip(weights(learner), target_weights(learner), strict=True)]
        assert all(equal) if n % 3 == 0 else not any(equal)
        if n < 3:
            assert all(torch.equal(a, b) for a, b in zip(first, target_weights(learner), strict=True))
    learner = filled(target_update_interval=1, target_update_rate=0.25)
    before = [weight.clone() for weight in target_weights(learner)]
    learn_once(learner)
    for old, source, target in zip(before, weights(learner), target_weights(learner), strict=True):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * source.detach())


def test_the_weights_that_act_are_a_running_average(filled: Any) -> None:
    learner = filled(average_rate=0.25)
    expected = [weight.detach().clone() for weight in weights(learner)]
    for _ in range(3):
        learn_once(learner)
        expected = [0.75 * old + 0.25 * new.detach() for old, new in zip(expected, weights(learner), strict=True)]
    torch.testing.assert_close([weight.detach() for weight in learner.model.parameters()], expected)
    learner = filled(average_rate=1.0)
    learn_once(learner)
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), weights(learner), strict=True))


def test_the_learning_rate_falls_linearly(filled: Any) -> None:
    learner = filled(learning_rate=0.1, final_learning_rate_fraction=0.2)
    rates = []
    for fraction_done in (0.0, 0.5, 1.0, 1.3):
        learner.anneal(fraction_done)
        rates.append(learner.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.06, 0.02, 0.02])


def test_every_environment_gets_its_epsilon_on_the_cpu(filled: Any) -> None:
    learner = filled(initial_epsilon=1.0, final_epsilon=0.25, epsilon_fraction=0.5, epsilon_exponent=1.0)
    for fraction_done, epsilon in ((0.0, 1.0), (0.25, 0.625), (0.5, 0.25), (1.0, 0.25)):
        info = learner.agent_info(fraction_done, 3)
        assert info.device == torch.device("cpu")
        assert info["epsilon"].tolist() == pytest.approx([epsilon, epsilon**1.5, epsilon**2])


class Corridor(gymnasium.Env[Any, Any]):
    """Twenty steps, each rewarded with 1. Shows which step it is, unless it is only cut off, which no agent can see."""

    observation_space = spaces.Box(0.0, 1.0, (21,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminates: bool) -> None:
        self.terminates, self.taken = terminates, 0

    def _show(self) -> Any:
        return np.eye(21, dtype=np.float32)[self.taken if self.terminates else 0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        end = self.taken == 20
        return self._show(), 1.0, end and self.terminates, end and not self.terminates, {}


def create_corridor(n_envs: int, seed: int, terminates: bool) -> GymEnvInf:
    return GymEnvInf([Corridor(terminates) for _ in range(n_envs)], seed=seed)


class TableOfValues(nn.Module):
    """One number for each step and action."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(21, 2, bias=False)

    def forward(self, frame: Tensor) -> Tensor:
        values: Tensor = self.table(frame)
        return values


@pytest.mark.parametrize("prioritised", [True, False])
@pytest.mark.parametrize("terminates", [True, False])
def test_truncated_episodes_are_worth_100_and_terminated_ones_what_is_left(terminates: bool, prioritised: bool) -> None:
    config = DQNConfig(
        n_env_steps=2000,
        discount=0.99,
        n_timesteps=10,
        n_envs=4,
        n_step=10,
        prioritised=prioritised,
        learning_rate=5.0,
        final_learning_rate_fraction=0.01,
        max_gradient_norm=None,
        huber_delta=100.0,
        batch_size=64,
        n_updates=10,
        target_update_rate=0.5,
        average_rate=1.0,
        learning_starts=200,
        final_epsilon=1.0,
        replay_capacity=2000,
        evaluation_episodes=1,
        evaluation_processes=0,
        evaluation_interval=10**6,
        evaluation_timesteps=20,
    )
    result = train(config, TableOfValues, QAgent, create_corridor, env_args={"terminates": terminates})
    with torch.no_grad():
        values = result.model(torch.eye(21))[: 20 if terminates else 1]  # [20, 2] or [1, 2]
    # Truncated: 1 + 0.99 + 0.99^2 + … = 1 / 0.01.  Terminated: as many terms as steps are left.
    left = torch.arange(20, 0, -1)
    expected = (1 - 0.99**left) / 0.01 if terminates else torch.full((1,), 100.0)
    torch.testing.assert_close(values, expected.unsqueeze(1).expand(-1, 2), rtol=0, atol=0.2 if terminates else 1.0)


def test_a_run_folder_gets_losses_returns_and_a_checkpoint(tmp_path: Any) -> None:
    with RunFolder("dqn", SMALL, n_env_steps=SMALL.n_env_steps, root=tmp_path, progress=False) as run:
        result = train(SMALL, create_model, QAgent, create_env, run=run)
    lines = (run.path / "metrics.csv").read_text().splitlines()
    assert {"train/loss", "train/value", "train/error", "train/return"} <= set(lines[0].split(","))
    checkpoint = torch.load(run.path / "checkpoint.pt", weights_only=True)
    assert checkpoint["env_steps"] == result.env_steps == SMALL.n_env_steps
    for name, weight in result.model.state_dict().items():
        assert torch.equal(checkpoint["model"][name], weight)
