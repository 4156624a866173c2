"""StackingAgent over single pictures is the agent inside over stacks, bit by bit; so is what learns from it."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from fake_agents import HistoryAgent, RngAgent
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_env import SIDES, PictureEnv, noise
from torch import Tensor

from rlstruct import DictTensor, RL_Agent_CheckDevice, TemporalDictTensor, Trajectories, replay_agent
from rlstruct.agents import (
    ActorCriticAgent,
    ConvolutionalActorCritic,
    ConvolutionalTrunk,
    RecurrentActorCritic,
    RecurrentAgent,
    StackingAgent,
)
from rlstruct.batchers import RL_Batcher, collect_episodes
from rlstruct.cli.tasks import Factory
from rlstruct.envs import GymEnvInf
from rlstruct.replay import replay_with_states
from rlstruct.testing import ConformanceError, check_agent, forbid_host_sync

SHAPE = (4, *SIDES)
create_stacking = partial(StackingAgent.create, create_agent=ActorCriticAgent, shape=SHAPE)


def create_model() -> ConvolutionalActorCritic:
    torch.manual_seed(2)
    return ConvolutionalActorCritic(SHAPE, 2, n_features=8, layers=((3, 3, 1),))


def collect(stack: int, n_batches: int, *, n_timesteps: int = 5, **env: Any) -> list[Trajectories]:
    create_agent = ActorCriticAgent if stack > 1 else create_stacking
    with RL_Batcher(
        n_timesteps, create_agent, PictureEnv, agent_args={"model": create_model()},
        env_args={"n_envs": 3, "stack": stack, "auto_reset": True, **env}, seed=0,
    ) as batcher:  # fmt: skip
        batcher.reset()
        batches = []
        for _ in range(n_batches):
            batcher.execute()
            batch, _ = batcher.get()
            assert batch is not None
            batches.append(batch)
    return batches


@pytest.mark.parametrize("auto_reset", [True, False])
def test_what_is_collected_and_replayed_is_that_of_stacks(auto_reset: bool) -> None:
    agent, plain = create_stacking(create_model()), ActorCriticAgent(create_model())
    n_batches = 4 if auto_reset else 1
    singles, stacks = (collect(stack, n_batches, auto_reset=auto_reset) for stack in (1, 4))
    for single, whole in zip(singles, stacks, strict=True):
        assert torch.equal(single.lengths, whole.lengths)
        mask = whole.mask()
        for key, expected in whole.steps.items():
            found = single.steps[key]
            if key.endswith("observation/frame"):
                expected = expected[:, :, -1:]
            assert torch.equal(found[mask], expected[mask]), key
        one, other = replay_agent(agent, single), replay_agent(plain, whole)
        for key in other.keys():
            assert torch.equal(one[key][mask], other[key][mask]), key
            stored = whole.steps[f"action/{key}"]
            torch.testing.assert_close(one[key][mask].detach(), stored[mask], rtol=0, atol=1e-5)


def bytes_of(batch: Trajectories) -> int:
    tensors = [*batch.info.values(), *batch.steps.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_batch_takes_a_quarter_of_the_memory() -> None:
    (single,), (whole,) = (collect(stack, 1, n_timesteps=64, lengths=(40,)) for stack in (1, 4))
    numbers = sum(t.nbytes for key, t in whole.steps.items() if not key.endswith("observation/frame"))
    # 64 steps and their ends, once; three more pictures in the state that the batch begins with
    assert (bytes_of(single) - numbers) / (bytes_of(whole) - numbers) < 0.28


class InFours(ActorCriticAgent):
    """Sees whole stacks, which a model cannot tell from another order of the same sum."""

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        return DictTensor({"seen": observation["frame"]}), state


def some_steps(initial: Tensor) -> dict[str, Tensor]:
    """Pictures without order, so that none stands for another by chance."""
    B, T = initial.shape
    frames = noise(torch.arange(B * T).view(B, T, 1))
    return {"observation/frame": frames, "observation/initial_state": initial}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_states_are_those_of_stepping(data: st.DataObject) -> None:
    B, T, n = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 7), (2, 5)))
    flags = st.lists(st.booleans(), min_size=B * T, max_size=B * T)
    initial = torch.tensor(data.draw(flags)).view(B, T)
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))  # the rest is padding
    state = noise(torch.arange(1000, 1000 + B * (n - 1)).view(B, n - 1))
    agent = StackingAgent(InFours(create_model()), (n, *SIDES), device="cpu")
    batch = Trajectories(
        DictTensor({"agent_state/earlier_frames": state}), TemporalDictTensor(some_steps(initial), lengths)
    )
    before: list[Tensor] = []
    seen: list[Tensor] = []
    now = DictTensor({"earlier_frames": state})
    for t in range(T):
        before.append(now["earlier_frames"])
        action, now = agent.call_replay(batch, t, now)
        seen.append(action["seen"])
    expected = torch.stack(before, 1).flatten(0, 1)
    everywhere = agent.states_at(batch)
    assert everywhere is not None
    assert torch.equal(everywhere["earlier_frames"], expected)
    steps = torch.tensor(data.draw(st.lists(st.integers(0, B * T - 1), max_size=9)), dtype=torch.int64)
    some = agent.states_at(batch, steps)
    assert some is not None
    assert torch.equal(some["earlier_frames"], expected[steps])
    assert torch.equal(replay_agent(agent, batch)["seen"], torch.stack(seen, 1))


def test_the_first_picture_fills_the_stack_of_its_episode_only() -> None:
    initial = torch.tensor([[False, True, False, False, False]])
    frames = torch.arange(10, 15).view(1, 5, 1, 1).expand(1, 5, 1, 2).to(torch.uint8)
    state = torch.tensor([[[7, 7], [8, 8], [9, 9]]], dtype=torch.uint8)
    agent = StackingAgent(InFours(create_model()), (4, 2), device="cpu")
    steps = {"observation/frame": frames, "observation/initial_state": initial}
    batch = Trajectories(DictTensor({"agent_state/earlier_frames": state}), TemporalDictTensor(steps))
    with forbid_host_sync():
        seen = replay_agent(agent, batch)["seen"]
    expected = [[7, 8, 9, 10], [11, 11, 11, 11], [11, 11, 11, 12], [11, 11, 12, 13], [11, 12, 13, 14]]
    assert seen[0, :, :, 0].tolist() == expected


class Seeing(RngAgent):
    """Acts at random, and returns what it sees."""

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        action, state = super().__call__(state, observation, agent_info)
        return action + DictTensor({"seen": observation["frame"]}), state


def create_seeing(model: Any = None, **settings: Any) -> Seeing:
    return Seeing(6)


def create_consoles(n_envs: int, seed: int, stack: int) -> Any:
    from rlstruct import sims

    return sims.make("ALE/Pong-v5", n_envs, seed, stack=stack, time_limit=7)


def create_ale_py(n_envs: int, seed: int, stack: int) -> Any:
    factory = Factory("ALE/Pong-v5", {"max_num_frames_per_episode": 50}, atari=True)
    if stack == 1:
        return factory(n_envs, seed)
    envs = [FrameStackObservation(factory(1).envs[0].env, stack) for _ in range(n_envs)]
    assert type(envs[0].env) is AtariPreprocessing
    return GymEnvInf(envs, seed)


@pytest.mark.parametrize(("create_env", "package"), [(create_consoles, "warp"), (create_ale_py, "cv2")])
def test_games_of_atari_are_seen_as_the_environment_stacks_them(create_env: Any, package: str) -> None:
    for needed in ("ale_py", package):
        pytest.importorskip(needed, reason="needs the extras warp and atari")
    stacking = partial(StackingAgent.create, None, create_agent=create_seeing, shape=(4, 84, 84), device="cpu")
    seen = []
    for stack, create_agent in ((1, stacking), (4, create_seeing)):
        with RL_Batcher(9, create_agent, create_env, env_args={"n_envs": 2, "stack": stack}, seed=3) as batcher:
            batcher.reset()
            batches = []
            for _ in range(2):
                batcher.execute()
                batch, _ = batcher.get()
                assert batch is not None
                batches.append(batch.steps["action/seen"])
                restarts = batch.steps["observation/initial_state"].sum()
        seen.append(torch.cat(batches, 1))
    assert restarts > 0
    assert seen[0].shape == (2, 18, 4, 84, 84)
    assert torch.equal(*seen)


@pytest.mark.parametrize(("auto_reset", "device"), [(True, "cpu"), (False, "sim:1")])
def test_it_keeps_the_contract(auto_reset: bool, device: str) -> None:
    agent = create_stacking(create_model(), device=device)
    env = PictureEnv(3, auto_reset=auto_reset)
    check_agent(agent, env, device=device, executors=device != "cpu", host_syncs=True)


class Forgetful(StackingAgent):
    """Says that nothing ever restarts."""

    def states_at(self, trajectories: Trajectories, steps: Tensor | None = None) -> DictTensor | None:
        seen = dict(trajectories.steps.items())
        seen["observation/initial_state"] = torch.zeros_like(seen["observation/initial_state"])
        return super().states_at(Trajectories(trajectories.info, TemporalDictTensor(seen)), steps)


def test_wrong_states_break_the_contract() -> None:
    agent = Forgetful(ActorCriticAgent(create_model()), SHAPE, device="cpu")
    with pytest.raises(ConformanceError, match=r"Forgetful\.states_at\(trajectories, None\), row .*'earlier_frames'"):
        check_agent(agent, PictureEnv(3, auto_reset=True), executors=False)


def test_a_copy_acts_alike_and_takes_new_weights() -> None:
    agent = create_stacking(create_model(), stochastic=False)
    env = PictureEnv(2, auto_reset=True)
    observation, _ = env.reset()
    state = agent.initial_state(DictTensor(), 2)
    expected, _ = agent(state, observation, DictTensor())
    for other in (copy.deepcopy(agent), pickle.loads(pickle.dumps(agent)), RL_Agent_CheckDevice(agent, "cpu")):
        assert other.pure
        assert torch.equal(other(state, observation, DictTensor())[0]["value"], expected["value"])
    agent.update({name: value + 0.1 for name, value in create_model().state_dict().items()})
    assert not torch.equal(agent(state, observation, DictTensor())[0]["value"], expected["value"])
    assert pickle.loads(pickle.dumps(create_stacking))(create_model()).shape == SHAPE


class AnotherCell(torch.nn.Module):
    """Lets only whole calls of a network be replayed."""

    def __init__(self, network: RecurrentActorCritic) -> None:
        super().__init__()
        self.network, self.n_hidden = network, network.n_hidden

    def forward(self, frame: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.network(frame, hidden)


@pytest.mark.parametrize("convolutional", [False, True])
def test_an_agent_that_remembers_more_is_replayed_as_a_sequence(
    convolutional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = ConvolutionalTrunk(SHAPE, n_features=6, layers=((3, 3, 1),))
    model = RecurrentActorCritic(trunk if convolutional else 4 * 30, 2, n_hidden=4)
    agent = StackingAgent(RecurrentAgent(model), SHAPE, device="cpu")
    check_agent(agent, PictureEnv(2, auto_reset=True), executors=False)
    assert set(agent.initial_state(DictTensor(), 2).keys()) == {"hidden", "earlier_frames"}
    with RL_Batcher(
        6, lambda: agent, PictureEnv, env_args={"n_envs": 2, "auto_reset": True}, seed=0
    ) as batcher:  # fmt: skip
        batcher.reset()
        for _ in range(2):  # the second batch begins with frames and a hidden state of the first
            batcher.execute()
            batch, _ = batcher.get()
    assert batch is not None
    assert agent.states_at(batch) is None
    assert 0 < batch.steps["observation/initial_state"].sum() < 12
    calls: list[int] = []
    critic = agent.agent.model.critic
    monkeypatch.setattr(critic, "forward", lambda x, forward=critic.forward: calls.append(len(x)) or forward(x))
    replayed, states = replay_with_states(agent, batch)
    assert calls == [12]
    by_steps = StackingAgent(RecurrentAgent(AnotherCell(model)), SHAPE, device="cpu")
    expected, states_by_steps = replay_with_states(by_steps, batch)
    for key, value in expected.items():
        torch.testing.assert_close(replayed[key], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(replayed[key].detach(), batch.steps[f"action/{key}"], rtol=0, atol=1e-6)
    assert torch.equal(states["earlier_frames"], states_by_steps["earlier_frames"])
    torch.testing.assert_close(states["hidden"], states_by_steps["hidden"], rtol=0, atol=1e-6)


def test_episodes_cut_out_of_batches_are_replayed_from_their_first_picture() -> None:
    model = create_model()
    with RL_Batcher(
        5, create_stacking, PictureEnv, agent_args={"model": model}, env_args={"n_envs": 2, "auto_reset": True}, seed=0
    ) as batcher:
        episodes = collect_episodes(batcher, 6)
    mask = episodes.mask()
    replayed = replay_agent(create_stacking(model), episodes)["value"].detach()
    torch.testing.assert_close(replayed[mask], episodes.steps["action/value"][mask], rtol=0, atol=1e-5)


def test_what_cannot_be_stacked_is_refused() -> None:
    agent = create_stacking(create_model())
    observation, _ = PictureEnv(2, stack=4).reset()
    with pytest.raises(ValueError, match=r"'frame' is \[2, 4, 5, 6\] torch.uint8, expected \[2, 1, 5, 6\].*stack=1"):
        agent(agent.initial_state(DictTensor(), 2), observation, DictTensor())
    observation, _ = PictureEnv(2).reset()
    with pytest.raises(ValueError, match=r"'frame' is \[2, 1, 5, 6\] torch.uint8, expected \[2, 4, 5, 6\].*n_stack=4"):
        agent(DictTensor(), observation, DictTensor())
    with pytest.raises(TypeError, match="HistoryAgent needs a history or defines call_replay"):
        StackingAgent(HistoryAgent(), SHAPE, device="cpu")
    with pytest.raises(ValueError, match=r"shape is \[1, 84, 84\], expected \[n, \.\.\.\] with n of 2 or more"):
        StackingAgent(agent, (1, 84, 84), device="cpu")
