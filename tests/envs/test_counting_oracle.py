"""Every wrapper and mode against the log of counting environments: no row joins two episodes, no row is missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from counting import EPISODE, Counting, CountingVector
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.vec_env import VecEnv

B = 5
MODES = list(AutoresetMode)
Transition = tuple[float, float, bool, bool]
Make = Callable[[], tuple[VecEnv, list[Counting]]]


def lists(cls: type[GymEnv], reuse: bool) -> tuple[VecEnv, list[Counting]]:
    envs = [Counting(reuse) for _ in range(B)]
    return cls(envs, seed=3), envs


def sync(mode: AutoresetMode, reuse: bool, copy: bool = True, **settings: Any) -> tuple[VecEnv, list[Counting]]:
    vec: Any = SyncVectorEnv([functools.partial(Counting, reuse)] * B, copy=copy, autoreset_mode=mode)
    return GymVectorEnv(vec, seed=3, **settings), vec.envs


def lockstep(mode: AutoresetMode, **settings: Any) -> tuple[VecEnv, list[Counting]]:
    final = settings.pop("batched_final", False)
    vec = CountingVector(B, mode, batched_final=final)
    return GymVectorEnv(vec, seed=3, **settings), vec.envs


AUTO: dict[str, Make] = {
    **{f"GymEnvInf-{reuse}": functools.partial(lists, GymEnvInf, reuse) for reuse in (False, True)},
    **{f"sync-{mode.name}-{r}": functools.partial(sync, mode, r) for mode in MODES for r in (False, True)},
    **{f"sync-{mode.name}-no-copy": functools.partial(sync, mode, True, False) for mode in MODES},
    **{f"lockstep-{mode.name}": functools.partial(lockstep, mode) for mode in MODES},
    "lockstep-SAME_STEP-batched": functools.partial(lockstep, AutoresetMode.SAME_STEP, batched_final=True),
}
EPISODIC: dict[str, Make] = {
    **{f"GymEnv-{reuse}": functools.partial(lists, GymEnv, reuse) for reuse in (False, True)},
    **{f"sync-{mode.name}": functools.partial(sync, mode, True, episodic=True) for mode in MODES},
    **{f"lockstep-{mode.name}": functools.partial(lockstep, mode, episodic=True) for mode in MODES},
}


def action() -> DictTensor:
    return DictTensor({"action": torch.ones(B, dtype=torch.int64)})


def drive(env: VecEnv, steps: int) -> tuple[list[list[Transition]], int]:
    """Step, check every row on its own, and return each row's real transitions and the number of idle rows."""
    observation, running = env.reset()
    assert running.all()
    assert observation["initial_state"].all()
    assert not observation["done"].any()
    rows: list[list[Transition]] = [[] for _ in range(B)]
    kept: list[tuple[DictTensor, DictTensor]] = []
    idle = 0
    current, alive = observation, running
    for _ in range(steps):
        (reached, stepped), (after, still) = env.step(action())
        assert torch.equal(stepped, alive)
        for j in range(B):
            if stepped[j]:
                check_row(current, reached, j)
                rows[j].append(transition(current, reached, j))
            else:
                idle += 1
                check_idle(current, reached, j)
            check_current(env, reached, after, j, bool(stepped[j]), bool(still[j]))
        kept.append((reached, reached.clone()))
        current, alive = after, still
    for given, copy in kept:  # what was handed out is never changed by later steps
        assert all(torch.equal(given[key], copy[key]) for key in given.keys())
    return rows, idle


def transition(current: DictTensor, reached: DictTensor, j: int) -> Transition:
    return (
        float(current["frame"][j, 0]),
        float(reached["frame"][j, 0]),
        bool(reached["terminated"][j]),
        bool(reached["truncated"][j]),
    )


def check_row(current: DictTensor, reached: DictTensor, j: int) -> None:
    assert reached["frame"][j, 0] == current["frame"][j, 0] + 1  # next = current + 1, in the same episode
    assert reached["frame"][j, 1] == current["frame"][j, 1] + 1
    assert reached["reward"][j] == reached["frame"][j, 1]
    assert reached["done"][j] == (reached["terminated"][j] | reached["truncated"][j])
    assert not reached["initial_state"][j]
    assert reached["last_action"][j] == 1


def check_idle(current: DictTensor, reached: DictTensor, j: int) -> None:
    assert torch.equal(reached["frame"][j], current["frame"][j])
    assert reached["reward"][j] == 0
    assert reached["done"][j]


def check_current(env: VecEnv, reached: DictTensor, after: DictTensor, j: int, stepped: bool, still: bool) -> None:
    if env.auto_reset and still and bool(reached["done"][j]):  # restarted
        assert after["frame"][j, 0] % EPISODE == 0
        # One later than the last: no episode was skipped.
        assert after["frame"][j, 0] // EPISODE == reached["frame"][j, 0] // EPISODE + 1
        assert after["initial_state"][j]
        assert after["reward"][j] == 0
        assert after["last_action"][j] == 0
        assert not after["done"][j] | after["terminated"][j] | after["truncated"][j]
    else:
        assert torch.equal(after["frame"][j], reached["frame"][j])
        assert after["done"][j] == reached["done"][j]
        assert still == (stepped and not bool(reached["done"][j]))


