"""Random environments in random layouts, with faults at random moments: does anything hang, leak or get lost?

Run: ``make soak``, ten minutes; ``python tests/batchers/soak.py --seconds 60 --seed 3``. Every round makes a batcher,
collects, breaks something, and compares every row with a count in plain Python. It ends with exit code 1 at the first
round that goes wrong; ``--seed S --first-round I`` begins with that round. Linux only.

On 2026-11-21 seeds 31 and 32 ran for ten minutes each, next to much other work: 66 rounds, 10,581 rows as counted, 18
workers replaced, nothing left behind, memory up by 2.4 and 0.1 MB over the last half.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from batcher_fakes import shared_memory_names
from fake_agents import RngAgent
from fake_envs import CountingEnv, FailingEnv, SlowEnv, counting_length
from torch import Tensor

from rlstruct import DictTensor, WorkerError, WorkerTimeout
from rlstruct.batchers import RL_Batcher

# What a worker does to itself, and what the WorkerError must then say; None: nothing may go wrong.
INSIDE = {
    "step raises": r"raised in environment\.step.*ValueError: no road",
    "step raises what cannot be pickled": r"raised in environment\.step.*Unpicklable: with a lock",
    "reset raises": r"raised in environment\.reset.*OSError: no disk",
    "factory raises": r"raised in create_env / create_agent.*ValueError: no such map",
    "agent raises": r"raised in agent.*ValueError: lost",
    "close raises": None,
    "os._exit": r"exited with code 7 while it was in environment\.step",
    "SystemExit": r"raised in environment\.step.*SystemExit: 4",
    "segmentation fault": r"was killed by SIGSEGV while it was in environment\.step",
    "slow step": None,
    "hangs": r"gave no answer within",
}
SIGNALS = {"SIGKILL": r"was killed by SIGKILL", "SIGSTOP": r"gave no answer within"}
LATE = ("hangs", "SIGSTOP")
ALONE = ("os._exit", "SystemExit", "segmentation fault", "hangs")  # would take this process along


logging.disable(logging.WARNING)  # here and in the workers: every fault would be reported twice


class Unpicklable(Exception):
    def __init__(self, lock: Any) -> None:
        super().__init__("with a lock")
        self.lock = lock


def fail(kind: str) -> None:
    """Do what a fault in a step is called after."""
    if kind == "step raises":
        raise ValueError("no road")
    if kind == "step raises what cannot be pickled":
        raise Unpicklable(threading.Lock())
    if kind == "os._exit":
        os._exit(7)
    if kind == "SystemExit":
        raise SystemExit(4)
    if kind == "segmentation fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(0.3 if kind == "slow step" else 3600.0)


class SoakEnv(FailingEnv):
    """Counts, and fails in its own way at its own time."""

    def __init__(self, env: Any, kind: str, step: int) -> None:
        super().__init__(env, lambda: fail(kind), step=step)
        self.kind = kind
        if kind in ("reset raises", "agent raises", "close raises", "factory raises"):
            self.failing_step = -1

    def reset(self, env_info: Any = None) -> Any:
        if self.kind == "reset raises":
            raise OSError("no disk")
        return super().reset(env_info)

    def close(self) -> None:
        if self.kind == "close raises":
            raise ValueError("stuck")


def create_env(n_envs: int, seed: int, lengths: list[int], auto_reset: bool, faults: dict[int, tuple[str, int]]) -> Any:
    env = SlowEnv(CountingEnv(n_envs, seed, lengths=lengths, auto_reset=auto_reset), 0.002)
    kind, step = faults.get(seed, ("", -1))
    if kind == "factory raises":
        raise ValueError("no such map")
    return SoakEnv(env, kind, step) if kind else env


class SoakAgent(RngAgent):
    """Shows its weights, and fails in the environments that it is given."""

    def __init__(self, faults: dict[int, tuple[str, int]]) -> None:
        super().__init__()
        self.faults = faults
        self.weights = torch.zeros(1)
        self.calls = -1

    def __call__(self, state: Any, observation: DictTensor, *rest: Any) -> Any:
        self.calls += 1
        if self.faults.get(int(observation["frame"][0, 0])) == ("agent raises", self.calls):
            raise ValueError("lost")
        action, state = super().__call__(state, observation, *rest)
        for name, value in (("lowest", self.weights.min()), ("highest", self.weights.max())):
            action.set(name, value.expand(len(observation["done"])).clone())
        return action, state

    def update(self, info: Mapping[str, Tensor]) -> None:
        self.weights = info["w"].clone()


@dataclass
class Counter:
    """Return the rows that one environment must show, in plain Python."""

    seed: int
    lengths: list[int]
    auto_reset: bool
    episode: int = -1
    step: int = 0
    age: int = 0
    running: bool = False

    def reset(self) -> None:
        self.episode, self.step, self.age, self.running = self.episode + 1, 0, 0, True

    def take(self, n: int) -> list[tuple[list[int], list[int], bool]]:
        """The next n steps, or fewer if the episode ends: what was seen, what was reached, whether that was the end."""
        steps = []
        while self.running and len(steps) < n:
            before = [self.seed, self.episode, self.step]
            after = [self.seed, self.episode, self.step + 1]
            done = after[2] == counting_length(self.seed, self.episode, self.lengths)
            steps.append((before, after, done))
            self.step, self.age = after[2], self.age + 1
            if done and self.auto_reset:
                self.episode, self.step = self.episode + 1, 0
            elif done:
                self.running = False
        return steps


def limit(seconds: float) -> float:
    """The seconds that something may take, stretched where the machine has more to do than it has cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Round:
    """One batcher from its birth to its end."""

    def __init__(self, name: str) -> None:
        dice = self.dice = random.Random(name)
        self.n_processes = dice.choice([0, 1, 1, 2, 2, 3])
        self.n_envs, self.T = dice.randint(1, 5), dice.randint(1, 12)
        self.auto_reset = dice.random() < 0.6
        self.lengths = [dice.randint(1, 9) for _ in range(dice.randint(1, 4))]
        self.restarts = 9 if self.n_processes and dice.random() < 0.5 else 0
        self.n_batches = dice.randint(1, 12)
        self.n_weights = dice.choice([1, 100, 300_000])
        self.in_thread = dice.random() < 0.15
        self.fault, self.victim = self._choose_fault()
        self.faults: dict[int, tuple[str, int]] = {}
        if self.fault in INSIDE:  # early enough that it happens in most rounds
            self.faults = {self.victim * self.n_envs: (self.fault, dice.randint(0, 2 * self.T))}
        self.counters: list[Counter] = []
        self.version = 0
        self.outstanding: deque[int] = deque()  # the version of the weights of each order
        self.n_handed_over = self.rows = self.n_lost = 0
        # Environments of replaced workers, and the last batch ordered before: the new worker has newer weights.
        self.renewed: dict[int, int] = {}

    def _choose_fault(self) -> tuple[str, int]:
        victim = self.dice.randrange(max(1, self.n_processes))
        if not self.n_processes:
            return self.dice.choice(["", *(kind for kind in INSIDE if kind not in ALONE)]), victim
        return self.dice.choice(["", *INSIDE, *SIGNALS, "SIGKILL", "SIGSTOP", "dropped"]), victim

    def __str__(self) -> str:
        kind = "endless" if self.auto_reset else "episodes"
        return (
            f"{self.n_processes} x {self.n_envs} {kind} of {self.lengths}, T={self.T}, {self.n_weights} weights, "
            f"{'restarting, ' if self.restarts else ''}{'in a thread, ' if self.in_thread else ''}"
            f"{self.fault or 'no fault'}{f' in worker {self.victim}' if self.fault else ''}"
        )

    def run(self) -> str:
        """Live it, and say how it ended."""
        settings: dict[str, Any] = {}
        if self.restarts:
            settings = {"on_worker_error": "restart", "max_restarts": self.restarts}
        batcher: RL_Batcher | None = None
        try:
            batcher = RL_Batcher(
                self.T,
                SoakAgent,
                create_env,
                agent_args={"faults": self.faults},
                env_args={
                    "n_envs": self.n_envs,
                    "lengths": self.lengths,
                    "auto_reset": self.auto_reset,
                    "faults": self.faults,
                },
                n_processes=self.n_processes,
                seed=0,
                timeout=limit(60.0),
                **settings,
            )
            ended = self._live(batcher)
        except WorkerError as error:
            ended = self._expected(error)
        if batcher is not None:
            if self.fault != "dropped":
                start = time.monotonic()
                batcher.close()
                seconds = time.monotonic() - start
                assert seconds < 60.0, f"close() took {seconds:.1f} s"
                ended += f", closed in {seconds:.2f} s"
            del batcher
        return ended

    def _live(self, batcher: RL_Batcher) -> str:
        B = batcher.n_envs()
        assert max(1, self.n_processes) * self.n_envs == B
        self.counters = [Counter(b, self.lengths, self.auto_reset) for b in range(B)]
        saboteur = None
        if self.fault in SIGNALS:
            saboteur = threading.Thread(target=self._send, args=(batcher, self.dice.uniform(0.0, 0.4)))
            saboteur.start()
        try:
            n = 0
            while n < self.n_batches or (saboteur is not None and saboteur.is_alive()):
                self._batch(batcher, n)
                n += 1
            self._batch(batcher, n)
            if self.fault == "dropped":
                batcher.execute() if self._anyone() else batcher.reset()
        finally:
            if saboteur is not None:
                saboteur.join()
        assert self.fault not in SIGNALS or self.restarts, f"{self.fault} was not noticed"
        return f"{n + 1} batches, {self.n_lost} workers replaced"

    def _send(self, batcher: RL_Batcher, seconds: float) -> None:
        time.sleep(seconds)
        pid = batcher.stats().pids[self.victim]
        os.kill(pid, getattr(signal, self.fault))

    def _anyone(self) -> bool:
        return any(counter.running for counter in self.counters)

    def _batch(self, batcher: RL_Batcher, n: int) -> None:
        dice = self.dice
        if not self.outstanding:
            ended = not self._anyone()
            self._replaced(batcher)  # those whose last batch was still handed over
            if ended or dice.random() < 0.15:
                batcher.reset()
                for counter in self.counters:
                    counter.reset()
            self._order(batcher)
        if len(self.outstanding) == 1 and self.n_processes and self.auto_reset and dice.random() < 0.5:
            self._order(batcher)
        if dice.random() < 0.3:
            self._update(batcher)  # for the next order
        try:
            batch, n_running = batcher.get(timeout=limit(3.0) if self.fault in LATE else None)
        except WorkerTimeout as error:
            self._expected(error)
            if self.fault == "hangs" or dice.random() < 0.5:
                raise
            os.kill(error.pid or 0, signal.SIGCONT)  # it comes back, and nothing is lost
            batch, n_running = batcher.get()
            self.fault = ""
        assert batch is not None
        self._replaced(batcher)
        self._count(batch, self.outstanding.popleft())
        self.n_handed_over += 1
        assert n_running == sum(counter.running for counter in self.counters), n_running

    def _order(self, batcher: RL_Batcher) -> None:
        if self.dice.random() < 0.5:
            self._update(batcher)
        self.outstanding.append(self.version)
        batcher.execute()

    def _update(self, batcher: RL_Batcher) -> None:
        self.version += 1
        batcher.update({"w": torch.full((self.n_weights,), float(self.version))})

    def _replaced(self, batcher: RL_Batcher) -> None:
        """Environments of replaced workers begin anew; each loss must be listed, and be one that was done to them."""
        for lost in batcher.lost_episodes[self.n_lost :]:
            if lost.batch > self.n_handed_over:
                break  # the batch that is here was finished before
            self.n_lost += 1
            assert lost.worker == self.victim, lost
            self._matches(lost.reason)
            for b in range(*lost.environments):
                seed = lost.new_seed + b - lost.environments[0]
                self.counters[b] = Counter(seed, self.lengths, self.auto_reset)
                self.counters[b].reset()
                self.renewed[b] = self.n_handed_over + len(self.outstanding) - 1
        if self.n_lost and self.fault in SIGNALS:
            self.fault = ""  # done

    def _count(self, batch: Any, acting: int) -> None:
        rows = [b for b, counter in enumerate(self.counters) if counter.running]
        assert batch.info["environment"].tolist() == rows
        assert batch.info["env_seed"].tolist() == [self.counters[b].seed for b in rows]
        assert batch.info["step"].tolist() == [self.counters[b].age for b in rows]
        versions = batch.info["policy_version"].tolist()
        for version, b in zip(versions, rows, strict=True):
            renewed = self.n_handed_over <= self.renewed.get(b, -1)
            assert version == acting or (renewed and acting < version <= self.version), (b, version, acting)
        steps = batch.steps
        for row, b in enumerate(rows):
            truth = self.counters[b].take(self.T)
            real = int(batch.lengths[row])
            assert real == len(truth), (b, real, truth)
            assert steps["observation/frame"][row, :real].tolist() == [before for before, _, _ in truth]
            assert steps["_observation/frame"][row, :real].tolist() == [after for _, after, _ in truth]
            assert steps["_observation/done"][row, :real].tolist() == [done for _, _, done in truth]
            for name in ("lowest", "highest"):
                assert steps[f"action/{name}"][row, :real].tolist() == [versions[row]] * real, name
            self.rows += real

    def _expected(self, error: WorkerError) -> str:
        """Accept only what was done, of the worker that it was done to."""
        self._matches(str(error))
        # Whoever fails before there is an environment is not started again.
        assert not self.restarts or not self.counters or isinstance(error, WorkerTimeout), error
        late = re.search(r"Also late: worker ([\d, ]+)", str(error))
        named = {error.worker, *(int(word) for word in late[1].split(", "))} if late else {error.worker}
        assert self.victim in named, (named, str(error))
        return type(error).__name__

    def _matches(self, text: str) -> None:
        words = {**INSIDE, **SIGNALS}.get(self.fault)
        assert words is not None, f"nothing was done, and yet: {text}"
        assert re.search(words, text, re.DOTALL), f"expected {words!r} in: {text}"


