"""Policies from run folders and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlstruct.core import TensorSpec
from rlstruct.device import DeviceLike
from rlstruct.errors import BadTypeError, BadValueError, MissingFileError
from rlstruct.policies.blueprint import build, describe, describe_network
from rlstruct.policies.policy import Policy
from rlstruct.rl_agent import RL_Agent

if TYPE_CHECKING:
    import gymnasium

    from rlstruct.spaces import ActionIndices


def description(
    agent: RL_Agent,
    model: nn.Module,
    shown: Mapping[str, TensorSpec] | None,
    actions: ActionIndices | None,
    *,
    stochastic: bool,
) -> dict[str, Any]:
    """Return the description of a policy in a checkpoint, as plain values for `load`.

    ``shown`` are the specs of one environment's frames, None before the first batch. ``actions`` is that of a `Policy`.
    ``stochastic`` is True if evaluations sample actions.
    """
    return {
        "model": _described(describe_network, model),
        "agent": _described(describe, agent.creator()),
        "observation": {key: [list(s.shape), str(s.dtype).removeprefix("torch.")] for key, s in (shown or {}).items()},
        "actions": None if actions is None else actions.plain(),
        "stochastic": stochastic,
    }


def _described(how: Callable[[Any], Any], part: object) -> dict[str, Any]:
    try:
        return {"made": how(part)}
    except BadTypeError as error:  # its text is the name of the part that cannot be described
        return {"foreign": str(error)}


def shown_by(stored: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the specs of one environment's frames, out of the specs of a batch."""
    return {
        key.removeprefix("observation/"): spec for key, spec in stored.items() if key.startswith("observation/frame")
    }


def load(
    run: str | Path,
    *,
    device: DeviceLike = "cpu",
    stochastic: bool | None = None,
    seed: int = 0,
    create_model: Callable[[], nn.Module] | None = None,
    create_agent: Callable[..., RL_Agent] | None = None,
    observation_space: gymnasium.Space[Any] | None = None,
) -> Policy:
    """Load a trained policy that acts without a batcher, an environment or another package.

    Args:
        run: a run folder, for its last checkpoint, or a checkpoint.
        device: device of the policy.
        stochastic: sample actions, or take the best one; None for the setting of the training's evaluations.
        seed: seed of the sampling.
        create_model: returns the network, as in the training. Needed unless the network consists of classes of
            `rlstruct.agents` and ``torch.nn``, because a checkpoint is data and never runs other code.
        create_agent: the training's factory of agents. Needed unless the agent is one of rlstruct's.
        observation_space: space of one environment, for checkpoints that do not contain it.

    Returns:
        The policy, at the start of an episode.

    Raises:
        FileNotFoundError: ``run`` is neither a run folder nor a checkpoint.
        ValueError: the file is damaged, it does not describe network and agent, or its weights do not fit the result of
            ``create_model``.
        TypeError: ``create_model`` returned no network.
    """
    file = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
    if not file.exists():
        raise MissingFileError(
            f"rlstruct.load: there is no {file}, expected a run folder with a checkpoint. A run writes checkpoint.pt "
            "after its first evaluation."
        )
    fix = "Pass a run folder, or a checkpoint that a training wrote."
    state = read_plain(file, ("model",), fix, where="rlstruct.load: ", mmap=True)
    known = state.get("policy") or {}
    model = create_model() if create_model is not None else _made(known, "model", file)
    if not isinstance(model, nn.Module):
        raise BadTypeError(
            f"rlstruct.load: create_model returned {type(model).__name__}, expected a torch.nn.Module. Does it lack a "
            "return?"
        )
    create = create_agent if create_agent is not None else _made(known, "agent", file)
    load_weights(model, state["model"], f"rlstruct.load: {file} does not fit what create_model makes")
    stochastic = bool(known.get("stochastic", True)) if stochastic is None else stochastic
    specs = _specs(known, observation_space, file)
    actions = _actions(known)
    return Policy(model, create, specs, device=device, stochastic=stochastic, seed=seed, actions=actions)


