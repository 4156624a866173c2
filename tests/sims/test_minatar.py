"""The five games against the package `minatar`: transitions from injected states, with the same random draws.

The package's objects are filled with a state of ours, take one step with the numbers that ours drew, and must agree in
reward, end, frame and every timer. States come from random play whose fields are stirred again and again.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from rlstruct.core import DictTensor
from rlstruct.functional.random import child_key, randint, uniform
from rlstruct.sims import make
from rlstruct.sims.freeway import draw_speeds

logging.disable(logging.WARNING)  # the package imports seaborn, to draw; what that says is none of our business
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("minatar")
logging.disable(logging.NOTSET)

GAMES = ["breakout", "asterix", "freeway", "seaquest", "space_invaders"]
B = 500

State = dict[str, Any]  # one row: field to numpy array or number


def title(game: str) -> str:
    return game.title().replace("_", "") + "-MinAtar"


class Scripted:
    """Stands in for numpy's RandomState: gives the numbers that our simulator drew."""

    def __init__(self, floats: list[Any], ints: list[Any]) -> None:
        self.floats, self.ints = floats, ints

    def rand(self, *size: int) -> Any:
        return self.floats.pop(0)

    def randint(self, *args: Any, **kwargs: Any) -> Any:
        return self.ints.pop(0)


def fill_breakout(env: Any, s: State) -> None:
    env.ball_x, env.ball_y, env.ball_dir, env.pos = s["ball_x"], s["ball_y"], s["ball_dir"], s["pos"]
    env.strike, env.last_x, env.last_y = bool(s["strike"]), s["last_x"], s["last_y"]
    env.brick_map = np.zeros((10, 10))
    env.brick_map[1:4] = np.array([(int(s["bricks"]) >> i) & 1 for i in range(30)]).reshape(3, 10)


def fill_asterix(env: Any, s: State) -> None:
    for name in ("player_x", "player_y", "spawn_speed", "spawn_timer", "move_speed", "move_timer"):
        setattr(env, name, int(s[name]))
    env.ramp_timer, env.ramp_index = int(s["ramp_timer"]), int(s["ramp_index"])
    env.entities = [
        [int(s["x"][i]), i + 1, bool(s["to_right"][i]), bool(s["gold"][i])] if s["there"][i] else None for i in range(8)
    ]


def fill_freeway(env: Any, s: State) -> None:
    env.pos, env.move_timer, env.terminate_timer = int(s["pos"]), int(s["move_timer"]), int(s["terminate_timer"])
    env.cars = [[int(s["x"][i]), i + 1, int(s["timer"][i]), int(s["speed"][i])] for i in range(8)]


def fill_space_invaders(env: Any, s: State) -> None:
    env.pos, env.alien_dir = int(s["pos"]), int(s["alien_dir"])
    boards = [(s[name][:, None] >> np.arange(10) & 1).astype(float) for name in ("bullets", "alien_bullets", "aliens")]
    env.f_bullet_map, env.e_bullet_map, env.alien_map = boards
    env.enemy_move_interval, env.alien_move_timer = int(s["move_interval"]), int(s["move_timer"])
    env.alien_shot_timer, env.shot_timer = int(s["alien_shot_timer"]), int(s["shot_timer"])


def listed(slots: np.ndarray) -> list[list[int]]:
    """The things of a row of slots, in the order of their births."""
    things = sorted(slots.T.tolist())
    return [thing[1:] for thing in things if thing[0] > 0]


