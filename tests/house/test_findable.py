"""Phrases that users search for lead to the page that answers them."""

from __future__ import annotations

import math
import re

import pytest
import torch

from checkers import ROOT
from rlstruct import DictTensor
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.agents.model_agent import ModelAgent
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.functional import categorical

ANSWERS = {
    "normalise observations": "questions",
    "action mask": "action_masks",
    "network of two inputs": "action_masks",
    "MultiDiscrete": "action_masks",
    "constants": "action_masks",
    "Dict observation": "action_masks",
    "LSTM": "questions",
    "learning rate schedule": "questions",
    "multi-agent": "questions",
    "own loop": "own_loop",
    "data set": "own_loop",
    "intrinsic rewards": "own_loop",
    "HDF5": "own_loop",
    "Minari": "own_loop",
    "TensorDict": "own_loop",
    "layout of the repository": "how_it_works",
    "lie next to": "how_it_works",
    "keys(n)": "custom_algorithms",
    "delayed updates": "custom_algorithms",
    "notebook": "questions",
    "Mac and Windows": "workers",
}


@pytest.mark.parametrize(("phrase", "page"), ANSWERS.items(), ids=list(ANSWERS))
def test_a_phrase_leads_to_its_page(phrase: str, page: str) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().lower().split())
    assert phrase.lower() in text
    assert f"- {page}.md\n" in (ROOT / "mkdocs.yml").read_text()  # the site's search has the page


def listings() -> dict[str, str]:
    """Return the pieces of programs in docs/questions.md by the class that they define."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "questions.md").read_text(), re.DOTALL)
    return {re.findall(r"class (\w+)", block)[0]: block for block in blocks}


def test_the_lstm_remembers_and_forgets() -> None:
    names = {"ModelAgent": ModelAgent, "torch": torch, "DictTensor": DictTensor, "categorical": categorical}
    exec(listings()["LSTMAgent"], names)
    model = torch.nn.ModuleDict(
        {"lstm": torch.nn.LSTMCell(4, 64), "policy": torch.nn.Linear(64, 2), "value": torch.nn.Linear(64, 1)}
    )
    agent: ModelAgent[torch.nn.ModuleDict] = names["LSTMAgent"](model, stochastic=False)  # type: ignore[operator]
    first = DictTensor({"frame": torch.ones(1, 4), "initial_state": torch.tensor([True])})
    once, state = agent(agent.initial_state(DictTensor(), 1), first, DictTensor())
    fresh, _ = agent(state, first, DictTensor())
    first.set("initial_state", torch.tensor([False]))
    later, _ = agent(state, first, DictTensor())
    assert torch.equal(once["action_logits"], fresh["action_logits"])
    assert not torch.equal(once["action_logits"], later["action_logits"])


def test_the_cosine_schedule() -> None:
    names: dict[str, object] = {"PPOLearner": PPOLearner, "math": math}
    exec(listings()["CosinePPO"], names)
    config = PPOConfig(learning_rate=0.1, final_learning_rate_fraction=0.0)
    learner = names["CosinePPO"].create(ActorCritic(4, 2), ActorCriticAgent, config)  # type: ignore[attr-defined]
    for done, share in ((0.0, 1.0), (0.25, 0.5 + math.sqrt(0.125)), (0.5, 0.5), (1.0, 0.0)):
        learner.anneal(done)
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * share, abs=1e-9)
