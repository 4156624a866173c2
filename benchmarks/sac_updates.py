"""Gradient steps per second of SAC: ours, eager and compiled, and stable-baselines3's, one thread each, in turn.

Run: ``python benchmarks/sac_updates.py --peers .venv-peers/bin/python``, see ``peers/README.md``. All learn Pendulum-v1
with networks of 256-256 units from batches of 256 random steps; ``products`` are the matrix products of ours alone.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

BATCH, FILLED = 256, 5000


def ours(**settings: bool) -> Callable[[int], object]:
    from rlstruct.agents import SoftActorCritic, SquashedGaussianAgent
    from rlstruct.algos.sac import SACConfig, SACLearner
    from rlstruct.batchers import RL_Batcher
    from rlstruct.sims import make

    model = SoftActorCritic(3, (-2.0,), (2.0,))
    learner = SACLearner.create(model, SquashedGaussianAgent, SACConfig(batch_size=BATCH, **settings))
    args = {"agent_args": {"model": model}, "env_args": {"name": "Pendulum-v1", "n_envs": 4}}
    with RL_Batcher(FILLED // 4, SquashedGaussianAgent, make, **args, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        learner.buffer.extend(batcher.get()[0])
    return lambda n: [learner.learn() for _ in range(n)]


def sb3() -> Callable[[int], object]:
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", "Pendulum-v1", batch_size=BATCH, learning_starts=FILLED, device="cpu")
    model.learn(FILLED)
    return lambda n: model.train(n, BATCH)


def products() -> Callable[[int], object]:
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    # The policy runs twice and learns once; both critics and their targets run three times, learn once, and once pass
    # the gradient on to the policy's actions.
    for sizes, n, forward, learnt, passed in (((3, 256, 256, 2), 1, 2, 1, 0), ((4, 256, 256, 1), 2, 3, 1, 1)):
        for layer, (wide_in, wide_out) in enumerate(pairwise(sizes)):
            x, weight, gradient = (
                torch.randn(n, *s) for s in ((BATCH, wide_in), (wide_in, wide_out), (BATCH, wide_out))
            )
            calls += [(x, weight)] * forward + [(x.mT, gradient)] * learnt
            calls += [(gradient, weight.mT)] * (passed + learnt * (layer > 0))
    return lambda n_steps: [torch.bmm(*call) for _ in range(n_steps) for call in calls]


CONTENDERS = {"ours": ours, "compiled": partial(ours, compile_update=True), "sb3": sb3, "products": products}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="the interpreter that has stable-baselines3")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        learn = CONTENDERS[options.serve]()
        learn(20)
        for _ in sys.stdin:  # one line for each repeat
            start = time.process_time()  # of one thread
            learn(options.steps)
            print(options.steps / (time.process_time() - start), flush=True)
        sys.exit()
    known = {name: sys.executable if name != "sb3" else options.peers for name in CONTENDERS}
    served = {
        name: subprocess.Popen([python, __file__, "--serve", name, "--steps", f"{options.steps}"], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name, python in known.items() if python
    }  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in served}
    for _ in range(options.repeats):
        for name, process in served.items():
            process.stdin.write("\n")
            process.stdin.flush()
            rates[name].append(float(process.stdout.readline()))
    for name, found in rates.items():
        served[name].communicate()
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], found, strict=True))
        low, high = min(found), max(found)
        print(
            f"{name:8} {statistics.median(found):6.0f} ({low:.0f} to {high:.0f}) gradient steps/s; ours {ratio:.2f} x"
        )
