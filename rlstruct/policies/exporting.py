"""Policies as files that need no rlstruct: torch.export and ONNX, each compared with the original."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlstruct.core import DictTensor, TensorSpec
from rlstruct.errors import BadValueError, MissingPackageError, UsageError, import_extra
from rlstruct.functional.q_learning import chosen_value
from rlstruct.options import writable
from rlstruct.policies.policy import SCORES, Policy
from rlstruct.rl_agent import RL_Agent

if TYPE_CHECKING:
    from rlstruct.spaces import ActionIndices, Bounds

Tensors = dict[str, Tensor]
Acting = Callable[[Tensors], Mapping[str, Tensor]]
_SIZES = (1, 2, 7, 32, 1)  # batch sizes to compare, in this order
_STEPS = 4  # steps per batch size, so that an agent's memory is filled
_ABSOLUTE, _RELATIVE = 1e-5, 1e-4  # differences that rounding explains, in float32


class ExportedPolicy(nn.Module):
    """A policy as one function of tensors that returns the best actions."""

    starts: Tensor | None

    def __init__(
        self,
        agent: RL_Agent,
        model: nn.Module,
        specs: Mapping[str, TensorSpec],
        bounds: Bounds,
        actions: ActionIndices | None = None,
    ) -> None:
        super().__init__()
        self.agent, self.model, self.specs, self.bounds, self.actions = agent, model, specs, bounds, actions
        self.register_buffer("starts", None if actions is None else actions.starts(torch.device("cpu")))

    def forward(self, inputs: Tensors) -> Tensors:
        """Act.

        Args:
            inputs: ``frame``, or each ``frame/…``; and for an agent with memory ``initial_state`` [B] bool, true
                where an episode begins, and each ``state/…``, zeros or the last ``new_state/…``.  [B, ...]

        Returns:
            ``action``, an element of the action space; the agent's other outputs; and each ``new_state/…``.  [B, ...]
        """
        state = {key.removeprefix("state/"): value for key, value in inputs.items() if key.startswith("state/")}
        observation = {key: value for key, value in inputs.items() if not key.startswith("state/")}
        action, after = self.agent(DictTensor(state), DictTensor(observation), DictTensor(), None)
        outputs = dict(action.items())
        if self.actions is not None and self.starts is not None:
            outputs["action"] = self.actions.elements(outputs["action"], self.starts)
        return {**outputs, **{f"new_state/{key}": after[key] for key in state}}  # torch 2.7 cannot trace |

    def index(self, action: Tensor) -> Tensor:
        """Turn actions into indices of the agent's scores.  [B, ...]."""
        if self.actions is None or self.starts is None:
            return action
        return self.actions.indices(action, self.starts)

    def sample(self, B: int, generator: torch.Generator) -> Tensors:
        """Sample observations [B, ...]: numbers of several magnitudes, both bools, integers within their bounds."""
        drawn: Tensors = {}
        for key, spec in self.specs.items():
            shape = (B, *spec.shape)
            if spec.dtype.is_floating_point:
                scale = 10.0 ** (2.0 * torch.rand(B, *[1] * len(spec.shape), generator=generator, device="cpu") - 1.0)
                drawn[key] = (torch.randn(shape, generator=generator, device="cpu") * scale).to(spec.dtype)
            else:
                known = self.bounds.get(key, (0, {torch.uint8: 255, torch.bool: 1}.get(spec.dtype, 9)))
                low, high = (torch.tensor(bound, dtype=torch.float64, device="cpu") for bound in known)
                low = low.clamp(min=-100.0).minimum(high)
                n = (high - low).clamp(max=255.0) + 1.0  # up to 256 numbers, near 0 if possible
                share = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
                drawn[key] = (low + (share * n).floor()).to(spec.dtype)
        return drawn

    def begin(self, B: int) -> Tensors:
        """Return the inputs ``initial_state`` and ``state/…`` at the start of B episodes; {} without memory."""
        state = dict(self.agent.initial_state(DictTensor(), B).items())
        first = {"initial_state": torch.ones(B, dtype=torch.bool, device="cpu")} if state else {}
        return first | {f"state/{key}": value for key, value in state.items()}


def exported(policy: Policy) -> ExportedPolicy:
    """Return a copy of a policy as one function of tensors, on the CPU.

    A `rlstruct.search.SearchAgent` is reduced to its network, without the search.
    """
    own = policy.copy("cpu")
    agent = own.agent(False)
    plain = agent.without_search() if hasattr(agent, "without_search") else agent
    return ExportedPolicy(plain, own.model, own.specs, own.bounds, own.actions)


