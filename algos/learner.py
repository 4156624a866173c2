"""Base class of all learners: one network, one optimiser, and how an update runs."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.agent_outputs import Alternatives, check_outputs, lacking
from rlstruct.algos.compiled_steps import CompiledSteps
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup, Terms, learner_group
from rlstruct.algos.optimising import initial_rate, laid_out_as, load_optimizer, loss_plus_norm, norm_of, step_unless
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers.arguments import check_factory
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.device import resolve_device
from rlstruct.engine.compiled import warn_uncompiled
from rlstruct.engine.executors import EXECUTORS, PROMISE
from rlstruct.engine.memory import keep_freed_memory
from rlstruct.engine.mixed_precision import Bfloat16Products, why_not_bfloat16
from rlstruct.engine.runner import Make, Runner
from rlstruct.engine.streams import stream_on
from rlstruct.errors import (
    BadKeyError,
    BadTypeError,
    BadValueError,
    ShapeMismatchError,
    UsageError,
    check_call,
    kind_of,
    warn_user,
)
from rlstruct.functional import categorical, gaussian, random
from rlstruct.functional.schedules import linear_schedule
from rlstruct.profiling import operation
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import RL_Agent, frame_of

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger(__name__)

CreateAgent = Callable[..., RL_Agent]

_REPLACED = {
    "gradient_steps": "Override `minibatches` to choose what each gradient step learns from, or `gradient_step`.",
    "learn": "Override `minibatches` to choose what each gradient step learns from, and `after_step` for what follows.",
    "learn_from": "Override `prepare`, which gets the batch on the learner's device.",
    "run": "Override `gradient_step`.",
    "see_frames": "The base class updates the statistics of a network after each update.",
}
"""Methods of version 0.3, and what to override instead."""


def agent_around(model: nn.Module, create_agent: CreateAgent, device: str, *, stochastic: bool) -> RL_Agent:
    """Create an agent that shares ``model``; TypeError if the factory does not accept the arguments of a training."""
    arguments = {"device": device, "stochastic": stochastic, "copy_model": False}
    fix = "every training passes these. Use a factory from rlstruct.agents, or accept and use them"
    check_factory("run_training", "create_agent", create_agent, "such as a class of rlstruct.agents")
    check_call("run_training", "create_agent", create_agent, {"model": model, **arguments}, fix)
    return create_agent(model, **arguments)


@renamed.members
class GradientLearner(ABC):
    """One network and one optimiser.

    An update runs eagerly, with compiled gradient steps, or as one captured graph. The results are equal.
    Once a loss or gradient is not finite, the optimiser no longer changes the weights, so those that caused it can
    still be saved. Any ``optimizer`` that you set is guarded in the same way. If it is a fused Adam or was created with
    ``capturable=True``, the guard never waits for the device, and updates can be captured.

    Captured and compiled code holds Python values as they were. So if you replace a public attribute, such as the
    optimiser, the agent or the configuration, or change a setting of the optimiser, the next update runs eagerly and
    is then captured again. An attribute that every update changes keeps updates eager; name a counter ``_like_this``.

    Args:
        model: on the learner's device.
        agent: uses this same model object, so that gradients reach it.
        config: learning rate, gradient norm, device, and how updates run.

    Attributes:
        settings: the class of the algorithm's configuration.
        whole_episodes: True if every batch starts new episodes. Otherwise each batch continues where the last one
            stopped, in environments that reset themselves.
        outputs: what the algorithm learns from among an agent's outputs, see `rlstruct.algos.agent_outputs`. The first
            batch is checked for them, unless this is empty, or inherited by a class with other `terms`.
        overlap: start collecting the next batch before learning from this one. Worker processes then collect during
            the update, with weights that are one update older.
        reuse_batches: let the next batch be written over one that `update` has learned from. Set it to True in a
            learner that keeps none, which saves a copy of what a CUDA graph has collected.
        model: the argument; its weights are published to the batchers.
        agent: the argument.
        config: the argument.
        device: device on which losses are computed.
        optimizer: Adam (Kingma and Ba, ICLR 2015), or AdamW if weights decay, unless your ``__init__`` replaces it.
        policy_version: number of gradient steps so far.
        group: the processes that train this network together.
        version_now: ``policy_version`` at the start of the update, readable inside a graph.  [] int64 on the device
        statistics: the network, if it keeps statistics of its inputs like `rlstruct.agents.Normalised`; else None.
    """

    settings: ClassVar[type[TrainingConfig]] = TrainingConfig
    whole_episodes: ClassVar[bool] = False
    outputs: Alternatives = ()
    overlap: bool = False
    reuse_batches: bool = False

    def __init__(self, model: nn.Module, agent: RL_Agent, config: TrainingConfig) -> None:
        keep_freed_memory()
        self.model, self.agent, self.config = model, agent, config
        self.device = resolve_device(config.learner_device)
        self._coarse = config.precision == "bfloat16"
        if self._coarse and (why_not := why_not_bfloat16(self.device)):
            raise BadValueError(
                f"{type(config).__name__}: precision is 'bfloat16', which {self.device} does not compute in: "
                f"{why_not}. Use 'float32'."
            )
        self.group = learner_group()
        # Use one kernel for all weights where torch has one: a small network's update mostly costs kernel calls.
        place = self.device.type
        fused, capturable = place in ("cpu", "cuda"), place not in ("cpu", "mps")
        adam = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
        rates: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        self.optimizer = adam(model.parameters(), **rates, eps=config.adam_epsilon, fused=fused, capturable=capturable)
        self.policy_version = 0
        self.version_now = torch.zeros((), dtype=torch.int64, device=self.device)
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._keys_seed = self.seed_for("policy noise")  # the name is SAC's, whose results it keeps
        self._n_keys = 0  # drawn since the last gradient step that counts in ``version_now``
        self._rates: dict[float, Tensor] = {}  # by initial value; tensors, because a graph would freeze numbers
        self._n_steps = 0  # gradient steps of an update
        self._owner, graph, self._compile = self._executors()
        stream = None if graph is None else stream_on(self.device)  # CUDA cannot capture on the default stream
        self._graph: Runner[Terms] = Runner(
            self._captured, self._owner, self.device, graph, failed=warn_uncaptured, stream=stream, operation="graph"
        )
        self._is_updating = self._checked = False
        self._parts: list[Runner[Any]] = []  # of a gradient step; see `_part`
        self._frozen: dict[str, object] | None = None  # what executors hold, since the first update
        self._uncompiled = False  # True once a warning has reported it
        self._gradients = self._part("loss and backward", self._differentiate)
        self._compiled_steps = CompiledSteps(self)
        self.statistics: Any = model if hasattr(model, "see_rewards") else None
        self._open_return: Tensor | None = None  # return of each unfinished episode, for the statistics  [B]

    def __init_subclass__(cls, **keywords: Any) -> None:  # noqa: ANN401 - as of every class
        super().__init_subclass__(**keywords)
        for old, new in _REPLACED.items():
            if hasattr(cls, old):
                raise UsageError(f"{cls.__name__}: it overrides {old}, which no update calls since version 0.4. {new}")

    @classmethod
    def create(cls, model: nn.Module, create_agent: CreateAgent, config: Any) -> Self:  # noqa: ANN401 - its own config
        """Create a learner whose agent shares ``model``, which must be on the learner's device."""
        return cls(model, agent_around(model, create_agent, config.learner_device, stochastic=True), config)

    def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        """Learn from one batch: prepare it, and take one gradient step on each of its minibatches.

        Args:
            trajectories: on any device; see ``reuse_batches``.  [B, T]
            fraction_done: share of the training that was done before this batch, in [0, 1].

        Returns:
            Detached numbers on one device, with the same names in every update; empty if nothing was learned.  [] each
        """
        self._check_first(trajectories)
        batch = self._scaled(trajectories.to(self.device))
        self.anneal(fraction_done)
        terms = self._replayed(batch)
        self._see_frames(batch)
        return terms

    def check_agent(self, trajectories: Trajectories) -> None:
        """Raise unless the agent returns the ``outputs`` that this algorithm learns from.

        Args:
            trajectories: collected by the agent, on any device.  [B, T]

        Raises:
            KeyError: outputs are missing, in the batch and when the agent acts again as in the loss.
            ValueError: an output has another shape than its name asks for.
            TypeError: an output does not hold floats.
        """
        if not self.outputs or self._reads_others():
            return
        returned = trajectories.steps.truncate_key("action/").specs()
        if lacking(returned, self.outputs):  # an agent may return some only where they are needed
            steps = trajectories.steps.slice(0, 1).temporal_slice(0, 1)
            first = Trajectories(trajectories.info.slice(0, 1), steps).to(self.device)
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                returned = replay_agent(self.agent, first).specs()
        check_outputs(self.agent, returned, self.outputs)

    def _reads_others(self) -> bool:
        """Return True if a subclass replaced `terms`, but not ``outputs``: it may read anything."""
        newest = next(one for one in type(self).__mro__ if {"terms", "outputs"} & vars(one).keys())
        return "outputs" not in vars(newest)

    def check_first_update(self, numbers: Mapping[str, float]) -> None:  # noqa: B027 - optional
        """Warn if the numbers of a training's first update show a mistake; by default nothing is checked."""

    def _check_first(self, trajectories: Trajectories) -> None:
        """Check the agent once, by the first batch."""
        if not self._checked:
            self.check_agent(trajectories)
            self._checked = True

    def prepare(self, trajectories: Trajectories) -> tuple[Any, dict[str, Tensor]]:
        """Compute what stays constant during an update; by default nothing is added to the batch.

        This and the following methods may be captured in a graph, so nothing in them may depend on a number that Python
        counts, such as `policy_version`.

        Args:
            trajectories: on the learner's device.  [B, T]

        Returns:
            ``(prepared, numbers)``: the argument of `minibatches`, and further numbers for the result of `update`.
        """
        return trajectories, {}

    def minibatches(self, prepared: Any) -> Iterable[Any]:  # noqa: ANN401 - each algorithm's own
        """Yield the argument of each `gradient_step` of an update; by default the whole batch, once."""
        return (prepared,)

    @abstractmethod
    def terms(self, minibatch: Any) -> dict[str, Tensor]:  # noqa: ANN401 - each algorithm's own
        """Compute the ``loss`` of a gradient step and its terms: a pure function of a minibatch and the weights.

        Args:
            minibatch: the argument of `gradient_step`: Trajectories [B, T], unless the algorithm says otherwise.
        """

    def gradient_step(self, minibatch: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as of `terms`
        """Take one gradient step: in one compiled call where possible, otherwise `gradient`, then `descend`.

        Returns:
            The terms, detached, with ``gradient_norm``, [], if the norm is bounded.
        """
        if (terms := self._compiled_steps.take(minibatch)) is not None:
            return terms
        terms, gradient = self.gradient(minibatch)
        return self.descend(terms, gradient, unless=self._held(terms))

    def _held(self, terms: Terms) -> Tensor | None:
        """Return ``unless`` of `descend`, which only some learners need; it may add to the terms."""
        return None

    def after_step(self, minibatch: Any, terms: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ANN401 - as of `terms`
        """Do what follows each gradient step, such as moving an average of the weights; by default nothing.

        Returns:
            The numbers to report, usually ``terms``.
        """
        return terms

    def gradient(self, minibatch: Any) -> tuple[Terms, Terms]:  # noqa: ANN401 - as of `terms`
        """Differentiate the ``loss`` of `terms`, averaged over all learners; compiled if the settings ask for it.

        Returns:
            The terms, detached, with ``gradient_norm`` [] if the norm is bounded; and the gradient of each weight by
            its number, clipped to the bound. Weights that the loss does not depend on have no entry.
        """
        terms, gradient = self._gradients(minibatch)
        if isinstance(self.group, DistributedLearnerGroup):
            return self._bounded(*self.group.mean(terms, gradient, self.weight(minibatch)))
        return terms, gradient

    def weight(self, minibatch: Any) -> Tensor | None:  # noqa: ANN401 - as of `terms`
        """Return the number of steps that `terms` averages over, [], as a weight; None weights all learners equally."""
        return minibatch.lengths.sum() if isinstance(minibatch, Trajectories) else None

    def _differentiate(self, minibatch: Any) -> tuple[Terms, Terms]:  # noqa: ANN401
        with torch.enable_grad():
            with operation("loss"), Bfloat16Products() if self._coarse else contextlib.nullcontext():
                terms = self.terms(minibatch)
            where = f"{type(self).__name__}.terms"
            if not isinstance(terms, dict) or "loss" not in terms:
                returned = sorted(terms) if isinstance(terms, dict) else terms
                raise BadKeyError(f"{where}: it returned {returned}, expected a dict with 'loss', which is minimised.")
            check_numbers(where, terms, single=["loss"])
            if not terms["loss"].requires_grad:
                raise BadValueError(
                    f"{where}: the loss carries no gradient, because it was computed from collected "
                    "numbers alone. Recompute the agent's outputs with replay_agent(agent, batch), and use them."
                )
            with operation("backward"):
                gradients = torch.autograd.grad(terms["loss"], self._weights, allow_unused=True)
            if all(grad is None for grad in gradients):
                raise BadValueError(
                    f"{where}: the loss depends on none of the {len(gradients)} weights that it should train, those of "
                    "learner.model. Compute it from this network: an agent must not copy it if copy_model is False."
                )
        gradient = {str(i): grad for i, grad in enumerate(gradients) if grad is not None}
        terms = {name: term.detach() if term.requires_grad else term for name, term in terms.items()}
        return (terms, gradient) if self.group.size > 1 else self._bounded(terms, gradient)

    def _bounded(self, terms: Terms, gradient: Terms) -> tuple[Terms, Terms]:
        """Clip the norm of the gradient if the settings bound it."""
        if (bound := self.config.max_gradient_norm) is not None:
            gradients = list(gradient.values())
            norm = terms["gradient_norm"] = norm_of(gradients)
            scale = (bound / (norm + 1e-6)).clamp(max=1.0)  # as nn.utils.clip_grad_norm_
            gradient = dict(zip(gradient, torch._foreach_mul(gradients, scale), strict=True))
        return terms, gradient

    @operation("optimiser")
    def descend(self, terms: Terms, gradient: Terms, unless: Tensor | None = None) -> Terms:
        """Take a gradient step.

        Args:
            terms: the first result of `gradient`.
            gradient: its second result, by number of the weight.
            unless: leave the weights unchanged if this is True.  [] bool

        Returns:
            The terms.
        """
        for i, weight in enumerate(self._weights):
            weight.grad = laid_out_as(weight, gradient.get(str(i)))
        self._finite &= loss_plus_norm(terms, gradient).abs() < torch.inf
        step_unless(self.optimizer, ~self._finite if unless is None else ~self._finite | unless)
        self.policy_version += 1
        return terms

    def _captured(self, argument: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Do what one graph captures: all gradient steps of an update, and the mean of their numbers."""
        first, self._n_keys = self.policy_version, 0
        prepared, numbers = self.prepare(argument)
        steps = self._each_step(prepared)
        self._n_steps = self.policy_version - first  # a replayed graph does not count them
        return {**mean_terms(steps), **numbers}

    def _each_step(self, prepared: Any) -> list[dict[str, Tensor]]:  # noqa: ANN401 - as of `minibatches`
        """Take the gradient step of each minibatch, and return the numbers of each."""
        return [self.after_step(one, self.gradient_step(one)) for one in self.minibatches(prepared)]

    def _is_bundled(self, *methods: str) -> bool:
        """Return True if these methods are the library's, so that no code of a user runs in between."""
        owners = [next(one for one in type(self).__mro__ if name in vars(one)) for name in methods]
        places = [one.__module__ for one in owners] + [getattr(self, name).__module__ for name in methods]
        return not vars(self).keys() & methods and all(place.startswith("rlstruct.") for place in places)

    def _replayed(self, argument: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Call `_captured`; later calls may replay it as one captured graph."""
        first = self.policy_version
        self.version_now.fill_(first)
        with self._updating():
            terms = self._graph(argument)
        self.policy_version = first + self._n_steps
        return terms

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """Look for what was replaced since the last update, and keep the optimiser as a function, in a with block."""
        if self._is_updating:
            yield
            return
        runners = self._graph, *self._parts
        if any(runner.make is not None for runner in runners):
            self._start_over_if_replaced()
        for runner in runners:
            runner.weights_changed()
        self._compiled_steps.begin()
        self._is_updating = True
        try:
            yield
        finally:
            self._compiled_steps.end()
            self._is_updating = False

    def close(self) -> None:
        """Drop captured and compiled code: a graph with an all-reduce must be released before its process group."""
        for runner in (self._graph, *self._parts):
            runner.forget()

    def _executors(self) -> tuple[object, Make | None, Make | None]:
        """Return the owner of the weights, and how to make graphs and compiled code, where the update allows them."""
        config, fixed = self.config, not self.whole_episodes  # whole episodes give every batch a different shape
        owner, pure = self.depends_on()
        compiled = fixed and config.compile_update is True
        graph = EXECUTORS["graph"](self.device) if fixed and config.graph and self.group.can_capture else None
        if not pure and (compiled or graph is not None):
            _logger.info(
                "run_training: updates on %s could run faster, but the agent does not: %s.", self.device, PROMISE
            )
            graph = None
        return owner, graph, EXECUTORS["compiled"](self.device) if compiled and pure else None

    def _start_over_if_replaced(self) -> None:
        """Drop executors that hold an attribute of this learner, or a setting of its optimiser, that was replaced."""
        before, now = self._frozen, {k: v for k, v in vars(self).items() if k[0] != "_" and k != "policy_version"}
        for i, group in enumerate(self.optimizer.param_groups):
            # `anneal` sets the rate; new weights of a group appear in their number.
            now |= {f"{i}.{k}": v for k, v in group.items() if k not in ("params", "lr")}
            now[f"{i}.params"] = len(group["params"])
        self._frozen = now
        if before is None or (before.keys() == now.keys() and all(_same(before[k], v) for k, v in now.items())):
            return
        self.close()
        self._owner, graph, self._compile = self._executors()
        self._graph.owner, self._graph.make = self._owner, self._graph.make and graph
        for part in self._parts:
            part.owner, part.make = self._owner, part.make and self._compile

    def _may_compile_steps(self) -> bool:
        """Return True if gradient steps may be compiled together with the step of the optimiser."""
        return self.device.type == "cpu" and self.group.size == 1 and self._is_bundled("gradient", "descend")

    def _pure_step(self, minibatch: Any, state: Terms) -> tuple[Terms, Terms]:  # noqa: ANN401 - as of `terms`
        """Take a step of `CompiledSteps.take_stacks`, as a pure function; return its terms and changes of the state."""
        return self._compiled_steps.compute(minibatch, state)

    def _part(self, name: str, step: Callable[..., Any]) -> Runner[Any]:
        """Return a runner of a pure part of the update, compiled if the settings ask for it.

        ``name`` names compiled code in a profile. An eager step enters its own operations instead.
        """
        failed = self._warn_uncompiled
        runner: Runner[Any] = Runner(step, self._owner, self.device, self._compile, failed=failed, operation=name)
        self._parts.append(runner)
        return runner

    def _warn_uncompiled(self, why_not: str) -> None:
        if not self._uncompiled:
            self._uncompiled = True
            warn_uncompiled("run_training: an update", why_not, "compile_update")

    def depends_on(self) -> tuple[object, bool]:
        """Return the owner of all weights that `terms` reads, and True if `terms` depends only on them and the batch.

        Override this if `terms` reads networks besides the agent's, such as a target network.
        """
        return self.agent, self.agent.pure

    def seed_for(self, purpose: str, device: torch.device | str | None = None) -> Tensor:
        """Return the seed of a learner's random numbers, for `rlstruct.functional.random.step_keys`.

        Args:
            purpose: what the numbers are for. Each purpose, seed of the configuration and learner has a separate
                stream, which none of the environments shares.
            device: where the numbers are drawn; None for the learner's device.

        Returns:
            [1] int64 on the device.
        """
        seed = torch.full((1,), self._own_seed(), dtype=torch.int64, device=device or self.device)
        return random.purpose_seed(seed, purpose)

    def keys(self, n: int) -> Tensor:
        """Return new random keys for `rlstruct.functional.random`, such as those with which an agent acts in a loss.

        Call this in `minibatches` or `prepare`, or in ``prepare_sample`` of a learner with a replay buffer, and pass
        the keys on with the minibatch. They follow from the seed, the gradient step and the earlier calls, so that a
        resumed training and a captured graph draw the same ones, and no other learner does.

        Returns:
            [n] int64 on the learner's device.
        """
        return self._keys(n, 1)[0]

    def _keys(self, n: int, n_steps: int) -> Tensor:
        """Return the next n `keys` of the next gradient steps.  [n_steps, n]."""
        lanes = torch.arange(self._n_keys, self._n_keys + n, dtype=torch.int64, device=self.device)
        steps = self.version_now + torch.arange(n_steps, dtype=torch.int64, device=self.device)
        self._n_keys += n
        return random.step_keys(self._keys_seed.expand(n_steps), steps, lanes).t()

    def _own_seed(self) -> int:
        """Return the seed of this learner, which no other learner and no training with another seed has."""
        return self.config.seed + (self.group.rank << 32)

    def agent_info(self, fraction_done: float, n_envs: int) -> DictTensor:
        """Return the ``agent_info`` for collecting the next batch, [B] on the CPU; by default it is empty."""
        return DictTensor()

    def _scaled(self, trajectories: Trajectories) -> Trajectories:
        """Scale the rewards of a batch on the learner's device, if the network keeps statistics of them."""
        if self.statistics is None:
            return trajectories
        steps = trajectories.steps
        reward, done, mask = steps["_observation/reward"], steps["_observation/done"], steps.mask()
        before = None if self.whole_episodes else self._open_return
        if before is not None:  # a restarted worker or a loaded checkpoint may have cut an episode
            before = before.masked_fill(steps["observation/initial_state"][:, 0], 0.0)
        self._open_return = self.statistics.see_rewards(reward, done, mask, before)
        scaled = {**dict(steps.items()), "_observation/reward": self.statistics.scale_rewards(reward)}
        return Trajectories(trajectories.info, TemporalDictTensor.unchecked(scaled, steps.lengths))

    def _see_frames(self, trajectories: Trajectories) -> None:
        """Update the network's statistics of frames, if it keeps any, after learning from a batch."""
        if self.statistics is not None:
            frame = frame_of(trajectories.steps.truncate_key("observation/"), n_axes=2)
            self.statistics.see_frames(frame, trajectories.mask())

    def anneal(self, fraction_done: float) -> None:
        """Set the learning rates when this fraction of the training is done, in [0, 1].

        The rate of a parameter group starts at the group's ``initial_lr`` (torch's name). Without one it starts at the
        ``lr`` that the optimiser was created with, or at ``learning_rate``, if that is the default of its class.
        """
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                group["initial_lr"] = initial_rate(self.optimizer, group, self.config.learning_rate)
            first = group["initial_lr"]
            rate = linear_schedule(fraction_done, first, first * self.config.final_learning_rate_fraction)
            if self.device.type != "cpu" and (group.get("capturable") or group.get("fused")):
                tensor = torch.empty((), dtype=torch.float32, device=self.device)
                group["lr"] = self._rates.setdefault(first, tensor).fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint: model, optimiser, configuration, number of gradient steps."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.config),
            "policy_version": self.policy_version,
            "open_return": self._open_return,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, bit for bit, with the present settings. Its tensors may be on any device.

        Raises:
            RuntimeError: the state belongs to a different model.
        """
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"], self.config.learning_rate)
        self.close()
        self.policy_version = int(state["policy_version"])
        self._open_return = None if (sums := state["open_return"]) is None else sums.to(self.device, copy=True)


def _same(before: object, now: object) -> bool:
    """Return True for the same object, or for equal plain values."""
    plain = (int, float, str, tuple)
    return before is now or (isinstance(before, plain) and isinstance(now, plain) and before == now)


def warn_uncaptured(why_not: str) -> None:
    """Warn that the updates of a learner do not run as a graph."""
    warn_user(
        "run_training: an update cannot be captured as one graph and runs eagerly, slower and with equal results: "
        f"{why_not}. Set graph=False in the configuration to silence this warning."
    )


def check_numbers(where: str, terms: Mapping[str, Any], *, single: Collection[str]) -> None:
    """Raise unless every term is a tensor, and each of ``single`` a single number."""
    for name, term in terms.items():
        if not isinstance(term, Tensor):
            raise BadTypeError(
                f"{where}: {name!r} is {term!r}, {kind_of(term)}, expected a tensor on the learner's device. "
                f"Remove item(), or convert a Python number: loss.new_tensor({name})."
            )
        if name in single and term.dim():
            raise ShapeMismatchError(
                f"{where}: {name!r} has shape {list(term.shape)}, expected a single number, []. Average it, over real "
                "steps only: rlstruct.functional.statistics.masked_mean(loss, batch.mask())."
            )


def mean_terms(steps: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average the terms of gradient steps, each over those that have it; empty if there are no steps.  [] each.

    Integers and bools, such as counts, have means in float32.
    """
    names = dict.fromkeys(name for terms in steps for name in terms)
    stacks = {name: torch.stack([terms[name] for terms in steps if name in terms]) for name in names}
    return {name: one.mean(dtype=None if one.is_floating_point() else torch.float32) for name, one in stacks.items()}


def evaluate_actions(replayed: TemporalDictTensor, steps: TemporalDictTensor) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of the stored actions; a replay with newer weights may sample different ones.

    Args:
        replayed: the result of `rlstruct.replay_agent`: ``action_logits`` [B, T, A], or [B, T, K, A] for K actions at
            once, or ``action_mean`` and ``action_log_std`` [B, T, D].
        steps: the collected steps: ``action/action`` [B, T], [B, T, K] or [B, T, D], same device.

    Returns:
        ``(log_probability, entropy)`` of the policy at every step, with gradients.  [B, T] each

    Raises:
        KeyError: the agent returns neither logits nor mean and log_std.
    """
    action = steps["action/action"]
    if "action_logits" in replayed.keys():
        logits = replayed["action_logits"]
        log_probability, entropy = categorical.log_probability_and_entropy(logits, action)
        return (log_probability, entropy) if logits.dim() == 3 else (log_probability.sum(-1), entropy.sum(-1))
    if "action_mean" in replayed.keys():
        mean, log_std = replayed["action_mean"], replayed["action_log_std"]
        return gaussian.log_probability(mean, log_std, action), gaussian.entropy(log_std)
    raise BadKeyError(
        f"evaluate_actions: the agent returns {sorted(replayed.keys())}, expected 'action_logits' (discrete actions) "
        "or 'action_mean' and 'action_log_std' (continuous ones). Return them next to 'action'."
    )


__getattr__ = renamed.attributes(__name__)
