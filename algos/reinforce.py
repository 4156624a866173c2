"""REINFORCE with a learned baseline: whole episodes in, one gradient step out, evaluation beside it. Layer 4.

Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992); Sutton and
Barto, "Reinforcement Learning" (2018), section 13.4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from rlstruct.algos.bootstrap import next_values
from rlstruct.algos.evaluation import Evaluation, Evaluator
from rlstruct.algos.placement import PlacedEnv, cpu_copy
from rlstruct.algos.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.core import TemporalDictTensor, Trajectories
from rlstruct.device import resolve_device
from rlstruct.functional.categorical import entropy, log_probability
from rlstruct.functional.policy_gradient import entropy_loss, policy_gradient_loss, value_loss
from rlstruct.functional.returns import bootstrapped_return
from rlstruct.functional.statistics import whiten
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

CreateModel = Callable[[], nn.Module]
CreateAgent = Callable[..., RL_Agent]
CreateEnv = Callable[..., VecEnv]

# Seeds of environments: so many for each run, the second half for its evaluation, so that no two runs and no two
# batchers play the same episodes.
_SEEDS_PER_RUN = 1_000_000


@dataclass(frozen=True)
class ReinforceConfig:
    """Settings of a training; nothing here knows the environment or the network.

    Attributes:
        n_env_steps: training ends once so many environment steps were collected.
        n_timesteps: longest piece of an episode that is used; what lies beyond it is estimated by the baseline.
        n_envs: environments, and so episodes of one update, in each process.
        n_processes: worker processes that collect; 0 collects in this one.
        discount: per-step factor of the return, in [0, 1].
        learning_rate: of Adam at the beginning; falls linearly with the collected steps.
        final_learning_rate_fraction: what is left of ``learning_rate`` at the end.
        value_coefficient: weight of the baseline's loss.
        entropy_coefficient: weight of the entropy, in 1 / nat.
        max_gradient_norm: gradients of all weights together are scaled down to this norm; None leaves them.
        whiten_advantages: scale the advantages of an update to mean 0 and variance 1.
        bootstrap: estimate what follows a truncated or unfinished episode by the baseline's value of its true last
            observation. Without it a time limit looks like a failure (Pardo et al., ICML 2018), and the return is the
            plain Monte-Carlo one of Williams.
        evaluation_episodes: episodes of one evaluation; a multiple of ``max(1, evaluation_processes)``.
        evaluation_processes: worker processes that evaluate; 0 evaluates in this one, and learning waits.
        evaluation_interval: environment steps between the beginnings of two evaluations, at least.
        evaluation_stochastic: evaluate the policy that is trained, which draws its actions; False takes the most
            probable one, which may be good or bad by chance long before the policy is.
        target_return: training ends early when an evaluation reaches this mean return; None never does.
        log_interval: updates between two looks of the host at the losses; the log gets their lines then.
        learner_device: where losses and gradients are computed.
        batcher_device: where the agent acts during collection.
        evaluation_device: where the agent acts during evaluation.
        seed: of the weights and of the environments; the evaluation's follow from it.
    """

    n_env_steps: int = 250_000
    n_timesteps: int = 500
    n_envs: int = 8
    n_processes: int = 2
    discount: float = 0.99
    learning_rate: float = 0.01
    final_learning_rate_fraction: float = 0.05
    value_coefficient: float = 1.0
    entropy_coefficient: float = 0.01
    max_gradient_norm: float | None = None
    whiten_advantages: bool = True
    bootstrap: bool = True
    evaluation_episodes: int = 32
    evaluation_processes: int = 1
    evaluation_interval: int = 10_000
    evaluation_stochastic: bool = True
    target_return: float | None = None
    log_interval: int = 5
    learner_device: str = "cpu"
    batcher_device: str = "cpu"
    evaluation_device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what would fail late or in silence.

        Raises:
            ValueError: a setting is out of range.
        """
        for name in (
            "n_env_steps",
            "n_timesteps",
            "n_envs",
            "evaluation_episodes",
            "evaluation_interval",
            "log_interval",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"ReinforceConfig: {name} is {getattr(self, name)}, expected at least 1.")
        if not 0.0 <= self.discount <= 1.0:
            raise ValueError(f"ReinforceConfig: discount is {self.discount}, expected 0 to 1.")
        if self.evaluation_episodes % max(1, self.evaluation_processes):
            raise ValueError(
                f"ReinforceConfig: evaluation_episodes is {self.evaluation_episodes}, expected a multiple of "
                f"evaluation_processes, {self.evaluation_processes}: every process plays as many."
            )


