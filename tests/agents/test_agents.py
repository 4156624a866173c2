from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_observations import observe
from torch import Tensor

from rlstruct import DeviceMismatchError, DictTensor
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    QAgent,
    QNetwork,
    RecurrentActorCritic,
    RecurrentAgent,
    RecurrentQNetwork,
)


def make_agent(kind: str, **arguments: Any) -> ActorCriticAgent | RecurrentAgent:
    if kind == "feed-forward":
        return ActorCriticAgent(ActorCritic(4, 3), **arguments)
    return RecurrentAgent(RecurrentActorCritic(4, 3, n_hidden=8), **arguments)


@pytest.mark.parametrize("kind", ["feed-forward", "recurrent"])
def test_outputs_have_the_documented_keys_and_agree_with_each_other(kind: str) -> None:
    agent = make_agent(kind)
    action, _ = agent(agent.initial_state(DictTensor(), 5), observe(5, 4), DictTensor())
    assert set(action.keys()) == {"action", "action_logits", "log_probability", "value"}
    assert action["action"].dtype == torch.int64
    oracle = torch.distributions.Categorical(logits=action["action_logits"])
    torch.testing.assert_close(action["log_probability"], oracle.log_prob(action["action"]))


def test_a_stochastic_agent_follows_its_logits_and_a_deterministic_one_takes_the_best() -> None:
    model = ActorCritic(4, 3)
    with torch.no_grad():
        last = model.actor.layers[-1]
        last.weight.zero_()
        last.bias.copy_(torch.tensor([0.7, 0.2, 0.1]).log())
    observation = observe(4000, 4)
    drawn, _ = ActorCriticAgent(model)(DictTensor(), observation, DictTensor())
    frequencies = torch.bincount(drawn["action"], minlength=3) / 4000
    torch.testing.assert_close(frequencies, torch.tensor([0.7, 0.2, 0.1]), rtol=0, atol=0.03)
    best, _ = ActorCriticAgent(model, stochastic=False)(DictTensor(), observation, DictTensor())
    assert (best["action"] == 0).all()


