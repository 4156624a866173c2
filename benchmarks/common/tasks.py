"""The tasks of benchmarks/learn.py by name: environments, networks, settings. Layer 5.

The settings are those of `rlstruct.algos.training.presets`, as far as an environment by that name has some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import torch
from common.learning import Task
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct import VecEnv, agents, sims
from rlstruct.adapters import JaxEnv, MujocoWarpEnv
from rlstruct.algos import ALGORITHMS, A2CConfig, Callback, PPOConfig, RunFolder, TrainingConfig, TrainingResult
from rlstruct.algos.training.presets import PRESETS
from rlstruct.cli.tasks import Factory
from rlstruct.envs import GymVectorEnv
from rlstruct.functional.random import uniform


def vectorised(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make gymnasium's own vectorised environments."""
    return GymVectorEnv(gymnasium.make_vec(name, n_envs, vectorization_mode="vector_entry_point"), seed=seed)


class HiddenVelocities(sims.CartPole):
    """CartPole that shows the position of the cart and the angle of the pole, and not how fast they change."""

    def __init__(self, n_envs: int, seed: int = 0) -> None:
        super().__init__(n_envs, seed)
        shown: spaces.Box = self.observation_space  # type: ignore[assignment]
        self.observation_space = spaces.Box(shown.low[::2], shown.high[::2])

    def observe(self, state: sims.CartPoleState) -> Tensor:
        return sims.columns(state.x, state.theta)


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

    def reward_and_terminated(self, qpos: Tensor, qvel: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(qpos[:, 0]), (qpos[:, 1].abs() > 0.2) | (qpos[:, 0].abs() > 2.4)


def worlds(n_envs: int, seed: int) -> VecEnv:
    """Make worlds of MuJoCo Warp, whose episodes get a limit of 500 steps."""
    import mujoco

    return MujocoWarpEnv(mujoco.MjModel.from_xml_string(Balance.xml), Balance(), n_envs, seed, time_limit=500)


def normalised(kind: Callable[..., nn.Module], n_inputs: int, *sizes: Any, discount: float = 0.99) -> nn.Module:  # noqa: ANN401
    """Make a network that sees normalised frames, and whose learner sees scaled rewards."""
    return agents.Normalised(kind(n_inputs, *sizes), (n_inputs,), discount=discount)


DISCRETE = agents.ActorCritic, agents.ActorCriticAgent
CONVOLUTIONS = partial(agents.ConvolutionalActorCritic, channels_last=True, n_features=128), agents.ActorCriticAgent
CONTINUOUS = agents.GaussianActorCritic, agents.GaussianAgent
MEMORY = agents.RecurrentActorCritic, agents.RecurrentAgent
VALUES = partial(agents.QNetwork, duelling=True), agents.QAgent
NORMAL_VALUES = partial(agents.QNetwork, layer_norm=True), agents.QAgent
SOFT = agents.SoftActorCritic, agents.SquashedGaussianAgent


def _task(
    algorithm: str, config: TrainingConfig, agent: tuple[Callable[..., nn.Module], Callable[..., Any]],
    sizes: tuple[Any, ...], create_env: Callable[..., VecEnv], target: float | None, about: str, *,
    network: Mapping[str, Any] | None = None, episodes: int = 100, **of_task: Any,  # noqa: ANN401 - of Task
) -> Task:  # fmt: skip
    """Make a task: ``agent`` makes network and agent, and ``sizes`` and ``network`` are arguments of the network."""
    # Evaluations are made between the updates of one process, so that seconds mean the same everywhere.
    config = replace(config, evaluation_processes=0, evaluation_episodes=episodes)
    create_model = partial(agent[0], *sizes, **(network or {}))
    return Task(partial(_train, algorithm, config, create_model, agent[1], create_env), target, about, **of_task)


def _train(
    algorithm: str, config: TrainingConfig, *factories: Any, seed: int, run: RunFolder | None = None,  # noqa: ANN401
    callbacks: Sequence[Callback] = (), **settings: Any,  # noqa: ANN401
) -> TrainingResult:  # fmt: skip
    changed = replace(config, seed=seed, **settings)
    return ALGORITHMS[algorithm](changed, *factories, run=run, callbacks=callbacks)


def _tuned(
    algorithm: str, env: str, sizes: tuple[Any, ...], target: float | None, about: str = "", *, preset: str = "",
    create_env: Callable[..., VecEnv] | None = None, agent: tuple[Any, Any] | None = None,
    changes: dict[str, Any] | None = None, network: Mapping[str, Any] | None = None,
    **of_task: Any,  # noqa: ANN401 - of `_task`
) -> Task:  # fmt: skip
    """Make a task with the settings that ``rlstruct train`` begins with, too; on simulators by default."""
    chosen = PRESETS[algorithm, preset or env]
    agent = agent or {"dqn": VALUES, "pqn": NORMAL_VALUES, "sac": SOFT}.get(algorithm, DISCRETE)
    config, create_env = replace(chosen.config, **(changes or {})), create_env or Factory(env, backend="torch")
    about = about or f"{algorithm.upper()} on {env}"
    of_task["env"] = env
    network = chosen.network if network is None else network
    return _task(algorithm, config, agent, sizes, create_env, target, about, network=network, **of_task)


CARTPOLE = "CartPole-v1"
_ONE_BY_ONE = "the same, gymnasium's Python environments one by one"
_VECTORISED, _PYTHON = partial(vectorised, CARTPOLE), Factory(CARTPOLE)
_COMPILED = {"compile_agent": True, "compile_update": True}
_LUNAR_LANDER = {"create_env": Factory("LunarLander-v3"), "episodes": 50}
_MEMORY = A2CConfig(
    n_env_steps=1_000_000, n_envs=64, n_timesteps=32, learning_rate=0.004, trace_decay=0.95, max_gradient_norm=0.5,
    entropy_coefficient=0.001, whiten_advantages=True, evaluation_interval=100_000,
)  # fmt: skip
_HURRIED = PPOConfig(
    n_env_steps=100_000, n_envs=16, n_timesteps=64, n_minibatches=2, n_epochs=8, learning_rate=0.01,
    entropy_coefficient=0.0, evaluation_interval=2_500, trace_decay=0.95,
)  # fmt: skip
_OF_1024 = PPOConfig(
    n_env_steps=1_000_000, n_envs=1024, n_timesteps=16, n_minibatches=16, learning_rate=0.005,
    entropy_coefficient=0.0, evaluation_interval=16_000, trace_decay=0.95,
)  # fmt: skip

TASKS: dict[str, Task] = {
    "reinforce_cartpole": _tuned(
        "reinforce", CARTPOLE, (4, 2), 475.0, create_env=Factory(CARTPOLE, auto_reset=False),
        changes={"n_processes": 0, "n_envs": 16}, n_seeds=10, tuned_on=(0, 1, 2),  # not in two processes
    ),
    "a2c_cartpole": _tuned(
        "a2c", CARTPOLE, (4, 2), 475.0, create_env=_VECTORISED, n_seeds=10, tuned_on=(0, 1, 2, 3, 5, 7)
    ),
    "a2c_cartpole_python": _tuned(
        "a2c", CARTPOLE, (4, 2), 475.0, _ONE_BY_ONE, create_env=_PYTHON, tuned_on=(0, 1, 2, 3, 5, 7)
    ),
    "dqn_cartpole_python": _tuned("dqn", CARTPOLE, (4, 2), 475.0, _ONE_BY_ONE, create_env=_PYTHON, tuned_on=(0, 1, 3)),
    "a2c_cartpole_1024": _tuned(
        "a2c", CARTPOLE, (4, 2), 475.0, "A2C on 1,024 simulators of CartPole-v1", preset="CartPole-v1-1024",
        n_seeds=10, tuned_on=tuple(range(100, 116)),
    ),
    "dqn_cartpole": _tuned("dqn", CARTPOLE, (4, 2), 475.0, create_env=_VECTORISED, n_seeds=10, tuned_on=(0, 1, 3)),
    "dqn_cartpole_steady": _tuned(
        "dqn", CARTPOLE, (4, 2), 475.0, "DQN on CartPole-v1, steadily", preset="CartPole-v1-steady",
        create_env=_VECTORISED, tuned_on=(100, 101),
    ),
    "a2c_acrobot": _tuned("a2c", "Acrobot-v1", (6, 3), -90.0),
    "dqn_acrobot": _tuned("dqn", "Acrobot-v1", (6, 3), -90.0, tuned_on=()),
    # The pendulum clips its torque to [-2, 2] itself; others want gymnasium.wrappers.ClipAction.
    "a2c_pendulum": _tuned(
        "a2c", "Pendulum-v1", (3, 1), -250.0, "A2C with Gaussian actions on Pendulum-v1", agent=CONTINUOUS,
        tuned_on=(0, 1),
    ),
    "sac_pendulum": _tuned("sac", "Pendulum-v1", (3, (-2.0,), (2.0,)), -200.0, tuned_on=(100, 101)),
    "reinforce_pendulum": _tuned(
        "reinforce", "Pendulum-v1", (3, 1), -250.0, "REINFORCE with Gaussian actions on Pendulum-v1", agent=CONTINUOUS,
        create_env=Factory("Pendulum-v1", backend="torch", auto_reset=False), tuned_on=(0,),
    ),
    "a2c_memory": _task(
        "a2c", _MEMORY, MEMORY, (2, 2), HiddenVelocities, 400.0,
        "A2C with a recurrent agent on CartPole-v1 without velocities",
    ),
    "a2c_no_memory": _task(
        "a2c", _MEMORY, DISCRETE, (2, 2), HiddenVelocities, 150.0,
        "A2C without memory there, which should stay below", tuned_on=(),
    ),
    "a2c_lunar_lander": _tuned("a2c", "LunarLander-v3", (8, 4), None, **_LUNAR_LANDER, tuned_on=(100, 101, 102, 103)),
    "dqn_lunar_lander": _tuned("dqn", "LunarLander-v3", (8, 4), 100.0, **_LUNAR_LANDER, tuned_on=(100, 101)),
    "a2c_breakout": _tuned("a2c", "Breakout-MinAtar", (400, 3), 10.0, "A2C on MinAtar's Breakout"),
    "dqn_breakout": _tuned("dqn", "Breakout-MinAtar", (400, 3), 10.0, "DQN on MinAtar's Breakout"),
    "pqn_cartpole": _tuned("pqn", CARTPOLE, (4, 2), 490.0, create_env=_VECTORISED, tuned_on=(100, 101)),
    "pqn_breakout": _tuned(
        "pqn", "Breakout-MinAtar", (400, 3), None, "PQN on MinAtar's Breakout", changes=_COMPILED,
        create_env=Factory("Breakout-MinAtar", backend="compile"), tuned_on=(),
    ),
    "ppo_cartpole": _tuned(
        "ppo", CARTPOLE, (4, 2), 490.0, create_env=_VECTORISED, n_seeds=10, tuned_on=(100, 101, 102)
    ),
    "ppo_cartpole_python": _task(
        "ppo", _HURRIED, DISCRETE, (4, 2), _PYTHON, 475.0, "PPO in a hurry on gymnasium's Python CartPole-v1",
        tuned_on=(100, 101, 102, 103, 104),
    ),
    "ppo_cartpole_1024": _task(
        "ppo", _OF_1024, DISCRETE, (4, 2), Factory(CARTPOLE, backend="torch"), 475.0,
        "PPO on 1,024 simulators of CartPole-v1", tuned_on=(100, 101),
    ),
    "ppo_acrobot": _tuned("ppo", "Acrobot-v1", (6, 3), -86.0, n_seeds=5, tuned_on=(100, 101)),
    "ppo_pendulum": _tuned(
        "ppo", "Pendulum-v1", (3, 1), -200.0, "PPO with Gaussian actions on Pendulum-v1", agent=CONTINUOUS, n_seeds=5,
        tuned_on=(100,),
    ),
    "ppo_lunar_lander": _tuned(
        "ppo", "LunarLander-v3", (8, 4), 200.0, "PPO on EnvPool's LunarLander-v3", episodes=50,
        tuned_on=(100, 101, 102), create_env=partial(pooled, "LunarLander-v3"),
    ),
    "ppo_lunar_lander_continuous": _tuned(
        "ppo", "LunarLanderContinuous-v3", (8, 2), None, "PPO on EnvPool's LunarLanderContinuous-v3", episodes=50,
        agent=CONTINUOUS, create_env=partial(pooled, "LunarLanderContinuous-v3"), tuned_on=(100,),
    ),
    "sac_lunar_lander_continuous": _tuned(
        "sac", "LunarLanderContinuous-v3", (8, (-1.0,) * 2, (1.0,) * 2), None,
        "SAC on EnvPool's LunarLanderContinuous-v3", episodes=50, tuned_on=(100, 101, 102),
        create_env=partial(pooled, "LunarLanderContinuous-v3"),
    ),
    "ppo_memory": _tuned(
        "ppo", CARTPOLE, (2, 2), 450.0, "PPO with a recurrent agent on CartPole-v1 without velocities",
        preset="CartPole-v1-recurrent", agent=MEMORY, create_env=HiddenVelocities, tuned_on=(100, 101),
    ),
}  # fmt: skip

# What is asked is what https://docs.cleanrl.dev/rl-algorithms/ppo/ prints for version 4 of the environments.
TASKS |= {
    f"ppo_{name.lower()}": _task(
        "ppo", replace(PRESETS["ppo", f"{name}-v5"].config, compile_update=True), (normalised, agents.GaussianAgent),
        (agents.GaussianActorCritic, n_inputs, n_actions), Factory(f"{name}-v5"), target, f"PPO on {name}-v5",
        episodes=10, tuned_on=(100, 101, 102) if name == "InvertedDoublePendulum" else (), env=f"{name}-v5",
    )
    for name, n_inputs, n_actions, target in (
        ("HalfCheetah", 17, 6, 1443.0), ("Hopper", 11, 3, 2383.0), ("Walker2d", 17, 6, 2288.0), ("Ant", 105, 8, None),
        ("Swimmer", 8, 2, None), ("InvertedDoublePendulum", 9, 1, None),
    )
}  # fmt: skip

# A fiftieth of the published steps: what `peers/mujoco_returns.py` trains for, too.
TASKS |= {
    f"sac_{name.lower()}": _tuned(
        "sac", f"{name}-v5", (n_inputs, (-1.0,) * n_actions, (1.0,) * n_actions), None, f"SAC on {name}-v5",
        create_env=Factory(f"{name}-v5"), changes={"n_env_steps": 20_000, "evaluation_interval": 5_000},
        episodes=10, tuned_on=(),
    )
    for name, n_inputs, n_actions in (("HalfCheetah", 17, 6), ("Hopper", 11, 3), ("Walker2d", 17, 6))
}  # fmt: skip

# Actions of half a second: a player at random crosses the road now and then, so that there is something to learn from.
_FREEWAY = partial(sims.make, "ALE/Freeway-v5", frame_skip=32, stack=1)
_STACKING = partial(agents.StackingAgent.create, create_agent=agents.ActorCriticAgent, shape=(4, 84, 84))
TASKS["ppo_atari_freeway"] = _task(
    "ppo",
    PPOConfig(
        n_env_steps=6_144, n_envs=16, n_timesteps=64, n_minibatches=8, learning_rate=0.0005, reward_scale=1.0,
        value_clip=0.2, evaluation_interval=2_048, trace_decay=0.95,
    ),
    (agents.ConvolutionalActorCritic, _STACKING), ((4, 84, 84), 3), _FREEWAY, 10.0,
    "PPO on Atari's Freeway, an action every 32 frames",
    network={"n_features": 256, "layers": ((16, 8, 4), (32, 4, 2))}, episodes=16, tuned_on=(200,),
)  # fmt: skip

TASKS["ppo_atari_pong"] = _tuned(
    "ppo", "ALE/Pong-v5", ((4, 84, 84), 6), 18.0, "PPO on ALE/Pong-v5, products in bfloat16",
    agent=(agents.ConvolutionalActorCritic, agents.ActorCriticAgent), create_env=partial(sims.make, "ALE/Pong-v5"),
    changes={"precision": "bfloat16", "compile_update": True, "target_return": 18.0}, episodes=20, tuned_on=(100,),
)  # fmt: skip

# Four algorithms with as many steps, to the end, and with the settings that were chosen on Breakout.
_GAMES = {"Breakout": (4, 3), "Asterix": (4, 5), "Freeway": (7, 3), "SpaceInvaders": (6, 4), "Seaquest": (10, 6)}


def _minatar(algorithm: str, game: str, **words: Any) -> Task:  # noqa: ANN401 - of `_tuned`
    """Make a task of one of MinAtar's games; networks have convolutions unless the preset says how wide they are."""
    n_channels, n_actions = _GAMES[game]
    env = f"{game}-MinAtar"
    words = {"preset": env if algorithm in ("ppo", "dqn") else "Breakout-MinAtar", "target": None, **words}
    network = words.setdefault("network", PRESETS[algorithm, words["preset"]].network)
    convolutional = "hidden" not in network
    inputs = (10, 10, n_channels) if convolutional else 100 * n_channels
    agent = CONVOLUTIONS if convolutional else None
    return _tuned(algorithm, env, (inputs, n_actions), agent=agent, **words)


_CHOSEN_WITH = {
    ("pqn", "Breakout"): (100, 101),
    **{("ppo", game): (100, 101) for game in _GAMES},
    ("ppo", "Breakout"): (100, 101, 102),
    ("ppo", "Asterix"): (101,),
    ("dqn", "Breakout"): (100,),
    ("dqn", "Asterix"): (100, 101),
}
# gymnax's rules: no action sticks, and episodes end after 1,000 steps, of Freeway after 2,500.
TASKS |= {
    f"{algorithm}_{game.lower()}_plain": _minatar(
        algorithm,
        game,
        target=25.0 if (algorithm, game) == ("pqn", "Breakout") else None,
        about=f"{algorithm.upper()} on MinAtar's {game} with gymnax's rules",
        changes={"n_env_steps": 1_800_000, **_COMPILED},
        tuned_on=_CHOSEN_WITH.get((algorithm, game), ()),
        create_env=partial(
            sims.make,
            f"{game}-MinAtar",
            backend="compile",
            sticky_probability=0.0,
            time_limit=2_500 if game == "Freeway" else 1_000,
        ),
    )
    for game in _GAMES
    for algorithm in ("ppo", "a2c", "dqn", "pqn")
}
# MinAtar's Breakout here and in gymnax, with settings of PPO that were not chosen on any game.
_USUAL = {
    "preset": "Freeway-MinAtar", "network": {"hidden": (128, 128)}, "tuned_on": (),
    "changes": {"n_env_steps": 300_000, "evaluation_interval": 30_000, "target_return": None},
}  # fmt: skip
TASKS["ppo_minatar_breakout"] = _minatar("ppo", "Breakout", about="PPO on MinAtar's Breakout", **_USUAL)
TASKS["ppo_gymnax_breakout"] = _minatar(
    "ppo", "Breakout", target=5.0, about="PPO on gymnax's Breakout-MinAtar", **_USUAL,
    create_env=partial(functional, "Breakout-MinAtar"),
)  # fmt: skip
# gymnax's rules: no action sticks, and episodes end after 1,000 steps.
TASKS["ppo_minatar_breakout_plain"] = _minatar(
    "ppo", "Breakout", about="PPO on MinAtar's Breakout with gymnax's rules, usual settings", **_USUAL,
    create_env=partial(sims.make, "Breakout-MinAtar", auto_reset=True, sticky_probability=0.0, time_limit=1_000),
)  # fmt: skip
TASKS["ppo_cartpole_balance"] = _task(
    "ppo",
    PPOConfig(
        n_env_steps=300_000, n_envs=64, n_timesteps=64, n_epochs=10, n_minibatches=8, discount=0.995, reward_scale=0.1,
        learning_rate=0.001, trace_decay=0.95, entropy_coefficient=0.0, evaluation_interval=50_000,
        evaluation_timesteps=1_000, evaluation_stochastic=False,
    ),
    CONTINUOUS, (5, 1), partial(playground, "CartpoleBalance"), 900.0, "PPO on MuJoCo Playground's CartpoleBalance",
    tuned_on=(100,),
)  # fmt: skip
TASKS["ppo_mujoco_warp"] = _task(
    "ppo",
    PPOConfig(
        n_env_steps=163_840, n_envs=64, n_timesteps=32, n_minibatches=4, discount=0.98, reward_scale=0.1,
        learning_rate=0.003, trace_decay=0.95, entropy_coefficient=0.0, evaluation_interval=16_384,
        evaluation_timesteps=500,
    ),
    CONTINUOUS, (4, 1), worlds, 475.0, "PPO on a cart and pole of MuJoCo Warp", episodes=16, tuned_on=(100,),
)  # fmt: skip

# The defaults, which a task without a preset gets, on tasks that have one.
_BY_DEFAULT = {
    "cartpole": (CARTPOLE, _PYTHON, (4, 2), ("reinforce", "a2c", "ppo", "dqn", "pqn")),
    "acrobot": ("Acrobot-v1", Factory("Acrobot-v1", backend="torch"), (6, 3), ("a2c", "ppo", "dqn", "pqn")),
    "lunar_lander": ("LunarLander-v3", partial(pooled, "LunarLander-v3"), (8, 4), ("a2c", "ppo", "dqn", "pqn")),
}
_CONTINUOUS_BY_DEFAULT = {
    "pendulum": ("Pendulum-v1", Factory("Pendulum-v1", backend="torch"), 3, 1, 2.0),
    "lunar_lander_continuous": (
        "LunarLanderContinuous-v3", partial(pooled, "LunarLanderContinuous-v3"), 8, 2, 1.0
    ),
}  # fmt: skip


def _by_default(algorithm: str, env: str, agent: tuple[Any, Any], sizes: tuple[Any, ...], create_env: Any) -> Task:  # noqa: ANN401
    settings = ALGORITHMS[algorithm].learner.settings()
    about = f"{algorithm.upper()} on {env}"
    return _task(algorithm, settings, agent, sizes, create_env, None, about, tuned_on=(), env=env)


TASKS |= {
    f"{algorithm}_{name}_defaults": _by_default(
        algorithm, env, {"dqn": VALUES, "pqn": NORMAL_VALUES}.get(algorithm, DISCRETE), sizes, create_env
    )
    for name, (env, create_env, sizes, algorithms) in _BY_DEFAULT.items()
    for algorithm in algorithms
}
for _name, (_env, _create_env, _n_inputs, _n_actions, _bound) in _CONTINUOUS_BY_DEFAULT.items():
    _bounds = (-_bound,) * _n_actions, (_bound,) * _n_actions
    TASKS |= {
        f"ppo_{_name}_defaults": _by_default("ppo", _env, CONTINUOUS, (_n_inputs, _n_actions), _create_env),
        f"sac_{_name}_defaults": _by_default("sac", _env, SOFT, (_n_inputs, *_bounds), _create_env),
    }
