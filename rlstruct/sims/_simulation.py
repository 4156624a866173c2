"""One step of a TensorEnv as pure functions of dicts of tensors: restarts, time limits, random keys.

A simulation is one dict of tensors [B, ...], the carry. Its names are the same from the first reset on:

======================== ===================================================================================
``state/<field>``        the simulator's state
``state_key``            key of the running episode, if the simulator draws random numbers
``env_key, episode``     key of the environment, number of its episode
``elapsed``              steps taken in this episode
``running, terminated``  who still runs, whose episode ended by itself (episodic only)
``last_…``               the last actions (episodic only)
======================== ===================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rlstruct.core import Layout, TensorSpec, expect
from rlstruct.core.named import part_of
from rlstruct.engine.compiled import Compiled
from rlstruct.engine.private import version_of
from rlstruct.engine.waits import guards
from rlstruct.errors import UsageError
from rlstruct.functional.masks import rows_of
from rlstruct.functional.random import child_key
from rlstruct.sims._state import Tensors, fields_of, make_state
from rlstruct.spaces import Limits

_MOST_ROWS = 1 << 16  # start states drawn at once: more do not stay in a cache
Answer = tuple[Tensors, Tensors, Tensors, Tensors]
"""What changes in the carry; `reached`; `current` (empty if episodic: it is `reached`); the masks ``ran`` and
``running`` (episodic only). Masks that are False everywhere are left out."""


class Simulation:
    """Pure functions that begin, move and show the B environments of one simulator."""

    def __init__(self, simulator: Any, device: torch.device) -> None:  # noqa: ANN401 - a TensorEnv, which uses this
        self._simulator = simulator
        self._plain_action = not isinstance(simulator.action_space, spaces.Dict | spaces.Tuple)
        # What `transition` gets if it says that it draws nothing: empty, so that drawing from it fails.
        self._no_key = torch.zeros(0, dtype=torch.int64, device=device)
        self._limits = Limits(simulator.action_space, "action", device)
        self._kind: type[Any] = type(None)  # the class of states, known from the first one on

    def initial(self, key: Tensor) -> Tensors:
        """Draw start states: the fields of n of them, for keys [n] int64."""
        state = self._simulator.initial(key)
        self._kind = type(state)
        return fields_of(f"{type(self._simulator).__name__}.initial", state)

    def begin(self, carry: Tensors, episode: Tensor) -> Tensors:
        """Draw the states with which these episodes [B] begin, with their keys and numbers, by names in the carry."""
        key = child_key(carry["env_key"], episode)
        begun = {f"state/{name}": value for name, value in self.initial(key).items()}
        begun |= {"state_key": key} if self._simulator.stochastic else {}
        return {**begun, "episode": episode}

    def step(self, carry: Tensors, action: Tensors, starts: StartStates | None = None) -> Answer:
        """Take one step in every environment that runs.

        Start states are drawn for all environments, and used by those whose episode has ended. With ``starts``, on the
        CPU and not while tracing, the host reads which ones have ended, and takes theirs from there.
        """
        action = self._limits.clamp(action)
        if not self._simulator.auto_reset:
            return self._step(carry, action)
        return self._step_and_restart(carry, action, starts)

    @torch.no_grad()
    def check_transition(self, carry: Tensors, action: Tensors) -> None:
        """Raise unless `transition` keeps the shapes, dtypes and device of states, and answers one number per row.

        Restarts mix what it returns with other rows, and would repeat or round it. Nor may it write to its arguments.
        """
        fields, episode = part_of(carry, "state/"), carry["episode"]
        action = self._limits.clamp(action)
        given = {f"state's {name}": value for name, value in fields.items()} | dict(action)
        versions = {name: version_of(value) for name, value in given.items()}
        moved, reward, terminated = self._transition(carry, action)
        if changed := [name for name, value in given.items() if version_of(value) != versions[name]]:
            raise UsageError(
                f"{type(self._simulator).__name__}.transition: wrote to {changed[0]!r}, which it was given. The agent "
                "and the batch hold the same memory: make new tensors, x.clamp(-1, 1) instead of x.clamp_(-1, 1)."
            )
        found = {f"state/{name}": value for name, value in moved.items()} | {"reward": reward, "terminated": terminated}
        expected = dict(Layout.of(fields, drop=1).behind(prefix="state/").items())
        expected |= {"reward": TensorSpec((), torch.float32), "terminated": TensorSpec((), torch.bool)}
        fix = "Return the next state as `initial` makes states, with a reward and an end for each environment."
        where = f"{type(self._simulator).__name__}.transition:"
        expect(where, found, Layout(expected), device=episode.device, rows=len(episode), fix=fix)

    def frames(self, fields: Tensors, *, kept: bool = True) -> Tensors:
        """Show states as ``frame`` or ``frame/<key>``.

        If they are ``kept`` in the carry, a frame that is one of them is copied, so no caller can write into it.
        """
        seen = self._simulator.observe(self.state(fields))
        frames = {"frame": seen} if isinstance(seen, Tensor) else {f"frame/{key}": v for key, v in seen.items()}
        held = {id(value) for value in fields.values()} if kept else ()
        return {key: value.clone() if id(value) in held else value for key, value in frames.items()}

    def state(self, fields: Tensors) -> Any:  # noqa: ANN401 - the user's own class
        """Build a state of the user's class."""
        return make_state(self._kind, fields)

    def _step_and_restart(self, carry: Tensors, action: Tensors, starts: StartStates | None) -> Answer:
        moved, reward, terminated = self._transition(carry, action)
        now = {f"state/{name}": value for name, value in moved.items()}
        if self._simulator.stochastic:
            now["state_key"] = carry["state_key"]
        now |= {"episode": carry["episode"], "elapsed": carry["elapsed"] + 1, "reward": reward}
        # Copies, since the agent may write over its action.
        now |= {f"last_{key}": value.clone() for key, value in action.items()}
        truncated, done = self._ends(now["elapsed"], terminated)
        after = self._restart(carry, done, now) if starts is None else _restart_rows(carry, done, now, starts)
        shown = ["reward", *(f"last_{key}" for key in action)]
        # A simulator may show its state, which the agent may write over: without a restart the carry holds the same.
        kept = any(after[f"state/{name}"] is value for name, value in moved.items())
        reached = {**self.frames(moved, kept=kept), **{key: now[key] for key in shown}}
        reached |= {"terminated": terminated, "truncated": truncated, "done": done}
        current = {**self.frames(part_of(after, "state/")), "initial_state": done}
        current |= {key: after.pop(key) for key in shown}
        return after, reached, current, {}

    def _restart(self, carry: Tensors, done: Tensor, now: Tensors) -> Tensors:
        """Put the next episode's start in the place of what has ended (``done`` [B]): what is drawn, 0 for all else."""
        fresh = self.begin(carry, carry["episode"] + 1)
        return {
            name: _choose(done, fresh[name], value) if name in fresh else value.masked_fill(rows_of(done, value), 0)
            for name, value in now.items()
        }

    def _step(self, carry: Tensors, action: Tensors) -> Answer:
        """Environments whose episode has ended idle: they show their end, with reward 0."""
        ran = carry["running"]
        moved, reward, terminated = self._transition(carry, action)
        fields = {name: _choose(ran, value, carry[f"state/{name}"]) for name, value in moved.items()}
        elapsed = carry["elapsed"] + ran
        terminated = (terminated & ran) | carry["terminated"]
        truncated, done = self._ends(elapsed, terminated)
        running = ran & ~done
        last = {f"last_{key}": _choose(ran, value, carry[f"last_{key}"]) for key, value in action.items()}
        reached = {**self.frames(fields), "reward": reward.masked_fill(~ran, 0), "terminated": terminated, **last}
        reached |= {"truncated": truncated, "done": done}
        changed = {f"state/{name}": value for name, value in fields.items()} | last
        changed |= {"elapsed": elapsed, "terminated": terminated, "running": running}
        return changed, reached, {}, {"ran": ran, "running": running}

    def _transition(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensor, Tensor]:
        simulator = self._simulator
        key = child_key(carry["state_key"], carry["elapsed"]) if simulator.stochastic else self._no_key
        sent = action["action"] if self._plain_action else part_of(action, "action/")
        state, reward, terminated = simulator.transition(self.state(part_of(carry, "state/")), sent, key)
        return fields_of(f"{type(simulator).__name__}.transition", state), reward.to(torch.float32), terminated

    def _ends(self, elapsed: Tensor, terminated: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``truncated`` and ``done``."""
        if self._simulator.time_limit is None:
            return torch.zeros_like(terminated), terminated
        truncated = elapsed >= self._simulator.time_limit
        return truncated, terminated | truncated


class StartStates:
    """Start states of the next episodes, several of each environment at once: drawing few costs more than a step.

    Args:
        simulation: draws them.
        n_ahead: episodes of each environment, at most; 0 draws only what is taken.
    """

    def __init__(self, simulation: Simulation, n_ahead: int) -> None:
        self._simulation, self._n_ahead = simulation, n_ahead
        self._n = 0  # episodes of each environment that are drawn
        self._drawn: Tensors = {}  # [n * B, ...]
        self._first: NDArray[np.int64]  # number of the first one.  [B]
        self._keys: NDArray[np.int64]  # of the environments.  [B]

    def take(self, carry: Tensors, rows: NDArray[np.int64]) -> Tensors:
        """Return the starts of the next episodes of some rows [K], by names in the carry."""
        episode, key = carry["episode"], carry["env_key"]
        chosen = torch.from_numpy(rows)
        if not self._n_ahead:
            return self._simulation.begin({**carry, "env_key": key[chosen]}, episode[chosen] + 1)
        B, following = len(episode), episode.numpy()[rows] + 1  # sync: of CPU memory
        known = self._n > 0 and bool((self._keys[rows] == key.numpy()[rows]).all())  # sync: of CPU memory
        ahead = following - self._first[rows] if known else following  # [K]
        if not known or ahead.min() < 0 or ahead.max() >= self._n:
            self._n = max(1, min(self._n_ahead, _MOST_ROWS // B))
            numbers = torch.arange(1, self._n + 1, device=episode.device).unsqueeze(1) + episode  # [n, B]
            self._drawn = self._simulation.begin({**carry, "env_key": key.repeat(self._n)}, numbers.flatten())
            self._first, self._keys, ahead = numbers[0].numpy(), key.clone().numpy(), 0 * rows  # sync: of CPU memory
        at = torch.from_numpy(ahead * B + rows)
        return {name: value.index_select(0, at) for name, value in self._drawn.items()}


def _restart_rows(carry: Tensors, done: Tensor, now: Tensors, starts: StartStates) -> Tensors:
    """Do what `Simulation._restart` does, for the rows that have ended only; if there are none, copy what is shown."""
    rows = done.numpy().nonzero()[0]  # sync: of CPU memory
    if not len(rows):
        shown = [name for name in now if name == "reward" or name.startswith("last_")]
        return {**now, **{name: now[name].clone() for name in shown}}
    fresh, ended = starts.take(carry, rows), torch.from_numpy(rows)
    return {
        name: value.index_copy(0, ended, fresh[name]) if name in fresh else value.index_fill(0, ended, 0)
        for name, value in now.items()
    }


class TorchStepper:
    """Calls the simulator's own functions of tensors."""

    def __init__(self, simulation: Simulation, *, compiled: bool, n_ahead: int = 16) -> None:
        self._simulation = simulation
        self._compiled = Compiled(simulation.step) if compiled else None
        self._starts = StartStates(simulation, n_ahead)

    @torch.no_grad()
    def step(self, carry: Tensors, action: Tensors) -> Answer:
        """See `Simulation.step`."""
        if self._compiled is None:
            # Under a guard against waits of the host, the step is that of a device, so that the guard can judge it.
            on_host = carry["episode"].is_cpu and not guards()
            return self._simulation.step(carry, action, self._starts if on_host else None)
        changed, reached, current, masks = self._compiled(carry, action)
        return changed, reached, current, masks


def _choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Take the rows of ``new`` where ``mask``, else of ``old``."""
    return torch.where(rows_of(mask, old), new, old)
