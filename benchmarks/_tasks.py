"""The tasks of benchmarks/learn.py by name: environments, networks, settings. Layer 5.

The settings are those of `rlstruct.algos.presets`, as far as an environment by that name has some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import gymnasium
import torch
from _learning import Task
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct import DictTensor, VecEnv, sims
from rlstruct.adapters import JaxEnv, MujocoWarpEnv
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalActorCritic,
    GaussianActorCritic,
    GaussianAgent,
    Normalised,
    QAgent,
    QNetwork,
    RecurrentActorCritic,
    RecurrentAgent,
    SoftActorCritic,
    SquashedGaussianAgent,
    StackingAgent,
)
from rlstruct.algos import a2c, dqn, ppo, reinforce, sac
from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.config import TrainingConfig
from rlstruct.algos.evaluation import TrainingResult
from rlstruct.algos.ppo import PPOConfig
from rlstruct.algos.presets import PRESETS
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.functional.random import uniform

Config = TypeVar("Config", bound=TrainingConfig)


def simulator(name: str, n_envs: int, seed: int, auto_reset: bool = True) -> VecEnv:
    """Make environments of `rlstruct.sims`."""
    return sims.make(name, n_envs, seed, auto_reset=auto_reset)


def vectorised(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make gymnasium's own vectorised environments."""
    return GymVectorEnv(gymnasium.make_vec(name, n_envs, vectorization_mode="vector_entry_point"), seed=seed)


