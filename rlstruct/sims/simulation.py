"""One step of a TensorEnv as pure functions of dicts of tensors: restarts, time limits, random keys.

A simulation is one dict of tensors [B, ...], the carry. Its keys stay the same after the first reset:

======================== ===================================================================================
``state/<field>``        the simulator's state
``state_key``            key of the running episode, if the simulator draws random numbers
``env_key, episode``     key of the environment, number of its episode
``elapsed``              steps taken in this episode
``running, terminated``  masks of running and of terminated episodes (episodic only)
``last_…``               the last actions (episodic only)
======================== ===================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import Layout, TensorSpec, expect
from rlstruct.core.layout import as_signed, take_rows
from rlstruct.core.named_tensors import part_of
from rlstruct.engine.torch_private import version_of
from rlstruct.errors import BadTypeError, UsageError
from rlstruct.functional.masks import rows_of, zero_rows
from rlstruct.functional.random import child_key
from rlstruct.sims.state import Tensors, fields_of, state_of
from rlstruct.spaces import Limits

StepTensors = tuple[Tensors, Tensors, Tensors, Tensors]
"""Changes to the carry; `reached`; `current` (empty if episodic, where it equals `reached`); the masks ``ran`` and
``running`` (episodic only). Masks that are False everywhere are omitted."""

MOST_ROWS = 1 << 16
"""Most start states that are drawn at once: more do not fit into a cache."""


class Simulation:
    """Pure functions that start, step and show the B environments of one simulator."""

    def __init__(self, simulator: Any, device: torch.device) -> None:  # noqa: ANN401 - a TensorEnv, which uses this
        self._simulator = simulator
        self._plain_action = not isinstance(simulator.action_space, spaces.Dict | spaces.Tuple)
        # Key for simulators that declare no randomness: empty, so that drawing from it fails.
        self._no_key = torch.zeros(0, dtype=torch.int64, device=device)
        self._limits = Limits(simulator.action_space, "action", device)
        self._boxes = Limits(simulator.action_space, "action", device, boxes=True)
        self._kind: type[Any] = type(None)  # the class of states, known after the first

    def initial(self, key: Tensor) -> Tensors:
        """Draw the fields of n start states for keys [n] int64."""
        state = self._simulator.initial(key)
        self._kind = type(state)
        return fields_of(f"{type(self._simulator).__name__}.initial", state)

    def begin(self, carry: Tensors, episode: Tensor) -> Tensors:
        """Draw the start states of episodes [B], and return them with their keys and numbers, as in the carry."""
        key = child_key(carry["env_key"], episode)
        begun = {f"state/{name}": value for name, value in self.initial(key).items()}
        begun |= {"state_key": key} if self._simulator.stochastic else {}
        return {**begun, "episode": episode}

    def step(self, carry: Tensors, action: Tensors, starts: StartStates | None = None) -> StepTensors:
        """Take one step in every running environment; without ``starts``, draw start states in this step."""
        clamped = self._limits.clamp(action)
        if not self._simulator.auto_reset:
            return self._step(carry, clamped)
        # Clone actions that clamping returned unchanged: the agent may overwrite its memory.
        own = {key: value.clone() if value is action[key] else value for key, value in clamped.items()}
        return self._step_and_restart(carry, own, starts)

    @torch.no_grad()
    def check_transition(self, carry: Tensors, action: Tensors) -> None:
        """Raise unless `transition` keeps the shapes, dtypes and device of states, and returns one number per row.

        Restarts mix its results with other rows, which would broadcast or cast them. It may not write to its arguments,
        nor set an attribute anew in every call.
        """
        fields, episode = part_of(carry, "state/"), carry["episode"]
        action = self._limits.clamp(action)
        inputs = {f"state's {name}": value for name, value in fields.items()} | dict(action)
        versions = {name: version_of(value) for name, value in inputs.items()}
        before = dict(vars(self._simulator))
        moved, reward, terminated = self.transition(carry, action)
        if self._replaced(before):
            # A table that the first call made stays. Copies, because a kept argument would be the same object again.
            before = dict(vars(self._simulator))
            self.transition(*({name: value.clone() for name, value in part.items()} for part in (carry, action)))
            if names := self._replaced(before):
                raise UsageError(
                    f"{type(self._simulator).__name__}.transition: every call sets self.{names[0]}, expected a "
                    "function of its arguments, because compiled and captured steps do not run this line again. Keep "
                    "what changes in the state that `initial` returns, one row per environment."
                )
        if changed := [name for name, value in inputs.items() if version_of(value) != versions[name]]:
            raise UsageError(
                f"{type(self._simulator).__name__}.transition: wrote to {changed[0]!r}, which it was given. The agent "
                "and the batch hold the same memory: make new tensors, x.clamp(-1, 1) instead of x.clamp_(-1, 1)."
            )
        outputs = {f"state/{name}": value for name, value in moved.items()} | {
            "reward": reward,
            "terminated": terminated,
        }
        expected = dict(Layout.of(fields, drop=1).behind(prefix="state/").items())
        expected |= {"reward": TensorSpec((), torch.float32), "terminated": TensorSpec((), torch.bool)}
        fix = "Return the next state as `initial` makes states, with a reward and an end for each environment."
        where = f"{type(self._simulator).__name__}.transition:"
        expect(where, outputs, Layout(expected), device=episode.device, rows=len(episode), fix=fix)

    def _replaced(self, before: dict[str, Any]) -> list[str]:
        """Return the names of the simulator's attributes that are new or other objects."""
        return [
            name for name, value in vars(self._simulator).items() if name not in before or before[name] is not value
        ]

    def frames(self, fields: Tensors, *, kept: bool = True) -> Tensors:
        """Show states as ``frame`` or ``frame/<key>``.

        If the carry keeps the states (``kept``), clone frames that are fields, so that no caller writes into them.
        """
        frame = self._simulator.observe(self.state(fields))
        frames = {"frame": frame} if isinstance(frame, Tensor) else {f"frame/{key}": v for key, v in frame.items()}
        held = {id(value) for value in fields.values()} if kept else ()
        return {key: value.clone() if id(value) in held else value for key, value in frames.items()}

    def state(self, fields: Tensors) -> Any:  # noqa: ANN401 - the user's own class
        """Build a state of the user's class."""
        return state_of(self._kind, fields)

    def _step_and_restart(self, carry: Tensors, action: Tensors, starts: StartStates | None) -> StepTensors:
        """Step environments, and restart those whose episode ends."""
        moved, reward, terminated = self.transition(carry, action)
        now = {f"state/{name}": value for name, value in moved.items()}
        if self._simulator.stochastic:
            now["state_key"] = carry["state_key"]
        now |= {"episode": carry["episode"], "elapsed": carry["elapsed"] + 1, "reward": reward}
        now |= {f"last_{key}": value for key, value in action.items()}
        truncated, done = self._ends(now["elapsed"], terminated)
        looks = starts is not None and starts.most == 1 and done.is_cpu
        all_go_on = looks and not done.numpy().any()  # sync: of CPU memory
        restart = self.restart if starts is None else starts.restart
        after = dict(now) if all_go_on else restart(carry, done, now)
        if starts is not None:
            starts.episode = after["episode"]
        shown = ["reward", *(f"last_{key}" for key in action)]
        reached = self.frames(moved, kept=all_go_on) | {key: now[key] for key in shown}
        reached |= {"terminated": terminated, "truncated": truncated, "done": done}
        current = self.frames(part_of(after, "state/")) | {"initial_state": done}
        current |= {key: after.pop(key) for key in shown}
        return after, reached, current, {}

    def restart(self, carry: Tensors, done: Tensor, now: Tensors) -> Tensors:
        """Replace ended episodes (``done`` [B]) with the next start: drawn values where there are any, else 0."""
        return _restarted(done, now, self.begin(carry, carry["episode"] + 1))

    def _step(self, carry: Tensors, action: Tensors) -> StepTensors:
        """Step episodic environments; ended ones idle, and keep showing their last frame with reward 0."""
        ran = carry["running"]
        moved, reward, terminated = self.transition(carry, action)
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

    def transition(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensor, Tensor]:
        """Call the simulator's `transition`; return the fields of the next states, the rewards, and ``terminated``.

        It gets actions within their Boxes; ``last_action`` is what the agent chose.
        """
        simulator, action = self._simulator, self._boxes.clamp(action)
        key = child_key(carry["state_key"], carry["elapsed"]) if simulator.stochastic else self._no_key
        sent = action["action"] if self._plain_action else part_of(action, "action/")
        answer = simulator.transition(self.state(part_of(carry, "state/")), sent, key)
        where = f"{type(simulator).__name__}.transition"
        several = isinstance(answer, tuple | list)
        if not several or len(answer) != 3 or not all(isinstance(value, Tensor) for value in answer[1:]):
            got = ", ".join(type(value).__name__ for value in (answer if several else [answer]))
            raise BadTypeError(
                f"{where}: returned ({got}), expected three: the next state, and tensors of rewards [B] and terminated "
                "[B] bool. Write torch.zeros_like(reward, dtype=torch.bool) instead of False."
            )
        state, reward, terminated = answer
        return fields_of(where, state), reward.to(torch.float32), terminated

    def _ends(self, elapsed: Tensor, terminated: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``truncated`` and ``done``."""
        if self._simulator.time_limit is None:
            return torch.zeros_like(terminated), terminated
        truncated = elapsed >= self._simulator.time_limit
        return truncated, terminated | truncated


class StartStates:
    """Start states of the next episodes, drawn ahead for several steps: an eager draw costs more than a step.

    A step ends at most one episode per environment, so the next n episodes suffice for n steps.
    """

    def __init__(self, simulation: Simulation, most: int) -> None:
        self.most = most  # steps to draw ahead; 1 for large states, which the CPU draws only when an episode ends
        self.episode: Tensor | None = None  # expected at the next step; a different tensor means a replaced state
        self._simulation = simulation
        self._left = 0
        self._drawn: Tensors  # of the next n episodes.  [n * B, ...]
        self._row: Tensor  # row of each environment's next start state.  [B]
        self._packs: list[tuple[list[str], Tensor]]  # names of [B] tensors of one dtype, and their starts [F, n * B]

    def restart(self, carry: Tensors, done: Tensor, now: Tensors) -> Tensors:
        """Do what `Simulation.restart` does, with one operation for all [B] tensors of one dtype."""
        episode = carry["episode"]
        if self._left == 0 or episode is not self.episode:
            self._draw(carry, now)
        self._left -= 1
        row, now = self._row, {**now, "row": self._row}
        packed = {name for names, _ in self._packs for name in names}
        alone = {name: value for name, value in now.items() if name not in packed}
        fresh = {name: take_rows(self._drawn[name], row) for name in alone if name in self._drawn}
        after = _restarted(done, alone, fresh)
        for names, starts in self._packs:
            ended = torch.stack([now[name] for name in names])
            after.update(zip(names, torch.where(done, take_rows(starts, row, 1), ended).unbind(), strict=True))
        self._row = after.pop("row")
        return after

    def _draw(self, carry: Tensors, now: Tensors) -> None:
        episode = carry["episode"]
        B, device = len(episode), episode.device
        more = 1 if episode.is_cpu else 2  # on a GPU, launches dominate
        self._left = n = max(1, min(more * self.most, more * MOST_ROWS // B)) if self.most > 1 else 1
        ahead = torch.arange(1, n + 1, device=device).unsqueeze(1) + episode  # [n, B]
        keys = carry["env_key"].expand(n, B).flatten()
        rows = torch.arange((n + 1) * B, device=device)
        self._drawn = self._simulation.begin({**carry, "env_key": keys}, ahead.flatten())
        self._row, self._drawn["row"] = rows[:B], rows[B:]  # successive starts of an environment are B rows apart
        numbers: dict[torch.dtype, list[str]] = {}
        for name, value in {**now, "row": self._row}.items():
            if value.dim() == 1:
                numbers.setdefault(value.dtype, []).append(name)
        self._packs = []
        for dtype, names in numbers.items():
            if any(name in self._drawn for name in names):
                zero = torch.zeros(n * B, dtype=dtype, device=device)
                self._packs.append((names, torch.stack([self._drawn.get(name, zero) for name in names])))


def _restarted(done: Tensor, now: Tensors, fresh: Tensors) -> Tensors:
    return {
        name: _choose(done, fresh[name], value) if name in fresh else zero_rows(value, done)
        for name, value in now.items()
    }


def _choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Take the rows of ``new`` where ``mask``, else of ``old``."""
    if (signed := as_signed(old)) is old:
        return torch.where(rows_of(mask, old), new, old)
    return torch.where(rows_of(mask, old), as_signed(new), signed).view(old.dtype)  # for torch before 2.8
