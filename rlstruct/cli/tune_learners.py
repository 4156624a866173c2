"""`rlstruct tune --n-learners`: find the number of learners that trains fastest, on one GPU and on several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlstruct.algos import Callback
from rlstruct.algos.training.callbacks import TrainingContext
from rlstruct.algos.training.compiling import SECONDS, seconds_saved
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers.workers.placement import Mode
from rlstruct.batchers.workers.processes import WORKER_NAME, inheriting, quiet_start
from rlstruct.cli.agents import algorithm_of
from rlstruct.cli.messages import UserError, say

_N_WARM = 3  # updates before the clock starts, while code is compiled and graphs are captured
_LONGEST = 600.0  # seconds that a training may take to start
_NEVER = 10**15

Rate = Callable[[TrainingConfig], float]


class Stopwatch(Callback):
    """Measures ``rate``, the steps per second after the first updates, and then stops the training."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.rate = seconds, 0.0
        self._begun: tuple[float, int] | None = None  # time and environment steps

    def on_update(self, training: TrainingContext) -> None:
        """Start the clock after the first updates, and stop the training when the time is over."""
        begun = self._begun
        if training.updates < _N_WARM or (begun and time.perf_counter() - begun[0] < self._seconds):
            return
        if training.learner.device.type == "cuda":
            torch.cuda.synchronize(training.learner.device)
        now = time.perf_counter(), training.env_steps
        if begun is None:
            self._begun = now
        else:
            self.rate = (now[1] - begun[1]) / (now[0] - begun[0])
            training.stop("it was timed")


def rate_of(algorithm: str, factories: Sequence[Any], seconds: float, config: TrainingConfig) -> float:
    """Train in a new process, because this one may have used CUDA already, and return the steps per second."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with quiet_start(), inheriting({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):  # finding a GPU opens no context
        arguments = algorithm, factories, seconds, config, theirs
        process = context.Process(target=_train, args=arguments, name=f"{WORKER_NAME}-tuned")
        process.start()
    theirs.close()
    try:
        if ours.poll(seconds + _LONGEST):
            return float(ours.recv())
    except EOFError:
        pass
    finally:
        process.kill()  # its learners end with it
        process.join()
    raise UserError(f"tune: a training of {config.n_learners} learners failed or took more than {_LONGEST:.0f} s.")


def _train(
    algorithm: str, factories: Sequence[Any], seconds: float, config: TrainingConfig, answer: Connection
) -> None:
    """Train without evaluations and checkpoints, and send the steps per second."""
    torch.set_num_threads(1)
    watch = Stopwatch(seconds)
    algorithm_of(algorithm)(without_end(config), *factories, callbacks=[watch])
    answer.send(watch.rate)


def without_end(config: TrainingConfig) -> TrainingConfig:
    """Return settings of a training without end, which compiles no more than the one that is to be tuned."""
    saved = seconds_saved(config)
    off: dict[str, Any] = {
        name: False for name in SECONDS if getattr(config, name) == "auto" and saved[name] <= SECONDS[name]
    }
    return replace(  # AlphaZero needs an even number of episodes
        config, n_env_steps=_NEVER, evaluation_interval=_NEVER, evaluation_episodes=2, evaluation_processes=0,
        checkpoint_interval=_NEVER, target_return=None, **off,
    )  # fmt: skip


def with_learners(config: TrainingConfig, n: int, sharing: Mode) -> TrainingConfig:
    """Return settings for n learners, each with as many environments and workers as the single learner had."""
    name = "n_processes" if config.n_processes else "n_envs"
    shared = sharing if n > 1 and config.learner_device.startswith("cuda") else config.sharing
    return replace(config, n_learners=n, sharing=shared, **{name: n * getattr(config, name)})


def tune_learners(
    config: TrainingConfig, numbers: Sequence[int], gpus: int | None, sharing: Mode, rate: Rate
) -> TrainingConfig:
    """Measure several numbers of learners on one device, then on all GPUs; print a table and return the fastest.

    Args:
        config: fastest settings of a single learner.
        numbers: numbers of learners to try, in rising order; the first one that is slower ends the search.
        gpus: number of GPUs that the answer is for; None for the visible ones.
        sharing: mode in which learners share a GPU.
        rate: returns the steps per second of a training.
    """
    visible = torch.cuda.device_count() if config.learner_device.startswith("cuda") else 1
    used = min(visible, gpus or visible)
    say(f"learners, each with {config.n_processes} workers and {config.n_envs} environments")
    rates: dict[int, float] = {}
    for n in numbers:
        rates[n] = rate(with_learners(config, n, sharing))
        say(f"{n:>8} {rates[n]:>14,.0f} steps/s, {rates[n] / rates[numbers[0]]:.2f} times {numbers[0]}")
        if rates[n] < max(rates.values()):
            break
    n = max(rates, key=rates.__getitem__)
    best = with_learners(config, n, sharing)
    if used > 1:
        devices: dict[str, Any] = dict.fromkeys(("learner_device", "batcher_device"), "cuda")
        best = replace(with_learners(config, used * n, sharing if n > 1 else "none"), **devices)
        say(f"{used * n:>8} {rate(best):>14,.0f} steps/s on {used} GPUs, measured")
    if gpus is not None and gpus > visible:
        say(f"{gpus * n:>8} {gpus * rates[n]:>14,.0f} steps/s on {gpus} GPUs at most: projected from one GPU,")
        say("         without the time for all-reduce between GPUs")
    shared = f" --sharing {best.sharing}" if best.sharing != "none" else ""
    say(f"paste: --learners {best.n_learners} --n-processes {best.n_processes} --n-envs {best.n_envs}{shared}")
    return best
