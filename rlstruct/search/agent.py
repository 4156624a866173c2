"""SearchAgent: a policy that searches before every move and stores the results in the trajectories."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.executors import EXECUTORS
from rlstruct.engine.runner import Runner
from rlstruct.engine.streams import stream_on
from rlstruct.errors import BadTypeError, BadValueError, warn_user
from rlstruct.functional import random
from rlstruct.rl_agent import RL_Agent
from rlstruct.search.game import GameModel, RolloutModel, frames_of, split_frames
from rlstruct.search.tree import Tensors
from rlstruct.search.tree_search import SearchConfig, TreeSearch


class SearchAgent(RL_Agent):
    """Agent that searches from the frames of all environments at once.

    It returns ``action`` [B] int64; ``action_policy`` [B, A], the target for training a policy; ``action_visits``
    [B, A]; and ``action_value`` [B], the expected return of that policy for the player to move. Depending on the
    settings, its state holds ``moves`` [B] int64, the moves of each episode so far (`SearchConfig.exploring_moves`),
    and the last trees as ``tree/…`` (`SearchConfig.reuse_tree`). An empty state starts over. On CUDA, a search with a
    model runs as one graph, so the agent is not `pure`: a graph cannot be captured within another.

    Args:
        model: maps frames [B, ...] to logits [B, A] and value [B] for the player to move, as
            `rlstruct.agents.ConvolutionalActorCritic` does; None plays random games to the end.
        create_simulator: called as ``create_simulator(n_envs=1, device=…)``, such as `rlstruct.sims.ConnectFour`: a
            `rlstruct.search.Simulator`, whose state can be derived from its frames.
        config: settings of the search.
        discount: see `rlstruct.search.GameModel`.
        n_rollout_moves: maximum length of a random game.
        device: where the agent lives; by default the model's.
        stochastic: explore, with noise and sampled actions; False takes the best action.
        copy_model: keep a copy of the model, so that training can continue while this agent acts with the old weights.

    Raises:
        TypeError: the simulator cannot derive its state from its frames, or lacks what random games or kept trees need.
        ValueError: its transitions are random, see `GameModel`; or ``compiled`` is set for random games.

    Attributes:
        model: the agent's own network, or the shared one; or None.
        search: the `TreeSearch`.
        game: the model of the game.
        n_inferences: number of states evaluated by the model.
        device: of observations and actions.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        create_simulator: Callable[..., Any],
        config: SearchConfig | None = None,
        discount: float = -1.0,
        n_rollout_moves: int = 64,
        device: DeviceLike | None = None,
        stochastic: bool = True,
        copy_model: bool = True,
    ) -> None:
        first = None if model is None else next(model.parameters(), None)
        self.device = resolve_device(device or ("cpu" if first is None else first.device))
        self.model = copy.deepcopy(model).to(self.device) if model is not None and copy_model else model
        self._simulator = simulator = create_simulator(n_envs=1, device=self.device)
        if not hasattr(simulator, "state_from"):
            raise BadTypeError(
                f"SearchAgent: {type(simulator).__name__} has no state_from, expected a simulator whose state follows "
                "from what it shows. Write state_from(frames), the inverse of observe."
            )
        settings = config or SearchConfig()
        needed = ["action_space"] if model is None or settings.reuse_tree else []
        needed += ["reset", "get_state"] if settings.reuse_tree else []
        if missing := [name for name in needed if not hasattr(simulator, name)]:
            purpose = "reuse_tree is True" if settings.reuse_tree else "there is no model, so it plays random games"
            raise BadTypeError(
                f"SearchAgent: {type(simulator).__name__} has no {' and no '.join(missing)}, and {purpose}. Derive the "
                "simulator from rlstruct.sims.TensorEnv, or write them: a Discrete action_space, reset() and "
                "get_state()."
            )
        if not stochastic:
            settings = replace(
                settings, dirichlet_fraction=0.0, gumbel_scale=0.0, temperature=0.0, exploring_moves=None
            )
        if self.model is None and settings.compiled:
            raise BadValueError(
                "SearchAgent: compiled is True without a model, expected False: random games end at different moves, "
                "and compiled code cannot stop early. Pass a model, or leave compiled out."
            )
        self.game = (
            RolloutModel(simulator, int(simulator.action_space.n), n_rollout_moves, discount=discount)
            if self.model is None
            else GameModel(simulator, self.model, discount=discount)
        )
        self.search = TreeSearch(self.game, settings, device=self.device)
        self.n_inferences = 0
        # A rollout stops once all random games are over; a graph would always play the maximum number of moves.
        graph = None if self.model is None else EXECUTORS["graph"](self.device)
        self._move = Runner(
            self._search, self.model, self.device, graph, failed=_warn_uncaptured, stream=stream_on(self.device)
        )

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Return 0 moves, and trees with a root only; see `RL_Agent.initial_state`."""
        parts = DictTensor()
        if self.search.config.exploring_moves is not None:
            parts.set("moves", torch.zeros(B, dtype=torch.int64, device=self.device))
        if self.search.config.reuse_tree:
            self._simulator.reset()
            key = torch.zeros(1, dtype=torch.int64, device=self.device)
            one = self.game.begin(self._simulator.get_state(), key)
            nothing = {name: part.new_zeros(B, *part.shape[1:]) for name, part in one.items()}
            logits = torch.zeros(B, int(self._simulator.action_space.n), device=self.device)
            parts = parts + self.search.new_trees(nothing, logits, logits[:, 0]).rows().prepend_key("tree/")
        return parts

    @torch.no_grad()
    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Search from the frames, drawing from ``observation["rng"]``; see `RL_Agent.__call__`."""
        kept = dict((self.initial_state(agent_info, observation.n_elems()) if state.empty() else state).items())
        if "moves" in kept:
            kept["moves"] = torch.where(observation["initial_state"], 0, kept["moves"])
        self.n_inferences += observation.n_elems() * (1 + self.search.config.n_simulations)
        self._move.weights_changed()
        return self._move(frames_of(observation), observation["rng"], DictTensor(kept))

    def creator(self) -> Callable[..., RL_Agent]:
        """Return a factory of equal agents, with the simulator's own settings; see `RL_Agent.creator`."""
        config = replace(self.search.config, compiled=False)
        return partial(SearchAgent, create_simulator=type(self._simulator), discount=self.game.discount, config=config)

    def without_search(self) -> NetworkAgent:
        """Return an agent that acts by the network alone and shares it."""
        return NetworkAgent(self._network("without_search"))

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Load new weights; see `RL_Agent.update`."""
        self._network("update").load_state_dict(info)

    def _network(self, method: str) -> nn.Module:
        if self.model is None:
            raise BadTypeError(f"SearchAgent.{method}: this agent has no model, it plays random games.")
        return self.model

    def _search(self, state_frames: Tensor | Tensors, rng: Tensor, kept: DictTensor) -> tuple[DictTensor, DictTensor]:
        """Search from frames; return the agent's output and its new state."""
        model_key, search_key = random.split(rng, 2).unbind(1)
        explore, after = None, DictTensor()
        if (limit := self.search.config.exploring_moves) is not None:
            explore = (1.0 - kept["moves"] / limit).clamp(min=0.0)
            after = DictTensor({"moves": kept["moves"] + 1})
        earlier = kept.truncate_key("tree/")
        state = self.game.begin(self._simulator.state_from(state_frames), model_key)
        result = self.search(state, search_key, explore, None if earlier.empty() else earlier)
        if not earlier.empty():
            after = after + result.tree.rows().prepend_key("tree/")
        action = {"action": result.action, "action_policy": result.policy}
        return DictTensor({**action, "action_visits": result.visits, "action_value": result.expected}), after


def _warn_uncaptured(why_not: str) -> None:
    warn_user(f"SearchAgent: the search does not run as one graph, and is slower: {why_not}")


class NetworkAgent(RL_Agent):
    """Agent that takes the legal action with the highest logit of a `SearchAgent`'s network; stateless.

    It returns ``action`` [B] int64, ``action_logits`` [B, A], -inf for illegal actions, and ``value`` [B].
    """

    pure = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Evaluate the frames; see `RL_Agent.__call__`."""
        frame, legal = split_frames(frames_of(observation))
        logits, value = self.model(frame)
        if legal is not None:
            logits = logits.masked_fill(~legal, -torch.inf)
        return DictTensor({"action": logits.argmax(-1), "action_logits": logits, "value": value}), state
