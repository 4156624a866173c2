"""The kernel around every game: K steps of all environments in one launch.

One thread moves one environment; its state stays in registers. What it does is `rlstruct.sims._simulation` for one
environment: the same keys, restarts, limits and final observations.
"""

from types import SimpleNamespace
from typing import Any

import warp as wp

from rlstruct.sims.kernels.game import (
    DONE,
    ELAPSED,
    EPISODE,
    RAN,
    RUNNING,
    STATE_KEY,
    TERMINATED,
    TRUNCATED,
    GameKernel,
)
from rlstruct.sims.kernels.random import EXPLORE, child_key, randint, uniform


def make_advance(game: GameKernel, memory: Any, access: SimpleNamespace, chooser: Any, choose: Any) -> Any:
    """Make the kernel of a game.

    Args:
        game: its three functions.
        memory: the struct of `rlstruct.sims.kernels.game.make_memory`.
        access: the functions of `rlstruct.sims.kernels.game.make_access`.
        chooser: a struct that ``choose`` gets.
        choose: the Warp function ``(chooser, k, i, state, key) -> action`` that knows what the agent does at step k;
            the key is that of the step.

    Returns:
        The kernel ``(memory, chooser, n_steps, time_limit, auto_reset)``, for B threads. ``time_limit`` 0 is none.
    """
    load, put, get, no_action, transition = access.load, access.put, access.get, access.no_action, game.transition
    begin, keep = _make_begin(game, access), _make_keep(memory, access)
    report, go_on = _make_report(memory, access), _make_go_on(memory, access)

    @wp.kernel(module="unique", enable_backward=False)
    def advance(io: memory, by: chooser, n_steps: int, time_limit: wp.int64, auto_reset: bool):
        i = wp.tid()
        s = load(io.state, i)
        elapsed = io.clock[ELAPSED, i]
        episode = io.clock[EPISODE, i]
        episode_key = child_key(wp.uint64(io.env_key[i]), episode)
        last = no_action()
        running = bool(True)
        terminated = bool(False)
        if not auto_reset:
            last = get(io.last, 0, i)
            running = io.ended[0, i]
            terminated = io.ended[1, i]
        for k in range(n_steps):
            ran = running
            reward = wp.float32(0.0)
            if running:
                key = child_key(episode_key, elapsed)
                last = choose(by, k, i, s, key)
                s, reward, terminated = transition(s, last, key)
                elapsed += wp.int64(1)
            truncated = time_limit > wp.int64(0) and elapsed >= time_limit
            done = terminated or truncated
            report(io, k, i, s, reward, terminated, truncated, last)
            if auto_reset:
                if done:
                    episode += wp.int64(1)
                    episode_key = child_key(wp.uint64(io.env_key[i]), episode)
                    s = begin(io.pool, episode_key)
                    elapsed = wp.int64(0)
                    terminated = bool(False)
                    reward = wp.float32(0.0)
                    last = no_action()
                go_on(io, k, i, s, reward, last)
            else:
                running = ran and not done
                io.flags[k, RAN, i] = ran
                io.flags[k, RUNNING, i] = running
        keep(io, i, s, elapsed, episode, episode_key)
        if not auto_reset:
            io.next_ended[0, i] = running
            io.next_ended[1, i] = terminated
            put(io.next_last, 0, i, last)

    return advance


def _make_begin(game: GameKernel, access: SimpleNamespace) -> Any:
    """How an episode begins: by the game, or with one of the states of the pool."""
    State, scalar, initial, load = game.state, game.state._wp_scalar_type_, game.initial, access.load

    @wp.func
    def begin(pool: wp.array2d(dtype=scalar), key: wp.uint64) -> State:
        if pool.shape[1] > 0:
            return load(pool, int(randint(key, wp.int64(pool.shape[1]), wp.uint64(0))))
        return initial(key)

    return begin


def _make_keep(memory: Any, access: SimpleNamespace) -> Any:
    """Write where a simulation is after the last step."""
    State, save = access.State, access.save

    @wp.func
    def keep(io: memory, i: int, s: State, elapsed: wp.int64, episode: wp.int64, key: wp.uint64):
        save(io.next_state, i, s)
        io.next_clock[ELAPSED, i] = elapsed
        io.next_clock[EPISODE, i] = episode
        io.next_clock[STATE_KEY, i] = wp.int64(key)

    return keep


def _make_report(memory: Any, access: SimpleNamespace) -> Any:
    """Write the observation that a step reached."""
    State, Action, show, put = access.State, access.Action, access.show, access.put

    @wp.func
    def report(
        io: memory, k: int, i: int, s: State, reward: wp.float32, terminated: bool, truncated: bool, action: Action
    ):
        show(io.reached_frame, k, i, s)
        io.reached_reward[k, i] = reward
        put(io.reached_last, k, i, action)
        io.flags[k, TERMINATED, i] = terminated
        io.flags[k, TRUNCATED, i] = truncated
        io.flags[k, DONE, i] = terminated or truncated

    return report


def _make_go_on(memory: Any, access: SimpleNamespace) -> Any:
    """Write the observation that the agent acts on next."""
    State, Action, show, put = access.State, access.Action, access.show, access.put

    @wp.func
    def go_on(io: memory, k: int, i: int, s: State, reward: wp.float32, action: Action):
        show(io.current_frame, k, i, s)
        io.current_reward[k, i] = reward
        put(io.current_last, k, i, action)

    return go_on


def make_given(state: Any, action: Any, n_parts: int, access: SimpleNamespace) -> tuple[Any, Any]:
    """Make the chooser of `make_advance` for plans, repetition and exploration.

    Args:
        state: vector type of the state.
        action: dtype of actions.
        n_parts: A, 0 for Discrete.
        access: from `rlstruct.sims.kernels.game.make_access`.

    Returns:
        Its struct and its function.
    """
    get, Action, n_lanes = access.get, access.Action, max(1, n_parts)

    @wp.struct
    class Given:
        actions: wp.array3d(dtype=action)  # [K, B, A], or [1, B, A] to repeat it
        stride: int  # 1 for a plan, 0 to repeat
        exploring: bool  # draw instead
        n: wp.int64  # how many actions there are (Discrete)
        low: wp.float32  # their bounds (Box)
        high: wp.float32

    @wp.func
    def number(by: Given, key: wp.uint64) -> wp.int64:
        return randint(key, by.n, EXPLORE)

    @wp.func
    def vector(by: Given, key: wp.uint64) -> Action:
        drawn = Action()
        for a in range(wp.static(n_lanes)):
            drawn[a] = uniform(key, EXPLORE + wp.uint64(a + 1)) * (by.high - by.low) + by.low
        return drawn

    explore = number if n_parts == 0 else vector

    @wp.func
    def choose(by: Given, k: int, i: int, s: state, key: wp.uint64) -> Action:
        if by.exploring:
            return explore(by, key)
        return get(by.actions, k * by.stride, i)

    return Given, choose