def test_a_copying_agent_shares_no_storage_and_a_sharing_one_all() -> None:
    model = ActorCritic(4, 3)
    copied, shared = ActorCriticAgent(model), ActorCriticAgent(model, copy_model=False)
    for mine, theirs in zip(model.parameters(), copied.model.parameters(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine, theirs)
    assert shared.model is model


def test_gradients_reach_the_shared_model() -> None:
    model = ActorCritic(4, 3)
    action, _ = ActorCriticAgent(model, copy_model=False)(DictTensor(), observe(5, 4), DictTensor())
    (action["log_probability"].sum() + action["value"].sum()).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_update_copies_the_weights() -> None:
    agent, source = ActorCriticAgent(ActorCritic(4, 3)), ActorCritic(4, 3)
    agent.update(source.state_dict())
    observation = observe(5, 4)
    expected = source(observation["frame"])[1].detach().clone()
    with torch.no_grad():
        for weight in source.parameters():
            weight.fill_(float("nan"))
    action, _ = agent(DictTensor(), observation, DictTensor())
    torch.testing.assert_close(action["value"], expected)


def test_a_copy_moves_and_a_shared_model_must_be_there_already() -> None:
    model = ActorCritic(4, 3)
    moved = ActorCriticAgent(model, device="sim:1")
    assert {weight.device for weight in moved.model.parameters()} == {torch.device("sim:1")}
    assert {weight.device for weight in model.parameters()} == {torch.device("cpu")}
    with pytest.raises(DeviceMismatchError, match=r"the model is on cpu, expected sim:1.*copy_model=True"):
        ActorCriticAgent(model, device="sim:1", copy_model=False)


def test_recurrent_state_starts_again_at_initial_states_only() -> None:
    agent = make_agent("recurrent")
    state = DictTensor({"hidden": torch.randn(2, 8)})
    observation = observe(2, 4)
    observation.set("initial_state", torch.tensor([True, False]))
    _, new_state = agent(state, observation, DictTensor())
    _, from_zero = agent(agent.initial_state(DictTensor(), 2), observation, DictTensor())
    torch.testing.assert_close(new_state["hidden"][0], from_zero["hidden"][0])
    assert not torch.allclose(new_state["hidden"][1], from_zero["hidden"][1])


@pytest.mark.parametrize(
    ("create", "model", "words"),
    [
        (
            ActorCriticAgent,
            torch.nn.Linear(4, 2),
            r"Linear\.forward returned a Tensor, expected \(logits .*, value \[B\]\)",
        ),
        (QAgent, ActorCritic(4, 2), r"ActorCritic\.forward returned 2 values, expected action values \[B, A\]"),
        (
            RecurrentAgent,
            RecurrentQNetwork(4, 2),
            r"RecurrentQNetwork\.forward returned 2 values, expected \(logits .*, hidden \[B, H\]\)",
        ),
    ],
)
def test_a_network_with_other_outputs_is_named(create: Any, model: torch.nn.Module, words: str) -> None:
    agent, B = create(model), 2  # as many rows as ActorCriticAgent needs outputs
    with pytest.raises(TypeError, match=rf"^{create.__name__}: {words}\. help\({create.__name__}\) names a network"):
        agent(agent.initial_state(DictTensor(), B), observe(B, 4), DictTensor())


class Converting(torch.nn.Module):
    """A network that returns its two outputs in another form than a tuple."""

    def __init__(self, convert: Callable[[tuple[Tensor, Tensor]], object]) -> None:
        super().__init__()
        self.network, self.convert = ActorCritic(4, 2), convert

    def forward(self, frame: Tensor) -> object:
        return self.convert(self.network(frame))


@pytest.mark.parametrize("convert", [list, iter])
def test_outputs_may_be_any_iterable(convert: Callable[[Any], object]) -> None:
    model, observation = Converting(convert), observe(2, 4)
    (action, _), (expected, _) = (
        ActorCriticAgent(network)(DictTensor(), observation, DictTensor()) for network in (model, model.network)
    )
    assert torch.equal(action["action_logits"], expected["action_logits"])
    assert torch.equal(action["value"], expected["value"])


class OwnAgent(ActorCriticAgent):
    """A user's agent, whose documentation names no network."""


@pytest.mark.parametrize("create", [OwnAgent, QAgent])
@pytest.mark.parametrize(
    ("convert", "kind"),
    [
        (lambda pair: None, "a NoneType"),
        (lambda pair: dict(zip(("logits", "value"), pair, strict=True)), "a dict"),
        (lambda pair: DictTensor({"logits": pair[0], "value": pair[1]}), "a DictTensor"),
    ],
)
def test_outputs_with_names_or_none_are_refused(create: Any, convert: Callable[[Any], object], kind: str) -> None:
    agent, bundled = create(Converting(convert)), "QAgent" if create is QAgent else "ActorCriticAgent"
    words = rf"^{create.__name__}: Converting\.forward returned {kind}, expected .* help\({bundled}\) names a network"
    with pytest.raises(TypeError, match=words):
        agent(DictTensor(), observe(2, 4), DictTensor())


@pytest.mark.parametrize(
    ("create", "model", "words"),
    [
        (QAgent, QNetwork, r"model is the class QNetwork, expected a torch\.nn\.Module\. Create one: QNetwork\("),
        (QAgent, "mlp", r"model is a str, expected a torch\.nn\.Module"),
    ],
)
def test_a_model_that_is_no_network_is_refused_at_once(create: Any, model: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^{create.__name__}: {words}"):
        create(model)


def test_a_network_without_a_hidden_size_is_refused_where_it_is_read() -> None:
    agent: Any = RecurrentAgent(torch.nn.Linear(4, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^RecurrentAgent: model is a Linear without the attribute 'n_hidden'"):
        agent.initial_state(DictTensor(), 2)


class LongShortTerm(torch.nn.LSTMCell):
    """A recurrent network whose state is two tensors, and which lacks ``n_hidden``."""

    def forward(self, frame: Tensor, state: Any) -> Any:
        return super().forward(frame, state)


class LongShortTermAgent(RecurrentAgent):
    """An agent that overrides all methods in which its base uses the network."""

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"hidden": torch.zeros(B, 3, device=self.device), "cell": torch.ones(B, 3)})

    def __call__(self, state: DictTensor, observation: DictTensor, *others: object) -> tuple[DictTensor, DictTensor]:
        hidden, cell = self.model(observation["frame"], (state["hidden"], state["cell"]))
        return DictTensor({"action": hidden.argmax(1)}), DictTensor({"hidden": hidden, "cell": cell})


class WithPrediction(RecurrentActorCritic):
    """A recurrent network with one more output than its base."""

    def forward(self, frame: Tensor, hidden: Tensor) -> Any:
        policy, value, hidden = super().forward(frame, hidden)
        return policy, value, 2 * value, hidden


class PredictingAgent(RecurrentAgent):
    """An agent that chooses by itself, and keeps the promise of its base."""

    pure = True
    action_form = "index"

    def choose(self, policy: Tensor, value: Tensor, predicted: Tensor, observation: DictTensor) -> DictTensor:
        return DictTensor({"action": policy.argmax(1), "value": value, "predicted": predicted})


def test_subclasses_of_a_recurrent_agent_use_networks_of_their_own() -> None:
    observation = observe(2, 4)
    two_states: Any = LongShortTermAgent(LongShortTerm(4, 3))  # type: ignore[arg-type]
    action, state = two_states(two_states.initial_state(DictTensor(), 2), observation, DictTensor())
    assert action["action"].shape == (2,)
    assert state["cell"].shape == (2, 3)
    predicting = PredictingAgent(WithPrediction(4, 3, n_hidden=8))
    for act in (predicting, torch.compile(predicting, backend="eager", fullgraph=True)):
        action, _ = act(predicting.initial_state(DictTensor(), 2), observation, DictTensor())
        assert torch.equal(action["predicted"], 2 * action["value"])
    broken: Any = PredictingAgent(torch.nn.GRUCell(4, 8))  # type: ignore[arg-type]
    broken.model.n_hidden = 8
    with pytest.raises(TypeError, match=r"returned a Tensor, expected \(…, hidden \[B, H\]\)\. help\(RecurrentAgent\)"):
        broken(broken.initial_state(DictTensor(), 2), observation, DictTensor())
