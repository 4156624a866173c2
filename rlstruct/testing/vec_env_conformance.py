"""check_vec_env, a test of an environment against the contract of `VecEnv`, call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from gymnasium import Space
from torch import Tensor

from rlstruct.core import DictTensor, Layout
from rlstruct.device import resolve_device
from rlstruct.engine.validity import unchecked
from rlstruct.errors import Explained, check_call
from rlstruct.functional.masks import masked_dicttensor
from rlstruct.rl_agent import RL_Agent
from rlstruct.spaces import leaves, sample
from rlstruct.testing.conformance import (
    check_bounds,
    check_layout,
    check_present,
    check_same,
    equal_rows,
    fail,
    holds,
    layout_of,
    on_cpu,
    short,
)
from rlstruct.vec_env import EnvWrapper, ObservationBuffer, Observed, StepResult, VecEnv, expect_env, steps_into

_COLUMNS = {
    "reward": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "done": torch.bool,
    "initial_state": torch.bool,
}
_MASK = "mask/running"  # name of the mask among the columns of its observation
_FIRST = "This is the first observation of an episode: reward 0, nothing done, initial_state True, last_action 0."
# Remedies by the part of the key before the first "/"; "" for all others.
_FRESH = {"mask": "After a reset all run.", "": _FIRST}
_REACHED = {
    "mask": "It marks the environments that were stepped: those that ran after the last call.",
    "done": "Compute it as terminated | truncated.",
    "initial_state": "A step never reaches an initial state: a restart belongs in `current` only.",
    "last_action": "Return a copy of the action that was taken in this step.",
    "": "An environment that has finished repeats its last observation with reward 0 until the next reset.",
}
_CURRENT = {
    "frame": "Without a restart, current shows what was reached; after one, the new episode's first observation.",
    "": f"Where an auto-resetting environment restarted, in the step that ended the episode or (still_running False "
    f"until then) in the next one: {_FIRST} Everywhere else current equals reached.",
    "mask": "An auto-resetting environment always runs. Only one whose restarts_take_steps is True may leave out the "
    "step after an episode's end, and restarts in it.",
}
_EPISODIC = {
    "mask": "An episodic environment runs until it is done, and then idles until the next reset.",
    "": "An episodic environment does not restart: return reached itself.",
}
# Number of calls in which a returned tensor must keep its value; results of the first reset must always keep theirs.
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
    equal seeds give equal results, even with ``step_into`` (see `rlstruct.vec_env.StepsInto`) if the environment has
    it; `close` may be called twice.

    Args:
        env: an environment or, to check seeds too, a factory. The environment is closed afterwards.
        env_args: arguments of the factory, besides ``seed``.
        n_steps: number of steps; take enough for episodes to end.
        seed: seed of the random actions, also passed to the factory.
        check_bounds: require frames to lie within the observation space, up to rounding.
        ends_as_it_begins: allow all episodes to end in the frame with which the next one begins. By default this is an
            error, because it nearly always means that the final observation is lost.

    Raises:
        TypeError: ``env`` is neither a VecEnv nor a function that can be called with these arguments.
        ConformanceError: a check failed; names the call, the key, the found and expected values, and the fix.
    """
    with unchecked():  # the kit looks at all values
        _check_vec_env(env, env_args or {}, n_steps, seed, check_bounds, ends_as_it_begins)


def _check_vec_env(
    env: VecEnv | Callable[..., VecEnv],
    env_args: Mapping[str, Any],
    n_steps: int,
    seed: int,
    check_bounds: bool,
    ends_as_it_begins: bool,
) -> None:
    factory = None if isinstance(env, VecEnv) else env
    made = _created(env, {**env_args, "seed": seed})
    try:
        walk = _Walk(made, seed, check_bounds)
        walk.run(n_steps)
        if not ends_as_it_begins:
            walk.check_final_frames()
        if factory is not None:
            _check_seeds(lambda: factory(**env_args, seed=seed), seed, min(n_steps, _STEPS_OF_SECOND_RUN))
    finally:
        made.close()
    try:
        made.close()
    except Exception as error:
        where, fix = f"{type(made).__name__}.close (second call)", "Remember in close() that it ran before."
        fail(where, None, repr(error), "nothing to happen", fix, error)


def _created(env: VecEnv | Callable[..., VecEnv], arguments: Mapping[str, Any]) -> VecEnv:
    """Return an environment, or one that a factory creates; raise TypeError for anything else."""
    if isinstance(env, VecEnv | RL_Agent) or not callable(env):
        expect_env("check_vec_env: env is", env)
        return env
    fix = "it must take seed; its other arguments come from env_args"
    check_call("check_vec_env", "env", env, arguments, fix)
    made = env(**arguments)
    expect_env("check_vec_env: env returned", made)
    return made


