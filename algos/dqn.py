"""DQN: epsilon-greedy collection, a replay buffer, gradient steps while the next piece is collected. Layer 4.

Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015), with the parts of Hessel et al.,
"Rainbow" (AAAI 2018), that are switched on in the configuration.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from rlstruct.algos.dqn_config import DQNConfig
from rlstruct.algos.episode_returns import EpisodeReturns
from rlstruct.algos.evaluation import Evaluation, Evaluator
from rlstruct.algos.placement import PlacedEnv, cpu_copy
from rlstruct.algos.prioritised import PrioritisedReplayBuffer
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.algos.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor
from rlstruct.device import resolve_device
from rlstruct.functional.q_learning import double_q_value, greedy_value, q_loss, td_target
from rlstruct.functional.schedules import epsilon_ladder, linear_schedule
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

CreateModel = Callable[[], nn.Module]
CreateAgent = Callable[..., RL_Agent]
CreateEnv = Callable[..., VecEnv]

_EVALUATION_SEED = 1_000_003  # far from the training's environments, which seed with seed + their index


@dataclass(frozen=True)
class DQNResult:
    """What a training leaves behind.

    Attributes:
        model: the trained network, on the learner's device.
        before: evaluation of the untrained network.
        after: evaluation of the trained one, on episodes that nothing was selected by.
        evaluations: all of them, in the order of their weights; the first is ``before``, the last ``after``.
        losses: name to one number for each round of gradient steps.
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


