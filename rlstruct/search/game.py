"""Games for a search: a simulator judged by a network, or by random play to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rlstruct.engine.waits import intended
from rlstruct.errors import BadTypeError, BadValueError
from rlstruct.functional import random
from rlstruct.search.tree import Tensors

_MOVES_BETWEEN_LOOKS = 8  # off the CPU, asking whether all random games are over stalls the device
_KEY = "key"  # the random key in the state of a search, beside the simulator's fields

Network = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps frames [B, ...] to logits [B, A] and the value [B] of who acts next."""


class Simulator(Protocol):
    """A game, as `rlstruct.sims.TensorEnv` has them, with one more function: the state must follow from what is shown.

    Attributes:
        stochastic: whether `transition` draws random numbers.
    """

    stochastic: bool

    def transition(self, state: Any, action: Any, key: Tensor) -> tuple[Any, Tensor, Tensor]:  # noqa: ANN401
        """Take one step: ``(next state, reward [B], terminated [B])``. A state is a dataclass of tensors."""

    def observe(self, state: Any) -> Tensor | Tensors:  # noqa: ANN401
        """Show states: a frame; or a dict with one frame and with ``legal`` [B, A] bool."""

    def state_from(self, frames: Tensor | Tensors) -> Any:  # noqa: ANN401
        """Return the states that show what `observe` returned."""


class GameModel:
    """A simulator as a search sees it, judged by a network.

    Args:
        simulator: the game; nothing is left to chance in it.
        network: judges frames.
        discount: of the next state's value: -1 for two players in turn, of whom one wins what the other loses; else
            from 0 to 1.

    Raises:
        ValueError: the simulator draws random numbers. A node keeps one next state for each action, so a search would
            know what chance will do, and prefer actions that are good only if it does.
    """

    def __init__(self, simulator: Simulator, network: Network | None = None, *, discount: float = -1.0) -> None:
        """Judge nothing yet."""
        if simulator.stochastic:
            raise BadValueError(
                f"GameModel: {type(simulator).__name__} draws random numbers in its transitions, expected a simulator "
                "without chance: the search would know what chance will do. Search in one whose transitions draw none."
            )
        self.simulator, self.network, self.discount = simulator, network, discount
        self._keeps_key = False
        self._kind: type[Any] = type(None)  # the class of states, known from the first ones on

    def begin(self, state: Any, key: Tensor) -> Tensors:  # noqa: ANN401 - the simulator's own class
        """Return simulator states as those of a search.

        Args:
            state: of the simulator.  [B, ...]
            key: for random games (`RolloutModel`).  [B] int64
        """
        self._kind = type(state)
        return {**vars(state), _KEY: key} if self._keeps_key else dict(vars(state))

    def advance(self, state: Tensors, action: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """Take a step of the simulator; see `rlstruct.search.tree.Model`."""
        nothing = action[:0]
        after, reward, terminated = self.simulator.transition(self._inner(state), action, nothing)
        key = random.child_key(state[_KEY], 0) if self._keeps_key else nothing
        return self.begin(after, key), reward, torch.where(terminated, 0.0, self.discount)

    def evaluate(self, state: Tensors) -> tuple[Tensor, Tensor]:
        """Judge states; see `rlstruct.search.tree.Model`."""
        frame, legal = split_frames(self.simulator.observe(self._inner(state)))
        logits, value = self.judge(state, frame, legal)
        return logits if legal is None else logits.masked_fill(~legal, -torch.inf), value

    def judge(self, state: Tensors, frame: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits [B, A] and value [B] of states and what they show.

        Raises:
            TypeError: there is no network.
        """
        if self.network is None:
            raise BadTypeError("GameModel: there is no network. Pass one, or judge by random play with RolloutModel.")
        return self.network(frame)

    def _inner(self, state: Tensors) -> Any:  # noqa: ANN401 - the simulator's own class
        return self._kind(**{name: part for name, part in state.items() if name != _KEY})


class RolloutModel(GameModel):
    """A simulator judged by one random game to the end from each state; all actions are equally likely.

    Args:
        simulator: the game.
        n_actions: A.
        n_moves: after so many moves a random game is broken off.
        discount: see `GameModel`.
    """

    def __init__(self, simulator: Simulator, n_actions: int, n_moves: int, *, discount: float = -1.0) -> None:
        """Play nothing yet."""
        super().__init__(simulator, discount=discount)
        self._n_actions, self._n_moves, self._keeps_key = n_actions, n_moves, True

    def judge(self, state: Tensors, frame: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits of 0, and what the player who acts next got in a random game."""
        key = state[_KEY]
        if legal is None:
            legal = torch.ones((key.shape[0], self._n_actions), dtype=torch.bool, device=key.device)
        value, weight = torch.zeros_like(key, dtype=torch.float32), torch.ones_like(key, dtype=torch.float32)
        drawn = legal
        for i in range(self._n_moves):
            # Games that are over go on, with a weight of 0, where there may be no legal action any more.
            action = (random.uniform(random.child_key(key, i + 1), (self._n_actions,)) + drawn).argmax(-1)
            state, reward, discount = self.advance(state, action)
            value, weight = value + weight * reward, weight * discount
            found = split_frames(self.simulator.observe(self._inner(state)))[1]
            drawn = legal if found is None else found
            if weight.is_cpu or i % _MOVES_BETWEEN_LOOKS == _MOVES_BETWEEN_LOOKS - 1:
                with intended():
                    if not bool(weight.any()):  # sync: on the CPU none, elsewhere once in so many moves of all games
                        break
        return torch.zeros_like(legal, dtype=torch.float32), value


def split_frames(frames: Tensor | Tensors) -> tuple[Tensor, Tensor | None]:
    """Return the frame that a network sees, and which actions are legal, None if all are.

    Args:
        frames: what a simulator shows.

    Raises:
        ValueError: there are several frames beside ``legal``.
    """
    if isinstance(frames, Tensor):
        return frames, None
    others = [name for name in frames if name != "legal"]
    if len(others) != 1:
        raise BadValueError(f"search: the simulator shows {sorted(frames)}, expected one frame, and 'legal' beside it.")
    return frames[others[0]], frames.get("legal")