@dataclass(frozen=True)
class ReinforceResult:
    """What a training leaves behind.

    Attributes:
        model: the trained network, on the learner's device.
        before: evaluation of the untrained network.
        after: evaluation of the trained one, on episodes that nothing was selected by.
        evaluations: all of them, in the order of their weights; the first is ``before``, the last ``after``.
        losses: name to one number for each update.
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


def losses(
    replayed: TemporalDictTensor, trajectories: Trajectories, next_value: Tensor, config: ReinforceConfig
) -> dict[str, Tensor]:
    """Compute the terms of the loss.

    Args:
        replayed: ``action_logits`` [B, T, A] and ``value`` [B, T] of the learner's agent, with gradients.
        trajectories: what was collected, same device.  [B, T]
        next_value: baseline of the true next observations, see `next_values`; zeros for no bootstrap.  [B, T]
        config: its discount, its coefficients, and whether to whiten.

    Returns:
        ``loss`` and its terms ``policy_loss``, ``value_loss`` and ``entropy_loss`` (minus the mean entropy).  [] each
    """
    steps = trajectories.trajectories
    mask = steps.mask()  # [B, T]
    target = bootstrapped_return(
        steps["_observation/reward"],
        steps["_observation/terminated"],
        steps["_observation/done"],
        mask,
        next_value=next_value,
        discount=config.discount,
    )
    value, logits = replayed["value"], replayed["action_logits"]
    advantage = target - value.detach()
    if config.whiten_advantages:
        advantage = whiten(advantage, mask)
    # The stored action, not the replayed one: with newer weights the same random key may draw another.
    terms = {
        "policy_loss": policy_gradient_loss(log_probability(logits, steps["action/action"]), advantage, mask),
        "value_loss": value_loss(value, target, mask),
        "entropy_loss": entropy_loss(entropy(logits), mask),
    }
    weighted = config.value_coefficient * terms["value_loss"] + config.entropy_coefficient * terms["entropy_loss"]
    return {"loss": terms["policy_loss"] + weighted, **terms}


class Learner:
    """The network that learns, on a device of its own.

    Args:
        model: on the learner's device.
        agent: acts with this very model, so that gradients reach it.
        config: see `ReinforceConfig`.
    """

    def __init__(self, model: nn.Module, agent: RL_Agent, config: ReinforceConfig) -> None:
        """Create the optimiser."""
        self.model = model
        self.agent = agent
        self.config = config
        self.device = resolve_device(config.learner_device)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
        self.policy_version = 0

    def update(self, trajectories: Trajectories, progress: float) -> dict[str, Tensor]:
        """Take one gradient step.

        Args:
            trajectories: collected with the present weights, on any device.  [B, T]
            progress: how much of the training is over, in [0, 1]; the learning rate falls with it.

        Returns:
            Detached numbers on the learner's device: the terms of `losses`, the mean ``return`` and ``length`` of the
            rows.  [] each
        """
        trajectories = trajectories.to(self.device)
        replayed = replay_agent(self.agent, trajectories)
        value = replayed["value"]
        following = next_values(self.agent, trajectories) if self.config.bootstrap else torch.zeros_like(value)
        terms = losses(replayed, trajectories, following, self.config)
        self._descend(terms["loss"], progress)
        self.policy_version += 1
        steps = trajectories.trajectories
        terms["return"] = torch.where(steps.mask(), steps["_observation/reward"], 0.0).sum(dim=1).mean()
        terms["length"] = steps.lengths.to(value.dtype).mean()
        return {name: term.detach() for name, term in terms.items()}

    def _descend(self, loss: Tensor, progress: float) -> None:
        config = self.config
        rate = config.learning_rate * (1.0 + (config.final_learning_rate_fraction - 1.0) * min(progress, 1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if config.max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.max_gradient_norm)
        self.optimizer.step()

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs: model, optimiser, configuration, number of updates."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.config),
            "policy_version": self.policy_version,
        }


def train(
    config: ReinforceConfig,
    create_model: CreateModel,
    create_agent: CreateAgent,
    create_env: CreateEnv,
    *,
    env_args: Mapping[str, object] | None = None,
    run: RunFolder | None = None,
) -> ReinforceResult:
    """Train a policy.

    The factories travel to worker processes.

    Args:
        config: all numbers.
        create_model: makes the network, on the CPU; torch's generator is seeded around the call.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=…)``; the agent returns
            ``action``, ``action_logits`` and ``value``. `rlstruct.agents.ActorCriticAgent` is such a factory.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``; where it computes is its own affair, a
            `DeviceEnv` moves it to the batcher's device. It starts an episode at ``reset``.
        env_args: further arguments of ``create_env``.
        run: where to log; None logs nothing.

    Returns:
        The trained network and its history.

    Raises:
        WorkerError: a worker process raised or died.
        ValueError: a device of the configuration does not exist.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create_model()
    model = model.to(resolve_device(config.learner_device))
    agent = create_agent(model, device=config.learner_device, stochastic=True, copy_model=False)
    learner = Learner(model, agent, config)
    weights = cpu_copy(model)  # travels to every process

    def place(device: str, n_processes: int, n_envs: int, stochastic: bool, seed: int) -> RL_Batcher:
        return RL_Batcher(
            config.n_timesteps,
            create_agent,
            PlacedEnv(create_env, device),
            agent_args={"model": weights, "device": device, "stochastic": stochastic, "copy_model": True},
            env_args={**(env_args or {}), "n_envs": n_envs},
            n_processes=n_processes,
            seed=seed,
            device=device,
        )

    n_evaluation = config.evaluation_episodes // max(1, config.evaluation_processes)
    drawn, seed = config.evaluation_stochastic, config.seed * _SEEDS_PER_RUN
    fresh = seed + _SEEDS_PER_RUN // 2
    with (
        place(config.batcher_device, config.n_processes, config.n_envs, True, seed) as batcher,
        place(config.evaluation_device, config.evaluation_processes, n_evaluation, drawn, fresh) as evaluation,
    ):
        return _Training(config, learner, batcher, Evaluator(evaluation), run).run()