def export(policy: Policy, file: str | Path) -> float:
    """Write a policy into a file that needs no rlstruct, and compare it with the original.

    Args:
        policy: see `rlstruct.load`.
        file: ends in ``.pt2``, which `torch.export.load` reads, or in ``.onnx``.

    Returns:
        The largest difference between the numbers that the file and the policy return for sampled observations.

    Raises:
        ValueError: the file has another ending.
        ImportError: ``.onnx`` needs the extra ``onnx``.
        RuntimeError: the agent cannot be traced, or the file's results differ from the policy's. It is then deleted.
    """
    file = Path(file)
    if file.suffix not in (".pt2", ".onnx"):
        raise BadValueError(f"export: {file} ends in {file.suffix!r}, expected .pt2 or .onnx.")
    writable("export", file, replaces=True)
    original = exported(policy)
    unfinished = file.with_name(f"{file.stem}.unfinished{file.suffix}")
    inputs = original.sample(3, torch.Generator(device="cpu").manual_seed(0)) | original.begin(3)
    try:
        with _quiet():
            try:
                rows = {key: {0: torch.export.Dim("batch", min=1)} for key in inputs}
                program = torch.export.export(original, (inputs,), dynamic_shapes=(rows,))
                if file.suffix == ".onnx":
                    again = _written_as_onnx(program, original, inputs, unfinished)
                else:
                    torch.export.save(program, unfinished)
                    again = torch.export.load(unfinished).module()
            except (MissingPackageError, OSError):
                raise
            except Exception as error:  # torch.export fails in many ways
                reason = " ".join(str(error).split())[:300]
                raise UsageError(
                    f"export: {type(original.agent).__name__} cannot be traced: {reason} Its __call__ may use nothing "
                    "but operations of torch on its arguments and weights, without branches on values and, as the "
                    "best action is taken, without observation['rng']."
                ) from error
            difference = _compared(original, again)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    return difference


def _compared(original: ExportedPolicy, again: Acting) -> float:
    """Return the result of `compare`; raise UsageError if the network has no row for a sampled integer."""
    try:
        return compare(original, again)
    except IndexError as error:
        raise UsageError(
            f"export: the network cannot read sampled observations, with integers from "
            f"{dict(original.bounds) or '0 to 9'}: {error}. Pass the space of the observations, which bounds them: "
            "rlstruct.Policy(model, create_agent, env.observation_space), or rlstruct.load(run, observation_space=…)."
        ) from error


def compare(original: ExportedPolicy, again: Acting) -> float:
    """Return the largest difference of the results for sampled observations, over several steps and batch sizes."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    largest = 0.0
    for B in _SIZES:
        state = original.begin(B)
        for _ in range(_STEPS):
            inputs = original.sample(B, generator) | state
            with torch.no_grad():
                expected, actual = original(inputs), again(inputs)
            largest = max(largest, *(_difference(original, key, expected, actual) for key in expected))
            begins = torch.rand(B, generator=generator, device="cpu") < 0.2
            state = {key: expected.get(f"new_{key}", begins) for key in state}
    return largest


def _difference(original: ExportedPolicy, key: str, expected: Tensors, actual: Mapping[str, Tensor]) -> float:
    """Return the largest difference under one key."""
    a, b = expected[key], actual[key]
    if a.shape != b.shape or a.dtype != b.dtype:
        got = f"{list(b.shape)} {b.dtype}"
        raise UsageError(f"export: {key!r} is {got} in the file, expected {list(a.shape)} {a.dtype}. It is not kept.")
    same = (a == b) | (a.isnan() & b.isnan())  # NaN where no action is legal
    apart = torch.where(same, 0.0, (a.double() - b.double()).abs())
    bound = _ABSOLUTE + _RELATIVE * torch.where(a.isfinite(), a.abs(), 0.0) if a.is_floating_point() else 0.0
    wrong = ~(apart <= bound)
    for name in SCORES if key == "action" else ():
        if name in expected:  # another action may have the same score up to rounding
            scores = expected[name]
            index = original.index(b).clamp(0, scores.shape[-1] - 1)  # beyond it where no action is possible
            chosen, best = chosen_value(scores, index), scores.amax(-1)
            equal = (best - chosen <= _ABSOLUTE + _RELATIVE * best.abs()) | (best == -torch.inf) | best.isnan()
            wrong &= ~equal.view_as(wrong)  # if all scores are -inf or NaN, no action is better than another
    if bool(wrong.any()):
        raise UsageError(
            f"export: {key!r} differs in {int(wrong.sum())} of {wrong.numel()} numbers, by up to "
            f"{float(apart.max()):.3g}, expected what the policy returns. The file is not kept."
        )
    return float(apart.max()) if a.is_floating_point() else 0.0


def _written_as_onnx(
    program: torch.export.ExportedProgram, original: ExportedPolicy, inputs: Tensors, file: Path
) -> Acting:
    """Write an ONNX file, and load it again."""
    for name in ("onnx", "onnxscript"):
        import_extra(name, "onnx", "export: an .onnx file")
    runtime = import_extra("onnxruntime", "onnx", "export: an .onnx file")
    with torch.no_grad():
        names = list(original(inputs))
    axes = ({key: {0: "batch"} for key in inputs},)
    named: dict[str, Any] = {"input_names": list(inputs), "output_names": names, "dynamic_shapes": axes}
    onnx: Any = torch.onnx.export(program, dynamo=True, verbose=False, **named)
    onnx.save(file)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(inputs: Tensors) -> Tensors:
        arrays = session.run(names, {key: value.numpy() for key, value in inputs.items()})  # sync: on the CPU
        # torch does not know numpy's second name of uint64, in which onnxruntime returns it.
        named = {name: array.view(array.dtype.str) for name, array in zip(names, arrays, strict=True)}
        return {name: torch.as_tensor(array, device="cpu") for name, array in named.items()}

    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about deprecated parts that it uses itself and about missing packages."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
