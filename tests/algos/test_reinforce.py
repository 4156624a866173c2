from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import gymnasium
import pytest
import torch
from fake_envs import CountingEnv

from rlstruct import DictTensor, TemporalDictTensor, Trajectories, algos
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic
from rlstruct.algos import reinforce
from rlstruct.algos.reinforce import ReinforceConfig, ReinforceLearner, train
from rlstruct.algos.training.build import DeviceEnvFactory, create_batchers
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.envs import GymEnv
from rlstruct.testing import allow_host_sync, forbid_host_sync

SMALL = ReinforceConfig(
    n_env_steps=1500,
    n_timesteps=25,  # shorter than an episode: the baseline stands for the rest
    n_envs=8,
    n_processes=0,
    evaluation_episodes=4,
    evaluation_processes=0,
    evaluation_interval=500,
    log_interval=3,
)


def create_env(n_envs: int, seed: int) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=60) for _ in range(n_envs)], seed=seed)


def create_model() -> ActorCritic:
    return ActorCritic(4, 2, hidden=(16,))


def create_recurrent_model() -> RecurrentActorCritic:
    return RecurrentActorCritic(4, 2, n_hidden=8)


def train_small(**changes: Any) -> TrainingResult:
    return train(dataclasses.replace(SMALL, **changes), create_model, ActorCriticAgent, create_env)


def two_steps(**changes: Any) -> Trajectories:
    """One row of two real steps and one of padding, of an episode that terminated."""
    steps = {
        "observation/frame": torch.randn(1, 3, 4),
        "observation/rng": torch.zeros(1, 3, dtype=torch.int64),
        "action/action": torch.tensor([[0, 1, 0]]),
        "_observation/reward": torch.tensor([[1.0, 2.0, math.nan]]),
        "_observation/terminated": torch.tensor([[False, True, False]]),
        "_observation/done": torch.tensor([[False, True, False]]),
        **changes,
    }
    info = DictTensor({"policy_version": torch.zeros(1, dtype=torch.int64)})
    return Trajectories(info, TemporalDictTensor(steps, torch.tensor([2])))


def test_the_loss_by_hand() -> None:
    config = dataclasses.replace(
        SMALL, discount=0.5, value_coefficient=10.0, entropy_coefficient=100.0, whiten_advantages=False
    )
    replayed = TemporalDictTensor(
        {
            "action_logits": torch.zeros(1, 3, 2, requires_grad=True),
            "value": torch.tensor([[1.0, 1.0, math.nan]], requires_grad=True),
        }
    )
    terms = reinforce.losses(replayed, two_steps(), torch.full((1, 3), math.nan), config)
    # Returns 1 + 2/2 = 2 and 2; advantages 1 and 1; both log-probabilities -log 2; entropy log 2.
    assert terms["policy_loss"].item() == pytest.approx(math.log(2))
    assert terms["value_loss"].item() == pytest.approx(0.5)
    assert terms["entropy_loss"].item() == pytest.approx(-math.log(2))
    assert terms["loss"].item() == pytest.approx(math.log(2) + 10 * 0.5 - 100 * math.log(2))
    scaled = reinforce.losses(
        replayed, two_steps(), torch.full((1, 3), math.nan), dataclasses.replace(config, reward_scale=3.0)
    )
    assert scaled["policy_loss"].item() == pytest.approx(5 * math.log(2))  # returns 6 and 6, advantages 5 and 5


def test_a_truncated_episode_is_worth_the_value_of_its_last_observation() -> None:
    config = dataclasses.replace(SMALL, discount=0.5, whiten_advantages=False)
    trajectories = two_steps(**{"_observation/terminated": torch.zeros(1, 3, dtype=torch.bool)})
    replayed = TemporalDictTensor(
        {"action_logits": torch.zeros(1, 3, 2, requires_grad=True), "value": torch.zeros(1, 3, requires_grad=True)}
    )
    terms = reinforce.losses(replayed, trajectories, torch.tensor([[math.nan, 8.0, math.nan]]), config)
    # Returns 2 + 8/2 = 6 and 1 + 6/2 = 4.
    assert terms["value_loss"].item() == pytest.approx((36 + 16) / 2 / 2)


