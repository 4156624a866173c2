"""Settings that all algorithms share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from rlstruct import renamed
from rlstruct.algos.training.checkpoint import check_written_by_training
from rlstruct.batchers.workers.placement import Mode
from rlstruct.errors import BadValueError, MissingFileError
from rlstruct.options import Options, check_seed, declared, option

Compile = Literal["auto", True, False]
Precision = Literal["float32", "bfloat16"]
AnyConfig = TypeVar("AnyConfig", bound="TrainingConfig")


_NEWER = {
    "n_learners": 1, "initial_steps": 0, "weight_decay": 0.0,
    "n_step": 1, "critic_reduction": "min", "hold_noise": False,
}  # fmt: skip
"""Settings that older checkpoints lack, and what their trainings did."""

_ELSEWHERE = {
    "total_timesteps": "n_env_steps",
    "total_frames": "n_env_steps",
    "num_steps": "n_timesteps",
    "num_envs": "n_envs",
    "gamma": "discount",
    "lr": "learning_rate",
    "policy_lr": "learning_rate",
    "q_lr": "critic_learning_rate",
    "gae_lambda": "trace_decay",
    "lmbda": "trace_decay",
    "lam": "trace_decay",
    "clip_range": "clip",
    "clip_coef": "clip",
    "clip_epsilon": "clip",
    "clip_ratio": "clip",
    "clip_param": "clip",
    "clip_range_vf": "value_clip",
    "ent_coef": "entropy_coefficient",
    "entropy_coeff": "entropy_coefficient",
    "vf_coef": "value_coefficient",
    "critic_coeff": "value_coefficient",
    "normalize_advantage": "whiten_advantages",
    "norm_adv": "whiten_advantages",
    "update_epochs": "n_epochs",
    "num_minibatches": "n_minibatches",
    "batch_size": "n_minibatches",  # its size; a setting of replay learners
    "anneal_lr": "final_learning_rate_fraction",
    "max_grad_norm": "max_gradient_norm",
    "buffer_size": "replay_capacity",
    "gradient_steps": "n_updates",
    "tau": "target_update_rate",
    "target_network_frequency": "target_update_interval",
    "exploration_fraction": "epsilon_fraction",
    "exploration_initial_eps": "initial_epsilon",
    "start_e": "initial_epsilon",
    "exploration_final_eps": "final_epsilon",
    "end_e": "final_epsilon",
    "device": "learner_device",
}
"""Names of settings in stable-baselines3, CleanRL, TorchRL, RSL-RL and Spinning Up."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """Settings of a training, independent of the environment and the network.

    Attributes:
        n_env_steps: training ends once this many environment steps have been collected.
        n_timesteps: steps of each environment in one batch, and thus in one update.
        n_envs: environments in each process.
        n_processes: worker processes that collect; 0 collects in the learner's process.
        n_learners: processes that learn together on this machine. Each collects with its share of n_processes (or of
            n_envs, if n_processes is 0) and learns from its share of every batch. Under torchrun leave it at 1: all of
            torchrun's processes learn together.
        initial_steps: simulators with discrete actions take 0 to this many random actions before an episode begins, so
            thousands of games do not run in lockstep. gymnasium's environments get it as an option of reset.
        compile_agent: let TorchInductor compile the agent's step during collection, see RL_Batcher. "auto" compiles on
            the CPU, in the learner's process, if the training is long enough to save more than compiling takes.
        compile_update: let TorchInductor compile the gradient steps of an update, if the agent promises to be pure
            (RL_Agent.pure). Results are equal up to rounding; "auto" decides as for the agent.
        compile_simulator: let TorchInductor compile the step of a simulator of rlstruct.sims that is created with
            backend="auto", the default; "auto" decides as for the agent.
        graph: on CUDA, capture whole updates of A2C, PPO and PQN, and gradient steps of DQN, SAC and AlphaZero, as
            one graph, if the agent promises to be pure; AlphaZero captures its network in any case.
        precision: "bfloat16" computes the matrix products and convolutions of gradient steps in bfloat16 and everything
            else in float32, on CPUs with AVX512-BF16 or AMX and on GPUs from Ampere on: faster with wide layers and
            large minibatches. Agents act in float32.
        discount: per-step factor of the return.
        reward_scale: factor of every reward that the learner sees. Networks learn fastest if values are around 1 to 10.
            The network's values are scaled; logged returns and evaluations are not. An algorithm of your own multiplies
            the rewards itself, in its terms.
        learning_rate: initial learning rate; it falls linearly with the collected steps.
        final_learning_rate_fraction: fraction of the learning rate that is left at the end.
        adam_epsilon: added to the denominator of Adam's step, which bounds it where gradients are small.
        weight_decay: at each gradient step, every weight shrinks by this number times the learning rate (AdamW:
            Loshchilov and Hutter, ICLR 2019).
        max_gradient_norm: the gradient of all weights together is clipped to this norm; None does not clip it.
        evaluation_episodes: episodes of one evaluation; a multiple of evaluation_processes, if there are any.
        evaluation_processes: worker processes that evaluate; 0 evaluates in the learner's process, and learning waits.
        evaluation_interval: minimum number of environment steps between the starts of two evaluations.
        evaluation_timesteps: steps that the evaluation takes before it checks whether all episodes have ended; None
            for n_timesteps.
        evaluation_stochastic: sample the actions in evaluations, as in training; False takes the most probable action,
            whose return can be good or bad by chance before the policy has settled.
        evaluation_step_limit: an episode of an evaluation that has not ended after this many steps is cut, with a
            warning; it may run for up to evaluation_timesteps more.
        checkpoint_interval: minimum number of environment steps between two checkpoints; None for evaluation_interval.
            A checkpoint contains the replay buffer: if that is large, choose a larger interval.
        target_return: training ends early when an evaluation reaches this mean return; None never does.
        log_interval: updates between two reads of the losses; each read logs a line.
        threads: PyTorch threads in every process that learns on the CPU. None uses 1, or PyTorch's default if the
            network has more than 500,000 parameters. The previous number is restored at the end of the training.
        learner_device: device on which losses and gradients are computed.
        batcher_device: device on which the agent acts during collection.
        evaluation_device: device on which the agent acts during evaluation.
        sharing: how several learners, each with its worker processes, share GPUs, or how the worker processes of a
            single learner share one: "none", "mps", "mig" or "auto", see RL_Batcher.
        thread_percentage: largest share of the GPU's threads that a process gets under MPS; None for no limit.
        cluster: Ray cluster that starts the worker processes: the address of a cluster, "auto" or "local", see
            RL_Batcher; None starts them on this machine.
        seed: seed of the weights and of all environments. Training, evaluation and rlstruct evaluate play on separate
            seeds, none of which another run has. The number of environments limits it: at most 30 with 1,048,576 of
            them, 8,190 with 4,096, and 1,048,574 with 32.
    """

    elsewhere: ClassVar[Mapping[str, str]] = _ELSEWHERE

    n_env_steps: int = option(200_000, at_least=1, may_change=True)
    n_timesteps: int = option(500, at_least=1)
    n_envs: int = option(8, at_least=1)
    n_processes: int = option(2, at_least=0)
    n_learners: int = option(1, at_least=1)
    initial_steps: int = option(0, at_least=0)
    compile_agent: Compile = option("auto", may_change=True)
    compile_update: Compile = option("auto", may_change=True)
    compile_simulator: Compile = option("auto", may_change=True)
    graph: bool = option(True, may_change=True)
    precision: Precision = option("float32", may_change=True)
    discount: float = option(0.99, at_least=0, at_most=1)
    reward_scale: float = 1.0
    learning_rate: float = option(0.01, at_least=0)
    final_learning_rate_fraction: float = option(0.05, at_least=0)
    adam_epsilon: float = option(1e-8, at_least=0)
    weight_decay: float = option(0.0, at_least=0)
    max_gradient_norm: float | None = option(None, above=0)
    evaluation_episodes: int = option(32, at_least=1)
    evaluation_processes: int = option(1, at_least=0)
    evaluation_interval: int = option(10_000, at_least=1, may_change=True)
    evaluation_timesteps: int | None = option(None, at_least=1)
    evaluation_stochastic: bool = True
    evaluation_step_limit: int = option(100_000, at_least=1, may_change=True)
    checkpoint_interval: int | None = option(None, at_least=1, may_change=True)
    target_return: float | None = option(None, may_change=True)
    log_interval: int = option(5, at_least=1, may_change=True)
    threads: int | None = option(None, at_least=1, may_change=True)
    learner_device: str = option("cpu", may_change=True)
    batcher_device: str = option("cpu", may_change=True)
    evaluation_device: str = option("cpu", may_change=True)
    sharing: Mode = option("none", may_change=True)
    thread_percentage: float | None = option(None, above=0, at_most=100, may_change=True)
    cluster: str | None = option(None, may_change=True)
    seed: int = option(0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(type(self).__name__, "seed", self.seed)
        fits = self.cluster is None or self.n_processes > 0
        self.require("cluster", fits, "None, or n_processes of 1 or more, which the cluster starts")
        fits = self.sharing in ("none", "auto") or self.workers_share_gpus() or self.learners_share_gpus()
        words = (
            "worker processes (n_processes, batcher_device) or several learners (n_learners, learner_device) on GPUs"
        )
        self.require("sharing", fits, f"'none' or 'auto', or {words}")
        n = self.evaluation_processes
        fits = self.evaluation_episodes % max(1, n) == 0
        words = f"a multiple of evaluation_processes, {n}: every process plays as many"
        self.require("evaluation_episodes", fits, words)

    def gradient_steps_per_batch(self) -> int:
        """Return how many gradient steps follow each batch: the product of n_epochs, n_updates and n_minibatches."""
        names = "n_epochs", "n_updates", "n_minibatches"
        return math.prod(int(getattr(self, name, 1)) for name in names)

    def workers_share_gpus(self) -> bool:
        """Return True if worker processes collect on a GPU."""
        return self.n_processes > 0 and self.batcher_device.startswith("cuda")

    def learners_share_gpus(self) -> bool:
        """Return True if several learners share GPUs, each with its own worker processes."""
        return self.sharing != "none" and self.n_learners > 1 and self.learner_device.startswith("cuda")


@renamed.parameters
def load_config(path: str | Path, cls: type[AnyConfig]) -> AnyConfig:
    """Read the settings of a run, to train with them again.

    Args:
        path: a run folder, or its ``config.json``.
        cls: the class of the settings.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, has settings that ``cls`` does not know, or one that is out of range.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.exists():
        raise MissingFileError(f"load_config: {file} does not exist. Pass the folder of a run.")
    try:
        stored = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise BadValueError(f"load_config: {file} is damaged: {error}.") from None
    if {"algorithm", "task", "config"} <= stored.keys():  # of ``rlstruct train``
        stored = stored["config"]
    defaults = {one.name: one.default for one in fields(cls)}
    stored = {
        name: tuple(value) if isinstance(value, list) and isinstance(defaults.get(name), tuple) else value
        for name, value in stored.items()
    }
    try:
        return cls(**stored)
    except TypeError as error:
        raise BadValueError(f"load_config: {file} has settings that do not fit. {error}") from error


