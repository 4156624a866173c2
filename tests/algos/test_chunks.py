"""Values without gradients need little memory: pixels are copied once as floats, large batches judged in chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlstruct import DictTensor, TemporalDictTensor, Trajectories, replay
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalActorCritic,
    RecurrentActorCritic,
    RecurrentAgent,
    StackingAgent,
)
from rlstruct.agents.convolutional import ConvolutionalTrunk
from rlstruct.algos import ppo
from rlstruct.algos.bootstrapping import replay_with_next_values
from rlstruct.batchers import RL_Batcher
from rlstruct.engine.torch_private import TorchDispatchMode
from rlstruct.replay import replay_agent
from rlstruct.sims import make

T, B = 6, 10


class Counted(nn.Module):
    """A network that notes how many rows it judges, and with gradients or without."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rows = inner, {True: [0], False: [0]}

    def forward(self, frame: Tensor, *state: Tensor) -> Any:
        self.rows[torch.is_grad_enabled()].append(len(frame))
        return self.inner(frame, *state)

    @property
    def n_hidden(self) -> int:
        return self.inner.n_hidden  # type: ignore[return-value]


class CountedSequences(Counted):
    """The same for a network that is replayed as a sequence."""

    def sequence(self, frame: Tensor, *state: Tensor) -> Any:
        self.rows[torch.is_grad_enabled()].append(frame.shape[0] * frame.shape[1])
        inner: Any = self.inner
        return inner.sequence(frame, *state)


def recurrent_agent(model: Any) -> RecurrentAgent:
    return RecurrentAgent(model, copy_model=False)


def plain_agent(model: Any) -> ActorCriticAgent:
    return ActorCriticAgent(model, copy_model=False)


def stacking_agent(model: Any) -> StackingAgent:
    return StackingAgent(plain_agent(model), (3, 4), device="cpu", dtype=torch.float32)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ActorCritic(12, 2, hidden=(8,))

    def forward(self, frame: Tensor) -> Any:
        return self.inner(frame.flatten(1))


KINDS: dict[str, Any] = {
    "plain": (plain_agent, partial(ActorCritic, 4, 2, hidden=(8,))),
    "recurrent": (recurrent_agent, partial(RecurrentActorCritic, 4, 2, n_hidden=8)),
    "sequences": (recurrent_agent, partial(RecurrentActorCritic, 4, 2, n_hidden=8)),
    "stacking": (stacking_agent, Stacked),
}


def collect(agent: Any, stacking: bool) -> Trajectories:
    def create_env(seed: int) -> Any:
        env = make("CartPole-v1", n_envs=B, seed=seed)
        if stacking:  # one more axis, for single frames
            observe = env.observe
            env.observation_space = type(env.observation_space)(-9, 9, (1, 4))
            env.observe = lambda state: observe(state).unsqueeze(1)
        return env

    with RL_Batcher(T, lambda: agent, create_env, seed=0) as batcher:
        batcher.reset()
        for _ in range(3):  # some episodes end within the last batch
            batcher.execute()
            trajectories, _ = batcher.get()
    assert trajectories is not None
    return trajectories


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_the_same_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_agent, create_model = KINDS[kind]
    torch.manual_seed(0)
    model = (CountedSequences if kind == "sequences" else Counted)(create_model())
    agent = create_agent(model)
    trajectories = collect(agent, kind == "stacking")
    with torch.no_grad():
        whole = replay_agent(agent, trajectories)
    _, expected = replay_with_next_values(agent, trajectories)
    for name, limit, n_envs in (("_MOST_STEPS", 3 * T, 3), ("_MOST_NUMBERS", 1, 1)):
        monkeypatch.setattr(replay, name, limit)
        model.rows[False].clear()
        with torch.no_grad():
            chunks = replay_agent(agent, trajectories)
        replayed, values = replay_with_next_values(agent, trajectories)
        by_steps = kind == "recurrent"
        assert max(model.rows[False]) <= max(n_envs * T, B if by_steps else 0)  # one step of all
        assert by_steps or max(model.rows[False]) == n_envs * T
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
        assert chunks.keys() == whole.keys()
        for key in whole.keys():
            torch.testing.assert_close(chunks[key], whole[key], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(replayed[key].detach(), whole[key], rtol=1e-5, atol=1e-6)


def test_ppo_judges_pixels_in_chunks() -> None:
    """4,096 environments of 128 steps were 118 GB; here 48 of them are enough for a second chunk."""
    n_envs, n_steps = 48, 100
    model = Counted(ConvolutionalActorCritic((4, 84, 84), 3, n_features=8, layers=[(2, 8, 8)]))
    pixels = torch.zeros(1, 1, 4, 84, 84, dtype=torch.uint8).expand(n_envs, n_steps, -1, -1, -1)
    steps: dict[str, Tensor] = {}
    flags = dict.fromkeys(("terminated", "truncated", "done", "initial_state"), torch.zeros(n_envs, n_steps).bool())
    for part in ("observation", "_observation"):
        seen = {"frame": pixels, "reward": torch.zeros(n_envs, n_steps), **flags}
        seen["rng"] = torch.zeros(n_envs, n_steps, dtype=torch.int64)
        steps |= {f"{part}/{key}": value for key, value in seen.items()}
    steps["action/action"] = torch.zeros(n_envs, n_steps, dtype=torch.int64)
    steps["action/log_probability"] = torch.zeros(n_envs, n_steps)
    batch = Trajectories(DictTensor(), TemporalDictTensor(steps))
    agent = plain_agent(model)
    prepared, _ = ppo.PPOLearner(model, agent, ppo.PPOConfig()).prepare(batch)  # the batch holds no values
    assert max(model.rows[False]) == n_envs * n_steps // 2
    assert prepared.rows.steps["learner/value"].isfinite().all()


class NewFloats(TorchDispatchMode):
    """Keeps all large tensors of floats that operators make."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.made = numel, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if isinstance(answer, Tensor) and answer.is_floating_point() and answer.numel() == self.numel:
            self.made[answer.untyped_storage().data_ptr()] = answer
        return answer


def test_pixels_are_copied_once_as_floats() -> None:
    trunk = ConvolutionalTrunk((1, 20, 20), n_features=8, layers=[(2, 4, 4)])
    frame = torch.randint(256, (5, 1, 20, 20), dtype=torch.uint8)
    before = frame.clone()
    with NewFloats(frame.numel()) as floats, torch.no_grad():
        trunk(frame)
    assert len(floats.made) == 1
    assert torch.equal(frame, before)
    pixels = next(iter(floats.made.values()))
    assert torch.equal(pixels.view_as(frame), frame * (1.0 / 255.0))