def fill_seaquest(env: Any, s: State) -> None:
    env.sub_x, env.sub_y, env.sub_or = int(s["x"]), int(s["y"]), bool(s["to_right"])
    env.oxygen, env.diver_count, env.surface = int(s["oxygen"]), int(s["diver_count"]), bool(s["at_surface"])
    env.shot_timer, env.e_spawn_speed, env.e_spawn_timer = (
        int(s[k]) for k in ("shot_timer", "spawn_speed", "spawn_timer")
    )
    env.d_spawn_timer, env.move_speed, env.ramp_index = (int(s[k]) for k in ("diver_timer", "move_speed", "ramp_index"))
    env.f_bullets = [[x, y, bool(right)] for x, y, right in listed(s["bullets"])]
    env.divers = [[x, y, bool(right), timer] for x, y, right, timer in listed(s["divers"])]
    enemies = listed(s["enemies"])
    env.e_fish = [[x, y, bool(right), timer] for x, y, right, timer, sub, _ in enemies if not sub]
    env.e_subs = [[x, y, bool(right), timer, shot] for x, y, right, timer, sub, shot in enemies if sub]
    left, right = s["enemy_bullets"]
    env.e_bullets = [
        [int(x), int(y), side] for side, board in ((False, left), (True, right)) for y, x in np.argwhere(board)
    ]


def read(game: str, env: Any) -> Any:
    """All that the package's object holds, in a form that compares."""
    if game == "breakout":
        names = ("ball_x", "ball_y", "ball_dir", "pos", "strike", "last_x", "last_y")
        return [int(getattr(env, n)) for n in names], env.brick_map.tolist()
    if game == "asterix":
        names = ("player_x", "player_y", "spawn_speed", "spawn_timer", "move_speed", "move_timer", "ramp_timer")
        return [getattr(env, n) for n in names], env.ramp_index, env.entities
    if game == "freeway":
        return env.pos, int(env.move_timer), env.terminate_timer, [[int(v) for v in car] for car in env.cars]
    if game == "space_invaders":
        names = ("pos", "alien_dir", "enemy_move_interval", "alien_move_timer", "alien_shot_timer", "shot_timer")
        maps = [m.astype(bool).tolist() for m in (env.f_bullet_map, env.e_bullet_map, env.alien_map)]
        return [int(getattr(env, n)) for n in names], maps
    names = (
        "sub_x",
        "sub_y",
        "sub_or",
        "oxygen",
        "diver_count",
        "surface",
        "shot_timer",
        "e_spawn_speed",
        "move_speed",
    )
    more = ("e_spawn_timer", "d_spawn_timer", "ramp_index")
    bullets = sorted({tuple(int(v) for v in b) for b in env.e_bullets})  # order and number in a cell matter nowhere
    lists = [
        [[int(v) for v in thing] for thing in getattr(env, n)] for n in ("f_bullets", "divers", "e_fish", "e_subs")
    ]
    return [int(getattr(env, n)) for n in names + more], bullets, lists


def script(game: str, s: State, drawn: np.ndarray) -> Scripted:
    """Return the drawn numbers, in the order in which the package asks for them."""
    if game == "asterix" and s["spawn_timer"] == 0:
        empty = 8 - int(s["there"].sum())
        return Scripted([drawn[0], drawn[1]], [int(drawn[2] * np.float32(empty))])
    if game == "freeway":
        return Scripted([(drawn > 0).astype(float)], [np.abs(drawn)])
    if game == "seaquest":
        enemy = ([drawn[0], drawn[1]], [1 + int(drawn[2] * np.float32(8))]) if s["spawn_timer"] == 0 else ([], [])
        diver = ([drawn[3]], [1 + int(drawn[4] * np.float32(8))]) if s["diver_timer"] == 0 else ([], [])
        return Scripted(enemy[0] + diver[0], enemy[1] + diver[1])
    return Scripted([], [])


def draws(game: str, key: torch.Tensor) -> np.ndarray:
    if game == "freeway":
        return draw_speeds(key).numpy()
    return uniform(key, (5 if game == "seaquest" else 3,), stream=0).numpy()


def rows_of(state: Any) -> list[State]:
    columns = {field.name: getattr(state, field.name).numpy() for field in fields(state)}
    return [{name: column[b] for name, column in columns.items()} for b in range(B)]


