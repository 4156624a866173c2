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
    Choice,
    GameKernel,
)
from rlstruct.sims.kernels.random import EXPLORE, child_key, randint, uniform


def make_advance(game: GameKernel, Action: Any, access: SimpleNamespace, chooser: Any, choose: Any) -> Any:
    """Make the kernel of a game.

    Args:
        game: its three functions.
        Action: vector type of what the agent does.
        access: from `rlstruct.sims.kernels.game.make_access`.
        chooser: a struct that ``choose`` gets.
        choose: the Warp function ``(chooser, k, i, state, key) -> action`` that knows what the agent does at step k;
            the key is that of the step.

    Returns:
        The kernel ``(memory, chooser, n_steps, time_limit, auto_reset)``, for B threads. ``time_limit`` 0 is none.
    """
    load, save, show, get, put = access.load, access.save, access.show, access.get, access.put
    begin, move = _make_begin(game, access), _make_move(game, Action)

    @wp.kernel(module="unique", enable_backward=False)
    def advance(io: access.Memory, by: chooser, n_steps: int, time_limit: wp.int64, auto_reset: bool):
        i = wp.tid()
        s, last = load(io.state, i), Action()
        elapsed = io.clock[ELAPSED, i]  # one by one: a tuple would hold references
        episode = io.clock[EPISODE, i]
        episode_key = child_key(wp.uint64(io.env_key[i]), episode)
        running, terminated = bool(True), bool(False)
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
                s, reward, terminated = move(s, last, key)
                elapsed += wp.int64(1)
            truncated = time_limit > wp.int64(0) and elapsed >= time_limit
            done = terminated or truncated
            show(io.reached_frame, io.reached_reward, io.reached_last, k, i, s, reward, last)
            io.flags[k, TERMINATED, i] = terminated
            io.flags[k, TRUNCATED, i] = truncated
            io.flags[k, DONE, i] = done
            if auto_reset:
                if done:
                    episode += wp.int64(1)
                    episode_key = child_key(wp.uint64(io.env_key[i]), episode)
                    s, last, elapsed = begin(io.pool, episode_key), Action(), wp.int64(0)
                    terminated, reward = bool(False), wp.float32(0.0)
                show(io.current_frame, io.current_reward, io.current_last, k, i, s, reward, last)
            else:
                running = ran and not done
                io.flags[k, RAN, i] = ran
                io.flags[k, RUNNING, i] = running
        save(io.next_state, i, s)
        io.next_clock[ELAPSED, i] = elapsed
        io.next_clock[EPISODE, i] = episode
        io.next_clock[STATE_KEY, i] = wp.int64(episode_key)
        if not auto_reset:
            io.next_ended[0, i] = running
            io.next_ended[1, i] = terminated
            put(io.next_last, 0, i, last)

    return advance


def _make_move(game: GameKernel, Action: Any) -> Any:
    """The game's transition, for an action that is a vector."""
    State, transition = game.state, game.transition

    @wp.func
    def move(s: State, action: Action, key: wp.uint64):
        moved, reward, terminated = transition(s, action[0], key)
        return moved, reward, terminated

    return move if Action is Choice else transition


def _make_begin(game: GameKernel, access: SimpleNamespace) -> Any:
    """How an episode begins: by the game, or with one of the states of the pool."""
    State, scalar, initial, load = game.state, game.state._wp_scalar_type_, game.initial, access.load

    @wp.func
    def begin(pool: wp.array2d(dtype=scalar), key: wp.uint64) -> State:
        if pool.shape[1] > 0:
            return load(pool, int(randint(key, wp.int64(pool.shape[1]), wp.uint64(0))))
        return initial(key)

    return begin


def make_given(state: Any, Action: Any, access: SimpleNamespace) -> tuple[Any, Any]:
    """Make the chooser of `make_advance` for plans, repetition and exploration.

    Args:
        state: vector type of the state.
        Action: vector type of what the agent does.
        access: from `rlstruct.sims.kernels.game.make_access`.

    Returns:
        Its struct and its function.
    """
    get, n_lanes, number, discrete = access.get, Action._length_, Action._wp_scalar_type_, Action is Choice

    @wp.struct
    class Given:
        actions: wp.array3d(dtype=number)  # [K, B, A], or [1, B, A] to repeat it
        stride: int  # 1 for a plan, 0 to repeat
        exploring: bool  # draw instead
        n: wp.int64  # how many actions there are (Discrete)
        low: wp.float32  # their bounds (Box)
        high: wp.float32

    @wp.func
    def choose(by: Given, k: int, i: int, s: state, key: wp.uint64) -> Action:
        drawn = Action()
        if not by.exploring:
            drawn = get(by.actions, k * by.stride, i)
        elif wp.static(discrete):
            drawn[0] = number(randint(key, by.n, EXPLORE))
        else:
            for a in range(wp.static(n_lanes)):
                drawn[a] = number(uniform(key, EXPLORE + wp.uint64(a + 1)) * (by.high - by.low) + by.low)
        return drawn

    return Given, choose
