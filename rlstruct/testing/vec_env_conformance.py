"""check_vec_env, a test of an environment against the contract of `VecEnv`, call by call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from rlstruct.core import DictTensor, Layout
from rlstruct.device import resolve_device
from rlstruct.functional.masks import masked_dicttensor
from rlstruct.in_place import ObservationBuffer, steps_into
from rlstruct.spaces import leaves, sample
from rlstruct.testing.conformance import (
    build_error,
    check_in_space,
    check_keys,
    check_layout,
    check_same,
    fail,
    holds,
    on_cpu,
    same,
    short,
)
from rlstruct.vec_env import EnvWrapper, Observed, StepResult, VecEnv

_COLUMNS = {
    "reward": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "done": torch.bool,
    "initial_state": torch.bool,
}
_FRESH = "This is the first observation of an episode: reward 0, nothing done, initial_state True, last_action 0."
_REACHED = {
    "done": "Compute it as terminated | truncated.",
    "initial_state": "A step never reaches an initial state: a restart belongs into `current` only.",
    "last_action": "Return a copy of the action that was taken in this step.",
    "": "An environment that has finished repeats its last observation with reward 0 until the next reset.",
}
_CURRENT = {
    "frame": "Without a restart, current shows what was reached; after one, the new episode's first observation.",
    "": f"Where an auto-resetting environment restarted, in the step that ended the episode or (still_running False "
    f"until then) in the next one: {_FRESH} Everywhere else current equals reached.",
}
_EPISODIC = {"": "An episodic environment does not restart: return reached itself."}
_EPISODIC_RUNS = "An episodic environment runs until it is done, and then not before the next reset."
_ALWAYS = (
    "An auto-resetting environment always runs. Only one whose restarts_take_steps is True may leave out the step "
    "after an episode's end, and restarts in it."
)
# Calls for which a returned tensor must keep its value; those of the first reset must always keep theirs.
_REMEMBERED_CALLS = 4
_STEPS_OF_SECOND_RUN = 40
_ENDS_TO_REPORT = 5  # if this many ends all show a first frame, it is no coincidence


def check_vec_env(
    env: VecEnv | Callable[..., VecEnv],
    *,
    env_args: Mapping[str, Any] | None = None,
    n_steps: int = 200,
    seed: int = 0,
    check_bounds: bool = True,
    ends_as_it_begins: bool = False,
) -> None:
    """Step a VecEnv with random actions, and check every result against the contract of `VecEnv`.

    The checks: B, devices, keys, dtypes, shapes and the bounds of the observation space; values after a reset; masks;
    reached and current; restarts, in the step that ends an episode or in the next one (`VecEnv.restarts_take_steps`);
    idle rows; returned tensors never change, and actions are not written to; ``env_info`` may be missing or empty;
    equal seeds give equal results, also with ``step_into`` (see `rlstruct.in_place.StepsInto`) if the environment has
    it; `close` may be called twice.

    Args:
        env: an environment or, to check seeds too, a factory. The environment is closed afterwards.
        env_args: arguments of the factory, besides ``seed``.
        n_steps: number of steps; take enough for episodes to end.
        seed: seed of the random actions, also passed to the factory.
        check_bounds: require frames to lie within the observation space, up to rounding.
        ends_as_it_begins: allow all episodes to end in the frame with which the next one begins. By default that
            fails, because it nearly always means that the final observation is lost.

    Raises:
        ConformanceError: a check failed; names the call, the key, the found and expected values, and the fix.
    """
    factory = None if isinstance(env, VecEnv) else env
    made = env if isinstance(env, VecEnv) else env(**(env_args or {}), seed=seed)
    try:
        walk = _Walk(made, seed, check_bounds)
        walk.run(n_steps)
        if not ends_as_it_begins:
            walk.check_final_frames()
        if factory is not None:
            _check_seeds(lambda: factory(**(env_args or {}), seed=seed), seed, min(n_steps, _STEPS_OF_SECOND_RUN))
    finally:
        made.close()
    try:
        made.close()
    except Exception as error:
        where = f"{type(made).__name__}.close (second call)"
        fix = "Remember in close() that it ran before."
        raise build_error(where, None, repr(error), "nothing to happen", fix) from error


def _check_seeds(create: Callable[[], VecEnv], seed: int, n_steps: int) -> None:
    envs = [create(), create(), create()]
    try:
        placed = [_Placed(envs[2])] if steps_into(envs[2]) is not None else []
        first, second, *third = (_Walk(env, seed, check_bounds=False) for env in (*envs[:2], *placed))
        for walk in (first, second, *third):
            walk.reset(None)
        for t in range(n_steps + 1):
            after = "after reset" if t == 0 else f"step {t}"
            fix = "Draw everything from generators seeded with the factory's seed."
            check_same(f"{first.name} made twice with seed={seed}, {after}", second.current, first.current, fix)
            fix = "step_into shows what step does: write every key of `out`, in every row."
            for walk in third:
                check_same(f"{first.name}.step_into, {after}", walk.current, first.current, fix)
            for walk in (first, second, *third):
                walk.step()
    finally:
        for env in envs:
            env.close()


class _Placed(EnvWrapper):
    """Wrapper that steps by ``step_into``, in poisoned memory, and returns what ``step`` would return."""

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Keep the observation, which the next step reads."""
        observation, running = self.env.reset(env_info)
        self._last, self._running = ObservationBuffer.of(observation.clone()), running
        return observation, running

    def step(self, action: DictTensor) -> StepResult:
        """Step into poisoned memory."""

        def poison(tensor: Tensor) -> Tensor:
            return torch.full_like(tensor, 77 if tensor.dtype is not torch.bool else 1)

        out, final = (ObservationBuffer.of(self._last.observation().map(poison)) for _ in range(2))
        for flag in out.flags:
            flag.fill(False)
        untouched = final.observation().clone()
        into: Any = steps_into(self.env)
        ended = into(action, self._last, out, final if self.env.auto_reset else None)
        ran, running, rows = (None, None, []) if ended is None else ended
        ran = self._running if ran is None else ran
        running = self._running if running is None else running
        self._last, self._running, current = out, running, out.observation()
        others = torch.ones(self.n_envs(), dtype=torch.bool, device="cpu")
        others[list(rows)] = False
        where, fix = f"{type(self.env).__name__}.step_into", "Write to `final` only in rows that restart."
        check_same(where, final.observation().map(lambda v: v[others]), untouched.map(lambda v: v[others]), fix)
        reached = masked_dicttensor(final.observation(), current, others)
        return StepResult((reached, ran), (current, running), restarted=bool(len(rows)))


