"""Tutorial 21: processes with roles: simulators and agents apart from the trainer.

A role is a class whose `run` is one process. `launch_roles` starts the processes, each with its share of a GPU, or of
the cores; they send values to each other, and sum tensors in groups. This is the programming interface of GMI-DRL
(Listing 1 of its slides). You need it for a layout that no setting of a training gives you; `n_learners` and
`n_processes` give the usual ones. Here two collectors act with weights that are one update old while the trainer
learns, and V-trace corrects for it. CartPole takes less than a minute on two cores.

    python tutorials/21_roles.py
"""

import time

import torch

from rlstruct import Trajectories
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, A2CLearner
from rlstruct.batchers import EpisodeStatistics, RL_Batcher
from rlstruct.sharing import Role, launch_roles
from rlstruct.sims import make

N_UPDATES, N_COLLECTORS, N_ENVS, T = 300, 2, 16, 32


class Collector(Role):
    """Simulators and agents: sends a batch after each new set of weights, until there are none."""

    def run(self):
        batcher = RL_Batcher(
            T,
            ActorCriticAgent,
            lambda n_envs, seed: make("CartPole-v1", n_envs, seed, auto_reset=True, device=self.device),
            agent_args={"model": ActorCritic(4, 2), "device": self.device},
            env_args={"n_envs": N_ENVS},
            seed=1_000 * self.index,
            device=self.device,
        )
        episodes, n_batches, returns = EpisodeStatistics(N_ENVS, self.device), 0, []
        with batcher:
            batcher.reset()
            while (weights := self.receive("trainer")) is not None:
                batcher.update(weights)
                batcher.execute()
                trajectories, _ = batcher.get()
                self.send(trajectories, "trainer")  # goes on at once
                episodes.track(trajectories)
                n_batches += 1
                if n_batches % 50 == 0:
                    # A sum over the group, which all of its members call at the same point.
                    total = self.all_reduce(torch.tensor(episodes.mean_return()), self.role)
                    returns.append(total.item() / self.size(self.role))
        return returns


class Trainer(Role):
    """The network and its optimiser: learns from the batches of all collectors together."""

    def run(self):
        torch.manual_seed(0)
        config = A2CConfig(vtrace=True, learner_device=self.device, learning_rate=3e-3)
        learner = A2CLearner.create(ActorCritic(4, 2).to(self.device), ActorCriticAgent, config)
        collectors = range(self.size("collector"))
        for index in collectors:
            self.send(learner.model.state_dict(), "collector", index)
        for update in range(N_UPDATES):
            batches = [self.receive("collector", index) for index in collectors]
            for index in collectors:  # they collect the next batch while this process learns
                self.send(learner.model.state_dict() if update + 1 < N_UPDATES else None, "collector", index)
            learner.update(Trajectories.cat(batches), update / N_UPDATES)
        return learner.policy_version


# The processes import this file, so keep the code that starts them under this line.
if __name__ == "__main__":
    # torch.cuda.is_available() would open CUDA in this process, whose children could then get no share of a GPU.
    device = "cuda:0" if torch.cuda.device_count() else "cpu"
    begin = time.perf_counter()
    results = launch_roles(
        {"collector": [Collector() for _ in range(N_COLLECTORS)], "trainer": [Trainer()]},
        device=device,
        sharing="auto",  # on a GPU by MIG, else MPS, else in turns; on the CPU each process gets a part of the cores
    )
    n_steps = N_UPDATES * N_COLLECTORS * N_ENVS * T
    print(f"{n_steps:,} steps by {N_COLLECTORS} collectors in {time.perf_counter() - begin:.0f} s")
    for i, mean_return in enumerate(results["collector"][0]):
        print(f"batches {50 * i + 1} to {50 * i + 50}: mean return {mean_return:.0f}")
    assert results["trainer"] == [N_UPDATES]
    assert results["collector"][0][-1] > 100

    # A process that fails ends all of them, and the error has its traceback:
    #     LearnerError: launch_roles: collector 1 failed: ...

# More: docs/coming_from_gmi_drl.md