def stirred(game: str, state: Any, key: torch.Tensor) -> Any:
    """The same states, with the player elsewhere and timers near their ends, in half of the rows."""
    some = randint(child_key(key, 0), 2) == 1

    def drawn(n: int, low: int, high: int, old: torch.Tensor) -> torch.Tensor:
        return torch.where(some, low + randint(child_key(key, n), high - low), old)

    if game == "breakout":
        bricks = state.bricks & drawn(1, 0, 1 << 30, state.bricks)
        bricks = torch.where(randint(child_key(key, 9), 8) == 0, 0, bricks)
        y = drawn(3, 3, 9, state.ball_y)
        return replace(
            state, pos=drawn(4, 0, 10, state.pos), bricks=bricks, ball_x=drawn(2, 0, 10, state.ball_x), ball_y=y
        )
    if game == "asterix":
        moved = {"player_x": drawn(1, 0, 10, state.player_x), "player_y": drawn(2, 1, 9, state.player_y)}
        speeds = {"spawn_speed": drawn(3, 1, 5, state.spawn_speed), "move_speed": drawn(4, 1, 3, state.move_speed)}
        timers = {"spawn_timer": drawn(5, 0, 3, state.spawn_timer), "ramp_timer": drawn(6, -1, 3, state.ramp_timer)}
        return replace(state, **moved, **speeds, **timers, ramp_index=drawn(7, 0, 9, state.ramp_index))
    if game == "freeway":
        timers = {
            "move_timer": drawn(2, 0, 3, state.move_timer),
            "terminate_timer": drawn(3, 0, 9, state.terminate_timer),
        }
        return replace(state, pos=drawn(1, 1, 10, state.pos), **timers)
    if game == "space_invaders":
        few = ((randint(child_key(key, 1), 16, (10, 10)) == 0) << torch.arange(10)).sum(2)
        aliens = torch.where(some.unsqueeze(1), state.aliens & few, state.aliens)
        aliens = torch.where((aliens == 0).all(1, keepdim=True), state.aliens, aliens)
        lower = (randint(child_key(key, 6), 3) == 0).unsqueeze(1)
        aliens = torch.where(lower, aliens.roll(5, 1), aliens)
        timers = {
            "move_timer": drawn(2, 0, 3, state.move_timer),
            "alien_shot_timer": drawn(3, 0, 3, state.alien_shot_timer),
        }
        return replace(
            state, aliens=aliens, pos=drawn(4, 0, 10, state.pos), **timers, shot_timer=state.shot_timer * ~some
        )
    where = {"x": drawn(1, 1, 9, state.x), "y": drawn(2, 0, 9, state.y)}
    few = (state.divers[:, 0] > 0).sum(1) < 3  # in play there are never more than three
    diver_timer = torch.where(few, drawn(4, 0, 5, state.diver_timer), state.diver_timer.clamp_min(5))
    timers = {"spawn_timer": drawn(3, 0, 2, state.spawn_timer), "diver_timer": diver_timer}
    speeds = {"spawn_speed": drawn(5, 1, 4, state.spawn_speed), "move_speed": drawn(6, 2, 6, state.move_speed)}
    air = {"oxygen": drawn(7, 0, 201, state.oxygen), "diver_count": drawn(8, -1, 7, state.diver_count)}
    few = (state.bullets[:, 0] > 0).sum(1) < 3  # the same holds for bullets
    shot_timer = torch.where(few, state.shot_timer * ~some, state.shot_timer.clamp_min(5))
    return replace(state, **where, **timers, **speeds, **air, shot_timer=shot_timer)


