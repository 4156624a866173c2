"""The rungs of benchmarks/gpu.py: callables that take environment steps of CartPole, one way each.

A rung is made for one number of environments; calling it takes ``steps`` steps of all of them and waits until they are
done, so that its time can be taken with a clock of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gymnasium
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from rlstruct import DictTensor, VecEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.learner import GradientLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.engine.graph import capture_cuda
from rlstruct.engine.validity import unchecked
from rlstruct.envs import GymVectorEnv
from rlstruct.sims import TensorEnv, make

T = 32  # steps of a batch, where a policy acts
STEPS = 16  # single steps in one call


@dataclass(frozen=True)
class Rung:
    """One way to take steps."""

    name: str  # as tables and pictures say it
    run: Callable[[], object]  # takes ``steps`` steps of all environments, and waits for the device
    steps: int
    env: TensorEnv | None = None  # whose carry is measured; None where it is not ours


MakeRung = Callable[[], Rung]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gymnasium_rung(n_envs: int, vectorised: bool) -> Rung:
    """Gymnasium on the CPU: SyncVectorEnv, or the numpy version that it calls a vector entry point."""
    if vectorised:
        env: gymnasium.vector.VectorEnv = CartPoleVectorEnv(n_envs)
    else:
        env = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * n_envs)
    env.reset(seed=0)
    actions = torch.randint(0, 2, (STEPS, n_envs), device="cpu").numpy()

    def run() -> None:
        for action in actions:
            env.step(action)

    return Rung("numpy-vectorised" if vectorised else "SyncVectorEnv", run, STEPS)


def step_rung(name: str, n_envs: int, device: torch.device, backend: str) -> Rung:
    env = make("CartPole-v1", n_envs, device=device, backend=backend)
    env.reset()
    actions = [DictTensor({"action": torch.randint(0, 2, (n_envs,), device=device)}) for _ in range(STEPS)]

    def run() -> None:
        with unchecked():
            for action in actions:
                env.step(action)
        synchronize(device)

    return Rung(name, run, STEPS, env)


def graph_rung(name: str, n_envs: int, device: torch.device, backend: str) -> Rung:
    """The same single steps, captured as one CUDA graph."""
    rung = step_rung(name, n_envs, device, backend)
    env = rung.env
    if env is None:  # unreachable: it is ours; narrows the type
        raise RuntimeError("there is no environment")
    actions = [DictTensor({"action": torch.randint(0, 2, (n_envs,), device=device)}) for _ in range(STEPS)]
    env.step(actions[0])  # the carry has all its keys from the first step on
    held = {key: value.clone() for key, value in env.state_tensors().items()}

    def steps() -> None:
        env.set_state_tensors(held)
        with unchecked():  # as RL_Batcher does, which checks whole batches
            for action in actions:
                env.step(action)
        torch._foreach_copy_(list(held.values()), [env.state_tensors()[key] for key in held])

    synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        steps()
        replay = capture_cuda(steps)

    def run() -> None:
        replay()
        synchronize(device)

    return Rung(name, run, STEPS, env)


def our_rungs(n_envs: int, device: torch.device) -> list[MakeRung]:
    """Everything of ours that steps the simulation alone and needs no compiler."""
    rungs = [partial(step_rung, "torch eager", n_envs, device, "torch")]
    if device.type == "cuda":
        rungs.append(partial(graph_rung, "CUDA graph", n_envs, device, "torch"))
    return rungs


def simulation_rungs(n_envs: int, device: torch.device) -> list[MakeRung]:
    """Everything that steps the simulation alone, but for what compiles for minutes."""
    rungs = [partial(gymnasium_rung, n_envs, vectorised=False)] if n_envs <= 1024 else []
    rungs += [partial(gymnasium_rung, n_envs, vectorised=True)] if n_envs <= 1 << 17 else []
    return [*rungs, *our_rungs(n_envs, device)]


def create_gymnasium(n_envs: int, seed: int) -> VecEnv:
    return GymVectorEnv(CartPoleVectorEnv(n_envs), seed=seed)


create_simulator = partial(make, "CartPole-v1")


def batcher_rung(name: str, n_envs: int, device: torch.device, backend: str | None, executor: str) -> Rung:
    batcher = RL_Batcher(
        T, ActorCriticAgent, create_gymnasium if backend is None else create_simulator,
        agent_args={"model": ActorCritic(4, 2), "device": device},
        env_args={"n_envs": n_envs} | ({} if backend is None else {"device": device, "backend": backend}), seed=0,
        device=device, graph=executor != "eager",
    )  # fmt: skip
    loop = Loop(batcher, device)
    for _ in range(2):  # the first batch may run eagerly
        loop.iterate()
    if (ran := batcher.stats().executors) != (executor,):
        raise RuntimeError(f"the executor of {name} is {', '.join(ran)}, expected {executor}")
    return Rung(name, loop.iterate, T)


class Loop:
    """Batches, and an update on each where there is a learner, whose weights are published."""

    def __init__(self, batcher: RL_Batcher, device: torch.device, learner: GradientLearner | None = None) -> None:
        self.batcher, self.learner, self._device = batcher, learner, device
        self._agent_info = None if learner is None else learner.agent_info(0.0, batcher.n_envs())
        batcher.reset()

    def collect(self) -> None:
        self.batcher.execute(self._agent_info)
        self._batch = self.batcher.get()[0]
        synchronize(self._device)

    def learn(self) -> None:
        if self.learner is not None:
            self.learner.update(self._batch, 0.0)
            self.batcher.update(self.learner.model.state_dict())
            synchronize(self._device)

    def iterate(self) -> None:
        self.collect()
        self.learn()


def policy_rungs(n_envs: int, device: torch.device) -> list[MakeRung]:
    """Everything that collects with a 4-64-64-2 actor and a critic of the same size."""
    rungs = []
    if n_envs <= 1 << 14:
        cpu = torch.device("cpu")
        rungs.append(partial(batcher_rung, "numpy-vectorised, batcher", n_envs, cpu, None, "eager"))
    rungs.append(partial(batcher_rung, "torch eager, batcher", n_envs, device, "torch", "eager"))
    if device.type == "cuda":
        rungs.append(partial(batcher_rung, "torch, batcher's CUDA graph", n_envs, device, "torch", "graph"))
    return [*rungs, partial(batcher_rung, "Warp fused policy", n_envs, device, "warp", "kernel")]