class _Walk:
    """Walk of one environment: every call is checked against the state after the previous call."""

    def __init__(self, env: VecEnv, seed: int, check_bounds: bool) -> None:
        self.env = env
        self.name = f"{type(env.env).__name__} (step_into)" if isinstance(env, _Placed) else type(env).__name__
        self.current = DictTensor()  # on the CPU, as are all tensors kept here
        self.running = torch.zeros(0, dtype=torch.bool, device="cpu")
        self._calls = 0
        self._bounds = check_bounds
        self._keys: set[str] = set()
        self._first: list[tuple[str, DictTensor, DictTensor]] = []
        self._latest: deque[tuple[str, DictTensor, DictTensor]] = deque(maxlen=4 * _REMEMBERED_CALLS)  # 4 things a step
        # Frames that changed, episodes that ended, and episodes that ended in the next one's first frame.
        self._n_changes = self._n_ends = self._n_lost = 0
        self._check_attributes()
        self._B = env.n_envs()
        self._actions = deepcopy(env.action_space)
        self._actions.seed(seed)
        self._frames = leaves(env.observation_space, "frame", where=self.name)
        self._last_actions = leaves(env.action_space, "last_action", where=self.name)

    def run(self, n_steps: int) -> None:
        """Reset in every way, then take steps; reset once in mid-episode, and whenever all have idled for two steps."""
        self.reset(None)
        self.reset(DictTensor())
        idle = 0
        for t in range(n_steps):
            self.step()
            idle = idle + 1 if not self.running.any() else 0
            if idle == 3 or t == n_steps // 2:
                self.reset(None)
                idle = 0

    def reset(self, env_info: DictTensor | None) -> None:
        """Reset, and check what comes back."""
        self._calls += 1
        shown = "None" if env_info is None else "an empty env_info"
        where = f"{self.name}.reset({shown}) (call {self._calls})"
        try:
            answer = self.env.reset(env_info)
        except Exception as error:
            fix = "reset works with its defaults where env_info is missing or empty."
            raise build_error(where, None, repr(error), "an observation", fix) from error
        self.current, self.running = self._observed(where, answer)
        check_same(where, self.current, self._fresh(self.current), _FRESH)
        self._check_mask(where, "running", self.running, torch.ones_like(self.running), "After a reset all run.")
        self._check_memory(where)

    def step(self) -> None:
        """Step with random actions, and check what comes back."""
        self._calls += 1
        where = f"{self.name}.step (call {self._calls})"
        action = DictTensor(sample(self._actions, "action", self._B, self.env.device))
        action.set("unrelated", torch.arange(self._B, device=self.env.device))
        sent = action.map(on_cpu)
        answer = self._pair(where, "((reached, running), (current, still_running))", self.env.step(action))
        reached, ran = self._observed(f"{where}, reached", answer[0])
        current, running = self._observed(f"{where}, current", answer[1])
        check_same(f"{where}, action", action.map(on_cpu), sent, "Do not write to the action: copy it first.")
        self._check_mask(
            f"{where}, reached", "running", ran, self.running, "It marks who was stepped: who ran after the last call."
        )
        self._check_reached(f"{where}, reached", reached, ran, sent)
        ended = ran & reached["done"]
        if self.env.auto_reset:
            waits = ended & ~running & self.env.restarts_take_steps  # and restarts in the next step
            restarted, runs, fixes, fix = ~ran | (ended & ~waits), ~waits, _CURRENT, _ALWAYS
        else:
            restarted, runs, fixes, fix = torch.zeros_like(ran), ran & ~ended, _EPISODIC, _EPISODIC_RUNS
        expected = masked_dicttensor(reached, self._fresh(current), restarted)
        check_same(f"{where}, current", current, expected, fixes)
        self._check_mask(f"{where}, current", "still_running", running, runs, fix)
        if not getattr(answer, "restarted", True):
            fix = "Say restarted=False only where no environment restarted: the final observation is not kept then."
            check_same(f"{where}, current", current, reached, fix)
        changed = ran & ~ended & ~self._same_frames(reached, self.current)
        self._n_changes += int(changed.sum())  # sync: the kit looks at every step
        self._n_ends += int(restarted.sum())  # sync: as above
        self._n_lost += int((restarted & self._same_frames(reached, current)).sum())  # sync: as above
        self.current, self.running = current, running
        self._check_memory(where)

    def _same_frames(self, one: DictTensor, other: DictTensor) -> Tensor:
        return torch.stack([same(one[key], other[key]) for key in self._frames]).all(dim=0)  # [B]

    def check_final_frames(self) -> None:
        """Fail if every episode ended in the first frame of the next one although frames do change."""
        if self._n_changes and self._n_ends >= _ENDS_TO_REPORT and self._n_lost == self._n_ends:
            fail(
                f"{self.name}.step, reached",
                next(iter(self._frames)),
                f"the first frame of the next episode at each of {self._n_ends} ends",
                "the frame that the episode ended with",
                "Keep the final observation before the restart: the restarted one belongs into `current` only. If "
                "episodes do end as they begin, pass ends_as_it_begins=True.",
            )

    def _check_attributes(self) -> None:
        env, where = self.env, self.name
        n_envs = env.n_envs()
        if not isinstance(n_envs, int) or n_envs < 1:
            fail(f"{where}.n_envs", None, repr(n_envs), "an int, at least 1", "Return B, the number of environments.")
        if not isinstance(env.device, torch.device) or env.device != resolve_device(env.device):
            fix = "Keep what rlstruct.resolve_device(...) returns."
            fail(f"{where}.device", None, repr(env.device), "a torch.device with its index", fix)
        for attribute in ("auto_reset", "action_space", "observation_space"):
            if not hasattr(env, attribute):
                fail(f"{where}.{attribute}", None, "nothing", "an attribute", f"Set self.{attribute} in __init__.")
        if not isinstance(env.auto_reset, bool):
            fail(f"{where}.auto_reset", None, repr(env.auto_reset), "True or False", "Set it in __init__.")

    def _pair(self, where: str, shape: str, value: object) -> tuple[Any, Any]:
        if not isinstance(value, tuple) or len(value) != 2:
            fail(where, None, type(value).__name__, f"the pair {shape}", "Return a tuple of two.")
        return value

    def _observed(self, where: str, value: object) -> tuple[DictTensor, Tensor]:
        """Check one (observation, mask) on its own, remember it, and return it on the CPU."""
        observation, mask = self._pair(where, "(observation, mask)", value)
        if not isinstance(observation, DictTensor) or not isinstance(mask, Tensor):
            got = f"({type(observation).__name__}, {type(mask).__name__})"
            fail(where, None, got, "(DictTensor, Tensor)", "Build the observation with DictTensor({...}).")
        device = self.env.device
        for key, found in (("observation", observation.device), ("mask", mask.device)):
            if found is not None and found != device:
                fix = f"Create it with device={str(device)!r}, or wrap the environment in DeviceEnv."
                fail(where, key, found, device, fix)
        if self.env.n_envs() != self._B:
            fail(where, None, f"n_envs() = {self.env.n_envs()}", self._B, "B never changes: let finished rows idle.")
        copy = observation.map(on_cpu)
        self._remember(where, observation, copy)
        masks = DictTensor({"mask": mask})
        check_layout(where, masks, Layout({"mask": ((self._B,), torch.bool)}), "The mask is [B] bool.")
        self._remember(where, masks, masks.map(on_cpu))
        self._check_columns(where, copy)
        return copy, on_cpu(mask)

    def _check_columns(self, where: str, observation: DictTensor) -> None:
        expected = {*self._frames, *_COLUMNS, *self._last_actions}
        got = set(observation.keys())
        check_keys(where, got & expected, expected, "Every observation carries all keys of the VecEnv contract.")
        check_keys(where, got, self._keys or got, "Return the same keys in every call.")
        self._keys = got
        for key, writer in (("rng", "The batcher"), ("chosen_action", "A replay")):
            if key in got:
                fail(where, key, "this key", "it to be free", f"{writer} writes {key}: give yours another name.")
        columns = Layout({key: ((), dtype) for key, dtype in _COLUMNS.items()})
        check_layout(where, observation.get(columns), columns, "Return one value for each environment.", self._B)
        for key, leaf in self._frames.items():
            check_in_space(where, key, observation[key], leaf, self._B, values=self._bounds)
        for key, leaf in self._last_actions.items():  # 0 after a reset, which a space need not hold
            check_in_space(where, key, observation[key], leaf, self._B, values=False)
        reward = observation["reward"]
        if not holds(reward.isfinite()):
            fail(where, "reward", short(reward), "finite numbers", "Look for a division by zero in the environment.")

    def _fresh(self, observation: DictTensor) -> DictTensor:
        """Return the observation with the columns that the first one of an episode must have."""
        columns = dict(observation.items())
        for key in ("reward", "terminated", "truncated", "done", *self._last_actions):
            columns[key] = torch.zeros_like(columns[key])
        columns["initial_state"] = torch.ones_like(columns["initial_state"])
        return DictTensor(columns)

    def _check_reached(self, where: str, reached: DictTensor, ran: Tensor, sent: DictTensor) -> None:
        stepped = dict(reached.items())
        stepped["done"] = reached["terminated"] | reached["truncated"]
        stepped["initial_state"] = torch.zeros_like(ran)
        for key in self._last_actions:
            stepped[key] = sent[key.removeprefix("last_")]
        idle = dict(self.current.items())
        idle["reward"] = torch.zeros_like(idle["reward"])
        expected = masked_dicttensor(DictTensor(idle), DictTensor(stepped), ran)
        check_same(where, reached, expected, _REACHED)

    def _check_mask(self, where: str, key: str, got: Tensor, expected: Tensor, fix: str) -> None:
        check_same(where, DictTensor({key: got}), DictTensor({key: expected}), fix)

    def _remember(self, where: str, observation: DictTensor, copy: DictTensor) -> None:
        if len(self._first) < 2:
            self._first.append((where, observation, copy))
        self._latest.append((where, observation, copy))

    def _check_memory(self, where: str) -> None:
        fix = "Return fresh tensors: clone whatever a later call writes to."
        for origin, observation, copy in [*self._first, *self._latest]:
            check_same(f"{where} changed the result of {origin}", observation.map(on_cpu), copy, fix)
