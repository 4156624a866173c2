"""Kernel around every game: T steps of all environments in one launch.

Each thread steps one environment, and keeps its state in registers. It does what `rlstruct.sims.simulation` does with
``auto_reset``: the same keys, restarts, time limits and final observations. Numbers of neighbouring environments are
neighbours in memory, so that the threads of a GPU read and write them together.
"""

from typing import Any

import warp as wp

from rlstruct.sims.kernels import GameKernel
from rlstruct.sims.kernels.random import child_key

TERMINATED, TRUNCATED, DONE = range(3)
ELAPSED, EPISODE, STATE_KEY = range(3)


@wp.struct
class Memory:
    """Tensors that the simulator reads and writes in a launch."""

    env_key: wp.array(dtype=wp.int64)  # [B]
    # the simulation before the first step
    state: wp.array2d(dtype=wp.float32)  # [F, B]
    clock: wp.array2d(dtype=wp.int64)  # [ELAPSED and EPISODE, B]
    # the simulation after K steps
    next_state: wp.array2d(dtype=wp.float32)
    next_clock: wp.array2d(dtype=wp.int64)  # STATE_KEY too
    # observations; row 0 of the current ones is what the agent acts on first
    reached_frame: wp.array3d(dtype=wp.float32)  # [K, D, B]
    current_frame: wp.array3d(dtype=wp.float32)  # [K + 1, D, B]
    reached_reward: wp.array2d(dtype=wp.float32)  # [K, B]
    current_reward: wp.array2d(dtype=wp.float32)  # [K + 1, B]
    reached_last: wp.array2d(dtype=wp.int64)
    current_last: wp.array2d(dtype=wp.int64)
    flags: wp.array3d(dtype=wp.bool)  # [K, TERMINATED to DONE, B]


def make_advance(game: GameKernel, policy_type: Any, act: Any, record: bool = True) -> Any:
    """Make the kernel ``(memory, policy, n_steps, time_limit)`` of a game, for B threads; ``time_limit`` 0 is none.

    With ``record`` False, observations, rewards, actions and flags are stored for the last step only, at its index.

    The Warp function ``act(policy, k, i, frame)`` returns the action of environment i at step k. Its first argument
    is the agent's memory, a struct of type ``policy_type``.
    """
    initial, transition, observe = game.initial, game.transition, game.observe
    State, n_fields, Frame, n_numbers = game.state, game.state._length_, game.frame, game.frame._length_

    @wp.func
    def show(frames: wp.array3d(dtype=wp.float32), k: int, i: int, frame: Frame):
        for d in range(wp.static(n_numbers)):
            frames[k, d, i] = frame[d]

    @wp.kernel(module="unique", enable_backward=False)
    def advance(io: Memory, policy: policy_type, n_steps: int, time_limit: wp.int64):
        i = wp.tid()
        s = State()
        for f in range(wp.static(n_fields)):
            s[f] = io.state[f, i]
        elapsed = io.clock[ELAPSED, i]  # not as a tuple, which would hold references
        episode = io.clock[EPISODE, i]
        episode_key = child_key(wp.uint64(io.env_key[i]), episode)
        for k in range(n_steps):
            action = act(policy, k, i, observe(s))
            s, reward, terminated = transition(s, action, child_key(episode_key, elapsed))
            elapsed += wp.int64(1)
            truncated = time_limit > wp.int64(0) and elapsed >= time_limit
            done = terminated or truncated
            stored = wp.static(record) or k + 1 == n_steps
            if stored:
                show(io.reached_frame, k, i, observe(s))
                io.reached_reward[k, i] = reward
                io.reached_last[k, i] = action
                io.flags[k, TERMINATED, i] = terminated
                io.flags[k, TRUNCATED, i] = truncated
                io.flags[k, DONE, i] = done
            if done:
                episode += wp.int64(1)
                episode_key = child_key(wp.uint64(io.env_key[i]), episode)
                s, action, elapsed, reward = initial(episode_key), wp.int64(0), wp.int64(0), wp.float32(0.0)
            if stored:
                show(io.current_frame, k + 1, i, observe(s))
                io.current_reward[k + 1, i] = reward
                io.current_last[k + 1, i] = action
        for f in range(wp.static(n_fields)):
            io.next_state[f, i] = s[f]
        io.next_clock[ELAPSED, i] = elapsed
        io.next_clock[EPISODE, i] = episode
        io.next_clock[STATE_KEY, i] = wp.int64(episode_key)

    return advance
