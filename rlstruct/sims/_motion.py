"""The step of a TensorEnv as pure functions of dicts of tensors, for every backend the same. Part of rlstruct.sims.

A simulation is one dict of tensors [B, ...], the carry:

======================== ===================================================================================
``state/<field>``        the simulator's state
``state_key``            key of the running episode, if the simulator draws random numbers
``start/…, start_key``   the same for the next episode of each environment, drawn ahead (auto-reset only)
``start_episode``        its number (auto-reset only)
``pool/<field>``         start states to choose from instead of `TensorEnv.initial`, [M, ...] (if given)
``env_key, episode``     key of the environment, number of its episode
``elapsed``              steps taken in this episode
``running, terminated``  who still runs, whose episode ended by itself (episodic only)
``last_…``               the last actions (episodic only)
======================== ===================================================================================
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.functional.random import child_key, randint
from rlstruct.sims._spaces import random_action
from rlstruct.sims._state import Tensors, fields_of, make_state, stack_steps, where_done
from rlstruct.spaces import Space, leaves


class Simulator(Protocol):
    """What `Motion` asks of a TensorEnv."""

    stochastic: ClassVar[bool]

    def initial(self, key: Tensor) -> Any:  # noqa: ANN401 - the user's own class
        """Draw start states."""

    def transition(self, state: Any, action: Any, key: Tensor) -> tuple[Any, Tensor, Tensor]:  # noqa: ANN401
        """Take one step."""

    def observe(self, state: Any) -> Tensor | Tensors:  # noqa: ANN401
        """Show the states."""


class Motion:
    """Pure functions that begin, move and show the B environments of one simulator.

    Args:
        simulator: the user's three functions.
        time_limit: steps until an episode is truncated, None for never.
        action_space: what `transition` takes: one tensor, or a dict of them for a nested space.
        no_key: what `transition` gets if it draws nothing: empty, so that drawing from it fails.  [0] int64
    """

    def __init__(self, simulator: Simulator, time_limit: int | None, action_space: Space, no_key: Tensor) -> None:
        """Remember the simulator."""
        self._simulator = simulator
        self._time_limit = time_limit
        self._action_space = action_space
        self._plain_action = not isinstance(action_space, spaces.Dict | spaces.Tuple)
        self._no_key = no_key
        dtypes = {torch.float32, *(leaf.torch_dtype for leaf in leaves(action_space, "action").values())}
        self._zero = {dtype: torch.zeros((), dtype=dtype, device=no_key.device) for dtype in dtypes}
        self._where = f"{type(simulator).__name__}.transition"
        self._kind: type[Any] = type(None)  # the class of states and their fields, known from the first state on
        self._names: list[str] = []

    def initial(self, key: Tensor, pool: Tensors) -> Tensors:
        """Draw start states, from the pool if there is one.

        Args:
            key: [n] int64.
            pool: M states to choose from, or nothing.  [M, ...]

        Returns:
            The fields of n states.
        """
        if pool:
            row = randint(key, next(iter(pool.values())).shape[0])
            return {name: values.index_select(0, row) for name, values in pool.items()}
        state = self._simulator.initial(key)
        fields = fields_of(f"{type(self._simulator).__name__}.initial", state)
        self._kind, self._names = type(state), list(fields)
        return fields

    def begin(self, carry: Tensors, role: str, n_ahead: int) -> Tensors:
        """Draw the state with which episode ``episode + n_ahead`` begins, as ``state/…`` or ``start/…``."""
        key = child_key(carry["env_key"], carry["episode"] + n_ahead)
        drawn = {f"{role}/{name}": value for name, value in self.initial(key, part(carry, "pool/")).items()}
        return drawn | {f"{role}_key": key} if self._simulator.stochastic else drawn

    def starts(self, carry: Tensors) -> tuple[Tensors]:
        """Draw the state with which every environment will start again."""
        return ({**self.begin(carry, "start", 1), "start_episode": carry["episode"] + 1},)

    def advance(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Take one step where ended environments restart.

        Args:
            carry: where the simulation is.
            action: [B, ...]

        Returns:
            What changes in the carry; frames, reward, both ends and ``done`` of `reached`; frames of `current`. For the
            rest see `complete`.
        """
        state, reward, terminated = self._transition(carry, action)
        elapsed = carry["elapsed"] + 1
        truncated, done = self._ends(elapsed, terminated)
        reached = {**self.frames(state), "reward": reward, "terminated": terminated, "truncated": truncated}
        reached["done"] = done
        fields = self._fields(state)
        started = {name: where_done(done, carry["start/" + name], new) for name, new in fields.items()}
        current = self.frames(self.state(started), started)
        changed = {"state/" + name: value for name, value in started.items()}
        if self._simulator.stochastic:
            changed["state_key"] = torch.where(done, carry["start_key"], carry["state_key"])
        changed["elapsed"] = elapsed.masked_fill_(done, 0)
        changed["episode"] = torch.where(done, carry["start_episode"], carry["episode"])
        return changed, reached, current

    def step(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Do `advance` and `complete`."""
        changed, reached, current = self.advance(carry, action)
        return changed, *self.complete(reached, current, action)

    def advance_episodic(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Take one step where ended environments idle; see `advance`. There is no `current`: it is `reached`."""
        ran = carry["running"]
        state, reward, terminated = self._transition(carry, action)
        fields = {name: where_done(ran, new, carry["state/" + name]) for name, new in self._fields(state).items()}
        elapsed = carry["elapsed"] + ran
        terminated = (terminated & ran) | carry["terminated"]
        truncated, done = self._ends(elapsed, terminated)
        last = {f"last_{key}": where_done(ran, value, carry[f"last_{key}"]) for key, value in action.items()}
        reached = {
            **self.frames(self.state(fields), fields),
            "reward": torch.where(ran, reward, 0),
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
            **last,
        }
        changed = {"state/" + name: value for name, value in fields.items()}
        changed |= {"elapsed": elapsed, "terminated": terminated, "running": ran & ~done}
        return changed | last, reached, {}

    def explore(self, carry: Tensors) -> Tensors:
        """Draw a random action for every environment, keyed by its episode and step, [B, ...].

        Raises:
            TypeError: the space of actions is neither Discrete nor a bounded Box.
        """
        key = child_key(child_key(carry["env_key"], carry["episode"]), carry["elapsed"])
        return {"action": random_action(self._action_space, key)}

    def many(
        self,
        carry: Tensors,
        actions: Tensors,
        n_steps: int,
        auto_reset: bool,
        between_draws: int,
        for_compiler: bool,
    ) -> tuple[Tensors, ...]:
        """Take K steps.

        Args:
            carry: where the simulation is.
            actions: [K, B, ...]; empty to draw them, see `explore`.
            n_steps: K.
            auto_reset: whether ended environments restart.
            between_draws: draw start states once in so many steps.
            for_compiler: do all in one loop: what `complete` computes within the steps.

        Returns:
            As `advance`, each tensor of the last two with a time axis, [B, K, ...]; then the masks ``ran`` and
            ``running``, [B, K] (episodic only); then the actions that were drawn, [B, K, ...].
        """
        changed: Tensors = {}
        reached, current, masks, drawn = [], [], [], []
        for k in range(n_steps):
            if auto_reset and k % between_draws == 0:
                changed |= self.starts({**carry, **changed})[0]
            now = {**carry, **changed}
            move = self.advance if auto_reset else self.advance_episodic
            action = {key: value[k] for key, value in actions.items()} or self.explore(now)
            step, seen, after = move(now, action)
            if for_compiler and auto_reset:
                after |= self.wiped(seen["done"], seen["reward"], action)
            changed |= step
            reached.append(seen)
            current.append(after)
            masks.append({} if auto_reset else {"ran": now["running"], "running": step["running"]})
            drawn.append({} if actions else action)
        return changed, *(_stack(steps) for steps in (reached, current, masks, drawn))

    def frames(self, state: Any, carried: Tensors | None = None) -> Tensors:  # noqa: ANN401 - the user's own class
        """Show states as ``frame`` or ``frame/<key>``.

        Args:
            state: [B, ...]
            carried: its tensors, if they stay in the carry: then a frame that is one of them is copied, so that nobody
                can write into the simulation.
        """
        seen = self._simulator.observe(state)
        frames = {"frame": seen} if isinstance(seen, Tensor) else {f"frame/{key}": v for key, v in seen.items()}
        if carried is None:
            return frames
        return {key: v.clone() if any(v is field for field in carried.values()) else v for key, v in frames.items()}

    def state(self, fields: Tensors) -> Any:  # noqa: ANN401 - the user's own class
        """Build a state of the user's class."""
        return make_state(self._kind, fields)

    def complete(self, reached: Tensors, current: Tensors, action: Tensors) -> tuple[Tensors, Tensors]:
        """Add what follows from the action and from who is done to what `advance` or `many` returned.

        Args:
            reached: [B, ...] or [B, K, ...]
            current: the same
            action: the same

        Returns:
            Both, complete but for the masks that are False everywhere.
        """
        done = reached["done"]
        if "reward" not in current:
            current |= self.wiped(done, reached["reward"], action)
        reached |= {f"last_{key}": value.clone() for key, value in action.items()}
        current["initial_state"] = done
        return reached, current

    def wiped(self, done: Tensor, reward: Tensor, action: Tensors) -> Tensors:
        """Take ``reward`` and ``last_…`` of `current`: nothing was received or done in an episode that begins."""
        wiped = {"reward": torch.where(done, self._zero[reward.dtype], reward)}
        for key, value in action.items():
            rows = done if value.dim() == done.dim() else done.view(*done.shape, *[1] * (value.dim() - done.dim()))
            wiped[f"last_{key}"] = torch.where(rows, self._zero[value.dtype], value)
        return wiped

    def _fields(self, state: object) -> Tensors:
        return fields_of(self._where, state)

    def _transition(self, carry: Tensors, action: Tensors) -> tuple[Any, Tensor, Tensor]:
        simulator = self._simulator
        key = self._no_key
        if simulator.stochastic:
            key = child_key(carry["state_key"], carry["elapsed"])
        sent = action["action"] if self._plain_action else {k.removeprefix("action/"): v for k, v in action.items()}
        state = self.state({name: carry["state/" + name] for name in self._names})
        state, reward, terminated = simulator.transition(state, sent, key)
        return state, reward if reward.dtype is torch.float32 else reward.to(torch.float32), terminated

    def _ends(self, elapsed: Tensor, terminated: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``truncated`` and ``done``."""
        if self._time_limit is None:
            return torch.zeros_like(terminated), terminated
        truncated = elapsed >= self._time_limit
        return truncated, terminated | truncated


def part(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with ``prefix``, without it."""
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def _stack(steps: list[Tensors]) -> Tensors:
    return {key: stack_steps([step[key] for step in steps]).transpose(0, 1) for key in steps[0]}
