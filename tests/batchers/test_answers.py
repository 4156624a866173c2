"""Answers of agents and environments: every dtype is accepted, and a beginner's mistakes are named."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from batcher_fakes import GlobalRandomAgent, create_cartpole, first_batch, next_batch, refused
from gymnasium import spaces

from rlstruct import DictTensor, RL_Agent, VecEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.errors import WorkerError
from rlstruct.vec_env import EnvWrapper

UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


class CountingDown(gymnasium.Env[Any, Any]):
    """Frames begin at the largest number of their dtype and fall by one; the episode ends after ``length`` steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: Any, length: int) -> None:
        self.top = int(np.iinfo(dtype).max)
        self.observation_space = spaces.Box(0, self.top, (1,), dtype)
        self.length = length

    def frame(self) -> np.ndarray[Any, Any]:
        return np.array([self.top - self.steps], self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.frame(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.frame(), 0.0, self.steps == self.length, False, {}


class WithHistory(GlobalRandomAgent):
    def require_history(self) -> bool:
        return True


def fallen(frames: torch.Tensor, top: int) -> list[list[int]]:
    """Return how far the frames are below ``top``, exactly."""
    return [[top - int(value) for value in row] for row in frames.squeeze(-1).numpy()]


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("create_agent", [GlobalRandomAgent, WithHistory])
def test_wide_unsigned_frames_stay_what_they_are_where_episodes_restart(dtype: Any, create_agent: Any) -> None:
    def create_env(seed: int) -> GymEnvInf:
        return GymEnvInf([CountingDown(dtype, 2), CountingDown(dtype, 3)], seed)

    with RL_Batcher(4, create_agent, create_env) as batcher:
        steps = first_batch(batcher).steps
    top = int(np.iinfo(dtype).max)
    assert fallen(steps["observation/frame"], top) == [[0, 1, 0, 1], [0, 1, 2, 0]]
    assert fallen(steps["_observation/frame"], top) == [[1, 2, 1, 2], [1, 2, 3, 1]]


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_wide_unsigned_frames_are_padded_with_zeros(dtype: Any) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([CountingDown(dtype, 1), CountingDown(dtype, 3)], seed)

    with RL_Batcher(4, GlobalRandomAgent, create_env) as batcher:
        steps = first_batch(batcher).steps
    top = int(np.iinfo(dtype).max)
    # A padded 0 lies as far below the top as can be. After the last step `observation` shows what was reached.
    assert fallen(steps["_observation/frame"], top) == [[1, top, top], [1, 2, 3]]


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_wide_unsigned_infos_stay_what_they_are(dtype: Any) -> None:
    numbers = np.array([0, np.iinfo(dtype).max], dtype)
    infos = DictTensor({"number": torch.from_numpy(numbers)})
    with RL_Batcher(3, GlobalRandomAgent, create_cartpole, env_args={"n_envs": 2}) as batcher:
        batcher.reset(infos, infos)
        batch = next_batch(batcher)
    (steps,) = batch.minibatches(1)
    for key in ("agent_info/number", "env_info/number"):
        np.testing.assert_array_equal(batch.info[key].numpy(), numbers, strict=True)
        np.testing.assert_array_equal(np.sort(steps[key].numpy()), numbers.repeat(3), strict=True)


class Empty(CountingDown):
    """Has frames without entries."""

    def __init__(self) -> None:
        super().__init__(np.uint8, 2)
        self.observation_space = spaces.Box(0, 255, (2, 0), np.uint8)

    def frame(self) -> np.ndarray[Any, Any]:
        return np.zeros((2, 0), np.uint8)


@pytest.mark.parametrize("n_processes", [0, 1])
def test_frames_may_be_empty(n_processes: int) -> None:
    with RL_Batcher(3, GlobalRandomAgent, lambda seed: GymEnvInf([Empty()], seed), n_processes=n_processes) as batcher:
        assert first_batch(batcher).steps["_observation/frame"].shape == (1, 3, 2, 0)
        assert batcher.bounds == {"frame": ([[], []], [[], []])}


class Answering(RL_Agent):
    """Acts, and lets a test change the form of its answer."""

    def __init__(self, form: Any) -> None:
        self.form = form

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        return self.form({"action": torch.zeros_like(observation["last_action"])}, state)


@pytest.mark.parametrize(
    ("form", "got"),
    [
        (lambda action, state: DictTensor(action), "a DictTensor"),
        (lambda action, state: DictTensor({**action, "other": action["action"]}), "a DictTensor"),
        (lambda action, state: (action, state), r"\(dict, DictTensor\)"),
        (lambda action, state: (DictTensor(action), None), r"\(DictTensor, NoneType\)"),
    ],
)
def test_an_answer_of_another_form_is_named_at_the_first_step(form: Any, got: str) -> None:
    words = rf"in agent, .* Answering\.__call__: returned {got}, expected the pair"
    refused(words, Answering, create_cartpole, agent_args={"form": form}, env_args={"n_envs": 2})


@pytest.mark.parametrize(
    ("create_agent", "words"),
    [
        (lambda: ActorCriticAgent(ActorCritic(6, 2)), r"'action_logits' of ActorCriticAgent has shape \[2, 2\]"),
        (lambda: QAgent(QNetwork(6, 4)), r"'action_values' of QAgent has shape \[2, 4\]"),
    ],
)
def test_a_network_needs_an_output_for_each_action(create_agent: Any, words: str) -> None:
    def create_env(seed: int) -> VecEnv:
        return GymEnvInf([gymnasium.make("Acrobot-v1") for _ in range(2)], seed)

    refused(rf"{words}, expected \[2, 3\].*n_actions=3", create_agent, create_env)


class Remembering(GlobalRandomAgent):
    """Starts with ``initial``, and returns ``later`` instead of its state after the first batch."""

    def __init__(self, initial: Any, later: Any = None) -> None:
        self.initial, self.later, self.calls = initial, later, 0

    def initial_state(self, agent_info: Any, B: int) -> Any:
        return self.initial

    def __call__(self, state: Any, *arguments: Any) -> Any:
        self.calls += 1
        action, _ = super().__call__(state, *arguments)
        return action, (self.later if self.calls > 4 else state)


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize("state", [None, {"memory": torch.zeros(2)}])
def test_an_initial_state_of_another_form_is_named(state: Any, n_processes: int) -> None:
    words = rf"in agent,.* agent\.initial_state: state is a {type(state).__name__}, expected a DictTensor\. Return Dict"
    settings: dict[str, Any] = {"agent_args": {"initial": state}, "env_args": {"n_envs": 2}}
    with (
        RL_Batcher(4, Remembering, create_cartpole, n_processes=n_processes, **settings) as batcher,
        pytest.raises(WorkerError, match=words),
    ):
        first_batch(batcher)


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize(
    ("later", "words"),
    [
        (None, r"step 3: .* Remembering\.__call__: returned \(DictTensor, NoneType\), expected the pair"),
        (DictTensor({"a": torch.zeros(2, 3)}), r"step 3: .* agent: state 'a' is \[2, 3\] .*, expected \[2\] "),
    ],
)
def test_a_state_of_another_form_is_named_in_the_batch_that_it_ends(later: Any, words: str, n_processes: int) -> None:
    agent_args = {"initial": DictTensor({"a": torch.zeros(2)}), "later": later}
    env_args = {"n_envs": 2}
    with RL_Batcher(
        4, Remembering, create_cartpole, agent_args=agent_args, env_args=env_args, n_processes=n_processes
    ) as batcher:
        first_batch(batcher)
        batcher.execute()
        with pytest.raises(WorkerError, match=rf"in agent, environments 0 to 1, .*{words}"):
            batcher.get()


class Bare(EnvWrapper):
    """Returns its first observation as a dict."""

    def reset(self, env_info: Any = None) -> Any:
        observation, running = self.env.reset(env_info)
        return dict(observation.items()), running


def create_bare(seed: int) -> VecEnv:
    return Bare(create_cartpole(2, seed))


@pytest.mark.parametrize("n_processes", [0, 1])
def test_a_first_observation_of_another_form_is_named(n_processes: int) -> None:
    words = r"in environment\.reset, .* observation is a dict, expected a DictTensor"
    with (
        RL_Batcher(4, GlobalRandomAgent, create_bare, n_processes=n_processes) as batcher,
        pytest.raises(WorkerError, match=words),
    ):
        first_batch(batcher)


@pytest.mark.parametrize("n_processes", [0, 1])
def test_an_agent_or_environment_where_a_factory_belongs_is_refused(n_processes: int) -> None:
    with pytest.raises(TypeError, match=r"create_agent is a Global.* pass the function that.* in agent_args"):
        RL_Batcher(4, GlobalRandomAgent(), create_cartpole, n_processes=n_processes)  # type: ignore[arg-type]
    env = create_cartpole(n_envs=1, seed=0)
    with pytest.raises(TypeError, match=r"create_env is a GymEnvInf, .* pass the function that.* in env_args"):
        RL_Batcher(4, GlobalRandomAgent, env, n_processes=n_processes)  # type: ignore[arg-type]
