"""Number of operators that a step of collection queues on a device: each is a launch, or a node of a graph."""

from __future__ import annotations

import pytest
import torch
from queued import Queued

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor
from rlstruct.sims import make

T, B = 32, 16


def operators_a_step(name: str, n_inputs: int, n_actions: int) -> float:
    with RL_Batcher(
        T,
        lambda: ActorCriticAgent(ActorCritic(n_inputs, n_actions).to("sim:0"), device="sim:0"),
        lambda n_envs, seed: make(name, n_envs, seed, device="sim:0"),
        env_args={"n_envs": B},
        seed=0,
        device="sim:0",
        graph=False,
    ) as batcher:
        batcher.reset()
        for _ in range(2):  # the first batch also makes sure that the agent writes to no observation
            batcher.execute()
            batcher.get()
        with Queued() as queued:
            batcher.execute()
        batcher.get()
    return sum(queued.names.values()) / T


def test_a_step_of_cart_pole_with_an_agent_queues_few_operators() -> None:
    """Eager steps, all that a batch does once per batch included; on CUDA each operator but a few is one node.

    Three of them keep wrong numbers out: the action is stored before the environment gets it, and clamped twice.
    """
    assert operators_a_step("CartPole-v1", 4, 2) <= 61


def test_restarts_take_as_many_operators_however_many_fields_a_state_has() -> None:
    """All fields of one dtype and shape are stacked: one choice between what goes on and what begins anew."""
    for name in ("CartPole-v1", "Breakout-MinAtar"):
        env = make(name, B, device="sim:0")
        env.reset()
        action = DictTensor({"action": torch.zeros(B, dtype=torch.int64, device="sim:0")})
        env.step(action)  # draws start states for many steps
        with Queued() as queued:
            env.step(action)
        kinds = {(value.dtype, value.shape) for value in env.state_tensors().values()}
        assert queued.names["aten.index_select.default"] <= len(kinds) + (name != "CartPole-v1")  # a game's own table


@pytest.mark.parametrize(
    ("executor", "device", "backend"),
    [("graph", "sim:0", "torch"), ("kernel", "cpu", "warp"), ("eager", "cpu", "torch")],
)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_batch_that_was_taken_at_once_is_copied_only_if_a_graph_will_overwrite_it(
    executor: str, device: str, backend: str, reuse: bool
) -> None:
    if executor == "kernel":
        pytest.importorskip("warp", reason="needs the extra warp")
    with RL_Batcher(
        T,
        lambda: ActorCriticAgent(ActorCritic(4, 2).to(device), device=device),
        lambda n_envs, seed: make("CartPole-v1", n_envs, seed, device=device, backend=backend),
        env_args={"n_envs": B},
        seed=0,
        device=device,
    ) as batcher:
        batcher.reset()
        for _ in range(3):
            batcher.execute()
            with Queued() as queued:
                batch, _ = batcher.get(reuse=reuse)
        assert batcher.stats().executors == (executor,)
        assert batcher.memory_report().rollout_buffers[0] > T * B
    one_key = batch.steps["observation/rng"].numel()
    # Single steps write to small memory that is used again, and a graph always writes to its own memory.
    if executor == "eager" or (executor == "graph" and not reuse):
        assert queued.numbers > 5 * one_key
    else:
        assert queued.numbers < one_key  # numbers of the rows alone
