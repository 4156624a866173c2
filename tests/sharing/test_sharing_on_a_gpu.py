"""Workers of a real GPU, under a real MPS daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import Trajectories
from rlstruct.sharing import Mode, mig_instances, mps
from rlstruct.sharing.daemon import why_unavailable
from rlstruct.sims import CartPole

pytestmark = pytest.mark.gpu


def make_env(n_envs: int, seed: int) -> CartPole:
    return CartPole(n_envs, seed, device="cuda:0")


def batcher(sharing: Mode) -> RL_Batcher:
    torch.manual_seed(0)
    agent_args = {"model": ActorCritic(4, 2), "device": "cuda:0"}
    return RL_Batcher(
        8,
        ActorCriticAgent,
        make_env,
        agent_args=agent_args,
        env_args={"n_envs": 16},
        n_processes=2,
        seed=0,
        device="cuda:0",
        sharing=sharing,
    )


def collect(collecting: RL_Batcher) -> Trajectories:
    collecting.reset()
    collecting.execute()
    return collecting.get()[0].to("cpu")


def test_workers_under_mps_are_clients_and_collect_what_others_collect() -> None:
    if why_unavailable():
        pytest.skip(why_unavailable())
    if mig_instances():
        pytest.skip("the GPU is split into MIG instances")
    with pytest.warns(UserWarning, match="take turns on the GPU"):
        alone = batcher("none")
    with alone:
        expected = collect(alone)
    with mps() as daemon:
        with batcher("mps") as together:
            found = collect(together)
            clients = daemon.ask(f"get_client_list {daemon.ask('get_server_list')}").split()
            assert len(clients) == 2
        folder = daemon.folder
    assert not folder.exists()
    for key in expected.steps.keys():
        torch.testing.assert_close(found.steps[key], expected.steps[key])


def test_workers_in_mig_instances() -> None:
    if not mig_instances():
        pytest.skip("there is no MIG instance, and tests make none")
    with batcher("mig") as together:
        assert collect(together).steps.n_elems() == 32


LEARNERS = """
import os, sys
from functools import partial
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.sims import make

def create_env(n_envs, seed, device):
    print("started with", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_MPS_PIPE_DIRECTORY"), flush=True)
    return make("CartPole-v1", n_envs, seed, auto_reset=True, device=device)

if __name__ == "__main__":
    devices = {"learner_device": "cuda:0", "batcher_device": "cuda:0"}
    config = A2CConfig(n_env_steps=4096, n_envs=64, n_timesteps=8, n_processes=0, evaluation_processes=0,
                       evaluation_episodes=4, n_learners=int(sys.argv[1]), sharing=sys.argv[2], **devices)
    result = train(config, partial(ActorCritic, 4, 2), ActorCriticAgent, create_env)
    print("learnt", [round(float(weight.sum()), 3) for weight in result.model.parameters()])
"""


@pytest.mark.parametrize("sharing", ["mps", "mig"])
def test_learners_share_a_gpu_and_learn_what_one_learns(sharing: Mode, tmp_path: Path) -> None:
    if sharing == "mps" and (why_unavailable() or mig_instances()):
        pytest.skip(why_unavailable() or "the GPU is split into MIG instances")
    if sharing == "mig" and not mig_instances():
        pytest.skip("there is no MIG instance, and tests make none")
    script = tmp_path / "learners.py"
    script.write_text(LEARNERS)

    def run(*arguments: str) -> tuple[set[str], list[float]]:
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        weights = json.loads(next(line for line in lines if line.startswith("learnt")).removeprefix("learnt"))
        return {line for line in lines if line.startswith("started")}, weights

    (_, expected), (places, found) = run("1", "none"), run("2", sharing)
    pipes = {line.split()[-1] for line in places}
    assert ("None" in pipes) == (sharing == "mig")
    assert len(pipes) == 1  # one daemon serves both learners
    assert found == pytest.approx(expected, abs=0.01)
