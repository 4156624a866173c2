"""Simulators as NVIDIA Warp kernels, one source for CPU and CUDA: ``backend="warp"``.

A game is a `GameKernel`: three small Warp functions of one environment. Random numbers, restarts, limits, episodic mode
and K steps in one launch are written once around them, in `rlstruct.sims.kernels.advance`. Kernels are compiled when
they are first used, for the device they are used on, and kept in Warp's cache (``WARP_CACHE_PATH`` moves it).

Needs the extra ``warp``; nothing else of rlstruct imports this package before a simulator asks for it.
"""

from rlstruct.errors import how_to_install

try:
    import warp as wp
except ImportError as error:
    raise ImportError(
        f"rlstruct.sims: backend='warp' needs NVIDIA Warp, which is not installed. {how_to_install('warp')}, or use "
        "backend='torch'."
    ) from error

from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.stepper import WarpStepper, quietly

with quietly():
    wp.init()

__all__ = ["GameKernel", "WarpStepper", "wp"]
