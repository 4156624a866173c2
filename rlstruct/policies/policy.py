"""A trained agent that acts on observations, one or many, in numpy or torch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlstruct.core import DictTensor, TensorSpec
from rlstruct.core.layout import spec_of
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadKeyError, BadTypeError, BadValueError, ShapeMismatchError, kind_of
from rlstruct.functional import random
from rlstruct.options import check_seed
from rlstruct.rl_agent import RL_Agent

if TYPE_CHECKING:
    import gymnasium

    from rlstruct.spaces import ActionIndices, Bounds

SCORES = ("action_logits", "action_values")  # outputs of agents that determine the best action


def _check_factory(model: object, create_agent: Callable[..., object]) -> None:
    """Raise TypeError unless a policy can create its agent around its network."""
    if not isinstance(model, nn.Module):
        raise BadTypeError(f"Policy: model is {kind_of(model)}, expected a torch.nn.Module. Pass the network.")
    if isinstance(create_agent, RL_Agent) or not callable(create_agent):
        raise BadTypeError(
            f"Policy: create_agent is {kind_of(create_agent)}, expected a function or a class. Pass what creates the "
            "agent, such as ActorCriticAgent."
        )
    try:
        signature = inspect.signature(create_agent)
    except ValueError:  # some callables written in C have none
        return
    try:
        signature.bind(model, device=None, stochastic=None, copy_model=False)
    except TypeError as error:
        raise BadTypeError(
            "Policy: create_agent is called as create_agent(model, device=…, stochastic=…, copy_model=False), but "
            f"{error}. Its parameters are {signature}; accept these, or drop those that the agent does not need: "
            "create_agent=lambda model, **_: …"
        ) from None


def _checked_specs(specs: object, bounds: Bounds) -> tuple[Mapping[str, TensorSpec], Bounds]:
    """Return the specs of a policy and the bounds of integers; raise TypeError if specs are missing or wrong."""
    if isinstance(specs, Mapping) and all(isinstance(spec, TensorSpec) for spec in specs.values()):
        return specs, bounds
    import gymnasium  # here, as `import rlstruct` does not

    from rlstruct import spaces

    if isinstance(specs, gymnasium.Space):
        by_key = spaces.leaves(specs, "frame", where="Policy: specs")
        shown = {key: TensorSpec(leaf.shape, leaf.torch_dtype) for key, leaf in by_key.items()}
        return shown, spaces.integer_bounds(specs, "frame")
    got = "missing" if specs is None else f"{specs!r}"
    raise BadTypeError(
        f"Policy: specs is {got}, expected the observation space of one environment, or shape and dtype of its frames. "
        "Pass env.observation_space, or {'frame': TensorSpec((4,), torch.float32)}, with TensorSpec of rlstruct.core."
    )


def _indices(actions: object) -> ActionIndices | None:
    """Return how actions are numbered; None if they are their own indices."""
    if actions is None:
        return None
    import gymnasium  # here, as `import rlstruct` does not

    from rlstruct.spaces import ActionIndices

    numbered = ActionIndices.of(actions) if isinstance(actions, gymnasium.Space) else actions
    if not isinstance(numbered, ActionIndices):
        raise BadTypeError(
            f"Policy: actions is {actions!r}, expected a Discrete, MultiDiscrete or MultiBinary space, because the "
            "agent returns indices. Pass env.action_space."
        )
    return None if numbered.equal else numbered


class Policy:
    """A trained agent that needs neither batcher nor environment; `rlstruct.load` returns one.

    It keeps the agent's state between calls of `act`, so call `reset` at the start of every episode.

    Args:
        model: the network; it is moved to ``device``.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=False)``.
        specs: observation space of one environment; or shape and dtype of its frames: ``frame``, or ``frame/…`` for
            each part.
        device: device of the network.
        stochastic: sample actions; False takes the best one.
        seed: seed of the sampling. Row j samples like environment j of a batcher with this seed.
        actions: action space of one environment, or how its actions are numbered, so that `act` turns the indices that
            the agent returns into its elements; see `RL_Agent.action_form`. None returns the indices.
        agent_info: settings with which the agent samples, such as ``{"epsilon": 0.05}`` for a `QAgent`.  [...] each
        bounds: smallest and largest value of frames that hold integers, see `rlstruct.spaces.integer_bounds`;
            ``specs`` gives them if it is a space. `rlstruct.export` samples observations within them.

    Raises:
        TypeError: ``model`` is no network, ``create_agent`` does not accept the arguments above, ``specs`` is missing,
            no space of fixed shape and no mapping of TensorSpec, ``actions`` has no indices, or the agent needs the
            history of a batch.
        ValueError: the policy should sample, and ``agent_info`` lacks what the agent needs for it.

    Attributes:
        model: the network.
        specs: shape and dtype of one environment's frames.
        bounds: smallest and largest value of frames that hold integers, as far as they are known.
        device: device of the network.
        create_agent: the argument.
        stochastic: the default of `act`.
        agent_info: the argument, as tensors.
        actions: how the actions are numbered; None if `act` returns the agent's actions unchanged.
        last: all outputs of the agent for the last observations, such as ``value``; ``action`` is an index if the
            agent returns indices.  [B, ...]
    """

    def __init__(
        self,
        model: nn.Module,
        create_agent: Callable[..., RL_Agent],
        # required: `_checked_specs` says so better than Python
        specs: Mapping[str, TensorSpec] | gymnasium.Space[Any] | None = None,
        *,
        device: DeviceLike = "cpu",
        stochastic: bool = False,
        seed: int = 0,
        actions: ActionIndices | gymnasium.Space[Any] | None = None,
        agent_info: Mapping[str, Tensor | float] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.specs, self.bounds = _checked_specs(specs, bounds or {})
        _check_factory(model, create_agent)
        self.device = resolve_device(device)
        self.model = model.to(self.device).eval()
        self.stochastic = stochastic
        self.last = DictTensor()
        self.create_agent, self._seed = create_agent, check_seed("Policy", "seed", seed)
        self.agent_info = {key: torch.as_tensor(value, device="cpu") for key, value in (agent_info or {}).items()}
        self._agents: dict[bool, RL_Agent] = {}
        self.actions = _indices(actions) if self.agent(stochastic).action_form == "index" else None
        self._problems: dict[str, Tensor] = {}  # by message, if an earlier call on an accelerator had it.  [] bool
        if self.agent(stochastic).require_history():
            raise BadTypeError(
                f"Policy: {type(self.agent(stochastic)).__name__} needs the history of a batch, which only a batcher "
                "keeps. Let it keep what it needs in its state."
            )
        self._episode, self._step = -1, 0
        self.reset()

    def __repr__(self) -> str:
        agent = f"{type(self.agent(self.stochastic)).__name__} with {type(self.model).__name__} on {self.device}"
        frames = ", ".join(f"{key} {spec}" for key, spec in self.specs.items())
        return f"<Policy: {agent}, {'samples actions' if self.stochastic else 'takes the best action'} for {frames}>"

    def agent(self, stochastic: bool) -> RL_Agent:
        """Return the agent that samples actions, or the one that takes the best."""
        if stochastic not in self._agents:
            made = self.create_agent(self.model, device=self.device, stochastic=stochastic, copy_model=False)
            if stochastic and made.samples_with not in (None, *self.agent_info):
                key = made.samples_with
                raise BadValueError(
                    f"Policy: {type(made).__name__} samples only with agent_info[{key!r}], and agent_info has "
                    f"{sorted(self.agent_info)}. Pass agent_info={{{key!r}: …}}, or take the best action: "
                    "stochastic=False."
                )
            self._agents[stochastic] = made
        return self._agents[stochastic]

    def _info(self, agent: RL_Agent, B: int) -> DictTensor:
        """Return the settings with which an agent samples.  [B]."""
        device = self.device if agent.agent_info_on_device else torch.device("cpu")
        rows = {key: value.expand(B, *value.shape).to(device) for key, value in self.agent_info.items()}
        return DictTensor(rows)

    def copy(self, device: DeviceLike) -> Policy:
        """Return a copy of the policy on a device, at the start of an episode."""
        model, stochastic = copy.deepcopy(self.model), self.stochastic
        settings: dict[str, Any] = {"device": device, "stochastic": stochastic, "seed": self._seed}
        settings |= {"actions": self.actions, "agent_info": self.agent_info, "bounds": self.bounds}
        return Policy(model, self.create_agent, self.specs, **settings)

    def reset(self, where: np.ndarray[Any, Any] | Tensor | None = None) -> None:
        """Start new episodes.

        Args:
            where: True for rows whose episode is new, [B] bool. None resets all rows, whose number may then change.

        Raises:
            ShapeMismatchError: ``where`` does not fit the last observations.
            ValueError: on an accelerator, an earlier observation or action was impossible; see `act`.
        """
        self._raise_problems()
        if where is None:
            if self._step or self._episode < 0:  # as a batcher counts episodes: those that have begun
                self._episode += 1
            self._step = 0
            self._state: DictTensor | None = None
            self._initial: Tensor | None = None
            return
        begun = (where if isinstance(where, Tensor) else torch.from_numpy(np.array(where))).to(self.device)
        if self._initial is None or begun.shape != self._initial.shape or begun.dtype != torch.bool:
            rows = "none yet" if self._initial is None else f"[{len(self._initial)}]"
            raise ShapeMismatchError(
                f"Policy.reset: where is {list(begun.shape)} {begun.dtype}, expected one bool for each row of the last "
                f"observations, of which there are {rows}. Leave it out to reset all."
            )
        self._initial = self._initial | begun

    @torch.no_grad()
    def act(self, observation: Any, *, stochastic: bool | None = None) -> Any:  # noqa: ANN401 - arrays or tensors
        """Choose an action for one observation, or for each observation of a batch.

        Args:
            observation: observation of an environment: an array, a tensor, or a dict or tuple of them like its space.
                One observation, or [B, ...] of B environments. It is copied, so you may overwrite it afterwards.
            stochastic: sample the actions, or take the best; None for the policy's `stochastic`.

        Returns:
            The action, without a batch axis if the observation had none. It is a numpy array for numpy observations,
            and a tensor on their device for tensors; always a copy, which you may overwrite.

        Raises:
            KeyError: a part of the observation is missing or unknown.
            ShapeMismatchError: a part has the wrong shape or dtype, or the number of rows changed although the agent
                keeps a state per row.
            ValueError: the observation has NaN, or the action does not exist, as if scores are NaN or all are -inf. If
                observations are tensors on an accelerator, a later call raises it: `reset`, or one with arrays.
        """
        frames, single, back = self._read(observation)
        stochastic = self.stochastic if stochastic is None else stochastic
        agent, B = self.agent(stochastic), next(iter(frames.values())).shape[0]
        agent_info = self._info(agent, B) if stochastic else DictTensor()
        if self._initial is None or (len(self._initial) != B and (self._state is None or self._state.empty())):
            self._initial = torch.ones(B, dtype=torch.bool, device=self.device)
            self._state = agent.initial_state(agent_info, B)
        if len(self._initial) != B or self._state is None:
            raise ShapeMismatchError(
                f"Policy.act: the observation has {B} rows, and the agent remembers {len(self._initial)}, expected "
                "the same number. Call reset() first, which starts all of them again."
            )
        seeds = self._seed + torch.arange(B, dtype=torch.int64, device=self.device)
        step = torch.full((1,), self._step, dtype=torch.int64, device=self.device)
        frames["rng"], frames["initial_state"] = random.step_keys(seeds, self._episode, step)[0], self._initial
        self.last, self._state = agent(self._state, DictTensor(frames), agent_info, None)
        self._initial = torch.zeros_like(self._initial)
        self._step += 1
        return self._answer(self.last, single, back)

    def _read(self, observation: Any) -> tuple[dict[str, Tensor], bool, torch.device | None]:  # noqa: ANN401
        """Return tensors [B, ...], whether it was one observation, and the tensors' device; None for numpy."""
        by_key = {f"frame/{key}".strip("/"): value for key, value in _flat(observation)}
        if by_key.keys() != self.specs.keys():
            shown, names = sorted(self.specs), sorted(by_key)
            raise BadKeyError(
                f"Policy.act: the observation has {_words(names)}, expected {_words(shown)}. Pass what the environment "
                "showed in the training, with the same wrappers."
            )
        tensors, batched, back = {}, {}, None
        for key, spec in self.specs.items():
            value = by_key[key]
            if isinstance(value, Tensor):
                back = back or value.device
            tensors[key], batched[key] = _fitting(key, value, spec)
            if spec.dtype.is_floating_point:
                fix = "A training stops there, too: look for a division by zero in the environment."
                self._check(tensors[key].isnan(), f"Policy.act: {_part(key)} has NaN, expected numbers. {fix}")
        if len(set(batched.values())) > 1 or len({len(t) for key, t in tensors.items() if batched[key]}) > 1:
            raise ShapeMismatchError(
                f"Policy.act: the observation has { {key: list(t.shape) for key, t in tensors.items()} }, expected one "
                "of each, or as many of each."
            )
        single = not next(iter(batched.values()))
        moved = {key: tensor.to(self.device) for key, tensor in tensors.items()}
        return {key: t.unsqueeze(0) if single else t for key, t in moved.items()}, single, back

    def _answer(self, output: DictTensor, single: bool, back: torch.device | None) -> Any:  # noqa: ANN401
        """Return the actions in the form of the observations."""
        parts = {"": output["action"]} if "action" in output else dict(output.truncate_key("action/").items())
        fix = "Look for NaN in the policy's weights, and for observations whose scores are all -inf."
        for action in parts.values():
            if action.is_floating_point():
                self._check(action.isnan(), f"Policy.act: the action is NaN. {fix}")
        by_index = self.agent(self.stochastic).action_form == "index" and "" in parts
        for scores in (output[name] for name in SCORES if name in output and by_index):
            if parts[""].shape == scores.shape[:-1]:
                wrong = (parts[""] < 0) | (parts[""] >= scores.shape[-1]) | scores.isnan().any(-1)
                most = scores.shape[-1] - 1
                self._check(wrong, f"Policy.act: the action is none of 0 to {most}, or its scores are NaN. {fix}")
        if self.actions is not None:
            parts[""] = self.actions.elements(parts[""], self.actions.starts(self.device))
        if back is None or back.type == "cpu":
            self._raise_problems()  # the host waits here anyway
        moved = {key: tensor.to(back or "cpu", copy=True) for key, tensor in parts.items()}  # sync: the caller acts
        answer: dict[str, Any] = dict(moved)
        if back is None:
            answer = {key: tensor.numpy() for key, tensor in moved.items()}  # sync: none, they are on the CPU
        answer = {key: value[0] if single else value for key, value in answer.items()}
        return answer.get("", answer)

    def _check(self, wrong: Tensor, message: str) -> None:
        """Raise ValueError if anything is wrong; on an accelerator, remember it there."""
        if not wrong.is_cpu:
            self._problems[message] = wrong.any() | self._problems.get(message, False)
        elif bool(wrong.any()):  # sync: of CPU memory
            raise BadValueError(message)

    def _raise_problems(self) -> None:
        problems, self._problems = self._problems, {}
        for message, wrong in problems.items():
            if bool(wrong):  # sync: where the caller waits anyway, or once per episode
                raise BadValueError(message)


