"""The limit: a loop written by hand, one call of the policy and B calls of ``env.step``, nothing stored.

With several processes each runs its own loop over its share; they meet once per batch.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch
from _serve import Contender, Task, act, make_env, make_policy, serve


class Loop:
    def __init__(self, task: Task) -> None:
        self.T = task.n_timesteps
        self.envs = [make_env(task.environment) for _ in range(task.n_envs)]
        self.policy = make_policy()
        self.observation = torch.stack(
            [torch.from_numpy(env.reset(seed=seed)[0]) for seed, env in enumerate(self.envs)]
        ).numpy()

    def collect(self) -> int:
        observation, policy, envs = self.observation, self.policy, self.envs
        for _ in range(self.T):
            actions = list(act(policy, observation).numpy())  # faster through gymnasium than integers
            for index, env in enumerate(envs):
                frame, _reward, terminated, truncated, _info = env.step(actions[index])
                if terminated or truncated:
                    frame, _info = env.reset()
                observation[index] = frame
        return self.T * len(envs)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def work(task: Task, pipe: Connection) -> None:
    torch.set_num_threads(1)
    loop = Loop(task)
    with torch.no_grad():
        while pipe.recv():
            pipe.send(loop.collect())


class Loops:
    """P processes, each with its share of the environments."""

    def __init__(self, task: Task) -> None:
        share = Task(task.n_envs // task.n_processes, 1, task.n_timesteps, task.environment)
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for _ in range(task.n_processes):
            ours, theirs = context.Pipe()
            context.Process(target=work, args=(share, theirs), daemon=True).start()
            self.pipes.append(ours)

    def collect(self) -> int:
        for pipe in self.pipes:
            pipe.send(True)
        return sum(pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)


def create(task: Task) -> Contender:
    return Loop(task) if task.n_processes == 1 else Loops(task)


if __name__ == "__main__":
    serve(create, ["gymnasium", "torch"])
