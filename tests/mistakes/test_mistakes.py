"""Mistakes that people make with a library like this one, and the answers they get: mistakes.txt, to be read.

Every message says where it happened, which key, what was found, what was expected, and the fix. After changing one on
purpose, write the page anew with ``RLSTRUCT_WRITE=1 pytest tests/mistakes`` and read what git shows.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fake_agents import RngAgent
from gymnasium import spaces

from rlstruct import DeviceEnv, DictTensor, RL_Agent, TemporalDictTensor, Trajectories, VecEnv, sims
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import a2c, dqn, ppo
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.functional.random import categorical

PAGE = Path(__file__).with_name("mistakes.txt")


class MyAgent(RL_Agent):
    """The agent of the README, whose answer a mistake changes."""

    def __init__(self, answer: Callable[[dict[str, torch.Tensor]], Any] = DictTensor, n_features: int = 4) -> None:
        self.model = torch.nn.Linear(n_features, 2)
        self.answer = answer

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        logits = self.model(observation["frame"])
        action = {"action": categorical(logits, observation["rng"]), "logits": logits}
        answer = self.answer(action)
        return (answer, state) if isinstance(answer, DictTensor) else answer

    def update(self, info: Any) -> None:
        self.model.load_state_dict(info)


class Asking(MyAgent):
    """Asks for its epsilon."""

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        return super().__call__(state, observation, agent_info["epsilon"])


class Counting(MyAgent):
    """Counts its calls in a state, whose keys and dtypes it changes."""

    def __init__(self, change: Callable[[DictTensor], DictTensor]) -> None:
        super().__init__()
        self.change = change

    def initial_state(self, agent_info: Any, B: int) -> DictTensor:
        return DictTensor({"memory": torch.zeros(B, 3)})

    def __call__(self, state: Any, *arguments: Any) -> Any:
        action, _ = super().__call__(state, *arguments)
        return action, self.change(state)


class Arm(gymnasium.Env[Any, Any]):
    """An environment of one's own, whose frames, rewards and ends a mistake changes."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any = None, frame: Any = (0.0, 0.0), reward: Any = 1.0, error: str = "") -> None:
        self.observation_space = space or spaces.Box(-1, 1, (2,), np.float32)
        self.frame, self.reward, self.error = frame, reward, error

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.error:
            raise ValueError(self.error)
        return np.asarray(self.frame, np.float32), self.reward, False, False, {}