def _flat(observation: Any, prefix: str = "") -> list[tuple[str, Any]]:  # noqa: ANN401
    """List the arrays in an observation by the names that `rlstruct.spaces.leaves` gives them."""
    if isinstance(observation, Mapping):
        parts = [(str(name), part) for name, part in observation.items()]
    elif isinstance(observation, tuple):
        parts = [(str(index), part) for index, part in enumerate(observation)]
    else:
        return [(prefix, observation)]
    return [leaf for name, part in parts for leaf in _flat(part, f"{prefix}/{name}".strip("/"))]


def _words(keys: list[str]) -> str:
    """Return the name that the caller uses for a part of an observation."""
    return "no parts, but one array" if keys == ["frame"] else f"the parts {[k.removeprefix('frame/') for k in keys]}"


def _part(key: str) -> str:
    return "the observation" if key == "frame" else f"part {key.removeprefix('frame/')!r} of the observation"


def _fitting(key: str, value: Any, spec: TensorSpec) -> tuple[Tensor, bool]:  # noqa: ANN401
    """Return a part of an observation in the agent's dtype, and True if it has a batch axis."""
    where = _part(key)
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise BadTypeError(f"Policy.act: {where} is {value!r}, expected numbers in an array: {error}.") from None
    n = len(spec.shape)
    batched = tensor.dim() == n + 1
    fits = tensor.dim() in (n, n + 1) and tensor.shape[tensor.dim() - n :] == spec.shape and tensor.numel() > 0
    if fits and tensor.dtype != spec.dtype:
        fits = not tensor.is_complex()
        if not spec.dtype.is_floating_point:  # sync: the caller waits anyway
            fits = not tensor.is_floating_point() and bool((tensor.to(spec.dtype).to(tensor.dtype) == tensor).all())
    if not fits:
        raise ShapeMismatchError(
            f"Policy.act: {where} is {spec_of(tensor)}, expected numbers that fit into {spec}, or "
            f"{['B', *spec.shape]} for B of them. Pass what the environment showed in the training, with the same "
            "wrappers."
        )
    return tensor.to(spec.dtype, copy=isinstance(value, Tensor)), batched  # the agent may keep it as its state
