"""Policies from run folders and checkpoints."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlstruct.core import TensorSpec, Trajectories
from rlstruct.device import DeviceLike
from rlstruct.errors import BadTypeError, BadValueError, MissingFileError
from rlstruct.policies.blueprint import build, describe
from rlstruct.policies.comparison import differences, same_bits
from rlstruct.policies.policy import Policy
from rlstruct.rl_agent import RL_Agent, RL_Agent_CheckDevice

if TYPE_CHECKING:
    import gymnasium

    from rlstruct.spaces import ActionIndices, Bounds


_MOST_DIFFERENCES = 3  # shown in a message


def description(
    create_agent: Callable[..., RL_Agent],
    model: nn.Module,
    step: Trajectories | None,
    actions: ActionIndices | None,
    bounds: Bounds,
    *,
    stochastic: bool,
    agent_info: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return the description of a policy in a checkpoint, as plain values and tensors for `load`.

    Network and agent are rebuilt from their description and compared with the original: classes, attributes, hooks,
    weights and, on a real observation, what they return, bit by bit. If they cannot be rebuilt, or differ, the
    description says why instead, see `missing_factories`.

    Args:
        create_agent: the training's factory of agents.
        model: the network.
        step: the first step of an environment, on the network's device; None before the first batch.  [1, 1]
        actions: that of a `Policy`.
        bounds: that of a `Policy`.
        stochastic: True if evaluations sample actions.
        agent_info: that of a `Policy`.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        network, again = _rebuilt(lambda: describe_network(model))
        acting, _ = _rebuilt(lambda: _rebuilt_agent(create_agent, model, again, step))
    layouts = {} if step is None else shown_by(step.steps.specs())
    return {
        "model": network,
        "agent": acting,
        "observation": {key: [list(s.shape), str(s.dtype).removeprefix("torch.")] for key, s in layouts.items()},
        "bounds": {key: list(both) for key, both in bounds.items()},
        "actions": None if actions is None else actions.plain(),
        "stochastic": stochastic,
        "agent_info": dict(agent_info),
    }


def missing_factories(policy: Mapping[str, Any]) -> dict[str, str]:
    """Return why `load` needs ``create_model`` or ``create_agent`` for a `description`; {} if it needs neither.

    >>> missing_factories({"model": {"made": 1}, "agent": {"foreign": "mine.Agent"}})
    {'create_agent': 'the agent is mine.Agent'}
    """
    words = {"model": "network", "agent": "agent"}
    descriptions = {name: policy.get(name) or {"foreign": ""} for name in words}
    return {
        f"create_{name}": f"the {words[name]} is {part['foreign']}"
        if part["foreign"]
        else f"it does not say which {words[name]} it has"
        for name, part in descriptions.items()
        if "made" not in part
    }


def _rebuilt(rebuild: Callable[[], tuple[Any, Any]]) -> tuple[dict[str, Any], Any]:
    """Return the description of a network or an agent, and what was rebuilt from it; or the reason, and None."""
    try:
        plain, again = rebuild()
    except Exception as error:  # whatever prevents it must not prevent a checkpoint; the training warns
        return {"foreign": " ".join(str(error).split()) or type(error).__name__}, None
    return {"made": plain}, again


def describe_network(model: nn.Module) -> tuple[Any, nn.Module]:
    """Describe a network, and rebuild it from the description; raise if the two differ, except for their mode."""
    plain = describe(model)
    again = _built(json.dumps(plain), _device_of(model), torch.get_default_dtype())
    made, weights = again.state_dict(), model.state_dict()
    fitting = {name: weight for name, weight in weights.items() if name in made and made[name].shape == weight.shape}
    again.load_state_dict({name: one for name, one in fitting.items() if made[name].dtype == one.dtype}, strict=False)
    _refuse(model, differences(again, model))
    return plain, again.eval()


@functools.lru_cache(maxsize=1)  # orthogonal weights take a second, and a training saves often
def _built(plain: str, device: torch.device, default: torch.dtype) -> nn.Module:
    """Build a network; ``default`` is torch's default dtype, on which the result depends."""
    network: nn.Module = build(json.loads(plain)).to(device)
    return network


def _rebuilt_agent(
    create_agent: Callable[..., RL_Agent], model: nn.Module, again: nn.Module | None, step: Trajectories | None
) -> tuple[Any, RL_Agent]:
    """Describe an agent, and rebuild it around the rebuilt network, or around the original if there is none."""
    arguments = {"device": _device_of(model), "stochastic": True, "copy_model": False}
    agent = create_agent(model, **arguments)
    while isinstance(agent, RL_Agent_CheckDevice):
        agent = agent.agent
    plain = describe(agent.creator())
    made: RL_Agent = build(plain)(model if again is None else again, **arguments)
    _refuse(agent, differences(made, agent))
    if again is not None and step is not None:
        acting = agent if agent.pure else agent.creator()(model, **arguments)  # a compiled search rounds differently
        with torch.no_grad(), _evaluating(model):
            expected, actual = (one.call_replay(step, 0, None)[0] for one in (acting, made))
        wrong = (key for key in expected.keys() if not same_bits(actual[key], expected[key]))
        _refuse(agent, (f"{key} differs for the same observation" for key in wrong))
    return plain, made


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))