def held() -> dict[str, Any]:
    """Return the resources that this process holds."""
    gc.collect()
    me = psutil.Process()
    trackers = ("resource_tracker", "forkserver")
    children = [child.pid for child in me.children(True) if not any(t in " ".join(child.cmdline()) for t in trackers)]
    shared = sorted(shared_memory_names())
    return {"children": children, "descriptors": me.num_fds(), "threads": me.num_threads(), "/dev/shm": shared}


def live(one: Round) -> str:
    """Run a round, in a separate thread if it wants one."""
    if not one.in_thread:
        return one.run()
    ended: list[Any] = []

    def target() -> None:
        try:
            ended.append(one.run())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return str(ended[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--first-round", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in ("", "step raises"):  # what starts once and stays, as multiprocessing's resource tracker does
        warm = Round("warm")
        warm.n_processes, warm.fault, warm.faults, warm.in_thread = 1, kind, {0: (kind, 0)} if kind else {}, False
        with contextlib.suppress(WorkerError):
            warm.run()
    before, memory, rows, replaced = held(), [], 0, 0
    print(f"seed {options.seed}; before: {before}", flush=True)
    start, i = time.monotonic(), options.first_round
    while time.monotonic() - start < options.seconds:
        one = Round(f"{options.seed}-{i}")
        shown, begun = str(one), time.monotonic()
        try:
            ended = live(one)
            after = held()
            assert after == before, f"left behind: {after}, before: {before}"
        except BaseException:
            print(f"FAILED: seed {options.seed}, round {i}: {shown}", flush=True)
            raise
        rows, replaced = rows + one.rows, replaced + one.n_lost
        memory.append(psutil.Process().memory_info().rss / 2**20)
        took = f"{time.monotonic() - begun:.1f} s, {memory[-1]:.0f} MB"
        print(f"{i}: {shown}: {ended}; {one.rows} rows, {took}", flush=True)
        i += 1
    quarter = max(1, len(memory) // 4)
    later, earlier = memory[-quarter:], memory[quarter : 2 * quarter] or memory[:quarter]
    growth = sum(later) / len(later) - sum(earlier) / len(earlier)
    print(
        f"seed {options.seed}: {len(memory)} rounds, {rows} rows as counted, {replaced} workers replaced, "
        f"memory grew by {growth:.1f} MB over the last half; left behind: nothing"
    )
    if growth > 16.0:
        sys.exit(f"FAILED: memory grew by {growth:.1f} MB")


if __name__ == "__main__":
    main()
