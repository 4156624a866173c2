"""Tutorial 18: find how many workers, environments and steps collect fastest on this machine.

    python tutorials/18_tuning.py

`rlstruct tune ppo --env CartPole-v1 --learn` does the same for any training, and `--n-learners 1 2 4` also tries
numbers of learners. It needs matplotlib for the picture (the extra `train`).
"""

import matplotlib.pyplot as plt
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.sharing import tune
from rlstruct.sims import make


def create_env(n_envs, seed):
    return make("CartPole-v1", n_envs, seed, auto_reset=True)


# Candidates may have worker processes, which import this file.
if __name__ == "__main__":
    torch.set_num_threads(1)
    agent_args = {"model": ActorCritic(n_inputs=4, n_actions=2)}

    # 1. tune runs real batchers for a short time each, in alternation with the fastest one so far. It takes more and
    #    more environments until that no longer pays, or would take too much memory. Half a minute is enough for a look.
    answer = tune(
        ActorCriticAgent,
        create_env,
        agent_args=agent_args,
        n_processes=[0, 1],
        n_envs=[16, 64, 256, 1024],
        n_timesteps=[16, 64],
        seconds=30.0,
    )

    # 2. The table has a line for each candidate, and says why the search continued or stopped there.
    print(answer)

    # 3. Plot the speed over environments, with a line for each number of workers and steps.
    for n_processes in (0, 1):
        for n_timesteps in (16, 64):
            found = [
                (probe.candidate.n_envs, probe.measured.rate)
                for probe in answer.probes
                if probe.measured
                and (probe.candidate.n_processes, probe.candidate.n_timesteps) == (n_processes, n_timesteps)
            ]
            if found:
                plt.loglog(
                    *zip(*sorted(found), strict=True), marker="o", label=f"{n_processes} workers, {n_timesteps} steps"
                )
    best = answer.best
    rate = next(probe.measured.rate for probe in answer.probes if probe.candidate == best)
    plt.scatter([best.n_envs], [rate], s=200, facecolors="none", edgecolors="black", label="the answer")
    plt.xlabel("environments of each process")
    plt.ylabel("steps per second")
    plt.legend()
    plt.savefig("tuning.png")

    # 4. The answer holds the arguments of a batcher.
    with RL_Batcher(**answer, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    assert trajectories.steps.n_steps() >= best.n_timesteps
    print(f"a batch: {trajectories.n_elems()} environments x {trajectories.steps.n_steps()} steps")

# More: docs/tuning.md
