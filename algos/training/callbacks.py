"""Callbacks: your own code that watches a training, keeps results, and can stop it. They run between updates."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlstruct.algos.training.checkpoint import plain, write_checkpoint
from rlstruct.algos.training.evaluation import Evaluation
from rlstruct.core import Trajectories
from rlstruct.errors import BadTypeError, BadValueError, UsageError, kind_of
from rlstruct.functional.all_reduce import sum_over_learners
from rlstruct.options import nearest, writable
from rlstruct.policies import Policy

if TYPE_CHECKING:
    from rlstruct.algos.learner import CreateAgent
    from rlstruct.algos.training.loop import TrainingLoop

_logger = logging.getLogger(__name__)


class TrainingContext:
    """A training as its callbacks see it. Its objects belong to the training: read or copy them, never modify them.

    Attributes:
        config: the settings of the training.
        learner: the learner, with its ``model``, ``optimizer`` and ``policy_version``.
        run: the run folder, or None; with several learners only rank 0 has one.
        evaluations: all evaluations so far, the newest last.
        batch: the batch of the last update, as it was collected; None before the first update.  [B, T]
        terms: the result of the last update, detached and on the learner's device.  [] each
        updates: number of updates in this process.
        reason: why a callback stops the training; None if none does.
    """

    def __init__(self, loop: TrainingLoop, create_agent: CreateAgent) -> None:
        self._loop, self._create_agent = loop, create_agent
        self.config, self.learner, self.run = loop.config, loop.learner, loop.folder
        self.evaluations: Sequence[Evaluation] = loop.history.evaluations
        self._evaluated: Mapping[str, Tensor] = {}
        self.batch: Trajectories | None = None
        self.terms: Mapping[str, Tensor] = {}
        self.updates = 0
        self.reason: str | None = None

    @property
    def env_steps(self) -> int:
        """Environment steps collected by all learners."""
        return self._loop.env_steps

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of the last update, and ``return``, the mean over recent episodes, once some have ended.

        Reading them waits for the learner's device, so on a GPU do not read them after every update.
        """
        names, terms = list(self.terms), list(self.terms.values())
        numbers = torch.stack(terms).tolist() if terms else []  # sync: only when a callback reads this
        mean_return = self._loop.history.statistics.mean_return(forget=False)
        return dict(zip(names, numbers, strict=True)) | ({} if mean_return is None else {"return": mean_return})

    def stop(self, reason: str) -> None:
        """Stop the training after this hook. It still evaluates and saves, and its result contains the reason."""
        self.reason = self.reason or reason

    def policy(self, *, stochastic: bool | None = None) -> Policy:
        """Return the policy of the last evaluation, with a copy of its weights, on the CPU; see `rlstruct.load`.

        Raises:
            RuntimeError: nothing was evaluated or collected yet, or nothing since the training was resumed.
        """
        specs, weights = self._loop.shown, self._weights("policy")
        if specs is None:
            raise UsageError("TrainingContext.policy: call it after the first batch.")
        model = copy.deepcopy(self._loop.learner.model).to("cpu")
        model.load_state_dict(weights)
        stochastic = self._loop.draws if stochastic is None else stochastic
        batcher = self._loop.batcher
        spaces: dict[str, Any] = {"actions": batcher.actions, "bounds": batcher.bounds}
        sampling = self._loop.sampling()
        return Policy(model, self._create_agent, specs, stochastic=stochastic, agent_info=sampling, **spaces)

    def save_policy(self, file: str | Path) -> None:
        """Save the policy of the last evaluation for `rlstruct.load`. A training cannot resume from this file.

        Missing folders are created.

        Raises:
            RuntimeError: nothing was evaluated yet, or nothing since the training was resumed.
            ValueError: the file cannot be written.
        """
        weights, result = self._weights("save_policy"), self.evaluations[-1]
        numbers = {"env_steps": result.env_steps, "policy_version": result.policy_version, "evaluation": asdict(result)}
        path = writable("TrainingContext.save_policy", file, replaces=True)
        write_checkpoint(path, {**self._loop.policy_state(), **numbers, "model": weights})

    def _weights(self, method: str) -> dict[str, Tensor]:
        if not self._evaluated:
            raise UsageError(
                f"TrainingContext.{method}: no evaluation has ended since the training began or was resumed, expected "
                "one, whose weights these are. Call it in on_evaluation, or later."
            )
        return dict(self._evaluated)


