"""Tutorial 11: where the time goes, in one simulator that runs in several ways.

    python tutorials/11_where_the_time_goes.py [--all]

A step of B environments costs calls and arithmetic. Below a few hundred environments only the calls matter, and more
environments are free; above, the arithmetic counts. This tutorial measures both, plots the speed from Python objects to
a compiled kernel, and looks into the loop of a batcher. ``--all`` adds sizes and a compiled agent, and compiles for
another minute. benchmarks/gpu.py measures the same more carefully. Needs matplotlib (the extra `train`).
"""

import sys
import time
from functools import partial

import gymnasium
import matplotlib.pyplot as plt
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from rlstruct import DictTensor
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make


def gymnasium_objects(n_envs):
    """One Python object for each environment."""
    env = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * n_envs)
    return numpy_steps(env, n_envs)


def gymnasium_arrays(n_envs):
    """All environments in one numpy array."""
    return numpy_steps(CartPoleVectorEnv(n_envs), n_envs)


def numpy_steps(env, n_envs):
    env.reset(seed=0)
    action = torch.randint(0, 2, (n_envs,)).numpy()
    return lambda: env.step(action), 1


def single_steps(n_envs, backend="torch"):
    """All environments in tensors; with backend="compile" a step is one kernel."""
    env = make("CartPole-v1", n_envs, backend=backend)
    env.reset()
    action = DictTensor({"action": torch.randint(0, 2, (n_envs,))})
    return lambda: env.step(action), 1


def seconds_per_step(way, n_envs, seconds=0.15):
    """CPU seconds of one step of all environments, the best of three tries; other programs do not count."""
    call, steps = way(n_envs)
    call()
    best = float("inf")
    for _ in range(3):
        count, start = 0, time.process_time()
        while (taken := time.process_time() - start) < seconds / 3:
            call()
            count += 1
        best = min(best, taken / count / steps)
    return best


def draw_ladder(ladder, path):
    """Steps per second over the number of environments, one line for each way."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, costs in ladder.items():
        axes.loglog(costs.keys(), [n / cost for n, cost in costs.items()], "o-", label=name)
    axes.set_xlabel("environments")
    axes.set_ylabel("environment steps per second")
    axes.set_title("CartPole alone, one CPU thread")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def seconds_of_a_collection(n_envs, model, n_steps=32, **settings):
    """CPU seconds of one step of all environments in a batcher: simulator, network, sampling, writes."""
    settings |= {"agent_args": {"model": model}, "env_args": {"n_envs": n_envs}, "seed": 0}
    with RL_Batcher(n_steps, ActorCriticAgent, partial(make, "CartPole-v1"), **settings) as batcher:
        batcher.reset()

        def collect():
            batcher.execute()
            batcher.get()

        return seconds_per_step(lambda n: (collect, n_steps), n_envs)


def shares_of_a_collection(n_envs):
    """Print the shares of the simulator and the network in a step of the batcher."""
    model = ActorCritic(n_inputs=4, n_actions=2)
    whole = seconds_of_a_collection(n_envs, model)
    frame = torch.zeros(n_envs, 4)
    with torch.no_grad():
        network = seconds_per_step(lambda n: (lambda: model(frame), 1), n_envs)
    simulator = seconds_per_step(single_steps, n_envs)
    rest = max(0.0, whole - network - simulator)
    parts = {"simulator": simulator, "actor and critic": network, "draws, writes, bookkeeping": rest}
    print(f"{n_envs} environments, {1e6 * whole:.0f} us for a step of all of them:")
    for name, cost in parts.items():
        print(f"  {name:28} {100 * cost / whole:4.0f} %")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sizes = (4, 64, 1024, 16384)
    ways = {
        "gymnasium, one object each": gymnasium_objects,
        "gymnasium, numpy": gymnasium_arrays,
        "rlstruct, eager": single_steps,
        "rlstruct, compiled": partial(single_steps, backend="compile"),  # the fastest on a CPU
    }
    wanted = {gymnasium_objects: (4, 64), ways["rlstruct, compiled"]: (64, 16384)}  # each size compiles anew
    ladder = {
        name: {n: seconds_per_step(way, n) for n in (sizes if "--all" in sys.argv else wanted.get(way, sizes))}
        for name, way in ways.items()
    }
    for name, costs in ladder.items():
        print(f"{name:28}", "  ".join(f"{n}: {1e9 * cost / n:,.0f} ns" for n, cost in costs.items()))
    draw_ladder(ladder, "where_the_time_goes.png")
    print("where_the_time_goes.png")

    # 1. How much does a call cost, and how much an environment? Two measurements give the two unknowns.
    few, many = ladder["rlstruct, eager"][4], ladder["rlstruct, eager"][16384]
    print(f"an eager step: {1e6 * few:.0f} us for its calls, {1e9 * (many - few) / 16384:.0f} ns for each environment")
    # Eager torch takes a few microseconds per call, more than numpy: use it on a GPU, and to debug. A compiled step is
    # a single call.
    eager, compiled = ladder["rlstruct, eager"][16384], ladder["rlstruct, compiled"][16384]
    print(f"compiled, 16,384 environments take {eager / compiled:.1f} times less")

    # 2. The batcher's loop: the larger the batch, the smaller the overhead.
    shares_of_a_collection(64)
    shares_of_a_collection(4096)

    # 3. With very many environments the C library returns the memory of the network's activations to the system in each
    # step, and requests new pages for the next. Call `rlstruct.device.keep_freed_memory()` once to prevent that.

    # 4. You can compile your agent, too, in any environment: compile_agent=True is an argument of RL_Batcher, and a
    # setting of every training.
    if "--all" in sys.argv:
        model = ActorCritic(n_inputs=4, n_actions=2)
        for n_envs in (8, 64):
            eager, compiled = (seconds_of_a_collection(n_envs, model, compile_agent=yes) for yes in (False, True))
            print(f"{n_envs} environments: {1e6 * eager:.0f} us a step, {1e6 * compiled:.0f} with a compiled agent")

# Next: 12; docs/fast_paths.md explains compiled code and graphs.
