"""The fakes do what their arithmetic says, on every device, and get into another process."""

from __future__ import annotations

import pickle
import time
from functools import partial

import pytest
import torch
from fake_agents import FixedAgent, HistoryAgent, LinearAgent, RngAgent, StatefulAgent
from fake_envs import (
    CountingEnv,
    FailingEnv,
    SlowEnv,
    counting_length,
    create_counting_env,
    create_failing_env,
    create_slow_env,
)
from gymnasium import spaces
from random_env import RandomEnv

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.random import step_keys
from rlstruct.rl_agent import RL_Agent
from rlstruct.testing import check_agent, check_vec_env

DEVICES = ["cpu", "sim:1", pytest.param("cuda", marks=pytest.mark.gpu)]
EMPTY = DictTensor()


def action(env: CountingEnv | FailingEnv | SlowEnv, value: int = 1) -> DictTensor:
    return DictTensor({"action": torch.full((env.n_envs(),), value, device=env.device)})


@pytest.mark.parametrize("device", DEVICES)
def test_episodic_counting(device: str) -> None:
    env = CountingEnv(2, seed=5, lengths=(1, 3), device=device)
    first, running = env.reset()
    # Environment 5 takes lengths[(5 + 0) % 2] = 3 steps, environment 6 takes 1.
    assert first["frame"].tolist() == [[5, 0, 0], [6, 0, 0]]
    assert running.tolist() == [True, True]
    rows = [env.step(action(env)) for _ in range(4)]
    assert [reached["frame"][:, 2].tolist() for (reached, _), _ in rows] == [[1, 1], [2, 1], [3, 1], [3, 1]]
    assert [ran.tolist() for (_, ran), _ in rows] == [[True, True], [True, False], [True, False], [False, False]]
    runs_on = [running.tolist() for _, (_, running) in rows]
    assert runs_on == [[True, False], [True, False], [False, False], [False, False]]
    assert [reached["reward"].tolist() for (reached, _), _ in rows] == [[1, 1], [2, 0], [3, 0], [0, 0]]
    # 5 + 0 is odd: truncated; 6 + 0 is even: terminated.
    last = rows[-1][0][0]
    assert last["truncated"].tolist() == [True, False]
    assert last["terminated"].tolist() == [False, True]
    assert env.reset()[0]["frame"].tolist() == [[5, 1, 0], [6, 1, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_auto_resetting_counting(device: str) -> None:
    env = CountingEnv(1, lengths=(2, 1), auto_reset=True, device=device)
    env.reset()
    seen = []
    for _ in range(4):
        (reached, _), (current, running) = env.step(action(env))
        assert running.all()
        seen.append((reached["frame"][0, 1:].tolist(), current["frame"][0, 1:].tolist()))
    # Episodes of 2, 1, 2 steps: (episode, step) reached, and acted on next.
    assert seen == [([0, 1], [0, 1]), ([0, 2], [1, 0]), ([1, 1], [2, 0]), ([2, 1], [2, 1])]


def test_env_info_replaces_the_lengths_until_the_next_reset() -> None:
    env = CountingEnv(2, lengths=(1,))
    env.reset(DictTensor({"length": torch.tensor([2, 3])}))
    ended = [env.step(action(env))[0][0]["done"].tolist() for _ in range(3)]
    assert ended == [[False, False], [True, False], [True, True]]
    env.reset()
    assert env.step(action(env))[0][0]["done"].all()


def test_counting_length_walks_through_the_lengths() -> None:
    assert [counting_length(s, e, (7, 8, 9)) for s, e in ((0, 0), (0, 1), (1, 0), (1, 2))] == [7, 8, 8, 7]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("auto_reset", [False, True])
def test_counting_keeps_the_contract(device: str, auto_reset: bool) -> None:
    check_vec_env(CountingEnv, env_args={"n_envs": 3, "auto_reset": auto_reset, "device": device}, n_steps=30)


ANY_SPACE = spaces.Dict(
    a=spaces.Box(-1, 1, (3,)),
    b=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(4)]),
    c=spaces.Box(0, 255, (2, 2), dtype="uint8"),
    d=spaces.Box(-10, 10, (), dtype="float64"),
)
ANY_ACTION = spaces.Dict(m=spaces.MultiDiscrete([2, 3]), f=spaces.Box(-2, 2, (2,), dtype="float64"))


@pytest.mark.parametrize("device", DEVICES)
def test_random_env_keeps_the_contract_for_any_space(device: str) -> None:
    check_vec_env(partial(RandomEnv, ANY_SPACE, ANY_ACTION, 3, device=device), n_steps=30)
    env = RandomEnv(ANY_SPACE, ANY_ACTION, 3, device=device)
    frames = {key for key in env.reset()[0].keys() if key.startswith("frame")}
    assert frames == {"frame/a", "frame/b/0", "frame/b/1", "frame/c", "frame/d"}


def test_random_env_leaves_the_callers_space_alone() -> None:
    space = spaces.Discrete(1000)
    space.seed(1)
    RandomEnv(space, spaces.Discrete(2), 3, seed=7).reset()
    again = spaces.Discrete(1000)
    again.seed(1)
    assert space.sample() == again.sample()


