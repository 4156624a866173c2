"""A training by two processes, and by one process that stands for both, for test_learners.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_tasks import TASKS, config_of, create_sim, train

from rlstruct.algos import dqn, sac
from rlstruct.algos.distributed.process_group import learner_group
from rlstruct.algos.learner import GradientLearner
from rlstruct.algos.minibatches import EpochLearner
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.algos.training import run_folder
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.algos.training.loop import TrainingLoop
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.core import DictTensor, Trajectories
from rlstruct.errors import LearnerError
from rlstruct.functional import random

N_LONG = 10**9
EQUAL: dict[str, dict[str, Any]] = {  # ten gradient steps, or a few more
    "reinforce": {"n_env_steps": 900},
    "a2c": {"n_env_steps": 400, "whiten_advantages": True},
    "ppo, normalised": {"n_env_steps": 120},
    "ppo, recurrent": {"n_env_steps": 120, "n_minibatches": 2, "target_kl": None},
    "pqn": {"n_env_steps": 120},
    "dqn": {"n_env_steps": 320},
    "sac": {"n_env_steps": 320},
}
RESUMED = ("dqn", "sac", "a2c, recurrent, overlap")
BROKEN = "an environment that breaks in one learner"


class Killed(Exception):
    pass


def train_seeing(name: str) -> tuple[TrainingResult, list[torch.Tensor]]:
    """Train, and return the frames of all batches [B, T, ...], too."""
    kind = TASKS[name][0].train.learner
    seen, update = [], kind.update

    def see(self: GradientLearner, batch: Trajectories, fraction_done: float) -> Any:
        steps = batch.steps
        seen.append(steps["observation/frame"] * steps.mask().unsqueeze(-1))
        return update(self, batch, fraction_done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "update", see)
        return train(name, None, evaluation_interval=N_LONG, **EQUAL[name]), seen


class TwoBuffers:
    """The replay buffers of two learners, each with its half of the environments."""

    def __init__(self, whole: ReplayBuffer, seed: int) -> None:
        settings: dict[str, Any] = {"n_step": whole.n_step, "discount": whole.discount}
        self.both = [ReplayBuffer(whole.capacity // 2, **settings, seed=seed + (rank << 32)) for rank in range(2)]
        self.device = self.both[0].device

    def extend(self, trajectories: Trajectories) -> None:
        half = trajectories.n_elems() // 2
        self.both[0].extend(trajectories.slice(0, half))
        self.both[1].extend(trajectories.slice(half, 2 * half))

    def sample(self, n: int) -> DictTensor:
        return DictTensor.cat([buffer.sample(n // 2) for buffer in self.both])


def shuffled_by_two(self: EpochLearner, n_rows: int, epoch: int) -> tuple[torch.Tensor, ...]:
    """Minibatches of which each half is one of a learner with half of the rows."""
    n, half = self.config.n_minibatches, n_rows // 2
    minibatches = []
    for rank in range(2):
        keys = random.step_keys(seed_of(self, rank, "minibatches"), self.version_now + epoch * n, torch.arange(half))
        order = keys.squeeze(1).argsort() + half * rank
        minibatches.append(order.tensor_split([half * k // n for k in range(1, n)]))
    return tuple(torch.cat(two) for two in zip(*minibatches, strict=True))


def keys_of_two(self: sac.SACLearner, n: int) -> torch.Tensor:
    """Return the keys that the policies of two learners draw from, each for its half of the batch."""
    lanes = torch.arange(n // 2)
    seeds = [seed_of(self, rank, "policy noise") for rank in range(2)]
    return torch.cat([random.step_keys(seed, self.policy_version, lanes).view(2, -1) for seed in seeds], 1).flatten()


def seed_of(learner: GradientLearner, rank: int, purpose: str) -> torch.Tensor:
    """Return `GradientLearner.seed_for` of a learner."""
    return random.purpose_seed(torch.tensor([learner.config.seed + (rank << 32)]), purpose)


def train_as_one(name: str) -> tuple[TrainingResult, list[torch.Tensor]]:
    """Train in one process on the shuffles and draws of two."""

    def let_it_have_two_buffers(patch: pytest.MonkeyPatch, kind: Any) -> None:
        create = kind.__init__

        def with_two_buffers(self: Any, model: Any, agent: Any, config: Any) -> None:
            create(self, model, agent, config)
            self.buffer = TwoBuffers(self.buffer, config.seed)

        patch.setattr(kind, "__init__", with_two_buffers)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (dqn.DQNLearner, sac.SACLearner):
            let_it_have_two_buffers(patch, kind)
        patch.setattr(sac.SACLearner, "keys", keys_of_two)
        patch.setattr(EpochLearner, "shuffled", shuffled_by_two)
        return train_seeing(name)


def plain(result: TrainingResult) -> dict[str, Any]:
    evaluations = [(e.env_steps, e.policy_version, e.returns, e.lengths) for e in result.evaluations]
    weights = {name: weight.clone() for name, weight in result.model.state_dict().items()}
    return {"weights": weights, "evaluations": evaluations, "losses": result.losses, "env_steps": result.env_steps}


def new_folder(root: Path, name: str, **changes: Any) -> RunFolder:
    config = replace(config_of(name), **changes)
    return RunFolder("test", config, n_env_steps=config.n_env_steps, root=root, progress=False)


def train_and_resume(name: str, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train without a break, and with one."""
    less = {"n_env_steps": 480}
    with new_folder(root / "whole", name, **less) as run:
        whole = plain(train(name, run, **less))
    iterate: Callable[[TrainingLoop], None] = TrainingLoop.iterate
    folder = new_folder(root / "broken", name, **less)

    def die(self: TrainingLoop) -> None:
        if self.env_steps >= 200:
            raise Killed
        iterate(self)

    with pytest.MonkeyPatch.context() as patch, folder:
        patch.setattr(TrainingLoop, "iterate", die)
        with pytest.raises(Killed):
            train(name, folder, **less)
    torch.manual_seed(200)
    with RunFolder.resume(folder.path, progress=False) as folder:
        return whole, plain(train(name, folder, **less))


def create_breaking_sim(n_envs: int, seed: int) -> Any:
    if learner_group().rank == 1:
        raise OSError(BROKEN)
    return create_sim(n_envs, seed)


def run_all(root: Path) -> dict[str, Any]:
    """Everything that these two processes do, one after the other."""
    found: dict[str, Any] = {"equal": {}, "seen": {}, "resumed": {}}
    for name in EQUAL:
        result, found["seen"][name] = train_seeing(name)
        found["equal"][name] = plain(result)
    for name in RESUMED:
        found["resumed"][name] = train_and_resume(name, root / name.replace(" ", ""))
    try:
        train("a2c", None, create_env=create_breaking_sim)
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    return found


def be_killed_or_see_it(rank: int) -> str:
    """Let the other learner die in the middle of a training."""
    step = GradientLearner.descend

    def die(self: GradientLearner, *terms: Any, **more: Any) -> Any:
        if rank == 1 and self.policy_version == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *terms, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientLearner, "descend", die)
        try:
            train("a2c", None)
        except LearnerError as error:
            return f"ranks {error.ranks}: {error}"
    return "nothing"


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_folder.draw_learning_curve = lambda *args, **settings: None
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(run_all(folder), folder / f"found-{rank}.pt")
    (folder / "killed.txt").write_text(be_killed_or_see_it(rank))