def one_by_one(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make gymnasium environments that are stepped one after the other."""
    return GymEnvInf([gymnasium.make(name) for _ in range(n_envs)], seed=seed)


def episodic(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make gymnasium environments that wait for a reset after their episode."""
    return GymEnv([gymnasium.make(name) for _ in range(n_envs)], seed=seed)


class HiddenVelocities(sims.CartPole):
    """CartPole that shows the position of the cart and the angle of the pole, and not how fast they change."""

    def __init__(self, n_envs: int, seed: int = 0) -> None:
        super().__init__(n_envs, seed)
        shown = self.observation_space
        if not isinstance(shown, spaces.Box):
            raise TypeError(f"HiddenVelocities: CartPole shows a {type(shown).__name__}, expected a Box.")
        self.observation_space = spaces.Box(shown.low[::2], shown.high[::2])

    def observe(self, state: sims.CartPoleState) -> Tensor:
        return sims.columns(state.x, state.theta)


def _task(
    train: Callable[..., TrainingResult],
    config: Config,
    create_model: Callable[[], nn.Module],
    create_agent: Callable[..., Any],
    create_env: Callable[..., VecEnv],
    target: float,
    about: str,
    *,
    episodes: int = 100,
    **of_task: Any,  # noqa: ANN401 - of Task
) -> Task:
    # Evaluations are made between the updates of one process, so that seconds mean the same everywhere.
    config = replace(config, evaluation_processes=0, evaluation_episodes=episodes)
    return Task(partial(_train, train, config, create_model, create_agent, create_env), target, about, **of_task)


def _train(
    train: Callable[..., TrainingResult],
    config: TrainingConfig,
    create_model: Callable[[], nn.Module],
    create_agent: Callable[..., Any],
    create_env: Callable[..., VecEnv],
    *,
    seed: int,
    **settings: Any,  # noqa: ANN401 - of the configuration
) -> TrainingResult:
    return train(replace(config, seed=seed, **settings), create_model, create_agent, create_env)


def _tuned(algorithm: str, env: str) -> TrainingConfig:
    """The settings that ``rlstruct train`` begins with, too."""
    return PRESETS[algorithm, env].config


def _network(algorithm: str, env: str, kind: Callable[..., nn.Module], *sizes: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    return partial(kind, *sizes, **PRESETS[algorithm, env].network)


def pooled(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make environments of EnvPool, which is an extra and has LunarLander without Box2D's own wheels."""
    import envpool

    return GymVectorEnv(envpool.make(name, env_type="gymnasium", num_envs=n_envs, seed=seed), seed=seed)


def functional(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make gymnax's environments, which are functions in JAX."""
    import gymnax

    env, params = gymnax.make(name)
    return JaxEnv(env, n_envs, seed, params=params)


def playground(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make environments of MuJoCo Playground, functions in JAX whose episodes get a limit of 1,000 steps."""
    from mujoco_playground import registry

    return JaxEnv(registry.load(name, config_overrides={"impl": "jax"}), n_envs, seed, time_limit=1_000)


class Balance:
    """A pole to keep up on a cart in MuJoCo Warp: reward 1 for each step until either leaves the middle."""

    xml = """
        <mujoco><option timestep="0.02"><flag contact="disable"/></option><worldbody>
          <body><joint name="slider" type="slide" axis="1 0 0"/><geom type="box" size="0.2 0.1 0.1" mass="1"/>
            <body><joint name="hinge" type="hinge" axis="0 1 0"/>
              <geom type="capsule" fromto="0 0 0 0 0 1" size="0.05" mass="0.1"/></body></body></worldbody>
          <actuator><motor joint="slider" gear="10" ctrllimited="true" ctrlrange="-1 1"/></actuator></mujoco>"""
    observation_space = spaces.Box(-float("inf"), float("inf"), (4,))

    def start(self, key: Tensor, qpos: Tensor, qvel: Tensor) -> tuple[Tensor, Tensor]:
        noise = uniform(key, (4,)) * 0.1 - 0.05
        return qpos + noise[:, :2], qvel + noise[:, 2:]

    def observe(self, qpos: Tensor, qvel: Tensor) -> Tensor:
        return torch.cat([qpos, qvel], dim=1)

    def judge(self, qpos: Tensor, qvel: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(qpos[:, 0]), (qpos[:, 1].abs() > 0.2) | (qpos[:, 0].abs() > 2.4)


def worlds(n_envs: int, seed: int) -> VecEnv:
    """Make worlds of MuJoCo Warp, whose episodes get a limit of 500 steps."""
    import mujoco

    return MujocoWarpEnv(mujoco.MjModel.from_xml_string(Balance.xml), Balance(), n_envs, seed, time_limit=500)


def muscles(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make MuJoCo's environments of gymnasium, which get actions as far as they have bounds."""
    return GymEnvInf([gymnasium.wrappers.ClipAction(gymnasium.make(name)) for _ in range(n_envs)], seed=seed)


def normalised(kind: Callable[..., nn.Module], n_inputs: int, *sizes: Any, discount: float = 0.99) -> nn.Module:  # noqa: ANN401
    """Make a network that sees normalised frames, and whose learner sees scaled rewards."""
    return Normalised(kind(n_inputs, *sizes), (n_inputs,), discount=discount)


def at_random(create_env: Callable[..., VecEnv], n_episodes: int, seed: int) -> list[float]:
    """Play whole episodes with random actions."""
    env, actions = create_env(n_envs=n_episodes, seed=seed), torch.Generator().manual_seed(seed)
    env.reset()
    returns, running = torch.zeros(n_episodes), torch.ones(n_episodes, dtype=torch.bool)
    while running.any():
        chosen = torch.randint(int(env.action_space.n), (n_episodes,), generator=actions)
        (reached, _), _ = env.step(DictTensor({"action": chosen}))
        returns += torch.where(running, reached["reward"], 0.0)
        running &= ~reached["done"]
    return returns.tolist()


_A2C, _DQN, _PPO = partial(_task, a2c.train), partial(_task, dqn.train), partial(_task, ppo.train)
_LUNAR_LANDER = partial(one_by_one, "LunarLander-v3")
_MEMORY = A2CConfig(
    n_env_steps=1_000_000, n_envs=64, n_timesteps=32, learning_rate=0.004, trace_decay=0.95, max_gradient_norm=0.5,
    entropy_coefficient=0.001, whiten_advantages=True, evaluation_interval=100_000,
)  # fmt: skip

TASKS: dict[str, Task] = {
    "reinforce_cartpole": _task(
        reinforce.train, replace(_tuned("reinforce", "CartPole-v1"), n_processes=0, n_envs=16),  # not in two processes
        partial(ActorCritic, 4, 2), ActorCriticAgent,
        partial(episodic, "CartPole-v1"), 475.0, "REINFORCE on CartPole-v1", n_seeds=10, tuned_on=(0, 1, 2),
    ),
    "a2c_cartpole": _A2C(
        _tuned("a2c", "CartPole-v1"), partial(ActorCritic, 4, 2), ActorCriticAgent,
        partial(vectorised, "CartPole-v1"), 475.0, "A2C on CartPole-v1", n_seeds=10,
        tuned_on=(0, 1, 2, 3, 5, 7),
    ),
    "a2c_cartpole_python": _A2C(
        _tuned("a2c", "CartPole-v1"), partial(ActorCritic, 4, 2), ActorCriticAgent,
        partial(one_by_one, "CartPole-v1"), 475.0, "the same, gymnasium's Python environments one by one",
        tuned_on=(0, 1, 2, 3, 5, 7),
    ),
    "dqn_cartpole_python": _DQN(
        _tuned("dqn", "CartPole-v1"), partial(QNetwork, 4, 2, duelling=True), QAgent,
        partial(one_by_one, "CartPole-v1"), 475.0, "the same, gymnasium's Python environments one by one",
        tuned_on=(0, 1, 3),
    ),
    "a2c_cartpole_1024": _A2C(
        _tuned("a2c", "CartPole-v1-1024"),
        partial(ActorCritic, 4, 2), ActorCriticAgent,
        partial(simulator, "CartPole-v1"), 475.0, "A2C on 1,024 simulators of CartPole-v1", n_seeds=10,
        tuned_on=tuple(range(100, 116)),
    ),
    "dqn_cartpole": _DQN(
        _tuned("dqn", "CartPole-v1"), partial(QNetwork, 4, 2, duelling=True), QAgent,
        partial(vectorised, "CartPole-v1"), 475.0, "DQN on CartPole-v1", n_seeds=10, tuned_on=(0, 1, 3),
    ),
    "a2c_acrobot": _A2C(
        _tuned("a2c", "Acrobot-v1"), partial(ActorCritic, 6, 3), ActorCriticAgent,
        partial(simulator, "Acrobot-v1"), -90.0, "A2C on Acrobot-v1",
    ),
    "dqn_acrobot": _DQN(
        _tuned("dqn", "Acrobot-v1"), partial(QNetwork, 6, 3, duelling=True), QAgent,
        partial(simulator, "Acrobot-v1"), -90.0, "DQN on Acrobot-v1", tuned_on=(),
    ),
    "a2c_pendulum": _A2C(
        _tuned("a2c", "Pendulum-v1"), _network("a2c", "Pendulum-v1", GaussianActorCritic, 3, 1), GaussianAgent,
        # The pendulum clips its torque to [-2, 2] itself; others want gymnasium.wrappers.ClipAction.
        partial(simulator, "Pendulum-v1"), -250.0, "A2C with Gaussian actions on Pendulum-v1", tuned_on=(0, 1),
    ),
    "sac_pendulum": _task(
        sac.train, _tuned("sac", "Pendulum-v1"),
        _network("sac", "Pendulum-v1", SoftActorCritic, 3, (-2.0,), (2.0,)), SquashedGaussianAgent,
        partial(simulator, "Pendulum-v1"), -200.0, "SAC on Pendulum-v1", tuned_on=(100, 101),
    ),
    "reinforce_pendulum": _task(
        reinforce.train, _tuned("reinforce", "Pendulum-v1"),
        _network("reinforce", "Pendulum-v1", GaussianActorCritic, 3, 1), GaussianAgent,
        partial(simulator, "Pendulum-v1", auto_reset=False), -250.0,
        "REINFORCE with Gaussian actions on Pendulum-v1", tuned_on=(0,),
    ),
    "a2c_memory": _A2C(
        _MEMORY, partial(RecurrentActorCritic, 2, 2), RecurrentAgent,
        HiddenVelocities, 400.0, "A2C with a recurrent agent on CartPole-v1 without velocities",
    ),
    "a2c_no_memory": _A2C(
        _MEMORY, partial(ActorCritic, 2, 2), ActorCriticAgent,
        HiddenVelocities, 150.0, "A2C without memory there, which should stay below", tuned_on=(),
    ),
    "a2c_lunar_lander": _A2C(
        _tuned("a2c", "LunarLander-v3"), partial(ActorCritic, 8, 4), ActorCriticAgent,
        _LUNAR_LANDER, 150.0, "A2C on LunarLander-v3", episodes=50, tuned_on=(0, 1, 2),
    ),
    "dqn_lunar_lander": _DQN(
        _tuned("dqn", "LunarLander-v3"), partial(QNetwork, 8, 4, duelling=True), QAgent,
        _LUNAR_LANDER, 100.0, "DQN on LunarLander-v3", episodes=50, tuned_on=(),
    ),
    "a2c_breakout": _A2C(
        _tuned("a2c", "Breakout-MinAtar"), _network("a2c", "Breakout-MinAtar", ActorCritic, 400, 3), ActorCriticAgent,
        partial(simulator, "Breakout-MinAtar"), 10.0, "A2C on MinAtar's Breakout",
    ),
    "dqn_breakout": _DQN(
        _tuned("dqn", "Breakout-MinAtar"),
        _network("dqn", "Breakout-MinAtar", partial(QNetwork, duelling=True), 400, 3), QAgent,
        partial(simulator, "Breakout-MinAtar"), 10.0, "DQN on MinAtar's Breakout",
    ),
    "ppo_cartpole": _PPO(
        _tuned("ppo", "CartPole-v1"), partial(ActorCritic, 4, 2), ActorCriticAgent,
        partial(vectorised, "CartPole-v1"), 490.0, "PPO on CartPole-v1", n_seeds=10, tuned_on=(100, 101, 102),
    ),
    "ppo_cartpole_python": _PPO(
        PPOConfig(
            n_env_steps=100_000, n_envs=16, n_timesteps=64, n_minibatches=2, n_epochs=8, learning_rate=0.01,
            entropy_coefficient=0.0, value_clip=None, evaluation_interval=2_500,
        ),
        partial(ActorCritic, 4, 2), ActorCriticAgent,
        partial(one_by_one, "CartPole-v1"), 475.0, "PPO in a hurry on gymnasium's Python CartPole-v1",
        tuned_on=(100, 101, 102, 103, 104),
    ),
    "ppo_cartpole_1024": _PPO(
        PPOConfig(
            n_env_steps=1_000_000, n_envs=1024, n_timesteps=16, n_minibatches=16, learning_rate=0.005,
            entropy_coefficient=0.0, value_clip=None, evaluation_interval=16_000,
        ),
        partial(ActorCritic, 4, 2), ActorCriticAgent,
        partial(simulator, "CartPole-v1"), 475.0, "PPO on 1,024 simulators of CartPole-v1", tuned_on=(100, 101),
    ),
    "ppo_acrobot": _PPO(
        _tuned("ppo", "Acrobot-v1"), partial(ActorCritic, 6, 3), ActorCriticAgent,
        partial(simulator, "Acrobot-v1"), -86.0, "PPO on Acrobot-v1", n_seeds=5, tuned_on=(100, 101),
    ),
    "ppo_pendulum": _PPO(
        _tuned("ppo", "Pendulum-v1"), _network("ppo", "Pendulum-v1", GaussianActorCritic, 3, 1), GaussianAgent,
        partial(simulator, "Pendulum-v1"), -200.0, "PPO with Gaussian actions on Pendulum-v1", n_seeds=5,
        tuned_on=(100,),
    ),
    "ppo_lunar_lander": _PPO(
        _tuned("ppo", "LunarLander-v3"), partial(ActorCritic, 8, 4), ActorCriticAgent,
        partial(pooled, "LunarLander-v3"), 200.0, "PPO on EnvPool's LunarLander-v3", episodes=50,
        tuned_on=(100, 101),
    ),
    "ppo_memory": _PPO(
        _tuned("ppo", "CartPole-v1-recurrent"),
        partial(RecurrentActorCritic, 2, 2), RecurrentAgent,
        HiddenVelocities, 450.0, "PPO with a recurrent agent on CartPole-v1 without velocities",
        tuned_on=(100, 101),
    ),
}  # fmt: skip

# What is asked is what https://docs.cleanrl.dev/rl-algorithms/ppo/ prints for version 4 of the environments.
TASKS |= {
    f"ppo_{name.lower()}": _PPO(
        replace(_tuned("ppo", f"{name}-v5"), compile_update=True),
        partial(normalised, GaussianActorCritic, n_inputs, n_actions), GaussianAgent,
        partial(muscles, f"{name}-v5"), target, f"PPO on {name}-v5", episodes=10,
        tuned_on=(),
    )
    for name, n_inputs, n_actions, target in (
        ("HalfCheetah", 17, 6, 1443.0), ("Hopper", 11, 3, 2383.0), ("Walker2d", 17, 6, 2288.0),
    )
}  # fmt: skip

# Actions of half a second: a player at random crosses the road now and then, so that there is something to learn from.
_FREEWAY = partial(sims.make, "ALE/Freeway-v5", frame_skip=32, stack=1)
TASKS["ppo_atari_freeway"] = _PPO(
    PPOConfig(
        n_env_steps=6_144, n_envs=16, n_timesteps=64, n_minibatches=8, learning_rate=0.0005, reward_scale=1.0,
        evaluation_interval=2_048,
    ),
    partial(ConvolutionalActorCritic, (4, 84, 84), 3, n_features=256, layers=((16, 8, 4), (32, 4, 2))),
    partial(StackingAgent.create, create_agent=ActorCriticAgent, shape=(4, 84, 84)),
    _FREEWAY, 10.0, "PPO on Atari's Freeway, an action every 32 frames", episodes=16,
    tuned_on=(200,), at_random=partial(at_random, _FREEWAY, 32),
)  # fmt: skip

# All three algorithms with as many steps, to the end, and with the settings that were chosen on Breakout.
_GAMES = {
    "Breakout": (400, 3), "Asterix": (400, 5), "Freeway": (700, 3), "SpaceInvaders": (600, 4), "Seaquest": (1000, 6),
}  # fmt: skip
# A greedy player of Seaquest may stay at the surface for ever: an evaluation ends all episodes after 2,500 steps.
_MINATAR = {
    "n_env_steps": 300_000, "evaluation_interval": 30_000, "evaluation_step_limit": 2_500, "target_return": None,
}  # fmt: skip
for _name, _sizes in _GAMES.items():
    for _algorithm, _make, _kind, _agent in (
        ("ppo", _PPO, ActorCritic, ActorCriticAgent), ("a2c", _A2C, ActorCritic, ActorCriticAgent),
        ("dqn", _DQN, partial(QNetwork, duelling=True), QAgent),
    ):  # fmt: skip
        TASKS[f"{_algorithm}_minatar_{_name.lower()}"] = _make(
            replace(_tuned(_algorithm, "Breakout-MinAtar"), **_MINATAR),
            _network(_algorithm, "Breakout-MinAtar", _kind, *_sizes), _agent,
            partial(simulator, f"{_name}-MinAtar"), None, f"{_algorithm.upper()} on MinAtar's {_name}",
        )  # fmt: skip
TASKS["ppo_gymnax_breakout"] = _PPO(
    replace(_tuned("ppo", "Breakout-MinAtar"), **_MINATAR),
    _network("ppo", "Breakout-MinAtar", ActorCritic, *_GAMES["Breakout"]), ActorCriticAgent,
    partial(functional, "Breakout-MinAtar"), 5.0, "PPO on gymnax's Breakout-MinAtar", tuned_on=(),
)  # fmt: skip
# gymnax's rules: no action sticks, and episodes end after 1,000 steps.
TASKS["ppo_minatar_breakout_plain"] = _PPO(
    replace(_tuned("ppo", "Breakout-MinAtar"), **_MINATAR),
    _network("ppo", "Breakout-MinAtar", ActorCritic, *_GAMES["Breakout"]), ActorCriticAgent,
    partial(sims.make, "Breakout-MinAtar", auto_reset=True, sticky_probability=0.0, time_limit=1_000), None,
    "PPO on MinAtar's Breakout with gymnax's rules", tuned_on=(),
)  # fmt: skip
TASKS["ppo_cartpole_balance"] = _PPO(
    PPOConfig(
        n_env_steps=300_000, n_envs=64, n_timesteps=64, n_epochs=10, n_minibatches=8, discount=0.995, reward_scale=0.1,
        learning_rate=0.001, value_clip=None, entropy_coefficient=0.0, evaluation_interval=50_000,
        evaluation_timesteps=1_000, evaluation_episodes=16, evaluation_processes=0, evaluation_stochastic=False,
    ),
    partial(GaussianActorCritic, 5, 1), GaussianAgent,
    partial(playground, "CartpoleBalance"), 900.0, "PPO on MuJoCo Playground's CartpoleBalance", tuned_on=(100,),
)  # fmt: skip
TASKS["ppo_mujoco_warp"] = _PPO(
    PPOConfig(
        n_env_steps=163_840, n_envs=64, n_timesteps=32, n_minibatches=4, discount=0.98, reward_scale=0.1,
        learning_rate=0.003, value_clip=None, entropy_coefficient=0.0, evaluation_interval=16_384,
        evaluation_timesteps=500,
    ),
    partial(GaussianActorCritic, 4, 1), GaussianAgent,
    worlds, 475.0, "PPO on a cart and pole of MuJoCo Warp", episodes=16, tuned_on=(100,),
)  # fmt: skip
