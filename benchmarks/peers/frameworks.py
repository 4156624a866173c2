"""PPO or SAC on Pendulum-v1 in one of five libraries, with equal work: a contender, see ``serve.py``.

``frameworks.py TASK LIBRARY ALGORITHM [CHECKOUT]`` trains, and stops whenever a turn is over. A profile sees the turns
as phases. Everywhere PPO collects 256 steps from each of 8 environments, and passes 10 times over them in minibatches
of 64; its actor and critic have 64-64 units each. SAC takes a gradient step with 256 samples after each step of one
environment, with 256-256 units. All other settings are each library's. CHECKOUT is one of CleanRL, whose scripts run
unchanged, except for what `training.run_cleanrl` and `cleanrl` below replace.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}  # one thread
import gymnasium
import torch

from rlstruct.profiling import operation, phase
from rlstruct.profiling.marks import compile_marked

TASK, SEED, ENDLESS = "Pendulum-v1", 0, 10**6
N_ENVS, N_TIMESTEPS, N_EPOCHS, MINIBATCH = 8, 256, 10, 64
RANDOM, BATCH, BUFFER = 256, 256, 100_000
STEPS = {"ppo": N_ENVS * N_TIMESTEPS, "sac": 100}  # environment steps of a batch of the protocol


class Finished(Exception):
    """The driver has closed the pipe."""


class Watch:
    """Stopwatch of a training, which it stops between turns."""

    def __init__(self, algorithm: str, *packages: str) -> None:
        self._channel = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # nothing else is to reach the driver
        self._steps_of_batch, self._packages = STEPS[algorithm], packages
        self._due = max(STEPS[algorithm], RANDOM + 20)  # until then, it warms up
        self._turn, self._since = -1, (0.0, 0)
        self._phase = contextlib.ExitStack()

    def look(self, env_steps: int) -> None:
        """Look whether the turn is over, whenever what was collected so far has been learned from."""
        if env_steps < self._due:
            return
        seconds, steps = time.perf_counter() - self._since[0], env_steps - self._since[1]
        self._phase.close()
        ready = {"ready": {name: version(name) for name in (*self._packages, "gymnasium", "torch")}}
        print(json.dumps(ready if self._turn < 0 else {"seconds": seconds, "steps": steps}), file=self._channel)
        if not (line := sys.stdin.readline()):
            raise Finished
        self._turn += 1
        self._due = env_steps + self._steps_of_batch * json.loads(line)["batches"]
        self._phase.enter_context(phase(f"turn {self._turn}"))
        self._since = time.perf_counter(), env_steps


def baselines(package: str, algorithm: str, watch: Watch) -> None:
    """Train with stable-baselines3, or sbx, which has its interface."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Callback(BaseCallback):
        def _on_rollout_start(self) -> None:
            watch.look(self.num_timesteps)

        def _on_step(self) -> bool:
            return True

    settings: dict[str, Any] = {"buffer_size": BUFFER, "batch_size": BATCH, "learning_starts": RANDOM}
    if algorithm == "ppo":
        settings = {"n_steps": N_TIMESTEPS, "batch_size": MINIBATCH, "n_epochs": N_EPOCHS}
    env = make_vec_env(TASK, N_ENVS if algorithm == "ppo" else 1, seed=SEED)
    create = getattr(__import__(package), algorithm.upper())
    create("MlpPolicy", env, seed=SEED, device="cpu", **settings).learn(ENDLESS, callback=Callback())


def cleanrl(checkout: Path, algorithm: str, watch: Watch) -> None:
    """Run a script of CleanRL, in which comments name the operations."""
    from training import Restarting, run_cleanrl

    def run(script: str, run_name: str) -> dict[str, Any]:
        names = {"__name__": run_name, "__file__": script, "__operation__": operation}
        exec(compile_marked(script), names)
        return names

    def add_scalar(name: str, _: object, step: int) -> None:
        if name == "charts/SPS":  # the last of each update, or of every hundredth
            watch.look(step)

    # The scripts were written for gymnasium 0.29, where the space of observations stays the same.
    transform = gymnasium.wrappers.TransformObservation
    gymnasium.wrappers.TransformObservation = lambda env, f: transform(env, f, env.observation_space)  # type: ignore
    settings: dict[str, Any] = {"buffer_size": BUFFER, "batch_size": BATCH, "learning_starts": RANDOM}
    if algorithm == "ppo":
        n_minibatches = N_ENVS * N_TIMESTEPS // MINIBATCH
        settings = {"num_envs": N_ENVS, "num_steps": N_TIMESTEPS, "update_epochs": N_EPOCHS}
        settings["num_minibatches"] = n_minibatches
    settings |= {"env_id": TASK, "total_timesteps": ENDLESS, "seed": SEED}
    writer = SimpleNamespace(add_text=lambda *_: None, add_scalar=add_scalar, close=lambda: None)
    run_cleanrl(checkout / "cleanrl" / f"{algorithm}_continuous_action.py", Restarting, writer, run, **settings)