@pytest.mark.parametrize("name", AUTO)
def test_auto_reset_hands_over_every_step_of_the_log_once(name: str) -> None:
    env, inside = AUTO[name]()
    rows, idle = drive(env, 150)
    assert [row for row in rows] == [one.log for one in inside]
    assert {done for row in rows for done in (t[2:] for t in row)} == {
        (False, False), (True, False), (False, True), (True, True)
    }  # fmt: skip
    if "NEXT_STEP" in name:  # one step of the row goes into each restart
        assert idle > 0
    else:
        assert idle == 0
        assert all(len(row) == 150 for row in rows)
    env.close()


@pytest.mark.parametrize("name", EPISODIC)
def test_episodic_rows_stop_at_the_end_of_their_first_episode(name: str) -> None:
    env, inside = EPISODIC[name]()
    rows, _ = drive(env, 9)
    for row, one in zip(rows, inside, strict=True):
        assert row == one.log[: len(row)]
        assert [any(t[2:]) for t in row] == [False] * (len(row) - 1) + [True]
    if name.startswith("GymEnv"):
        assert [len(row) for row in rows] == [len(one.log) for one in inside]
    env.reset()
    (_, stepped), _ = env.step(action())
    assert stepped.all()
    env.close()


def async_counting(mode: AutoresetMode, shared_memory: bool, reuse: bool = True) -> Any:
    makes = [functools.partial(Counting, reuse)] * B
    return AsyncVectorEnv(makes, autoreset_mode=mode, shared_memory=shared_memory, context="spawn")


PROCESSES = [*((mode, True) for mode in MODES), (AutoresetMode.NEXT_STEP, False)]


@pytest.mark.parametrize(("mode", "shared_memory"), PROCESSES)
def test_async_equals_the_list(mode: AutoresetMode, shared_memory: bool) -> None:
    reuse = mode is not AutoresetMode.SAME_STEP  # which would lose final observations
    env = GymVectorEnv(async_counting(mode, shared_memory, reuse), seed=3)
    rows, idle = drive(env, 40)
    env.close()
    expected, _ = drive(lists(GymEnvInf, True)[0], 40)
    assert rows == [row[: len(mine)] for row, mine in zip(expected, rows, strict=True)]
    assert (idle > 0) == (mode is AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("name", ["GymEnvInf-True", "sync-DISABLED-True", "sync-SAME_STEP-True", "lockstep-NEXT_STEP"])
def test_steps_say_whether_one_restarted(name: str) -> None:
    env, _ = AUTO[name]()
    env.reset()
    seen = set()
    for _ in range(20):
        step = env.step(action())
        (reached, _), (current, _) = step
        seen.add(step.restarted)  # type: ignore[attr-defined]
        if not step.restarted:  # type: ignore[attr-defined]
            assert not current["initial_state"].any()
            assert all(current[key].equal(reached[key]) for key in current.keys())
        else:
            assert current["initial_state"].any()
    assert seen == {False, True}


@pytest.mark.parametrize("name", ["GymEnv-False", "sync-DISABLED"])
def test_a_loop_that_never_ends_is_told(name: str) -> None:
    env, _ = EPISODIC[name]()
    _, running = env.reset()

    def count_by_size() -> None:  # as rlstructures taught
        still = running
        while still.size()[0] > 0:
            _, (_, still) = env.step(action())

    with pytest.raises(RuntimeError, match=r"no environment has run for 1000 steps.*running.any\(\) is False"):
        count_by_size()
    env.reset()
    assert env.step(action())[0][1].all()


def test_reset_in_the_middle_of_a_lost_step_starts_clean() -> None:
    env, inside = lockstep(AutoresetMode.NEXT_STEP)
    env.reset()
    still = torch.ones(B, dtype=torch.bool)
    while still.all():
        _, (_, still) = env.step(action())
    observation, running = env.reset()
    assert running.all()
    (reached, stepped), _ = env.step(action())
    assert stepped.all()
    assert torch.equal(reached["frame"], observation["frame"] + 1)
    assert len(inside) == B


def test_final_observation_is_nowhere_a_row_of_the_reset() -> None:
    # One environment, one buffer, mode by mode: the final frame of episode 1 must be 1000 + its length.
    for name, make in AUTO.items():
        env, inside = make()
        env.reset()
        lengths = [one.length for one in inside]
        seen: dict[int, float] = {}
        for _ in range(8):
            (reached, stepped), _ = env.step(action())
            for j in np.flatnonzero((reached["done"] & stepped).numpy()):
                seen.setdefault(int(j), float(reached["frame"][j, 0]))
        assert [seen[j] for j in range(B)] == [EPISODE + length for length in lengths], name
