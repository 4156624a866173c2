"""Workers of a real GPU, under a real MPS daemon."""

from __future__ import annotations

import pytest
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import Trajectories
from rlstruct.sharing import Mode, mig_instances, mps
from rlstruct.sharing.daemon import missing
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
    if missing():
        pytest.skip(missing())
    if mig_instances():
        pytest.skip("the GPU is split into MIG instances")
    with pytest.warns(UserWarning, match="share the GPU in turns"):
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
    for key in expected.trajectories.keys():
        torch.testing.assert_close(found.trajectories[key], expected.trajectories[key])


def test_workers_in_mig_instances() -> None:
    if not mig_instances():
        pytest.skip("there is no MIG instance, and tests make none")
    with batcher("mig") as together:
        assert collect(together).trajectories.n_elems() == 32