def _refuse(part: object, differing: Iterator[str]) -> None:
    if text := ", ".join(islice(differing, _MOST_DIFFERENCES)):
        raise BadTypeError(f"{_name(part)}, which was changed after it was made: {text}")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into eval mode for a while."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _name(part: object) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


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
    agent_info: Mapping[str, Tensor | float] | None = None,
    create_model: Callable[[], nn.Module] | None = None,
    create_agent: Callable[..., RL_Agent] | None = None,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
) -> Policy:
    """Load a trained policy that acts without a batcher, an environment or another package.

    Args:
        run: a run folder, for its last checkpoint, or a checkpoint.
        device: device of the policy.
        stochastic: sample actions, or take the best one; None for the setting of the training's evaluations.
        seed: seed of the sampling.
        agent_info: see `Policy`; None for the settings at the end of the training, such as DQN's ``final_epsilon``.
        create_model: returns the network, as in the training. Needed unless the network consists of unchanged
            classes of `rlstruct.agents` and ``torch.nn``, because a checkpoint is data and never runs other code.
        create_agent: the training's factory of agents. Needed unless the agent is an unchanged one of rlstruct's.
        observation_space: space of one environment, for checkpoints of older versions, which lack shapes and dtypes or
            the bounds of integers; `rlstruct.export` needs the latter.
        action_space: actions of one environment, for checkpoints without a description of the policy, whose agent
            returns indices that are not elements of the space: actions that begin with another number than 0, or that
            are several choices at once. Without it, `Policy.act` returns the indices.

    Returns:
        The policy, at the start of an episode.

    Raises:
        FileNotFoundError: ``run`` is neither a run folder nor a checkpoint.
        ValueError: the file is damaged, it does not describe network and agent, or its weights do not fit the result of
            ``create_model``.
        TypeError: ``create_model`` is a network instead of a function, or returned no network.
    """
    file = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
    if not file.exists():
        raise MissingFileError(
            f"rlstruct.load: there is no {file}, expected a run folder with a checkpoint. A run writes checkpoint.pt "
            "after its first evaluation."
        )
    fix = "Pass a run folder, or a checkpoint that a training wrote; one of your own holds the weights as 'model'."
    state = read_plain(file, ("model",), fix, where="rlstruct.load: ", mmap=True)
    description = state.get("policy") or {}
    if isinstance(create_model, nn.Module):
        name = type(create_model).__name__
        raise BadTypeError(
            f"rlstruct.load: create_model is a network, {name}, expected a function that creates one. Pass "
            f"lambda: {name}(…), or lambda: model to load the weights into this one."
        )
    model = create_model() if create_model is not None else _made(description, "model", file)
    if not isinstance(model, nn.Module):
        raise BadTypeError(
            f"rlstruct.load: create_model returned {type(model).__name__}, expected a torch.nn.Module. Does it lack a "
            "return?"
        )
    create = create_agent if create_agent is not None else _made(description, "agent", file)
    load_weights(model, state["model"], f"rlstruct.load: {file} does not fit what create_model makes")
    stochastic = bool(description.get("stochastic", True)) if stochastic is None else stochastic
    settings: dict[str, Any] = {
        "device": device,
        "stochastic": stochastic,
        "seed": seed,
        "actions": _actions(description) if action_space is None else action_space,
    }
    settings["agent_info"] = agent_info or description.get("agent_info")
    settings["bounds"] = {key: (low, high) for key, (low, high) in description.get("bounds", {}).items()}
    shown = _specs(description, file) if observation_space is None else observation_space
    return Policy(model, create, shown, **settings)


def load_weights(model: nn.Module, weights: Mapping[str, Any], unfit: str) -> None:
    """Load weights into a network.

    Raises:
        ValueError: they do not fit. The message begins with ``unfit`` and names the first part that has another size
            or dtype.
    """
    for name, tensor in model.state_dict().items():
        stored = weights.get(name)
        if isinstance(stored, Tensor) and stored.dtype != tensor.dtype:  # torch would round in silence
            raise BadValueError(
                f"{unfit}: {name} is {tensor.dtype}, expected {stored.dtype}. Make the network with that dtype: call "
                f"torch.set_default_dtype or Module.to as the training did."
            )
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
        contents = names if isinstance(state, dict) else type(state).__name__
        raise BadValueError(
            f"{where}{file} is not a checkpoint of a training: it has {contents}, without {', '.join(missing)}. {fix}"
        )
    return dict(state)


def _made(description: Mapping[str, Any], what: str, file: Path) -> Any:  # noqa: ANN401 - a network or a factory
    """Create the network, or the factory of agents, that a checkpoint describes."""
    if (why := missing_factories(description).get(f"create_{what}")) is None:
        return build(description[what]["made"])
    raise BadValueError(
        f"rlstruct.load: {file} cannot be loaded by itself: {why}, and only unchanged classes of rlstruct and torch.nn "
        f"are made from a file. Pass create_{what}=…, as in the training."
    )


def _actions(description: Mapping[str, Any]) -> ActionIndices | None:
    """Return how the environment's actions are numbered, if they are not their own indices."""
    if description.get("actions") is None:  # also in checkpoints of version 0.4 and before
        return None
    from rlstruct.spaces import ActionIndices  # imported here: it brings gymnasium

    return ActionIndices.from_plain(description["actions"])


def _specs(description: Mapping[str, Any], file: Path) -> dict[str, TensorSpec]:
    """Return the specs of one environment's frames."""
    if not description.get("observation"):
        raise BadValueError(
            f"rlstruct.load: {file} does not say what the environment shows: it was written before the first batch, or "
            "by an older version. Load a later checkpoint, or pass observation_space=…."
        )
    return {
        key: TensorSpec(tuple(shape), build({"dtype": dtype}))
        for key, (shape, dtype) in description["observation"].items()
    }
