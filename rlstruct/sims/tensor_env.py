"""TensorEnv: base class that turns three functions of tensors into a `VecEnv`.

A simulator defines start states, transitions and observations; this module and `rlstruct.sims.simulation` add
restarts, time limits and random keys. `TensorEnv.step` never waits for the device and no shape depends on data, so a
step can be compiled, or captured as a CUDA graph.

Every episode is a pure function of the environment's seed, the episode's number and the actions: episode e of
environment j begins with ``initial(key)``, where key is child e of a key made from ``seed + j``, and its step t draws
from child t of that key. So environment j behaves the same in a batch of 64 or 4,096, in one process or four, on any
device, with any backend.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import renamed
from rlstruct.core import DictTensor, Layout, expect
from rlstruct.core.layout import check_indices, take_rows
from rlstruct.core.named_tensors import part_of
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.compiled import Compiled, simulators_are_compiled
from rlstruct.engine.validity import StepChecks, read_flag
from rlstruct.errors import BadValueError, ShapeMismatchError, UsageError, expect_type
from rlstruct.functional.masks import rows_of, write_rows
from rlstruct.functional.random import child_key, randint, uniform
from rlstruct.options import check_seed
from rlstruct.profiling import operation
from rlstruct.sims.simulation import Simulation, StartStates, StepTensors
from rlstruct.sims.state import Tensors, fields_of, layout_of_rows
from rlstruct.spaces import leaves, zeros
from rlstruct.vec_env import IdleGuard, Observed, PureStep, StepResult, VecEnv, check_action

if TYPE_CHECKING:
    from rlstruct.engine.fused import FusedRollout, Perceptron
    from rlstruct.sims.kernels import GameKernel

State = TypeVar("State")
Backend = Literal["auto", "torch", "compile", "warp"]

_SALT = 0x51D  # number of the seed's child key: differs from the keys of agents with the same seed


@renamed.members
class TensorEnv(VecEnv, Generic[State]):
    """B copies of a simulator whose state is tensors, on any device.

    Subclasses write `initial`, `transition` and `observe`, and set ``action_space`` and ``observation_space``
    (gymnasium spaces of one environment). Never write to the returned tensors: observations share memory.

    Attributes:
        stochastic: `transition` draws random numbers. Otherwise its key is empty, and steps are cheaper.
        default_time_limit: the time limit of the task, None for none.
        kernel_module: name of the module whose ``KERNEL`` `kernel` returns; "" for none.

    Args:
        n_envs: B.
        seed: environment j draws from ``seed + j``; at least 0.
        device: device of the simulation.
        dtype: of floating-point states and frames. ``torch.float64`` also turns a float32 observation space into one of
            float64.
        auto_reset: ended environments restart within the step; otherwise they idle until `reset`.
        time_limit: an episode is truncated after this many steps; None for never, "default" for the limit of the task.
        backend: ``"torch"`` runs the functions eagerly, ``"compile"`` turns a whole step into one kernel
            (TorchInductor; the first step takes some 20 seconds). ``"auto"`` is ``"compile"`` in a training that is
            long enough to gain from it (`TrainingConfig.compile_simulator`), else ``"torch"``; the attribute
            ``backend`` is what it chose. ``"warp"`` (an extra) is ``"torch"``, except that
            RL_Batcher collects a batch with a small network in one launch of the simulator's `kernel`. Results are
            equal, floating-point numbers up to rounding.

    Raises:
        TypeError: the class lacks a space.
        ValueError: an argument is out of range, or the device does not exist or cannot compile, or there is no kernel.
        ImportError: the extra of the backend is not installed.
    """

    stochastic: ClassVar[bool] = True
    default_time_limit: ClassVar[int | None] = None
    kernel_module: ClassVar[str] = ""
    restarts_take_steps = False
    _starts_ahead: ClassVar[int] = 16  # see StartStates

    def __init__(
        self,
        n_envs: int,
        seed: int = 0,
        *,
        device: DeviceLike = "cpu",
        dtype: torch.dtype = torch.float32,
        auto_reset: bool = True,
        time_limit: int | Literal["default"] | None = "default",
        backend: Backend = "auto",
    ) -> None:
        self._name = type(self).__name__
        self.time_limit = self.default_time_limit if time_limit == "default" else time_limit
        if n_envs < 1 or (self.time_limit is not None and self.time_limit < 1):
            raise BadValueError(
                f"{self._name}: got n_envs={n_envs}, time_limit={time_limit}, expected at least 1 each."
            )
        seed = check_seed(self._name, "seed", seed, n_envs)
        self._device = resolve_device(device)
        if backend not in ("auto", "torch", "compile", "warp"):
            raise BadValueError(
                f"{self._name}: got backend={backend!r}, expected 'auto', 'torch', 'compile' or 'warp'."
            )
        if backend == "auto":
            backend = "compile" if self._device.type == "cpu" and simulators_are_compiled() else "torch"
        if backend != "torch" and self._device.type not in ("cpu", "cuda"):
            raise BadValueError(f"{self._name}: {backend!r} works on cpu and cuda, not on {self._device}: use 'torch'.")
        for name in ("action_space", "observation_space"):
            fix = f"Set it in the class: {name} = gymnasium.spaces.…"
            expect_type(f"{self._name}: {name} is", getattr(self, name, None), spaces.Space, "a gymnasium space", fix)
        self.action_space = deepcopy(self.action_space)  # seeding one instance must not seed the others
        space = deepcopy(self.observation_space)
        if dtype == torch.float64 and isinstance(space, spaces.Box) and space.dtype == np.float32:
            space = spaces.Box(space.low.astype(np.float64), space.high.astype(np.float64), dtype=np.float64)
        self.observation_space = space
        self.dtype, self.auto_reset, self.backend = dtype, auto_reset, backend
        self._n_envs = n_envs
        self._no = torch.zeros(n_envs, dtype=torch.bool, device=self._device)
        self._yes = ~self._no
        self._no_action = zeros(self.action_space, "action", n_envs, self._device)
        self._action_layout = layout_of_rows(leaves(self.action_space, "action"))
        self._simulation = Simulation(self, self._device)
        seeds = torch.arange(seed, seed + n_envs, dtype=torch.int64, device=self._device)
        self._carry: Tensors = {"env_key": child_key(seeds, _SALT), "episode": torch.full_like(seeds, -1)}
        self._compiled = Compiled(self._step_and_check) if backend == "compile" else None
        self._starts = StartStates(self._simulation, self._starts_ahead)
        self._checks = StepChecks(self._name, self)
        self._checked = False  # `transition` was checked at the first step
        self._current = DictTensor()  # the last observation
        self._idle = IdleGuard(self._name, self.time_limit)
        self._kernels: Any = importlib.import_module("rlstruct.sims.kernels.fused") if backend == "warp" else None
        if self._kernels is not None:
            self._kernels.check_kernel(self)

    @abstractmethod
    def initial(self, key: Tensor) -> State:
        """Draw start states.

        Args:
            key: one key for each state to draw, for `rlstruct.functional.random`.  [n] int64, any n

        Returns:
            A frozen dataclass of tensors (always the same class), or a DictTensor.  [n, ...] on the device of key
        """

    @abstractmethod
    def transition(self, state: State, action: Any, key: Tensor) -> tuple[State, Tensor, Tensor]:  # noqa: ANN401
        """Take one step in every environment. Write to no argument, and keep nothing in ``self`` that changes.

        Args:
            state: current states.  [B, ...]
            action: the agents' actions, a tensor; for nested spaces a dict of them (``x``, ``x/y``). Those for a Box
                are clipped to its bounds, as gymnasium.wrappers.ClipAction does.  [B, ...]
            key: a fresh key for each environment, empty unless ``stochastic``.  [B] int64

        Returns:
            ``(next state, reward [B] float, terminated [B] bool)``. TensorEnv adds restarts and time limits.
        """

    @abstractmethod
    def observe(self, state: State) -> Tensor | Tensors:
        """Show the states [B, ...] to the agent.

        Returns:
            One frame per state; for nested spaces a dict of frames (``x``, ``x/y``). No views of the state.  [B, ...]
        """

    def kernel(self) -> GameKernel:
        """Return the simulator's three functions as Warp functions of one environment, for ``backend="warp"``.

        Override it to give your own simulator a kernel; see `rlstruct.sims.kernels.GameKernel`.
        """
        if not self.kernel_module:
            raise BadValueError(
                f"{self._name}: backend='warp' needs a kernel, and there is none. Override {self._name}.kernel (see "
                "rlstruct.sims.kernels.GameKernel), or use backend='torch' or 'compile'."
            )
        kernel: GameKernel = importlib.import_module(self.kernel_module).KERNEL
        return kernel

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self._device

    def n_envs(self) -> int:
        """Return B."""
        return self._n_envs

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Begin the next episode in every environment; see `VecEnv.reset`.

        Args:
            env_info: on the CPU. ``state/<field>``, [B, ...], replaces the start states of these episodes only; copied.
                ``initial_steps``, [B] int64, plays 0 to that many random actions first, so thousands of games do not
                run in lockstep. Other keys are ignored.
        """
        self._checks.read()
        settings = dict(env_info.items()) if env_info is not None else {}
        fields = part_of(settings, "state/")
        self._carry = self._begun({name: value.to(self._device, copy=True) for name, value in fields.items()})
        if "initial_steps" in settings:
            self._play_at_random(settings["initial_steps"])
        self._current = first = self._first()
        self._idle.begin()
        self._checks.observation(first)
        return first, self._yes

    @operation("simulator")
    def step(self, action: DictTensor) -> StepResult:
        """Take one step in every environment that runs; see `VecEnv.step`.

        Raises:
            ValueError: on the CPU, an action is not in its space, or a frame or reward is NaN. On an accelerator, where
                `step` never waits, the next `reset`, `get_state`, `state_dict` or `close` raises it. An action outside
                its space takes the nearest one's effect meanwhile, and one outside a Box always does: that is no error.
        """
        sent = self._sent(action)
        running = self._carry.get("running")
        if self._compiled is None:
            self._checks.action(sent, running)
        with torch.no_grad():
            if self._compiled is None:
                changed, reached, current, masks = self._simulation.step(self._carry, sent, self._starts)
                check = True
            else:
                (changed, reached, current, masks), impossible = self._compiled(self._carry, sent)
                check = not impossible or read_flag(impossible[0])
                if check:
                    self._checks.action(sent, running)
        self._carry = {**self._carry, **changed}
        no, yes = self._no, self._yes
        observation = DictTensor.unchecked({**reached, "initial_state": no})
        over = {"terminated": no, "truncated": no, "done": no}
        self._current = after = DictTensor.unchecked({**current, **over}) if self.auto_reset else observation
        masks = masks or {"ran": yes, "running": yes}
        if not self.auto_reset:
            self._idle.check(masks["ran"])
        result = StepResult((observation, masks["ran"]), (after, masks["running"]), restarted=self.auto_reset)
        return self._checks.step(result) if check else result

    def pure_step(self, action: DictTensor) -> PureStep | None:
        """Check an action as `step` does, and return that step as a pure function; see `rlstruct.vec_env.PureStep`.

        The function draws start states in each step, and does not check values.

        Returns:
            None unless the backend is "compile", ended environments restart, and no subclass overrides `step`.
        """
        watched = type(self).step is not TensorEnv.step or "step" in vars(self)
        if self._compiled is None or not self.auto_reset or watched:
            return None
        self._sent(action)

        def step(carry: Tensors, action: Tensors) -> tuple[Tensors, Tensors, DictTensor]:
            sent = {key: action[key] for key in self._action_layout}
            changed, reached, current, _ = self._simulation.step(carry, sent)
            no = torch.zeros_like(reached["done"])
            over = {"terminated": no, "truncated": no, "done": no}
            return changed, {**current, **over}, DictTensor.unchecked({**reached, "initial_state": no})

        return step

    def fused_rollout(self, perceptron: Perceptron, n_timesteps: int) -> FusedRollout | None:
        """Return a launch of T steps with an agent (`rlstruct.engine.fused`), or None if no kernel supports it."""
        watched = type(self).step is not TensorEnv.step or "step" in vars(self)  # overridden: needs single steps
        if self._kernels is None or not self.auto_reset or watched:
            return None
        rollout: FusedRollout | None = self._kernels.fused_rollout(self, perceptron, n_timesteps)
        return rollout

    def get_state(self, ids: Sequence[int] | Tensor | None = None) -> State:
        """Copy the states of some environments.  [K, ...].

        Args:
            ids: a list or [K] int64 on the device; None for all.
        """
        self._check_begun("get_state")
        self._checks.read()
        rows, fields = self._rows("get_state", ids), part_of(self._carry, "state/")
        state: State = self._simulation.state({name: take_rows(v, rows) for name, v in fields.items()})
        return state

    def set_state(self, ids: Sequence[int] | Tensor | None, state: State) -> Observed:
        """Begin a new episode in some environments, from states of your own; the others continue.

        Args:
            ids: each environment at most once, a list or [K] int64 on the device; None for all.
            state: start states, copied to this device if they are elsewhere.  [K, ...], or [1, ...] for all of them

        Returns:
            The next observation of all environments: ``(current, still_running)``.
        """
        self._check_begun("set_state")
        carry, fields = self._carry, part_of(self._carry, "state/")
        rows = self._rows("set_state", ids)
        values = {name: value.to(self._device) for name, value in fields_of("set_state", state).items()}
        if all(value.shape[:1] == (1,) for value in values.values()):
            values = {name: value.expand(len(rows), *value.shape[1:]) for name, value in values.items()}
        self._expect("set_state: field", values, Layout.of(fields, drop=1), n=rows.shape[0])
        carry = {**carry, "episode": carry["episode"].index_add(0, rows, torch.ones_like(rows))}
        carry |= {f"state/{name}": write_rows(fields[name], rows, value) for name, value in values.items()}
        carry["elapsed"] = carry["elapsed"].index_fill(0, rows, 0)
        if self.stochastic:
            carry["state_key"] = child_key(carry["env_key"], carry["episode"])
        if not self.auto_reset:
            for name, value in (("running", True), ("terminated", False)):
                carry[name] = carry[name].index_fill(0, rows, value)
        self._carry = carry
        self._idle.begin()
        first = self._first()
        fresh = {k: write_rows(old, rows, take_rows(first[k], rows)) for k, old in self._current.items()}
        self._current = current = DictTensor.unchecked(fresh)
        return current, carry.get("running", self._yes)

    def state_tensors(self) -> Tensors:
        """Return the whole simulation: all tensors that one step passes to the next, by name. Steps never modify them.

        A CUDA graph of several steps continues across replays if it starts by setting these tensors, and ends by
        copying the new ones into them.
        """
        return dict(self._carry)

    def set_state_tensors(self, tensors: Tensors, shown: Tensors | None = None) -> None:
        """Restore a state from `state_tensors`, in this or an identically built environment. Bit-exact.

        Args:
            tensors: from `state_tensors`; kept without a copy, so do not write to them.
            shown: the observation at that state, which `set_state` returns for environments that continue.
        """
        self._carry = dict(tensors)
        self._idle.begin()
        self._current = self._current if shown is None else DictTensor.unchecked(shown)

    def close(self) -> None:
        """Raise the error of an earlier step on an accelerator, see `step`; there is nothing to release."""
        self._checks.read()

    def state_dict(self) -> Tensors:
        """Return the whole simulation; see `VecEnv.state_dict`."""
        self._checks.read()
        groups = {"carry/": self._carry, "shown/": dict(self._current.items())}
        return {prefix + name: value for prefix, tensors in groups.items() for name, value in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state from `state_dict`; see `VecEnv.load_state_dict`."""
        moved = {name: value.to(self._device, copy=True) for name, value in state.items()}
        saved = part_of(moved, "carry/")
        own = self._begun({}) if "elapsed" in saved else {name: self._carry[name] for name in ("env_key", "episode")}
        fix = "Load the state of as many environments of the same class, with the same auto_reset."
        self._expect("load_state_dict:", saved, Layout.of(own, drop=1), fix)
        self.set_state_tensors(saved, part_of(moved, "shown/"))

    def _begun(self, fields: Tensors) -> Tensors:
        """Return the carry at the start of every environment's next episode, from given or drawn states."""
        carry = {**self._carry, "episode": self._carry["episode"] + 1}
        carry |= self._simulation.begin(carry, carry["episode"])
        expected = Layout.of(own := part_of(carry, "state/"), drop=1)
        self._expect("initial: field", own, expected, "Return one row for each key, on the device of the keys.")
        self._expect("reset: env_info 'state/'", own | fields, expected)
        carry |= {f"state/{n}": v for n, v in fields.items()} | {"elapsed": torch.zeros_like(carry["episode"])}
        if not self.auto_reset:
            carry |= {"running": self._yes, "terminated": self._no}
            carry |= {f"last_{key}": value for key, value in self._no_action.items()}
        return carry

    @torch.no_grad()
    def _play_at_random(self, most: Tensor) -> None:
        """Play 0 to ``most`` [B] random actions from the start states; an episode that ends starts over."""
        space = self.action_space
        if not isinstance(space, spaces.Discrete):
            raise BadValueError(
                f"{self._name}.reset: env_info 'initial_steps' draws from Discrete actions, got {space}. Pass start "
                "states of your own, as env_info 'state/<field>'."
            )
        most = most.to(self._device)
        self._expect("reset: env_info", {"initial_steps": most}, Layout({"initial_steps": ((), torch.int64)}))
        key = child_key(child_key(self._carry["env_key"], self._carry["episode"]), _SALT)
        n_steps = (uniform(key) * (most + 1)).long()
        played = {**self._carry, "elapsed": torch.zeros_like(n_steps)}
        for t in range(int(n_steps.max())):  # sync: once per reset
            played["state_key"] = child_key(key, t)
            action = randint(played["state_key"], int(space.n)) + int(space.start)
            moved, _, ended = self._simulation.transition(played, {"action": action})
            for name, value in moved.items():
                begun, before = self._carry[f"state/{name}"], played[f"state/{name}"]
                value = torch.where(rows_of(ended, value), begun, value)
                played[f"state/{name}"] = torch.where(rows_of(t < n_steps, value), value, before)
        self._carry = {k: played[k] if k.startswith("state/") else v for k, v in self._carry.items()}

    def _sent(self, action: DictTensor) -> Tensors:
        """Return the checked tensors of an action; see `step`."""
        self._check_begun("step")
        check_action(self._name, action, self._action_layout)
        sent = {key: value.detach() if (value := action[key]).requires_grad else value for key in self._action_layout}
        self._expect("step: action", sent, self._action_layout)
        if not self._checked:
            self._simulation.check_transition(self._carry, sent)
            self._checked = True
        return sent

    def _step_and_check(self, carry: Tensors, action: Tensors) -> tuple[StepTensors, list[Tensor]]:
        """Take a step, and find impossible values; a pure function, to be compiled."""
        result = self._simulation.step(carry, action)
        return result, self._checks.impossible(action, *result[1:3])

    def _expect(self, where: str, tensors: Tensors, layout: Layout, fix: str = "", n: int | None = None) -> None:
        rows = self._n_envs if n is None else n
        expect(f"{self._name}.{where}", tensors, layout, device=self._device, rows=rows, fix=fix)

    def _rows(self, method: str, ids: Sequence[int] | Tensor | None) -> Tensor:
        rows = torch.as_tensor(range(self._n_envs) if ids is None else ids, device=self._device)
        rows = rows.to(torch.int64) if not rows.numel() else rows
        if rows.dtype is not torch.int64 or rows.dim() != 1:
            raise ShapeMismatchError(
                f"{self._name}.{method}: ids is {rows.dtype} {list(rows.shape)}, expected the numbers of environments, "
                "torch.int64 [K]. mask.nonzero().squeeze(1) turns a mask into numbers, but waits for the device."
            )
        check_indices(f"{self._name}.{method}: ids", rows, self._n_envs, "B")
        return rows

    def _check_begun(self, method: str) -> None:
        if "elapsed" not in self._carry:
            raise UsageError(f"{self._name}.{method}: there is no state yet. Call reset first.")

    def _first(self) -> DictTensor:
        """Return the observation of all environments at the start of an episode."""
        frames = self._simulation.frames(part_of(self._carry, "state/"))
        expected = layout_of_rows(leaves(self.observation_space, "frame"))
        self._expect("observe:", frames, expected, "The observation space says so: correct one of them.")
        flags = dict.fromkeys(("terminated", "truncated", "done"), self._no)
        first = {**frames, "reward": self._no.to(torch.float32), **flags, "initial_state": self._yes}
        return DictTensor(first | {f"last_{key}": value for key, value in self._no_action.items()})


def box(low: Sequence[float], high: Sequence[float]) -> spaces.Box:
    """Make a Box of float32."""
    return spaces.Box(np.asarray(low, np.float32), np.asarray(high, np.float32))
