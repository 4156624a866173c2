"""Environment seeds of trainings, evaluations, films and tests: none in common, and none beyond 31 bits."""

from __future__ import annotations

from itertools import pairwise, product
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from resume_tasks import create_network, create_sim

from rlstruct.agents import ActorCriticAgent
from rlstruct.algos import A2CConfig, RunFolder, a2c
from rlstruct.algos.seeds import Purpose, first_seed, seed_range, training_seeds
from rlstruct.algos.training import build as build_module
from rlstruct.algos.training.build import create_batchers
from rlstruct.batchers import RL_Batcher

SMALL: dict[str, Any] = {
    "n_env_steps": 80, "n_timesteps": 10, "n_envs": 4, "n_processes": 0, "evaluation_episodes": 2,
    "evaluation_processes": 0, "evaluation_timesteps": 60, "evaluation_interval": 1000,
}  # fmt: skip


def seeds_of(monkeypatch: pytest.MonkeyPatch, config: A2CConfig, resumptions: int = 0, **more: Any) -> list[range]:
    """The seeds that a training's environments get, and its evaluation's."""
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "RL_Batcher", lambda *args, **settings: settings)
        created = create_batchers(config, ActorCriticAgent, create_sim, {}, create_network(), resumptions, **more)
        settings: list[Any] = [create() for create in created]
    n_envs = [config.n_envs * max(1, config.n_processes), config.evaluation_episodes]
    return [range(one["seed"], one["seed"] + n) for one, n in zip(settings, n_envs, strict=True)]


def test_ranges_of_all_runs_and_purposes_are_disjoint_and_fill_31_bits() -> None:
    seeds = [*range(600), *((1 << bits) + more for bits in range(10, 24) for more in (-2, -1, 0, 1))]
    for purpose, index in zip(get_args(Purpose), range(4), strict=True):
        ranges = sorted((seed_range(purpose, seed) for seed in dict.fromkeys(seeds)), key=attrgetter("start"))
        assert all(one.stop <= other.start for one, other in pairwise(ranges))
        assert ranges[0].start == index << 29
        assert seed_range(purpose, (1 << 25) - 2).stop <= (index + 1) << 29
    assert seed_range("test", (1 << 25) - 2)[-1] < 2**31


def test_trainings_with_a_million_environments_share_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [A2CConfig(**{**SMALL, "n_envs": 1 << 20, "seed": seed}) for seed in (0, 1, 2, 30)]
    ranges = [one for config in configs for one in seeds_of(monkeypatch, config)]
    ranges += [seed_range("test", seed, 101) for seed in (0, 1, 500)]
    for one, other in product(ranges, ranges):
        assert one is other or one.stop <= other.start or other.stop <= one.start


def test_evaluate_plays_none_of_the_seeds_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``rlstruct evaluate --seed 500`` did after a training with seed 501."""
    config = A2CConfig(**SMALL, seed=501)
    trained = {seed for one in seeds_of(monkeypatch, config) for seed in one}
    for seed in range(1100):
        assert trained.isdisjoint(seed_range("test", seed, 101)[:101])


@pytest.mark.parametrize(
    ("seed", "n", "largest"), [(31, 1 << 20, 30), (8191, 4096, 8190), (2**40, 1, 2**25 - 2), (1 << 20, 32, 1048574)]
)
def test_a_seed_that_is_too_large_is_refused(seed: int, n: int, largest: int) -> None:
    with pytest.raises(ValueError, match=rf"seed is {seed} with {n} environments, expected at most {largest}: "):
        seed_range("training", seed, n)
    assert len(seed_range("training", largest, n)) >= n


def test_a_training_with_too_large_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed is 2000000 with 32 environments, expected at most 1048574"):
        a2c.train(
            A2CConfig(**{**SMALL, "evaluation_episodes": 32}, seed=2_000_000),
            create_network,
            ActorCriticAgent,
            create_sim,
        )


def test_resumptions_take_new_seeds_of_the_same_range(monkeypatch: pytest.MonkeyPatch) -> None:
    config = A2CConfig(**SMALL, seed=7)
    taken = [seeds_of(monkeypatch, config, resumptions) for resumptions in range(50)]
    for i, (own, n) in enumerate(((training_seeds(config)["training"], 4), (training_seeds(config)["evaluation"], 2))):
        assert len({seed for ranges in taken for seed in ranges[i]}) == 50 * n
        assert all(seed in own for ranges in taken for seed in ranges[i])
    assert first_seed(range(10, 20), 4, 2) == 10  # two resumptions of four environments fit


def test_a_run_of_an_older_version_keeps_its_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint names none; its seed may be too large for the new ranges."""
    config = A2CConfig(**SMALL, seed=3)
    with RunFolder("run", config, n_env_steps=80, root=tmp_path, progress=False, loggers=()) as run:
        a2c.train(config, create_network, ActorCriticAgent, create_sim, run=run)
    file = run.path / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    assert state["training"]["seeds"]["training"][0] == seed_range("training", 3)[0]
    del state["training"]["seeds"]
    torch.save(state, file)
    created: list[int] = []
    create = RL_Batcher.__init__

    def watched(self: RL_Batcher, *args: Any, **settings: Any) -> None:
        created.append(settings["seed"])
        create(self, *args, **settings)

    monkeypatch.setattr(RL_Batcher, "__init__", watched)
    for _ in range(2):  # the first resumption writes the old ranges into the checkpoint
        with RunFolder.resume(run.path, progress=False, loggers=()) as resumed:
            a2c.train(config, create_network, ActorCriticAgent, create_sim, run=resumed)
        assert all(3_000_000 <= seed < 4_000_000 for seed in created), created
    assert training_seeds(A2CConfig(seed=10**9), state)["training"][0] == 10**15