def create_cartpole(n_envs: int, seed: int, kind: Any = GymEnvInf) -> VecEnv:
    return kind([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def cartpole(create_agent: Any = MyAgent, n_batches: int = 1, **settings: Any) -> None:
    """Collect from CartPole-v1 with four environments, as the README does it."""
    with make(create_agent, **settings) as batcher:
        batcher.reset()
        for _ in range(n_batches):
            batcher.execute()
            batcher.get()


def make(create_agent: Any = MyAgent, create_env: Any = create_cartpole, **settings: Any) -> RL_Batcher:
    return RL_Batcher(5, create_agent, create_env, **{"env_args": {"n_envs": 4}, "seed": 0, **settings})


def arm(second: Callable[[], gymnasium.Env[Any, Any]]) -> None:
    """Collect from two arms, of which the second one has the mistake."""

    def create_env(seed: int) -> VecEnv:
        return GymEnvInf([Arm(), second()], seed)

    cartpole(lambda: MyAgent(n_features=2), create_env=create_env, env_args={})


def after(*calls: str) -> None:
    """Call methods of a new batcher in this order."""
    with make() as batcher:
        for call in calls:
            getattr(batcher, call)()


def closed() -> None:
    batcher = make()
    batcher.close()
    batcher.reset()


def reset_with(**infos: DictTensor) -> None:
    with make() as batcher:
        batcher.reset(**infos)


def load_state_of(name: str) -> None:
    """Go on with CartPole from a checkpoint of another simulator."""

    def batcher_of(name: str) -> RL_Batcher:
        return make(RngAgent, lambda n_envs, seed: sims.make(name, n_envs, seed))

    with batcher_of(name) as saved, batcher_of("CartPole-v1") as batcher:
        saved.reset()
        batcher.load_state_dict(saved.state_dict())


def update_with(weights: Any) -> None:
    with make() as batcher:
        batcher.update(weights)


def train(module: Any, config: Any, create_agent: Any) -> None:
    """Train a network of actor and critic for a moment."""
    module.train(config, lambda: ActorCritic(n_inputs=4, n_actions=2), create_agent, create_cartpole)


def on_sim(env_too: bool, agent_too: bool) -> None:
    def create_agent() -> RL_Agent:
        agent = MyAgent()
        agent.model.to("sim:1" if agent_too else "cpu")
        return agent

    def create_env(n_envs: int, seed: int) -> VecEnv:
        return DeviceEnv(create_cartpole(n_envs, seed), "sim:1") if env_too else create_cartpole(n_envs, seed)

    cartpole(create_agent, create_env=create_env, device="sim:1")


def changing(key: str, form: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], RL_Agent]:
    """An agent that gives one of its outputs another form from its sixth call on."""
    calls = []

    def answer(action: dict[str, torch.Tensor]) -> DictTensor:
        calls.append(1)
        return DictTensor({**action, key: form(action[key])} if len(calls) > 5 else action)

    return lambda: MyAgent(answer)


def two_steps() -> TemporalDictTensor:
    return TemporalDictTensor({"reward": torch.zeros(3, 2)})


SHORT: dict[str, Any] = {
    "n_env_steps": 16, "n_envs": 2, "n_timesteps": 8, "evaluation_processes": 0, "evaluation_episodes": 2
}  # fmt: skip
NAMED = spaces.Dict({"joints": spaces.Box(-1, 1, (2,)), "goal": spaces.Dict({"words": spaces.Text(9)})})
GRAPH = spaces.Dict({"map": spaces.Graph(spaces.Box(-1, 1, (2,)), None)})

MISTAKES: dict[str, Callable[[], object]] = {
    "An agent instead of a function that creates one": lambda: make(MyAgent()),
    "A gymnasium environment instead of a function that creates a VecEnv": lambda: make(
        create_env=gymnasium.make("CartPole-v1")
    ),
    "create_env takes no seed": lambda: make(create_env=lambda n_envs: create_cartpole(n_envs, 0)),
    "create_env returns a gymnasium environment": lambda: make(create_env=lambda n_envs, seed: Arm()),
    "create_agent returns the network": lambda: make(lambda: torch.nn.Linear(4, 2)),
    "Something that cannot travel to worker processes": lambda: make(
        agent_args={"answer": threading.Lock()}, n_processes=2
    ),
    "The network expects other frames": lambda: cartpole(lambda: MyAgent(n_features=3)),
    "The agent returns its action alone": lambda: cartpole(lambda: MyAgent(lambda action: action["action"])),
    "The agent forgets environments": lambda: cartpole(lambda: MyAgent(lambda a: DictTensor(a).slice(0, 2))),
    "The action has another name": lambda: cartpole(lambda: MyAgent(lambda a: DictTensor({"act": a["action"]}))),
    "The action is the logits": lambda: cartpole(lambda: MyAgent(lambda a: DictTensor({"action": a["logits"]}))),
    "Two outputs of the agent differ in B": lambda: cartpole(
        lambda: MyAgent(lambda a: DictTensor({**a, "value": torch.zeros(1)}))
    ),
    "An output changes its dtype": lambda: cartpole(changing("logits", torch.Tensor.double), 2),
    "The state changes its keys": lambda: cartpole(lambda: Counting(lambda state: state.prepend_key("new_")), 2),
    "The state changes its shape": lambda: cartpole(lambda: Counting(lambda s: s.map(lambda v: v.repeat(1, 2))), 2),
    "The network stayed on the CPU": lambda: on_sim(env_too=True, agent_too=False),
    "The environment stayed on the CPU": lambda: on_sim(env_too=False, agent_too=True),
    "A device that is not there": lambda: make(device="cuda:99"),
    "An action that the environment does not know": lambda: cartpole(
        lambda: MyAgent(lambda a: DictTensor({"action": torch.full_like(a["action"], 5)}))
    ),
    "A frame of another shape than the space says": lambda: arm(lambda: Arm(frame=(0.0, 0.0, 0.0))),
    "A reward that is not one number": lambda: arm(lambda: Arm(reward=np.zeros(2))),
    "An environment raises": lambda: arm(lambda: Arm(error="the arm has left the table")),
    "Environments with different spaces": lambda: arm(lambda: Arm(spaces.Box(-1, 1, (3,), np.float32))),
    "A space without a fixed shape": lambda: GymEnvInf([Arm(NAMED)], 0),
    "A space that is a graph": lambda: GymEnv([Arm(GRAPH)], 0),
    "execute before reset": lambda: after("execute"),
    "get before execute": lambda: after("reset", "get"),
    "execute twice": lambda: after("reset", "execute", "execute"),
    "Use after close": closed,
    "Settings for another number of environments": lambda: reset_with(
        agent_info=DictTensor({"epsilon": torch.zeros(3)})
    ),
    "Settings on the accelerator": lambda: reset_with(
        agent_info=DictTensor({"epsilon": torch.zeros(4, device="sim:1")})
    ),
    "Weights of another network": lambda: update_with(torch.nn.Linear(4, 3).state_dict()),
    "Weights that are not tensors": lambda: update_with({"weight": [[0.0]], "bias": [0.0]}),
    "An agent_info that the agent expects, and does not get": lambda: cartpole(Asking),
    "The configuration of another algorithm": lambda: train(a2c, ppo.PPOConfig(**SHORT), ActorCriticAgent),
    "A factory that does not take what a training passes": lambda: train(
        a2c, a2c.A2CConfig(**SHORT), lambda model: ActorCriticAgent(model)
    ),
    "An agent without values for DQN": lambda: train(dqn, dqn.DQNConfig(**SHORT, learning_starts=0), ActorCriticAgent),
    "A checkpoint of other environments": lambda: load_state_of("Acrobot-v1"),
    "Tensors that differ in B": lambda: DictTensor({"frame": torch.zeros(4, 2), "reward": torch.zeros(3)}),
    "A misspelt key": lambda: DictTensor({"frame": torch.zeros(4, 2)})["frames"],
    "A time that does not exist": lambda: two_steps().temporal_index(2),
    "Trajectories whose info has other rows": lambda: Trajectories(DictTensor({"e": torch.zeros(2)}), two_steps()),
    "Lengths beyond the last step": lambda: TemporalDictTensor({"reward": torch.zeros(2, 3)}, torch.tensor([3, 4])),
}


def shown(title: str) -> str:
    """Return the answer to a mistake as the page shows it: without numbers and paths that differ between machines."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, the page shows it
        MISTAKES[title]()
    text = str(caught.value).strip()
    for pattern, word in (
        (r"pid \d+", "pid …"),
        (r"0x[0-9a-f]+", "0x…"),
        (r"<function .*?>", "<function …>"),
        (r"/\S*/(\w+\.py:)\d+", r"\1…"),
    ):
        text = re.sub(pattern, word, text)
    return f"{type(caught.value).__name__}: {text}"


def test_what_people_are_told() -> None:
    sections = [f"{number}. {title}\n\n{shown(title)}\n" for number, title in enumerate(MISTAKES, 1)]
    page = "\n\n".join(sections)
    if os.environ.get("RLSTRUCT_WRITE"):
        PAGE.write_text(page)
    assert page == PAGE.read_text()
