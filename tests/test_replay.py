"""replay_agent: the outputs that were stored, once more and with gradients, by steps or in one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_agents import HistoryAgent, LinearAgent, RngAgent, StatefulAgent
from torch import nn

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.functional.random import step_keys
from rlstruct.replay import replay_agent, replay_agent_stateless
from rlstruct.rl_agent import RL_Agent, RL_Agent_CheckDevice

B, T = 2, 4
EMPTY = DictTensor()


@pytest.mark.parametrize("replay", [replay_agent, replay_agent_stateless])
def test_the_method_name_of_rlstructures_is_refused_with_what_to_do(replay: Callable[..., object]) -> None:
    message = r"replay_method_name='call_replay_ppo'.* always call_replay\. Leave .*plain dict.*migrating_from_rlstruct"
    with pytest.raises(TypeError, match=message):
        replay(RngAgent(), some_trajectories(), replay_method_name="call_replay_ppo")
    with pytest.raises(TypeError, match=message):
        replay(RngAgent(), some_trajectories(), "call_replay_ppo")


def test_swapped_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="replay_agent: agent is a Trajectories, expected an RL_Agent"):
        replay_agent(some_trajectories(), RngAgent())  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"trajectories is a TemporalDictTensor, expected Trajectories\. Pass the whole"
    ):
        replay_agent(RngAgent(), some_trajectories().steps)  # type: ignore[arg-type]


def int64(rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def observed(n_steps: int = T) -> dict[str, torch.Tensor]:
    """Frames 0, 1, 2, … in row 0 and 10, 11, … in row 1, rewarded with 1, 2, 3, …; row 1 restarts at step 2."""
    step = torch.arange(n_steps)
    initial = torch.zeros(B, n_steps, dtype=torch.bool)
    initial[:, :1] = True
    initial[1, 2:3] = True
    return {
        "observation/frame": torch.stack([step, step + 10]).unsqueeze(-1).to(torch.float32),
        "observation/reward": (step + 1.0).expand(B, n_steps).contiguous(),
        "observation/initial_state": initial,
        "observation/last_action": torch.zeros(B, n_steps, dtype=torch.int64),
        "observation/rng": step_keys(torch.arange(B), 0, step).T.contiguous(),
    }


def some_trajectories(info: dict[str, torch.Tensor] | None = None, n_steps: int = T) -> Trajectories:
    return Trajectories(DictTensor(info), TemporalDictTensor(observed(n_steps), int64([n_steps, max(n_steps - 1, 0)])))


class Scaled(RL_Agent):
    """Multiplies each frame by its weight and by agent_info["scale"]; counts its calls."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 2.0)
        self.rows: list[int] = []
        self.info_devices: set[torch.device | None] = set()

    def __call__(self, state, observation, agent_info, history=None):
        self.rows.append(observation.n_elems())
        self.info_devices.add(agent_info.device)
        scale = agent_info["scale"].to(observation["frame"].device) if "scale" in agent_info else 1.0
        value = self.model(observation["frame"]).squeeze(1) * scale
        return DictTensor({"value": value}), EMPTY


class ScaledOnDevice(Scaled):
    agent_info_on_device = True


