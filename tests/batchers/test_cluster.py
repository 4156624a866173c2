"""Workers on a cluster collect what those of this machine do; nodes die, and nothing is lost in silence."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from batcher_fakes import assert_equal, create_policy, create_version_agent, first_batch
from fake_agents import RngAgent
from fake_envs import create_counting_env, create_failing_env, create_slow_env

from rlstruct import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import ClusterError, WorkerError, WorkerTimeout
from rlstruct.sims import make

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.slow,  # Ray starts two nodes, and ten programs on each
    # What Ray says of itself, and files that it closes when it is collected.
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Cluster = Any
WEIGHTS = create_policy(recurrent=True).model.state_dict()  # type: ignore[attr-defined]
LAST = {name: tensor * 30 for name, tensor in WEIGHTS.items()}  # after 30 batches


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a node half a minute to start, which on a busy machine may be too little."""
    for _ in range(3):
        try:
            return start()
        except Exception as error:
            late = error
    raise late


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes on this machine: one that this process belongs to, and one that may be killed."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_worker_niceness", "0")  # on a busy machine workers would starve
    patch.setenv("RAY_health_check_initial_delay_ms", "1000")  # a killed node is missed in 2 s, not 15
    patch.setenv("RAY_health_check_period_ms", "500")
    patch.setenv("RAY_health_check_failure_threshold", "3")
    patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where nodes find the modules of these tests
    from ray.cluster_utils import Cluster

    nodes = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    found = patiently(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **nodes}))
    found.second = patiently(lambda: found.add_node(num_cpus=2, **nodes))
    try:
        found.wait_for_nodes()
        yield found
    finally:
        ray.shutdown()
        found.shutdown()
        patch.undo()


class PlaceAgent(RngAgent):
    """Shows the node that it is on, and what its environment says about threads."""

    def __call__(self, *arguments: Any) -> tuple[DictTensor, DictTensor]:
        action, state = super().__call__(*arguments)
        action.set("threads", torch.full_like(action["action"], int(os.environ["OMP_NUM_THREADS"])))
        action.set("node", torch.full_like(action["action"], number(ray.get_runtime_context().get_node_id())))
        return action, state


def number(node_id: str) -> int:
    return int(node_id[:12], 16)


def create_cart_poles(n_envs: int, seed: int) -> Any:
    return make("CartPole-v1", n_envs, seed, auto_reset=True)


def collect(batcher: RL_Batcher, n_batches: int) -> list[Trajectories]:
    """Collect, each batch with other weights and another one queued behind it."""
    found = []
    batcher.execute()
    for i in range(n_batches):
        batcher.update({name: tensor * (1 + i) for name, tensor in WEIGHTS.items()})
        batcher.execute()
        found.append(batcher.get()[0])
    return [*found, batcher.get()[0]]


def test_trajectories_and_states_are_those_of_this_machine(cluster: Cluster) -> None:
    create = partial(RL_Batcher, 6, partial(create_policy, recurrent=True), create_cart_poles, env_args={"n_envs": 3},
                     n_processes=2, seed=7)  # fmt: skip
    with create() as here, create(cluster=cluster.address) as there:
        both = here, there
        for batcher in both:
            batcher.reset()
        found = [collect(batcher, 30) for batcher in both]
        assert any(batch.steps["_observation/done"].any() for batch in found[0])
        states = [batcher.state_dict() for batcher in both]
        found += [collect(batcher, 1) for batcher in both]  # away from these states, and back to that of the other
        assert here.load_state_dict(states[1], LAST)
        assert there.load_state_dict(states[0], LAST)
        found += [collect(batcher, 2) for batcher in both]
    for expected, got in zip(found[::2], found[1::2], strict=True):
        for mine, theirs in zip(got, expected, strict=True):
            assert_equal(mine, theirs)
    assert_equal(found[4][0], found[2][0])


