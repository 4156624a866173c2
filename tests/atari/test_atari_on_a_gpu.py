"""Consoles on a GPU are those on the CPU, bit by bit: all registers, memory, pixels, and what an agent sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("warp", reason="needs the extra warp")

from random_programs import RANDOM, assert_equal, compare_random_programs

from rlstruct import sims
from rlstruct.core import DictTensor

pytestmark = pytest.mark.gpu
DEVICES = ("cpu", "cuda:0")
CARTRIDGES = ["breakout", "surround", "seaquest", "air_raid", "journey_escape", "ms_pacman", "elevator_action",
              "road_runner", "klax", "montezuma_revenge", "robotank"]  # fmt: skip


@pytest.mark.parametrize("mapper", RANDOM)
def test_random_programs_do_the_same(mapper: str) -> None:
    compare_random_programs(mapper, *({"device": device} for device in DEVICES))


@pytest.mark.parametrize("game", CARTRIDGES)
def test_games_do_the_same(game: str) -> None:
    pytest.importorskip("ale_py", reason="needs the extra atari: its ROMs")
    from rlstruct.atari import open_ale, open_consoles

    ale = open_ale(game, 0)
    twins = [open_consoles(game, ale, 40, device) for device in DEVICES]  # in two warps
    plan = torch.from_numpy(np.random.default_rng(0).integers(18, size=(60, 40)).astype(np.int32))
    for frame, actions in enumerate(plan):
        for consoles in twins:
            consoles.run(actions.to(consoles.device), draw=frame % 2 == 0 or frame > 57)
    assert_equal(*twins)


@pytest.mark.parametrize(
    "settings",
    [{"time_limit": 9}, {"gray": False, "size": None, "frame_skip": 2}, {"episodic_lives": True, "draw_all": True}],
    ids=["restarts", "raw colours", "lives"],
)
def test_agents_see_and_get_the_same(settings: dict[str, Any]) -> None:
    pytest.importorskip("ale_py", reason="needs the extra atari: its ROMs")
    twins = [sims.make("ALE/Breakout-v5", n_envs=40, seed=3, device=device, **settings) for device in DEVICES]
    plan = torch.from_numpy(np.random.default_rng(0).integers(4, size=(40, 40)))
    for env in twins:
        env.reset()
    for actions in plan:
        answers = [env.step(DictTensor({"action": actions.to(env.device)})) for env in twins]
        for one, other in zip(*answers, strict=True):  # what was reached, and what comes next
            assert (one[1] == other[1].cpu()).all()
            for key in one[0].keys():
                assert torch.equal(one[0][key], other[0][key].cpu()), key
    states = [vars(env.get_state()) for env in twins]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name].cpu()), name