class Callback:
    """Base of callbacks: override the hooks that you need, and pass instances to ``train(…, callbacks=[…])``.

    Checkpoints contain the result of ``state_dict`` (tensors and plain values). A resumed training restores it,
    matching callbacks by class and order.

    Attributes:
        kept: names of the attributes that ``state_dict`` returns.
        every_rank: call it in every learner, not only in rank 0. It must then be picklable.
    """

    kept: tuple[str, ...] = ()
    every_rank = False

    def __init_subclass__(cls, **arguments: Any) -> None:  # noqa: ANN401 - passed on
        """Raise for a method that is named like a hook and is none: nothing would call it."""
        super().__init_subclass__(**arguments)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                raise BadValueError(
                    f"{cls.__name__}: {name!r} is not a hook, and nothing would call it. The hooks are "
                    f"{', '.join(hooks)}.{nearest(name, hooks)} Give a method of your own another name."
                )

    def on_start(self, context: TrainingContext) -> None:
        """Called when a training starts, or continues from a checkpoint."""

    def on_update(self, context: TrainingContext) -> None:
        """Called after each update, with its ``batch``, ``terms`` and ``metrics`` in the context."""

    def on_evaluation(self, context: TrainingContext) -> None:
        """Called after each evaluation, ``context.evaluations[-1]``; the first is of the untrained network."""

    def on_end(self, context: TrainingContext) -> None:
        """Called when a training has ended without an exception, after its last evaluation."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint: tensors and plain values."""
        kept: Any = self.kept
        if isinstance(kept, str):
            raise BadTypeError(f"{type(self).__name__}: kept is {kept!r}, expected a tuple, ({kept!r},).")
        return {name: getattr(self, name) for name in kept}

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401 - what state_dict returned
        """Continue from a `state_dict`."""
        vars(self).update(state)


class Callbacks:
    """The callbacks of a training in one learner.

    Args:
        callbacks: all callbacks; rank 0 calls all of them, the other learners those with ``every_rank``.
        loop: the training that they see.
        create_agent: the training's factory of agents.
    """

    def __init__(self, callbacks: Sequence[Callback], loop: TrainingLoop, create_agent: CreateAgent) -> None:
        self.present = bool(callbacks)  # equal in all learners
        self._own = [one for one in callbacks if loop.learner.group.rank == 0 or one.every_rank]
        self.context = TrainingContext(loop, create_agent)
        self._being_evaluated: Mapping[str, Tensor] = {}  # weights of the evaluation in progress

    def evaluation_started(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of the evaluation, because the learner keeps changing its own."""
        if self._own:
            self._being_evaluated = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def evaluation_ended(self) -> None:
        """Call ``on_evaluation``."""
        self.context._evaluated = self._being_evaluated
        self.call("on_evaluation")

    def update(self, batch: Trajectories, terms: Mapping[str, Tensor]) -> None:
        """Call ``on_update``."""
        if self.present:  # otherwise the batch is not kept alive
            self.context.batch, self.context.terms = batch, terms
            self.context.updates += 1
            self.call("on_update")

    def stopped(self) -> bool:
        """Return True in all learners if a callback of any learner wants to stop."""
        if not self.present:
            return False
        wanted = torch.tensor(float(self.context.reason is not None), dtype=torch.float64, device="cpu")
        stop = bool(sum_over_learners(wanted))  # sync: on the CPU, once per update
        if stop:
            self.context.stop("a callback of another learner")
        return stop

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all callbacks."""
        states = []
        for one in self._own:
            with _named(one, "state_dict"):
                states.append({"class": type(one).__qualname__, "state": _plain(one)})
        return states

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states, matched by class and order; a new callback keeps its initial state."""
        left = list(saved)
        for one in self._own:
            own_state = next((state for state in left if state["class"] == type(one).__qualname__), None)
            if own_state is not None:
                left.remove(own_state)
                if own_state["state"] is not None:  # 0.3 wrote None for callbacks without a state
                    with _named(one, "load_state_dict"):
                        one.load_state_dict(own_state["state"])

    def call(self, hook: str) -> None:
        """Call a hook, such as ``on_evaluation``. An exception gets a note that names the callback."""
        for one in self._own:
            with _named(one, hook):
                getattr(one, hook)(self.context)


@contextlib.contextmanager
def _named(one: Callback, method: str) -> Iterator[None]:
    """Add a note to an exception that names the callback and its method; the type stays, as callers may catch it."""
    try:
        yield
    except Exception as error:
        note = f"run_training: raised by the callback {type(one).__qualname__}.{method}"
        if hasattr(error, "add_note"):  # Python 3.11 or newer
            error.add_note(note)
        else:
            _logger.error("%s", note)
        raise


def _plain(one: Callback) -> object:
    """Return a callback's state, with numpy's numbers converted to Python's. Raise if a checkpoint cannot hold it."""
    state = one.state_dict()
    try:
        return plain(state)
    except BadTypeError:
        raise BadTypeError(
            f"{type(one).__name__}.state_dict: a checkpoint cannot hold {state!r}, expected tensors and plain values: "
            "numbers, strings, lists and dicts. Convert arrays with torch.from_numpy or tolist()."
        ) from None


def for_others(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks for the other learners; a placeholder stands for each that only rank 0 calls."""
    if not isinstance(callbacks, Sequence):
        raise BadTypeError(f"run_training: callbacks is {kind_of(callbacks)}, expected a list of callbacks.")
    for one in callbacks:
        if not isinstance(one, Callback):
            raise BadTypeError(
                f"run_training: callbacks has {one!r}, expected an instance of a subclass of rlstruct.algos.Callback."
            )
    return [one if one.every_rank else Callback() for one in callbacks]
