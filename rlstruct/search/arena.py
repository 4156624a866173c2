"""Matches in two-player games, and evaluation by matches: the return of a game is 1, 0 or -1."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rlstruct.algos.training.evaluation import Evaluation
from rlstruct.core import DictTensor
from rlstruct.errors import BadValueError, BatcherStateError
from rlstruct.functional import random
from rlstruct.profiling import operation, phase
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

_MOVES_IN_A_ROW = 8  # between two checks whether all games are over


class Player(Protocol):
    """Chooses actions from observations that hold ``rng``. An empty state starts a new game, as in `SearchAgent`."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor) -> tuple[Any, Any]:
        """Act; see `RL_Agent.__call__`."""


class RandomPlayer:
    """Samples an action uniformly from the legal ones in ``frame/legal``, or from all A if there is no such key.

    Args:
        n_actions: number of actions A.
    """

    def __init__(self, n_actions: int) -> None:
        self.n_actions = n_actions

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor) -> tuple[Any, Any]:
        """Act; see `Player`."""
        drawn = random.uniform(observation["rng"], (self.n_actions,))  # [B, A]
        if "frame/legal" in observation.keys():
            drawn = drawn + observation["frame/legal"]
        return DictTensor({"action": drawn.argmax(-1)}), state


def play_match(player: Player, opponent: Player, env: VecEnv, seed: int = 0, episode: int = 0) -> tuple[Tensor, Tensor]:
    """Play one game in each environment, in which the players take turns.

    Args:
        player: moves first.
        opponent: moves second.
        env: a two-player game that rewards the player who has just moved. It does not reset itself; it is reset here.
        seed: seed of the players' random keys.
        episode: number of the match: others with this seed draw other numbers.

    Returns:
        ``(result, length)``: the player's rewards minus the opponent's, [B] float32; moves of both, [B] int64.

    Raises:
        ValueError: the games reset themselves, so the match would never end.
    """
    if env.auto_reset:
        raise BadValueError(
            f"play_match: {type(env).__name__} begins the next game by itself, expected one game in each environment. "
            "Create it with auto_reset=False."
        )
    current, running = env.reset()
    B = env.n_envs()
    seeds = torch.arange(seed, seed + B, dtype=torch.int64, device=env.device)
    result = torch.zeros(B, dtype=torch.float32, device=env.device)
    length = torch.zeros_like(seeds)
    n_moves, states = 0, [DictTensor(), DictTensor()]
    while bool(running.any()):  # sync: once every few moves
        for _ in range(_MOVES_IN_A_ROW):
            key = random.step_keys(seeds, episode, torch.full((1,), n_moves, dtype=torch.int64, device=env.device))[0]
            side = n_moves % 2
            mover, sign = (player, 1.0) if side == 0 else (opponent, -1.0)
            action, states[side] = mover(states[side], current + DictTensor({"rng": key}), DictTensor())
            (reached, ran), (current, running) = env.step(action.get(["action"]))
            result = result + torch.where(ran, sign * reached["reward"], 0.0)
            length = length + ran
            n_moves += 1
    return result, length


class Arena:
    """Evaluates weights by games against an opponent, on a separate device, while learning waits.

    The agent moves first in half of the games.

    Args:
        agent: plays with the weights that are evaluated.
        opponent: its opponent.
        create_env: called with ``n_envs``; returns games that do not restart, on the agent's device.
        n_games: number of games in an evaluation, even.
        seed: seed of the random keys.
    """

    def __init__(
        self, agent: RL_Agent, opponent: Player, create_env: Callable[..., VecEnv], *, n_games: int, seed: int = 0
    ) -> None:
        self._agent, self._opponent, self._seed, self._n_played = agent, opponent, seed, 0
        self._envs = [create_env(n_envs=n_games // 2) for _ in range(2)]
        self._result: Evaluation | None = None

    @phase("evaluation")
    @operation("evaluation")
    def start(self, weights: Mapping[str, Tensor], *, env_steps: int, policy_version: int) -> None:
        """Play all games; see `rlstruct.algos.training.evaluation.Evaluator.start`."""
        begin, n = time.perf_counter(), self._envs[0].n_envs()
        self._agent.update(weights)
        episode = self._n_played // (2 * n)
        mine, lengths = play_match(self._agent, self._opponent, self._envs[0], self._seed, episode)
        theirs, others = play_match(self._opponent, self._agent, self._envs[1], self._seed + n, episode)
        self._n_played += 2 * n
        returns, moves = torch.cat([mine, -theirs]), torch.cat([lengths, others])
        self._result = Evaluation(
            env_steps,
            policy_version,
            tuple(returns.tolist()),  # sync: once per evaluation
            tuple(moves.tolist()),  # sync: once per evaluation
            time.perf_counter() - begin,
        )

    def poll(self) -> Evaluation | None:
        """Return the result, once."""
        result, self._result = self._result, None
        return result

    def wait(self) -> Evaluation:
        """Return the result; BatcherStateError if there is none, or it was returned before."""
        if (result := self.poll()) is None:
            raise BatcherStateError("Arena.wait: no evaluation was started. Call start() first.")
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"n_played": self._n_played}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: later evaluations are equal."""
        self._n_played = int(state["n_played"])
