"""Base class of all learners: one network, one optimiser, and how an update runs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rlstruct.algos.config import TrainingConfig
from rlstruct.algos.optimising import laid_out_as, load_optimizer, norm_of, step_unless
from rlstruct.algos.process_group import Group, Terms, learners
from rlstruct.batchers.arguments import check_call, check_factory
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.device import resolve_device
from rlstruct.engine.compiled import warn_uncompiled
from rlstruct.engine.executors import EXECUTORS, PROMISE
from rlstruct.engine.runner import Runner
from rlstruct.engine.streams import stream_on
from rlstruct.errors import BadKeyError, BadTypeError, BadValueError, ShapeMismatchError, warn_user
from rlstruct.functional import categorical, gaussian
from rlstruct.functional.schedules import linear_schedule
from rlstruct.profiling import operation
from rlstruct.replay import replay_with_next_values as replay_with_next_values  # where it was
from rlstruct.rl_agent import RL_Agent

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger(__name__)

CreateAgent = Callable[..., RL_Agent]


def agent_around(model: nn.Module, create_agent: CreateAgent, device: str, *, stochastic: bool) -> RL_Agent:
    """Make an agent that shares ``model``; TypeError if the factory does not take what a training passes."""
    arguments = {"device": device, "stochastic": stochastic, "copy_model": False}
    mend = "every training passes these. Take a factory of rlstruct.agents, or accept and heed them"
    check_factory("run_training", "create_agent", create_agent, "such as a class of rlstruct.agents")
    check_call("run_training", "create_agent", create_agent, {"model": model, **arguments}, mend)
    return create_agent(model, **arguments)


class GradientLearner(ABC):
    """One network and one optimiser.

    An update runs eagerly, with its gradients compiled, or as one recorded graph, with equal results.
    As soon as a loss or a gradient is not finite, the optimiser stops changing the weights, so that the weights that
    led there can still be saved later. An ``optimizer`` of your own is guarded likewise, whichever it is; nothing waits
    for the device, and updates can be recorded, if it is made with ``capturable=True`` or is a fused Adam.

    Args:
        model: on the learner's device.
        agent: acts with this very model, so that gradients reach it.
        config: its learning rate, gradient norm, device, and how updates run.

    Attributes:
        settings: the class of its configuration.
        whole_episodes: every batch starts new episodes; otherwise each continues where the last one stopped, in
            environments that restart by themselves.
        overlap: begin to collect the next batch before learning from this one. Worker processes then collect while the
            learner learns, with weights that are one update older than they could be.
        model: as given; its weights are published to the batchers.
        agent: as given.
        config: likewise.
        device: where the losses are computed.
        optimizer: Adam (Kingma and Ba, ICLR 2015), or what your ``__init__`` puts in its place.
        policy_version: the number of gradient steps so far.
        learners: all that train this network, each in its own process.
        version_now: the same when the update began, for what a graph computes.  [] int64 on the device
        statistics: the network, if it keeps some of what it learns from, as `rlstruct.agents.Normalised`; else None.
    """

    settings: ClassVar[type[TrainingConfig]] = TrainingConfig
    whole_episodes: ClassVar[bool] = False
    overlap: bool = False

    def __init__(self, model: nn.Module, agent: RL_Agent, config: TrainingConfig) -> None:
        self.model, self.agent, self.config = model, agent, config
        self.device = resolve_device(config.learner_device)
        self.learners = learners()
        # One kernel for all weights, where torch has one: the calls are what an update of a small network costs.
        fused, on_cpu = self.device.type in ("cpu", "cuda"), self.device.type == "cpu"
        self.optimizer = torch.optim.Adam(
            model.parameters(), lr=config.learning_rate, eps=config.adam_epsilon, fused=fused, capturable=not on_cpu
        )
        self.policy_version = 0
        self.version_now = torch.zeros((), dtype=torch.int64, device=self.device)
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._rates: dict[float, Tensor] = {}  # by their initial values: a graph would freeze a number
        self._first = self._n_steps = 0  # policy_version before the update, and its gradient steps
        fixed = not self.whole_episodes  # else every batch has another shape
        self._owner, pure = self._depends_on()
        compiled = fixed and config.compile_update and (agent.pure or not pure)  # only the agent can promise that much
        record = EXECUTORS["graph"](self.device) if fixed and config.graph and self.learners.records else None
        if not pure and (compiled or record is not None):
            _logger.info(
                "run_training: updates on %s could run faster, but the agent does not: %s.", self.device, PROMISE
            )
        self._compile = EXECUTORS["compiled"](self.device) if compiled and pure else None
        record = record if pure else None
        stream = None if record is None else stream_on(self.device)  # CUDA records on no stream but one's own
        self._whole: Runner[Terms] = Runner(
            self._step, self._owner, self.device, record, failed=_warn_unrecorded, stream=stream, operation="graph"
        )
        self._runners: list[Runner[Any]] = [self._whole]
        self._uncompiled = False  # and a warning has said so
        self._gradients = self._part("loss and backward", self._gradient)
        self.statistics: Any = model if hasattr(model, "see_rewards") else None
        self._open_return: Tensor | None = None  # [B], where the statistics want it

    @classmethod
    def create(cls, model: nn.Module, create_agent: CreateAgent, config: Any) -> Self:  # noqa: ANN401 - its own config
        """Make a learner whose agent shares ``model``, which is on the learner's device."""
        return cls(model, agent_around(model, create_agent, config.learner_device, stochastic=True), config)

    @abstractmethod
    def terms(self, batch: Any) -> dict[str, Tensor]:  # noqa: ANN401 - each algorithm's own
        """Compute the ``loss`` of a gradient step and its terms: a pure function of a batch and the weights.

        Args:
            batch: what `gradient` was called with: Trajectories [B, T], unless the algorithm says otherwise.
        """

    def gradient_steps(self, batch: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as of `terms`
        """Take the gradient steps of an update, by default a single one on the whole batch.

        It may be recorded: nothing may depend on what the host counts, `policy_version` included.

        Args:
            batch: on the learner's device.  [B, T]

        Returns:
            Detached numbers, see `update`.
        """
        return self.descend(*self.gradient(batch))

    def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        """Learn from one batch.

        Args:
            trajectories: on any device.  [B, T]
            fraction_done: how much of the training was over before this batch, in [0, 1].

        Returns:
            Detached numbers on one device, always the same names; empty if nothing was learned.  [] each
        """
        batch = self.learn_from(trajectories)
        self.anneal(fraction_done)
        terms = self.run(batch)
        self.see_frames(batch)
        return terms

    def run(self, batch: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as of `terms`
        """Take the gradient steps on a batch, from the second time on as one recorded graph if that is asked for."""
        self._first = self.policy_version
        self.version_now.fill_(self._first)
        for runner in self._runners:
            runner.weights_changed()
        terms = self._whole(batch)
        self.policy_version = self._first + self._n_steps
        return terms

    def close(self) -> None:
        """Forget what was recorded and compiled: a graph with sums over learners in it must go before they part."""
        for runner in self._runners:
            runner.forget()

    def _part(self, name: str, step: Callable[..., Any]) -> Runner[Any]:
        """Return what calls a pure part of the update, as compiled code if that is asked for.

        ``name`` is that of the operation that compiled code is; eagerly, the step enters its own operations.
        """
        runner = Runner(step, self._owner, self.device, self._compile, failed=self._warn_uncompiled, operation=name)
        self._runners.append(runner)
        return runner

    def _warn_uncompiled(self, why_not: str) -> None:
        if not self._uncompiled:
            self._uncompiled = True
            warn_uncompiled("run_training: an update", why_not, "compile_update")

    def _depends_on(self) -> tuple[object, bool]:
        """Return what has the weights that `terms` depends on, and whether it depends on nothing else."""
        return self.agent, self.agent.pure

    def _step(self, batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Take the gradient steps of `run`; what Python counts here, a replay leaves alone."""
        self.policy_version = self._first
        terms = self.gradient_steps(batch)
        self._n_steps = self.policy_version - self._first
        return terms

    def agent_info(self, fraction_done: float, n_envs: int) -> DictTensor:
        """Return the ``agent_info`` with which to collect the next batch, [B] on the CPU, or empty as here."""
        return DictTensor()

    @operation("copy")
    def learn_from(self, trajectories: Trajectories) -> Trajectories:
        """Move a batch to the learner's device, with the rewards as the learner should see them."""
        trajectories = trajectories.to(self.device)
        if self.statistics is None:
            return trajectories
        steps = trajectories.trajectories
        reward, done, mask = steps["_observation/reward"], steps["_observation/done"], steps.mask()
        before = None if self.whole_episodes else self._open_return
        if before is not None:  # an episode may have been lost with a worker, or when a checkpoint was loaded
            before = before.masked_fill(steps["observation/initial_state"][:, 0], 0.0)
        self._open_return = self.statistics.see_rewards(reward, done, mask, before)
        scaled = {**dict(steps.items()), "_observation/reward": self.statistics.scale_rewards(reward)}
        return Trajectories(trajectories.info, TemporalDictTensor.unchecked(scaled, steps.lengths))

    def see_frames(self, trajectories: Trajectories) -> None:
        """Update the statistics of the frames, if the network keeps any, once a batch has been learned from."""
        if self.statistics is not None:
            self.statistics.see_frames(trajectories.trajectories["observation/frame"], trajectories.mask())

    def anneal(self, fraction_done: float) -> None:
        """Set the learning rates for what is done in [0, 1] of the training.

        That of a group of weights falls from its ``initial_lr``, torch's word, or from the ``learning_rate``.
        """
        for group in self.optimizer.param_groups:
            first = float(group.get("initial_lr", self.config.learning_rate))
            rate = linear_schedule(fraction_done, first, first * self.config.final_learning_rate_fraction)
            if self.device.type != "cpu" and (group.get("capturable") or group.get("fused")):
                if first not in self._rates:
                    self._rates[first] = torch.zeros((), dtype=torch.float32, device=self.device)
                group["lr"] = self._rates[first].fill_(rate)
            else:
                group["lr"] = rate

    def gradient(self, batch: Any) -> tuple[Terms, Terms]:  # noqa: ANN401 - as of `terms`
        """Differentiate the ``loss`` among `terms`, compiled where that is asked for, over the shares of all learners.

        Returns:
            The terms, detached, with ``gradient_norm`` [] if there is a bound; and the gradient of each weight by its
            number, scaled down to the bound. Weights that the loss does not depend on have none.
        """
        terms, gradient = self._gradients(batch)
        if isinstance(self.learners, Group):
            return self._bounded(*self.learners.mean(terms, gradient, self.weight(batch)))
        return terms, gradient

    def weight(self, batch: Any) -> Tensor | None:  # noqa: ANN401 - as of `terms`
        """Return how many steps `terms` averages over, by which learners are weighed; None for all alike.  []."""
        return batch.lengths.sum() if isinstance(batch, Trajectories) else None

    def _gradient(self, batch: Any) -> tuple[Terms, Terms]:  # noqa: ANN401
        with torch.enable_grad():
            with operation("loss"):
                terms = self.terms(batch)
            where, given = f"{type(self).__name__}.terms", sorted(terms) if isinstance(terms, dict) else terms
            if not isinstance(terms, dict) or "loss" not in terms:
                raise BadKeyError(f"{where}: it returns {given}, expected a dict with 'loss', which is minimised.")
            check_numbers(where, terms, single=["loss"])
            if not terms["loss"].requires_grad:
                raise BadValueError(
                    f"{where}: the loss carries no gradient, as it is computed from collected "
                    "numbers alone. Compute the agent's outputs again with replay_agent(agent, batch), and use those."
                )
            with operation("backward"):
                found = torch.autograd.grad(terms["loss"], self._weights, allow_unused=True)
        gradient = {str(i): one for i, one in enumerate(found) if one is not None}
        terms = {name: term.detach() if term.requires_grad else term for name, term in terms.items()}
        return (terms, gradient) if self.learners.size > 1 else self._bounded(terms, gradient)

    def _bounded(self, terms: Terms, gradient: Terms) -> tuple[Terms, Terms]:
        """Scale the gradient down to the bound of its norm, if there is one."""
        if (bound := self.config.max_gradient_norm) is not None:
            found = list(gradient.values())
            norm = terms["gradient_norm"] = norm_of(found)
            scale = (bound / (norm + 1e-6)).clamp(max=1.0)  # as nn.utils.clip_grad_norm_
            gradient = dict(zip(gradient, torch._foreach_mul(found, scale), strict=True))
        return terms, gradient

    @operation("optimiser")
    def descend(self, terms: Terms, gradient: Terms, unless: Tensor | None = None) -> Terms:
        """Take a gradient step.

        Args:
            terms: what `gradient` returned, as is ``gradient``.
            gradient: by number of the weight.
            unless: leave the weights alone if this is true.  [] bool

        Returns:
            The terms.
        """
        for i, weight in enumerate(self._weights):
            weight.grad = laid_out_as(weight, gradient.get(str(i)))
        norm = terms["gradient_norm"] if "gradient_norm" in terms else norm_of(list(gradient.values()))
        self._finite &= (terms["loss"] + norm).abs() < torch.inf
        step_unless(self.optimizer, ~self._finite if unless is None else ~self._finite | unless)
        self.policy_version += 1
        return terms

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs: model, optimiser, configuration, number of gradient steps."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.config),
            "policy_version": self.policy_version,
            "open_return": self._open_return,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, bit by bit, where `state_dict` was called, with the present settings; tensors may be on any device.

        Raises:
            RuntimeError: the model is another one.
        """
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.close()
        self.policy_version = int(state["policy_version"])
        self._open_return = None if (sums := state["open_return"]) is None else sums.to(self.device, copy=True)


def _warn_unrecorded(why_not: str) -> None:
    warn_user(
        "run_training: an update cannot be recorded as one graph and runs step by step, slower and with equal results: "
        f"{why_not}. graph=False in the configuration does not warn."
    )


def check_numbers(where: str, terms: Mapping[str, Any], *, single: Collection[str]) -> None:
    """Refuse terms that are no tensors, and those named ``single`` that are no single number."""
    for name, term in terms.items():
        if not isinstance(term, Tensor):
            raise BadTypeError(
                f"{where}: {name!r} is {term!r}, a {type(term).__name__}, expected a tensor on the learner's device. "
                f"Leave out item(), or make one of a number: loss.new_tensor({name})."
            )
        if name in single and term.dim():
            raise ShapeMismatchError(
                f"{where}: {name!r} has shape {list(term.shape)}, expected a single number, []. Average it, over real "
                "steps only: rlstruct.functional.statistics.masked_mean(loss, batch.mask())."
            )


def mean_terms(steps: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average the terms of several gradient steps: at least one, with the same names in all.  [] each."""
    return {name: torch.stack([terms[name] for terms in steps]).mean() for name in steps[0]}


def judge_actions(replayed: TemporalDictTensor, steps: TemporalDictTensor) -> tuple[Tensor, Tensor]:
    """Judge the stored actions: an agent of the user's own may draw others in a replay with newer weights.

    Args:
        replayed: what `rlstruct.replay_agent` returned: ``action_logits`` [B, T, A], or [B, T, K, A] for K actions at
            once, or ``action_mean`` and ``action_log_std`` [B, T, D].
        steps: what was collected: ``action/action`` [B, T], [B, T, K] or [B, T, D], same device.

    Returns:
        ``(log_probability, entropy)`` of the policy at every step, with gradients.  [B, T] each

    Raises:
        KeyError: the agent returns neither.
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
        f"judge_actions: the agent returns {sorted(replayed.keys())}, expected 'action_logits' (discrete actions) or "
        "'action_mean' and 'action_log_std' (continuous ones). Return them next to 'action'."
    )
