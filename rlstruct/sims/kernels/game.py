"""What a simulator gives to run as a kernel, and how its environments lie in memory.

Numbers of neighbouring environments lie side by side, so that the threads of a GPU read and write them together.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import warp as wp

TERMINATED, TRUNCATED, DONE, RAN, RUNNING = range(5)
ELAPSED, EPISODE, STATE_KEY = range(3)
Choice = wp.types.vector(length=1, dtype=wp.int64)
"""What an agent does in a Discrete space, as memory holds it."""


@dataclass(frozen=True)
class GameKernel:
    """A simulator as Warp functions of one environment; `TensorEnv.kernel` of your simulator returns one.

    The functions do what the methods of the same name do, for one environment instead of B, with the state as a vector
    that holds the fields in the order of the dataclass; ``rlstruct/sims/cart_pole_kernel.py`` is an example. They must
    agree with the methods: ``docs/kernels.md`` has a whole example, and compares them. All three are decorated with
    ``@wp.func``, and nothing in them depends on the device.

    Attributes:
        state: ``wp.types.vector(length=F, dtype=wp.float32)`` if all fields of the state are float32, with
            ``dtype=wp.int64`` if all are int64 or bool (as 0 and 1). Each field is a tensor [B].
        frame: what `observe` returns, ``wp.types.vector(length=D, dtype=wp.float32)``; with ``wp.uint8`` for bool.
        initial: ``(key: wp.uint64) -> state``; draw from the key with `rlstruct.sims.kernels.random`.
        transition: ``(state, action, key: wp.uint64) -> (state, reward: wp.float32, terminated: bool)``. The action is
            a ``wp.int64`` for a Discrete space, a vector of ``wp.float32`` for a Box of shape [A].
        observe: ``(state, cell: int) -> frame``: the frame of shape [D], or one cell of a picture.
        n_cells: how many cells a picture has, in the order of memory: 100 for [10, 10, D]; 1 for a frame of shape [D].
    """

    state: Any
    frame: Any
    initial: Any
    transition: Any
    observe: Any
    n_cells: int = 1


def _make_memory(game: GameKernel, Action: Any) -> Any:
    """Make the struct that holds all tensors of a step. Arrays that a launch does not need may be empty."""
    action = Action._wp_scalar_type_
    scalar, pixel = game.state._wp_scalar_type_, game.frame._wp_scalar_type_

    @wp.struct
    class Memory:
        env_key: wp.array(dtype=wp.int64)  # [B]
        pool: wp.array2d(dtype=scalar)  # [F, M], start states to choose from, or [F, 0]
        # where the simulation is
        state: wp.array2d(dtype=scalar)  # [F, B]
        clock: wp.array2d(dtype=wp.int64)  # [ELAPSED and EPISODE, B]
        ended: wp.array2d(dtype=wp.bool)  # [running and terminated, B], episodic
        last: wp.array3d(dtype=action)  # [1, B, A], episodic
        # where it is after K steps
        next_state: wp.array2d(dtype=scalar)
        next_clock: wp.array2d(dtype=wp.int64)  # STATE_KEY too
        next_ended: wp.array2d(dtype=wp.bool)
        next_last: wp.array3d(dtype=action)
        # what it shows: frames [K, D, B], or [K, B, cells * D] for pictures
        reached_frame: wp.array3d(dtype=pixel)
        current_frame: wp.array3d(dtype=pixel)
        reached_reward: wp.array2d(dtype=wp.float32)  # [K, B]
        current_reward: wp.array2d(dtype=wp.float32)  # [K, B]
        reached_last: wp.array3d(dtype=action)  # [K, B, A]
        current_last: wp.array3d(dtype=action)  # [K, B, A]
        flags: wp.array3d(dtype=wp.bool)  # [K, TERMINATED to RUNNING, B]

    return Memory


def make_access(game: GameKernel, Action: Any) -> SimpleNamespace:
    """Make the functions that move one environment's state, frame and action between registers and memory.

    Args:
        game: its vector types.
        Action: vector type of what the agent does, `Choice` in a Discrete space.

    Returns:
        ``Memory``, the struct of all tensors of a step; ``load(array, i)``, ``save(array, i, state)``,
        ``get(actions, k, i)``, ``put(actions, k, i, action)``, and
        ``show(frames, rewards, actions, k, i, state, reward, action)`` for an observation.
    """
    State, scalar, observe, number = game.state, game.state._wp_scalar_type_, game.observe, Action._wp_scalar_type_
    n_fields, n_cells, n_channels, n_lanes = State._length_, game.n_cells, game.frame._length_, Action._length_
    pixel = game.frame._wp_scalar_type_

    @wp.func
    def load(array: wp.array2d(dtype=scalar), i: int) -> State:
        s = State()
        for f in range(wp.static(n_fields)):
            s[f] = array[f, i]
        return s

    @wp.func
    def save(array: wp.array2d(dtype=scalar), i: int, s: State):
        for f in range(wp.static(n_fields)):
            array[f, i] = s[f]

    @wp.func
    def get(actions: wp.array3d(dtype=number), k: int, i: int) -> Action:
        action = Action()
        for a in range(wp.static(n_lanes)):
            action[a] = actions[k, i, a]
        return action

    @wp.func
    def put(actions: wp.array3d(dtype=number), k: int, i: int, action: Action):
        for a in range(wp.static(n_lanes)):
            actions[k, i, a] = action[a]

    @wp.func
    def show(
        frames: wp.array3d(dtype=pixel),
        rewards: wp.array2d(dtype=wp.float32),
        actions: wp.array3d(dtype=number),
        k: int,
        i: int,
        s: State,
        reward: wp.float32,
        action: Action,
    ):
        for cell in range(wp.static(n_cells)):
            seen = observe(s, cell)
            for d in range(wp.static(n_channels)):
                if wp.static(n_cells == 1):
                    frames[k, d, i] = seen[d]
                else:
                    frames[k, i, cell * wp.static(n_channels) + d] = seen[d]
        rewards[k, i] = reward
        put(actions, k, i, action)

    return SimpleNamespace(Memory=_make_memory(game, Action), load=load, save=save, show=show, get=get, put=put)
