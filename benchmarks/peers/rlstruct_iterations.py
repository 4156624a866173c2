"""Iterations of ours, or a part: ``rlstruct_iterations.py TASK NAME PART PRECISION``; see ``rejax_iterations.py``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from iterations import CAPACITY, GAMES, NETWORKS, SETTINGS, keep_cores
from rlstruct_loops import Work
from serve import Batches, Task, serve
from torch import nn

from rlstruct import DictTensor
from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos.dqn import DQNConfig, DQNLearner
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.algos.pqn import PQNConfig, PQNLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.engine.compiled import Compiled
from rlstruct.sims import make

OPTIONS = {**{f"{game}-MinAtar": {"sticky_probability": 0.0, "time_limit": 1000} for game in GAMES}, "CartPole-v1": {}}


def simulator(task: Task, seed: int = 0) -> Any:  # noqa: ANN401 - one of several simulators
    return make(task.environment, task.n_envs, seed=seed, backend="compile", **OPTIONS[task.environment])


class Training:
    """A batcher and a learner in this process, as `run_training` makes them."""

    def __init__(self, task: Task, name: str, precision: str = "float32") -> None:
        space, hidden = simulator(task), NETWORKS[name, task.environment]
        n_in = int(torch.tensor(space.observation_space.shape).prod())
        n_actions = int(space.action_space.n)
        sizes = {"n_envs": task.n_envs, "n_timesteps": task.n_timesteps}
        settings: Any = {**sizes, **SETTINGS[name, task.environment], "compile_update": True, "precision": precision}
        model: Any
        agent: Any
        if name == "pqn":
            model, agent = QNetwork(n_in, n_actions, hidden=hidden, layer_norm=True), QAgent
            self.learner: Any = PQNLearner.create(model, agent, PQNConfig(**settings))
        elif name == "dqn":
            settings |= {"learning_starts": 0, "replay_capacity": CAPACITY}
            # As in rejax, whose target network moves once in an iteration.
            settings |= {"n_step": 1, "average_rate": 1.0, "target_update_interval": settings["n_updates"]}
            model, agent = QNetwork(n_in, n_actions, hidden=hidden), QAgent
            self.learner = DQNLearner.create(model, agent, DQNConfig(**settings))
        else:
            model, agent = ActorCritic(n_in, n_actions, hidden=hidden), ActorCriticAgent
            for network in (model.actor, model.critic):
                network.layers[1] = network.layers[3] = nn.ReLU()
            self.learner = PPOLearner.create(model, agent, PPOConfig(**settings, value_clip=0.2))  # as in rejax
        self.info = self.learner.agent_info(0.05, task.n_envs)

        def create_agent() -> Any:  # noqa: ANN401
            return agent(model, copy_model=False)

        self.batcher = RL_Batcher(
            task.n_timesteps, create_agent, lambda seed: simulator(task, seed), seed=0, compile_agent=True
        )
        self.batcher.reset()

    def collect(self) -> Any:  # noqa: ANN401
        self.batcher.execute(self.info)
        return self.batcher.get()[0]

    def iterate(self) -> None:
        self.learner.update(self.collect(), 0.0)
        self.batcher.update(self.learner.model.state_dict())


def product(a: torch.Tensor, b: torch.Tensor) -> Work:
    """Return a call that multiplies two matrices, of which one may be bits, as compiled code does."""
    multiply = Compiled(lambda a, b: a.to(torch.float32) @ b.to(torch.float32))
    return lambda: multiply(a, b)


def products(task: Task, name: str) -> Work:
    """The matrix products of the gradient steps of an iteration."""
    env, (wide, narrow), settings = simulator(task), NETWORKS[name, task.environment], SETTINGS[name, task.environment]
    rows = task.n_envs * task.n_timesteps // settings["n_minibatches"]
    frames = env.reset()[0]["frame"].flatten(1)
    frames = frames.repeat(-(-rows // task.n_envs), 1)[:rows]

    n_networks = 1 if name == "pqn" else 2  # their last layers have a few outputs, and take next to no time
    learning = []
    for x, n_out in ((frames, wide), (torch.ones(rows, wide), narrow)):
        weight, y = torch.ones(n_out, x.shape[1]), torch.ones(rows, n_out)
        learning += [product(x, weight.t()), product(y.t(), x)]
        if x is not frames:  # nothing needs the gradient of the observations
            learning.append(product(y, weight))
    n_steps = settings["n_epochs"] * settings["n_minibatches"]

    def work() -> None:
        for multiply in n_networks * n_steps * learning:
            multiply()

    return work


def part(task: Task, name: str, which: str, precision: str) -> Work:
    """Return the work of a part of an iteration, or of all of it."""
    if which == "products":
        return products(task, name)
    if which == "simulator":
        env = simulator(task)
        action = DictTensor({"action": torch.zeros_like(env.reset()[0]["last_action"])})
        return lambda: [env.step(action) for _ in range(task.n_timesteps)]
    training = Training(task, name, precision)
    if which in ("iteration", "collect"):
        return training.iterate if which == "iteration" else training.collect
    batch, learner = training.collect(), training.learner
    if which == "advantages":
        return lambda: learner.prepare(batch)
    prepared, _ = learner.prepare(batch)
    return lambda: list(learner.minibatches(prepared))


def iterations(task: Task) -> Batches:
    """Take turns of a part; each counts as the environment steps of an iteration."""
    torch.manual_seed(0)
    with torch.enable_grad():
        work = part(task, *sys.argv[2:5])
    while True:
        with torch.enable_grad():
            work()
        yield task.n_envs * task.n_timesteps


if __name__ == "__main__":
    keep_cores()
    serve(iterations)