def losses(agent: RL_Agent, target_agent: RL_Agent, batch: DictTensor, config: DQNConfig) -> dict[str, Tensor]:
    """Compute the loss of a batch.

    Args:
        agent: acts with the network that learns.
        target_agent: acts with the target network.
        batch: what `ReplayBuffer.sample` gives, on the learner's device.  [K]
        config: its ``double`` and ``huber_delta``.

    Returns:
        ``loss`` [], carries the gradient; ``value`` of the actions taken, and ``error`` = value - target.  [K] each
    """
    values = action_values(agent, batch.truncate_key("observation/"))  # [K, A]
    value = values.gather(1, batch["action/action"].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        reached = batch.truncate_key("_observation/")
        judged = action_values(target_agent, reached)  # [K, A]
        next_value = double_q_value(action_values(agent, reached), judged) if config.double else greedy_value(judged)
        target = td_target(batch["reward"], batch["discount"], batch["terminated"], next_value)
    return {
        "loss": q_loss(value, target, batch["weight"], config.huber_delta),
        "value": value.detach(),
        "error": value.detach() - target,
    }


def action_values(agent: RL_Agent, observation: DictTensor) -> Tensor:
    """Return what a greedy agent without state thinks of all actions.  [K, A]."""
    output, _ = agent(DictTensor(), observation, DictTensor())
    return output["action_values"]


class Learner:
    """The network that learns, its slow copy and its memory.

    Args:
        model: on the learner's device.
        create_agent: see `train`.
        config: see `DQNConfig`.

    Attributes:
        buffer: what was collected, on a device of its own.
    """

    def __init__(self, model: nn.Module, create_agent: CreateAgent, config: DQNConfig) -> None:
        """Create target network, optimiser and replay buffer."""
        self.model = model
        self.config = config
        self.device = resolve_device(config.learner_device)
        self.target_model = copy.deepcopy(model).requires_grad_(False)
        share = {"device": config.learner_device, "stochastic": False, "copy_model": False}
        self.agent = create_agent(model, **share)
        self.target_agent = create_agent(self.target_model, **share)
        self.weights, self.target_weights = list(model.parameters()), list(self.target_model.parameters())
        fused = self.device.type in ("cpu", "cuda")  # one kernel for all weights, where torch has one
        self.optimizer = torch.optim.Adam(self.weights, lr=config.learning_rate, fused=fused)
        self.buffer = _create_buffer(config)
        self.policy_version = 0

    def update(self, progress: float) -> dict[str, Tensor]:
        """Take one gradient step.

        Args:
            progress: how much of the training is over, in [0, 1]; the learning rate falls with it.

        Returns:
            Detached numbers on the learner's device: ``loss``, mean ``value`` of the actions taken, mean absolute
            ``error``.  [] each
        """
        config, buffer = self.config, self.buffer
        if isinstance(buffer, PrioritisedReplayBuffer):
            buffer.correction = linear_schedule(progress, config.initial_correction, 1.0)
        batch = buffer.sample(config.batch_size).to(self.device, non_blocking=True)
        terms = losses(self.agent, self.target_agent, batch, config)
        self._descend(terms["loss"], progress)
        if isinstance(buffer, PrioritisedReplayBuffer):
            buffer.update_priorities(batch["index"].to(buffer.device), terms["error"].to(buffer.device))
        self.policy_version += 1
        if self.policy_version % config.target_update_interval == 0:
            self._follow(config.target_update_rate)
        return {
            "loss": terms["loss"].detach(),
            "value": terms["value"].mean(),
            "error": terms["error"].abs().mean(),
        }

    def _descend(self, loss: Tensor, progress: float) -> None:
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * linear_schedule(progress, 1.0, config.final_learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if config.max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(self.weights, config.max_gradient_norm)
        self.optimizer.step()

    @torch.no_grad()
    def _follow(self, rate: float) -> None:
        """Move the target network towards the one that learns."""
        torch._foreach_lerp_(self.target_weights, self.weights, rate)
        for target, source in zip(self.target_model.buffers(), self.model.buffers(), strict=True):
            target.copy_(source)

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs, without the replay buffer, which has a state_dict of its own."""
        return {
            "model": self.model.state_dict(),
            "target_model": self.target_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.config),
            "policy_version": self.policy_version,
        }


def _create_buffer(config: DQNConfig) -> ReplayBuffer:
    device = config.replay_device or config.learner_device
    settings = {"n_step": config.n_step, "discount": config.discount, "n_stack": config.n_stack, "seed": config.seed}
    if config.prioritised:
        exponent = config.priority_exponent
        return PrioritisedReplayBuffer(config.replay_capacity, exponent=exponent, device=device, **settings)
    return ReplayBuffer(config.replay_capacity, device=device, **settings)


def train(
    config: DQNConfig,
    create_model: CreateModel,
    create_agent: CreateAgent,
    create_env: CreateEnv,
    *,
    env_args: Mapping[str, object] | None = None,
    run: RunFolder | None = None,
) -> DQNResult:
    """Train a network of action values.

    The factories travel to worker processes.

    Args:
        config: all numbers.
        create_model: makes the network, on the CPU; torch's generator is seeded around the call.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=…)``; the agent keeps no state,
            heeds ``agent_info["epsilon"]`` and returns ``action`` and ``action_values``. `rlstruct.agents.QAgent` is
            such a factory.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``; where it computes is its own affair, a
            `DeviceEnv` moves it to the batcher's device. Its environments restart by themselves.
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
    learner = Learner(model.to(resolve_device(config.learner_device)), create_agent, config)
    weights = cpu_copy(model)  # travels to every process

    def place(device: str, n_processes: int, n_envs: int, n_timesteps: int, stochastic: bool, seed: int) -> RL_Batcher:
        return RL_Batcher(
            n_timesteps,
            create_agent,
            PlacedEnv(create_env, device),
            agent_args={"model": weights, "device": device, "stochastic": stochastic, "copy_model": True},
            env_args={**(env_args or {}), "n_envs": n_envs},
            n_processes=n_processes,
            seed=seed,
            device=device,
        )

    n_evaluation = config.evaluation_episodes // max(1, config.evaluation_processes)
    n_steps, fresh_seed = config.evaluation_timesteps, config.seed + _EVALUATION_SEED
    with (
        place(
            config.batcher_device, config.n_processes, config.n_envs, config.n_timesteps, True, config.seed
        ) as batcher,
        place(
            config.evaluation_device, config.evaluation_processes, n_evaluation, n_steps, False, fresh_seed
        ) as evaluation,
    ):
        return _Training(config, learner, batcher, Evaluator(evaluation), run).run()


class _Training:
    """The loop, with what it has to remember."""

    def __init__(
        self,
        config: DQNConfig,
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
        self.returns = EpisodeReturns()
        self.evaluations: list[Evaluation] = []
        self.losses: dict[str, list[float]] = {}
        self.unread: list[tuple[int, float, dict[str, Tensor]]] = []

    def run(self) -> DQNResult:
        before = self.evaluate_now()
        start = time.perf_counter()
        self.batcher.reset(self.exploration())
        while self.env_steps < self.config.n_env_steps and not self.target_reached():
            self.batcher.update(self.learner.model.state_dict())
            self.batcher.execute(self.exploration())
            self.learn()  # from what was collected before, while worker processes collect
            self.remember()
            self.evaluate_beside()
            if len(self.unread) == self.config.log_interval:
                self.read_losses()
        seconds = time.perf_counter() - start
        self.read_losses()
        if self.evaluator.busy:
            self.record(self.evaluator.wait())
        after = self.evaluate_now()
        return DQNResult(
            self.learner.model, before, after, tuple(self.evaluations), self.losses, self.env_steps, seconds
        )

    def exploration(self) -> DictTensor:
        """Return the epsilon of each environment, on the CPU as all settings of agents.  [B]."""
        config = self.config
        epsilon = linear_schedule(
            self.progress(), config.initial_epsilon, config.final_epsilon, config.epsilon_fraction
        )
        ladder = epsilon_ladder(epsilon, self.batcher.n_envs(), config.epsilon_exponent)
        return DictTensor({"epsilon": torch.tensor(ladder, dtype=torch.float32, device="cpu")})

    def progress(self) -> float:
        return self.env_steps / self.config.n_env_steps

    def learn(self) -> None:
        if self.env_steps < self.config.learning_starts:
            return
        rounds = [self.learner.update(self.progress()) for _ in range(self.config.n_updates)]
        means = {name: torch.stack([terms[name] for terms in rounds]).mean() for name in rounds[0]}
        self.unread.append((self.env_steps, time.perf_counter(), means))

    def remember(self) -> None:
        trajectories, _ = self.batcher.get()
        if trajectories is None:
            raise RuntimeError("dqn.train: a blocking get() returned nothing.")
        self.learner.buffer.extend(trajectories.to(self.learner.buffer.device))
        self.returns.add(trajectories.trajectories)
        self.env_steps += trajectories.n_elems() * trajectories.trajectories.n_steps()

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
        """Turn what the device computed into numbers, for several rounds at once."""
        if not self.unread:
            return
        names = list(self.unread[0][2])
        columns = torch.stack([torch.stack(list(terms.values())) for _, _, terms in self.unread])
        rows = columns.tolist()  # sync: once per log_interval rounds
        for row in rows:
            for name, number in zip(names, row, strict=True):
                self.losses.setdefault(name, []).append(number)
        mean_return = self.returns.read()
        if self.folder is not None:
            env_steps, at, _ = self.unread[-1]
            numbers = {name: sum(row[i] for row in rows) / len(rows) for i, name in enumerate(names)}
            numbers |= {} if mean_return is None else {"return": mean_return}
            self.folder.log(env_steps, self.learner.policy_version, numbers, at=at)
        self.unread.clear()
