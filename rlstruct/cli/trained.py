"""What a run left behind: a trained network, and the environments that it knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from rlstruct.algos.checkpoint import read_checkpoint
from rlstruct.cli.agents import AgentChoice, choose
from rlstruct.cli.complaint import UserError
from rlstruct.cli.environments import Factory, find, spaces_of
from rlstruct.cli.record import RunRecord, load


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes:
        record: what the folder remembers.
        factory: makes its environments.
        choice: makes agents that act with the network.
        model: the network, on the CPU.
        env_steps: environment steps that it has learnt from.
    """

    record: RunRecord
    factory: Factory
    choice: AgentChoice
    model: nn.Module
    env_steps: int


def load_trained(run: Path, *, auto_reset: bool, render: bool = False) -> Trained:
    """Load the network of a run's last checkpoint.

    Args:
        run: the folder.
        auto_reset: whether the environments shall restart by themselves.
        render: whether they shall draw themselves.

    Raises:
        UserError: there is no such run, or it has no checkpoint yet, or the checkpoint does not fit.
    """
    record = load(run)
    factory = find(record.task, auto_reset=auto_reset, render=render)
    choice = choose(record.algorithm, record.task, *spaces_of(factory))
    file = run / "checkpoint.pt"
    if not file.exists():
        raise UserError(f"{run} has no checkpoint.pt: the first one is written after the first evaluation.")
    try:
        checkpoint = read_checkpoint(file)
    except ValueError as error:
        raise UserError(str(error)) from None
    model = choice.create_model()
    try:
        model.load_state_dict(checkpoint["model"])
    except (KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file} does not fit the network of today ({choice.kind}): {reason}") from None
    return Trained(record, factory, choice, model, int(checkpoint["env_steps"]))