class _Training:
    """The loop, with what it has to remember."""

    def __init__(
        self,
        config: ReinforceConfig,
        learner: Learner,
        batcher: RL_Batcher,
        evaluator: Evaluator,
        run: RunFolder | None,
    ) -> None:
        self.config = config
        self.learner = learner
        self.batcher = batcher
        self.evaluator = evaluator
        self.folder = run
        self.env_steps = 0
        self.evaluations: list[Evaluation] = []
        self.losses: dict[str, list[float]] = {}
        self.unread: list[tuple[int, float, dict[str, Tensor]]] = []

    def run(self) -> ReinforceResult:
        before = self.evaluate_now()
        start = time.perf_counter()
        while self.env_steps < self.config.n_env_steps and not self.target_reached():
            trajectories = self.collect()
            terms = self.learner.update(trajectories, self.env_steps / self.config.n_env_steps)
            self.unread.append((self.env_steps, time.perf_counter(), terms))
            self.evaluate_beside()
            if len(self.unread) == self.config.log_interval:
                self.read_losses()
        seconds = time.perf_counter() - start
        self.read_losses()
        if self.evaluator.busy:
            self.record(self.evaluator.wait())
        after = self.evaluate_now()
        return ReinforceResult(
            self.learner.model, before, after, tuple(self.evaluations), self.losses, self.env_steps, seconds
        )

    def collect(self) -> Trajectories:
        self.batcher.update(self.learner.model.state_dict())
        self.batcher.reset()
        self.batcher.execute()
        trajectories, _ = self.batcher.get()
        if trajectories is None:
            raise RuntimeError("reinforce.train: a blocking get() returned nothing.")
        self.env_steps += int(trajectories.lengths.sum())  # sync: once per update
        return trajectories

    def evaluate_beside(self) -> None:
        if (result := self.evaluator.poll()) is not None:
            self.record(result)
        due = self.evaluations[-1].env_steps + self.config.evaluation_interval
        if not self.evaluator.busy and self.env_steps >= due and not self.target_reached():
            self.start_evaluation()

    def evaluate_now(self) -> Evaluation:
        self.start_evaluation()
        return self.record(self.evaluator.wait())

    def start_evaluation(self) -> None:
        weights, version = self.learner.model.state_dict(), self.learner.policy_version
        self.evaluator.start(weights, env_steps=self.env_steps, policy_version=version)

    def record(self, result: Evaluation) -> Evaluation:
        self.evaluations.append(result)
        if self.folder is not None:
            self.folder.log_evaluation(result)
            self.folder.save_checkpoint({**self.learner.state_dict(), "env_steps": self.env_steps})
        return result

    def target_reached(self) -> bool:
        target = self.config.target_return
        return target is not None and self.evaluations[-1].mean_return >= target

    def read_losses(self) -> None:
        """Turn what the device computed into numbers, for several updates at once."""
        if not self.unread:
            return
        names = list(self.unread[0][2])
        columns = torch.stack([torch.stack(list(terms.values())) for _, _, terms in self.unread])
        first_version = self.learner.policy_version - len(self.unread) + 1
        rows = columns.tolist()  # sync: once per log_interval updates
        for i, ((env_steps, at, _), row) in enumerate(zip(self.unread, rows, strict=True)):
            numbers = dict(zip(names, row, strict=True))
            for name, number in numbers.items():
                self.losses.setdefault(name, []).append(number)
            if self.folder is not None:
                self.folder.log(env_steps, first_version + i, numbers, at=at)
        self.unread.clear()