def _check_seeds(create: Callable[[], VecEnv], seed: int, n_steps: int) -> None:
    envs = [create(), create()]
    if steps_into(envs[0]) is not None:
        envs.append(_Placed(create()))
    named = (
        (
            f" made twice with seed={seed}",
            "Draw everything from generators seeded with the factory's seed; in a TensorEnv from `key`.",
        ),
        (".step_into", "step_into shows what step does: write every key of `out`, in every row."),
    )
    try:
        walks = [_Walk(env, seed, check_bounds=False) for env in envs]
        for t in range(n_steps + 1):
            for walk in walks:
                walk.step() if t else walk.reset(None)
            first, *others = walks
            for walk, (name, fix) in zip(others, named, strict=False):
                where = f"{first.name}{name}, {f'step {t}' if t else 'after reset'}"
                check_same(where, walk.current, first.current, fix)
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
        self.current = DictTensor()  # the observation and its mask, on the CPU, as are all tensors kept here
        self._calls = 0
        self._bounds = check_bounds
        self._layout: Layout | None = None  # of the first observation
        self._returned: list[tuple[str, DictTensor, DictTensor]] = []  # call, result and a copy of it
        # Frames that changed, episodes that ended, and episodes that ended in the next one's first frame.
        self._n_changes = self._n_ends = self._n_lost = 0
        self._B = n_envs = env.n_envs()
        if not isinstance(n_envs, int) or n_envs < 1:
            fix = "Return B, the number of environments."
            fail(f"{self.name}.n_envs", None, repr(n_envs), "an int, at least 1", fix)
        if not isinstance(env.device, torch.device) or env.device != resolve_device(env.device):
            fix = "Keep what rlstruct.resolve_device(...) returns."
            fail(f"{self.name}.device", None, repr(env.device), "a torch.device with its index", fix)
        for name, cls in {"auto_reset": bool, "action_space": Space, "observation_space": Space}.items():
            value = getattr(env, name, None)
            if not isinstance(value, cls):
                fail(f"{self.name}.{name}", None, repr(value), f"a {cls.__name__}", f"Set self.{name} in __init__.")
        self._actions = deepcopy(env.action_space)
        self._actions.seed(seed)
        self._frames = leaves(env.observation_space, "frame", where=self.name)
        self._last_actions = leaves(env.action_space, "last_action", where=self.name)

    def run(self, n_steps: int) -> None:
        """Reset in every way, then take steps; reset once mid-episode, and whenever all have idled for two steps."""
        self.reset(None)
        self.reset(DictTensor())
        idle = 0
        for t in range(n_steps):
            self.step()
            idle = idle + 1 if not self.current[_MASK].any() else 0
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
            if isinstance(error, Explained) and not isinstance(error, KeyError):
                raise  # it says what is wrong; a KeyError may come from a missing env_info
            fix = "reset works with its defaults where env_info is missing or empty."
            fail(where, None, repr(error), "an observation", fix, error)
        self.current = self._observed(where, answer)
        check_same(where, self.current, self._fresh(self.current), _FRESH)
        self._check_memory(where)

    def step(self) -> None:
        """Step with random actions, and check what comes back."""
        self._calls += 1
        where = f"{self.name}.step (call {self._calls})"
        action = DictTensor(sample(self._actions, "action", self._B, self.env.device))
        action.set("unrelated", torch.arange(self._B, device=self.env.device))
        sent = action.map(on_cpu)
        answer = self._pair(where, "((reached, running), (current, still_running))", self.env.step(action))
        reached = self._observed(f"{where}, reached", answer[0])
        current = self._observed(f"{where}, current", answer[1])
        check_same(f"{where}, action", action.map(on_cpu), sent, "Do not write to the action: copy it first.")
        ran = self.current[_MASK]
        check_same(f"{where}, reached", reached, self._expected(reached, sent), _REACHED)
        ended = ran & reached["done"]
        if self.env.auto_reset:
            waits = ended & ~current[_MASK] & self.env.restarts_take_steps  # and restarts in the next step
            restarted, runs, fixes = ~ran | (ended & ~waits), ~waits, _CURRENT
        else:
            restarted, runs, fixes = torch.zeros_like(ran), ran & ~ended, _EPISODIC
        expected = masked_dicttensor(reached, self._fresh(current), restarted)
        check_same(f"{where}, current", current, _changed(expected, {_MASK: runs}), fixes)
        if not getattr(answer, "restarted", True):
            fix = "Say restarted=False only where no environment restarted: the final observation is not kept then."
            check_same(f"{where}, current", current, _changed(reached, {_MASK: runs}), fix)
        changed = ran & ~ended & ~self._same_frames(reached, self.current)
        self._n_changes += int(changed.sum())  # sync: the kit looks at every step
        self._n_ends += int(restarted.sum())  # sync: as above
        self._n_lost += int((restarted & self._same_frames(reached, current)).sum())  # sync: as above
        self.current = current
        self._check_memory(where)

    def _same_frames(self, one: DictTensor, other: DictTensor) -> Tensor:
        return torch.stack([equal_rows(one[key], other[key]) for key in self._frames]).all(dim=0)  # [B]

    def check_final_frames(self) -> None:
        """Fail if every episode ended in the first frame of the next one although frames do change."""
        if self._n_changes and self._n_ends >= _ENDS_TO_REPORT and self._n_lost == self._n_ends:
            fail(
                f"{self.name}.step, reached",
                next(iter(self._frames)),
                f"the first frame of the next episode at each of {self._n_ends} ends",
                "the frame that the episode ended with",
                "Keep the final observation before the restart: the restarted one belongs in `current` only. If "
                "episodes do end as they begin, pass ends_as_it_begins=True.",
            )

    def _pair(self, where: str, shape: str, value: object) -> tuple[Any, Any]:
        if not isinstance(value, tuple) or len(value) != 2:
            fail(where, None, type(value).__name__, f"the pair {shape}", "Return a tuple of two.")
        return value

    def _observed(self, where: str, value: object) -> DictTensor:
        """Check one (observation, mask) on its own, remember it, and return both on the CPU."""
        observation, mask = self._pair(where, "(observation, mask)", value)
        if not isinstance(observation, DictTensor) or not isinstance(mask, Tensor):
            got = f"({type(observation).__name__}, {type(mask).__name__})"
            fail(where, None, got, "(DictTensor, Tensor)", "Build the observation with DictTensor({...}).")
        device = self.env.device
        for key, actual in (("observation", observation.device), ("mask", mask.device)):
            if actual is not None and actual != device:
                fix = f"Create it with device={str(device)!r}, or wrap the environment in DeviceEnv."
                fail(where, key, actual, device, fix)
        if self.env.n_envs() != self._B:
            fail(where, None, f"n_envs() = {self.env.n_envs()}", self._B, "B never changes: let finished rows idle.")
        masks = DictTensor({_MASK: mask})
        check_layout(where, masks, Layout({_MASK: ((self._B,), torch.bool)}), "The mask is [B] bool.")
        copy, copied_masks = observation.map(on_cpu), masks.map(on_cpu)
        self._returned += [(where, observation, copy), (where, masks, copied_masks)]
        self._check_columns(where, copy)
        return _changed(copy, {_MASK: copied_masks[_MASK]})

    def _check_columns(self, where: str, observation: DictTensor) -> None:
        columns = {key: ((), dtype) for key, dtype in _COLUMNS.items()}
        expected = Layout({**columns, **layout_of(self._frames), **layout_of(self._last_actions)})
        fix = "Every observation carries all keys of the VecEnv contract, in the shapes and dtypes of the spaces."
        check_present(where, observation, expected, fix, self._B)
        for key, writer in (("rng", "The batcher"), ("chosen_action", "A replay")):
            if key in observation:
                fail(where, key, "this key", "it to be free", f"{writer} writes {key}: give yours another name.")
        check_layout(where, observation, self._layout, "Return the same keys in every call.")
        self._layout = Layout.of(observation)
        for key, leaf in self._frames.items() if self._bounds else ():  # last_action is 0 after a reset, in any space
            fix = "Keep the values inside the space, or widen the space."
            check_bounds(where, key, observation[key], leaf, fix)
        reward = observation["reward"]
        if not holds(reward.isfinite()):
            fail(where, "reward", short(reward), "finite numbers", "Look for a division by zero in the environment.")

    def _fresh(self, observation: DictTensor) -> DictTensor:
        """Return the observation with the columns that the first one of an episode must have."""
        zeros = ("reward", "terminated", "truncated", "done", *self._last_actions)
        columns = {key: torch.zeros_like(observation[key]) for key in zeros}
        return _changed(
            observation, columns | {key: torch.ones_like(observation[key]) for key in ("initial_state", _MASK)}
        )

    def _expected(self, reached: DictTensor, sent: DictTensor) -> DictTensor:
        """Return what a step with these actions must have reached, as far as the contract says."""
        ran, done = self.current[_MASK], reached["terminated"] | reached["truncated"]
        last_actions = {key: sent[key.removeprefix("last_")] for key in self._last_actions}
        stepped = {"done": done, "initial_state": torch.zeros_like(ran), _MASK: ran, **last_actions}
        idle = _changed(self.current, {"reward": torch.zeros_like(reached["reward"])})
        return masked_dicttensor(idle, _changed(reached, stepped), ran)

    def _check_memory(self, where: str) -> None:
        del self._returned[2 : -4 * _REMEMBERED_CALLS]  # a step returns 4 things
        fix = "Return fresh tensors: clone whatever a later call writes to."
        for origin, returned, copy in self._returned:
            check_same(f"{where} changed the result of {origin}", returned.map(on_cpu), copy, fix)


def _changed(observation: DictTensor, columns: Mapping[str, Tensor] | DictTensor) -> DictTensor:
    return DictTensor({**dict(observation.items()), **columns})
