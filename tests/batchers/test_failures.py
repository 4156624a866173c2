"""Errors that the user reads when a worker raises, dies or hangs, and calls that still work afterwards."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from batcher_fakes import (
    PROMPT,
    SHORT,
    close_leaves_nothing,
    create_version_agent,
    first_batch,
    forked,
    left_in_shared_memory,
    shared_memory_names,
)
from fake_agents import RngAgent
from fake_envs import CountingEnv, create_counting_env, create_failing_env, create_slow_env

from rlstruct import BatcherStateError, DictTensor, VecEnv, WorkerError, WorkerTimeout
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.progress import Progress, describe_failure, unpickle_error
from rlstruct.batchers.workers.local import Channel
from rlstruct.batchers.workers.system import is_portable


class ArgumentsNeededError(RuntimeError):
    """cannot be unpickled: pickle calls its class with the message alone."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} in {where}")
        self.code = code
        self.lock = threading.Lock()  # cannot even be pickled


class FailingAgent(RngAgent):
    def __init__(self, where: str, kind: type[Exception] = ValueError) -> None:
        super().__init__()
        self.where, self.kind = where, kind
        self.fail("create")

    def fail(self, where: str) -> None:
        if self.where == where:
            raise self.kind(f"agent fails in {where}")

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        self.fail("initial_state")
        return DictTensor()

    def __call__(self, *arguments: Any) -> Any:
        self.fail("call")
        return super().__call__(*arguments)

    def update(self, info: Any) -> None:
        self.fail("update")


def create_env_that_cannot_be(seed: int) -> Any:
    raise ArgumentsNeededError(3, "create_env")


def create_env_that_cannot_reset(seed: int) -> Any:
    env = create_counting_env(2, seed)
    env.reset = partial(fail_at_reset)  # type: ignore[method-assign]
    return env


def fail_at_reset(env_info: Any) -> None:
    raise OSError("no disk")


def fail_with_arguments() -> None:
    raise ArgumentsNeededError(7, "step")


def failing(
    failure: Any, *, step: int = 1, n_processes: int = 2, failing_seed: int = 14, **settings: Any
) -> RL_Batcher:
    env_args = {"n_envs": 3, "auto_reset": True, "failure": failure, "step": step, "failing_seed": failing_seed}
    return RL_Batcher(4, RngAgent, create_failing_env, env_args=env_args, n_processes=n_processes, seed=10, **settings)


def run(batcher: RL_Batcher, n: int = 1) -> None:
    batcher.reset()
    for _ in range(n):
        batcher.execute()
        batcher.get()


@pytest.mark.parametrize("n_processes", [0, 2])
def test_an_exception_of_an_environment_names_everything(n_processes: int) -> None:
    # Environments 10 to 15; number 14 is row 4 of the batch, and fails in its 6th step: step 1 of the second batch.
    batcher = failing(ValueError("no road"), step=5, n_processes=n_processes)
    if not n_processes:
        batcher.close()
        env_args = {"n_envs": 6, "auto_reset": True, "failure": ValueError("no road"), "step": 5, "failing_seed": 14}
        batcher = RL_Batcher(4, RngAgent, create_failing_env, env_args=env_args, seed=10)
    with pytest.raises(WorkerError, match="no road") as caught:
        run(batcher, 2)
    error = caught.value
    assert isinstance(error.__cause__, ValueError)
    assert (error.environment, error.seed, error.step, error.phase) == (4, 14, 1, "environment.step")
    assert error.environments == ((3, 6) if n_processes else (0, 6))
    assert error.worker == (1 if n_processes else 0)
    assert "fake_envs.py" in error.remote_traceback
    assert error.remote_traceback.count("  File ") == 2  # it begins where the environment was called
    assert ("fake_envs.py" in str(error)) == bool(n_processes)  # here Python itself prints the cause
    assert "environment 4, seed 14, step 1: ValueError: no road" in str(error)
    assert str(error).startswith("worker 1 (pid" if n_processes else "this process raised in environment.step")
    for method in ("reset", "execute", "get", "n_envs"):
        with pytest.raises(BatcherStateError, match=r"collection has failed. close\(\) this batcher"):
            getattr(batcher, method)()
    close_leaves_nothing(batcher)