class Recurrent(RL_Agent):
    """h <- weight * h + 1, from 0 at an episode's start."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor(3.0))

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"h": torch.zeros(B)})

    def __call__(self, state, observation, agent_info, history=None):
        h = torch.where(observation["initial_state"], torch.zeros_like(state["h"]), state["h"])
        h = self.weight * h + 1
        return DictTensor({"h": h}), DictTensor({"h": h})


class OwnReplay(Scaled):
    """Replays step t as the number 100 + t."""

    def call_replay(self, trajectories, t, state):
        return DictTensor({"value": torch.full((B,), 100.0 + t)}), EMPTY


def test_an_agent_without_state_is_asked_once_for_all_steps() -> None:
    agent = Scaled()
    replayed = replay_agent(agent, some_trajectories())
    assert agent.rows == [B * T]
    # value = 2 * frame
    assert replayed["value"].tolist() == [[0, 2, 4, 6], [20, 22, 24, 26]]
    assert replayed.lengths.tolist() == [4, 3]
    assert list(replayed.keys()) == ["value"]


def test_by_steps_and_in_one_call_give_the_same() -> None:
    class BySteps(LinearAgent):
        def call_replay(self, trajectories, t, state):
            return super().call_replay(trajectories, t, state)

    at_once = replay_agent(LinearAgent(1), some_trajectories())
    by_steps = replay_agent(BySteps(1), some_trajectories())
    assert torch.equal(at_once["action"], by_steps["action"])
    for key in ("log_prob", "logits"):
        torch.testing.assert_close(at_once[key], by_steps[key], atol=1e-6, rtol=0)
    assert torch.equal(at_once.lengths, by_steps.lengths)


def test_agent_info_is_repeated_for_the_steps_of_its_row() -> None:
    replayed = replay_agent(Scaled(), some_trajectories({"agent_info/scale": torch.tensor([1.0, 10.0])}))
    assert replayed["value"].tolist() == [[0, 2, 4, 6], [200, 220, 240, 260]]


@pytest.mark.parametrize(("kind", "expected"), [(Scaled, "cpu"), (ScaledOnDevice, "sim:0")])
def test_agent_info_is_where_the_agent_wants_it(kind: type[Scaled], expected: str) -> None:
    agent = kind()
    agent.model.to("sim:0")
    replayed = replay_agent(agent, some_trajectories({"agent_info/scale": torch.tensor([1.0, 10.0])}).to("sim:0"))
    assert agent.info_devices == {torch.device(expected)}
    assert replayed["value"].to("cpu").tolist() == [[0, 2, 4, 6], [200, 220, 240, 260]]


def test_state_runs_through_the_steps_and_restarts_within_the_row() -> None:
    info = {"agent_state/steps": int64([5, 0]), "agent_state/start": int64([0, 0])}
    trajectories = some_trajectories(info)
    trajectories.steps["observation/initial_state"][0, 0] = False  # row 0 goes on from the batch before
    # Row 0: 5, 6, 7, 8.  Row 1 restarts at step 2: 0, 1, 0, 1.
    replayed = replay_agent(StatefulAgent(), trajectories)
    assert replayed["steps"].tolist() == [[5, 6, 7, 8], [0, 1, 0, 1]]


def test_gradients_flow_in_one_call() -> None:
    agent = Scaled()
    replay_agent(agent, some_trajectories())["value"].sum().backward()
    # d/dw sum(w * frame) = 0 + 1 + 2 + 3 + 10 + 11 + 12 + 13
    assert agent.model.weight.grad.item() == 52


def test_gradients_flow_through_the_state_and_stop_at_a_restart() -> None:
    agent = Recurrent()
    replayed = replay_agent(agent, some_trajectories({"agent_state/h": torch.zeros(B)}, n_steps=3))
    # h: 1, w + 1, w^2 + w + 1 in row 0; 1, w + 1, 1 in row 1, with w = 3.
    assert replayed["h"].tolist() == [[1, 4, 13], [1, 4, 1]]
    replayed["h"].sum().backward()
    # 1 + (2 w + 1) in row 0; 1 in row 1
    assert agent.weight.grad.item() == 1 + 7 + 1


def test_an_agent_that_draws_from_the_key_draws_the_same_again() -> None:
    trajectories = some_trajectories()
    keys = trajectories.steps["observation/rng"]
    drawn = [RngAgent(5)(EMPTY, DictTensor({"rng": keys[:, t]}), EMPTY)[0]["drawn"] for t in range(T)]
    assert torch.equal(replay_agent(RngAgent(5), trajectories)["drawn"], torch.stack(drawn, dim=1))


def test_history_holds_the_steps_before() -> None:
    replayed = replay_agent(HistoryAgent(), some_trajectories())
    assert replayed["history_steps"].tolist() == [[0, 1, 2, 3]] * B
    # Rewards 1, 2, 3, 4: the sums before each step.
    assert replayed["history_reward"].tolist() == [[0, 1, 3, 6]] * B


def test_an_own_call_replay_is_respected() -> None:
    agent = OwnReplay()
    assert replay_agent(agent, some_trajectories())["value"].tolist() == [[100, 101, 102, 103]] * B
    assert agent.rows == []


@pytest.mark.parametrize(
    ("agent", "info"),
    [
        (LinearAgent(1), {}),
        (HistoryAgent(), {}),
        (OwnReplay(), {}),
        (StatefulAgent(), {"agent_state/steps": int64([0, 0]), "agent_state/start": int64([0, 0])}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_watched_agent_is_replayed_alike(agent: RL_Agent, info: dict[str, torch.Tensor]) -> None:
    bare = replay_agent(agent, some_trajectories(info))
    watched = replay_agent(RL_Agent_CheckDevice(agent, "cpu"), some_trajectories(info))
    assert bare.keys() == watched.keys()
    assert all(torch.equal(bare[key], watched[key]) for key in bare.keys())


@pytest.mark.parametrize("agent", [LinearAgent(1), HistoryAgent()], ids=lambda value: type(value).__name__)
def test_no_steps_are_refused(agent: RL_Agent) -> None:
    with pytest.raises(ValueError, match="replay_agent: trajectories hold 0 steps, expected at least 1"):
        replay_agent(agent, some_trajectories(n_steps=0))


def test_no_steps_are_refused_in_one_call_too() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        replay_agent_stateless(LinearAgent(1), some_trajectories(n_steps=0))
