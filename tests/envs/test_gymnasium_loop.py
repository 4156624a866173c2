"""GymVectorEnv against gymnasium's own loop, step by step: wrappers, autoreset modes, ale-py and EnvPool."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from toys import SPACES, Toy

from rlstruct.core import DictTensor
from rlstruct.envs import GymVectorEnv
from rlstruct.errors import BadValueError

B = 2
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
MODES = [NEXT_STEP, SAME_STEP, DISABLED]
Wrap = Callable[[Any], Any]
SHIFTED = spaces.Box(-10, 300, (3,), np.float32)


def shift(frame: Any) -> Any:
    return frame + np.float32(1)


def as_arrays(name: str) -> Wrap:
    def wrap(vec: Any) -> Any:
        pytest.importorskip("array_api_compat")
        if name == "NumpyToTorch":
            return wrappers.NumpyToTorch(vec)
        return wrappers.ArrayConversion(vec, env_xp=np, target_xp=torch)

    return wrap


# Name: the kind of `SPACES`, and the wrapper.
WRAPPERS: dict[str, tuple[str, Wrap]] = {
    "nothing": ("vector", lambda vec: vec),
    "VectorizeTransformObservation": (
        "vector",
        lambda vec: wrappers.VectorizeTransformObservation(
            vec, gymnasium.wrappers.TransformObservation, func=shift, observation_space=SHIFTED
        ),
    ),
    "VectorizeTransformAction": (
        "torque",
        lambda vec: wrappers.VectorizeTransformAction(
            vec, gymnasium.wrappers.TransformAction, func=lambda a: a / 2, action_space=SPACES["torque"][1]
        ),
    ),
    "VectorizeTransformReward": (
        "vector",
        lambda vec: wrappers.VectorizeTransformReward(
            vec, gymnasium.wrappers.TransformReward, func=lambda reward: 2 * reward
        ),
    ),
    "DictInfoToList": ("vector", wrappers.DictInfoToList),
    "TransformObservation": (
        "vector",
        lambda vec: wrappers.TransformObservation(vec, shift, single_observation_space=SHIFTED),
    ),
    "FilterObservation": ("dict", lambda vec: wrappers.FilterObservation(vec, filter_keys=["b"])),
    "FlattenObservation": ("dict", wrappers.FlattenObservation),
    "GrayscaleObservation": ("image", wrappers.GrayscaleObservation),
    "ResizeObservation": ("image", lambda vec: wrappers.ResizeObservation(vec, (4, 4))),
    "ReshapeObservation": ("image", lambda vec: wrappers.ReshapeObservation(vec, (8, 24))),
    "RescaleObservation": ("vector", lambda vec: wrappers.RescaleObservation(vec, np.float32(0), np.float32(1))),
    "DtypeObservation": ("image", lambda vec: wrappers.DtypeObservation(vec, np.float32)),
    "NormalizeObservation": ("vector", wrappers.NormalizeObservation),
    "TransformAction": ("torque", lambda vec: wrappers.TransformAction(vec, lambda action: action / 2)),
    "ClipAction": ("torque", wrappers.ClipAction),
    "RescaleAction": ("torque", lambda vec: wrappers.RescaleAction(vec, np.float32(-2), np.float32(2))),
    "TransformReward": ("vector", lambda vec: wrappers.TransformReward(vec, lambda reward: reward - 1)),
    "ClipReward": ("vector", lambda vec: wrappers.ClipReward(vec, -1, 1)),
    "NormalizeReward": ("vector", wrappers.NormalizeReward),
    "RecordEpisodeStatistics": ("vector", wrappers.RecordEpisodeStatistics),
    "ArrayConversion": ("vector", as_arrays("ArrayConversion")),
    "NumpyToTorch": ("vector", as_arrays("NumpyToTorch")),
    "several": (
        "vector",
        lambda vec: wrappers.DictInfoToList(
            wrappers.NormalizeReward(wrappers.ClipReward(wrappers.RecordEpisodeStatistics(vec), -1, 1))
        ),
    ),
}
LEFT_OUT = {"HumanRendering": "opens a window", "JaxToNumpy": "for environments in JAX", "JaxToTorch": "the same"}
STATEFUL = {"NormalizeReward", "RecordEpisodeStatistics", "NormalizeObservation", "several"}
# gymnasium's own constructors raise.
REFUSED_BY_GYMNASIUM = {(name, SAME_STEP) for name in WRAPPERS if name.endswith("Observation")}
REFUSED_BY_GYMNASIUM.add(("NormalizeObservation", DISABLED))


def test_the_table_has_every_vector_wrapper_of_gymnasium() -> None:
    assert set(wrappers.__all__) <= set(WRAPPERS) | set(LEFT_OUT) | {"RecordVideo"}


def leaves(value: Any, key: str = "frame") -> dict[str, Any]:
    """Name the leaves of a batch of observations as GymVectorEnv does."""
    if not isinstance(value, dict):
        return {key: np.asarray(value).copy()}
    return {name: leaf for part in value for name, leaf in leaves(value[part], f"{key}/{part}").items()}


def final_frames(info: Any, row: int) -> dict[str, Any]:
    return leaves(info[row]["final_obs"] if isinstance(info, list) else info["final_obs"][row])


Step = tuple[dict[str, Any], dict[str, Any]]


def plays_on(info: Any) -> Any:
    """Return the rows of Breakout that lost a life: with life_loss_info, ale-py reports an end and no final_obs."""
    lives = [row.get("lives", 5) for row in info] if isinstance(info, list) else info.get("lives", 5)
    return np.less(lives, 5)


def gymnasium_loop(vec: Any, mode: AutoresetMode, actions: list[Any], seed: int | None, reset_at: int) -> list[Step]:
    """Step as gymnasium's documentation does; return what each step reached, and what the agent acts on next."""
    observation, _ = vec.reset(seed=seed)
    steps: list[Step] = [({}, leaves(observation))]
    pending = np.zeros(vec.num_envs, bool)
    for t, action in enumerate(actions):
        if t == reset_at:
            observation, _ = vec.reset()
            pending[:] = False
            steps.append(({}, leaves(observation)))
        before = steps[-1][1]
        observation, reward, terminated, truncated, info = vec.step(action.copy())
        reached, current, done = (
            leaves(observation),
            leaves(observation),
            np.logical_or(*map(np.asarray, (terminated, truncated))),
        )
        row = {"reward": np.asarray(reward), "terminated": np.asarray(terminated), "truncated": np.asarray(truncated)}
        if mode is NEXT_STEP:
            for key, array in reached.items():
                array[pending] = before[key][pending]
            row["running"], pending = ~pending, done
        else:
            row["running"] = np.ones_like(pending)
            if mode is SAME_STEP:
                for j in np.flatnonzero(done & ~plays_on(info)):
                    for key, part in final_frames(info, j).items():
                        reached[key][j] = part
            elif done.any():
                current = leaves(vec.reset(options={"reset_mask": done})[0])
        steps.append((reached | row, current))
    return steps


