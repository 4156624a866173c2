"""Base of agents around one torch module: it owns the copy, its device, and weight updates."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadTypeError, DeviceMismatchError, expect_type, kind_of
from rlstruct.rl_agent import RL_Agent

Model = TypeVar("Model", bound=nn.Module)

ANY_NUMBER: Final = "…"
"""Beginning of the outputs of a network that may return any number of others."""


class ModelAgent(RL_Agent, Generic[Model]):
    """Base of agents that own one torch module.

    Args:
        model: the network.
        device: device of the agent; by default that of the model.
        stochastic: sample actions; False takes the most probable one, for evaluation. It cannot change later, because
            no step may depend on a Python value. To have both, create two agents or two batchers.
        copy_model: act with a copy of the model, while training changes the original. False shares the module, which a
            learner needs: gradients then reach ``model`` itself.

    Raises:
        TypeError: the model is not a torch.nn.Module.
        DeviceMismatchError: the model is shared and not on ``device``.

    Attributes:
        model: the agent's own module, or the shared one.
        device: device of state, observations and actions.
        stochastic: True if actions are sampled.
    """

    stochastic: Final[bool]
    _outputs: ClassVar[tuple[str, ...]] = ()  # what the network's forward returns

    def __init__(
        self, model: Model, *, device: DeviceLike | None = None, stochastic: bool = True, copy_model: bool = True
    ) -> None:
        name = type(self).__name__
        expect_type(f"{name}: model is", model, nn.Module, "a torch.nn.Module", "Create the network, and pass it.")
        its_device = module_device(model)
        self.device = its_device if device is None else resolve_device(device)
        if not copy_model and its_device != self.device:
            raise DeviceMismatchError(
                f"{name}: the model is on {its_device}, expected {self.device}, and the agent shares "
                f"it. Move it with .to({str(self.device)!r}) first, or let the agent copy it: copy_model=True."
            )
        self.model: Model = copy.deepcopy(model).to(self.device) if copy_model else model
        self.stochastic = stochastic

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Load new weights; see `RL_Agent.update`."""
        self.model.load_state_dict(info)


def expect_outputs(agent: ModelAgent[Any], outputs: Any) -> Any:  # noqa: ANN401 - a tensor, or several
    """Return the outputs of an agent's network, a tensor or a tuple.

    Raise TypeError unless they are as many as the agent needs.
    """
    expected = agent._outputs
    if isinstance(outputs, Tensor) if len(expected) == 1 else type(outputs) is tuple and len(outputs) == len(expected):
        return outputs
    several = _as_tuple(outputs)
    if len(several) == len(expected) > 1 or (several and expected[0] == ANY_NUMBER):
        return several
    bundled = next(base.__name__ for base in type(agent).__mro__ if base.__module__.startswith("rlstruct."))
    got = f"{len(several)} value{'s'[len(several) == 1 :]}" if several else kind_of(outputs)
    wanted = f"({', '.join(expected)})" if len(expected) > 1 else expected[0]
    raise BadTypeError(
        f"{type(agent).__name__}: {type(agent.model).__name__}.forward returned {got}, expected {wanted}. "
        f"help({bundled}) names a network that returns it."
    )


def _as_tuple(outputs: object) -> tuple[Any, ...]:
    """Return the values of a tuple, a generator or another iterable; none if they have names, or are one tensor."""
    if not isinstance(outputs, Iterable) or isinstance(outputs, Tensor | Mapping | DictTensor):
        return ()
    return tuple(outputs)


def module_device(model: nn.Module) -> torch.device:
    """Return the device of a module's first parameter, the CPU if it has none."""
    first = next(model.parameters(), None)
    return resolve_device("cpu" if first is None else first.device)
