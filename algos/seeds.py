"""Ranges of environment seeds: no two trainings, nor a training, its evaluations and later tests, share an episode.

A seed has 31 bits, the most that ale-py and EnvPool take: two for the purpose, five for the number of bits of the
run's seed, and 24 for the rest of that seed and the index of the environment. So a small seed leaves room for many
environments, and a large one for few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from rlstruct.algos.training.config import TrainingConfig
from rlstruct.errors import BadValueError
from rlstruct.options import check_seed

Purpose = Literal["training", "evaluation", "film", "test"]
_BITS = 24  # of a run's seed and the index of an environment together


def seed_range(purpose: Purpose, seed: int, n: int = 1) -> range:
    """Return all environment seeds of a run for a purpose; its environments take the first ones.

    Args:
        purpose: "training" and "evaluation" of a training; "film"; or "test", for the evaluation of a trained policy.
        seed: seed of the run, such as `TrainingConfig.seed`.
        n: number of environments.

    Raises:
        ValueError: the seed is too large for this many environments.

    >>> seed_range("training", 0, 8)[:8], seed_range("training", 1)[0], seed_range("test", 0)[0]
    (range(0, 8), 16777216, 1610612736)
    """
    bits, fits = (check_seed("seed_range", "seed", seed) + 1).bit_length(), _BITS - (n - 1).bit_length()
    if bits > fits + 1:
        largest = (1 << fits + 1) - 2
        raise BadValueError(
            f"seed is {seed} with {n} environments, expected at most {largest}: the environment seeds of all runs are "
            "separate ranges of 31 bits, the most that ale-py and EnvPool take. Choose a smaller seed"
            + (", or fewer environments." if n > 1 else ".")
        )
    width = _BITS + 1 - bits
    first = (get_args(Purpose).index(purpose) << 29) + (bits - 2 << _BITS) + (seed + 1 << width)
    return range(first, first + (1 << width))


Seeds = Mapping[Literal["training", "evaluation"], range]


def training_seeds(config: TrainingConfig, checkpoint: Mapping[str, Any] | None = None) -> Seeds:
    """Return the seeds of a training's environments and of its evaluation's: those of its checkpoint, if it has one.

    Raises:
        ValueError: see `seed_range`.
    """
    if checkpoint is None:
        n_envs = config.n_envs * max(1, config.n_processes)
        return {
            "training": seed_range("training", config.seed, n_envs),
            "evaluation": seed_range("evaluation", config.seed, config.evaluation_episodes),
        }
    if (saved := checkpoint["training"].get("seeds")) is not None:
        return {"training": range(*saved["training"]), "evaluation": range(*saved["evaluation"])}
    first, half = config.seed * 1_000_000, 500_000  # of a run of 0.3 or older
    return {"training": range(first, first + half), "evaluation": range(first + half, first + 2 * half)}


def first_seed(seeds: range, n: int, resumptions: int) -> int:
    """Return the seed of the first of n environments of a training that was resumed so many times.

    Each resumption takes the next n seeds, and begins again with the first ones where the range ends.
    """
    return seeds.start + resumptions % max(1, len(seeds) // n) * n
