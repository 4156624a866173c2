"""Tutorial 16: a cluster, tried on one laptop, and what happens when a worker dies.

    python tutorials/16_a_cluster_on_a_laptop.py

It needs the extra `ray`. On the command line, for any training:
`rlstruct train a2c --env CartPole-v1 --n-processes 8 --cluster auto`
"""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # by default Ray reports its use to its makers

import ray
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make


def create_env(n_envs, seed):
    return make("CartPole-v1", n_envs, seed, auto_reset=True)


class FragileAgent(ActorCriticAgent):
    """Kills its process in its 20th step, as if the machine had lost power, if its seed is 5."""

    steps = 0

    def seed(self, seed):
        super().seed(seed)
        self.doomed = seed == 5

    def __call__(self, *arguments):
        self.steps += 1
        if self.doomed and self.steps == 20:
            os._exit(1)
        return super().__call__(*arguments)


def collect(n_batches, create_agent=ActorCriticAgent, **where):
    """Collect batches with two workers, and publish the weights before each."""
    torch.manual_seed(0)
    model = ActorCritic(n_inputs=4, n_actions=2)
    agent_args = {"model": model, "device": "cpu", "stochastic": True}
    with RL_Batcher(
        16, create_agent, create_env, agent_args=agent_args, env_args={"n_envs": 4}, n_processes=2, seed=1, **where
    ) as batcher:
        batcher.reset()
        for _ in range(n_batches):
            batcher.update(model.state_dict())  # sent to each machine once
            batcher.execute()
            trajectories, _ = batcher.get()
            yield trajectories, batcher


if __name__ == "__main__":
    torch.set_num_threads(1)

    # 1. Two workers on this machine, as usual.
    here = [trajectories for trajectories, _ in collect(3)]

    # 2. The same two on a cluster. "local" starts a cluster on this machine. With several machines, run
    #    `ray start --head` on the first one and the line that it prints on the others, and pass "auto". Nothing else
    #    changes, and the trajectories are the same.
    there = [trajectories for trajectories, _ in collect(3, cluster={"address": "local", "num_cpus": 0.5})]
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine.steps["_observation/frame"], theirs.steps["_observation/frame"])
    print("two workers on a cluster have collected what two workers of this machine collect")

    # 3. Machines fail. With on_worker_error="restart" the batcher replaces a lost worker wherever there is room, and
    #    lists what was lost. Here the second worker dies in the second batch.
    where = {"address": "auto", "num_cpus": 0.5}
    for trajectories, batcher in collect(3, FragileAgent, cluster=where, on_worker_error="restart"):
        print(f"environments with the seeds {trajectories.info['env_seed'].tolist()}")
        lost = batcher.lost_episodes
    print(f"worker {lost[0].worker} was lost in batch {lost[0].batch}: {lost[0].reason.splitlines()[0]}")
    assert len(lost) == 1
    assert trajectories.n_elems() == 8
    ray.shutdown()

# More: docs/scaling.md