def our_loop(env: GymVectorEnv, actions: list[Any], reset_at: int) -> list[Step]:
    observation, _ = env.reset()
    steps: list[Step] = [({}, {key: observation[key].numpy() for key in observation.keys()})]
    for t, action in enumerate(actions):
        if t == reset_at:
            observation, _ = env.reset()
            steps.append(({}, {key: observation[key].numpy() for key in observation.keys()}))
        (reached, running), (current, _) = env.step(DictTensor({"action": torch.from_numpy(action)}))
        step = {key: reached[key].numpy() for key in reached.keys()} | {"running": running.numpy()}
        steps.append((step, {key: current[key].numpy() for key in current.keys()}))
    return steps


def compare(ours: list[Step], theirs: list[Step]) -> int:
    """Compare every step, and count the ends of episodes."""
    ends = 0
    assert len(ours) == len(theirs)
    for t, ((reached, current), (reached_there, current_there)) in enumerate(zip(ours, theirs, strict=True)):
        for key, expected in current_there.items():
            np.testing.assert_array_equal(current[key], expected, err_msg=f"{key}, step {t}")
        if not reached_there:
            continue
        running = reached_there["running"]
        np.testing.assert_array_equal(reached["running"], running, err_msg=f"step {t}")
        for key, expected in reached_there.items():
            if key.startswith("frame"):
                np.testing.assert_array_equal(reached[key], expected, err_msg=f"{key}, step {t}")
            else:
                np.testing.assert_array_equal(
                    reached[key][running], expected[running].astype(reached[key].dtype), err_msg=f"{key}, step {t}"
                )
        ends += int(((reached["terminated"] | reached["truncated"]) & running).sum())
    return ends