def test_the_loss_judges_the_stored_action_not_the_replayed_one() -> None:
    config = dataclasses.replace(SMALL, discount=0.0, whiten_advantages=False)
    logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0], [0.0, 0.0]]], requires_grad=True)
    replayed = TemporalDictTensor({"action_logits": logits, "value": torch.zeros(1, 3, requires_grad=True)})
    terms = reinforce.losses(replayed, two_steps(), torch.zeros(1, 3), config)
    first, second = torch.log_softmax(torch.tensor([2.0, 0.0]), 0).tolist()
    assert terms["policy_loss"].item() == pytest.approx(-(1 * first + 2 * second) / 2)


def test_one_update_moves_the_learners_model_and_never_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model()
    learner = ReinforceLearner(model, ActorCriticAgent(model, copy_model=False), SMALL)
    # Adam counts its steps in a tensor on the CPU, wherever the weights are: reading that waits for no device.
    monkeypatch.setattr(learner.optimizer, "step", allow_host_sync()(learner.optimizer.step))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trajectories = two_steps(**{f"_observation/{key}": value for key, value in two_steps_frames().items()})
    with forbid_host_sync():
        terms = learner.update(trajectories, fraction_done=0.0)
    assert all(weight.grad is not None for weight in model.parameters())
    assert all(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items() if "weight" in name)
    assert all(not term.requires_grad and term.dim() == 0 for term in terms.values())
    assert terms["return"].item() == 3.0
    assert terms["length"].item() == 2.0


def two_steps_frames() -> dict[str, torch.Tensor]:
    return {"frame": torch.randn(1, 3, 4), "rng": torch.zeros(1, 3, dtype=torch.int64)}


def test_the_learning_rate_falls_linearly() -> None:
    model = create_model()
    config = dataclasses.replace(SMALL, learning_rate=0.1, final_learning_rate_fraction=0.2)
    learner = ReinforceLearner(model, ActorCriticAgent(model, copy_model=False), config)
    trajectories = two_steps(**{f"_observation/{key}": value for key, value in two_steps_frames().items()})
    rates = []
    for fraction_done in (0.0, 0.5, 1.0, 1.3):
        learner.update(trajectories, fraction_done)
        rates.append(learner.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.06, 0.02, 0.02])


def test_training_improves_the_policy() -> None:
    config = ReinforceConfig(
        n_env_steps=12_000, n_envs=16, n_processes=0, evaluation_episodes=8, evaluation_processes=0,
    )  # fmt: skip
    result = train(config, lambda: ActorCritic(4, 2), ActorCriticAgent, create_env_500)
    returns = result.losses["return"]
    assert sum(returns[-3:]) > 2 * sum(returns[:3])
    assert result.after.mean_return > 2 * result.before.mean_return


def create_env_500(n_envs: int, seed: int) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed=seed)


def test_evaluations_belong_to_the_weights_that_they_judge() -> None:
    result = train_small()
    assert result.evaluations[0] == result.before
    assert result.evaluations[-1] == result.after
    assert result.before.policy_version == 0
    assert result.after.policy_version == len(result.losses["loss"])
    assert result.after.env_steps == result.env_steps
    beside = [one.env_steps for one in result.evaluations[:-1]]
    assert all(later - sooner >= SMALL.evaluation_interval for sooner, later in pairwise(beside))
    assert len(beside) >= 2


@pytest.mark.filterwarnings("ignore:run_training. none of 8 episodes ended")  # some last 25 steps, all by chance
def test_without_a_process_beside_the_weights_that_reached_the_target_are_the_last() -> None:
    untrained = train_small(n_env_steps=1).before.mean_return
    result = train_small(n_env_steps=6000, target_return=untrained + 3.0)
    reached, after = result.evaluations[-2:]
    assert reached.mean_return >= untrained + 3.0
    assert after.policy_version == reached.policy_version > 0
    assert result.env_steps == reached.env_steps < 6000