def changed_setting(checkpoint: Mapping[str, Any], config: TrainingConfig) -> tuple[str, object, object] | None:
    """Return a setting that differs from a checkpoint's and that a resumed training must keep; None if there is none.

    Returns:
        Its name, its value in the checkpoint, and its value now; ``"missing"`` for a value that is not there.
    """
    now = asdict(config)
    saved = {name: value for name, value in _NEWER.items() if name in now} | checkpoint["config"]
    for name in sorted((saved.keys() | now.keys()) - declared(type(config), "may_change").keys()):
        if (before := saved.get(name, "missing")) != (value := now.get(name, "missing")):
            return name, before, value
    return None


def check_resumed(checkpoint: Mapping[str, Any], config: TrainingConfig) -> None:
    """Raise an error unless a training with these settings can continue from a checkpoint."""
    check_written_by_training(checkpoint)
    if (changed := changed_setting(checkpoint, config)) is not None:
        name, before, value = changed
        may_change = ", ".join(sorted(declared(type(config), "may_change")))
        raise BadValueError(
            f"{type(config).__name__}: {name} is {value}, but {before} in the checkpoint. Resume with the settings "
            f"of the run, see load_config; only {may_change} may change."
        )
    saved, collected = checkpoint["config"], checkpoint["env_steps"]
    if config.n_env_steps < collected and config.n_env_steps != saved["n_env_steps"]:
        raise BadValueError(
            f"{type(config).__name__}: n_env_steps is {config.n_env_steps}, but {collected} were collected before the "
            f"checkpoint, expected at least as many, because it includes them. "
            f"Leave it at {saved['n_env_steps']}, or raise it."
        )