def test_episodes_infos_and_threads_are_those_of_this_machine(cluster: Cluster) -> None:
    batches = []
    on_cluster = {"n_processes": 2, "cluster": {"address": cluster.address, "num_cpus": 0.5}}
    for agent, n_envs, where in ((RngAgent, 6, {}), (PlaceAgent, 3, on_cluster)):
        with RL_Batcher(4, agent, create_counting_env, env_args={"n_envs": n_envs}, seed=1, **where) as batcher:
            batcher.reset(DictTensor({"epsilon": torch.arange(6.0)}), DictTensor({"length": torch.arange(1, 7)}))
            batcher.execute()
            found = [batcher.get()]
            batcher.execute(DictTensor({"epsilon": torch.ones(1)}))
            batches.append([*found, batcher.get()])
            assert batcher.memory_report().total > 0
            assert sum(batcher.stats().workers[-1].values()) > 0
    for (here, n_here), (there, n_there) in zip(*batches, strict=True):
        steps = there.steps
        assert steps["action/threads"][steps.mask()].eq(1).all()
        own = {key: steps[key] for key in steps.keys() if key not in ("action/threads", "action/node")}
        assert_equal(Trajectories(there.info, TemporalDictTensor(own, steps.lengths)), here)
        assert n_there == n_here


def test_tensors_of_any_dtype_and_shape_are_packed() -> None:
    from rlstruct.batchers.workers.cluster import from_bytes, to_bytes

    dtypes = (torch.bfloat16, torch.float32, torch.int64, torch.uint16, torch.bool, torch.float8_e5m2)
    values = torch.arange(12).view(3, 4)
    tensors = {f"{dtype}": values.to(dtype) for dtype in dtypes}
    tensors |= {"number": torch.tensor(2.5), "none": torch.zeros(0, 3), "turned": values.t()}
    packed = to_bytes(tensors)
    for array, _, _ in packed.values():
        array.flags.writeable = False  # as Ray's are
    found = from_bytes(packed)
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(found[name].float(), tensor.float())


def test_weights_arrive_with_their_version(cluster: Cluster) -> None:
    with RL_Batcher(2, create_version_agent, create_counting_env, env_args={"n_envs": 1, "auto_reset": True},
                    n_processes=1, cluster="auto") as batcher:  # fmt: skip
        for i in range(3):
            batcher.update({"w": torch.full((70_000,), float(i))})
            batch = first_batch(batcher)
            assert batch.steps["action/lowest"].eq(i).all()
            assert batch.info["policy_version"].eq(i + 1).all()
        assert batcher.memory_report().weights == 70_000 * 4


def test_what_a_worker_raises_names_environment_step_and_node(cluster: Cluster) -> None:
    env_args = {"n_envs": 2, "auto_reset": True, "failure": ValueError("no road"), "step": 5, "failing_seed": 3}
    with RL_Batcher(4, RngAgent, create_failing_env, env_args=env_args, n_processes=1, seed=3,
                    cluster=cluster.address) as batcher:  # fmt: skip
        batcher.reset()
        batcher.execute()
        batcher.get()
        batcher.execute()
        with pytest.raises(WorkerError, match=r"worker 0 \(pid \d+\) raised in .* no road[\s\S]*\(on node ") as caught:
            batcher.get()
    assert (caught.value.worker, caught.value.step, caught.value.environments) == (0, 1, (0, 2))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_worker_without_a_place_or_an_answer_is_late(cluster: Cluster) -> None:
    env_args = {"n_envs": 1, "auto_reset": True, "seconds": 1.0}
    settings = {"env_args": env_args, "n_processes": 1, "timeout": 1.0}
    nowhere = {"address": cluster.address, "num_cpus": 64}
    words = r"within 1 s; it is in Ray's queue.*'num_cpus': 64.*nodes have.*'CPU'"
    batcher = RL_Batcher(20, RngAgent, create_slow_env, cluster=nowhere, **settings)
    with batcher, pytest.raises(WorkerTimeout, match=words):
        batcher.reset()
    settings["timeout"] = 60.0
    with RL_Batcher(100, RngAgent, create_slow_env, cluster=cluster.address, **settings) as batcher:
        batcher.reset()
        batcher.execute()
        assert batcher.get(blocking=False) == (None, None)
        with pytest.raises(WorkerTimeout, match=r"within 0.5 s; it is in its order 'execute' on node \d"):
            batcher.get(timeout=0.5)
        start = time.monotonic()
    assert time.monotonic() - start < 60.0  # not for the rest of the 100 s; about 2 s


