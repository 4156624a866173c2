"""Game models for a search: a simulator with a network or random games as its evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.engine.host_syncs import intended
from rlstruct.errors import BadTypeError, BadValueError
from rlstruct.functional import random
from rlstruct.search.tree import RANDOM_KEY, Tensors
from rlstruct.sims.state import fields_of, state_of

_MOVES_BETWEEN_CHECKS = 8  # off the CPU, checking whether all random games are over stalls the device

Network = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function from frames [B, ...] to logits [B, A] and the value [B] for the player to move."""


class Simulator(Protocol):
    """A game, such as a `rlstruct.sims.TensorEnv`, whose state can be derived from its frames.

    `SearchAgent` also needs ``action_space``, a Discrete space that starts at 0, for random games and to keep trees
    between moves (`SearchConfig.reuse_tree`); for the latter ``reset()`` and ``get_state()``, too.

    Attributes:
        stochastic: `transition` draws random numbers.
    """

    stochastic: bool

    def transition(self, state: Any, action: Any, key: Tensor) -> tuple[Any, Tensor, Tensor]:  # noqa: ANN401
        """Take one step: ``(next state, reward [B], terminated [B])``.

        A state is a dataclass of tensors [B, ...], or a DictTensor.
        """

    def observe(self, state: Any) -> Tensor | Tensors:  # noqa: ANN401
        """Show states: a frame, or a dict of one frame and ``legal`` [B, A] bool."""

    def state_from(self, frames: Tensor | Tensors) -> Any:  # noqa: ANN401
        """Return the states of frames: the inverse of `observe`."""


class GameModel:
    """Game model of a search: a simulator, evaluated by a network.

    Args:
        simulator: the game; its transitions are deterministic.
        network: evaluates frames.
        discount: factor of the next state's value: -1 for two players who alternate in a zero-sum game; otherwise from
            0 to 1.

    Raises:
        ValueError: the simulator draws random numbers. A node keeps one next state per action, so the search would
            foresee chance and prefer actions that pay off only by luck. Or its actions do not start at 0.
    """

    def __init__(self, simulator: Simulator, network: Network | None = None, *, discount: float = -1.0) -> None:
        if simulator.stochastic:
            raise BadValueError(
                f"GameModel: {type(simulator).__name__} draws random numbers in its transitions, expected a simulator "
                "without chance: the search would know what chance will do. Search in one whose transitions draw none."
            )
        if first := int(getattr(getattr(simulator, "action_space", None), "start", 0)):
            raise BadValueError(
                f"GameModel: the actions of {type(simulator).__name__} start at {first}, expected 0: a search numbers "
                f"them from 0. Use Discrete(n), and add {first} in transition."
            )
        self.simulator, self.network, self.discount = simulator, network, discount
        self._keeps_key = False
        self._state_class: type[Any] = type(None)  # the class of states, known after the first

    def begin(self, state: Any, key: Tensor) -> Tensors:  # noqa: ANN401 - the simulator's own class
        """Convert simulator states [B, ...] to search states; random games draw from ``key`` [B] int64."""
        self._state_class = type(state)
        fields = fields_of(f"GameModel: the state of {type(self.simulator).__name__}", state)
        return {**fields, RANDOM_KEY: key} if self._keeps_key else fields

    def advance(self, state: Tensors, action: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """Take a step of the simulator; see `rlstruct.search.tree.Model`."""
        nothing = action[:0]
        after, reward, terminated = self.simulator.transition(self._inner(state), action, nothing)
        key = random.child_key(state[RANDOM_KEY], action) if self._keeps_key else nothing
        return self.begin(after, key), reward, torch.full_like(reward, self.discount).masked_fill_(terminated, 0.0)

    def evaluate(self, state: Tensors) -> tuple[Tensor, Tensor]:
        """Evaluate states; see `rlstruct.search.tree.Model`."""
        frame, legal = split_frames(self.simulator.observe(self._inner(state)))
        logits, value = self.logits_and_value(state, frame, legal)
        return logits if legal is None else logits.masked_fill(~legal, -torch.inf), value

    def logits_and_value(self, state: Tensors, frame: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits [B, A] and value [B] of states and their frames."""
        if self.network is None:
            raise BadTypeError(
                "GameModel: there is no network. Pass one, or evaluate by random play with RolloutModel."
            )
        return self.network(frame)

    def _inner(self, state: Tensors) -> Any:  # noqa: ANN401 - the simulator's own class
        return state_of(self._state_class, {name: part for name, part in state.items() if name != RANDOM_KEY})


class RolloutModel(GameModel):
    """A simulator evaluated by one random game from each state; all actions are equally likely.

    Args:
        simulator: the game.
        n_actions: A.
        n_moves: maximum length of a random game.
        discount: see `GameModel`.
    """

    def __init__(self, simulator: Simulator, n_actions: int, n_moves: int, *, discount: float = -1.0) -> None:
        super().__init__(simulator, discount=discount)
        self._n_actions, self._n_moves, self._keeps_key = n_actions, n_moves, True

    def logits_and_value(self, state: Tensors, frame: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits of 0, and the return of a random game for the player to move."""
        key = state[RANDOM_KEY]  # children 0 to A - 1 are the keys of the next states, later ones draw the moves
        if legal is None:
            legal = torch.ones((key.shape[0], self._n_actions), dtype=torch.bool, device=key.device)
        value, weight = torch.zeros_like(key, dtype=torch.float32), torch.ones_like(key, dtype=torch.float32)
        allowed = legal
        for i in range(self._n_moves):
            # Finished games continue with a weight of 0; they may have no legal action left.
            drawn = random.uniform(random.child_key(key, self._n_actions + i), (self._n_actions,))
            action = (drawn + allowed).argmax(-1)
            state, reward, discount = self.advance(state, action)
            value, weight = value + weight * reward, weight * discount
            legal_actions = split_frames(self.simulator.observe(self._inner(state)))[1]
            allowed = legal if legal_actions is None else legal_actions
            if weight.is_cpu or i % _MOVES_BETWEEN_CHECKS == _MOVES_BETWEEN_CHECKS - 1:
                with intended():
                    if not bool(weight.any()):  # sync: none on the CPU, elsewhere once every 8 moves
                        break
        return torch.zeros_like(legal, dtype=torch.float32), value


def frames_of(observation: DictTensor) -> Tensor | Tensors:
    """Return the part of an observation that the simulator showed: a frame, or a dict of its parts."""
    return dict(observation.truncate_key("frame/").items()) or observation["frame"]


def split_frames(frames: Tensor | Tensors) -> tuple[Tensor, Tensor | None]:
    """Split a simulator's frames into the network's frame and the mask of legal actions (None if all are legal)."""
    if isinstance(frames, Tensor):
        return frames, None
    others = [name for name in frames if name != "legal"]
    if len(others) != 1:
        raise BadValueError(f"search: the simulator shows {sorted(frames)}, expected one frame, and perhaps 'legal'.")
    return frames[others[0]], frames.get("legal")