def test_environments_appear_where_the_batcher_wants_them() -> None:
    env = DeviceEnvFactory(CountingEnv, "sim:1")(n_envs=2, seed=0)
    assert env.device == torch.device("sim:1")
    native = DeviceEnvFactory(CountingEnv, "sim:1")(n_envs=2, seed=0, device="sim:1")
    assert isinstance(native, CountingEnv)


def create_three(n_envs: int, seed: int) -> GymEnv:
    return create_env(3, seed)


def test_another_number_of_environments_is_reported_with_the_settings_that_fit() -> None:
    config = dataclasses.replace(SMALL, n_env_steps=100, n_processes=2, n_envs=2)
    with pytest.warns(UserWarning, match="create_env") as caught:
        train(config, create_model, ActorCriticAgent, create_three)
    assert [warning.filename for warning in caught] == [__file__] * 2
    evaluating, collecting = (str(warning.message) for warning in caught)
    assert "(n_envs=4, …) returned 3 environments, expected 4." in evaluating
    assert "or set evaluation_episodes=3 in" in evaluating
    assert "(n_envs=2, …) returned 6 environments in 2 processes, expected 4." in collecting
    assert "or set n_envs=3 in" in collecting
    train(dataclasses.replace(config, n_envs=3, evaluation_episodes=3), create_model, ActorCriticAgent, create_three)


@pytest.mark.parametrize("compiled", [False, True])
def test_collecting_compiles_the_agent_if_asked_to_and_evaluating_never(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlstruct.algos.training.build.RL_Batcher", lambda *args, **settings: settings)
    config = dataclasses.replace(SMALL, compile_agent=compiled)
    collecting, evaluating = create_batchers(config, ActorCriticAgent, create_env, {}, create_model(), 0)
    made: list[Any] = [collecting(), evaluating()]  # what they would make a batcher with
    assert made[0]["compile_agent"] is compiled
    assert not made[1].get("compile_agent")


def test_without_bootstrap_the_baseline_is_not_asked_about_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the baseline was called")

    monkeypatch.setattr(reinforce, "replay_with_next_values", refuse)
    assert train_small(n_env_steps=200, bootstrap=False).env_steps >= 200
    with pytest.raises(AssertionError, match="was called"):
        train_small(n_env_steps=200)


def test_no_two_runs_and_no_two_batchers_share_an_environment() -> None:
    seen: list[int] = []

    def recording_env(n_envs: int, seed: int) -> GymEnv:
        seen.extend(range(seed, seed + n_envs))
        return create_env(n_envs, seed)

    for seed in (0, 1):
        config = dataclasses.replace(SMALL, n_env_steps=1, seed=seed)
        train(config, create_model, ActorCriticAgent, recording_env)
    assert len(seen) == 2 * (SMALL.n_envs + SMALL.evaluation_episodes)
    assert len(set(seen)) == len(seen)


def test_a_network_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"create_model is a network, ActorCritic, expected .* Pass lambda: ActorCri"):
        train(SMALL, create_model(), ActorCriticAgent, create_env)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"create_model": lambda: None}, "create_model returned NoneType, expected a torch.nn.Module"),
        ({"create_model": ActorCritic}, "create_model is called as create_model.., but missing a required argument"),
        ({"run": "mine"}, "run is 'mine', expected a RunFolder, or None"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], says: str) -> None:
    given = {"create_model": create_model, "create_agent": ActorCriticAgent, "create_env": create_env}
    with pytest.raises(TypeError, match=says):
        train(SMALL, **{**given, **change})  # type: ignore[arg-type]


def test_a_network_with_dropout_in_train_mode_is_warned_of() -> None:
    def with_dropout() -> ActorCritic:
        model = create_model()
        model.actor.layers.append(torch.nn.Dropout(0.5))
        return model

    config = dataclasses.replace(SMALL, n_env_steps=1)
    with pytest.warns(UserWarning, match=r"ActorCritic has Dropout in train mode: .* Call model.eval\(\)"):
        train(config, with_dropout, ActorCriticAgent, create_env)
    train(config, lambda: with_dropout().eval(), ActorCriticAgent, create_env)  # warnings are errors here


def test_public_names_are_found_in_the_package() -> None:
    assert all(hasattr(algos, name) for name in algos.__all__)
    assert algos.ReinforceConfig is ReinforceConfig
