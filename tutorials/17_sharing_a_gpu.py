"""Tutorial 17: share a GPU among processes, or fill it with one: measure, then decide.

    python tutorials/17_sharing_a_gpu.py

Runs on the first GPU, or on the CPU, where the processes share cores. It needs matplotlib for the picture (the extra
`train`). `rlstruct devices` says what your machine supports: MPS, MIG, or
taking turns.
"""

import time

import matplotlib.pyplot as plt
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.ppo import PPOConfig
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

# torch.cuda.is_available() would open CUDA in this process, which could then no longer get a share of a GPU.
DEVICE = "cuda:0" if torch.cuda.device_count() else "cpu"
SIZES = (64, 1024, 16384) if DEVICE != "cpu" else (16, 128, 1024)


def create_env(n_envs, seed):
    return make("CartPole-v1", n_envs, seed, auto_reset=True, device=DEVICE)


def speed(n_processes, n_envs, sharing="none"):
    """Return the steps per second of all processes together, which share ``n_envs`` environments."""
    batcher = RL_Batcher(
        16,
        ActorCriticAgent,
        create_env,
        agent_args={"model": ActorCritic(n_inputs=4, n_actions=2), "device": DEVICE},
        env_args={"n_envs": n_envs // max(1, n_processes)},
        n_processes=n_processes,
        seed=0,
        device=DEVICE,
        sharing=sharing,
    )
    with batcher:
        batcher.reset()
        rates = []
        for _ in range(7):
            begin = time.perf_counter()
            batcher.execute()
            trajectories, _ = batcher.get()
            n_steps = int(trajectories.lengths.sum())  # waits for the device
            rates.append(n_steps / (time.perf_counter() - begin))
        return sorted(rates[2:])[2]  # the median, without the first two


# Worker processes import this file, so keep the code that starts them under this line.
if __name__ == "__main__":
    torch.set_num_threads(1)

    # 1. One process with more and more environments: on a GPU they cost almost nothing until it is full. This is the
    #    best way to fill a GPU, and needs no sharing.
    ways = {"one process": [speed(0, n) for n in SIZES]}

    # 2. The same environments in two processes. On a GPU "auto" uses MIG or MPS if the machine has it, so that the
    #    kernels of both run at the same time; with "none" they would take turns.
    ways["two processes"] = [speed(2, n, sharing="auto") for n in SIZES]

    for name, rates in ways.items():
        print(
            f"{name:>14}:", ", ".join(f"{n} environments {rate:,.0f}/s" for n, rate in zip(SIZES, rates, strict=True))
        )
        plt.loglog(SIZES, rates, marker="o", label=name)
    plt.xlabel(f"environments in all, on {DEVICE}")
    plt.ylabel("steps per second")
    plt.legend()
    plt.savefig("sharing.png")
    assert ways["one process"][-1] > ways["one process"][0]

    # 3. Learners share a GPU in the same way: each gets a share for its environments, its agent and its update. These
    #    settings are for a machine with GPUs: four learners on all of them, each with a quarter of a GPU's threads.
    devices = {"learner_device": "cuda", "batcher_device": "cuda"}
    config = PPOConfig(n_learners=4, n_processes=0, n_envs=4096, sharing="mps", thread_percentage=25, **devices)
    print(
        f"{config.n_learners} learners under {config.sharing}, {config.n_envs // config.n_learners} environments each"
    )

    # 4. Settings that cannot work raise an error that says how to fix them.
    try:
        PPOConfig(n_learners=4, sharing="mps")  # learners on the CPU
    except ValueError as error:
        print(error)

# More: docs/sharing_a_gpu.md
