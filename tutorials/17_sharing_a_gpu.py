"""Tutorial 17: sharing a GPU. One process with many environments, or several with fewer: measure, then decide.

    python tutorials/17_sharing_a_gpu.py

Runs on the first GPU, or on the CPU, where "sharing" means to share cores. Needs matplotlib for the picture (the extra
`train`). `rlstruct devices` says what a machine has: MPS, instances of MIG, or turns.
"""

import time

import matplotlib.pyplot as plt
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.ppo import PPOConfig
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

# Asking torch.cuda.is_available() would use CUDA in this process, which then could get no share of a GPU any more.
DEVICE = "cuda:0" if torch.cuda.device_count() else "cpu"
SIZES = (64, 1024, 16384) if DEVICE != "cpu" else (16, 128, 1024)


def create_env(n_envs, seed):
    return make("CartPole-v1", n_envs, seed, auto_reset=True, device=DEVICE)


def speed(n_processes, n_envs, sharing="none"):
    """Return steps per second of all processes together; ``n_envs`` is that of all together, too."""
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
        return sorted(rates[2:])[2]  # the median, without a warm-up


# Worker processes import this file, so what starts them stands under this line.
if __name__ == "__main__":
    torch.set_num_threads(1)

    # 1. One process, more and more environments: on a GPU that costs next to nothing, until it is full. This is the
    #    best way to fill a GPU, and shares nothing.
    ways = {"one process": [speed(0, n) for n in SIZES]}

    # 2. The same environments in two processes. On a GPU "auto" takes MIG or MPS if the machine has it, so that their
    #    kernels run at the same time; "none" would let them take turns.
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

    # 3. Whole learners share a GPU likewise: each gets a share for its environments, its agent and its update. These
    #    settings are for a machine with GPUs: four learners on all of them, each with a quarter of a GPU's threads.
    devices = {"learner_device": "cuda", "batcher_device": "cuda"}
    config = PPOConfig(n_learners=4, n_processes=0, n_envs=4096, sharing="mps", thread_percentage=25, **devices)
    print(
        f"{config.n_learners} learners under {config.sharing}, {config.n_envs // config.n_learners} environments each"
    )

    # 4. What cannot be had is refused, with what to do about it.
    try:
        PPOConfig(n_learners=4, sharing="mps")  # learners on the CPU
    except ValueError as error:
        print(error)