def test_each_way_to_fail_is_told_in_its_own_words() -> None:
    # One worker each, all started together: what a test waits for is mostly Python, which starts.
    ways: list[tuple[Any, str]] = [
        (fail_with_arguments, "ArgumentsNeededError: code 7 in step"),  # cannot be pickled
        (EOFError("simulator hung up"), "EOFError: simulator hung up"),  # not mistaken for a dead worker's
        (SystemExit(4), "SystemExit: 4"),
        (partial(os._exit, 3), "exited with code 3"),
    ]
    batchers = [failing(failure, n_processes=1, failing_seed=11) for failure, _ in ways]
    errors = []
    for batcher, (_, words) in zip(batchers, ways, strict=True):
        with pytest.raises(WorkerError, match=words) as caught:
            run(batcher)
        errors.append(caught.value)
    cause = errors[0].__cause__
    assert isinstance(cause, ArgumentsNeededError)
    assert (cause.code, str(cause)) == (7, "code 7 in step")
    for batcher in batchers[:-1]:
        batcher.close()
    close_leaves_nothing(batchers[-1])


class StubbornEnv(CountingEnv):
    """Raises when it is closed, and when Python takes it apart, as bindings of simulators do."""

    def close(self) -> None:
        raise ValueError("the window is gone")

    def __del__(self) -> None:
        raise ValueError("the library is gone")


def test_exceptions_in_factories_and_at_the_end() -> None:
    batcher = RL_Batcher(2, RngAgent, create_env_that_cannot_be, n_processes=2, seed=0)
    agent_args, env_args = {"where": "create"}, {"n_envs": 1, "auto_reset": True}
    other = RL_Batcher(2, FailingAgent, create_counting_env, agent_args=agent_args, env_args=env_args, n_processes=1)
    third = RL_Batcher(2, RngAgent, StubbornEnv, env_args=env_args, n_processes=1, seed=0)
    with pytest.raises(WorkerError, match=r"create_env / create_agent, .* code 3 in create_env") as caught:
        batcher.reset()
    assert isinstance(caught.value.__cause__, ArgumentsNeededError)
    with pytest.raises(WorkerError, match=r"create_env / create_agent, .* agent fails in create") as caught:
        other.reset()
    assert isinstance(caught.value.__cause__, ValueError)
    assert "test_failures.py" in str(caught.value)
    run(third)
    batcher.close()
    other.close()
    close_leaves_nothing(third)


@pytest.mark.parametrize("kind", [ValueError, StopIteration])
@pytest.mark.parametrize("where", ["create", "initial_state", "call", "update"])
def test_exceptions_of_the_agent_in_this_process(where: str, kind: type[Exception]) -> None:
    def live() -> None:
        agent_args, env_args = {"where": where, "kind": kind}, {"n_envs": 2}
        batcher = RL_Batcher(2, FailingAgent, create_counting_env, agent_args=agent_args, env_args=env_args, seed=0)
        batcher.update({"w": torch.zeros(1)})
        run(batcher)

    with pytest.raises(WorkerError, match=f"{kind.__name__}: agent fails in {where}") as caught:
        live()
    assert isinstance(caught.value.__cause__, kind)
    assert caught.value.phase == {"create": "create_env / create_agent", "update": "agent.update"}.get(where, "agent")


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize("control", [StopIteration("no data left"), GeneratorExit("no data left")])
def test_an_exception_that_steers_loops_cannot_end_the_callers_loop(control: BaseException, n_processes: int) -> None:
    env_args = {"n_envs": 2, "auto_reset": True, "failure": control, "step": 5, "failing_seed": 1}
    batcher = RL_Batcher(4, RngAgent, create_failing_env, env_args=env_args, n_processes=n_processes, seed=0)

    def collect(_: int) -> Any:
        batcher.execute()
        return batcher.get()

    batcher.reset()
    with pytest.raises(WorkerError, match=f"environment 1, seed 1, step 1: {type(control).__name__}: no data left"):
        list(map(collect, range(3)))  # which a StopIteration would end as if there were no more to collect
    close_leaves_nothing(batcher)


