"""AlphaZero: a tree search plays against itself, and the network that guides it learns from its results.

Silver et al., "A general reinforcement learning algorithm that masters chess, shogi and Go through self-play" (Science,
2018). By default the search is that of Danihelka et al., "Policy improvement by planning with Gumbel" (ICLR 2022),
which learns from few simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.learner import CreateAgent
from rlstruct.algos.replay_learner import ReplayConfig, ReplayLearner
from rlstruct.algos.seeds import Purpose, seed_range
from rlstruct.algos.training.build import CreateEnv
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.algos.training.evaluation import Evaluates
from rlstruct.core import DictTensor
from rlstruct.errors import BadTypeError, BadValueError
from rlstruct.functional.all_reduce import sum_over_learners
from rlstruct.options import option
from rlstruct.profiling import operation
from rlstruct.rl_agent import RL_Agent
from rlstruct.search import SearchAgent, SearchConfig, split_frames
from rlstruct.search import arena as matches  # a module: it imports rlstruct.algos, which imports this one
from rlstruct.search.game import frames_of


@dataclass(frozen=True, kw_only=True)
class AlphaZeroConfig(ReplayConfig):
    """Settings of AlphaZero, and those of `ReplayConfig` and `TrainingConfig`; most defaults are for Connect Four.

    An environment step is a move, and the sign of ``discount`` changes with each. Evaluations are games against the
    opponent: a mean return of 1 wins all of them, -1 loses all.

    Attributes:
        method: search method: "gumbel", which learns from few simulations, or "puct", AlphaZero's own.
        n_simulations: simulations for each move of self-play.
        max_depth: largest number of moves that a search looks ahead.
        evaluation_simulations: simulations for each move of an evaluation; None for n_simulations.
        learning_starts: moves to collect before learning begins.
        longest_game: in moves. Values are learned from results, so a position whose game has not ended after this many
            moves trains only the policy.
        value_coefficient: weight of the value's loss.
        search_value_fraction: weight of the search's own estimate in the target of the value; the rest is the result.
        gumbel_scale: scale of the noise in self-play. A trained network soon becomes so certain that noise of scale 1
            no longer changes its moves, and all games are the same.
        exploring_moves: moves of each game of self-play over which the noise falls to 0, see SearchConfig.
        mirror: half of the gradient steps see mirror images of positions and actions. For games such as Connect Four,
            in which left and right are equivalent, and each action stands for a column, the last axis of the frame.
        opponent: opponent in evaluations: "random", or "uct", a search that evaluates positions by random games.
        opponent_simulations: simulations of that search.
    """

    n_env_steps: int = 500_000
    n_timesteps: int = 16
    n_envs: int = 64
    discount: float = 1.0
    learning_rate: float = 2e-3
    evaluation_episodes: int = 20
    evaluation_processes: int = 0
    evaluation_interval: int = 50_000
    method: Literal["gumbel", "puct"] = option("gumbel")
    n_simulations: int = option(32, at_least=1)
    max_depth: int = option(16, at_least=1)
    evaluation_simulations: int | None = option(None, at_least=1)
    replay_capacity: int = 200_000
    learning_starts: int = option(4_000, at_least=1)
    n_updates: int = 16
    longest_game: int = option(42, at_least=1)
    value_coefficient: float = 1.0
    search_value_fraction: float = option(0.0, at_least=0, at_most=1)
    gumbel_scale: float = option(1.0, at_least=0)
    exploring_moves: int | None = option(None, at_least=1)
    mirror: bool = False
    opponent: Literal["random", "uct"] = option("uct")
    opponent_simulations: int = option(50, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.evaluation_episodes % 2 == 0
        self.require("evaluation_episodes", fits, "an even number: each side starts half of them")
        self.require("reward_scale", self.reward_scale == 1.0, "1: values are learned from the results of games")

    def search(self, n_simulations: int) -> SearchConfig:
        """Return the settings of a search with this many simulations per move."""
        return SearchConfig(
            method=self.method,
            n_simulations=n_simulations,
            max_depth=self.max_depth,
            gumbel_scale=self.gumbel_scale,
            exploring_moves=self.exploring_moves,
        )


@operation("loss")
def losses(model: nn.Module, batch: DictTensor, config: AlphaZeroConfig) -> dict[str, Tensor]:
    """Compute the terms of the loss of a batch.

    Args:
        model: maps frames to logits [K, A] and value [K].
        batch: a sample of `ReplayBuffer.sample`, on the model's device, with the search's policy
            ``action/action_policy`` [K, A] and its estimate ``action/action_value`` [K].  [K]
        config: ``value_coefficient`` and ``search_value_fraction``.

    Returns:
        ``loss`` and its terms ``policy_loss``, the cross entropy in nats, and ``value_loss``, the mean squared distance
        to the targets in games that have ended; without gradients ``divergence`` of the policy from the search's, in
        nats. With several learners, the mean over learners is the term over all their positions.  [] each
    """
    frame, legal = split_frames(frames_of(batch.truncate_key("observation/")))
    logits, value = model(frame)
    if legal is not None:
        logits = logits.masked_fill(~legal, torch.finfo(logits.dtype).min)
    search_policy = batch["action/action_policy"]
    entropy = -torch.special.xlogy(search_policy, search_policy).sum(-1).mean()
    policy_loss = -(search_policy * logits.log_softmax(-1)).sum(-1).mean()
    target = batch["reward"].lerp(batch["action/action_value"], config.search_value_fraction)
    ended = batch["terminated"]
    error = torch.where(ended, (value - target).square(), 0.0).sum()
    n_known, n_learners = sum_over_learners(torch.stack([ended.sum(), torch.ones_like(ended[0], dtype=torch.int64)]))
    value_loss = error * n_learners / n_known.clamp(min=1)  # so that the mean over learners is that over all positions
    return {
        "loss": policy_loss + config.value_coefficient * value_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "divergence": policy_loss.detach() - entropy,
    }


class AlphaZeroLearner(ReplayLearner):
    """Learner of AlphaZero, with its replay buffer.

    Attributes:
        buffer: positions, with the results of their searches and of their games.
    """

    settings: ClassVar[type[TrainingConfig]] = AlphaZeroConfig
    config: AlphaZeroConfig

    def __init__(self, model: nn.Module, agent: RL_Agent, config: AlphaZeroConfig) -> None:
        super().__init__(model, agent, config, n_step=config.longest_game, discount=-config.discount)
        if self.statistics is not None:
            raise BadTypeError(
                f"AlphaZero: got {type(model).__name__}, whose statistics would scale the results of games, which the "
                "search compares with its own. Pass the network without it: boards need no normalisation."
            )

    def prepare_sample(self, batch: DictTensor) -> DictTensor:
        """Mirror the positions of every second sample, if the settings ask for it."""
        batch = super().prepare_sample(batch)
        if not self.config.mirror:
            return batch
        odd, turned = self.version_now % 2 == 1, mirrored(batch)
        return DictTensor({key: torch.where(odd, turned[key], value) for key, value in batch.items()})

    def depends_on(self) -> tuple[object, bool]:
        """Name the model alone, since the agent searches; see `GradientLearner.depends_on`."""
        return self.model, True  # the search captures this network as well

    def terms(self, minibatch: DictTensor) -> dict[str, Tensor]:
        """Compute `losses` of a sampled batch."""
        return losses(self.model, minibatch, self.config)


def mirrored(batch: DictTensor) -> DictTensor:
    """Return mirror images of positions [K]: the last axis of all frames and the order of the actions are reversed."""
    names = ("observation/frame", "_observation/frame", "action/action_policy")
    turned = {key: v for key, v in batch.items() if key.startswith(names)}
    if len({v.shape[-1] for v in turned.values()}) > 1:
        raise BadValueError(
            f"AlphaZero: mirror=True reverses {', '.join(f'{key} {list(v.shape)}' for key, v in turned.items())} along "
            "the last axis, expected equal sizes: one action for each column of the board. Set mirror=False."
        )
    return DictTensor({**dict(batch.items()), **{key: v.flip(-1) for key, v in turned.items()}})


def self_play(
    config: AlphaZeroConfig, create_agent: CreateAgent, create_env: CreateEnv
) -> tuple[AlphaZeroConfig, CreateAgent, Callable[[nn.Module], Evaluates]]:
    """Give the agents a simulator of the game, and evaluate by games against the opponent; see `Algorithm`."""
    search = replace(config.search(config.n_simulations), compiled=config.compile_agent is True)
    searching = partial(create_agent, create_simulator=create_env, discount=-config.discount, config=search)
    # The search compiles itself.
    return replace(config, compile_agent=False), searching, partial(arena, config, create_agent, create_env)


def arena(
    config: AlphaZeroConfig,
    create_agent: CreateAgent,
    create_env: CreateEnv,
    model: nn.Module,
    purpose: Purpose = "evaluation",
) -> matches.Arena:
    """Create the evaluator of a training: games of ``model`` against the opponent, on the evaluation's device.

    Args:
        config: see `AlphaZeroConfig`.
        create_agent: see `train`.
        create_env: creates the game, see `train`.
        model: the network.
        purpose: what the random numbers of the games are for, see `rlstruct.algos.seeds`.
    """
    device = config.evaluation_device
    create = partial(create_agent, create_simulator=create_env, discount=-config.discount, device=device)
    search = config.search(config.evaluation_simulations or config.n_simulations)
    agent = create(model, config=search, stochastic=False, copy_model=True)
    games = partial(create_env, device=device, auto_reset=False)
    actions = cast("spaces.Discrete", games(n_envs=1).action_space)
    opponent: matches.Player = matches.RandomPlayer(int(actions.n))
    if config.opponent == "uct":
        uct = replace(config.search(config.opponent_simulations), method="uct", temperature=0.0, exploring_moves=None)
        opponent = SearchAgent(create_simulator=create_env, discount=-config.discount, device=device, config=uct)
    seed = seed_range(purpose, config.seed, n_games := config.evaluation_episodes)[0]
    return matches.Arena(agent, opponent, games, n_games=n_games, seed=seed)


train: Algorithm[AlphaZeroConfig] = Algorithm(
    AlphaZeroLearner, "self-play with tree search; games for two players", agents="search", arrange=self_play
)
"""Train a network by self-play; arguments are those of `Algorithm.__call__`.

The agent is `rlstruct.search.SearchAgent`, or one with the same arguments. The environments simulate a game of two
players in turn, like `rlstruct.sims.ConnectFour`. They reset themselves, unless created with ``auto_reset=False``.
"""


__getattr__ = renamed.attributes(__name__)
