"""Tutorial 19: learn faster from chosen start states.

A chicken in Freeway gets a reward for crossing the road, 43 actions from its start. A random policy hardly ever gets
there, so it has little to learn from. Here ALE walks up the road once, episodes start from some of its states, and PPO
learns from those. Evaluations use Freeway's ordinary start. This takes a minute or two on a CPU:

    python tutorials/19_start_states.py

``--steps 20480 --evaluations 4 --seeds 200 201 202`` reproduces the table in docs/coming_from_cule.md, in six trainings
of a minute or more. It needs the extras `warp`, `atari` and, for the picture, `train`.
"""

import argparse
from functools import partial

import torch

from rlstruct.agents import ActorCriticAgent, ConvolutionalActorCritic, StackingAgent
from rlstruct.algos import ppo
from rlstruct.algos.training.learning_curve import Curve, draw_panels
from rlstruct.atari import Atari, AtariState, open_ale
from rlstruct.functional.random import randint, uniform

GAMES, JUDGED = 16, 8  # number of games to learn from, and to evaluate on
UP = 2  # the number of this action in ALE


class UpTheRoad(Atari):
    """Freeway with short episodes, three of four of which start further up the road."""

    def __init__(self, n_envs, seed):
        super().__init__("Freeway", n_envs, seed, stack=1, time_limit=24)
        ale, places = open_ale("freeway", seed=0), []
        for frame in range(1, 172):  # it reaches the other side in frame 172
            ale.act(UP)
            if frame >= 100 and frame % 4 == 0:
                places.append(self.state_of([ale]))
        self.further = AtariState(*(torch.cat(part) for part in zip(*(vars(p).values() for p in places), strict=True)))

    def initial(self, key):
        """Return `Atari`'s start states, three of four replaced by a state further up; equal keys draw equal states."""
        usual = super().initial(key)
        rows = randint(key, len(self.further.ram), stream=1)
        chosen = uniform(key, stream=2) < 0.75

        def mixed(name, value):
            return torch.where(chosen.view(-1, *[1] * (value.dim() - 1)), getattr(self.further, name)[rows], value)

        return AtariState(**{name: mixed(name, value) for name, value in vars(usual).items()})


def ordinary(n_envs, seed):
    """Freeway, unchanged; evaluations take an eighth of a game."""
    limit = 255 if n_envs == JUDGED else "default"
    return Atari("Freeway", n_envs, seed, stack=1, time_limit=limit)


def with_starts(n_envs, seed):
    """Freeway with chosen starts to learn from; evaluations use ordinary ones."""
    return ordinary(n_envs, seed) if n_envs == JUDGED else UpTheRoad(n_envs, seed)


def train(create_env, seed, steps, evaluations):
    config = ppo.PPOConfig(
        n_env_steps=steps, n_envs=GAMES, n_timesteps=64, n_minibatches=4, learning_rate=0.001, reward_scale=1.0,
        trace_decay=0.95, value_clip=0.2,
        evaluation_interval=steps // evaluations, evaluation_episodes=JUDGED, evaluation_processes=0, seed=seed,
    )  # fmt: skip
    model = partial(ConvolutionalActorCritic, (4, 84, 84), 3, n_features=64, layers=((8, 8, 8), (16, 4, 2)))
    agent = partial(StackingAgent.create, create_agent=ActorCriticAgent, shape=(4, 84, 84))
    return ppo.train(config, model, agent, create_env)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8192)
parser.add_argument("--evaluations", type=int, default=1, help="on the way")
parser.add_argument("--seeds", type=int, nargs="+", default=[100])
options, _ = parser.parse_known_args()  # in a notebook there are also those of its kernel
torch.set_num_threads(1)
WAYS = {"ordinary starts": ordinary, "chosen starts": with_starts}
curves = {name: [] for name in WAYS}
for seed in options.seeds:
    for name, create_env in WAYS.items():
        result = train(create_env, seed, options.steps, options.evaluations)
        points = [(float(one.env_steps), one.mean_return) for one in result.evaluations]
        curves[name].append(Curve(*zip(*points, strict=True)))
        words = ", ".join(f"{value:.1f} after {step:,.0f}" for step, value in points)
        print(f"seed {seed}, {name}, crossings in an eighth of a game: {words} actions", flush=True)
draw_panels({"PPO on Atari's Freeway": curves}, "start_states.png", metric="crossings in an eighth of a game")
assert curves["chosen starts"][0].values[-1] > curves["ordinary starts"][0].values[-1]

# More: docs/coming_from_cule.md
