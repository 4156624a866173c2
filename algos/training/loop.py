"""The training loop of all algorithms: collect, learn, publish weights, evaluate, log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.distributed.launch import launch_learners
from rlstruct.algos.learner import CreateAgent, GradientLearner, agent_around
from rlstruct.algos.seeds import Seeds, training_seeds
from rlstruct.algos.training.build import (
    CreateEnv,
    check_create_env,
    check_number,
    create_batchers,
    create_network,
    threads_for,
)
from rlstruct.algos.training.callbacks import Callback, Callbacks, for_others
from rlstruct.algos.training.checkpoint import FORMAT, generator_states, restored, set_generator_states, stored
from rlstruct.algos.training.compiling import with_decisions
from rlstruct.algos.training.config import TrainingConfig, check_resumed
from rlstruct.algos.training.evaluation import Evaluates, Evaluator, TrainingResult
from rlstruct.algos.training.history import TrainingHistory
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import EpisodeStatistics, RL_Batcher
from rlstruct.core import DictTensor, TensorSpec, Trajectories
from rlstruct.device import resolve_device
from rlstruct.engine.compiled import compiling_simulators
from rlstruct.errors import BadTypeError, BadValueError, kind_of, warn_user
from rlstruct.functional.all_reduce import sum_over_learners
from rlstruct.policies.loading import description, missing_factories, shown_by
from rlstruct.profiling import operation, phase
from rlstruct.vec_env import TIME_LIMITS

CreateModel = Callable[[], nn.Module]

_NONE = -1  # version before any weights were published


Fetched = tuple[Trajectories, int, int]
"""A batch, the number of its environments whose episode continues, and the version of the weights that collected it."""


@phase("training")
@renamed.parameters
def run_training(
    learner_class: type[GradientLearner],
    config: TrainingConfig,
    create_model: CreateModel,
    create_agent: CreateAgent,
    create_env: CreateEnv,
    *,
    env_args: Mapping[str, object] | None = None,
    run: RunFolder | None = None,
    settings: TrainingConfig | None = None,
    create_evaluator: Callable[[nn.Module], Evaluates] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainingResult:
    """Build learner, batcher and evaluation, each on its device, and train. The factories are sent to worker processes.

    Args:
        learner_class: class of the algorithm's learner, called as ``kind.create(model, create_agent, config)``.
        config: all settings.
        create_model: returns the network, on the CPU. torch's generator is seeded around the call.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=…)``; `rlstruct.agents` has
            such factories. Each algorithm documents the outputs that it expects of an agent.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``. The environments may compute on any device;
            a `DeviceEnv` moves their observations to the batcher's. They must reset themselves, unless the algorithm
            learns from whole episodes.
        env_args: further arguments of ``create_env``.
        run: where to log; None logs nothing. A folder from `RunFolder.resume` continues from its checkpoint. If the
            environments can be saved, like those of `rlstruct.sims`, the training continues bit for bit. Others, such
            as gymnasium's, start new episodes with new seeds; everything else continues.
        settings: those that ``run`` was created with, if ``config`` has been adjusted since; by default ``config``.
        create_evaluator: called with the network, returns an evaluator of weights. None lets the agent play episodes
            in separate environments.
        callbacks: called in this order at the start and the end, after each update and after each evaluation; see
            `rlstruct.algos.Callback`. An exception raised by a callback ends the training, with a note that names it.

    Returns:
        The trained network and its history.

    Raises:
        WorkerError: a worker process raised or died.
        LearnerError: one of several learners is missing, has different settings, failed, or was killed or stopped; or
            the environments cannot be divided among them.
        TypeError: create_model is a network instead of a function, create_agent or create_env is not a factory or does
            not accept its arguments, config belongs to another algorithm, or run is not a RunFolder.
        ValueError: the seed is too large (see `rlstruct.algos.seeds`), a device of the configuration does not exist,
            the environments should reset themselves but do not, or ``run`` or its checkpoint has other settings.
        RuntimeError: ``run`` is closed, or another training has written to it.
        TrainingDiverged: a loss is NaN or infinite.
    """
    if not isinstance(config, learner_class.settings):
        raise BadTypeError(
            f"run_training: config is {kind_of(config)}, expected the {learner_class.settings.__name__} of "
            "this algorithm. Import the configuration and train() from the same module of rlstruct.algos."
        )
    if not isinstance(run, RunFolder | None):
        raise BadTypeError(f"run_training: run is {run!r}, expected a RunFolder, or None. Pass run=RunFolder(…).")
    if run is not None:
        run.begin(settings or config)
    check_create_env(create_env, env_args or {})
    parts = learner_class, config, create_model, create_agent, create_env
    again = partial(run_training, *parts, env_args=env_args, create_evaluator=create_evaluator)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(launch_learners(config, partial(again, callbacks=for_others(callbacks))))
        config, run = replace(config, n_learners=group.size), None if group.rank else run
        if (complete := None if run is None else run.checkpoint) is not None:
            check_resumed(complete, config)
        checkpoint = group.scatter(complete)
        model = create_network(create_model, config.seed)
        agent = partial(agent_around, model, create_agent, "cpu", stochastic=True)
        earlier = {} if checkpoint is None else checkpoint["config"]
        config = with_decisions(config, earlier, agent, fixed_shapes=not learner_class.whole_episodes)
        share = group.local_config(config)
        group.broadcast_weights(model)
        learner = learner_class.create(model.to(resolve_device(share.learner_device)), create_agent, share)
        seeds, factories = training_seeds(config, checkpoint), (share, create_agent, create_env, env_args or {})
        resumptions = 0 if checkpoint is None else checkpoint["training"]["resumptions"] + 1
        collecting, evaluating = create_batchers(*factories, model, resumptions, seeds)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads_for(model, config.threads))
        with compiling_simulators(bool(config.compile_simulator)):
            batcher = stack.enter_context(collecting())
        stack.callback(learner.close)
        evaluator: Evaluates | None = None
        if group.rank == 0 and create_evaluator is not None:
            evaluator = create_evaluator(learner.model)
        elif group.rank == 0:
            evaluation = stack.enter_context(phase("evaluation")(evaluating)())
            show = None if run is None else run.show_evaluation
            sampling = learner.agent_info(1.0, evaluation.n_envs()) if config.evaluation_stochastic else DictTensor()
            check_number(share, evaluation, evaluates=True)
            limit, check = config.evaluation_step_limit, learner.check_agent
            evaluator = Evaluator(evaluation, step_limit=limit, show=show, agent_info=sampling, check=check)
        if group.rank == 0:
            check_number(share, batcher)
        loop = TrainingLoop(config, learner, batcher, evaluator, run)
        loop.create_agent, loop.callbacks = create_agent, Callbacks(callbacks, loop, create_agent)
        loop.seeds = seeds
        loop.draws = config.evaluation_stochastic and create_evaluator is None
        if checkpoint is not None:
            loop.load_state_dict(checkpoint, resumptions=resumptions)
        if run is not None:
            run.checkpoint = complete = checkpoint = None  # a replay buffer may be large
        loop.callbacks.call("on_start")
        result = loop.run()
        group.finish()
        return result


class TrainingLoop:
    """The loop and its state.

    Attributes:
        history: losses, returns and evaluations.
        callbacks: the user's callbacks.
        create_agent: the factory of agents.
        seeds: environment seeds of the training and its evaluation.
        draws: True if evaluations sample their actions; a policy loaded from this training then does so as well.
    """

    callbacks: Callbacks
    create_agent: CreateAgent
    seeds: Seeds

    def __init__(
        self,
        config: TrainingConfig,
        learner: GradientLearner,
        batcher: RL_Batcher,
        evaluator: Evaluates | None,
        run: RunFolder | None,
    ) -> None:
        self.config, self.learner, self.batcher, self.evaluator = config, learner, batcher, evaluator
        if not (learner.whole_episodes or batcher.auto_reset):
            raise BadValueError(
                f"run_training: create_env returned environments that stop at the end of their episode, but "
                f"{type(config).__name__} needs environments that reset themselves. Return GymEnvInf instead of "
                "GymEnv, or a VecEnv with auto_reset = True."
            )
        self.env_steps = 0  # environment steps collected, by all learners
        self.history = TrainingHistory(learner, EpisodeStatistics(batcher.n_envs(), batcher.device), run)
        self.folder = run
        self._group = learner.group
        self._saves = bool(self._group.broadcast(run is not None))
        self._resumptions = 0
        self._finished = self._warned = self._evaluating = self._collecting = False
        self._published = _NONE  # version of the weights with which the latest batch is collected
        self._fetched: Fetched | None = None  # fetched early, for a checkpoint
        self._saved_at = 0  # environment steps
        self._start = 0.0
        self.draws = True
        self._first: Trajectories | None = None  # the first step of an environment, after the first batch  [1, 1]
        self._described = True  # False once a policy could not be described

    @property
    def shown(self) -> Mapping[str, TensorSpec] | None:
        """Specs of one environment's frames; None before the first batch."""
        return None if self._first is None else shown_by(self._first.steps.specs())

    def run(self) -> TrainingResult:
        """Train until the steps are used up or the target is reached."""
        evaluations = self.history.evaluations
        if not evaluations:
            self._evaluate()
            self._save()
        self._start += time.perf_counter()
        while self._continues() and not self.callbacks.stopped():
            self._finished = False
            self.iterate()
        seconds = time.perf_counter() - self._start
        ended = self.env_steps >= self.config.n_env_steps or self._target_reached()
        stopped = None if ended else self.callbacks.context.reason
        if not self._finished:
            self.history.read()
            if self._evaluating:
                self._fetch_evaluation(wait=True)
            self._evaluate()
            self._finished = True
            self._start = time.perf_counter() - seconds  # neither this evaluation nor the first one counts
            self._save()
        self.callbacks.call("on_end")
        learned = self.learner.model, evaluations[0], evaluations[-1], tuple(evaluations)
        counts = self.env_steps, seconds, torch.get_num_threads()
        return TrainingResult(*learned, self.history.losses, *counts, stopped)

    @operation("iteration")
    def iterate(self) -> None:
        """Collect a batch, learn from it, and handle evaluations, logging and checkpoints that are due."""
        self._group.raise_if_lost()
        done = self._fraction_done()  # before the batch, so that a rate annealed to 0 is not 0 in the last update
        trajectories, version = self._collect()
        lag = self.learner.policy_version - version
        before = self.learner.policy_version
        terms, n_unread = self.learner.update(trajectories, done), 0
        if terms:
            # An update of one's own may step an optimiser without `descend`; its weights must be published, too.
            self.learner.policy_version = max(self.learner.policy_version, before + 1)
            n_unread = self.history.add_update(self.env_steps, lag, terms)
            self.callbacks.update(trajectories, terms)
        if self._evaluating:
            self._fetch_evaluation(wait=False)
        if n_unread == self.config.log_interval:
            self.history.read()
        due = self._saved_at + (self.config.checkpoint_interval or self.config.evaluation_interval)
        if self.env_steps >= due and not self._evaluating:
            self._save()

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint. Call it when no evaluation is running and every loss has been read.

        It waits for the batch that is being collected, and keeps it for the next update.
        """
        if self._collecting:
            self._fetched = self._fetch()
        fetched = self._fetched
        training = {
            "resumptions": self._resumptions,
            "seeds": {purpose: [seeds.start, seeds.stop] for purpose, seeds in self.seeds.items()},
            "finished": self._finished,
            "seconds": time.perf_counter() - self._start if self._start else 0.0,
            "published": self._published,
            "fetched": None if fetched is None else (stored(fetched[0]), *fetched[1:]),
            "first": None if self._first is None else stored(self._first),
            "history": self.history.state_dict(),
            "batcher": self.batcher.state_dict(),
            "evaluator": {} if self.evaluator is None else self.evaluator.state_dict(),
            "generators": generator_states(),
            "callbacks": self.callbacks.state_dict(),
        }
        return {**self.learner.state_dict(), **self.policy_state(), "env_steps": self.env_steps, "training": training}

    def sampling(self) -> dict[str, Tensor]:
        """Return the settings with which a policy of this training samples: those of its end.  [...] each."""
        return {key: value[0] for key, value in self.learner.agent_info(1.0, 1).items()}

    def policy_state(self) -> dict[str, object]:
        """Return what `rlstruct.load` needs to load the policy, besides the weights."""
        parts = self.create_agent, self.learner.model, self._first, self.batcher.actions, self.batcher.bounds
        policy = description(*parts, stochastic=self.draws, agent_info=self.sampling())
        missing = missing_factories(policy)
        if missing and self._described and self._group.rank == 0:
            warn_user(
                f"run_training: the checkpoints of this training do not contain its whole policy: "
                f"{', and '.join(missing.values())}. In Python, pass the training's own: rlstruct.load(…, "
                f"{', '.join(f'{name}=…' for name in missing)}). On the command line, a run of your own program needs "
                "--factory MODULE:CREATE_ENV MODULE:CREATE_MODEL MODULE:CREATE_AGENT; one of rlstruct train finds the "
                "class that --env names."
            )
        self._described = self._described and not missing
        return {"format": FORMAT, "config": asdict(self.config), "policy": policy}

    def load_state_dict(self, state: Mapping[str, Any], *, resumptions: int) -> None:
        """Continue from a `state_dict`."""
        self.learner.load_state_dict(state)
        self.env_steps = self._saved_at = state["env_steps"]
        training = state["training"]
        self._resumptions, self._finished = resumptions, training["finished"]
        self._start = -training["seconds"]
        self._published = _NONE if training["published"] is None else training["published"]
        self.history.load_state_dict(training["history"])
        if training["fetched"] is not None:
            tensors, n_running, version = training["fetched"]
            self._fetched = restored(tensors).to(self.batcher.device), n_running, version
        if (first := training.get("first")) is not None:  # there may be no batch left to collect
            self._first = restored(first).to(self.learner.device)
        self.batcher.load_state_dict(training["batcher"], self.learner.model.state_dict())
        if self.evaluator is not None:
            self.evaluator.load_state_dict(training["evaluator"])
        set_generator_states(training["generators"])
        self.callbacks.load_state_dict(training.get("callbacks", ()))

    def _save(self) -> None:
        if self._saves:
            self.history.read()
            state = self._group.gather(self.state_dict())
            if self.folder is not None:
                self.folder.save_checkpoint(state)
            self._saved_at = self.env_steps

    def _fraction_done(self) -> float:
        return self.env_steps / self.config.n_env_steps

    def _collect(self) -> tuple[Trajectories, int]:
        """Return the next batch, and the version of the weights that collected it."""
        (trajectories, n_running, version), self._fetched = self._fetched or self._fetch(), None
        steps = trajectories.steps
        if self._first is None:
            first = Trajectories(trajectories.info.slice(0, 1), steps.slice(0, 1).temporal_slice(0, 1))
            self._first = first.clone().to(self.learner.device)
        if self.learner.whole_episodes:
            n_steps = sum_over_learners(steps.lengths.sum())
            self.env_steps += int(n_steps)  # sync: once per batch of whole episodes
            if not self._warned and n_running == trajectories.n_elems():
                ended = steps["_observation/done"] & steps.mask()
                self._warned = not bool(ended.any())  # sync: while all environments go on
                if self._warned:
                    warn_user(
                        f"run_training: none of {n_running} episodes ended within n_timesteps = "
                        f"{self.config.n_timesteps} steps. They are cut there and count as truncated. Raise "
                        f"n_timesteps, or set a time limit if episodes may never end ({TIME_LIMITS})."
                    )
        else:
            # computed from shapes, which does not wait for the device
            self.env_steps += steps.n_elems() * steps.n_steps() * self._group.size
            self.history.statistics.track(trajectories)
        if self.learner.overlap and self.env_steps < self.config.n_env_steps:
            self._start_batch()
        return trajectories, version

    def _fetch(self) -> Fetched:
        if not self._collecting:
            self._start_batch()
        learner, callbacks = self.learner, self.callbacks
        reuse = learner.reuse_batches and not (learner.overlap or callbacks.present)  # which may keep a batch
        trajectories, n_running = self.batcher.get(reuse=reuse)
        self._collecting = False
        return trajectories, n_running, self._published

    def _start_batch(self) -> None:
        """Start collecting a batch with the current weights."""
        version, first = self.learner.policy_version, self._published == _NONE
        if self._published != version:
            self.batcher.update(self.learner.model.state_dict())
        self._published, self._collecting = version, True
        new_info = self.learner.agent_info(self._fraction_done(), self.batcher.n_envs())
        agent_info = None if new_info.empty() else new_info
        if first or self.learner.whole_episodes:
            self.batcher.reset(agent_info)
        self.batcher.execute(agent_info)

    def _continues(self) -> bool:
        """Start an evaluation if one is due, even in a resumed training; return False at the end of the training."""
        due = self.history.evaluations[-1].env_steps + self.config.evaluation_interval
        if not (self._finished or self._evaluating or self.env_steps < due or self._target_reached()):
            if self.config.evaluation_processes == 0:
                self._evaluate()  # learning waits, so the weights that reach a target are the final ones
            else:
                self._start_evaluation()
        return self.env_steps < self.config.n_env_steps and not self._target_reached()

    def _evaluate(self) -> None:
        self._start_evaluation()
        self._fetch_evaluation(wait=True)

    def _fetch_evaluation(self, *, wait: bool) -> None:
        """Fetch the evaluation's result from rank 0, in all learners at the same update."""
        own = self.evaluator
        result = self._group.broadcast(None if own is None else own.wait() if wait else own.poll())
        if result is not None:
            self._evaluating = False
            self.history.add_evaluation(result)
            self.callbacks.evaluation_ended()

    def _start_evaluation(self) -> None:
        weights, version = self.learner.model.state_dict(), self.learner.policy_version
        self.callbacks.evaluation_started(weights)
        self._evaluating = True
        if self.evaluator is not None:
            self.evaluator.start(weights, env_steps=self.env_steps, policy_version=version)

    def _target_reached(self) -> bool:
        target = self.config.target_return
        return target is not None and self.history.evaluations[-1].mean_return >= target