def test_exceptions_at_reset_and_in_update_come_with_the_batch() -> None:
    batcher = RL_Batcher(2, RngAgent, create_env_that_cannot_reset, n_processes=1, seed=0)
    with pytest.raises(WorkerError, match=r"environment.reset, .*OSError: no disk") as caught:
        run(batcher)
    assert isinstance(caught.value.__cause__, OSError)
    close_leaves_nothing(batcher)
    batcher = RL_Batcher(2, create_version_agent, create_counting_env, env_args={"n_envs": 1}, n_processes=1, seed=0)
    batcher.update({"w": torch.arange(2.0)})
    with pytest.raises(WorkerError, match=r"raised in agent\.update, .*seed \d+: ValueError: torn weights"):
        run(batcher)
    close_leaves_nothing(batcher)


def kill_worker(batcher: RL_Batcher, index: int, number: int) -> int:
    pid = forked(batcher, index + 1)[index]
    os.kill(pid, number)
    return pid


def test_a_killed_worker_is_noticed_at_once() -> None:
    env_args = {"n_envs": 2, "auto_reset": True, "seconds": 0.2}
    signals, names = (signal.SIGKILL, signal.SIGSEGV), shared_memory_names()
    batchers = [RL_Batcher(400, RngAgent, create_slow_env, env_args=env_args, n_processes=2, seed=0) for _ in signals]
    for batcher, number in zip(batchers, signals, strict=True):
        batcher.reset()
        batcher.execute()
        time.sleep(0.3)
        pid = kill_worker(batcher, 1, number)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=f"was killed by {number.name} while it was in ") as caught:
            batcher.get()
        assert time.monotonic() - start < PROMPT
        error = caught.value
        assert (error.worker, error.pid, error.environments, error.seed) == (1, pid, (2, 4), 2)
        assert error.step is not None
    batchers[0].close()
    close_leaves_nothing(batchers[1])
    assert not left_in_shared_memory(names)


