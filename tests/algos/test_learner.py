"""An agent's outputs along trajectories, the values of what each step reached, and what a policy thinks of actions."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_agents import HistoryAgent
from fake_envs import create_counting_env
from resume_tasks import create_network, create_sim

from rlstruct import RL_Agent, Trajectories, replay_agent
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.algos import a2c, mean_terms
from rlstruct.algos.bootstrapping import replay_with_next_values
from rlstruct.algos.training.loop import run_training
from rlstruct.batchers import RL_Batcher


def make_agent(kind: str, model: Any) -> RL_Agent:
    return ActorCriticAgent(model) if kind == "feed-forward" else RecurrentAgent(model)


def collect(create_agent: Any, agent_args: dict[str, Any], auto_reset: bool) -> Trajectories:
    env_args = {"n_envs": 3, "auto_reset": auto_reset}
    with RL_Batcher(9, create_agent, create_counting_env, agent_args=agent_args, env_args=env_args, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    assert trajectories is not None
    return trajectories


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("kind", ["feed-forward", "recurrent"])
def test_next_values_are_the_values_one_step_later_and_exact_at_every_end(kind: str, auto_reset: bool) -> None:
    model = ActorCritic(3, 2) if kind == "feed-forward" else RecurrentActorCritic(3, 2, n_hidden=8)
    trajectories = collect(make_agent, {"kind": kind, "model": model}, auto_reset)
    agent, steps, mask = make_agent(kind, model), trajectories.steps, trajectories.mask()
    replayed, values = replay_with_next_values(agent, trajectories)
    assert replayed["value"].requires_grad
    assert not values.requires_grad
    assert torch.equal(replayed.lengths, trajectories.lengths)
    expected = replay_agent(agent, trajectories)
    assert replayed.keys() == expected.keys()
    for key in expected.keys():
        torch.testing.assert_close(replayed[key][mask], expected[key][mask], rtol=0, atol=1e-6)
    goes_on = mask[:, 1:] & ~steps["observation/initial_state"][:, 1:]
    stored = steps["action/value"][:, 1:]
    torch.testing.assert_close(values[:, :-1][goes_on], stored[goes_on], rtol=0, atol=1e-6)
    ends = steps["_observation/done"] & mask
    assert ends.sum().item() >= 3
    for b, t in ends.nonzero().tolist():
        state, first = agent.initial_state(trajectories.info, 1), t
        while not steps["observation/initial_state"][b, first]:
            first -= 1
        for now in range(first, t + 1):
            _, state = agent(state, row_of(steps, "observation/", b, now), trajectories.info)
        output, _ = agent(state, row_of(steps, "_observation/", b, t), trajectories.info)
        torch.testing.assert_close(values[b, t], output["value"][0].detach(), rtol=0, atol=1e-6)


def row_of(steps: Any, prefix: str, b: int, t: int) -> Any:
    return steps.temporal_index(t).truncate_key(prefix).slice(b)


def test_agents_that_want_a_history_are_refused_by_name() -> None:
    trajectories = collect(HistoryAgent, {}, True)
    with pytest.raises(ValueError, match="bootstrapping: HistoryAgent requires a history"):
        replay_with_next_values(HistoryAgent(), trajectories)


class Unreplayed(a2c.A2CLearner):
    """Computes its loss from what was collected, which is wrong."""

    def terms(self, batch: Any) -> Any:
        return {"loss": -batch.steps["action/log_probability"].mean()}


class LearningFromACopy(a2c.A2CLearner):
    """Computes its loss from a copy of the network."""

    def terms(self, batch: Any) -> Any:
        network = copy.deepcopy(self.model)
        return {"loss": network(batch.steps["observation/frame"].flatten(0, 1))[1].mean()}


def test_counts_among_the_terms_are_averaged() -> None:
    steps = [{"n_wrong": torch.tensor(n), "all": torch.tensor(n > 3)} for n in (3, 4)]
    assert {name: float(mean) for name, mean in mean_terms(steps).items()} == {"n_wrong": 3.5, "all": 0.5}


def test_a_term_of_some_gradient_steps_is_averaged_over_those() -> None:
    steps = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0), "actor_loss": torch.tensor(5.0)}]
    assert {name: float(mean) for name, mean in mean_terms(steps).items()} == {"loss": 1.5, "actor_loss": 5.0}


@pytest.mark.parametrize(
    ("learner_class", "says"),
    [
        (Unreplayed, r"Unreplayed.terms: the loss carries no gradient.*replay_agent"),
        (LearningFromACopy, r"LearningFromACopy.terms: the loss depends on none of the 12 weights"),
    ],
)
def test_a_loss_that_trains_nothing_names_the_mend(learner_class: type[a2c.A2CLearner], says: str) -> None:
    model = ActorCritic(3, 2)
    learner = learner_class.create(model, ActorCriticAgent, a2c.A2CConfig())
    trajectories = collect(make_agent, {"kind": "feed-forward", "model": model}, True)
    with pytest.raises(ValueError, match=says):
        learner.update(trajectories, 0.0)


def test_a_gradient_in_another_memory_layout_moves_the_weights_as_in_their_own() -> None:
    moved = []
    for transposed in (False, True):
        torch.manual_seed(0)
        learner = a2c.A2CLearner.create(ActorCritic(4, 2, hidden=(8,)), ActorCriticAgent, a2c.A2CConfig())
        gradient = {str(i): torch.randn_like(weight) for i, weight in enumerate(learner.model.parameters())}
        if transposed:
            gradient = {i: one.t().contiguous().t() for i, one in gradient.items()}
        for _ in range(2):
            learner.descend({"loss": torch.zeros(())}, gradient)
        moved.append([weight.detach() for weight in learner.model.parameters()])
    assert all(map(torch.equal, *moved))


class Drawing(a2c.A2CLearner):
    """Draws keys in each update: for the batch, and for each of three gradient steps."""

    def update(self, *given: Any) -> dict[str, torch.Tensor]:
        self._drawn: list[torch.Tensor] = []
        return super().update(*given)

    def prepare(self, trajectories: Trajectories) -> Any:
        self._drawn.append(self.keys(2))
        return super().prepare(trajectories)

    def minibatches(self, prepared: Any) -> Any:
        for batch in [*super().minibatches(prepared)] * 3:
            self._drawn.append(self.keys(4))
            yield batch

    def draw(self, trajectories: Trajectories) -> torch.Tensor:
        self.update(trajectories, 0.5)
        return torch.cat(self._drawn)


def test_random_keys_are_all_different_and_continue_from_a_checkpoint() -> None:
    batch = collect(make_agent, {"kind": "feed-forward", "model": ActorCritic(3, 2)}, True)
    config = a2c.A2CConfig(n_timesteps=9, n_envs=3)
    one, again, other = (
        Drawing.create(ActorCritic(3, 2), ActorCriticAgent, settings)
        for settings in (config, config, replace(config, seed=1))
    )
    first, state = one.draw(batch), one.state_dict()
    second = one.draw(batch)
    assert first.dtype == torch.int64
    assert len(first) % 14 == 0
    assert len(torch.cat([first, second, other.draw(batch)]).unique()) == 3 * len(first)
    again.load_state_dict(state)
    assert torch.equal(again.draw(batch), second)


def wrong(learner: a2c.A2CLearner, kind: str) -> Any:
    loss = sum(weight.square().sum() for weight in learner.model.parameters())
    return {
        "nothing": None,
        "other names": {"losses": loss, "entropy": loss},
        "a loss of each step": {"loss": loss.expand(3)},
        "a number": {"loss": loss, "entropy": loss.item()},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("nothing", KeyError, r"Wrong\.terms: it returned None, expected a dict with 'loss'"),
        ("other names", KeyError, r"Wrong\.terms: it returned \['entropy', 'losses'\], expected .* 'loss'"),
        (
            "a loss of each step",
            ValueError,
            r"Wrong\.terms: 'loss' has shape \[3\], expected a single number.*masked_mean",
        ),
        ("a number", TypeError, r"Wrong\.terms: 'entropy' is \d+.*, a float, expected a tensor.*Remove item\(\)"),
    ],
)
def test_terms_that_cannot_be_learnt_from_are_named(kind: str, error: type[Exception], match: str) -> None:
    class Wrong(a2c.A2CLearner):
        def terms(self, batch: Any) -> Any:
            return wrong(self, kind)

    learner = Wrong.create(ActorCritic(3, 2), ActorCriticAgent, a2c.A2CConfig())
    with pytest.raises(error, match=match):
        learner.update(collect(make_agent, {"kind": "feed-forward", "model": learner.model}, True), 0.0)


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        (0.5, TypeError, r"Wrong\.update: 'more' is 0\.5, a float, expected a tensor on the learner's device"),
        (torch.ones(4), ValueError, r"Wrong\.update: 'more' has shape \[4\], expected a single number"),
    ],
)
def test_results_of_an_update_that_cannot_be_logged_are_named(more: Any, error: type[Exception], match: str) -> None:
    class Wrong(a2c.A2CLearner):
        def update(self, trajectories: Trajectories, fraction_done: float) -> Any:
            return {**super().update(trajectories, fraction_done), "more": more}

    settings: dict[str, Any] = {"n_timesteps": 5, "n_envs": 2, "n_env_steps": 100, "evaluation_timesteps": 5}
    config = a2c.A2CConfig(**settings, evaluation_processes=0, n_processes=0)
    with pytest.raises(error, match=match):
        run_training(Wrong, config, create_network, ActorCriticAgent, create_sim)
