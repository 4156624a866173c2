"""Wrong call orders, wrong arguments, and what the messages say."""

from __future__ import annotations

import gc
import inspect
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batcher_fakes import create_cartpole, create_policy, first_batch, next_batch, refused
from fake_agents import HistoryAgent, RngAgent, StatefulAgent
from fake_envs import create_counting_env, create_slow_env

from rlstruct import (
    BatcherStateError,
    DeviceMismatchError,
    DictTensor,
    ShapeMismatchError,
    VecEnv,
    WorkerError,
    replay_agent,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.backend import BACKENDS, BackendSettings
from rlstruct.batchers.workers.local import LocalLink


def make(n_processes: int = 0, *, T: int = 3, n_envs: int = 2, auto_reset: bool = True, **settings: Any) -> RL_Batcher:
    env_args = {"n_envs": n_envs, "auto_reset": auto_reset}
    settings = {"seed": 0, **settings}
    return RL_Batcher(T, RngAgent, create_counting_env, env_args=env_args, n_processes=n_processes, **settings)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[RL_Batcher]:
    with make(2) as batcher:
        yield batcher


def test_ctrl_c_that_loses_an_answer_leaves_no_batcher_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = LocalLink.receive

    def interrupted(link: LocalLink) -> None:
        while receive(link) is None:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with make(1) as batcher:
        batcher.reset()
        batcher.execute()
        monkeypatch.setattr(LocalLink, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batcher.get()
        with pytest.raises(BatcherStateError, match=r"collection has failed. close"):
            batcher.get(timeout=0.5)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_batch_lost_while_it_is_put_together_is_not_skipped(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **keywords: object) -> None:
        raise error

    with make() as batcher:
        batcher.reset()
        batcher.execute()
        monkeypatch.setattr("rlstruct.batchers.batcher.assemble", fail)
        with pytest.raises(error):
            batcher.get()
        monkeypatch.undo()
        with pytest.raises(BatcherStateError, match="failed" if error is MemoryError else r"Call reset\(\) first"):
            batcher.execute()


def test_an_interrupted_first_batch_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    batches = []
    for interrupted in (False, True):
        with make() as batcher:
            batcher.reset()
            if interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr("rlstruct.batchers.collector.RolloutBuffer", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        batcher.execute()
            batcher.reset()
            batches.append(next_batch(batcher).steps)
    assert torch.equal(batches[0]["action/action"], batches[1]["action/action"])


@pytest.mark.parametrize("n_processes", [0, 1])
def test_waiting_without_an_end_is_possible(n_processes: int) -> None:
    with make(n_processes, timeout=math.inf, close_timeout=math.inf) as batcher:
        batcher.reset()
        assert next_batch(batcher).n_elems() == 2 * max(1, n_processes)


@pytest.mark.parametrize("n_processes", [0, 2])
def test_wrong_orders_name_the_missing_call(n_processes: int, request: pytest.FixtureRequest) -> None:
    batcher: RL_Batcher = request.getfixturevalue("two_workers") if n_processes else make()
    with pytest.raises(BatcherStateError, match=r"execute: reset\(\) has not been called. Call reset\(\) first"):
        batcher.execute()
    with pytest.raises(BatcherStateError, match=r"get: no batch .* Call execute\(\) first"):
        batcher.get()
    batcher.reset()
    batcher.execute()
    with pytest.raises(
        BatcherStateError, match=r"memory_report: there is no batch yet. Call execute\(\) and get\(\) first"
    ):
        batcher.memory_report()
    if n_processes:
        batcher.execute()  # waits behind the first one
    why = "one batch is being collected, and another one is queued" if n_processes else "only with worker processes"
    with pytest.raises(BatcherStateError, match=rf"execute: get\(\) has not been called. Call get\(\) first: .*{why}"):
        batcher.execute()
    if n_processes:
        batcher.get()
    for call in (batcher.reset, batcher.state_dict):
        with pytest.raises(BatcherStateError, match=r"a batch is being collected. Call get\(\) first"):
            call()
    batch, n_running = batcher.get()
    with pytest.raises(BatcherStateError, match="get: no batch is being collected"):
        batcher.get()
    B = 2 * max(1, n_processes)
    assert (batch.n_elems(), n_running, batcher.n_envs()) == (B, B, B)


def test_all_episodes_ended() -> None:
    with make(T=9, auto_reset=False) as batcher:
        batcher.reset()
        batcher.execute()
        assert batcher.get()[1] == 0
        with pytest.raises(BatcherStateError, match=r"every episode has ended. Call reset\(\)"):
            batcher.execute()
        assert first_batch(batcher).steps["observation/frame"][:, 0, 1].tolist() == [1, 1]  # second episodes


@pytest.mark.parametrize("method", ["reset", "execute", "get", "n_envs", "update", "__enter__"])
def test_closed_is_closed(method: str) -> None:
    batcher = make()
    batcher.close()
    batcher.close()
    with pytest.raises(BatcherStateError, match=rf"{method}: the batcher is closed. Create a new one"):
        getattr(batcher, method)(*[{}] * (method == "update"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"T": 0}, "n_timesteps is 0"),
        ({"n_processes": -1}, "n_processes is -1"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "gpu"}, "'gpu' is not a device"),
        ({"seeds": [1]}, "both seed and seeds are passed"),
        ({"seed": None, "seeds": [1, 2]}, "seeds has 2 entries, expected 1"),
        ({"agent_seeds": [1, 2]}, "agent_seeds has 2 entries, expected 1"),
        ({"timeout": -1.0}, r"timeout is -1\.0, expected at least 0"),
        ({"close_timeout": math.nan}, "close_timeout is nan, expected at least 0"),
        ({"on_worker_error": "ignore"}, "expected 'raise' or 'restart'"),
        ({"on_worker_error": "restart"}, "no worker to restart"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"T": 5.0}, r"n_timesteps is 5\.0, a float; expected a whole number"),
        ({"n_processes": "2"}, "n_processes is '2', a str; expected a whole number"),
        ({"seed": "0"}, "seed is '0', a str; expected a whole number"),
        ({"seed": None, "seeds": [1.5]}, r"seeds\[0\] is 1\.5, a float"),
        ({"agent_seeds": ["1"]}, r"agent_seeds\[0\] is '1', a str"),
        ({"seed": None, "seeds": 3}, r"seeds is an int, expected a list\. Pass one seed per process, here 1"),
        ({"agent_seeds": 3}, "agent_seeds is an int, expected a list"),
        ({"max_restarts": None}, "max_restarts is None"),
        ({"timeout": "3"}, "timeout is a str, expected seconds"),
        ({"agent_info": {}}, r"agent_info is a dict, expected a DictTensor\. Pass DictTensor\("),
        ({"env_info": {"level": 3}}, "env_info is a dict, expected a DictTensor"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make(**arguments)


def test_an_unknown_argument_is_told_where_it_belongs() -> None:
    words = r"RL_Batcher: there is no argument 'n_envs'\. .* env_args=\{'n_envs': …\}"
    with pytest.raises(TypeError, match=words):
        RL_Batcher(1, RngAgent, create_counting_env, n_envs=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no argument 'n_process'\. Did you mean 'n_processes'\?"):
        make(n_process=1)


def test_the_signature_is_that_of_the_constructor_in_subclasses_too() -> None:
    class Counting(RL_Batcher):
        """A batcher that inherits its constructor."""

    class Short(RL_Batcher):
        """A batcher that fixes most arguments."""

        def __init__(self, n_envs: int, **others: Any) -> None:
            super().__init__(2, RngAgent, create_counting_env, env_args={"n_envs": n_envs}, **others)

    for batcher in (RL_Batcher, Counting):
        assert [*inspect.signature(batcher).parameters][:3] == ["n_timesteps", "create_agent", "create_env"]
    with pytest.raises(TypeError, match=r"^Counting: there is no argument 'n_envs'\."):
        Counting(1, RngAgent, create_counting_env, n_envs=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Short: there is no argument 'n_process'\. Did you mean 'n_processes'\?"):
        Short(1, n_process=1)
    with Short(3) as batcher:
        assert batcher.n_envs() == 3


def test_a_device_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'meta', whose tensors have no values"):
        make(device="meta")


def test_a_seed_in_env_args_is_not_ignored() -> None:
    words = r"env_args has seed=7, but create_env gets the batcher's seed in each process\. Leave it out"
    with pytest.raises(ValueError, match=words):
        RL_Batcher(1, RngAgent, create_counting_env, env_args={"n_envs": 1, "seed": 7})


def test_a_timeout_of_get_that_is_no_number_loses_no_batch() -> None:
    with make(1, timeout=np.float32(300.0)) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(TypeError, match=r"RL_Batcher\.get: timeout is a str, expected seconds"):
            batcher.get(timeout="3")  # type: ignore[call-overload]
        assert batcher.get(timeout=np.float32(300.0))[0].n_elems() == batcher.n_envs()  # type: ignore[call-overload]


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    with make(T=np.int64(2), seed=np.int32(7)) as batcher:
        assert batcher.seeds == (7,)
        assert type(batcher.seeds[0]) is int  # gymnasium asks for that


def test_a_model_where_a_factory_or_weights_belong_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"create_agent is a Linear, expected a function or a class"):
        RL_Batcher(1, model, create_counting_env, env_args={"n_envs": 1})  # type: ignore[arg-type]
    with make() as batcher:
        with pytest.raises(TypeError, match=r"the weights are a Linear, expected a mapping .*Pass model\.state_dict"):
            batcher.update(model)  # type: ignore[arg-type]
        assert batcher.policy_version == 0
        for call in (batcher.reset, batcher.execute):
            with pytest.raises(TypeError, match=r"agent_info is a dict, expected a DictTensor"):
                call({"e": torch.zeros(2)})  # type: ignore[arg-type]
            batcher.reset()


def test_outputs_that_were_collected_carry_no_gradient() -> None:
    with RL_Batcher(
        2, create_policy, create_cartpole, agent_args={"recurrent": False}, env_args={"n_envs": 2}, seed=0
    ) as batcher:
        batch = first_batch(batcher)
    with pytest.raises(RuntimeError, match="does not require grad"):
        batch.steps["action/value"].sum().backward()
    agent = create_policy(recurrent=False)
    replay_agent(agent, batch)["value"].sum().backward()
    assert all(parameter.grad is not None for parameter in agent.model.critic.parameters())
    assert "replay_agent" in (RL_Batcher.get.__doc__ or "")


def test_infos_are_checked_at_the_boundary() -> None:
    with make() as batcher:
        with pytest.raises(ShapeMismatchError, match=r"agent_info has 3 rows, expected 2, .* or 1 for all"):
            batcher.reset(agent_info=DictTensor({"e": torch.zeros(3)}))
        with pytest.raises(DeviceMismatchError, match="env_info 'e' is on meta, expected cpu"):
            batcher.reset(env_info=DictTensor({"e": torch.zeros(2, device="meta")}))
        with pytest.raises(TypeError, match="weight 'w' is a float, expected a tensor"):
            batcher.update({"w": 1.0})  # type: ignore[dict-item]
        batcher.reset()  # none of these harmed it


def test_overlapping_seeds_are_named() -> None:
    with make(2, seed=None, seeds=[4, 5]) as batcher:
        with pytest.warns(UserWarning, match="space the seeds by 2"):
            batcher.reset()
        batcher.execute()
        assert batcher.get()[0].info["env_seed"].tolist() == [4, 5, 5, 6]  # created once, with the seeds as given


def test_n_envs_in_env_args_may_mean_something_else() -> None:
    with RL_Batcher(2, RngAgent, create_twice_as_many, env_args={"n_envs": 1}, n_processes=2, seed=5) as batcher:
        batch = first_batch(batcher)
        assert batch.info["env_seed"].tolist() == [5, 6, 7, 8]
        assert batch.steps["observation/frame"][:, 0, 0].tolist() == [5, 6, 7, 8]


def create_twice_as_many(n_envs: int, seed: int) -> Any:
    return create_counting_env(2 * n_envs, seed)


def test_get_without_blocking() -> None:
    env_args = {"n_envs": 1, "auto_reset": True, "seconds": 0.1}
    with RL_Batcher(3, RngAgent, create_slow_env, env_args=env_args, n_processes=1, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        assert batcher.get(blocking=False) == (None, None)
        batch = None
        while batch is None:
            batch, _ = batcher.get(blocking=False)
        assert batch.steps["observation/frame"][0, :, 2].tolist() == [0, 1, 2]


class MissingBackend:
    """A backend that this machine lacks."""

    def __init__(self, settings: BackendSettings) -> None:
        raise NotImplementedError


def test_more_than_one_cuda_process_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("batcher", "arguments"):
        monkeypatch.setattr(f"rlstruct.batchers.{module}.resolve_device", lambda device: torch.device("cuda:0"))
    monkeypatch.setitem(BACKENDS, "workers", f"{__name__}:MissingBackend")
    warns = pytest.warns(UserWarning, match="2 processes on cuda:0 open 2 CUDA contexts, 300 to 700 MB")
    with warns, pytest.raises(NotImplementedError):
        make(2, device="cuda:0")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_statistics_add_up(n_processes: int) -> None:
    with RL_Batcher(
        200, HistoryAgent, create_cartpole, env_args={"n_envs": 2}, n_processes=n_processes, seed=0
    ) as batcher:
        batcher.reset()
        ends, totals = [], []
        for _ in range(2):
            batcher.execute()
            batcher.get()
            ends.append(time.perf_counter())
            stats = batcher.stats()
            totals.append(sum(stats.workers[0].values()))
            time.sleep(1.0)
    # Every second of a worker belongs to exactly one phase, so the sums grow as the clock does.
    assert totals[1] - totals[0] == pytest.approx(ends[1] - ends[0], abs=0.5)
    assert stats.batches == 2
    phases = {"environment", "agent", "copy", "reset", "start", "save", "load", "wait", "update", "graph"}
    assert set(stats.workers[0]) == phases
    assert stats.workers[0]["agent"] > 0.0
    assert "environment" in str(stats)


def test_factories_must_return_what_they_promise() -> None:
    with pytest.raises(RuntimeError, match="create_env returned an int, expected a VecEnv"):
        RL_Batcher(1, RngAgent, lambda seed: 3, seed=0)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="create_agent returned a str, expected an RL_Agent"):
        RL_Batcher(1, lambda: "agent", create_counting_env, env_args={"n_envs": 1})  # type: ignore[arg-type, return-value]


def test_a_state_that_initial_state_does_not_announce_is_refused() -> None:
    class Remembering(RngAgent):
        def __call__(self, state: DictTensor, *arguments: Any) -> tuple[DictTensor, DictTensor]:
            action, _ = super().__call__(state, *arguments)
            return action, DictTensor({"memory": torch.zeros_like(action["action"])})

    with RL_Batcher(2, Remembering, create_counting_env, env_args={"n_envs": 2}) as batcher:
        batcher.reset()
        batcher.execute()
        words = r"agent: state 'memory' is .*, expected no such key\. .*of initial_state, which an agent"
        with pytest.raises(WorkerError, match=words):
            batcher.get()


def test_an_agent_that_does_not_take_the_four_arguments_is_refused() -> None:
    class Short(RngAgent):
        def __call__(self, observation):  # type: ignore[no-untyped-def, override]
            raise AssertionError("never called")

    words = r"Short.__call__: its parameters are \(self, observation\), expected four .*agent_info, history=None\)\."
    with pytest.raises(RuntimeError, match=words):
        RL_Batcher(1, Short, create_counting_env, env_args={"n_envs": 1}, seed=0)


def test_a_factory_that_cannot_be_called_with_its_arguments_says_how_it_is_called() -> None:
    def create_env_without_seed(n_envs: int) -> VecEnv:
        raise AssertionError("never called")

    with pytest.raises(TypeError, match=r"create_env\(n_envs=…, seed=…\), but got an unexpected keyword .*'seed'"):
        RL_Batcher(4, RngAgent, create_env_without_seed, env_args={"n_envs": 2})


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_closed_batcher_gives_its_slabs_back() -> None:
    def mapped() -> int:
        shared = re.compile(r"rw-s .*/\S+ \(deleted\)$")  # memfd, or temporary files
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if shared.search(line)]
        bounds = [line.split()[0].split("-") for line in lines]
        return sum(int(end, 16) - int(begin, 16) for begin, end in bounds)

    gc.disable()  # it must not be what gives them back
    try:
        before = mapped()
        with RL_Batcher(
            5_000, RngAgent, create_counting_env, env_args={"n_envs": 8, "auto_reset": True}, n_processes=1
        ) as batcher:
            batch = first_batch(batcher)
            batcher.execute()  # one is never handed over
            assert mapped() > before + 1_000_000
        assert mapped() < before + 100_000  # a page to see progress in
    finally:
        gc.enable()
    assert batch is not None
    assert batch.lengths.sum() > 0  # what was handed over is the caller's


class ForgetfulAgent(StatefulAgent):
    """Returns a state with another key than it began with."""

    def __call__(self, *arguments: Any) -> tuple[DictTensor, DictTensor]:
        action, state = super().__call__(*arguments)
        return action, state.prepend_key("new/")


def test_a_state_that_changes_its_keys_is_named_in_the_first_batch() -> None:
    words = r"agent: state '.*' is missing.*Did you mean 'new/"
    error = refused(words, ForgetfulAgent, create_counting_env, env_args={"n_envs": 2})
    assert isinstance(error.__cause__, KeyError)


def test_infos_stay_with_their_environments_where_all_episodes_of_a_worker_have_ended() -> None:
    with make(2, auto_reset=False) as batcher:
        batcher.reset(DictTensor({"epsilon": torch.arange(4.0)}), DictTensor({"length": torch.tensor([1, 2, 5, 6])}))
        for environments in ([0, 1, 2, 3], [2, 3]):
            batch = next_batch(batcher)
            assert batch.info["environment"].tolist() == environments
            assert batch.info["agent_info/epsilon"].tolist() == environments