def test_slow_env_is_slow_and_else_the_same() -> None:
    env = create_slow_env(2, 3, seconds=0.02, lengths=(2,))
    assert isinstance(env, SlowEnv)
    env.reset()
    start = time.perf_counter()
    (reached, _), _ = env.step(action(env))
    assert time.perf_counter() - start >= 0.02
    assert reached["frame"].tolist() == [[3, 0, 1], [4, 0, 1]]
    check_vec_env(create_slow_env, env_args={"n_envs": 2, "seconds": 0.0}, n_steps=20)


def test_failing_env_fails_once_at_its_step_and_blames_the_row() -> None:
    env = FailingEnv(CountingEnv(3), KeyError("gone"), step=2, environment=1)
    env.reset()
    for _ in range(2):
        env.step(action(env))
    with pytest.raises(KeyError, match="gone") as error:
        env.step(action(env))
    assert error.value.environment_index == 1  # type: ignore[attr-defined]
    env.step(action(env))


def test_failing_env_may_do_something_else_than_raise() -> None:
    calls: list[str] = []
    env = FailingEnv(CountingEnv(1), partial(calls.append, "failed"), step=1)
    env.reset()
    env.step(action(env))
    assert calls == []
    env.step(action(env))
    assert calls == ["failed"]


def test_only_the_process_with_the_failing_environment_fails() -> None:
    failure = ValueError("broken")
    there = create_failing_env(4, 10, failure=failure, failing_seed=12)
    assert isinstance(there, FailingEnv)
    assert there.environment == 2
    for seed in (6, 13):
        assert isinstance(create_failing_env(4, seed, failure=failure, failing_seed=12), CountingEnv)


@pytest.mark.parametrize("thing", [create_counting_env, create_slow_env, create_failing_env, CountingEnv, LinearAgent])
def test_factories_get_into_another_process(thing: object) -> None:
    assert pickle.loads(pickle.dumps(thing)) is thing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", [lambda d: FixedAgent(1), lambda d: RngAgent(), lambda d: StatefulAgent(device=d), lambda d: HistoryAgent()]
)
def test_agents_keep_the_contract(kind: object, device: str) -> None:
    check_agent(kind(device), CountingEnv(3, auto_reset=True, device=device), device=device, n_steps=4)  # type: ignore[operator]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_linear_agent_keeps_the_contract_without_host_syncs(device: str) -> None:
    env = CountingEnv(3, auto_reset=True, device=device)
    check_agent(LinearAgent(3, device=device), env, device=device, n_steps=4, host_syncs=True)


def step_of(agent: RL_Agent, state: DictTensor = EMPTY, **columns: torch.Tensor) -> tuple[DictTensor, DictTensor]:
    return agent(state, DictTensor(columns), EMPTY)


def test_fixed_agent_takes_the_dtype_of_the_last_action() -> None:
    last = torch.zeros(2, 3, dtype=torch.float64)
    answer, state = step_of(FixedAgent(0.5), last_action=last)
    assert torch.equal(answer["action"], torch.full((2, 3), 0.5, dtype=torch.float64))
    assert state.empty()


def test_rng_agent_depends_on_the_key_alone() -> None:
    keys = step_keys(torch.arange(50), 0, torch.arange(1))[0]
    one = step_of(RngAgent(5), rng=keys)[0]
    two = step_of(RngAgent(5), rng=keys[10:], frame=torch.ones(40))[0]
    assert torch.equal(one["action"][10:], two["action"])
    assert set(one["action"].tolist()) == {0, 1, 2, 3, 4}


def test_stateful_agent_counts_from_the_start_it_is_given() -> None:
    agent = StatefulAgent(3)
    state = agent.initial_state(DictTensor({"start": torch.tensor([0, 7])}), 2)
    steps = []
    for restart in ([True, True], [False, False], [False, True]):
        answer, state = step_of(agent, state, initial_state=torch.tensor(restart))
        steps.append(answer["steps"].tolist())
        assert answer["action"].tolist() == [s % 3 for s in steps[-1]]
    assert steps == [[0, 7], [1, 8], [2, 7]]


def test_history_agent_insists_on_its_history() -> None:
    observation = DictTensor({"last_action": torch.zeros(2), "rng": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="history is None"):
        HistoryAgent()(EMPTY, observation, EMPTY)
    with pytest.raises(ShapeMismatchError, match="history has 3 rows, expected 2"):
        HistoryAgent()(EMPTY, observation, EMPTY, TemporalDictTensor({"observation/reward": torch.zeros(3, 1)}))


def test_linear_agent_is_linear_and_takes_weights() -> None:
    agent, other = LinearAgent(2, seed=1), LinearAgent(2, seed=2)
    assert not torch.equal(agent.model.weight, other.model.weight)
    other.update(agent.model.state_dict())
    frame, rng = torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6])
    answer = step_of(agent, frame=frame, rng=rng)[0]
    expected = frame.float() @ agent.model.weight.T + agent.model.bias
    torch.testing.assert_close(answer["logits"], expected)
    chosen = expected.log_softmax(1)[torch.arange(2), answer["action"]]
    torch.testing.assert_close(answer["log_prob"], chosen)
    assert torch.equal(step_of(other, frame=frame, rng=rng)[0]["logits"], answer["logits"])
