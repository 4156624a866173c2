"""Atari: what an agent sees and gets is what ale-py shows and gives, behind gymnasium's preprocessing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("warp", reason="needs the extra warp")
pytest.importorskip("ale_py", reason="needs the extra atari: its ROMs are the oracle")
pytest.importorskip("cv2", reason="AtariPreprocessing needs OpenCV")

import ale_py
import gymnasium

from rlstruct import sims
from rlstruct.atari import Atari, open_ale, read_ale_state, write_ale_state
from rlstruct.atari.ale_game import read_palette
from rlstruct.atari.games import RULES
from rlstruct.atari.picture import area_weights
from rlstruct.atari.rules import DROPS, Rules, tables
from rlstruct.atari.scoring import OVER, Scorer
from rlstruct.core import DictTensor
from rlstruct.engine.compiled import compiling_simulators
from rlstruct.testing import check_vec_env


def gymnasiums(game: str, *, gray: bool = True, lives: bool = False, size: int = 84, frame_skip: int = 4) -> Any:
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(
        env, noop_max=0, grayscale_obs=gray, terminal_on_life_loss=lives, screen_size=size, frame_skip=frame_skip
    )
    return gymnasium.wrappers.FrameStackObservation(env, 4)


@pytest.mark.parametrize(
    ("game", "n_steps", "settings"),
    [
        ("Breakout", 200, {}),  # to the end of the game
        ("Breakout", 800, {"frame_skip": 1}),
        ("Pong", 30, {"gray": False}),
        ("Pong", 20, {"size": 110}),
        ("Pong", 20, {"size": 72, "gray": False}),
        ("AirRaid", 30, {}),  # European: 250 lines
        ("Seaquest", 120, {"episodic_lives": True}),  # to the first life
    ],
)
def test_observations_are_gymnasiums_bit_by_bit(game: str, n_steps: int, settings: dict[str, Any]) -> None:
    shown = {name: value for name, value in settings.items() if name != "episodic_lives"}
    oracle = gymnasiums(game, lives=settings.get("episodic_lives", False), **shown)
    frame, _ = oracle.reset(seed=0)
    env = Atari(game, 1, noop_max=0, sticky=0.0, auto_reset=False, **settings)
    env.reset()
    seen, _ = env.set_state(None, env.state_of([oracle.unwrapped.ale]))
    assert (seen["frame"][0].numpy() == frame).all()
    actions = np.random.default_rng(0).integers(oracle.action_space.n, size=n_steps).tolist()
    for action in actions:
        frame, reward, terminated, _, _ = oracle.step(action)
        (seen, _), _ = env.step(DictTensor({"action": torch.tensor([action])}))
        assert (seen["frame"][0].numpy() == frame).all()
        assert (float(seen["reward"]), bool(seen["terminated"])) == (reward, terminated)
        if terminated:
            break
    assert terminated == (game in ("Breakout", "Seaquest"))


@pytest.mark.parametrize("gray", [True, False])
def test_raw_frames_are_ales_screen(gray: bool) -> None:
    ale = open_ale("pong", 0)
    settings: dict[str, Any] = {"frame_skip": 1, "size": None, "stack": 1, "gray": gray}
    env = Atari("Pong", 2, noop_max=0, sticky=0.0, auto_reset=False, **settings)
    env.reset()
    for _ in range(20):
        ale.act(env.actions[2])
        (seen, _), _ = env.step(DictTensor({"action": torch.tensor([2, 3])}))
        screen = ale.getScreenGrayscale() if gray else ale.getScreenRGB()
        assert (seen["frame"][0, 0].numpy() == screen).all()
    assert (seen["frame"][0] != seen["frame"][1]).any()


def test_the_contract_holds() -> None:
    check_vec_env(Atari, env_args={"game": "Breakout", "n_envs": 2, "time_limit": 9}, n_steps=24)
    check_vec_env(Atari, env_args={"game": "Breakout", "n_envs": 2, "time_limit": 9, "auto_reset": False}, n_steps=12)


def test_a_game_goes_on_from_its_carry_and_does_not_see_its_neighbours() -> None:
    made = sims.make("ALE/Breakout-v5", n_envs=3, seed=4)
    alone = sims.make("ALE/Breakout-v5", n_envs=1, seed=5)  # the second of the three
    made.reset(), alone.reset()
    plan = torch.from_numpy(np.random.default_rng(0).integers(4, size=(12, 3)))
    for actions in plan:
        carry = made.state_tensors()
        (seen, _), _ = made.step(DictTensor({"action": actions}))
        (single, _), _ = alone.step(DictTensor({"action": actions[1:2]}))
        assert (seen["frame"][1] == single["frame"][0]).all()
    made.set_state_tensors(carry)
    (again, _), _ = made.step(DictTensor({"action": plan[-1]}))
    assert all((again[key] == seen[key]).all() for key in seen.keys())
    kept = made.get_state()
    for key in again.keys():  # writing to them does not change the simulation
        again[key].zero_()
    assert all(torch.equal(value, vars(kept)[name]) for name, value in vars(made.get_state()).items())


@pytest.mark.parametrize(
    ("n_seeds", "n_steps"), [(16, 64), pytest.param(2, 512, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)])]
)
def test_sticky_consoles_of_many_seeds_stay_where_ales_are(n_seeds: int, n_steps: int) -> None:
    ales = [open_ale("seaquest", seed) for seed in range(n_seeds)]
    env = Atari("Seaquest", n_seeds, noop_max=0, frame_skip=1, auto_reset=False, stack=1)
    env.reset()
    env.set_state(None, env.state_of(ales))
    plan = torch.from_numpy(np.random.default_rng(1).integers(18, size=(n_steps, n_seeds)))
    kept = 0
    for actions in plan:
        (seen, _), _ = env.step(DictTensor({"action": actions}))
        state = env.get_state()
        kept += int((state.action != torch.tensor(env.actions)[actions]).sum())
        rewards = [ale.act(action) for ale, action in zip(ales, state.action.tolist(), strict=True)]
        assert seen["reward"].tolist() == rewards
        assert (state.ram[:, :128].numpy() == np.stack([ale.getRAM() for ale in ales])).all()
        assert state.tally[:, 1].tolist() == [ale.lives() for ale in ales]
        assert seen["terminated"].tolist() == [ale.game_over() for ale in ales]
    assert 0.18 < kept / plan.numel() < 0.29  # a quarter, less where the kept action was the wanted one


def test_random_steps_take_many_games_to_different_places() -> None:
    def places(n_envs: int, seed: int, most: int) -> list[bytes]:
        env = Atari("Pong", n_envs, seed=seed, stack=1)
        env.reset(DictTensor({"initial_steps": torch.full((n_envs,), most)}))
        return [bytes(row) for row in env.get_state().ram.numpy()]

    many = places(64, 0, 12)
    assert len(set(places(64, 0, 0))) == 25
    assert len(set(many)) > 55  # of a game that takes none or one step, a neighbour may do the same
    assert places(3, 7, 12) == many[7:10]


def test_a_game_in_ale_goes_into_many_rows() -> None:
    ale = open_ale("pong", 0)
    for _ in range(70):
        ale.act(3)
    env = Atari("Pong", 5, stack=1)
    env.reset()
    env.set_state(range(1, 5), env.state_of([ale]))
    equal = [bool((row[:128].numpy() == ale.getRAM()).all()) for row in env.get_state().ram]
    assert equal == [False, True, True, True, True]


def test_a_game_begins_after_one_to_thirty_frames_of_nothing() -> None:
    env = Atari("Seaquest", 200, seed=1, size=None, stack=1)
    seen, _ = env.reset()
    ale, starts = open_ale("seaquest", 0), {}
    for _ in range(30):
        ale.act(0)
        starts[ale.getRAM().tobytes()] = ale.getScreenGrayscale()
    begun = [ram[:128].tobytes() for ram in env.get_state().ram.numpy()]
    assert len(starts) == 30
    assert 20 <= len(set(begun) & set(starts)) == len(set(begun))
    assert all((seen["frame"][row, 0].numpy() == starts[ram]).all() for row, ram in enumerate(begun))


@pytest.mark.parametrize(("game", "frames_of_fire"), [("Breakout", 4), ("Freeway", 0)])  # Freeway knows no FIRE
def test_fire_is_pressed_before_every_episode_where_the_game_knows_it(game: str, frames_of_fire: int) -> None:
    ale = open_ale(game.lower(), 0)
    for _ in range(frames_of_fire):
        ale.act(1)
    env = Atari(game, 1, noop_max=0, fire_on_reset=True, size=None, stack=1, brighter=False, time_limit=2)
    seen, _ = env.reset()
    for _ in range(2):  # of the next episode, too
        assert (env.get_state().ram[0, :128].numpy() == ale.getRAM()).all()
        assert (seen["frame"][0, 0].numpy() == ale.getScreenGrayscale()).all()
        for _ in range(2):
            _, (seen, _) = env.step(DictTensor({"action": torch.tensor([2])}))


@pytest.mark.parametrize(("frame_skip", "n_steps"), [(1, 108_000), (4, 27_000)])
def test_an_episode_is_cut_after_half_an_hour(frame_skip: int, n_steps: int) -> None:
    env = Atari("Pong", 2, frame_skip=frame_skip)
    env.reset()
    carry = env.state_tensors()
    env.set_state_tensors({**carry, "elapsed": torch.tensor([n_steps - 2, 0], dtype=carry["elapsed"].dtype)})
    for cut in (False, True, False):
        (seen, _), _ = env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
        assert seen["truncated"].tolist() == [cut, False]
        assert seen["terminated"].tolist() == [False, False]


def test_a_training_that_compiles_simulators_leaves_consoles_to_their_kernel() -> None:
    with compiling_simulators(compiled=True):
        env = sims.make("ALE/Pong-v5", n_envs=2)
    env.reset()
    (observation, _), _ = env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
    assert env.backend == "warp"
    assert observation["frame"].shape == (2, 4, 84, 84)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="got the game 'ALE/Nothing-v5', expected one of air_raid"):
        sims.make("ALE/Nothing-v5", n_envs=1)
    with pytest.raises(ValueError, match="expected 'warp'"):
        sims.make("ALE/Pong-v5", n_envs=1, backend="torch")
    with pytest.raises(ValueError, match="got size=20, expected 70 to 160"):
        sims.make("ALE/Pong-v5", n_envs=1, size=20)
    with pytest.raises(ValueError, match="got frame_skip=0"):
        sims.make("ALE/Pong-v5", n_envs=1, frame_skip=0)
    with pytest.raises(ValueError, match="got 'q7'"):
        tables(Rules(score="q7"))
    with pytest.raises(ValueError, match="got '7=1'"):
        tables(Rules(over="7=1"))


def memory(ale: Any) -> torch.Tensor:
    return torch.from_numpy(np.pad(ale.getRAM(), (0, 128))).unsqueeze(0)


def says(game: str, n_frames: int, seed: int) -> list[tuple[tuple[int, int, bool], tuple[int, int, bool]]]:
    """Return rewards and ends as the rules read them from ALE's RAM, and as ALE reports them, in each frame."""
    ale = open_ale(game, seed)
    actions = [action.value for action in ale.getLegalActionSet()]
    counter = Scorer(RULES[game], torch.device("cpu"))
    tally, both = counter.begin(memory(ale), [ale.lives()]), []
    for action in np.random.default_rng(seed).choice(actions, n_frames).tolist():
        said = (int(ale.act(action)), ale.lives(), ale.game_over())
        reward = counter.count(memory(ale), tally)
        both.append(((int(reward), int(tally[0, 1]), bool(tally[0, OVER])), said))
        if said[2]:
            ale.reset_game()
            tally = counter.begin(memory(ale), [ale.lives()])
    return both