def statistics(vec: Any) -> dict[str, Any]:
    """Collect the state that wrappers keep."""
    found: dict[str, Any] = {}
    while isinstance(vec, gymnasium.vector.VectorWrapper):
        for name, value in vars(vec).items():
            if name in ("return_queue", "length_queue", "episode_count", "accumulated_reward"):
                found[name] = np.array(value)
            elif name in ("return_rms", "obs_rms"):
                found[name] = np.concatenate([np.ravel(value.mean), np.ravel(value.var), [value.count]])
        vec = vec.env
    return found


def actions_of(space: spaces.Space[Any], n: int, b: int = B) -> list[Any]:
    space = gymnasium.vector.utils.batch_space(space, b)
    space.seed(0)
    return [space.sample() for _ in range(n)]


def check_wrapper(name: str, mode: AutoresetMode, vec: Any, twin: Any, steps: int = 60) -> None:
    """Compare a vector environment in a wrapper, or expect the error that the table states."""
    wrap = WRAPPERS[name][1]
    if (name, mode) in REFUSED_BY_GYMNASIUM:
        with pytest.raises(ValueError, match="autoreset_mode"):
            wrap(vec)
        return
    vec, twin = wrap(vec), wrap(twin)
    if mode is SAME_STEP and name in ("ArrayConversion", "NumpyToTorch"):
        pytest.skip("gymnasium 1.4 cannot convert final_obs: its own step raises")
    if name in STATEFUL and mode is DISABLED:
        with pytest.raises(BadValueError, match=r"masked resets, which falsifies what \w+ keeps across rows\. Make it"):
            GymVectorEnv(vec)
        return
    if name in STATEFUL:
        with pytest.raises(BadValueError, match=r"episodic=True, .* falsifies what \w+ keeps across rows\. Leave it"):
            GymVectorEnv(vec, episodic=True)
    actions = actions_of(vec.single_action_space, steps)
    ours = our_loop(GymVectorEnv(vec, seed=7), actions, reset_at=31)
    kept = {key: value.copy() for key, value in statistics(vec).items()}
    assert compare(ours, gymnasium_loop(twin, mode, actions, 7, reset_at=31)) > 10
    expected = statistics(twin)
    assert kept.keys() == expected.keys()
    assert (name in STATEFUL) == bool(kept)
    for key, value in kept.items():
        np.testing.assert_array_equal(value, expected[key], err_msg=key)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_sync_equals_gymnasiums_loop_in_every_wrapper(name: str, mode: AutoresetMode) -> None:
    makes = [functools.partial(Toy, WRAPPERS[name][0])] * B
    vec, twin = (SyncVectorEnv(makes, autoreset_mode=mode) for _ in range(2))
    check_wrapper(name, mode, vec, twin)
    restarts: list[Any] = [options for env in vec.envs for options in env.options]
    assert all(options is None for options in restarts) or mode is DISABLED


@pytest.fixture(scope="module", params=MODES, ids=str)
def processes(request: pytest.FixtureRequest) -> Iterator[tuple[AutoresetMode, Any]]:
    """Return an AsyncVectorEnv that every wrapper of vectors uses in turn: a seeded reset starts it again."""
    vec = AsyncVectorEnv([Toy] * B, autoreset_mode=request.param, context="spawn")
    yield request.param, vec
    vec.close()


@pytest.mark.parametrize("name", [name for name, (kind, _) in WRAPPERS.items() if kind == "vector"])
def test_async_equals_gymnasiums_loop_in_every_wrapper(name: str, processes: tuple[AutoresetMode, Any]) -> None:
    mode, vec = processes
    check_wrapper(name, mode, vec, vec, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["image", "dict", "torque"])
