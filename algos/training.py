"""The loop of all algorithms: collect, learn, publish, evaluate beside, log. Layer 4."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlstruct.algos.checkpoint import FORMAT
from rlstruct.algos.config import TrainingConfig, check_resumed
from rlstruct.algos.divergence import RecentBatches, refuse_non_finite
from rlstruct.algos.episode_returns import EpisodeReturns
from rlstruct.algos.evaluation import Evaluation, Evaluator
from rlstruct.algos.learner import Learner
from rlstruct.algos.placement import BatchersOfTraining, CreateAgent, CreateEnv, cpu_copy
from rlstruct.algos.resumption import Fetched, Update, restore, saved
from rlstruct.algos.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.core import Trajectories
from rlstruct.device import resolve_device

CreateModel = Callable[[], nn.Module]
CreateLearner = Callable[[nn.Module], Learner]


@dataclass(frozen=True)
class TrainingResult:
    """What a training leaves behind.

    Attributes:
        model: the trained network, on the learner's device.
        before: evaluation of the untrained network.
        after: evaluation of the trained one, on episodes that nothing was selected by.
        evaluations: all of them, in the order of their weights; the first is ``before``, the last ``after``. One that
            reached the target stands before ``after``, which judges the same weights if learning waited for it.
        losses: name to one number for each update: the learner's terms, and ``policy_lag``, the changes of the weights
            between those that collected the batch and those that learnt from it.
        env_steps: environment steps collected.
        seconds: wall-clock time of the learning, without start-up and the first and last evaluation.
    """

    model: nn.Module
    before: Evaluation
    after: Evaluation
    evaluations: tuple[Evaluation, ...]
    losses: dict[str, list[float]]
    env_steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Collection:
    """How batches follow each other.

    Attributes:
        whole_episodes: every batch starts new episodes; otherwise each goes on where the last one stopped, in
            environments that restart by themselves.
        overlap: begin to collect the next batch before learning from this one. Worker processes then collect while the
            learner learns, with weights that are one update older than they could be.
    """

    whole_episodes: bool
    overlap: bool = False


def run_training(
    config: TrainingConfig,
    collection: Collection,
    create_learner: CreateLearner,
    create_model: CreateModel,
    create_agent: CreateAgent,
    create_env: CreateEnv,
    *,
    env_args: Mapping[str, object] | None = None,
    run: RunFolder | None = None,
) -> TrainingResult:
    """Build learner, batcher and evaluation, each on its device, and train.

    The factories travel to worker processes.

    Args:
        config: all numbers.
        collection: how batches follow each other.
        create_learner: called with the model, on the learner's device.
        create_model: makes the network, on the CPU; torch's generator is seeded around the call.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=…)``.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``; where it computes is its own affair, a
            `DeviceEnv` moves it to the batcher's device.
        env_args: further arguments of ``create_env``.
        run: where to log; None logs nothing. One from `RunFolder.resume` goes on from its checkpoint: bit by bit as if
            nothing had happened, if the environments can be saved, as those of `rlstruct.sims`. Others, such as
            gymnasium's, begin new episodes, with other seeds; everything else goes on.

    Returns:
        The trained network and its history.

    Raises:
        WorkerError: a worker process raised or died.
        ValueError: a device of the configuration does not exist, or the environments do not restart by themselves and
            should, or the checkpoint is that of other settings.
        TrainingDiverged: a loss is NaN or infinite.
    """
    checkpoint = None if run is None else run.checkpoint
    if checkpoint is not None:
        check_resumed(checkpoint, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create_model()
    learner = create_learner(model.to(resolve_device(config.learner_device)))
    resumptions = 0 if checkpoint is None else checkpoint["training"]["resumptions"] + 1
    make = BatchersOfTraining(config, create_agent, create_env, env_args or {}, cpu_copy(model), resumptions)
    with make.collecting() as batcher, make.evaluating() as evaluation:
        evaluator = Evaluator(evaluation, step_limit=config.evaluation_step_limit, resumable=run is not None)
        training = Training(config, collection, learner, batcher, evaluator, run)
        if run is not None and checkpoint is not None:
            training.load_state_dict(checkpoint, resumptions=resumptions)
            run.checkpoint = checkpoint = None  # a replay buffer may be large
        return training.run()


class Training:
    """The loop, with what it has to remember.

    Args:
        config: all numbers.
        collection: how batches follow each other.
        learner: learns from every batch.
        batcher: collects.
        evaluator: evaluates beside.
        run: where to log; None logs nothing.
    """

    def __init__(
        self,
        config: TrainingConfig,
        collection: Collection,
        learner: Learner,
        batcher: RL_Batcher,
        evaluator: Evaluator,
        run: RunFolder | None,
    ) -> None:
        """Begin with nothing collected."""
        self.config = config
        self.collection = collection
        self.learner = learner
        self.batcher = batcher
        self.evaluator = evaluator
        self.folder = run
        self.env_steps = 0
        self.resumptions = 0
        self.finished = False
        self.returns = EpisodeReturns()
        self.recent = RecentBatches()
        self.evaluations: list[Evaluation] = []
        self.losses: dict[str, list[float]] = {}
        self._ordered: int | None = None  # version of the weights that collect the batch under way
        self._published: int | None = None
        self._fetched: Fetched | None = None  # came before it was needed, because a checkpoint was written
        self._unread: list[Update] = []
        self._saved_at = 0  # environment steps
        self._start = 0.0
        self._warned = False

    def run(self) -> TrainingResult:
        """Train until the steps are used up or the target is reached."""
        if not self.evaluations:
            self._evaluate_now()
            self._save()
        self._start += time.perf_counter()
        while self.env_steps < self.config.n_env_steps and not self._target_reached():
            self.finished = False
            self._iterate()
        seconds = time.perf_counter() - self._start
        if not self.finished:
            self._read_losses()
            if self.evaluator.busy:
                self._record(self.evaluator.wait())
            self._evaluate_now()
            self.finished = True
            self._save()
        before, after = self.evaluations[0], self.evaluations[-1]
        return TrainingResult(
            self.learner.model, before, after, tuple(self.evaluations), self.losses, self.env_steps, seconds
        )

    def _iterate(self) -> None:
        trajectories, version = self._collect()
        lag = self.learner.policy_version - version
        terms = self.learner.update(trajectories, self._progress())
        if terms:
            version = self.learner.policy_version
            self._unread.append(Update(self.env_steps, version, lag, time.perf_counter(), terms))
            self.recent.add(version, self.learner.batches)
        self._evaluate_beside()
        if len(self._unread) == self.config.log_interval:
            self._read_losses()
        due = self._saved_at + (self.config.checkpoint_interval or self.config.evaluation_interval)
        if self.env_steps >= due:
            self._save()

    def state_dict(self) -> dict[str, object]:
        """Return everything that a checkpoint needs. Waits for the batch under way, which is kept for the next update.

        Nothing is lost by that: learning would wait for it next.
        """
        if self._ordered is not None and self._fetched is None:
            self._fetched = self._fetch()
        return {**self.learner.state_dict(), "format": FORMAT, "env_steps": self.env_steps, "training": saved(self)}

    def load_state_dict(self, state: Mapping[str, Any], *, resumptions: int) -> None:
        """Go on where `state_dict` was called.

        Args:
            state: what it returned.
            resumptions: how often this training has been resumed.
        """
        self.learner.load_state_dict(state)
        self.env_steps = self._saved_at = state["env_steps"]
        self.resumptions = resumptions
        restore(self, state["training"])

    def _save(self) -> None:
        if self.folder is not None:
            self.folder.save_checkpoint(self.state_dict())
            self._saved_at = self.env_steps

    def _progress(self) -> float:
        return self.env_steps / self.config.n_env_steps

    def _collect(self) -> tuple[Trajectories, int]:
        """Return the next batch, and the version of the weights that collected it."""
        (trajectories, n_running, version), self._fetched = self._fetched or self._fetch(), None
        steps = trajectories.trajectories
        if self.collection.whole_episodes:
            self.env_steps += int(steps.lengths.sum())  # sync: once per batch of whole episodes
            self._warn_of_cuts(trajectories, n_running)
        else:
            self._refuse_episodic(n_running)
            self.env_steps += steps.n_elems() * steps.n_steps()  # all rows are full: nobody waits for the device
            self.returns.add(steps)
        if self.collection.overlap and self.env_steps < self.config.n_env_steps:
            self._order()
        return trajectories, version

    def _fetch(self) -> Fetched:
        if self._ordered is None:
            self._order()
        trajectories, n_running = self.batcher.get()
        version, self._ordered = self._ordered, None
        if trajectories is None or n_running is None or version is None:
            raise RuntimeError("run_training: a blocking get() returned nothing.")
        return Fetched(trajectories, n_running, version)

    def _order(self) -> None:
        """Begin to collect a batch with the present weights."""
        if self._published != self.learner.policy_version:
            self.batcher.update(self.learner.model.state_dict())
        first = self._published is None
        self._published = self._ordered = self.learner.policy_version
        info = self.learner.agent_info(self._progress(), self.batcher.n_envs())
        settings = None if info.empty() else info
        if first or self.collection.whole_episodes:
            self.batcher.reset(settings)
        self.batcher.execute(settings)

    def _refuse_episodic(self, n_running: int) -> None:
        n_envs = self.batcher.n_envs()
        if n_running < n_envs:
            raise ValueError(
                f"run_training: {n_envs - n_running} of {n_envs} environments ended their "
                "episode and stand still, expected environments that restart by themselves. "
                "Let create_env return GymEnvInf in place of GymEnv, or a VecEnv with auto_reset = True."
            )

    def _warn_of_cuts(self, trajectories: Trajectories, n_running: int) -> None:
        """Say once that no episode of a batch came to an end."""
        if self._warned or n_running < trajectories.n_elems():
            return
        steps = trajectories.trajectories
        if bool((steps["_observation/done"] & steps.mask()).any()):  # sync: while all environments go on
            return
        self._warned = True
        warnings.warn(
            f"run_training: none of {trajectories.n_elems()} episodes had ended after n_timesteps = "
            f"{self.config.n_timesteps} steps. They are cut there, and learnt from as truncated ones. Raise "
            "n_timesteps, or give an environment that may never end a time limit, such as "
            "gymnasium.make(..., max_episode_steps=...).",
            stacklevel=5,
        )

    def _evaluate_beside(self) -> None:
        if (result := self.evaluator.poll()) is not None:
            self._record(result)
        due = self.evaluations[-1].env_steps + self.config.evaluation_interval
        if self.evaluator.busy or self.env_steps < due or self._target_reached():
            return
        if self.config.evaluation_processes == 0:
            self._evaluate_now()  # learning waits, and a target ends the training with the weights that reached it
        else:
            self._start_evaluation()

    def _evaluate_now(self) -> Evaluation:
        self._start_evaluation()
        return self._record(self.evaluator.wait())

    def _start_evaluation(self) -> None:
        weights, version = self.learner.model.state_dict(), self.learner.policy_version
        self.evaluator.start(weights, env_steps=self.env_steps, policy_version=version)

    def _record(self, result: Evaluation) -> Evaluation:
        self.evaluations.append(result)
        if self.folder is not None:
            self.folder.log_evaluation(result)
        return result

    def _target_reached(self) -> bool:
        target = self.config.target_return
        return target is not None and self.evaluations[-1].mean_return >= target

    def _read_losses(self) -> None:
        """Turn what the device computed into numbers, for several updates at once."""
        if not self._unread:
            return
        columns = torch.stack([torch.stack(list(update.terms.values())) for update in self._unread])
        rows = columns.tolist()  # sync: once per log_interval updates
        mean_return = self.returns.read()
        for update, row in zip(self._unread, rows, strict=True):
            numbers = {**dict(zip(update.terms, row, strict=True)), "policy_lag": float(update.policy_lag)}
            refuse_non_finite(
                numbers,
                env_steps=update.env_steps,
                policy_version=update.policy_version,
                recent=self.recent,
                learner=self.learner,
                run=self.folder,
            )
            for name, number in numbers.items():
                self.losses.setdefault(name, []).append(number)
            if mean_return is not None and update is self._unread[-1]:
                numbers["return"] = mean_return
            if self.folder is not None:
                self.folder.log(update.env_steps, update.policy_version, numbers, at=update.at)
        self._unread.clear()
        self.recent.clear()