@pytest.mark.parametrize("game", RULES)
def test_rewards_lives_and_ends_are_ales_in_each_frame(game: str) -> None:
    both = says(game, 100, seed=3)
    assert [ours for ours, _ in both] == [theirs for _, theirs in both]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("game", RULES)
def test_rewards_lives_and_ends_are_ales_for_long(game: str) -> None:
    both = says(game, 6000, seed=7)
    assert [ours for ours, _ in both] == [theirs for _, theirs in both]


def test_rules_add_up_bytes_and_find_ends() -> None:
    rules = Rules(score="100*d1 -b2>>1&3", lives="b3 1", over="4==7 5&1==0 | 6!=0", special=((1, 9, 5),))
    addresses, values = tables(rules)
    score = {int(address): row for address, row in zip(addresses, values[0], strict=True)}
    assert (score[1][0x25], score[1][9], score[2][6]) == (2500, 5, -3)
    over = {int(address): row for address, row in zip(addresses, values[3], strict=True)}
    assert (over[4][7] & 1, over[4][6] & 1, over[5][2] & 1, over[5][3] & 1) == (1, 0, 1, 0)
    assert (over[6][0] & 2, over[6][1] & 2, over[1][0]) == (0, 2, 3 | DROPS)


def test_states_of_ale_can_be_written() -> None:
    ale = open_ale("seaquest", 0)
    kept = ale.cloneState().serialize()
    state = read_ale_state(kept)
    assert write_ale_state(kept, ram=state.ram, **state.registers) == kept
    changed = read_ale_state(write_ale_state(kept, pc=5, zero=1 - state.registers["zero"], color0=0x22))
    assert (changed.registers["pc"], changed.registers["color0"]) == (5, 0x22)
    assert changed.registers["zero"] == 1 - state.registers["zero"]