def test_async_equals_gymnasiums_loop_with_other_spaces(kind: str, mode: AutoresetMode, shared_memory: bool) -> None:
    makes = [functools.partial(Toy, kind)] * B
    vec = AsyncVectorEnv(makes, autoreset_mode=mode, shared_memory=shared_memory, context="spawn")
    for name, (which, _) in WRAPPERS.items():
        if which == kind:
            check_wrapper(name, mode, vec, vec) if mode is not NEXT_STEP or shared_memory else None
    vec.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_film_has_the_frames_of_gymnasiums_loop(
    mode: AutoresetMode, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", types.ModuleType("moviepy"))  # only for writing the file
    vecs = [SyncVectorEnv([Toy] * B, autoreset_mode=mode) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # RecordVideo's advice about the folder and the mode
        films = [
            wrappers.RecordVideo(vec, str(tmp_path), step_trigger=lambda step: step == 2, video_length=40)
            for vec in vecs
        ]
    actions = actions_of(films[0].single_action_space, 30)
    compare(our_loop(GymVectorEnv(films[0], seed=1), actions, -1), gymnasium_loop(films[1], mode, actions, 1, -1))
    for one, other in zip(films[0].recorded_frames, films[1].recorded_frames, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(films[0].recorded_frames) > 20
    for one in films:
        one.recording, one.recorded_frames = False, []  # nothing is written


def test_statistics_count_whole_episodes() -> None:
    vec: Any = wrappers.RecordEpisodeStatistics(SyncVectorEnv([Toy] * B))
    env = GymVectorEnv(vec, seed=0)
    env.reset()
    n_steps, lengths = np.zeros(B, int), []
    for action in actions_of(vec.single_action_space, 60):
        (reached, running), _ = env.step(DictTensor({"action": torch.from_numpy(action)}))
        n_steps += running.numpy()
        for row in np.flatnonzero((reached["done"] & running).numpy()):
            lengths.append(int(n_steps[row]))
            n_steps[row] = 0
    assert len(lengths) > 10
    assert list(vec.length_queue) == lengths


class CountsResets(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """A wrapper of a user that does not know masks."""

    n_resets = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.n_resets += 1
        return self.env.reset(seed=seed, options=options)


def test_a_wrapper_of_a_user_sees_masks_only_if_he_says_that_it_obeys_them() -> None:
    vec = CountsResets(SyncVectorEnv([Toy] * B, autoreset_mode=DISABLED))
    with pytest.raises(BadValueError, match=r"CountsResets overrides reset, .*Pass reset_mask=True if it obeys"):
        GymVectorEnv(vec)
    env = GymVectorEnv(vec, reset_mask=True)
    env.reset()
    for action in actions_of(vec.single_action_space, 20):
        env.step(DictTensor({"action": torch.from_numpy(action)}))
    assert vec.n_resets > 5
    vec = CountsResets(SyncVectorEnv([Toy] * B))
    env = GymVectorEnv(vec)
    env.reset()
    for action in actions_of(vec.single_action_space, 20):
        env.step(DictTensor({"action": torch.from_numpy(action)}))
    assert vec.n_resets == 1


@pytest.mark.parametrize("copy", [True, False])
def test_sync_in_mode_same_step_keeps_final_observations_of_reused_memory(copy: bool) -> None:
    fresh, reused = (
        SyncVectorEnv([functools.partial(Toy, reuse=reuse)] * B, copy=copy, autoreset_mode=SAME_STEP)
        for reuse in (False, True)
    )
    actions = actions_of(fresh.single_action_space, 40)
    ours = our_loop(GymVectorEnv(reused, seed=3), actions, 20)
    assert compare(ours, gymnasium_loop(fresh, SAME_STEP, actions, 3, 20)) > 10


def test_async_in_mode_same_step_says_at_the_start_that_it_loses_final_observations() -> None:
    vec = AsyncVectorEnv([functools.partial(Toy, reuse=True)] * B, autoreset_mode=SAME_STEP, context="spawn")
    with pytest.raises(BadValueError, match=r"SAME_STEP loses the final observations .*NEXT_STEP or DISABLED\."):
        GymVectorEnv(vec, seed=0)
    vec.env_fns = [object] * B  # a factory that works in the processes only
    with pytest.raises(BadValueError, match=r"may lose final observations: .*\(AttributeError"):
        GymVectorEnv(vec, seed=0)
    vec.close()


def test_a_reset_on_demand_cancels_the_restart_of_processes_without_shared_memory() -> None:
    vec = AsyncVectorEnv([Toy] * B, shared_memory=False, context="spawn")
    env = GymVectorEnv(vec, seed=0)
    env.reset()
    for action in actions_of(vec.single_action_space, 20):
        still = env.step(DictTensor({"action": torch.from_numpy(action)}))[1][1]
        if not still.all():
            break
    env.reset()
    (reached, running), _ = env.step(DictTensor({"action": torch.from_numpy(action)}))
    assert running.all()
    assert (reached["reward"] != 0).all()  # of a step, not of a restart
    with pytest.raises(BadValueError, match=r"reset_mask=True, but a reset does not cancel the restart"):
        GymVectorEnv(vec, reset_mask=True)
    env.close()


LIVES: dict[str, dict[str, Any]] = {
    "episodic_life": {"episodic_life": True},
    "life_loss_info": {"life_loss_info": True},
    "both": {"episodic_life": True, "life_loss_info": True},
    "whole games": {},
    "episodic_life, time limit": {"episodic_life": True, "max_num_frames_per_episode": 160},
    "life_loss_info, time limit": {"life_loss_info": True, "max_num_frames_per_episode": 160},
}
LAYERS: dict[str, Wrap] = {
    "plain": lambda vec: vec,
    "NormalizeReward": wrappers.NormalizeReward,
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "several": WRAPPERS["several"][1],
}
FAST = {"episodic_life", "life_loss_info, time limit"}
ONE_BY_ONE = {"both", "life_loss_info, time limit"}  # where each wrapper is alone; several at once are in every setting
SCREEN = {"num_threads": 1, "noop_max": 1, "stack_num": 2}


def breakout_actions(n: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [np.ones(B, np.int64) if t % 10 == 0 else rng.integers(0, 4, B) for t in range(n)]


def how_often(fast: bool, slow: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if fast else pytest.mark.slow if slow else pytest.mark.exhaustive)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
@pytest.mark.parametrize(
    ("settings", "layers"),
    [how_often(name in FAST, True, name, ["several"]) for name in LIVES]
    + [how_often(False, name in ONE_BY_ONE, name, list(LAYERS)[:-1]) for name in LIVES],
    ids=str,
)
def test_ale_equals_gymnasiums_loop(settings: str, layers: list[str], mode: AutoresetMode) -> None:
    pytest.importorskip("ale_py")
    from ale_py.vector_env import AtariVectorEnv

    vec = AtariVectorEnv("breakout", B, autoreset_mode=mode, **SCREEN, **LIVES[settings])
    actions = breakout_actions(600 if settings == "whole games" else 120)
    for layer in layers:
        ours, theirs = (LAYERS[layer](vec) for _ in range(2))
        steps = our_loop(GymVectorEnv(ours, seed=1), actions, 100)
        assert compare(steps, gymnasium_loop(theirs, mode, actions, 1, 100)) >= 3, layer
        expected = statistics(theirs)
        for key, value in statistics(ours).items():
            np.testing.assert_array_equal(value, expected[key], err_msg=f"{key} of {layer}")


ENVPOOL: dict[str, dict[str, Any]] = {
    "episodic_life": {"episodic_life": True},
    "zero_discount_on_life_loss": {"zero_discount_on_life_loss": True},
    "both": {"episodic_life": True, "zero_discount_on_life_loss": True},
    "episodic_life, time limit": {"episodic_life": True, "max_episode_steps": 40},
    "whole games": {},
}
ALONE = {  # the other wrappers in every setting are exhaustive
    ("whole games", "plain"),
    ("zero_discount_on_life_loss", "NormalizeReward"),
    ("episodic_life, time limit", "RecordEpisodeStatistics"),
}


@pytest.mark.parametrize(
    ("settings", "layer"),
    [
        how_often((a, b) == ("episodic_life", "several"), b == "several" or (a, b) in ALONE, a, b)
        for a in ENVPOOL
        for b in LAYERS
    ],
)
def test_envpool_equals_gymnasiums_loop(settings: str, layer: str) -> None:
    envpool = pytest.importorskip("envpool")
    vec, twin = (
        LAYERS[layer](envpool.make("Breakout-v5", "gymnasium", num_envs=B, seed=1, **SCREEN, **ENVPOOL[settings]))
        for _ in range(2)
    )
    life = "episodic_life" in settings or settings == "both"
    actions = breakout_actions(120 if life else 400)
    ours = our_loop(GymVectorEnv(vec, seed=1), actions, 100)
    assert compare(ours, gymnasium_loop(twin, NEXT_STEP, actions, None, 100)) >= 3
    for key, value in statistics(twin).items():
        np.testing.assert_array_equal(statistics(vec)[key], value, err_msg=key)