@pytest.mark.parametrize("at_work", [False, True])
def test_a_worker_killed_while_sigchld_is_ignored_is_reported(at_work: bool) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        env_args = {"n_envs": 2, "auto_reset": True, "seconds": 0.05}
        batcher = RL_Batcher(400, RngAgent, create_slow_env, env_args=env_args, n_processes=1, seed=0)
        if at_work:
            batcher.reset()
            batcher.execute()
            time.sleep(0.3)
        kill_worker(batcher, 0, signal.SIGKILL)
        lost = "ended with a code that is lost, since this program ignores SIGCHLD"
        with pytest.raises(WorkerError, match=lost if is_portable() else "was killed by SIGKILL"):  # their server knows
            run(batcher) if not at_work else batcher.get()
        close_leaves_nothing(batcher)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_killed_between_batches() -> None:
    env_args = {"n_envs": 1, "auto_reset": True}
    batcher = RL_Batcher(2, RngAgent, create_counting_env, env_args=env_args, n_processes=2, seed=0)
    run(batcher)
    kill_worker(batcher, 1, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        run(batcher)
    assert time.monotonic() - start < PROMPT
    close_leaves_nothing(batcher)


def test_a_stopped_worker_times_out_and_may_come_back() -> None:
    env_args = {"n_envs": 2, "auto_reset": True, "seconds": 0.02}
    batcher = RL_Batcher(50, RngAgent, create_slow_env, env_args=env_args, n_processes=2, seed=0)
    run(batcher)
    batcher.execute()
    time.sleep(0.1)
    kill_worker(batcher, 1, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"worker 1 .* no answer within 2 s; it is in \w+.*, step \d+") as caught:
        batcher.get(timeout=2)
    assert time.monotonic() - start >= 2.0
    assert caught.value.worker == 1
    assert batcher.get(blocking=False) == (None, None)
    kill_worker(batcher, 1, signal.SIGCONT)
    assert batcher.get()[1] == 4
    batcher.execute()
    kill_worker(batcher, 0, signal.SIGSTOP)
    close_leaves_nothing(batcher)


def test_a_stopped_worker_does_not_block_orders() -> None:
    # 2 MB of settings do not fit into the pipe: without a limit the send would wait for ever.
    env_args = {"n_envs": 1, "auto_reset": True}
    seconds = SHORT
    batcher = RL_Batcher(2, RngAgent, create_counting_env, env_args=env_args, n_processes=1, seed=0, timeout=seconds)
    run(batcher)
    time.sleep(0.5)  # its answer is out a little earlier than it waits for orders
    kill_worker(batcher, 0, signal.SIGSTOP)
    where = "it is idle, waiting for the next command"
    with pytest.raises(WorkerError, match=f"read none of its orders for {seconds:g} s; {where}"):
        batcher.reset(agent_info=DictTensor({"e": torch.zeros(1, 500_000)}))
    close_leaves_nothing(batcher)


def kill_after(seconds: float, pid: int) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.start()
    return timer


def test_a_worker_that_dies_in_any_call_is_restarted() -> None:
    env_args = {"n_envs": 2, "auto_reset": True, "seconds": 0.01}
    settings = {"n_processes": 2, "seed": 0, "on_worker_error": "restart", "max_restarts": 4}
    with RL_Batcher(100, create_version_agent, create_slow_env, env_args=env_args, **settings) as batcher:
        version = 0

        def update() -> None:
            nonlocal version
            version += 1
            batcher.update({"w": torch.full((2,), float(version))})

        update()
        batcher.reset()
        for _ in range(2):  # two batches with different weights leave no room for those of another
            batcher.execute()
            update()
        kill_after(0.5, batcher.stats().pids[1])
        update()
        for number in range(2):
            batch, _ = batcher.get()
            assert batch.n_elems() == 4
            assert (batch.steps["action/lowest"][:2] == number + 1).all()
        assert [lost.worker for lost in batcher.lost_episodes] == [1]
        kill_worker(batcher, 0, signal.SIGKILL)
        state = batcher.state_dict()
        assert [lost.worker for lost in batcher.lost_episodes] == [1, 0]
        assert [collector["step"] for collector in state["collectors"]] == [0, 200]
        kill_worker(batcher, 1, signal.SIGKILL)
        assert batcher.load_state_dict(state)
        assert [lost.worker for lost in batcher.lost_episodes] == [1, 0, 1]
        update()
        batcher.execute()
        batch, _ = batcher.get()
        assert batch.info["step"].tolist() == [0, 0, 200, 200]
        assert batch.info["env_seed"].tolist() == [c["seed"] + i for c in state["collectors"] for i in range(2)]
        kill_worker(batcher, 0, signal.SIGKILL)
        time.sleep(0.1)
        batcher.reset()
        batcher.execute()
        assert batcher.get()[0].n_elems() == 4
        assert len(batcher.lost_episodes) == 4


class StoppingEnv(CountingEnv):
    """Its state takes 20 MB; when it is first asked for, the process stops."""

    stops = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self.stops:
            self.stops = False
            os.kill(os.getpid(), signal.SIGSTOP)
        return {**super().state_dict(), "bulk": torch.arange(20_000_000 // 8)}


def test_a_worker_that_stops_while_it_saves_is_late_and_loses_nothing() -> None:
    env_args = {"n_envs": 1, "auto_reset": True}
    seconds = SHORT
    batcher = RL_Batcher(2, RngAgent, StoppingEnv, env_args=env_args, n_processes=1, seed=0, timeout=seconds)
    run(batcher)
    with pytest.raises(
        WorkerTimeout, match=rf"worker 0 .* no answer within {seconds:g} s; it is in saving a checkpoint"
    ):
        batcher.state_dict()
    batcher.execute()
    with pytest.raises(WorkerTimeout, match=r"no answer within 0\.5 s"):
        batcher.get(timeout=0.5)
    kill_worker(batcher, 0, signal.SIGCONT)
    assert batcher.get()[0].info["step"].tolist() == [2]
    (state,) = batcher.state_dict()["collectors"]
    assert torch.equal(state["environment"]["bulk"], torch.arange(20_000_000 // 8))
    kill_worker(batcher, 0, signal.SIGSTOP)
    close_leaves_nothing(batcher)


def test_a_message_that_stops_in_the_middle_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        Channel(theirs).send(["a", "message"])
        sent = ours.recv(1000)
        channel = Channel(ours)
        for byte in sent[:-1]:
            theirs.send(bytes([byte]))
            assert channel.receive(wait=False) is None
        theirs.send(sent[-1:])
        assert channel.receive(wait=False) == ["a", "message"]
    channel.close()


def test_an_environment_has_one_number_the_one_that_it_has_in_the_batch() -> None:
    # The second environment of worker 1; its VecEnv knows it as number 1, the batch as number 4.
    with failing(ValueError("environment 1 fell over, environment 10 did not")) as batcher:
        with pytest.raises(WorkerError, match="environment 4 fell over, environment 10 did not") as caught:
            run(batcher)
        assert str(caught.value).startswith("worker 1 (pid")


def test_restarted_workers_keep_batches_full_and_list_what_was_lost() -> None:
    batcher = failing(partial(os._exit, 5), step=5, on_worker_error="restart", max_restarts=1)
    first = first_batch(batcher)
    assert first.info["env_seed"].tolist() == [10, 11, 12, 13, 14, 15]
    batcher.execute()  # environment 14 takes its worker along at step 1 of this batch
    second, n_running = batcher.get()
    assert (second.n_elems(), n_running) == (6, 6)
    lost = batcher.lost_episodes
    assert [(one.worker, one.environments, one.seed, one.batch, one.step) for one in lost] == [(1, (3, 6), 13, 1, 1)]
    assert "exited with code 5" in lost[0].reason
    assert second.info["env_seed"].tolist() == [10, 11, 12, *range(lost[0].new_seed, lost[0].new_seed + 3)]
    assert second.info["step"].tolist() == [4, 4, 4, 0, 0, 0]
    assert second.steps["observation/initial_state"][3:, 0].all()
    assert second.steps["observation/frame"][3:, 0, 2].tolist() == [0, 0, 0]
    kill_worker(batcher, 0, signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):  # one restart was allowed
        run(batcher)
    close_leaves_nothing(batcher)


def create_slow_or_failing_env(n_envs: int, seed: int) -> VecEnv:
    if seed == 10:
        return create_slow_env(n_envs, seed, seconds=0.2, auto_reset=True)
    return create_failing_env(n_envs, seed, failure=partial(os._exit, 5), step=5, failing_seed=14, auto_reset=True)


def test_a_worker_that_fails_in_the_queued_batch_is_listed_with_that_batch() -> None:
    env_args = {"n_envs": 3}
    with RL_Batcher(
        4, RngAgent, create_slow_or_failing_env, env_args=env_args, n_processes=2, seed=10, on_worker_error="restart"
    ) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.execute()  # worker 1 fails in this one while worker 0 still collects the first
        first, second = batcher.get()[0], batcher.get()[0]
        (lost,) = batcher.lost_episodes
    assert (lost.worker, lost.batch, lost.step) == (1, 1, 1)
    assert first.info["env_seed"].tolist() == [10, 11, 12, 13, 14, 15]
    assert second.info["env_seed"].tolist() == [10, 11, 12, *range(lost.new_seed, lost.new_seed + 3)]


def test_describe_never_fails() -> None:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise RuntimeError("I do not travel")

    progress = Progress(torch.zeros(3, dtype=torch.int64))
    failure = describe_failure(Local("hello", threading.Lock()), progress)
    assert "hello" in failure.summary
    back = unpickle_error(failure.error)
    assert type(back).__name__ == "Local"
    assert back is not None
    assert back.args[0] == "hello"
    assert unpickle_error(b"rubbish") is None
    assert unpickle_error(None) is None