def load_weights(model: nn.Module, weights: Mapping[str, Any], unfit: str) -> None:
    """Load weights into a network.

    Raises:
        ValueError: they do not fit. The message begins with ``unfit`` and names the first part that has another size.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        made = model.state_dict()
        wrong = [
            f"{name} is {list(made[name].shape)}, expected {list(weight.shape)}. "
            for name, weight in weights.items()
            if isinstance(weight, torch.Tensor) and name in made and weight.shape != made[name].shape
        ]
        sizes = f"{wrong[0]}Make the network with the sizes that the training used. " if wrong else ""
        raise BadValueError(f"{unfit}: {sizes}torch says: {' '.join(str(error).split())}") from None


def read_plain(file: Path, needed: Sequence[str], fix: str, *, where: str = "", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint, with its tensors on the CPU and without running any code in it.

    Args:
        file: the file.
        needed: names that it must contain.
        fix: last sentence of the message of an error.
        where: beginning of that message.
        mmap: map the file into memory, so that tensors that are not used, such as a replay buffer, are not read.

    Raises:
        ValueError: the file is damaged, or is not a checkpoint.
    """
    try:
        state = torch.load(file, weights_only=True, map_location="cpu", mmap=mmap)
    except PermissionError:
        raise
    except Exception:  # torch.load fails in many ways on a damaged file
        raise BadValueError(
            f"{where}{file} is not a checkpoint of a training, or is damaged: torch cannot read it as plain data. {fix}"
        ) from None  # a traceback would first print torch's advice to run the code in the file
    names = sorted(map(str, state)) if isinstance(state, dict) else []
    if missing := [name for name in needed if name not in names]:
        found = names if isinstance(state, dict) else type(state).__name__
        raise BadValueError(
            f"{where}{file} is not a checkpoint of a training: it has {found}, without {', '.join(missing)}. {fix}"
        )
    return dict(state)


def _made(known: Mapping[str, Any], what: str, file: Path) -> Any:  # noqa: ANN401 - a network or a factory
    """Create the network, or the factory of agents, that a checkpoint describes."""
    found = known.get(what, {"foreign": ""})
    if "made" in found:
        return build(found["made"])
    which = "network" if what == "model" else "agent"
    why = f"the {which} is {found['foreign']}" if found["foreign"] else f"it does not say which {which} it has"
    raise BadValueError(
        f"rlstruct.load: {file} cannot be loaded by itself: {why}, and only classes of rlstruct and torch.nn are made "
        f"from a file. Pass create_{what}=…, as in the training."
    )


def _actions(known: Mapping[str, Any]) -> ActionIndices | None:
    """Return how the environment's actions are numbered, if they are not their own indices."""
    if known.get("actions") is None:  # also in checkpoints of version 0.4 and before
        return None
    from rlstruct.spaces import ActionIndices  # imported here: it brings gymnasium

    return ActionIndices.from_plain(known["actions"])


def _specs(known: Mapping[str, Any], space: gymnasium.Space[Any] | None, file: Path) -> dict[str, TensorSpec]:
    """Return the specs of one environment's frames."""
    if space is not None:
        from rlstruct.spaces import leaves  # imported here: it brings gymnasium

        found = leaves(space, "frame", where="rlstruct.load: observation_space")
        return {key: TensorSpec(leaf.shape, leaf.torch_dtype) for key, leaf in found.items()}
    if not known.get("observation"):
        raise BadValueError(
            f"rlstruct.load: {file} does not say what the environment shows: it was written before the first batch, or "
            "by an older version. Load a later checkpoint, or pass observation_space=…."
        )
    return {
        key: TensorSpec(tuple(shape), build({"dtype": dtype})) for key, (shape, dtype) in known["observation"].items()
    }
