"""Tutorial 11: where the time goes. One simulator, several ways to step it, and a picture.

    python tutorials/11_where_the_time_goes.py [--all]

A step of B environments costs calls and arithmetic. Below some hundred environments the calls are all that it costs:
there, more environments are free. Beyond, the arithmetic counts. This tutorial measures both, draws the ladder from
Python objects to a compiled kernel, and looks into the loop of a batcher. ``--all`` adds a compiled agent, for which
the compiler takes a minute more. benchmarks/gpu.py measures the same with more care. Needs matplotlib (the extra
`train`).
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
    """CPU seconds of one step of all environments in a batcher: simulator, network, draws, writes."""
    settings |= {"agent_args": {"model": model}, "env_args": {"n_envs": n_envs}, "seed": 0}
    with RL_Batcher(n_steps, ActorCriticAgent, partial(make, "CartPole-v1"), **settings) as batcher:
        batcher.reset()

        def collect():
            batcher.execute()
            batcher.get()

        return seconds_per_step(lambda n: (collect, n_steps), n_envs)


def shares_of_a_collection(n_envs):
    """Print how much of a step of the batcher the simulator and the network take alone."""
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
        "rlstruct, compiled": partial(single_steps, backend="compile"),  # what a CPU should run
    }
    wanted = {gymnasium_objects: (4, 64), ways["rlstruct, compiled"]: (64, 16384)}  # each size is compiled for itself
    ladder = {
        name: {n: seconds_per_step(way, n) for n in (sizes if "--all" in sys.argv else wanted.get(way, sizes))}
        for name, way in ways.items()
    }
    for name, costs in ladder.items():
        print(f"{name:28}", "  ".join(f"{n}: {1e9 * cost / n:,.0f} ns" for n, cost in costs.items()))
    draw_ladder(ladder, "where_the_time_goes.png")
    print("where_the_time_goes.png")

    # 1. What does a call cost, what an environment? Two sizes, two unknowns.
    few, many = ladder["rlstruct, eager"][4], ladder["rlstruct, eager"][16384]
    print(f"an eager step: {1e6 * few:.0f} us for its calls, {1e9 * (many - few) / 16384:.0f} ns for each environment")
    # Eager torch pays some microseconds for each of its calls, more than numpy: it is there for the GPU, and to debug.
    # Compiled, a step is one call.
    eager, compiled = ladder["rlstruct, eager"][16384], ladder["rlstruct, compiled"][16384]
    print(f"compiled, 16,384 environments take {eager / compiled:.1f} times less")

    # 2. The batcher's loop: the larger the batch, the more of the time goes into what one wants.
    shares_of_a_collection(64)
    shares_of_a_collection(4096)

    # 3. With very many environments the network's activations are blocks that the C library gives back to the system in
    # each step, to get new pages for the next. `rlstruct.device.keep_freed_memory()`, called once, ends that.

    # 4. Your agent's calls can be compiled too, whatever environments it acts in: compile_agent=True,
    # an argument of RL_Batcher and a setting of every training.
    if "--all" in sys.argv:
        model = ActorCritic(n_inputs=4, n_actions=2)
        for n_envs in (8, 64):
            eager, compiled = (seconds_of_a_collection(n_envs, model, compile_agent=yes) for yes in (False, True))
            print(f"{n_envs} environments: {1e6 * eager:.0f} us a step, {1e6 * compiled:.0f} with a compiled agent")
