"""Ours without worker processes, one loop per call: ``rlstruct_loops.py TASK NAME``, with a name of `LOOPS`.

``compare_commits.py`` runs it with the packages of two commits, so it uses public names that both of them have; the
loops of SAC are those of ``sac_updates.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from serve import Batches, Task, serve

from rlstruct import DictTensor, RL_Agent, Trajectories, replay_agent
from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

Work = Callable[[], object]
SAC_STEPS = 20


def actor_critic() -> RL_Agent:
    return ActorCriticAgent(ActorCritic(4, 2))


def batcher_of(task: Task, create_agent: Callable[[], RL_Agent] = actor_critic) -> RL_Batcher:
    """Collect in this process with the torch simulation of the task's environment."""
    return RL_Batcher(
        task.n_timesteps, create_agent, lambda seed: make(task.environment, task.n_envs, seed=seed), seed=0
    )


def batch_of(task: Task, create_agent: Callable[[], RL_Agent] = actor_critic) -> Trajectories:
    """Collect a batch."""
    with batcher_of(task, create_agent) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


def simulator(task: Task) -> Work:
    """A batch of a simulator with a policy."""
    batcher = batcher_of(task)
    batcher.reset()

    def collect() -> object:
        batcher.execute()
        return batcher.get()

    return collect


def steps(task: Task, backend: Literal["torch", "compile"] = "torch") -> Work:
    """T single steps of a simulator with action 0."""
    env = make(task.environment, task.n_envs, backend=backend)
    action = DictTensor({"action": torch.zeros_like(env.reset()[0]["last_action"])})

    def work() -> None:
        for _ in range(task.n_timesteps):
            env.step(action)

    return work


def update(algorithm: str, task: Task) -> Work:
    """An update of an algorithm with its own settings, on one batch again and again."""
    module = importlib.import_module(f"rlstruct.algos.{algorithm}")
    if algorithm == "dqn":
        learner = module.Learner.create(QNetwork(4, 2), QAgent, module.DQNConfig(learning_starts=0))
    else:
        settings = module.A2CConfig() if algorithm == "a2c" else module.PPOConfig()
        learner = module.Learner.create(ActorCritic(4, 2), ActorCriticAgent, settings)
    batch = batch_of(task)
    return lambda: learner.update(batch, 0.0)


def sac(task: Task, **settings: object) -> Work:
    """An update of SAC on Pendulum-v1: `SAC_STEPS` gradient steps with 256 random steps each."""
    from rlstruct.agents import SoftActorCritic, SquashedGaussianAgent
    from rlstruct.algos.sac import SACConfig, SACLearner

    model = SoftActorCritic(3, (-2.0,), (2.0,))
    config = SACConfig(batch_size=256, n_updates=SAC_STEPS, learning_starts=0, **settings)
    learner = SACLearner.create(model, SquashedGaussianAgent, config)
    batch = batch_of(task, lambda: SquashedGaussianAgent(model))
    learner.buffer.extend(batch)
    few = batch_of(dataclasses.replace(task, n_timesteps=1), lambda: SquashedGaussianAgent(model))
    return lambda: learner.update(few, 0.5)


def replay(task: Task) -> Work:
    """A replay with gradients."""
    batch, agent = batch_of(task), actor_critic()
    return lambda: replay_agent(agent, batch)["log_probability"].sum().backward()


def dict_tensors(task: Task) -> Work:
    """Use a DictTensor as programs do, a thousand times."""
    tensors = batch_of(task).steps.temporal_index(0)
    plain, index = dict(tensors.items()), torch.arange(0, task.n_envs, 2)

    def work() -> None:
        for _ in range(100):
            made = DictTensor(plain)
            part = made.truncate_key("observation/") + made.truncate_key("action/")
            made.index(index)
            made.slice(1, 3)
            made.map(torch.Tensor.detach)
            DictTensor.cat([part, part])

    return work


def trajectories(task: Task) -> Work:
    """Use Trajectories as learners do, a hundred times."""
    batch, index = batch_of(task), torch.arange(0, task.n_envs, 2)

    def work() -> None:
        for _ in range(100):
            batch.index(index)
            batch.steps.temporal_slice(0, 2)
            batch.steps.temporal_index(1)
            batch.steps.mask()
            Trajectories.cat([batch, batch])

    return work


def imports(task: Task) -> Work:
    """A new process that imports all names of rlstruct; torch is imported in any case."""
    code = "import rlstruct; [getattr(rlstruct, name) for name in dir(rlstruct)]"
    return lambda: subprocess.run([sys.executable, "-c", code], check=True)


PLAIN = simulator, steps, sac, replay, dict_tensors, trajectories, imports
LOOPS: dict[str, Callable[[Task], Work]] = {
    **{loop.__name__: loop for loop in PLAIN},
    "compiled_steps": partial(steps, backend="compile"),
    "sac_compiled": partial(sac, compile_update=True),
    "sac_bfloat16": partial(sac, compile_update=True, precision="bfloat16"),
    **{algorithm: partial(update, algorithm) for algorithm in ("a2c", "ppo", "dqn")},
}


def turns(task: Task) -> Batches:
    """Take turns of a loop; each counts as one step."""
    torch.manual_seed(0)
    with torch.enable_grad():
        work = LOOPS[sys.argv[2]](task)
    while True:
        with torch.enable_grad():
            work()
        yield SAC_STEPS if sys.argv[2].startswith("sac") else 1


if __name__ == "__main__":
    serve(turns)
