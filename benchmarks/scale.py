"""Speed of workers on a cluster: ``make peers``, then ``python benchmarks/scale.py``.

``collection``: one and two workers, of this machine and of Ray, TorchRL's RayCollector and RLlib's env runners, in
turns. ``plan``: what a batch costs the learner's process on a cluster, from which docs/scaling.md plans a large one.
Needs two idle cores and three minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics

import tables
import torch
from common.contenders import PEERS_PYTHON, Entry, compete
from common.reporting import Row, calls_in, machine, seconds_of, write
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor, Trajectories, VecEnv
from rlstruct.agents import RandomAgent
from rlstruct.batchers import RL_Batcher

N_FRAME = 84 * 84 * 4
OF_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # else its workers give way to everybody's


def collection(rounds: int, peers: str) -> list[Row]:
    """Collect with the same policy in the same environments, everybody in turns."""
    one, two = ({"n_envs": 32 * k, "n_processes": k, "n_timesteps": 64} for k in (1, 2))
    results = compete(
        [
            Entry("one worker here", "rlstruct_batcher.py", one),
            Entry("two workers here", "rlstruct_batcher.py", two),
            Entry("one worker of Ray", "rlstruct_batcher.py", one, ("cluster",), variables=OF_RAY),
            Entry("two workers of Ray", "rlstruct_batcher.py", two, ("cluster",), variables=OF_RAY),
            Entry("TorchRL RayCollector, two", "collectors.py", two, ("torchrl_ray",), peers, OF_RAY),
            Entry("RLlib env runners, two", "collectors.py", two, ("rllib",), peers, OF_RAY),
        ],
        rounds,
        seconds=1.0,
    )
    ours = results[3].rates
    rows: list[Row] = []
    for result in results:
        rows.append({"part": "collection", "work": result.name, "versions": result.versions})
        if result.rate is None:
            rows[-1]["not_run"] = result.why
            continue
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, result.rates, strict=True))
        rows[-1] |= {"steps_per_s": result.rate, "ratio": ratio, "rounds_steps_per_s": result.rates}
    return rows


class Still(VecEnv):
    """Environments that do nothing, and never end, with frames of a chosen size."""

    auto_reset, restarts_take_steps = True, False
    action_space = spaces.Discrete(2)
    device = torch.device("cpu")

    def __init__(self, n_envs: int, n_bytes: int, seed: int) -> None:
        self.observation_space = spaces.Box(0, 255, (n_bytes,), "uint8")
        no = torch.zeros(n_envs, dtype=torch.bool)
        self._seen = DictTensor(
            {"frame": torch.zeros(n_envs, n_bytes, dtype=torch.uint8), "reward": torch.zeros(n_envs), "terminated": no,
             "truncated": no, "done": no, "initial_state": no, "last_action": torch.zeros(n_envs, dtype=torch.int64)}
        )  # fmt: skip
        self._running = ~no

    def n_envs(self) -> int:
        return len(self._running)

    def reset(self, env_info: DictTensor | None = None) -> tuple[DictTensor, Tensor]:
        return self._seen, self._running

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, Tensor], tuple[DictTensor, Tensor]]:
        return (self._seen, self._running), (self._seen, self._running)


def plan(rounds: int) -> list[Row]:
    """Measure what a batch costs on a cluster whose workers have nothing to do."""
    cases = {"tiny batches, one worker": (1, 1, 4), "tiny batches, two workers": (2, 1, 4)}
    cases |= {"32 MiB a worker, one worker": (1, 600, N_FRAME), "32 MiB a worker, two workers": (2, 600, N_FRAME)}
    rows: list[Row] = []
    for name, (k, n_envs, n_bytes) in cases.items():
        with RL_Batcher(
            1, RandomAgent, Still, agent_args={"action_space": Still.action_space}, n_processes=k,
            env_args={"n_envs": n_envs, "n_bytes": n_bytes}, cluster={"address": "local", "num_cpus": 0.5},
        ) as batcher:  # fmt: skip
            batcher.reset()

            def collect() -> Trajectories:
                batcher.execute()
                return batcher.get()[0]

            n_moved = sum(tensor.nbytes for tensor in collect().steps.values())
            count = calls_in(collect, 0.5)
            seconds = statistics.median(seconds_of(collect, count) for _ in range(rounds))
        rows.append(
            {"part": "plan", "work": name, "workers": k, "batch_bytes": n_moved, "seconds_per_batch": seconds,
             "bytes_per_s": n_moved / seconds}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--peers", default=PEERS_PYTHON, help="the peers' interpreter")
    options = parser.parse_args()
    os.environ.update(OF_RAY)
    torch.set_num_threads(1)
    print(machine())
    rows = [*collection(options.rounds, options.peers), *plan(options.rounds)]
    print(tables.text("scale_collection", rows), tables.text("scale_plan", rows), sep="\n\n")
    print(f"Written: {write('scale', rows)}")


if __name__ == "__main__":
    main()
