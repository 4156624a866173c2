"""Trained policies outside of trainings: load them, act with them, export them."""

from rlstruct.policies.blueprint import KeepsArguments
from rlstruct.policies.exporting import export
from rlstruct.policies.loading import load
from rlstruct.policies.policy import Policy

__all__ = ["KeepsArguments", "Policy", "export", "load"]
