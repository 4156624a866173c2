"""CartPole with extra floats of state, as a kernel of K steps in a launch; needs Warp."""

import functools
from typing import Any

import torch
import warp as wp

from rlstruct.sims import cart_pole_kernel as cart_pole
from rlstruct.sims.kernels import GameKernel, quietly, start
from rlstruct.sims.kernels.advance import Memory, make_advance
from rlstruct.sims.kernels.fused import BLOCK

CartPoleState: Any = cart_pole.State
TIME_LIMIT = 500


@wp.struct
class Pusher:
    """Settings of `push`."""

    gain: wp.float32


@wp.func
def push(by: Pusher, k: int, i: int, frame: CartPoleState) -> wp.int64:
    """Choose the action inside the kernel: push to where the pole falls."""
    if frame[2] + by.gain * frame[3] > 0.0:
        return wp.int64(1)
    return wp.int64(0)


@functools.cache
def make_kernel(n_extra: int, record: bool) -> Any:  # noqa: ANN401 - a Warp kernel
    """Make the kernel of a CartPole whose every step reads and writes so many further floats; see `Launch`."""
    State = wp.types.vector(length=4 + n_extra, dtype=wp.float32)

    @wp.func
    def initial(key: wp.uint64) -> State:
        s = State()
        begun = cart_pole.initial(key)
        for f in range(4):
            s[f] = begun[f]
        return s

    @wp.func
    def observe(s: State) -> CartPoleState:
        return CartPoleState(s[0], s[1], s[2], s[3])

    @wp.func
    def transition(s: State, action: wp.int64, key: wp.uint64):  # noqa: ANN202 - Warp infers it
        moved, reward, terminated = cart_pole.transition(CartPoleState(s[0], s[1], s[2], s[3]), action, key)
        for f in range(4):
            s[f] = moved[f]
        for f in range(wp.static(n_extra)):
            s[4 + f] = 0.5 * (s[4 + f] + moved[2])
        return s, reward, terminated

    game = GameKernel(state=State, frame=CartPoleState, initial=initial, transition=transition, observe=observe)
    return make_advance(game, Pusher, push, record)


class Launch:
    """K steps of N environments in one launch, whose state is updated in place.

    Args:
        n_envs: N.
        n_steps: K.
        n_extra: floats of state beyond CartPole's four.
        record: store what each step shows; False stores the last step alone.
        device: where.
    """

    def __init__(self, n_envs: int, n_steps: int, n_extra: int, record: bool, device: torch.device) -> None:
        def numbers(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            kept = torch.zeros((n if record else 1, *shape, n_envs), dtype=dtype, device=device)
            return kept.expand(n, *kept.shape[1:])

        self.state = torch.zeros((4 + n_extra, n_envs), dtype=torch.float32, device=device)
        self.state[:4] = torch.linspace(-0.05, 0.05, 4 * n_envs, device=device).view(4, n_envs)
        clock = torch.zeros((3, n_envs), dtype=torch.int64, device=device)
        held = {"state": self.state, "clock": clock}
        self.tensors = {"env_key": torch.arange(n_envs, device=device), **held}
        self.tensors |= {f"next_{name}": value for name, value in held.items()}
        for end, n in (("reached", n_steps), ("current", n_steps + 1)):
            shown = {"frame": numbers(n, 4), "reward": numbers(n), "last": numbers(n, dtype=torch.int64)}
            self.tensors |= {f"{end}_{name}": value for name, value in shown.items()}
        self.tensors["flags"] = numbers(n_steps, 3, dtype=torch.bool)
        start()
        memory, by = Memory(), Pusher()
        by.gain = 0.5
        for name, value in self.tensors.items():
            setattr(memory, name, wp.from_torch(value))
        self._stream = wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
        inputs, where = [memory, by, n_steps, TIME_LIMIT], wp.device_from_torch(device)
        with quietly():
            self._launch: Any = wp.launch(
                make_kernel(n_extra, record), n_envs, inputs, device=where, record_cmd=True, block_dim=BLOCK
            )

    def __call__(self) -> None:
        """Launch; the host does not wait."""
        self._launch.launch(self._stream)