def test_nodes_with_other_versions_are_refused(cluster: Cluster) -> None:
    module = importlib.import_module("rlstruct.batchers.workers.cluster")
    module.connect(cluster.address)
    actor = module.RayActor(b"", {}, {**module.versions(), "torch": "1.0"})
    _, _, failure = actor.answer("create", (0, 0), 0, None)
    words = r"node .* has torch 2.*, the batcher's process 1\.0\. Install the same version on every node"
    assert re.search(words, failure.summary)
    assert "ClusterError" in failure.summary


def test_a_training_on_a_cluster_is_the_training_here(cluster: Cluster) -> None:
    results = []
    for n_processes, address in ((0, None), (1, cluster.address)):
        config = A2CConfig(n_env_steps=80, n_envs=2, n_processes=n_processes, n_timesteps=8, evaluation_processes=0,
                           evaluation_episodes=2, seed=3, cluster=address)  # fmt: skip
        results.append(train(config, partial(ActorCritic, 4, 2), ActorCriticAgent, create_cart_poles))
    here, there = results
    assert there.losses == here.losses
    assert len(there.losses["loss"]) == 5
    for mine, theirs in zip(there.model.state_dict().values(), here.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_node_is_killed_in_the_middle(cluster: Cluster) -> None:
    """Each batch of each worker comes once and in order, what was lost is listed, and the others lose nothing."""
    env_args = {"n_envs": 2, "auto_reset": True, "seconds": 0.01}
    T = 10
    settings = {"timeout": 120.0, "on_worker_error": "restart", "max_restarts": 10}
    where = {"address": cluster.address, "num_cpus": 0.5}
    with RL_Batcher(T, PlaceAgent, create_slow_env, env_args=env_args, n_processes=3, seed=0, cluster=where,
                    **settings) as batcher:  # type: ignore[arg-type]  # fmt: skip
        batcher.reset()
        batcher.execute()
        found, dead = [], [-1]
        # An actor may go on for a while before it learns that its node is gone.
        while len(found) < 8 or (sorted({one.worker for one in batcher.lost_episodes}) != dead and len(found) < 1000):
            batcher.execute()
            if len(found) == 3:
                cluster.remove_node(cluster.second, allow_graceful=False)
            batch, n_running = batcher.get()
            assert n_running == 6
            nodes = batch.steps["action/node"][::2, 0].tolist()
            found.append(batch)
            if len(found) == 1:
                dead = [i for i, node in enumerate(nodes) if node == number(cluster.second.node_id)]
        batcher.get()
        lost = batcher.lost_episodes
    n_batches = len(found)
    assert 0 < len(dead) < 3
    # Ray may place a new worker on the dead node before it knows, and that one is replaced, too.
    assert sorted({one.worker for one in lost}) == dead
    for worker in range(3):
        seeds = [int(batch.info["env_seed"][2 * worker]) for batch in found]
        steps = [int(batch.info["step"][2 * worker]) for batch in found]
        if worker not in dead:
            assert (seeds, steps) == ([2 * worker] * n_batches, [T * i for i in range(n_batches)])
            continue
        one, *again = (one for one in lost if one.worker == worker)
        assert all(other.batch == one.batch for other in again)
        new_seed = again[-1].new_seed if again else one.new_seed
        assert "Ray says" in one.reason
        assert one.environments == (2 * worker, 2 * worker + 2)
        old, new = one.batch, n_batches - one.batch
        assert seeds == [one.seed] * old + [new_seed] * new
        assert steps == [T * i for i in range(old)] + [T * i for i in range(new)]
    for batch in found:  # each environment counts its own steps, with the numbers of its seed
        frames = batch.steps["observation/frame"]
        assert frames[:, :, 0].eq(batch.info["env_seed"].unsqueeze(1)).all()


def test_without_a_cluster_or_without_ray_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    create = partial(RL_Batcher, 2, RngAgent, create_counting_env, env_args={"n_envs": 1})
    with pytest.raises(ClusterError, match=r"no cluster at '127.0.0.1:1'[\s\S]*ray start --head[\s\S]*cluster='local'"):
        create(n_processes=1, cluster="127.0.0.1:1")
    with pytest.raises(ValueError, match=r"cluster='auto' with n_processes=0.*expected at least one worker"):
        create(cluster="auto")
    with pytest.raises(ValueError, match="A2CConfig: cluster is 'auto', expected None, or n_processes of 1 or more"):
        A2CConfig(cluster="auto", n_processes=0)
