"""Observations are written once, straight into the batch: what that must not change."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from batcher_fakes import NextStepCounting
from fake_agents import RngAgent

from rlstruct import DictTensor, RL_Agent, VecEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.errors import WorkerError
from rlstruct.vec_env import EnvWrapper


def create_env(seed: int, n_envs: int = 3, auto_reset: bool = True, wrapped: bool = False) -> VecEnv:
    make = GymEnvInf if auto_reset else GymEnv
    env = make([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed=seed)
    return Doubled(env) if wrapped else env


class Doubled(EnvWrapper):
    """Has no step_into, and says nothing of restarts: a plain pair, as users write it."""

    def step(self, action: DictTensor) -> Any:
        reached, current = self.env.step(action)
        return reached, current


class Remembering(RL_Agent):
    """Its state is observations, uncopied: the one at the last reset of the batcher, and the last three."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        frame = observation["frame"]
        first = frame if state["n"][0] == 0 else state["first"]
        seen = {"first": first, "1": frame, "2": state["1"], "3": state["2"], "n": state["n"] + 1}
        action = (frame[:, 2] > 0).to(torch.int64)
        return DictTensor({"action": action, **{f"seen_{key}": value for key, value in state.items()}}), DictTensor(
            seen
        )

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        frames = {key: torch.zeros(B, 4) for key in ("first", "1", "2", "3")}
        return DictTensor({**frames, "n": torch.zeros(B, dtype=torch.int64)})


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_states_that_hold_observations_and_every_key_are_as_with_copies(T: int, auto_reset: bool) -> None:
    batches: list[list[dict[str, torch.Tensor]]] = [[], []]
    for wrapped, found in zip((False, True), batches, strict=True):
        env_args = {"auto_reset": auto_reset, "wrapped": wrapped}
        with RL_Batcher(T, Remembering, create_env, env_args=env_args, seed=0) as batcher:
            batcher.reset()
            n_running: int | None = 1
            while n_running and len(found) < 20:
                batcher.execute()
                batch, n_running = batcher.get()
                assert batch is not None
                found.append({**dict(batch.info.items()), **dict(batch.steps.items()), "lengths": batch.lengths})
    assert len(batches[0]) == len(batches[1]) > 2
    for ours, plain in zip(*batches, strict=True):
        assert ours.keys() == plain.keys()
        for key, value in plain.items():
            assert torch.equal(ours[key], value), key
    if auto_reset:
        first = torch.cat([batch["action/seen_first"] for batch in batches[0]], 1)[:, 1:]
        start = batches[0][0]["observation/frame"][:, :1]
        assert torch.equal(first, start.expand_as(first))


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_plain_pair_is_as_good_where_restarts_take_steps(auto_reset: bool) -> None:
    batches: list[list[Any]] = [[], []]
    for plain, found in zip((False, True), batches, strict=True):

        def create(seed: int, plain: bool = plain) -> VecEnv:
            env = GymVectorEnv(NextStepCounting(3), seed, episodic=not auto_reset)
            return Doubled(env) if plain else env

        with RL_Batcher(7, RngAgent, create, seed=0) as batcher:
            batcher.reset()
            n_running: int | None = 1
            while n_running and len(found) < 6:
                batcher.execute()
                batch, n_running = batcher.get()
                assert batch is not None
                found.append({**dict(batch.info.items()), **dict(batch.steps.items()), "lengths": batch.lengths})
    for ours, theirs in zip(*batches, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key


class Writing(Remembering):
    """Changes what it sees, at the third step."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        if state["n"][0] == 2:
            observation["frame"].mul_(2.0)
        return super().__call__(state, observation, agent_info, history)


def test_an_agent_that_changes_an_observation_in_place_is_told_to_copy_it() -> None:
    with RL_Batcher(4, Writing, create_env, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(WorkerError, match=r"modified observation 'frame' in place.*observation\['frame'\]\.clone"):
            batcher.get()