def torchrl(algorithm: str, watch: Watch) -> None:
    """Train with TorchRL as its own ``sota-implementations`` do, without what they log."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
    from torchrl.envs import ExplorationType, GymEnv, SerialEnv, set_exploration_type
    from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate
    from torchrl.objectives.value import GAE

    is_ppo = algorithm == "ppo"
    n_frames = N_ENVS * N_TIMESTEPS if is_ppo else 1
    create_env = partial(GymEnv, TASK, device="cpu")
    env = SerialEnv(N_ENVS, create_env) if is_ppo else create_env()
    spec = env.action_spec_unbatched
    bounds = {"low": spec.space.low, "high": spec.space.high}
    widths: dict[str, Any] = {"num_cells": [64, 64] if is_ppo else [256, 256]}
    widths["activation_class"] = torch.nn.Tanh if is_ppo else torch.nn.ReLU
    network = torch.nn.Sequential(MLP(out_features=2 * spec.shape[-1], **widths), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]), ["loc", "scale"], spec=spec,
        distribution_class=TanhNormal, distribution_kwargs=bounds, return_log_prob=is_ppo,
        default_interaction_type=ExplorationType.RANDOM,
    )  # fmt: skip
    critic = ValueOperator(MLP(out_features=1, **widths), ["observation"] if is_ppo else ["action", "observation"])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        for module in (actor, critic):
            module(env.fake_tensordict())
    loss: Any = ClipPPOLoss(actor, critic) if is_ppo else SACLoss(actor, critic, delay_actor=False, delay_qvalue=True)
    advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic) if is_ppo else None
    targets = None
    if not is_ppo:
        loss.make_value_estimator(gamma=0.99)
        targets = SoftUpdate(loss, eps=0.995)
    optimiser = torch.optim.Adam([one for one in loss.parameters() if one.requires_grad], lr=3e-4)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(n_frames if is_ppo else BUFFER), batch_size=MINIBATCH if is_ppo else BATCH,
        sampler=SamplerWithoutReplacement() if is_ppo else RandomSampler(),
    )  # fmt: skip

    def update(sample: Any) -> None:  # noqa: ANN401 - a TensorDict
        terms = loss(sample)
        sum(value for name, value in terms.items() if name.startswith("loss_")).backward()
        if is_ppo:
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
        optimiser.step()
        optimiser.zero_grad()
        if targets is not None:
            targets.step()

    collector = Collector(
        env, actor, frames_per_batch=n_frames, total_frames=-1, init_random_frames=-1 if is_ppo else RANDOM,
        device="cpu",
    )  # fmt: skip
    env_steps = 0
    for batch in collector:
        for _ in range(N_EPOCHS if is_ppo else 1):
            if advantages is not None:
                advantages(batch)
            buffer.extend(batch.reshape(-1))
            if advantages is not None:
                for sample in buffer:
                    update(sample)
            elif env_steps >= RANDOM:
                update(buffer.sample())
        env_steps += n_frames
        watch.look(env_steps)


def ours(algorithm: str, watch: Watch, *, compiled: bool) -> None:
    """Train with rlstruct."""
    from rlstruct.algos import Callback
    from rlstruct.algos.training.callbacks import TrainingContext
    from rlstruct.cli.agents import algorithm_of, prepare
    from rlstruct.cli.tasks import Task

    class Looking(Callback):
        def on_update(self, context: TrainingContext) -> None:
            watch.look(context.env_steps)

    factory, choice = prepare(algorithm, Task(env=TASK))
    settings: dict[str, Any] = {
        "n_envs": 1, "n_timesteps": 1, "n_updates": 1, "batch_size": BATCH, "replay_capacity": BUFFER,
        "learning_starts": RANDOM,
    }  # fmt: skip
    if algorithm == "ppo":
        n_minibatches = N_ENVS * N_TIMESTEPS // MINIBATCH
        settings = {"n_envs": N_ENVS, "n_timesteps": N_TIMESTEPS, "n_epochs": N_EPOCHS, "n_minibatches": n_minibatches}
    config = algorithm_of(algorithm).learner.settings(
        n_env_steps=ENDLESS, seed=SEED, evaluation_processes=0, evaluation_episodes=1, evaluation_interval=10**9,
        compile_agent=compiled, compile_update=compiled, **settings,
    )  # fmt: skip
    algorithm_of(algorithm)(config, choice.create_model, choice.create_agent, factory, callbacks=[Looking()])


if __name__ == "__main__":
    library, algorithm, *checkout = sys.argv[2:]
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    warnings.simplefilter("ignore")
    libraries: dict[str, tuple[Callable[[str, Watch], None], tuple[str, ...]]] = {
        "stable-baselines3": (partial(baselines, "stable_baselines3"), ("stable-baselines3",)),
        "sbx": (partial(baselines, "sbx"), ("sbx-rl", "jax")),
        "CleanRL": (partial(cleanrl, Path(*checkout).resolve()), ()),
        "TorchRL": (torchrl, ("torchrl",)),
        "rlstruct": (partial(ours, compiled=False), ()),
        "rlstruct, compiled": (partial(ours, compiled=True), ()),
    }
    train, packages = libraries[library]
    with contextlib.suppress(Finished):
        train(algorithm, Watch(algorithm, *packages))
