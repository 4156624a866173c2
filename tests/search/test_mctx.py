"""Searches of random games find what mctx finds: the same visits, values and policies."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from random_models import CASES, Case, tables
from torch import Tensor

from rlstruct.search import SearchConfig, TreeSearch
from rlstruct.search.selection import considered_visits, mask_logits
from rlstruct.testing import forbid_host_sync

ANSWERS = np.load(pathlib.Path(__file__).with_name("mctx_answers.npz"))


class Tables:
    """The random games of a case, one for each environment."""

    def __init__(self, case: Case, number: int, device: torch.device) -> None:
        self.tables = {name: torch.as_tensor(table).to(device) for name, table in tables(case, number).items()}
        self.rows = torch.arange(case.n_games, device=device)

    def advance(self, state: dict[str, Tensor], action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        at = self.rows, state["number"], action
        child, reward, discount = (self.tables[name][at] for name in ("child", "reward", "discount"))
        return {"number": child}, reward, discount

    def evaluate(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        at = self.rows, state["number"]
        return self.tables["logits"][at], self.tables["value"][at]


@pytest.mark.parametrize("backend", ["torch", "warp"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_finds_what_mctx_finds(number: int, backend: Any, device: torch.device) -> None:
    if backend == "warp":
        pytest.importorskip("warp", reason="needs the extra warp")
    case = CASES[number]
    games = Tables(case, number, device)
    config = SearchConfig(
        method=case.method,
        n_simulations=case.n_simulations,
        max_depth=case.max_depth,
        n_considered=case.n_considered,
        backend=backend,
    )
    search = TreeSearch(games, config, device=device)
    state = {"number": torch.zeros_like(games.rows)}
    with forbid_host_sync():
        logits, value = games.evaluate(state)
        found = search.run(state, mask_logits(logits), value, games.tables["noise"], games.rows)
    answer = {name: torch.as_tensor(ANSWERS[f"{number}/{name}"]) for name in ("visits", "value", "policy", "action")}
    assert torch.equal(found.visits.cpu(), answer["visits"].double())
    torch.testing.assert_close(found.value.cpu(), answer["value"].double(), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.policy.cpu(), answer["policy"].double(), rtol=0.0, atol=1e-6)
    if case.method == "gumbel":
        assert torch.equal(found.action.cpu(), answer["action"].long())
    assert (found.visits.sum(1) == case.n_simulations).all()


def test_a_thousand_games_for_each_method_stand_in_the_file() -> None:
    for method in ("puct", "gumbel"):
        numbers = [i for i, case in enumerate(CASES) if case.method == method]
        assert sum(len(ANSWERS[f"{i}/value"]) for i in numbers) == 1000


def test_sequential_halving_takes_the_turns_of_mctx() -> None:
    plans = [key.split("/")[1:] for key in ANSWERS if key.startswith("plan/")]
    assert len(plans) == 17 * 7
    for n_considered, n in plans:
        assert considered_visits(int(n_considered), int(n)) == tuple(ANSWERS[f"plan/{n_considered}/{n}"].tolist())
    # Eight actions, 24 simulations: one each in three phases of 8 would be 24; 8 = 1 * 8, 2 * 4, 4 * 2.
    assert considered_visits(8, 24) == (0,) * 8 + (1,) * 4 + (2,) * 4 + (3, 3, 4, 4, 5, 5, 6, 6)