@pytest.mark.parametrize("game", ["pong", "air_raid"])
def test_the_palette_is_ales(game: str) -> None:
    ale = open_ale(game, 0)
    gray, colors = read_palette(ale)
    for _ in range(20):
        ale.act(1)
        screen = ale.getScreen()
        assert (gray[screen, 0] == ale.getScreenGrayscale()).all()
        assert (colors[screen] == ale.getScreenRGB()).all()


@pytest.mark.parametrize(("lines", "size"), [(210, 84), (250, 84), (210, 110)])
def test_the_average_of_one_colour_is_this_colour(lines: int, size: int) -> None:
    # So the kernel may leave it out. Summed in single precision and in its order, for every colour at once.
    columns, rows = area_weights(160, size)[:, 1:], area_weights(lines, size)[:, 1:]
    colors = np.arange(256, dtype=np.float32)
    line = sum(colors * columns[:, k, None] for k in range(columns.shape[1]))
    total = sum(line * rows[:, j, None, None] for j in range(rows.shape[1]))
    assert total.dtype == np.float32
    assert (np.rint(total) == colors).all()


def test_area_weights_add_up_to_one() -> None:
    for n_sources in (160, 210, 250):
        np.testing.assert_allclose(area_weights(n_sources, 84)[:, 1:].sum(1), 1.0, rtol=1e-6)
    assert area_weights(210, 210)[:, :2].tolist() == [[k, 1.0] for k in range(210)]
