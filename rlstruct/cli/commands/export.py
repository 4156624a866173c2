"""`rlstruct export`: a trained policy as a file that needs no rlstruct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rlstruct.cli.messages import UserError, check_output, require, say
from rlstruct.cli.stored_run import factory_hint, undescribed
from rlstruct.errors import BadTypeError, BadValueError, MissingFileError, UsageError
from rlstruct.policies import export, load


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export the policy of a run, and compare each file with the policy.

    Attributes:
        run: run folder, or a checkpoint.
        onnx: also write policy.onnx.
        out: output folder; None for the run folder.
        factory: for a run of your own program whose checkpoint does not describe network and agent: its create_env,
            create_model and create_agent, each as module:function.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    onnx: tyro.conf.FlagCreatePairsOff[bool] = False
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    factory: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAMES")] = ()


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct export`` with these arguments."""
    options: Export = tyro.cli(Export, args=arguments, prog="rlstruct export")
    if options.onnx:
        require("onnx", "onnx", "onnxscript", "onnxruntime", what="--onnx")
    folder = options.out or (options.run if options.run.is_dir() else options.run.parent)
    if options.run.exists():  # otherwise `load` says what is missing
        check_output("--out", folder, folder=True)
    try:
        policy = load(options.run, **undescribed(options.run, options.factory))
        for name in ("policy.pt2", *(["policy.onnx"] if options.onnx else [])):
            difference = export(policy, folder / name)
            say(f"{folder / name}: checked against the policy, largest difference {difference:.2g}")
    except (BadTypeError, BadValueError, MissingFileError, UsageError) as error:
        raise UserError(str(error).partition(": ")[2] + factory_hint(error)) from None
