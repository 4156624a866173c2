"""TensorEnv: write a simulator in three functions of tensors; restarts, limits and keys are done here. Layer 3.

The simulator says how a state begins, moves and looks. All else that `VecEnv` promises is written once, here: restarts
within the step, time limits, true final observations, idle rows, random keys, states set from outside. Nothing in
`TensorEnv.step` waits for the device and no shape depends on data, so a step may be compiled, or captured as a graph.

Every episode is a pure function of the environment's seed, the episode's number and the actions: episode e of
environment j begins with ``initial(key)``, where key is child e of a key made from ``seed + j``, and its step t draws
from child t of that key. So environment j does the same in a batch of 64 and of 4,096, in one process or four, on any
device, with any backend, in single steps or K at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.functional.random import child_key
from rlstruct.sims._motion import Motion, part
from rlstruct.sims._spaces import check_action, check_frames
from rlstruct.sims._state import Tensors, check_carry, check_fields, fields_of
from rlstruct.sims._stepping import Stepper, TensorStepper
from rlstruct.spaces import leaves, zeros
from rlstruct.vec_env import Observed, Stepped, VecEnv

if TYPE_CHECKING:
    from rlstruct.sims.kernels import GameKernel

State = TypeVar("State")
Backend = Literal["torch", "compile", "warp"]

_SALT = 0x51D  # which child of the seed: apart from what the batcher gives to agents with the same seed


class TensorEnv(VecEnv, Generic[State]):
    """B copies of a simulator whose state is tensors, on any device. Write `initial`, `transition` and `observe`.

    The class also sets ``action_space`` and ``observation_space`` (gymnasium spaces of one environment). Tensors that
    come out are not to be written to: observations share some of them.

    Attributes:
        shortest_episode: no episode from `initial` on ends in fewer steps. Start states are drawn ahead once in so
            many steps, for all environments, which makes steps cheaper; 1 is always right.
        stochastic: whether `transition` draws random numbers. If not, it gets an empty key, and steps are cheaper.

    Args:
        n_envs: B.
        seed: environment j draws from ``seed + j``.
        device: where everything lives.
        auto_reset: whether ended environments restart within the step; otherwise they idle until `reset`.
        time_limit: an episode is truncated after so many steps; None for never.
        backend: ``"torch"`` runs the functions as they are written, ``"compile"`` turns a whole step into one kernel
            (TorchInductor; the first step takes some 20 seconds), ``"warp"`` launches the simulator's `kernel` (the
            extra ``warp``). Equal results, floating-point numbers to rounding.

    Raises:
        ValueError: an argument is out of range, or the device does not exist or cannot compile, or there is no kernel.
        ImportError: the extra of the backend is not installed.
    """

    shortest_episode: ClassVar[int] = 1
    stochastic: ClassVar[bool] = True
    restarts_take_steps = False

    def __init__(
        self,
        n_envs: int,
        seed: int = 0,
        *,
        device: DeviceLike = "cpu",
        auto_reset: bool = True,
        time_limit: int | None = None,
        backend: Backend = "torch",
    ) -> None:
        """Make the environments; they have no state before `reset`."""
        self._name = type(self).__name__
        if n_envs < 1 or (time_limit is not None and time_limit < 1):
            raise ValueError(f"{self._name}: got n_envs={n_envs}, time_limit={time_limit}, expected at least 1 each.")
        self._device = resolve_device(device)
        if backend not in ("torch", "compile", "warp"):
            raise ValueError(f"{self._name}: got backend={backend!r}, expected 'torch', 'compile' or 'warp'.")
        if backend != "torch" and self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"{self._name}: {backend!r} works on cpu and cuda, not on {self._device}: use 'torch'.")
        self.action_space = deepcopy(self.action_space)  # often an attribute of the class: seeding one must not
        self.observation_space = deepcopy(self.observation_space)  # seed those of others
        self.auto_reset = auto_reset
        self.time_limit = time_limit
        self.backend = backend
        self._n_envs = n_envs
        self._no = torch.zeros(n_envs, dtype=torch.bool, device=self._device)
        self._yes = ~self._no
        self._whole: dict[int, tuple[Tensor, Tensor]] = {}  # lengths and mask of the last rollout, by its K
        self._no_action = zeros(self.action_space, "action", n_envs, self._device)
        self._actions = leaves(self.action_space, "action")
        seeds = torch.arange(seed, seed + n_envs, dtype=torch.int64, device=self._device)
        self._motion = Motion(self, time_limit, self.action_space, no_key=seeds[:0])
        self._carry: Tensors = {"env_key": child_key(seeds, _SALT), "episode": torch.full_like(seeds, -1)}
        self._stepper = self._make_stepper(pooled=False)
        self._current: DictTensor | TemporalDictTensor = DictTensor()  # ends with what was shown last

    @abstractmethod
    def initial(self, key: Tensor) -> State:
        """Draw start states.

        Args:
            key: one key for each state to draw, for `rlstruct.functional.random`.  [n] int64, any n

        Returns:
            A frozen dataclass (always the same one) of tensors, or a DictTensor.  [n, ...] on the device of key
        """

    @abstractmethod
    def transition(self, state: State, action: Any, key: Tensor) -> tuple[State, Tensor, Tensor]:  # noqa: ANN401
        """Take one step in every environment. Write to no argument.

        Args:
            state: where they are.  [B, ...]
            action: what the agents do, a tensor; for nested spaces a dict of them (``x``, ``x/y``).  [B, ...]
            key: a fresh key for each environment, empty unless ``stochastic``.  [B] int64

        Returns:
            ``(next state, reward [B] float, terminated [B] bool)``. Restarts and time limits are none of its business.
        """

    @abstractmethod
    def observe(self, state: State) -> Tensor | Tensors:
        """Show the states to the agent.

        Args:
            state: where the environments are.  [B, ...]

        Returns:
            A frame for each; for nested spaces a dict of them (``x``, ``x/y``). No view of the state.  [B, ...]
        """

    def kernel(self) -> GameKernel:
        """Return the same three functions for one environment, as Warp functions, for ``backend="warp"``.

        Override it to give your own simulator a kernel; `rlstruct.sims.kernels.GameKernel` says how.

        Raises:
            ValueError: this simulator has none.
        """
        raise ValueError(
            f"{self._name}: backend='warp' needs a kernel, and there is none. Override {self._name}.kernel (see "
            "rlstruct.sims.kernels.GameKernel), or use backend='torch' or 'compile'."
        )

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        return self._device

    def n_envs(self) -> int:
        """Return B."""
        return self._n_envs

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Begin the next episode in every environment; see `VecEnv.reset`.

        Args:
            env_info: ``state/<field>`` lets these episodes, not later ones, begin from states of your own, [B, ...] on
                the CPU. Other keys are left alone.

        Raises:
            KeyError: the state has no such field.
            ShapeMismatchError: a field or frame has another shape or dtype than it must have.
            DeviceMismatchError: a field is on another device.
        """
        carry = {**self._carry, "episode": self._carry["episode"] + 1}
        begun = self._motion.begin(carry, "state", 0)
        own = part(begun, "state/")
        check_fields(f"{self._name}.initial", own, self._n_envs, self._device)
        given = {} if env_info is None else part(dict(env_info.items()), "state/")
        if given:
            given = own | {name: value.to(self._device) for name, value in given.items()}
            check_fields(f"{self._name}.reset: env_info 'state/'", given, self._n_envs, self._device, own)
            begun |= {f"state/{name}": value for name, value in given.items()}
        carry |= {**begun, "elapsed": torch.zeros_like(carry["episode"])}
        if not self.auto_reset:
            carry |= {"running": self._yes, "terminated": self._no}
            carry |= {f"last_{key}": value for key, value in self._no_action.items()}
        self.set_carry(carry)
        self._current = first = self._first()
        return first, self._yes

    def step(self, action: DictTensor) -> Stepped:
        """Take one step in every environment that runs; see `VecEnv.step`.

        Raises:
            RuntimeError: `reset` was not called.
            KeyError: a key of the action is missing.
            ShapeMismatchError: the action has another shape or dtype than the action space says.
            DeviceMismatchError: the action is on another device.
        """
        sent = self._sent(action, (self._n_envs,))
        ran = self._carry.get("running", self._yes)
        self._carry, reached, current = self._stepper.step(self._carry, sent)
        seen = DictTensor._trusted(reached)
        self._current = after = seen if current is reached else DictTensor._trusted(current)
        return Stepped((seen, ran), (after, self._carry.get("running", self._yes)), restarted=self.auto_reset)

    def rollout(
        self, action: DictTensor | TemporalDictTensor | None, n_steps: int | None = None
    ) -> tuple[tuple[TemporalDictTensor, Tensor], tuple[TemporalDictTensor, Tensor]]:
        """Take K steps whose actions are known before; the compiled backend makes them one kernel.

        Args:
            action: K actions for each environment, such as an open-loop plan, [B, K, ...]; or one action to repeat,
                [B, ...]; or None for random exploration: uniform draws that depend on the seed, the environment, its
                episode and step, and are found in ``last_action``.
            n_steps: K, for a repeated action and for exploration.

        Returns:
            What K calls of `step` return, with a time axis: ``((reached, running), (current, still_running))``, the
            observations [B, K, ...], the masks [B, K] bool.

        Raises:
            ValueError: K is missing, or below 1.
            TypeError: exploration of a space of actions that is neither Discrete nor a bounded Box.
            RuntimeError, KeyError, ShapeMismatchError, DeviceMismatchError: as `step`.
        """
        k = action.n_steps() if isinstance(action, TemporalDictTensor) else n_steps
        if k is None or k < 1:
            raise ValueError(f"{self._name}.rollout: got {k} steps, expected n_steps >= 1 for actions without a time.")
        self._check_begun("rollout")
        plan: Tensors | None = None  # [K, B, ...]
        if isinstance(action, TemporalDictTensor):
            plan = {key: v.transpose(0, 1) for key, v in self._sent(action, (self._n_envs, k)).items()}
        elif action is not None:
            plan = {key: v.expand(k, *v.shape) for key, v in self._sent(action, (self._n_envs,)).items()}
        self._carry, reached, current, masks = self._stepper.rollout(self._carry, plan, k)
        if k not in self._whole:
            self._whole = {k: (torch.full_like(self._carry["env_key"], k), self._yes.unsqueeze(1).expand(-1, k))}
        lengths, always = self._whole[k]
        seen = TemporalDictTensor._trusted(reached, lengths)
        self._current = after = seen if current is reached else TemporalDictTensor._trusted(current, lengths)
        return (seen, masks.get("ran", always)), (after, masks.get("running", always))

    def get_state(self, ids: Sequence[int] | Tensor | None = None) -> State:
        """Copy the states of some environments.

        Args:
            ids: which ones, a list or [K] int64 on the device; None for all.

        Returns:
            Their states, in that order.  [K, ...]

        Raises:
            RuntimeError: `reset` was not called.
        """
        self._check_begun("get_state")
        fields = part(self._carry, "state/")
        if ids is None:
            return self._state({name: value.clone() for name, value in fields.items()})
        rows = self._rows(ids)
        return self._state({name: value.index_select(0, rows) for name, value in fields.items()})

    def set_state(self, ids: Sequence[int] | Tensor | None, state: State) -> Observed:
        """Begin a new episode in some environments, from states of your own; the others go on.

        Args:
            ids: which ones, each once, a list or [K] int64 on the device; None for all.
            state: where they begin, on any device: one recorded on the CPU is copied to this one.  [K, ...]

        Returns:
            What the agent acts on next, in all environments: ``(current, still_running)``.

        Raises:
            RuntimeError: `reset` was not called.
            KeyError, ShapeMismatchError: the state has other fields, shapes or dtypes.
        """
        self._check_begun("set_state")
        carry, fields = self._carry, part(self._carry, "state/")
        rows = self._rows(range(self._n_envs) if ids is None else ids)
        given = {name: value.to(self._device) for name, value in fields_of("set_state", state).items()}
        check_fields(f"{self._name}.set_state", given, rows.shape[0], self._device, fields)
        carry = {**carry, "episode": carry["episode"].index_add(0, rows, torch.ones_like(rows))}
        carry |= {f"state/{name}": fields[name].index_copy(0, rows, value) for name, value in given.items()}
        carry["elapsed"] = carry["elapsed"].index_fill(0, rows, 0)
        if self.stochastic:
            carry["state_key"] = child_key(carry["env_key"], carry["episode"])
        if not self.auto_reset:
            carry["running"] = carry["running"].index_fill(0, rows, True)
            carry["terminated"] = carry["terminated"].index_fill(0, rows, False)
        self.set_carry(carry)
        first = self._first()
        shown = self._shown().items()
        fresh = {key: old.index_copy(0, rows, first[key].index_select(0, rows)) for key, old in shown}
        self._current = current = DictTensor._trusted(fresh)
        return current, self._carry.get("running", self._yes)

    def set_start_states(self, state: State | None) -> None:
        """Let later episodes begin from a cache: each draws one of M states, with equal chance.

        Args:
            state: M states, on any device, [M, ...]; None goes back to `initial`.

        Raises:
            TypeError: this is no state.
        """
        carry = {key: value for key, value in self._carry.items() if not key.startswith("pool/")}
        if state is not None:
            self._motion.initial(carry["env_key"][:1], {})  # learns the class of states, if there was no reset yet
            pool = fields_of(f"{self._name}.set_start_states", state)
            carry |= {f"pool/{name}": value.to(self._device) for name, value in pool.items()}
        self._stepper = self._make_stepper(pooled=state is not None)
        self.set_carry(carry)

    def carry(self) -> Tensors:
        """Return all tensors that one step hands to the next, by name: the whole simulation. They never change.

        A CUDA graph of some steps keeps going from where it stopped, if it begins with ``env.set_carry(env.carry())``
        and ends by copying the new tensors into those that it began with.
        """
        return dict(self._carry)

    def set_carry(self, tensors: Tensors) -> None:
        """Go on from what `carry` returned, here or in an environment made alike, bit by bit."""
        self._carry = dict(tensors)
        self._stepper.forget()

    def state_dict(self) -> Tensors:
        """Return the whole simulation; see `VecEnv.state_dict`."""
        return {f"carry/{name}": value for name, value in self._carry.items()} | {
            f"shown/{key}": value for key, value in self._shown().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned; see `VecEnv.load_state_dict`."""
        moved = {name: value.to(self._device, copy=True) for name, value in state.items()}
        carry = part(moved, "carry/")
        initial = self._motion.initial(self._carry["env_key"][:1], {})  # learns the class of states, before any reset
        check_carry(f"{self._name}.load_state_dict", carry, self._carry, initial)
        self._stepper = self._make_stepper(pooled=bool(part(carry, "pool/")))
        self.set_carry(carry)
        self._current = DictTensor(part(moved, "shown/"))

    def _make_stepper(self, *, pooled: bool) -> Stepper:
        if self.backend == "warp":
            from rlstruct.sims.kernels import WarpStepper

            return WarpStepper(
                self.kernel(),
                self._motion,
                self.action_space,
                self.observation_space,
                n_envs=self._n_envs,
                device=self._device,
                time_limit=self.time_limit,
                auto_reset=self.auto_reset,
                stochastic=self.stochastic,
            )
        # An episode from a state of the user's may be short.
        between_draws = 1 if pooled else min(self.shortest_episode, self.time_limit or self.shortest_episode)
        return TensorStepper(
            self._motion,
            auto_reset=self.auto_reset,
            between_draws=between_draws,
            compiled=self.backend == "compile",
            no=self._no,
        )

    def _state(self, fields: Tensors) -> State:
        state: State = self._motion.state(fields)
        return state

    def _shown(self) -> DictTensor:
        """What was shown last."""
        shown = self._current
        return shown if isinstance(shown, DictTensor) else shown.temporal_index(shown.n_steps() - 1)

    def _rows(self, ids: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(ids, dtype=torch.int64, device=self._device)

    def _check_begun(self, method: str) -> None:
        if "elapsed" not in self._carry:
            raise RuntimeError(f"{self._name}.{method}: there is no state yet. Call reset first.")

    def _sent(self, action: DictTensor | TemporalDictTensor, lead: tuple[int, ...]) -> Tensors:
        """Check the action and return its tensors."""
        self._check_begun("step")
        checked = check_action(f"{self._name}.step", action, lead, self._actions, self._device)
        return {key: value.detach() if value.requires_grad else value for key, value in checked.items()}

    def _first(self) -> DictTensor:
        """What all environments show at the start of an episode."""
        fields = part(self._carry, "state/")
        frames = self._motion.frames(self._motion.state(fields), fields)
        check_frames(self._name, frames, leaves(self.observation_space, "frame"), self._n_envs)
        flags = dict.fromkeys(("terminated", "truncated", "done"), self._no)
        first = {**frames, "reward": self._no.to(torch.float32), **flags, "initial_state": self._yes}
        return DictTensor(first | {f"last_{key}": value for key, value in self._no_action.items()})