def compare(game: str, n_transitions: int) -> None:
    module = importlib.import_module(f"minatar.environments.{game}")
    theirs, after = module.Env(ramping=True), module.Env(ramping=True)
    fill = globals()[f"fill_{game}"]
    env = make(title(game), B, minimal_actions=False, seed=7)
    env.reset()
    ended = rewarded = 0
    for t in range(n_transitions // B):
        stir = child_key(torch.arange(B), t)
        before = env.get_state()
        if t % 3 == 0:
            before = stirred(game, before, stir)
        action, key = randint(child_key(stir, 20), 6), child_key(stir, 21)
        state, reward, terminated = env.play(before, action, key)
        frames, drawn = env.observe(state).numpy(), draws(game, key)
        for b, (old, new) in enumerate(zip(rows_of(before), rows_of(state), strict=True)):
            theirs.random, theirs.terminal = script(game, old, drawn[b]), False
            fill(theirs, old)
            got = theirs.act(int(action[b]))
            assert (float(reward[b]), bool(terminated[b])) == (float(got[0]), bool(got[1])), (t, b, old)
            assert (frames[b] == theirs.state()).all(), (t, b, old)
            fill(after, new)
            assert read(game, after) == read(game, theirs), (t, b, old)
        ended += int(terminated.sum())
        rewarded += int((reward > 0).sum())
        fresh = env.initial(child_key(stir, 22))  # ended games begin anew
        done = terminated
        mixed = {
            f.name: torch.where(
                done.view(-1, *[1] * (getattr(state, f.name).dim() - 1)), getattr(fresh, f.name), getattr(state, f.name)
            )
            for f in fields(state)
        }
        env.set_state(None, type(state)(**mixed))
    assert ended > n_transitions // 500
    assert rewarded > n_transitions // 500


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize(
    "n_transitions", [10_000, pytest.param(100_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)])]
)
def test_equals_the_package_in_every_transition(game: str, n_transitions: int) -> None:
    compare(game, n_transitions)


@pytest.mark.parametrize("game", GAMES)
def test_begins_as_the_package_does(game: str) -> None:
    module = importlib.import_module(f"minatar.environments.{game}")
    env = make(title(game), B)
    first, _ = env.reset()
    state = env.get_state()
    theirs, filled = module.Env(ramping=True), module.Env(ramping=True)
    seen = set()
    for b, row in enumerate(rows_of(state)):
        if game == "breakout":
            theirs.random = Scripted([], [int(row["ball_x"] > 0)])
        if game == "freeway":
            theirs.random = Scripted([(row["speed"] > 0).astype(float)], [np.abs(row["speed"])])
        theirs.reset()
        globals()[f"fill_{game}"](filled, row)
        assert read(game, filled) == read(game, theirs)
        np.testing.assert_array_equal(first["frame"][b].numpy(), theirs.state())
        seen.add(first["frame"][b].numpy().tobytes())
    assert len(seen) == {"breakout": 2, "freeway": B}.get(game, 1)
    assert list(env.useful_actions) == sorted(theirs.minimal_action_set())
    assert dict(enumerate(env.channels)) == {number: name for name, number in theirs.channels.items()}


def test_an_action_sticks_with_its_probability() -> None:
    env = make("Breakout-MinAtar", 4000, sticky_probability=0.25, time_limit=1000)
    env.reset()
    env.step(DictTensor({"action": torch.full((4000,), 1)}))  # left: 3, but for those that stick to nothing
    moved = (env.get_state().pos == 3).double().mean()
    assert abs(moved - 0.75) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    last = env.get_state().last_action
    env.step(DictTensor({"action": torch.full((4000,), 2)}))
    stuck = (env.get_state().last_action == last).double().mean()
    assert abs(stuck - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5


def test_without_ramping_it_never_gets_harder() -> None:
    for game, hard in (("asterix", "spawn_speed"), ("seaquest", "spawn_speed"), ("space_invaders", "move_interval")):
        env = make(title(game), 200, ramping=False, minimal_actions=False)
        env.reset()
        start = getattr(env.get_state(), hard)
        for t in range(150):
            env.step(DictTensor({"action": randint(child_key(torch.arange(200), t), 6)}))
        assert torch.equal(getattr(env.get_state(), hard), start)
